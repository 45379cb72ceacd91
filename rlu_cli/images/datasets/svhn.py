"""SVHN's cropped digits (format 2): ``train_32x32.mat``, ``test_32x32.mat`` and ``extra_32x32.mat``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import FileError
from rlu_cli.files.sniff import read_head
from rlu_cli.files.text import names as listed
from rlu_cli.files.zips import unpacked_limit
from rlu_cli.images.datasets.mat5 import Variable, read_variables
from rlu_cli.images.datasets.pixels import check_split, image_set
from rlu_cli.images.load import ImageSet

FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}
_V73 = (b"MATLAB 7.3 MAT-file", b"\x89HDF\r\n\x1a\n")


def load_svhn(path: Path, *, split: str = "train", zero_is_ten: bool = True) -> ImageSet:
    """SVHN from one of its .mat files, or from the folder that holds them, where `split` chooses.

    The file writes the digit 0 as 10. With `zero_is_ten`, 10 becomes class 0, so that class n is the digit
    n, as torchvision has it. Without, every label is lowered by one, as older code does: class n is the
    digit n + 1, and class 9 the digit 0. The class names are the digits either way: "0" … "9", or "1" …
    "9", "0".
    """
    check_split(split)
    if path.is_dir():
        path = path / FILES[split]
    images, labels = _read(path)
    other = labels[~np.isin(labels, np.arange(1, 11))]
    if len(other):
        raise FileError(
            f"{path}: expected labels 1 to 10 (10 for the digit 0), found {other[0]}; get the file from its "
            "official source"
        )
    digits = labels.astype(np.int64)
    pixels = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    if zero_is_ten:
        return image_set(path, pixels, digits % 10, [str(n) for n in range(10)])
    return image_set(path, pixels, digits - 1, [str(n % 10) for n in range(1, 11)])


def is_mat(head: bytes) -> bool:
    """Whether content that starts with `head` is a MATLAB file, of either kind."""
    return head.startswith((b"MATLAB 5.0 MAT-file", _V73[0]))


def _read(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """X (32, 32, 3, n) and y (n,) as stored."""
    head = read_head(path, 128)
    if head.startswith(_V73):
        raise FileError(
            f"{path}: expected a MATLAB 5 file, as SVHN is published, found MATLAB 7.3 (HDF5); "
            "save it in MATLAB with the option '-v7' or download the original"
        )
    if not is_mat(head):
        raise FileError(
            f"{path}: expected a MATLAB 5 file (SVHN's format 2), found another kind of file; download "
            f"{FILES['train']} or {FILES['test']}"
        )
    arrays, variables = read_variables(path, ("X", "y"), lambda variable: _check(path, variable))
    if len(arrays) != 2:
        raise FileError(
            f"{path}: expected the variables X and y (SVHN's format 2), found {listed(variables) or 'none'}; "
            f"download {FILES['train']} or {FILES['test']}"
        )
    return arrays["X"], arrays["y"].reshape(-1)


def _check(path: Path, variable: Variable) -> None:
    """Refuse a variable that is not SVHN's by its description, before its values are read."""
    shape = variable.shape
    if variable.name == "X":
        # MATLAB drops a last dimension of 1, so a single image would come as (32, 32, 3).
        good = variable.kind == "uint8" and len(shape) == 4 and shape[:3] == (32, 32, 3)
    else:
        good = len(shape) == 2 and 1 in shape
    if not good or not 0 < math.prod(shape) <= unpacked_limit(path.stat().st_size):
        raise FileError(
            f"{path}: expected uint8 X of shape (32, 32, 3, n) and y of shape (n, 1), found "
            f"{variable.name} of shape {shape} ({variable.kind}); get the file from its official source"
        )
