"""Numeric arrays in MATLAB 5 files (``save -v6`` and ``-v7``).

SciPy reads these too, but a damaged file can crash its reader and the whole process with it. Here every
length is checked before it is used.

Layout: a header of 128 bytes, then one element per variable, deflated or not. An element is a tag, which is
a type and a length, and its data. A variable's data are elements in turn: flags with the class, dimensions,
name, values in column-major order.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import FileError
from rlu_cli.files.regular import open_regular
from rlu_cli.files.text import one_line

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_INT8, _INT32, _UINT32 = 1, 5, 6
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMERIC = ("double", "single", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_CLASSES = {1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", **dict(enumerate(_NUMERIC, start=6))}
_OPAQUE = 17
_COMPLEX = 0x0800
# Flags, dimensions and name fit in here many times over.
_DESCRIPTION = 4096


@dataclass(frozen=True)
class Variable:
    """What a file says about a variable before its values."""

    name: str
    kind: str
    """MATLAB's class; "complex" for complex numbers."""
    shape: tuple[int, ...]


def read_variables(
    path: Path, wanted: Collection[str], check: Callable[[Variable], None]
) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """The wanted numeric arrays that there are, by name, and the names of all variables.

    `check` is called with each wanted variable before room is made for its values, and raises what it has
    against it; it must bound the shape.

    Raises
    ------
    FileError
        Damaged, or a wanted variable is there twice.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    names: list[str] = []
    try:
        left = path.stat().st_size - _HEADER
        with open_regular(path) as stream:
            order = {b"IM": "<", b"MI": ">"}[stream.read(_HEADER)[126:]]
            while left > 0:
                kind, length = struct.unpack(f"{order}II", stream.read(8))
                left -= 8 + length
                if left < 0:
                    raise EOFError("it is cut short")
                variable, offset, values = _describe(stream.read(length), kind, order)
                if variable is None:
                    continue
                names.append(variable.name)
                if variable.name not in wanted:
                    continue
                if variable.name in found:
                    raise ValueError(f"{variable.name} is in it twice")
                check(variable)
                if variable.kind not in _NUMERIC:
                    raise ValueError(f"{variable.name} holds no real numbers ({variable.kind})")
                found[variable.name] = _values(values, offset, variable.shape, order)
    except (OSError, EOFError, ValueError, LookupError, struct.error, zlib.error) as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise FileError(
            f"{path}: expected a complete MATLAB 5 file, but it can't be read ({reason}); copy or "
            "download it again"
        ) from error
    return found, names


class _Content:
    """The data of a variable's element, inflated only as far as asked."""

    def __init__(self, data: bytes, compressed: bool) -> None:
        self._inflater = zlib.decompressobj() if compressed else None
        self._rest = data
        self._known = b""

    def upto(self, length: int) -> bytes:
        """The first `length` bytes, or all if there are fewer."""
        if self._inflater is None:
            return self._rest[:length]
        if (missing := length - len(self._known)) > 0:
            self._known += self._inflater.decompress(self._rest, missing)
            self._rest = self._inflater.unconsumed_tail
        return self._known

    def finish(self) -> None:
        """Check that deflated data end here, with the right checksum."""
        if self._inflater is not None and (
            self._inflater.decompress(self._rest, 64) or not self._inflater.eof
        ):
            raise ValueError("compressed values don't end where they should")


def _describe(data: bytes, kind: int, order: str) -> tuple[Variable | None, int, _Content]:
    """An element's variable, None for something that is none, where its values start, and its content."""
    content = _Content(data, kind == _COMPRESSED)
    head = content.upto(_DESCRIPTION)
    offset = 0
    if kind == _COMPRESSED:
        (kind,) = struct.unpack_from(f"{order}I", head)
        offset = 8
    if kind != _MATRIX:
        return None, 0, content
    flags, offset = _part(head, offset, order, _UINT32)
    (word,) = struct.unpack_from(f"{order}I", flags)
    if word & 0xFF == _OPAQUE:  # MATLAB's own objects are laid out differently
        return None, 0, content
    sizes, offset = _part(head, offset, order, _INT32)
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    name, offset = _part(head, offset, order, _INT8)
    if min(shape, default=-1) < 0:
        raise ValueError(f"a variable has the shape {shape}")
    described = "complex" if word & _COMPLEX else _CLASSES.get(word & 0xFF, "unknown class")
    return Variable(name.decode("latin-1"), described, shape), offset, content


def _values(content: _Content, offset: int, shape: tuple[int, ...], order: str) -> npt.NDArray[Any]:
    """The array whose values are the element at `offset`."""
    kind, start, length, end = _tag(content.upto(offset + 8), offset, order)
    dtype = np.dtype(_DTYPES[kind]).newbyteorder("<" if order == "<" else ">")
    count = math.prod(shape)
    if length != count * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} has {length} bytes of {dtype.name}")
    data = content.upto(end)
    array: npt.NDArray[Any] = np.frombuffer(data, dtype=dtype, count=count, offset=start)
    content.finish()
    return array.reshape(shape, order="F")


def _part(data: bytes, offset: int, order: str, expected: int) -> tuple[bytes, int]:
    """The data of the element at `offset`, and where the next one starts."""
    kind, start, length, end = _tag(data, offset, order)
    if kind != expected or start + length > len(data):
        raise ValueError("a variable's description is damaged")
    return data[start : start + length], end


def _tag(data: bytes, offset: int, order: str) -> tuple[int, int, int, int]:
    """Type, start and length of an element's data, and where the next element starts."""
    first, length = struct.unpack_from(f"{order}II", data, offset)
    if first >> 16:  # up to four bytes of data lie in the tag itself
        if first >> 16 > 4:
            raise ValueError("a tag is damaged")
        return first & 0xFFFF, offset + 4, first >> 16, offset + 8
    return first, offset + 8, length, offset + 8 + (length + 7) // 8 * 8
