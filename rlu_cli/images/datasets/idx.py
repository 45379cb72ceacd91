"""IDX files, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import FileError
from rlu_cli.files.regular import open_regular
from rlu_cli.files.text import one_line
from rlu_cli.files.zips import unpacked_limit
from rlu_cli.images.datasets.pixels import check_split, image_set
from rlu_cli.images.load import ImageSet

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_STEMS = {"train": "train", "test": "t10k"}
# The official names have a hyphen before idx3; copies with a dot are about as common.
_IMAGES = re.compile(r"(.*)images([-.])idx3-ubyte(\.gz)?")
_FORM = "train-images-idx3-ubyte.gz"


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
        with open_regular(path) as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        limit = unpacked_limit(path.stat().st_size)
        with gzip.open(path) if packed else open_regular(path) as stream:
            head = stream.read(4)
            if not is_idx(head):
                raise FileError(f"{path}: expected an IDX file (MNIST's format), found another kind of file")
            dtype = np.dtype(_TYPES[head[2]])
            sizes = stream.read(4 * head[3])
            shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
            expected = math.prod(shape) * dtype.itemsize
            if len(sizes) < 4 * head[3] or expected > limit:
                raise FileError(
                    f"{path}: damaged IDX file, its header gives the shape {one_line(shape, 80)}; copy the "
                    "file again"
                )
            data = stream.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"{path}: can't be read ({reason}); check the path or copy the file again") from error
    if len(data) != expected:
        found = "more" if len(data) > expected else len(data)
        raise FileError(f"{path}: expected {expected} bytes of IDX data, found {found}; copy the file again")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def is_idx(head: bytes) -> bool:
    """Whether unpacked content that starts with `head` is IDX."""
    return len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _TYPES


def load_idx(images_path: Path, *, split: str = "train") -> ImageSet:
    """Grey images and labels from an images file and the labels file beside it.

    `images_path` is the images file, or a folder, where `split` chooses between ``train-images-…`` and
    ``t10k-images-…`` (test). Either file may be gzipped. Classes are named by their number, at least ten
    of them.
    """
    check_split(split)
    images_file = images_path
    if images_path.is_dir():
        found = find_idx(images_path, split)
        if found is None:
            raise FileError(
                f"{images_path}: expected {_STEMS[split]}-images-idx3-ubyte or the same with .gz, found "
                f"neither; copy the {split} files there or pass another folder"
            )
        images_file = found
    pixels = read_idx(images_file)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise FileError(
            f"{images_file}: expected images, uint8 of shape (M, H, W), found {pixels.dtype} of shape "
            f"{pixels.shape}; pass the images file, such as {_FORM}"
        )
    labels_file = _labels_beside(images_file)
    labels = read_idx(labels_file)
    if labels.ndim != 1 or labels.dtype != np.uint8:
        raise FileError(
            f"{labels_file}: expected labels, uint8 of shape (M,), found {labels.dtype} of shape "
            f"{labels.shape}; download the file again"
        )
    classes = max(10, int(labels.max(initial=0)) + 1)
    return image_set(images_file, pixels[:, None], labels, [str(n) for n in range(classes)])


def find_idx(folder: Path, split: str) -> Path | None:
    """The images file of `split` in a folder."""
    for ending in ("-idx3-ubyte", "-idx3-ubyte.gz", ".idx3-ubyte", ".idx3-ubyte.gz"):
        path = folder / f"{_STEMS[split]}-images{ending}"
        if path.is_file():
            return path
    return None


def _labels_beside(images_file: Path) -> Path:
    """The labels file that belongs to an images file, packed alike or not."""
    match = _IMAGES.fullmatch(images_file.name)
    if match is None:
        raise FileError(
            f"{images_file}: can't tell which labels file belongs to it; name the two as in {_FORM} and "
            f"{_FORM.replace('images-idx3', 'labels-idx1')}"
        )
    stem, separator, packed = match.groups()
    plain = images_file.with_name(f"{stem}labels{separator}idx1-ubyte")
    gzipped = plain.with_name(f"{plain.name}.gz")
    for path in (gzipped, plain) if packed else (plain, gzipped):
        if path.is_file():
            return path
    raise FileError(
        f"{images_file}: expected its labels beside it, in {plain.name} or {gzipped.name}, found neither; "
        "copy the labels file there"
    )
