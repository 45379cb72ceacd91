"""From arrays to an ``ImageSet``, and to the channels and size that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import FileError, MismatchError, UsageError
from rlu_cli.images.load import ImageSet, Progress, allocate, check_size, run_all

SPLITS = ("train", "test")

# Pillow's weights of red, green and blue in a grey level (ITU-R 601-2), in 1/65536.
_LUMA = (19595, 38470, 7471)
_LUMA_BATCH = 1024


def check_split(split: str) -> None:
    """Raise UsageError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise UsageError(f"expected the split {' or '.join(SPLITS)}, got {split!r}")


def check_channels(channels: int) -> None:
    """Raise MismatchError unless images can be had with `channels` channels."""
    if channels not in (1, 3):
        raise MismatchError(
            f"expected 1 (grey) or 3 (RGB) channels, got {channels}: images come in these only"
        )


def image_set(
    source: object, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[Any], names: Sequence[str]
) -> ImageSet:
    """An ImageSet of pixels (M, C, H, W) and labels (M,), once they fit each other and `names`.

    `source` is how messages call the file.
    """
    import torch

    if 0 in pixels.shape:
        raise FileError(f"{source}: expected at least one image, found the shape {pixels.shape}")
    if labels.shape != pixels.shape[:1]:
        raise MismatchError(
            f"{source}: expected one label per image, found {len(pixels)} images and labels of shape "
            f"{labels.shape}; take both from the same split"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(names):
        raise MismatchError(
            f"{source}: expected labels 0 to {len(names) - 1}, one for each of {len(names)} classes, "
            f"found {low if low < 0 else high}; number the classes from 0"
        )
    return ImageSet(
        pixels=torch.from_numpy(np.require(pixels, dtype=np.uint8, requirements=["C", "W"])),
        labels=torch.from_numpy(np.array(labels, dtype=np.int64)),
        names=tuple(names),
    )


def fit(
    images: ImageSet,
    *,
    channels: int | None,
    size: tuple[int, int] | None,
    workers: int = 0,
    progress: Progress | None = None,
) -> ImageSet:
    """`images` with the wanted channels and (H, W), None leaving either as it is.

    The same values as Pillow's ``convert`` followed by its bilinear ``resize``, which antialiases when it
    shrinks: what decoding image files at that size gives.
    """
    if channels is not None:
        images = to_channels(images, channels)
    if size is not None:
        images = to_size(images, size, workers=workers, progress=progress)
    return images


def to_channels(images: ImageSet, channels: int) -> ImageSet:
    """Grey repeated to RGB, or RGB reduced to grey by Pillow's formula."""
    import torch

    check_channels(channels)
    pixels = images.pixels
    count, stored, height, width = pixels.shape
    if stored == channels:
        return images
    converted = allocate((count, channels, height, width))
    if channels == 3:
        converted.copy_(pixels.expand(-1, 3, -1, -1))
    else:
        for start in range(0, count, _LUMA_BATCH):
            red, green, blue = pixels[start : start + _LUMA_BATCH].to(torch.int32).unbind(dim=1)
            grey = (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2] + 0x8000) >> 16
            converted[start : start + _LUMA_BATCH, 0] = grey.to(torch.uint8)
    return ImageSet(pixels=converted, labels=images.labels, names=images.names)


def to_size(
    images: ImageSet, size: tuple[int, int], *, workers: int = 0, progress: Progress | None = None
) -> ImageSet:
    """Every image resized to (H, W) by Pillow's bilinear filter."""
    from PIL import Image

    check_size(size)
    count, channels, height, width = images.pixels.shape
    if (height, width) == size:
        return images
    resized = allocate((count, channels, *size))
    before, after = images.pixels.numpy(), resized.numpy()

    def resize(index: int) -> None:
        pixels = before[index, 0] if channels == 1 else before[index].transpose(1, 2, 0)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        after[index] = np.asarray(image).reshape(*size, channels).transpose(2, 0, 1)

    run_all(resize, count, workers, progress)
    return ImageSet(pixels=resized, labels=images.labels, names=images.names)
