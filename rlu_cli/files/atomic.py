"""Writing files so that a failed run leaves no half file and never damages the old one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rlu_cli.errors import FileError
from rlu_cli.files.regular import exists, is_file, is_folder
from rlu_cli.files.text import one_line

_WRITE_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def _refusal(path: Path, error: OSError) -> FileError:
    reason = one_line(error.strerror or error)
    return FileError(
        f"{path}: can't be written ({reason}); check the folder, its permissions and free space."
    )


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """A new file beside ``target``, with the mode that target has or, if it is new, the umask gives."""
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o666)
    with contextlib.suppress(OSError):
        temporary.chmod(stat.S_IMODE(target.stat().st_mode))
    return temporary, os.fdopen(descriptor, "wb")


@contextmanager
def _direct(path: Path) -> Iterator[BinaryIO]:
    """Devices and pipes (``/dev/null``) can't be renamed over: write straight into them."""
    try:
        with path.open("wb") as handle:
            yield handle
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in _WRITE_FAULTS or error.filename == str(path):
            raise _refusal(path, error) from error
        raise


@contextmanager
def atomic_write(path: Path | str) -> Iterator[BinaryIO]:
    """A binary file that appears at ``path`` when the block ends well, and not at all otherwise.

    A symbolic link is followed, so the link stays and its target is replaced.

    Raises:
        FileError: The folder is missing or not writable, ``path`` is a folder, or the disk is full.
    """
    target = Path(os.path.realpath(path))
    if is_folder(target):
        raise FileError(f"{path}: expected a file to write, found a folder; give a file name.")
    # A pipe is seen under the name given alone: /dev/stdout resolves to one that nothing has.
    if exists(Path(path)) and not is_file(Path(path)):
        with _direct(Path(path)) as direct:
            yield direct
        return
    try:
        temporary, handle = _open_temporary(target)
    except OSError as error:
        raise _refusal(Path(path), error) from error
    try:
        with handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and (error.errno in _WRITE_FAULTS or error.filename == str(temporary)):
            raise _refusal(Path(path), error) from error
        raise


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write ``data`` atomically."""
    with atomic_write(path) as handle:
        handle.write(data)


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` atomically as UTF-8, newlines as they are."""
    write_bytes(path, text.encode("utf-8"))
