"""A folder with one sub-folder of images per class, and which output index each sub-folder has."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.text import names as listed
from rlu_cli.images.order import class_order, natural_key

__all__ = ["EXTENSIONS", "ClassFolder", "natural_key", "scan_class_folder"]

EXTENSIONS = frozenset([".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"])


@dataclass(frozen=True)
class ClassFolder:
    """Which image files belong to which output index."""

    root: Path
    names: tuple[str, ...]
    """Sub-folder names by output index."""
    files: tuple[tuple[Path, ...], ...]
    """Image files of each class, sorted by path."""
    skipped: tuple[str, ...]
    """One note per kind of thing that was left out."""
    order: str
    """Where the mapping comes from: "class_names", "string", "natural" or the path of the order file."""

    @property
    def numeric_order_differs(self) -> bool:
        """Whether all names are numbers that string order and numeric order put differently."""
        numbers = all(re.fullmatch(r"\d+", name) for name in self.names)
        return numbers and sorted(self.names) != sorted(self.names, key=natural_key)


def scan_class_folder(
    root: Path,
    *,
    class_names: Sequence[str] | None = None,
    order: str | None = None,
) -> ClassFolder:
    """List the images under `root` by class and give every class its output index.

    The index comes from `order` where given ("string", "natural" or a file with one name per line), else
    from `class_names`, which the checkpoint carries, else from string order, as torchvision's ImageFolder.
    Hidden folders and ``__MACOSX`` are no classes. Links to folders count as classes, but are not followed
    further down, so that a loop can't hang the scan.
    """
    skipped: Counter[str] = Counter()
    folders, loose = _class_folders(root, skipped)
    if not folders:
        found = f"{loose} image{'' if loose == 1 else 's'} directly in it" if loose else "none"
        raise MismatchError(
            f"expected one sub-folder of images per class in {root}, found {found}: "
            "pass the folder whose direct sub-folders are the classes"
        )
    if loose:
        skipped["image directly in the root, outside any class"] = loose
    names, origin = class_order(list(folders), class_names, order, where=str(root))
    files = tuple(_images(folders[name], skipped) for name in names)
    check_filled(root, names, [len(group) for group in files])
    notes = tuple(f"{what} × {count}" if count > 1 else what for what, count in sorted(skipped.items()))
    return ClassFolder(root=root, names=names, files=files, skipped=notes, order=origin)


def check_filled(root: Path, names: Sequence[str], counts: Sequence[int]) -> None:
    """Refuse a class without images: what the model makes of it is unknown, so nothing can be recovered.

    Raises
    ------
    MismatchError
        Names the classes; their indices are those of `names`, so no other class shifts.
    """
    empty = [f"{name} (index {n})" for n, name in enumerate(names) if not counts[n]]
    if empty:
        raise MismatchError(
            f"every class needs at least one image, but {len(empty)} of the {len(names)} classes of {root} "
            f"have none: {listed(empty)}. Without images nobody knows how the model confuses such a class, "
            "and a guess spoils the counts of the others too: add images of it, two at the least"
        )


def _class_folders(root: Path, skipped: Counter[str]) -> tuple[dict[str, Path], int]:
    """The class folders by name, in string order, and the number of images that lie beside them."""
    if not root.is_dir():
        what = "it is not a folder" if root.exists() else "there is no such folder"
        raise FileError(
            f"can't read the images in {root}: {what}; pass a folder with one sub-folder per class"
        )
    real_root = root.resolve()
    folders: dict[str, Path] = {}
    loose = 0
    for entry in _entries(root):
        path = root / entry.name
        if not _is_folder(entry):
            loose += _is_image(entry)
        elif is_hidden(entry.name):
            skipped[f"folder {entry.name!r} (hidden or system)"] += 1
        elif entry.is_symlink() and path.resolve() in (real_root, *real_root.parents):
            skipped[f"folder {entry.name!r} (a link to the folder it lies in)"] += 1
        else:
            folders[entry.name] = path
    return folders, loose


def _images(folder: Path, skipped: Counter[str]) -> tuple[Path, ...]:
    """All image files below `folder`, sorted by relative path."""
    found: list[Path] = []
    pending = [folder]
    while pending:
        current = pending.pop()
        for entry in _entries(current):
            path = current / entry.name
            if _is_folder(entry):
                if is_hidden(entry.name):
                    skipped[f"folder {entry.name!r} (hidden or system)"] += 1
                elif entry.is_symlink():
                    skipped["linked folder inside a class (not followed)"] += 1
                else:
                    pending.append(path)
            elif _is_image(entry):
                found.append(path)
            elif not entry.name.startswith("."):
                skipped["file that is not an image"] += 1
    return tuple(sorted(found, key=lambda path: path.relative_to(folder).as_posix()))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise FileError(f"can't list the folder {folder}: {error.strerror or error}") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that loops onto itself
        return False


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Whether the name is an image's; a broken link counts, so that reading it fails by name."""
    if entry.name.startswith(".") or Path(entry.name).suffix.lower() not in EXTENSIONS:
        return False
    return entry.is_symlink() or entry.is_file()


def is_hidden(name: str) -> bool:
    """Whether a folder of that name is the system's, and no class."""
    return name.startswith(".") or name == "__MACOSX"
