"""One name or path to an ``ImageSet``, whatever its format: recognised by content, not by name."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from rlu_cli.errors import FileError, UsageError
from rlu_cli.files.sniff import FileKind, read_head, sniff
from rlu_cli.files.text import one_line
from rlu_cli.images.datasets import svhn
from rlu_cli.images.datasets.arrays import load_npz
from rlu_cli.images.datasets.cifar import find_cifar, load_cifar
from rlu_cli.images.datasets.idx import find_idx, is_idx, load_idx
from rlu_cli.images.datasets.installed import load_digits, load_fashion_mnist
from rlu_cli.images.datasets.pixels import SPLITS, check_channels, check_split, fit
from rlu_cli.images.datasets.tar import is_tar
from rlu_cli.images.datasets.tiny_imagenet import is_tiny_imagenet, load_tiny_imagenet
from rlu_cli.images.decode import stored_channels
from rlu_cli.images.folder import scan_class_folder
from rlu_cli.images.load import ImageSet, Progress, check_size, load_images

ACCEPTED = (
    "digits, fashion-mnist, a folder with one sub-folder of images per class, a Tiny-ImageNet folder, "
    "CIFAR-10 or CIFAR-100 (python version: the .tar.gz or its folder), an SVHN .mat file, IDX files as of "
    "MNIST, or an .npz file with images and labels"
)
"""What :func:`open_dataset` takes, for messages and help."""

_TEST_FOLDERS = ("test", "val", "valid", "validation")
_TEST_MARKS = ("test", "t10k", "val")


@dataclass(frozen=True)
class _Request:
    split: str
    channels: int | None
    size: tuple[int, int] | None
    workers: int
    progress: Progress | None


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
    request = _Request(split, channels, size, workers, progress)
    if spec == "digits":
        if split != "train":
            raise UsageError("digits has no test split: use split train, or pass another data set")
        images = load_digits()
    elif spec == "fashion-mnist":
        images = load_fashion_mnist(split=split)
    else:
        path = Path(spec)
        if not spec or not _exists(path):
            raise FileError(
                f"{spec!r} is neither a known data set nor a path that exists; expected {ACCEPTED}"
            )
        images = _open_folder(path, request) if path.is_dir() else _open_file(path, split)
    return fit(images, channels=channels, size=size, workers=workers, progress=progress)


def _open_folder(path: Path, request: _Request) -> ImageSet:
    if is_tiny_imagenet(path):
        return load_tiny_imagenet(
            path,
            split=request.split,
            channels=request.channels or 3,
            size=request.size,
            workers=request.workers,
            progress=request.progress,
        )
    if find_cifar(path) is not None:
        return load_cifar(path, split=request.split)
    if any(find_idx(path, split) is not None for split in SPLITS):
        return load_idx(path, split=request.split)
    if any((path / name).is_file() for name in svhn.FILES.values()):
        return svhn.load_svhn(path, split=request.split)
    if not _has_folders(path):
        raise FileError(f"{path}: found no data set in this folder; expected {ACCEPTED}")
    return _open_class_folder(path, request)


def _open_class_folder(path: Path, request: _Request) -> ImageSet:
    """Read one folder per class, or the wanted one of ``train/`` and ``val/`` that hold such folders."""
    if _has_folders(path / "train"):
        wanted = ("train",) if request.split == "train" else _TEST_FOLDERS
        found = [name for name in wanted if _has_folders(path / name)]
        if not found:
            raise FileError(
                f"{path}: expected class folders in {' or '.join(wanted)} beside train, found none; add them "
                "or use split train"
            )
        path = path / found[0]
    else:
        _check_only_split(path, request.split)
    folder = scan_class_folder(path)
    channels = request.channels
    if channels is None:
        files = (file for group in folder.files for file in group)
        channels = 3 if any(stored_channels(file) == 3 for file in files) else 1
    return load_images(
        folder, channels=channels, size=request.size, workers=request.workers, progress=request.progress
    )


def _open_file(path: Path, split: str) -> ImageSet:
    head = _unpacked_head(path)
    if is_idx(head):
        _check_only_split(path, split)
        return load_idx(path)
    if svhn.is_mat(head) or path.suffix.lower() == ".mat":
        _check_only_split(path, split)
        return svhn.load_svhn(path)
    if is_tar(head):
        return load_cifar(path, split=split)
    kind = sniff(path)
    if kind is FileKind.NPZ or (kind is FileKind.ZIP_DAMAGED and path.suffix.lower() == ".npz"):
        _check_only_split(path, split)
        return load_npz(path)
    raise FileError(f"{path}: found no data set in it (it is a {kind.value}); expected {ACCEPTED}")


def _unpacked_head(path: Path) -> bytes:
    """The first bytes of a file, or of what is gzipped in it."""
    head = read_head(path, 512)
    if not head.startswith(b"\x1f\x8b"):
        return head
    try:
        with gzip.open(path) as stream:
            return stream.read(512)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(
            f"{path}: expected a gzip file, but it can't be unpacked ({one_line(error)}); copy or "
            "download it again"
        ) from error


def _check_only_split(path: Path, split: str) -> None:
    """Refuse to give out a source without splits as test data, unless its name says that it is."""
    if split == "test" and not any(mark in path.name.lower() for mark in _TEST_MARKS):
        raise UsageError(
            f"{path}: nothing says that these are test images: pass the path of the test data, whose last "
            f"part has {', '.join(_TEST_MARKS[:-1])} or {_TEST_MARKS[-1]} in its name"
        )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or in a folder that may not be entered
        return False


def _has_folders(path: Path) -> bool:
    """Whether there are sub-folders that could be classes."""
    try:
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in path.iterdir())
    except (NotADirectoryError, FileNotFoundError):
        return False
    except OSError as error:
        raise FileError(f"{path}: can't list the folder ({error.strerror}); check its permissions") from error
