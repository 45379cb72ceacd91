"""File digests, so that a result says exactly which inputs it came from."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlu_cli.errors import FileError
from rlu_cli.files.text import one_line

_CHUNK = 1024 * 1024


def sha256_file(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise FileError(
            f"{path}: can't be read ({one_line(error.strerror)}); check the path and permissions."
        ) from error
    return digest.hexdigest()
