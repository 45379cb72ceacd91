"""Opening files that are files: a pipe could block for ever, a device never end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def exists(path: Path) -> bool:
    """Whether anything is there; False too for a name that nothing can have, where pathlib may raise."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Whether a regular file is there; False as in `exists`."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False as in `exists`."""
    return os.path.isdir(path)  # noqa: PTH112


def open_regular(path: Path) -> BinaryIO:
    """``path`` open for reading bytes; OSError where it is missing, a folder, a pipe or a device."""
    if exists(path) and not is_file(path):
        kind = "it is a folder" if is_folder(path) else "it is a device or pipe, not a file"
        raise OSError(errno.EINVAL, kind)
    return path.open("rb")


@contextmanager
def utf8_name(path: Path) -> Iterator[str]:
    """A name for a file that libraries take which know UTF-8 alone, as long as the block lasts."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        with path.open("rb") as stream:
            yield f"/dev/fd/{stream.fileno()}"
    else:
        yield str(path)


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit``; OSError for a larger one too."""
    with open_regular(path) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, "it is too large")
    return data
