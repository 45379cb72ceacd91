"""Members of a tar archive, read in memory by their exact names. Nothing is written to disk."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from rlu_cli.errors import FileError
from rlu_cli.files.regular import open_regular
from rlu_cli.files.text import one_line, size

MEMBER_LIMIT = 192 * 2**20
ARCHIVE_LIMIT = 256 * 2**20
"""Both archives unpack to 186 MB, CIFAR-100's training file alone to 155 MB."""

_MOST_MEMBERS = 1000
_READ = 2**20


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


class _Limited:
    """A stream that refuses to give more than ARCHIVE_LIMIT bytes, whatever a header claims."""

    def __init__(self, stream: _Readable, path: Path) -> None:
        self._stream, self._path, self._left = stream, path, ARCHIVE_LIMIT

    def read(self, count: int = _READ) -> bytes:
        data = self._stream.read(min(count, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise FileError(
                f"{self._path}: refused, since it unpacks to more than {size(ARCHIVE_LIMIT)}, which no CIFAR "
                "archive does; download it again from its official source"
            )
        return data


def is_tar(block: bytes) -> bool:
    """Whether unpacked content that starts with `block`, 512 bytes or more, is a tar archive."""
    try:
        tarfile.TarInfo.frombuf(block[:512], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def read_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """The content of the wanted members that there are, by name; all others are passed over.

    The archive may be gzipped. All of it is read, so that a copy that was cut short is noticed.

    Raises
    ------
    FileError
        Damaged or too large; a wanted member is not a plain file, too large, or there twice.
    """
    found: dict[str, bytes] = {}
    try:
        with open_regular(path) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw) if packed else raw as unpacked:
                stream = _Limited(unpacked, path)
                with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
                    for number, member in enumerate(archive):
                        if number == _MOST_MEMBERS:
                            raise ValueError(f"it has more than {_MOST_MEMBERS} members")
                        name = member.name.removeprefix("./")  # as `tar -cf x.tar .` writes them
                        if name in wanted:
                            _check(path, member, name, found)
                            found[name] = _content(archive, member)
                while stream.read():
                    pass
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        ArithmeticError,
        zlib.error,
        tarfile.TarError,
    ) as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise FileError(
            f"{path}: expected a complete tar archive, but it can't be read ({reason}); copy or "
            "download it again"
        ) from error
    return found


def _check(path: Path, member: tarfile.TarInfo, name: str, found: Collection[str]) -> None:
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise FileError(f"{path}: {member.name} in it is not a plain file; download the archive again")
    if name in found:
        raise FileError(f"{path}: {member.name} is in it more than once; download the archive again")
    if not 0 <= member.size <= MEMBER_LIMIT:
        raise FileError(
            f"{path}: {member.name} in it has {size(max(0, member.size))}, more than the "
            f"{size(MEMBER_LIMIT)} that is read; download the archive again"
        )


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    data = stream.read() if stream is not None else b""
    if len(data) != member.size:
        raise EOFError(f"{member.name} in it is cut short")
    return data
