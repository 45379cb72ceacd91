"""CIFAR-10 and CIFAR-100, python version: the archive as downloaded, or the folder in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import FileError, UsageError
from rlu_cli.files.regular import read_bounded
from rlu_cli.images.datasets.pixels import SPLITS, check_split, image_set
from rlu_cli.images.datasets.plain_pickle import array_of, read_plain_pickle
from rlu_cli.images.datasets.tar import MEMBER_LIMIT, read_members
from rlu_cli.images.load import ImageSet


@dataclass(frozen=True)
class _Version:
    """Names in one of the two data sets."""

    title: str
    folder: str
    meta: str
    splits: Mapping[str, tuple[str, ...]]
    labels: str
    names: str
    classes: int


CIFAR10 = _Version(
    title="CIFAR-10",
    folder="cifar-10-batches-py",
    meta="batches.meta",
    splits={"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)},
    labels="labels",
    names="label_names",
    classes=10,
)
CIFAR100 = _Version(
    title="CIFAR-100",
    folder="cifar-100-python",
    meta="meta",
    splits={"train": ("train",), "test": ("test",)},
    labels="fine_labels",
    names="fine_label_names",
    classes=100,
)
_COARSE = ("coarse_labels", "coarse_label_names", 20)
_VERSIONS = (CIFAR10, CIFAR100)


def load_cifar(path: Path, *, split: str = "train", coarse: bool = False) -> ImageSet:
    """CIFAR-10 or CIFAR-100, whichever `path` holds, in the order of its files.

    `path` is the .tar.gz as downloaded, the folder ``cifar-10-batches-py`` or ``cifar-100-python``, or the
    folder that holds it. `coarse` gives CIFAR-100's 20 superclasses. The archive is read in memory.
    """
    check_split(split)
    version, files = (_from_folder if path.is_dir() else _from_archive)(path, split)
    if coarse and version is not CIFAR100:
        raise UsageError(f"{path}: coarse labels exist for CIFAR-100 only, and this is {version.title}")
    labels_key, names_key, classes = _COARSE if coarse else (version.labels, version.names, version.classes)
    names = _names(_fields(files, version.meta, path), names_key, classes, f"{path}: {version.meta}")
    pixels, labels = [], []
    for name in version.splits[split]:
        batch, batch_labels = _batch(_fields(files, name, path), labels_key, f"{path}: {name}")
        pixels.append(batch)
        labels.append(batch_labels)
    return image_set(path, np.concatenate(pixels), np.concatenate(labels), names)


def find_cifar(folder: Path) -> tuple[_Version, Path] | None:
    """Which of the two lies in `folder` or its official sub-folder, and where."""
    found = []
    for version in _VERSIONS:
        for root in (folder, folder / version.folder):
            batches = (name for split in version.splits.values() for name in split)
            if (root / version.meta).is_file() and any((root / name).is_file() for name in batches):
                found.append((version, root))
                break
    if len(found) > 1:
        raise UsageError(
            f"{folder}: it holds both CIFAR-10 and CIFAR-100; pass {found[0][1]} or {found[1][1]} instead"
        )
    return found[0] if found else None


def cifar_splits(folder: Path) -> tuple[str, ...]:
    """The splits that a CIFAR folder has files of."""
    located = find_cifar(folder)
    if located is None:
        return ()
    version, root = located
    return tuple(split for split in SPLITS if any((root / name).is_file() for name in version.splits[split]))


def _from_folder(path: Path, split: str) -> tuple[_Version, dict[str, bytes]]:
    located = find_cifar(path)
    if located is None:
        raise _not_cifar(path)
    version, root = located
    return version, {name: _read(root / name) for name in (version.meta, *version.splits[split])}


def _from_archive(path: Path, split: str) -> tuple[_Version, dict[str, bytes]]:
    wanted = [f"{v.folder}/{name}" for v in _VERSIONS for name in (v.meta, *v.splits[split])]
    members = read_members(path, wanted)
    for version in _VERSIONS:
        files = {
            name: members.get(f"{version.folder}/{name}") for name in (version.meta, *version.splits[split])
        }
        present = {name: data for name, data in files.items() if data is not None}
        if len(present) == len(files):
            return version, present
        if present:
            missing = ", ".join(name for name in files if name not in present)
            raise FileError(
                f"{path}: expected {version.title}, found no {missing} in {version.folder}; download it again"
            )
    raise _not_cifar(path)


def _not_cifar(path: Path) -> FileError:
    folders = " or ".join(version.folder for version in _VERSIONS)
    return FileError(
        f"{path}: expected the python version of CIFAR ({folders}), found other files; "
        "download cifar-10-python.tar.gz or cifar-100-python.tar.gz"
    )


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MEMBER_LIMIT)
    except OSError as error:
        raise FileError(f"{path}: can't be read ({error.strerror}); unpack the archive again") from error


def _fields(files: Mapping[str, bytes], name: str, path: Path) -> dict[str, Any]:
    source = f"{path}: {name}"
    content = read_plain_pickle(files[name], source)
    if not isinstance(content, dict):
        raise FileError(f"{source}: expected a pickled dict, found a {type(content).__name__}")
    return content


def _names(meta: Mapping[str, Any], key: str, classes: int, source: str) -> list[str]:
    names = meta.get(key)
    if not isinstance(names, list) or len(names) != classes:
        raise FileError(
            f"{source}: expected {classes} class names under {key!r}; download the data set again"
        )
    texts = [name.decode("latin-1") if isinstance(name, bytes) else name for name in names]
    if not all(isinstance(text, str) for text in texts):
        raise FileError(f"{source}: expected text under {key!r}; download the data set again")
    return texts


def _batch(
    fields: Mapping[str, Any], key: str, source: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels (n, 3, 32, 32) and labels (n,) of one file."""
    rows, labels = array_of(fields.get("data")), fields.get(key)
    if rows is None or rows.ndim != 2 or rows.shape[1] != 3 * 32 * 32:
        found = "none" if rows is None else f"the shape {rows.shape}"
        raise FileError(f"{source}: expected a uint8 array 'data' of shape (n, 3072), found {found}")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise FileError(
            f"{source}: expected a list of whole numbers under {key!r}; download the data set again"
        )
    if len(labels) != len(rows):
        raise FileError(
            f"{source}: expected one label per image, found {len(rows)} images and {len(labels)} labels"
        )
    # Each row is the red plane, then green, then blue, each row by row.
    return rows.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)
