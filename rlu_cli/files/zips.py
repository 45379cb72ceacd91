"""Guards for zip-based checkpoints: how much they would unpack to, checked before reading."""

from __future__ import annotations

import zipfile
from pathlib import Path

from rlu_cli.errors import FileError
from rlu_cli.files.text import size

GIB = 1024**3


def memory_limit(file_size: int) -> int:
    """Bytes that a file of this size may become in memory: 200 times its size and 1 GiB, at most 64 GiB.

    A file larger than 64 GiB may become as large as it is.
    """
    return max(file_size + file_size // 8, min(64 * GIB, 200 * file_size + GIB))


def unpacked_limit(file_size: int) -> int:
    """Bytes that a packed file of images of this size may unpack to: 64 times its size and 64 MiB.

    Images shrink to a half or a tenth; only a file made to harm, or a very small one, shrinks more.
    """
    return 64 * file_size + 64 * 2**20


def guarded_members(path: Path) -> list[zipfile.ZipInfo]:
    """The archive's entries, after checking that unpacking them all stays within the limit.

    Raises:
        FileError: A damaged directory, or a zip bomb.
    """
    try:
        file_size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
    except Exception as error:
        raise FileError(
            f"{path}: expected a zip archive, found a damaged directory; copy or download it again."
        ) from error
    total = sum(info.file_size for info in members)
    if total > memory_limit(file_size):
        raise FileError(
            f"{path}: refused, since its {size(file_size)} would unpack to {size(total)}, as a zip bomb does;"
            " if that is intended, save it uncompressed."
        )
    return members
