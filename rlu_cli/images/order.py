"""Which output index each class has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlu_cli.errors import FileError, MismatchError, UsageError
from rlu_cli.files.regular import exists, read_bounded
from rlu_cli.files.text import one_line

OWN = "dataset"
"""The order of a data set's own label numbers."""

_LIMIT = 16 * 2**20
"""Bytes of a class-order file: room for a million names."""


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sort key of timm's folder order: numbers by value, letters without case; ties by string order."""
    parts = re.split(r"(\d+)", name.lower())
    return [int(part) if part.isdecimal() else part for part in parts], name


def class_order(
    found: Sequence[str],
    class_names: Sequence[str] | None,
    order: str | None,
    *,
    where: str,
    choices: str = "string, natural",
) -> tuple[tuple[str, ...], str]:
    """Class names by output index, and where that order comes from (see ``ClassFolder.order``).

    where : what holds the classes, for messages
    choices : the orders without a file, for messages
    """
    if order == "natural":
        return tuple(sorted(found, key=natural_key)), order
    if order == OWN:
        raise UsageError(
            f"can't use --class-order {OWN}: {where} has class folders, which have no label numbers of their "
            "own; expected string, natural or a file with one folder name per line"
        )
    if order is not None and order != "string":
        return _match(found, _read_names(order), f"the class-order file {order}", where, choices), order
    if order is None and class_names is not None:
        return _match(found, class_names, "the checkpoint's class names", where, choices), "class_names"
    return tuple(sorted(found)), "string"


def dataset_order(
    own: Sequence[str], class_names: Sequence[str] | None, order: str | None, *, where: str
) -> tuple[tuple[str, ...], str]:
    """`class_order` for a data set that numbers its classes itself, named `own` by label number.

    Without an order the label numbers are the output indices, unless the checkpoint's class names are the
    data set's in another order. Names that only repeat the numbers ("0", "1", …) contradict nothing.
    """
    numbered = tuple(own) == tuple(str(n) for n in range(len(own)))
    same = class_names is not None and sorted(class_names) == sorted(own)
    if order == OWN or (order is None and (class_names is None or (numbered and not same))):
        return tuple(own), OWN
    if len(set(own)) < len(own) and not (order is None and tuple(own) == tuple(class_names or ())):
        raise MismatchError(
            f"expected classes of different names in {where}, found "
            f"{some([name for name, count in Counter(own).items() if count > 1])} more than once, so they "
            f"can't be put in order by name: pass --class-order {OWN} to take its label numbers as they are"
        )
    return class_order(own, class_names, order, where=where, choices=f"string, natural, {OWN}")


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few of `names`, for a message."""
    rest = len(names) - limit
    shown = ", ".join(repr(one_line(name, 60)) for name in names[:limit])
    return shown + (f" and {rest} more" if rest > 0 else "")


def _match(
    found: Sequence[str], names: Sequence[str], source: str, where: str, choices: str
) -> tuple[str, ...]:
    """`names`, once they are known to be those found, each once."""
    if tuple(found) == tuple(names):
        return tuple(names)
    times = Counter(names)
    twice = [name for name, count in times.items() if count > 1]
    missing = sorted(times.keys() - set(found))
    unknown = sorted(set(found) - times.keys())
    if not (twice or missing or unknown):
        return tuple(names)
    faults = [
        f"{label} {some(words)}"
        for label, words in (
            ("listed more than once:", twice),
            ("without images:", missing),
            ("classes that are not listed:", unknown),
        )
        if words
    ]
    raise MismatchError(
        f"{source} and the classes of {where} differ: {'; '.join(faults)}. Make them match (case "
        f"counts), or pass --class-order {choices} or a file with one class name per line"
    )


def _read_names(order: str) -> list[str]:
    """The lines of a class-order file; the line number is the index."""
    path = Path(order)
    if not exists(path):
        raise UsageError(
            f"can't use --class-order {order!r}: expected string, natural, {OWN} or the path of an existing "
            "file with one class name per line"
        )
    try:
        text = read_bounded(path, _LIMIT).decode("utf-8-sig").rstrip()
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, ValueError) else error.strerror
        raise FileError(f"can't read the class-order file {path}: {reason}") from error
    lines = [line.strip() for line in text.split("\n")]
    if "" in lines:
        raise FileError(
            f"can't use the class-order file {path}: line {lines.index('') + 1} is empty, and every line "
            "must name the folder of one output index"
        )
    return lines
