"""Opening files that are files: a pipe could block for ever, a device never end."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """``path`` open for reading bytes; OSError where it is missing, a folder, a pipe or a device."""
    if path.exists() and not path.is_file():
        kind = "it is a folder" if path.is_dir() else "it is a device or pipe, not a file"
        raise OSError(errno.EINVAL, kind)
    return path.open("rb")


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit``; OSError for a larger one too."""
    with open_regular(path) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, "it is too large")
    return data
