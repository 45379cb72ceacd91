"""The commands put together, and errors turned into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rlu_cli.cli.estimate_logits import estimate_logits
from rlu_cli.cli.evaluate import evaluate
from rlu_cli.cli.inspect import inspect
from rlu_cli.cli.options import show_version
from rlu_cli.cli.recover import recover
from rlu_cli.errors import ExitCode, RluError

app = typer.Typer(
    name="rlu",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich would double the time it takes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _name, _command in (
    ("estimate-logits", estimate_logits),
    ("recover", recover),
    ("evaluate", evaluate),
    ("inspect", inspect),
):
    app.command(_name, no_args_is_help=True)(_command)


@app.callback()
def rlu(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=show_version),
    ] = False,
) -> None:
    """Audit federated-learning rounds: recover how many samples of each class a client trained on.

    rlu recover --global g.safetensors --local k.safetensors --aux ./aux
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; no exception leaves it but Ctrl-C."""
    from rlu_cli.cli.console import print_error

    tracebacks = "-vv" in arguments or arguments.count("-v") + arguments.count("--verbose") > 1
    try:
        app(args=list(arguments), prog_name="rlu", standalone_mode=True)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except RluError as error:
        _traceback(tracebacks)
        print_error(str(error))
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader has left; so do we, without Python's complaint about an unflushed stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except Exception as error:  # noqa: BLE001  (the last resort: a fault of ours, said plainly)
        _traceback(tracebacks)
        print_error(
            f"this is a fault of rlu, not of your input: {type(error).__name__}: {error}. "
            "Run again with -vv and report what it prints"
        )
        return int(ExitCode.BUG)
    return int(ExitCode.OK)


def _traceback(wanted: bool) -> None:
    if wanted:
        import traceback

        traceback.print_exc()
