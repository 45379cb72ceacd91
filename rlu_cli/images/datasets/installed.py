"""Data sets that other packages bring along."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rlu_cli.errors import UsageError
from rlu_cli.images.datasets.idx import load_idx
from rlu_cli.images.datasets.pixels import check_split, image_set
from rlu_cli.images.load import ImageSet

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""

FASHION_MNIST_CLASSES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle-boot",
)


def load_fashion_mnist(*, split: str = "train") -> ImageSet:
    """Fashion-MNIST (grey, 28 × 28) from Debian's package."""
    check_split(split)
    if not FASHION_MNIST.is_dir():
        raise UsageError(
            f"expected Fashion-MNIST in {FASHION_MNIST}, found no such folder: install it with 'apt-get "
            "install dataset-fashion-mnist' (Debian, Ubuntu), or pass the folder with its IDX files"
        )
    return replace(load_idx(FASHION_MNIST, split=split), names=FASHION_MNIST_CLASSES)


def load_digits() -> ImageSet:
    """scikit-learn's 1,797 handwritten digits (grey, 8 × 8); their levels 0 … 16 become 0 … 255.

    They have no split into train and test.
    """
    try:
        from sklearn.datasets import load_digits as sklearn_digits
    except ImportError as error:
        raise UsageError(
            "expected scikit-learn, which brings the digits along, but it is not installed: run 'pip install "
            "scikit-learn', or pass another data set"
        ) from error
    content = sklearn_digits()
    levels = np.asarray(content.images).astype(np.int64)
    pixels = ((levels * 255 + 8) // 16).astype(np.uint8)
    return image_set("digits", pixels[:, None], np.asarray(content.target), [str(n) for n in range(10)])
