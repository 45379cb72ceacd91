"""``rlu recover``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlu_cli.audit.options import (
    AuxOptions,
    HistoryOptions,
    LogitsOptions,
    ModelOptions,
    RunOptions,
    TrainingOptions,
)
from rlu_cli.cli.options import AuxPath, GlobalPath, LocalPaths, OutputOptions, StatsPath, with_options
from rlu_cli.core.method_names import METHOD_CHOICE
from rlu_cli.errors import UnreliableError


@with_options(
    images=AuxOptions,
    logits=LogitsOptions,
    model=ModelOptions,
    training=TrainingOptions,
    history=HistoryOptions,
    run=RunOptions,
    out=OutputOptions,
)
def recover(
    *,
    global_: GlobalPath,
    local: LocalPaths,
    aux: AuxPath = None,
    stats: StatsPath = None,
    images: AuxOptions,
    logits: LogitsOptions,
    method: Annotated[str, typer.Option(metavar="NAME", help=f"{METHOD_CHOICE}.")] = "auto",
    model: ModelOptions,
    training: TrainingOptions,
    history: HistoryOptions,
    run: RunOptions,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 5 if the reliability of any client's counts is poor.")
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Recover again with lr, steps and batch size 10 % off, and say how far the counts move.",
        ),
    ] = False,
    out: OutputOptions,
) -> None:
    """Recover how many samples of each class a client trained on.

    rlu recover --global g.safetensors --local k.safetensors --aux ./aux

    Prints one JSON object; with several --local, one a line. What the checkpoints' metadata (fl.lr,
    fl.batch_size, fl.steps, …) or a round.json beside the local one say need not be said again.
    """
    from rlu_cli.audit.auditor import Auditor
    from rlu_cli.audit.report import dumps, recovery_document, warning_list
    from rlu_cli.audit.sensitivity import client_sensitivity
    from rlu_cli.cli.console import Terminal, recovery_table
    from rlu_cli.cli.output import open_output

    terminal = Terminal(quiet=out.quiet, verbose=out.verbose)
    failed: set[str] = set()
    with open_output(out.output) as write:
        auditor = Auditor(
            global_,
            local,
            aux=aux,
            aux_options=images,
            stats=stats,
            logits=logits,
            model=model,
            run=run,
            reporter=terminal.reporter,
        )
        auditor.refuse_ignored(local, training, history)
        for client in auditor.recover_each(local, training, [method], history):
            found = client.recoveries[0]
            moved = client_sensitivity(client.observations[0], found) if sensitivity else None
            document = recovery_document(auditor, client, found, moved)
            recovery_table(terminal, document)
            shared = warning_list(auditor.notes)
            own = [warning for warning in document["warnings"] if warning not in shared]
            terminal.warn(shared)
            terminal.warn(own, about=str(client.path) if len(local) > 1 else None)
            write(dumps(document, indent=2 if len(local) == 1 else None))
            if document["reliability"]["grade"] == "poor":
                failed |= set(document["reliability"]["reasons"])
    if strict and failed:
        raise UnreliableError(
            f"the counts are unreliable ({', '.join(sorted(failed))}), and --strict asks to fail then: "
            "correct what the warnings name, try another --method, or leave out --strict"
        )
