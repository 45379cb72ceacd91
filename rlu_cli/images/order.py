"""Which output index each class folder has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlu_cli.errors import FileError, MismatchError, UsageError


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sort key of timm's folder order: numbers by value, letters without case; ties by string order."""
    parts = re.split(r"(\d+)", name.lower())
    return [int(part) if part.isdecimal() else part for part in parts], name


def class_order(
    folders: Sequence[str], class_names: Sequence[str] | None, order: str | None
) -> tuple[tuple[str, ...], str]:
    """Folder names by output index, and where that order comes from (see ``ClassFolder.order``)."""
    if order == "natural":
        return tuple(sorted(folders, key=natural_key)), order
    if order is not None and order != "string":
        return _match(folders, _read_names(order), f"the class-order file {order}"), order
    if order is None and class_names is not None:
        return _match(folders, class_names, "the checkpoint's class names"), "class_names"
    return tuple(sorted(folders)), "string"


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few of `names`, for a message."""
    rest = len(names) - limit
    return ", ".join(repr(name) for name in names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _match(folders: Sequence[str], names: Sequence[str], source: str) -> tuple[str, ...]:
    """`names`, once they are known to be the folders' names, each once."""
    times = Counter(names)
    twice = [name for name, count in times.items() if count > 1]
    missing = sorted(times.keys() - set(folders))
    unknown = sorted(set(folders) - times.keys())
    if not (twice or missing or unknown):
        return tuple(names)
    faults = [
        f"{label} {some(found)}"
        for label, found in (
            ("listed more than once:", twice),
            ("without a folder:", missing),
            ("folders that are not listed:", unknown),
        )
        if found
    ]
    raise MismatchError(
        f"{source} and the image sub-folders differ: {'; '.join(faults)}. Rename the folders to match (case "
        "counts), or pass --class-order string, natural or a file with one folder name per line"
    )


def _read_names(order: str) -> list[str]:
    """The lines of a class-order file; the line number is the index."""
    path = Path(order)
    if not path.exists():
        raise UsageError(
            f"can't use --class-order {order!r}: expected string, natural or the path of an existing file "
            "with one folder name per line"
        )
    try:
        text = path.read_text(encoding="utf-8-sig").rstrip()
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
