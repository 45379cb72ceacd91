"""Truth files: how many samples of each class a client really trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.json_io import read_json
from rlu_cli.files.text import names, one_line

if TYPE_CHECKING:
    import numpy as np

TRUTH_LIMIT = 256 * 1024 * 1024
_LARGEST = 2**53
_FORMS = '{"counts": [...]}, {"labels": [...]} or {"steps": [[...], ...]}'


def whole_number(value: object) -> int | None:
    """``value`` as a non-negative whole number, or None where it isn't one (booleans are not)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not 0 <= value < _LARGEST or value != int(value):
        return None
    return int(value)


class _Classes:
    """Turns what a truth file calls a class into an output index."""

    def __init__(self, path: Path, num_classes: int, class_names: Sequence[str] | None) -> None:
        self.path = path
        self.size = num_classes
        self.names = list(class_names or [])
        self.by_name = {name: index for index, name in enumerate(self.names)}
        if len(self.by_name) != len(self.names) or len(self.names) not in (0, num_classes):
            raise MismatchError(
                f"expected {num_classes} distinct class names, found {len(self.names)} names,"
                f" {len(self.by_name)} of them distinct."
            )
        self.digits_are_indices = not any(name.isdecimal() for name in self.names)

    def index(self, label: object) -> int:
        """The output index of a number or a name."""
        if isinstance(label, str):
            if label in self.by_name:
                return self.by_name[label]
            if not (self.digits_are_indices and label.isdecimal() and len(label) < 10):
                known = f"expected one of {names(self.names)}" if self.names else "no class names are known"
                raise MismatchError(f"{self.path}: unknown class {one_line(label, 60)!r}; {known}.")
            label = int(label)
        index = whole_number(label)
        if index is None or index >= self.size:
            raise MismatchError(
                f"{self.path}: expected labels that are whole numbers from 0 to {self.size - 1}, or class"
                f" names, found {one_line(repr(label), 60)}."
            )
        return index

    def tally(self, labels: object, what: str) -> list[int]:
        """Counts per class of a list of labels."""
        if not isinstance(labels, list):
            raise FileError(
                f"{self.path}: expected {what} to be a list of labels, found {type(labels).__name__}."
            )
        counts = [0] * self.size
        for label in labels:
            counts[self.index(label)] += 1
        return counts

    def amount(self, value: object, of: object) -> int:
        """A count, checked."""
        count = whole_number(value)
        if count is None:
            raise MismatchError(
                f"{self.path}: expected counts that are whole numbers of at least 0, found"
                f" {one_line(repr(value), 60)} for class {one_line(of, 60)}."
            )
        return count


def _from_counts(value: object, classes: _Classes) -> list[int]:
    if isinstance(value, Mapping):
        counts = [0] * classes.size
        for label, count in value.items():
            counts[classes.index(label)] += classes.amount(count, label)
        return counts
    if not isinstance(value, list):
        raise FileError(
            f"{classes.path}: expected counts to be a list or an object, found {type(value).__name__}."
        )
    if len(value) != classes.size:
        raise MismatchError(
            f"{classes.path}: expected {classes.size} counts, one per output of the model, found"
            f" {len(value)}."
        )
    return [classes.amount(count, index) for index, count in enumerate(value)]


def _from_steps(value: object, classes: _Classes) -> list[int]:
    if not isinstance(value, list):
        raise FileError(
            f"{classes.path}: expected steps to be a list of lists, found {type(value).__name__}."
        )
    rows = [classes.tally(step, f"step {number}") for number, step in enumerate(value, start=1)]
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0] * classes.size


def _of_client(path: Path, clients: object, local: Path | None) -> object:
    client = None if local is None else local.stem
    if not isinstance(clients, Mapping) or client not in clients:
        found = names(clients) if isinstance(clients, Mapping) else type(clients).__name__
        raise MismatchError(
            f"{path}: expected the truth of the client {client!r} (the local checkpoint's file name without"
            f" its suffix), found {found}; pass the truth file of the same round."
        )
    return clients[client]


def _check_client(path: Path, said: object, local: Path | None) -> None:
    """Refuse counts beside a client's name that isn't the local file's, with or without suffix."""
    if local is None or not isinstance(said, str) or said in (local.name, local.stem):
        return
    raise MismatchError(
        f"{path}: expected the truth of the client {one_line(repr(local.stem), 80)} (the local checkpoint's "
        f"file name without its suffix), found that of {one_line(repr(said), 80)}; pass this client's truth, "
        "or leave client out of the file if it is."
    )


def read_truth(
    path: Path | str, *, num_classes: int, class_names: Sequence[str] | None, local: Path | None = None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Samples per output index, ``(num_classes,)``, from any of the accepted forms.

    A file for a whole round holds them by client, ``{"clients": {"client_0": {"counts": [...]}, ...}}``; then
    the name of ``local``, the client's checkpoint, says which one. A ``client`` beside the counts, as in a
    line of truth.ndjson, must be that one too.

    Raises:
        FileError: Unreadable, not JSON, or of another form.
        MismatchError: Labels, names or lengths that don't fit the model, or another client's truth.
    """
    import numpy as np

    path = Path(path)
    document = read_json(path, limit=TRUTH_LIMIT)
    classes = _Classes(path, num_classes, class_names)
    if isinstance(document, Mapping) and "clients" in document:
        document = _of_client(path, document["clients"], local)
    if isinstance(document, Mapping):
        _check_client(path, document.get("client"), local)
    given = [
        form for form in ("counts", "labels", "steps") if isinstance(document, Mapping) and form in document
    ]
    if not given:
        raise FileError(f"{path}: expected {_FORMS}, found none of these keys; correct the file.")
    results: list[list[int]] = []
    for form in given:
        if form == "counts":
            results.append(_from_counts(document[form], classes))
        elif form == "labels":
            results.append(classes.tally(document[form], "labels"))
        else:
            results.append(_from_steps(document[form], classes))
    if any(result != results[0] for result in results):
        raise MismatchError(f"{path}: its {' and '.join(given)} don't agree; keep one of them.")
    if not 0 < sum(results[0]) < _LARGEST:
        raise MismatchError(f"{path}: expected at least one sample, found a total of {sum(results[0])}.")
    return np.asarray(results[0], dtype=np.int64)
