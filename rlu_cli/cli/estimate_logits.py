"""``rlu estimate-logits``."""

from __future__ import annotations

from pathlib import Path

from rlu_cli.audit.options import AuxOptions, LogitsOptions, ModelOptions, RunOptions
from rlu_cli.cli.options import AuxLogitsPath, AuxPath, GlobalPath, OutputOptions, with_options
from rlu_cli.errors import UsageError


@with_options(images=AuxOptions, model=ModelOptions, run=RunOptions, out=OutputOptions)
def estimate_logits(
    *,
    global_: GlobalPath,
    aux: AuxPath = None,
    aux_logits: AuxLogitsPath = None,
    images: AuxOptions,
    model: ModelOptions,
    run: RunOptions,
    out: OutputOptions,
) -> None:
    """Measure a global model's logits on the auxiliary images, and its erroneous confidence.

    rlu estimate-logits --global g.safetensors --aux ./aux -o stats.safetensors

    Writes the statistics that `rlu recover --stats` reuses for every client of the round, and prints a
    JSON summary on stdout.
    """
    from rlu_cli.audit.auditor import Auditor
    from rlu_cli.audit.report import dumps, statistics_document
    from rlu_cli.audit.statistics_file import StoredStatistics, write_statistics
    from rlu_cli.cli.console import Terminal
    from rlu_cli.cli.output import open_output

    if aux is None and aux_logits is None:
        raise UsageError("expected auxiliary images, found none: pass --aux PATH")
    terminal = Terminal(quiet=out.quiet, verbose=out.verbose)
    auditor = Auditor(
        global_,
        aux=aux,
        aux_options=images,
        logits=LogitsOptions(aux_logits),
        model=model,
        run=run,
        reporter=terminal.reporter,
    )
    statistics = auditor.statistics
    saved = None if out.output == "-" else out.output
    if saved is not None:
        write_statistics(Path(saved), StoredStatistics(statistics, auditor.about()))
    document = statistics_document(auditor, saved)
    terminal.table(
        f"{global_}: accuracy {document['aux_accuracy']:.0%} on {document['inputs']['aux']['images']} images",
        ("index", "class", "images", "accuracy", "own confidence"),
        [
            [
                str(entry["index"]),
                entry["name"],
                str(entry["images"]),
                f"{entry['accuracy']:.0%}",
                f"{entry['own_confidence']:.3f}",
            ]
            for entry in document["classes"]
        ],
    )
    terminal.warn(document["warnings"])
    if saved is None:
        terminal.say("nothing is saved: pass -o stats.safetensors to keep the statistics for recover --stats")
    with open_output("-") as write:
        write(dumps(document, indent=2))
