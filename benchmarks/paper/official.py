"""Whether a path holds one of the paper's own data sets."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import images
from benchmarks.paper.settings import Dataset
from rlu_cli.errors import UsageError
from rlu_cli.images.datasets.recognise import ACCEPTED, recognise


def check_official(dataset: Dataset, path: str) -> None:
    """Refuse what isn't the data set that a table would call it.

    Raises
    ------
    UsageError, FileError
        Files of another kind or with other classes, or none.
    """
    kind = recognise(Path(path), accepted=ACCEPTED).kind
    classes = len(images(path).names)
    if (kind, classes) != (dataset.official, dataset.classes):
        raise UsageError(
            f"expected the official files of {dataset.name} ({dataset.official.value}, {dataset.classes} "
            f"classes), found {kind.value} with {classes} at {path}: tables would call them {dataset.name}"
        )
