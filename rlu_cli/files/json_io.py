"""JSON files read strictly: UTF-8, within a size, no NaN, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from rlu_cli.errors import FileError
from rlu_cli.files.sniff import read_head
from rlu_cli.files.text import one_line, size


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {one_line(twice, 60)!r} appears twice")
    return found


def parse_json(text: str) -> Any:
    """The value of a short JSON text; ValueError for what is none, NaN and too deep nesting included."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path | str, *, limit: int) -> Any:
    """The value that a JSON file of at most ``limit`` bytes holds.

    Raises:
        FileError: Unreadable, larger than ``limit``, or not valid JSON.
    """
    path = Path(path)
    data = read_head(path, limit + 1)
    if len(data) > limit:
        raise FileError(
            f"{path}: expected a JSON file of at most {size(limit)}, found a larger one; check the path."
        )
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{path}: expected valid JSON, found a fault: {one_line(error)}; correct the file."
        ) from error
