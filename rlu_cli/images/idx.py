"""IDX files, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import FileError

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_LIMIT = 8 * 2**30


def read_idx(path: Path) -> npt.NDArray[Any]:
    """The array in an IDX file, gzipped or not.

    Layout: two zero bytes, a type code, the number of dimensions d, d big-endian 32-bit sizes, the data
    in C order.

    Raises
    ------
    FileError
        Unreadable, of another format, cut short or longer than its header says.
    """
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            head = stream.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES:
                raise FileError(f"{path}: expected an IDX file (MNIST's format), found another kind of file")
            dtype = np.dtype(_TYPES[head[2]])
            sizes = stream.read(4 * head[3])
            shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
            expected = math.prod(shape) * dtype.itemsize
            if len(sizes) < 4 * head[3] or expected > _LIMIT:
                raise FileError(f"{path}: damaged IDX file, its header gives the shape {shape}")
            data = stream.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"{path}: can't be read ({reason}); check the path or copy the file again") from error
    if len(data) != expected:
        found = "more" if len(data) > expected else len(data)
        raise FileError(f"{path}: expected {expected} bytes of IDX data, found {found}; copy the file again")
    return np.frombuffer(data, dtype=dtype).reshape(shape)
