"""``rlu evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlu_cli.audit.options import (
    AuxOptions,
    HistoryOptions,
    LogitsOptions,
    ModelOptions,
    RunOptions,
    TrainingOptions,
)
from rlu_cli.cli.options import AuxPath, OutputOptions, StatsPath, given, with_options
from rlu_cli.core.method_names import METHOD_CHOICE
from rlu_cli.errors import FileError, MismatchError, UsageError

if TYPE_CHECKING:
    from rlu_cli.cli.console import Terminal
    from rlu_cli.core.types import IntArray

Recovered = tuple[str, "IntArray", Sequence[dict[str, str]]]


@with_options(
    images=AuxOptions,
    logits=LogitsOptions,
    model=ModelOptions,
    training=TrainingOptions,
    history=HistoryOptions,
    run=RunOptions,
    out=OutputOptions,
)
def evaluate(
    *,
    truth: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='What the client trained on: {"counts": […]}, {"labels": […]} or {"steps": [[…], …]}.',
        ),
    ] = None,
    result: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A saved result of recover, instead of a round.")
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A whole archive with its truth, as simulate writes it."),
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
    method: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{METHOD_CHOICE}; may be repeated.")
    ] = None,
    images: AuxOptions,
    logits: LogitsOptions,
    model: ModelOptions,
    training: TrainingOptions,
    history: HistoryOptions,
    run: RunOptions,
    out: OutputOptions,
) -> None:
    """Score recovered counts against the truth.

    \b
    rlu evaluate --global g.safetensors --local k.safetensors --aux ./aux --truth labels.json
    rlu evaluate --result recovered.json --truth labels.json
    rlu evaluate --archive ./archive

    cAcc and iAcc are the paper's; the share of exact counts, the total variation and a uniform guess's
    scores stand beside them, since iAcc alone flatters.
    """
    from rlu_cli.audit.auditor import Auditor
    from rlu_cli.audit.report import client_warnings, dumps
    from rlu_cli.cli.console import Terminal
    from rlu_cli.cli.output import open_output

    terminal = Terminal(quiet=out.quiet, verbose=out.verbose)
    methods = method or ["auto"]
    form = _form(archive=archive, result=result, reference=global_, local=local)
    if form == "archive":
        _refuse("--archive", given(logits, history), truth=truth, stats=stats)
    elif truth is None:
        raise UsageError("expected what the client trained on, found nothing: pass --truth FILE")
    with open_output(out.output) as write:
        if archive is not None:
            document = _evaluate_archive(archive, methods, aux, images, model, training, run, terminal)
        elif result is not None:
            ignored = given(images, logits, model, training, history, run)
            _refuse("--result", ignored, aux=aux, stats=stats, method=method)
            document = _evaluate_counts(*_saved_result(result), truth, terminal)
        else:
            assert global_ is not None and local is not None
            auditor = Auditor(
                global_,
                [local],
                aux=aux,
                aux_options=images,
                stats=stats,
                logits=logits,
                model=model,
                run=run,
                reporter=terminal.reporter,
            )
            auditor.refuse_ignored([local], training, history)
            client = auditor.recover(local, training, methods, history)
            recovered = [
                (found.method, found.counts, client_warnings(auditor, client, found))
                for found in client.recoveries
            ]
            document = _evaluate_counts(local, auditor.names, recovered, truth, terminal)
        write(dumps(document, indent=2))


def _form(*, archive: Path | None, result: Path | None, reference: Path | None, local: Path | None) -> str:
    """Which of the three ways of asking this is.

    Raises
    ------
    UsageError
        None of them, or more than one.
    """
    given = {"archive": archive, "result": result, "round": reference or local}
    forms = [name for name, value in given.items() if value is not None]
    if len(forms) != 1 or (forms == ["round"] and (reference is None or local is None)):
        found = "nothing of the kind" if not forms else f"--{' and --'.join(forms)}"
        if "round" in forms:
            found = "not exactly one of these"
        raise UsageError(
            "expected what to score: --global and --local with --aux, or --result, or --archive; found "
            f"{found}"
        )
    return forms[0]


def _refuse(form: str, flags: Sequence[str], **options: object) -> None:
    """Refuse options that the chosen form would ignore."""
    flags = [*(f"--{name}" for name, value in options.items() if value is not None), *flags]
    if flags:
        raise UsageError(
            f"expected no {', '.join(flags)} with {form}, which says it all itself: leave "
            f"{'it' if len(flags) == 1 else 'them'} out"
        )


def _evaluate_counts(
    local: Path,
    names: Sequence[str],
    recovered: Sequence[Recovered],
    truth: Path | None,
    terminal: Terminal,
) -> dict[str, Any]:
    """Score counts against a truth file.

    Raises
    ------
    MismatchError
        The truth has another total, or is another client's by its name.
    """
    from rlu_cli.audit.report import evaluation_document
    from rlu_cli.cli.console import evaluation_table
    from rlu_cli.files.truth import read_truth

    assert truth is not None
    known = read_truth(truth, num_classes=len(names), class_names=names, local=local)
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
    return document


def _evaluate_archive(
    root: Path,
    methods: Sequence[str],
    aux: Path | None,
    images: AuxOptions,
    model: ModelOptions,
    training: TrainingOptions,
    run: RunOptions,
    terminal: Terminal,
) -> dict[str, Any]:
    """Score every client of an archive."""
    from rlu_cli.audit.archive_evaluation import archive_document, evaluate_archive
    from rlu_cli.cli.console import archive_table

    pairs = list(
        evaluate_archive(
            root,
            methods,
            aux=aux,
            aux_options=images,
            model=model,
            training=training,
            run=run,
            reporter=terminal.reporter,
        )
    )
    document = archive_document(root, pairs)
    archive_table(terminal, document)
    return document


def _saved_result(path: Path) -> tuple[Path, Sequence[str], list[Recovered]]:
    """Local checkpoint, class names and counts of a document that `recover` printed."""
    import numpy as np

    from rlu_cli.files.json_io import read_json
    from rlu_cli.files.truth import whole_number

    document = read_json(path, limit=256 * 2**20)
    try:
        counts = [whole_number(count) for count in document["counts"]]
        names = [str(entry["name"]) for entry in document["classes"]]
        local = Path(document["inputs"]["local"]["path"])
        method = str(document["method"])
        warnings = [{key: str(said[key]) for key in ("code", "message")} for said in document["warnings"]]
        valid = document["command"] == "recover" and len(names) == len(counts) > 0 and None not in counts
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise FileError(
            f"{path}: expected one JSON object as `rlu recover` prints it, found another document"
        )
    return local, names, [(method, np.array(counts, dtype=np.int64), warnings)]
