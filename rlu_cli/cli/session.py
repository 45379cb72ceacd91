"""What commands that look at a round begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlu_cli.audit.progress import Reporter

if TYPE_CHECKING:
    from rlu_cli.audit.auditor import Auditor
    from rlu_cli.audit.options import ModelOptions, RunOptions
    from rlu_cli.files.checkpoint import Checkpoint


def open_round(
    reference: Path,
    locals_: Sequence[Path],
    *,
    aux: Path | None,
    stats: Path | None,
    model: ModelOptions,
    run: RunOptions,
    reporter: Reporter,
) -> tuple[Auditor, Iterator[Checkpoint]]:
    """An auditor of the global model, and the local checkpoints, read one at a time.

    The first local checkpoint is read at once: its metadata may describe the network.
    """
    from itertools import chain

    from rlu_cli.audit.auditor import Auditor
    from rlu_cli.files.checkpoint import read_checkpoint

    checkpoints = (read_checkpoint(path) for path in locals_)
    first = next(checkpoints)
    auditor = Auditor(
        reference, aux=aux, stats=stats, model=model, run=run, first_local=first, reporter=reporter
    )
    return auditor, chain([first], checkpoints)
