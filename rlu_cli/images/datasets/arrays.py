"""Images and labels as NumPy arrays in one .npz file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlu_cli.errors import FileError
from rlu_cli.files.npz_io import read_npz
from rlu_cli.files.text import names as listed
from rlu_cli.files.text import one_line
from rlu_cli.images.datasets.pixels import image_set
from rlu_cli.images.load import ImageSet, allocate

if TYPE_CHECKING:
    import torch

MOST_CLASSES = 2**20
_BATCH = 1024


def load_npz(path: Path) -> ImageSet:
    """A data set of one's own: ``np.savez(path, images=…, labels=…, class_names=…)``.

    images : shape (M, H, W) or (M, H, W, C), C = 1 or 3; uint8, or floats in [0, 1]
    labels : shape (M,), whole numbers from 0
    class_names : shape (N,), text; optional, the numbers themselves by default
    """
    arrays, _ = read_npz(path)
    missing = [name for name in ("images", "labels") if name not in arrays]
    if missing:
        raise FileError(
            f"{path}: expected the arrays images and labels, found {listed(arrays) or 'no numeric array'}; "
            "save with np.savez(path, images=images, labels=labels)"
        )
    pixels = _pixels(path, arrays["images"])
    labels = arrays["labels"].numpy()
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise FileError(
            f"{path}: expected labels of shape (M,), whole numbers, found {labels.dtype} of shape "
            f"{labels.shape}; save them with labels.astype(np.int64)"
        )
    names = _class_names(path)
    if names is None:
        count = int(labels.max(initial=0)) + 1
        if count > MOST_CLASSES:
            raise FileError(
                f"{path}: expected class numbers as labels, found {count - 1}; number them from 0"
            )
        names = [str(n) for n in range(count)]
    return image_set(path, pixels.numpy(), labels, names)


def _pixels(path: Path, images: torch.Tensor) -> torch.Tensor:
    """uint8 (M, C, H, W)."""
    import torch

    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise FileError(
            f"{path}: expected images of shape (M, H, W) or (M, H, W, C) with 1 or 3 channels, found "
            f"{tuple(images.shape)}; put the channels last"
        )
    planes = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    if images.dtype == torch.uint8:
        return planes
    advice = "save uint8 values 0 to 255, or floats from 0 to 1"
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise FileError(f"{path}: expected uint8 or floating-point images, found {kind}; {advice}")
    if images.numel() and not (images.min() >= 0 and images.max() <= 1):
        raise FileError(
            f"{path}: expected floating-point images in the range 0 to 1, found {images.min().item():g} to "
            f"{images.max().item():g}; {advice}"
        )
    count, channels, height, width = planes.shape
    pixels = allocate((count, channels, height, width))
    for start in range(0, count, _BATCH):
        pixels[start : start + _BATCH] = planes[start : start + _BATCH].double().mul_(255).round_()
    return pixels


def _class_names(path: Path) -> Sequence[str] | None:
    """The entry class_names, where there is one."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if "class_names" not in archive.files:
                return None
            names = archive["class_names"]
            if names.ndim != 1 or names.dtype.kind not in "US":
                raise ValueError(f"it is {names.dtype} of shape {names.shape}")
            return [str(name) for name in (names.astype(str) if names.dtype.kind == "S" else names)]
    except Exception as error:
        raise FileError(
            f"{path}: expected text of shape (N,) in class_names, but can't use it ({one_line(error)}); "
            "save it as np.array(['cat', 'dog'])"
        ) from error
