"""The commands put together, and errors turned into one line and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rlu_cli.cli.estimate_logits import estimate_logits
from rlu_cli.cli.evaluate import evaluate
from rlu_cli.cli.inspect import inspect
from rlu_cli.cli.options import show_version
from rlu_cli.cli.recover import recover
from rlu_cli.cli.simulate import simulate
from rlu_cli.errors import ExitCode, RluError
from rlu_cli.interrupts import raise_if_heard

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; it exports only this subclass."""

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
    ("simulate", simulate),
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

    stated = [argument for argument in arguments if argument.startswith(("-v", "--verb"))]
    tracebacks = len(stated) > 1 or any(argument.startswith("-vv") for argument in stated)
    try:
        code = app(args=list(arguments), prog_name="rlu", standalone_mode=False)
        return code if isinstance(code, int) else int(ExitCode.OK)
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):
            return int(ExitCode.OK)  # the reader has left (| head): typer ends with 1, yet nothing failed
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except _UsageError as error:
        if type(error).show is not _UsageError.show:  # type: ignore[attr-defined]
            error.show()  # type: ignore[attr-defined]  # no arguments at all: the help
        else:
            print_error(_usage_message(error))
        return int(ExitCode.USAGE)
    except Exception as error:  # noqa: BLE001  (the last resort: a fault of ours, said plainly)
        raise_if_heard()
        _traceback(tracebacks)
        if isinstance(error, RluError):
            print_error(str(error))
            return int(error.exit_code)
        if isinstance(error, OSError) and error.filename is not None:  # what the system refused is no fault
            reason = f"can't be used ({error.strerror}); check the path, its permissions and free space"
            print_error(f"{str(error.filename)[:200]}: {reason}")
            return int(ExitCode.FILE)
        print_error(
            f"this is a fault of rlu, not of your input: {type(error).__name__}: {error}. "
            "Run again with -vv and report what it prints"
        )
        return int(ExitCode.BUG)


def _usage_message(error: Any) -> str:
    """What typer says is wrong with the command line, in one line, and where its help is."""
    command = error.ctx.command_path if error.ctx is not None else "rlu"
    message = error.format_message().strip().removesuffix(".")
    return f"{message}{' See' if message.endswith('?') else '; see'} {command} --help"


def _traceback(wanted: bool) -> None:
    if wanted:
        import traceback

        traceback.print_exc()
