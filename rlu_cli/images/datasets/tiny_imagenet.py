"""Tiny-ImageNet-200 in its published layout.

wnids.txt                       the class ids
train/<wnid>/images/*.JPEG
val/images/val_*.JPEG           all classes in one folder
val/val_annotations.txt         file, class id and box, tab-separated
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.regular import read_bounded
from rlu_cli.files.text import one_line
from rlu_cli.images.datasets.pixels import check_split
from rlu_cli.images.folder import ClassFolder, check_filled, scan_class_folder
from rlu_cli.images.load import ImageSet, Progress, decode_files
from rlu_cli.images.order import class_order, some

_TEXT_LIMIT = 16 * 2**20


def load_tiny_imagenet(
    root: Path,
    *,
    split: str = "train",
    channels: int = 3,
    size: tuple[int, int] | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> ImageSet:
    """Tiny-ImageNet in the order of its files; the rest as :func:`scan_tiny_imagenet` and ``load_images``."""
    import torch

    names = _names(root)
    files, labels = _files(root, split, names)
    return decode_files(
        files,
        torch.tensor(labels, dtype=torch.int64),
        names,
        channels=channels,
        size=size,
        workers=workers,
        progress=progress,
    )


def scan_tiny_imagenet(
    root: Path, *, split: str = "train", class_names: Sequence[str] | None = None, order: str | None = None
) -> ClassFolder:
    """The files of a split by class; "test" is the validation set, since the test images have no labels.

    Classes are named by their ids. Their indices follow the sorted ids, as in code that reads ``train/`` as
    a class folder, or `class_names` and `order` as in ``scan_class_folder``: the file ``wnids.txt`` is an
    order too. A ``val/`` that was sorted into class folders is read as well.
    """
    names, origin = class_order(_names(root), class_names, order, where=str(root))
    files, labels = _files(root, split, names)
    groups: list[list[Path]] = [[] for _ in names]
    for path, label in zip(files, labels, strict=True):
        groups[label].append(path)
    check_filled(root, names, [len(group) for group in groups])
    return ClassFolder(root, names, tuple(tuple(sorted(group)) for group in groups), (), origin)


def is_tiny_imagenet(folder: Path) -> bool:
    """Whether `folder` is a Tiny-ImageNet root."""
    return (folder / "wnids.txt").is_file() and (folder / "train").is_dir()


def _names(root: Path) -> tuple[str, ...]:
    """The class ids, sorted."""
    wnids = _lines(root / "wnids.txt")
    if not wnids or len(set(wnids)) != len(wnids):
        raise FileError(
            f"{root / 'wnids.txt'}: expected one class id a line, each once; unpack the archive again"
        )
    return tuple(sorted(wnids))


def _files(root: Path, split: str, names: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """Files and class indices of a split."""
    check_split(split)
    annotations = root / "val" / "val_annotations.txt"
    if split == "train":
        return _from_folders(root / "train", names)
    if annotations.is_file():
        return _from_annotations(annotations, names)
    return _from_folders(root / "val", names)


def _from_folders(folder: Path, names: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """Files and class indices of a split with one folder per class."""
    scanned = scan_class_folder(folder)
    missing = sorted(set(names) - set(scanned.names))
    unknown = sorted(set(scanned.names) - set(names))
    if missing or unknown:
        faults = [f"no folder for {some(missing)}"] if missing else []
        faults += [f"folders of other names ({some(unknown)})"] if unknown else []
        raise MismatchError(
            f"{folder}: expected one folder for each line of wnids.txt, found {' and '.join(faults)}; unpack "
            "the archive again, or make wnids.txt list the classes that you keep"
        )
    by_name = dict(zip(scanned.names, scanned.files, strict=True))
    pairs = [(path, index) for index, name in enumerate(names) for path in by_name[name]]
    return [path for path, _ in pairs], [index for _, index in pairs]


def _from_annotations(annotations: Path, names: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """Files and class indices of the validation set, in the order of its list."""
    index = {name: n for n, name in enumerate(names)}
    files, labels = [], []
    for number, line in enumerate(_lines(annotations), start=1):
        name, *rest = line.split("\t")
        if not rest or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise FileError(
                f"{annotations}: expected a file name and a class id, tab-separated, in line {number}, found "
                f"{one_line(line, 60)!r}; unpack the archive again"
            )
        if rest[0] not in index:
            raise MismatchError(
                f"{annotations}: line {number} names the class {one_line(rest[0], 40)!r}, which wnids.txt "
                "does not list; unpack the archive again"
            )
        files.append(annotations.parent / "images" / name)
        labels.append(index[rest[0]])
    if not files:
        raise FileError(f"{annotations}: expected one image a line, found none; unpack the archive again")
    return files, labels


def _lines(path: Path) -> list[str]:
    """The lines of a text file, without a blank end."""
    try:
        text = read_bounded(path, _TEXT_LIMIT).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise FileError(f"{path}: can't be read ({reason}); unpack the archive again") from error
    return [line.rstrip("\r") for line in text.rstrip().split("\n")] if text.strip() else []
