"""Short, safe pieces of text for messages: nothing from a file reaches the terminal raw."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def one_line(text: object, limit: int = 160) -> str:
    """First non-blank line of ``text``, without control characters, cut to ``limit`` characters."""
    for raw in _ANSI.sub("", str(text)).splitlines():
        line = printable(raw.replace("\t", " ")).strip()
        if line:
            return line if len(line) <= limit else line[: limit - 1] + "…"
    return type(text).__name__ if isinstance(text, BaseException) else ""


def printable(text: str) -> str:
    """``text`` with a question mark for each character that a terminal would obey instead of showing."""
    return "".join(c if c.isprintable() else "?" for c in text)


def names(items: Iterable[object], limit: int = 6) -> str:
    """``items`` as a comma-separated list, the first ``limit`` of them and how many more there are."""
    listed = list(items)
    shown = ", ".join(one_line(item, 80) for item in listed[:limit])
    more = len(listed) - limit
    return f"{shown} and {more} more" if more > 0 else shown


def size(count: int) -> str:
    """A byte count for people: ``0 bytes``, ``3.2 MiB``."""
    if count < 1024:
        return f"{count} bytes"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount:.3g} TiB"
