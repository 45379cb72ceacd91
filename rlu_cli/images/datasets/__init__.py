"""Public image data sets in their official file formats, each read into an ``ImageSet``.

Images keep the order of their files, so that an index means the same image as elsewhere. Nothing here
unpacks an archive to disk or runs code from a file. torch, SciPy, Pillow and scikit-learn are imported
inside the functions that need them.
"""

from __future__ import annotations

from rlu_cli.images.datasets.arrays import load_npz
from rlu_cli.images.datasets.cifar import load_cifar
from rlu_cli.images.datasets.idx import load_idx, read_idx
from rlu_cli.images.datasets.installed import FASHION_MNIST_CLASSES, load_digits, load_fashion_mnist
from rlu_cli.images.datasets.open import ACCEPTED, open_dataset
from rlu_cli.images.datasets.pixels import SPLITS
from rlu_cli.images.datasets.subset import per_class_subset
from rlu_cli.images.datasets.svhn import load_svhn
from rlu_cli.images.datasets.tiny_imagenet import load_tiny_imagenet, scan_tiny_imagenet

__all__ = [
    "ACCEPTED",
    "FASHION_MNIST_CLASSES",
    "SPLITS",
    "load_cifar",
    "load_digits",
    "load_fashion_mnist",
    "load_idx",
    "load_npz",
    "load_svhn",
    "load_tiny_imagenet",
    "open_dataset",
    "per_class_subset",
    "read_idx",
    "scan_tiny_imagenet",
]
