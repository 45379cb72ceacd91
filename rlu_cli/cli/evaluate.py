"""``rlu evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlu_cli.audit.options import ModelOptions, RunOptions, TrainingOptions
from rlu_cli.cli.options import AuxPath, OutputOptions, StatsPath, with_options
from rlu_cli.errors import FileError, MismatchError, UsageError

if TYPE_CHECKING:
    from rlu_cli.core.types import IntArray

Recovered = tuple[str, "IntArray", Sequence[dict[str, str]]]


@with_options(model=ModelOptions, training=TrainingOptions, run=RunOptions, out=OutputOptions)
def evaluate(
    *,
    truth: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help='What the client trained on: {"counts": […]}, {"labels": […]} or {"steps": [[…], …]}.',
        ),
    ],
    result: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A saved result of recover, instead of a round.")
    ] = None,
    global_: Annotated[
        Path | None,
        typer.Option("--global", metavar="FILE", help="Checkpoint that the server sent out."),
    ] = None,
    local: Annotated[
        Path | None,
        typer.Option("--local", metavar="FILE", help="Checkpoint that the client sent back."),
    ] = None,
    aux: AuxPath = None,
    stats: StatsPath = None,
    method: Annotated[list[str] | None, typer.Option(help="auto, rlu or random; may be repeated.")] = None,
    model: ModelOptions,
    training: TrainingOptions,
    run: RunOptions,
    out: OutputOptions,
) -> None:
    """Score recovered counts against the truth.

    rlu evaluate --global g.safetensors --local k.safetensors --aux ./aux --truth labels.json
    rlu evaluate --result recovered.json --truth labels.json

    cAcc and iAcc are the paper's; the share of exact counts, the total variation and a uniform guess's
    scores stand beside them, since iAcc alone flatters.
    """
    from rlu_cli.audit.report import dumps, evaluation_document
    from rlu_cli.cli.console import Terminal, evaluation_table
    from rlu_cli.cli.output import open_output
    from rlu_cli.files.truth import read_truth

    terminal = Terminal(quiet=out.quiet, verbose=out.verbose)
    with open_output(out.output) as write:
        if result is not None:
            if global_ or local or stats or method:
                raise UsageError(
                    "expected either --result or a round (--global, --local), found both: leave one out"
                )
            client, names, recovered = _saved_result(result)
        elif global_ is not None and local is not None:
            client = local.stem
            names, recovered = _recovered_round(
                global_, local, aux, stats, model, training, run, method or ["auto"], terminal
            )
        else:
            raise UsageError(
                "expected what to score, found nothing: pass --global and --local with --aux, or --result"
            )
        known = read_truth(truth, num_classes=len(names), class_names=names, client=client)
        claimed = {int(counts.sum()) for _, counts, _ in recovered}
        if claimed != {int(known.sum())}:
            raise MismatchError(
                f"expected a truth of {', '.join(map(str, sorted(claimed)))} samples, as recovered, found "
                f"{int(known.sum())} in {truth}: it is of another client, or --steps, --batch-size or "
                "--dataset-size is wrong"
            )
        document = evaluation_document(known, recovered, names)
        evaluation_table(terminal, document)
        for entry in document["results"]:
            terminal.warn(entry["warnings"])
        write(dumps(document, indent=2))


def _recovered_round(
    reference: Path,
    local: Path,
    aux: Path | None,
    stats: Path | None,
    model: ModelOptions,
    training: TrainingOptions,
    run: RunOptions,
    methods: Sequence[str],
    terminal: Any,
) -> tuple[Sequence[str], list[Recovered]]:
    """Class names, and what each method recovers of the round."""
    from rlu_cli.audit.report import warning_list
    from rlu_cli.cli.session import open_round

    auditor, checkpoints = open_round(
        reference, [local], aux=aux, stats=stats, model=model, run=run, reporter=terminal.reporter
    )
    client = auditor.recover(next(checkpoints), training, methods)
    return auditor.names, [
        (found.method, found.counts, warning_list((*auditor.notes, *found.warnings)))
        for found in client.recoveries
    ]


def _saved_result(path: Path) -> tuple[str, Sequence[str], list[Recovered]]:
    """Client, class names and counts of a document that `recover` printed."""
    import numpy as np

    from rlu_cli.files.json_io import read_json

    document = read_json(path, limit=256 * 2**20)
    try:
        counts = [int(count) for count in document["counts"]]
        names = [str(entry["name"]) for entry in document["classes"]]
        client = Path(document["inputs"]["local"]["path"]).stem
        method, warnings = str(document["method"]), list(document["warnings"])
        valid = document["command"] == "recover" and len(names) == len(counts) and min(counts) >= 0
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise FileError(
            f"{path}: expected one JSON object as `rlu recover` prints it, found another document"
        )
    return client, names, [(method, np.array(counts, dtype=np.int64), warnings)]
