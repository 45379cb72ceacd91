"""One name or path to an ``ImageSet``, whatever its format."""

from __future__ import annotations

from pathlib import Path

from rlu_cli.errors import FileError, UsageError
from rlu_cli.images.datasets import recognise as recognised
from rlu_cli.images.datasets.arrays import load_npz
from rlu_cli.images.datasets.cifar import load_cifar
from rlu_cli.images.datasets.idx import load_idx
from rlu_cli.images.datasets.installed import load_digits, load_fashion_mnist
from rlu_cli.images.datasets.pixels import check_channels, check_split, fit
from rlu_cli.images.datasets.recognise import Kind, Recognised, recognise, split_folder
from rlu_cli.images.datasets.svhn import load_svhn
from rlu_cli.images.datasets.tiny_imagenet import load_tiny_imagenet
from rlu_cli.images.decode import stored_channels
from rlu_cli.images.folder import ClassFolder, scan_class_folder
from rlu_cli.images.load import ImageSet, Progress, check_size, load_images

ACCEPTED = f"digits, fashion-mnist, {recognised.ACCEPTED}"
"""What :func:`open_dataset` takes, for messages."""


def open_dataset(
    spec: str,
    *,
    split: str = "train",
    channels: int | None = None,
    size: tuple[int, int] | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> ImageSet:
    """Read a data set, as ``ACCEPTED`` lists them, with the wanted channels and size.

    Parameters
    ----------
    spec : "digits", "fashion-mnist" or a path; a folder of such a name is reached as ``./digits``
    split : "train" or "test", where the source has both. A source without splits, such as an .npz file or
        a plain class folder, is "train"; as "test" it is taken only if its name says test, t10k or val.
    channels : 1 or 3; None keeps the source's own (a class folder is grey if all its images are)
    size : (H, W); None keeps the source's own
    workers : decoding threads, 0 for as many as are useful; never changes the result
    progress : told ``(done, total)`` images while they are decoded or resized
    """
    check_split(split)
    check_size(size)
    if channels is not None:
        check_channels(channels)
    if spec == "digits":
        if split != "train":
            raise UsageError("digits has no test split: use split train, or pass another data set")
        images = load_digits()
    elif spec == "fashion-mnist":
        images = load_fashion_mnist(split=split)
    else:
        if not spec:
            raise FileError(f"expected a data set, found no name or path: pass {ACCEPTED}")
        found = recognise(Path(spec), accepted=ACCEPTED)
        chosen = found.split(split, preferred="train")
        if found.kind is Kind.CLASS_FOLDERS:
            folder = scan_class_folder(found.path if chosen is None else split_folder(found.path, chosen))
            images = load_images(
                folder,
                channels=channels or _channels(folder),
                size=size,
                workers=workers,
                progress=progress,
            )
        elif found.kind is Kind.TINY_IMAGENET:
            images = load_tiny_imagenet(
                found.path, split=split, channels=channels or 3, size=size, workers=workers, progress=progress
            )
        else:
            images = read_arrays(found, chosen)
    return fit(images, channels=channels, size=size, workers=workers, progress=progress)


def read_arrays(found: Recognised, split: str | None, *, zero_is_ten: bool = True) -> ImageSet:
    """A data set whose files hold arrays, in the order of its files.

    zero_is_ten : SVHN's digit 0 is class 0, as in torchvision; see ``load_svhn``
    """
    split = split or "train"
    if found.kind is Kind.CIFAR:
        return load_cifar(found.path, split=split)
    if found.kind is Kind.IDX:
        return load_idx(found.path, split=split)
    if found.kind is Kind.SVHN:
        return load_svhn(found.path, split=split, zero_is_ten=zero_is_ten)
    return load_npz(found.path)


def _channels(folder: ClassFolder) -> int:
    """1 if all images are grey."""
    files = (file for group in folder.files for file in group)
    return 3 if any(stored_channels(file) == 3 for file in files) else 1
