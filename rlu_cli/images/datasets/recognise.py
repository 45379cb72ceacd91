"""What kind of data set a path holds, told by content and not by name, and which splits it has."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rlu_cli.errors import FileError, UsageError
from rlu_cli.files.regular import exists
from rlu_cli.files.sniff import FileKind, read_head, sniff
from rlu_cli.files.text import one_line
from rlu_cli.images.datasets import svhn
from rlu_cli.images.datasets.cifar import cifar_splits, find_cifar
from rlu_cli.images.datasets.idx import find_idx, is_idx
from rlu_cli.images.datasets.pixels import SPLITS
from rlu_cli.images.datasets.tar import is_tar
from rlu_cli.images.datasets.tiny_imagenet import is_tiny_imagenet
from rlu_cli.images.folder import is_hidden

ACCEPTED = (
    "a folder with one sub-folder of images per class, a Tiny-ImageNet folder, CIFAR-10 or CIFAR-100 (python "
    "version: the .tar.gz or its folder), an SVHN .mat file, IDX files as of MNIST, or an .npz file with "
    "images and labels"
)
"""The kinds below, for messages and help."""

_SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "val", "valid", "validation"),
}
"""What folders of a split are called, in any case, the likeliest first."""
_TEST_MARKS = ("test", "t10k", "val")


class Kind(Enum):
    """The kinds of data set; the value is how the JSON names it."""

    CLASS_FOLDERS = "folders"
    TINY_IMAGENET = "tiny-imagenet"
    CIFAR = "cifar"
    IDX = "idx"
    SVHN = "svhn"
    NPZ = "npz"


@dataclass(frozen=True)
class Recognised:
    """What lies at a path.

    splits : "train" and "test" as far as they are there; empty for a source without splits
    """

    path: Path
    kind: Kind
    splits: tuple[str, ...] = ()

    def split(self, asked: str | None, *, preferred: str) -> str | None:
        """The split to read, None for a source without: the one asked for, else the preferred of those there.

        Raises
        ------
        UsageError
            Test data are asked of a source without splits whose name doesn't say that it is test data.
        """
        if not self.splits:
            if asked == "test" and not any(mark in self.path.name.lower() for mark in _TEST_MARKS):
                raise UsageError(
                    f"{self.path}: nothing says that these are test images: pass the path of the test data, "
                    f"whose last part has {', '.join(_TEST_MARKS[:-1])} or {_TEST_MARKS[-1]} in its name"
                )
            return None
        if asked is not None:
            return asked
        return preferred if preferred in self.splits else self.splits[0]


def recognise(path: Path, *, accepted: str = ACCEPTED) -> Recognised:
    """The kind of data set at `path`; `accepted` is what messages say is expected.

    Raises
    ------
    FileError
        None that is known, or nothing there at all.
    """
    if not exists(path):
        raise FileError(f"{path}: there is no such file or folder; expected {accepted}")
    return _folder(path, accepted) if path.is_dir() else _file(path, accepted)


def split_folder(root: Path, split: str) -> Path:
    """The class folders of `split`, below a folder that has ``train`` and ``test`` (or ``val`` …)."""
    there = {name.lower(): root / name for name in _sub_folders(root)}
    for name in _SPLIT_FOLDERS[split]:
        if name in there and has_folders(there[name]):
            return there[name]
    raise FileError(
        f"{root}: expected class folders in {' or '.join(_SPLIT_FOLDERS[split])}, found none; add them or "
        "use the other split"
    )


def has_folders(path: Path) -> bool:
    """Whether there are sub-folders that could be classes."""
    return bool(_sub_folders(path))


def _folder(path: Path, accepted: str) -> Recognised:
    if is_tiny_imagenet(path):
        return Recognised(path, Kind.TINY_IMAGENET, SPLITS)
    folders = _sub_folders(path)
    downloaded = list(_downloaded(path, folders))
    if len(downloaded) > 1:
        raise UsageError(f"{path}: it holds several data sets; pass one of {_listed(downloaded)} instead")
    if downloaded:
        return downloaded[0]
    if not folders:
        raise FileError(f"{path}: found no data set in this folder; expected {accepted}")
    known = {name: split for split, names in _SPLIT_FOLDERS.items() for name in names}
    if all(name.lower() in known for name in folders):
        filled = {known[name.lower()] for name in folders if has_folders(path / name)}
        if filled:  # else they are classes, with images directly in them
            return Recognised(path, Kind.CLASS_FOLDERS, tuple(split for split in SPLITS if split in filled))
    return Recognised(path, Kind.CLASS_FOLDERS)


def _downloaded(path: Path, folders: Sequence[str]) -> Iterator[Recognised]:
    """The data sets of arrays in a folder, where torchvision puts them below its root too.

    Raises
    ------
    UsageError
        Both CIFAR-10 and CIFAR-100.
    """
    located = find_cifar(path)
    if located is not None:
        yield Recognised(located[1], Kind.CIFAR, cifar_splits(path))
    for root in (path, path / "raw", *(path / name / "raw" for name in folders)):
        splits = tuple(split for split in SPLITS if find_idx(root, split) is not None)
        if splits:
            yield Recognised(root, Kind.IDX, splits)
    splits = tuple(split for split in SPLITS if (path / svhn.FILES[split]).is_file())
    if splits:
        yield Recognised(path, Kind.SVHN, splits)


def _listed(found: Sequence[Recognised]) -> str:
    """Their paths; of SVHN, which has no folder of its own, a file."""
    return ", ".join(
        str(each.path / svhn.FILES[each.splits[0]] if each.kind is Kind.SVHN else each.path) for each in found
    )


def _file(path: Path, accepted: str) -> Recognised:
    head = _unpacked_head(path)
    if is_idx(head):
        return Recognised(path, Kind.IDX)
    if svhn.is_mat(head) or path.suffix.lower() == ".mat":
        return Recognised(path, Kind.SVHN)
    if is_tar(head):
        return Recognised(path, Kind.CIFAR, SPLITS)
    kind = sniff(path)
    if kind is FileKind.NPZ or (kind is FileKind.ZIP_DAMAGED and path.suffix.lower() == ".npz"):
        return Recognised(path, Kind.NPZ)
    raise FileError(f"{path}: found no data set in it (it is a {kind.value}); expected {accepted}")


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


def _sub_folders(path: Path) -> list[str]:
    """Names of the sub-folders that could be classes."""
    try:
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not is_hidden(entry.name))
    except (NotADirectoryError, FileNotFoundError):
        return []
    except OSError as error:
        raise FileError(f"{path}: can't list the folder ({error.strerror}); check its permissions") from error
