"""``rlu inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlu_cli.cli.options import CheckpointKey, OutputOptions, with_options


@with_options(out=OutputOptions)
def inspect(
    *,
    checkpoint: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT", help="Checkpoint files.")],
    key: CheckpointKey = None,
    out: OutputOptions,
) -> None:
    """Show what a checkpoint is: format, tensors, output layer, annotations, matching architecture.

    rlu inspect g.safetensors k.safetensors

    Prints one JSON object; with several files, one a line. No code from a file is ever run.
    """
    from rlu_cli.audit.inspection import inspection_document
    from rlu_cli.audit.report import dumps
    from rlu_cli.cli.console import Terminal
    from rlu_cli.cli.output import open_output

    terminal = Terminal(quiet=out.quiet, verbose=out.verbose)
    with open_output(out.output) as write:
        for path in checkpoint:
            document = inspection_document(path, key)
            head = document["head"]
            terminal.table(
                f"{path}: {document['format']}, {document['parameters']:,} parameters, "
                f"architecture {document['arch'] or 'unknown'}, "
                f"output layer {head['name'] if head else 'unknown'}",
                ("tensor", "dtype", "shape"),
                [[t["name"], t["dtype"], "×".join(map(str, t["shape"]))] for t in document["tensors"]],
            )
            write(dumps(document, indent=2 if len(checkpoint) == 1 else None))
