"""Labelled images at a path, whatever holds them: their classes are known before any is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rlu_cli.errors import UsageError
from rlu_cli.images.folder import ClassFolder, check_filled, scan_class_folder
from rlu_cli.images.load import ImageSet, Progress, load_images, native_size
from rlu_cli.images.order import dataset_order

if TYPE_CHECKING:
    from rlu_cli.images.datasets.recognise import Recognised


@dataclass(frozen=True)
class Reading:
    """How images are read.

    per_class : at most so many of each class, drawn by `seed`; None for all
    exif : turn images as their EXIF orientation says
    skip_bad : leave out images that can't be decoded
    """

    per_class: int | None = None
    seed: int = 0
    exif: bool = False
    skip_bad: bool = False


class ImageCollection(Protocol):
    """Where labelled images come from.

    kind : "folders", "tiny-imagenet", "cifar", "idx", "svhn" or "npz"
    split : "train" or "test" where the source has both or either, else None
    names : class names by output index
    order : where the mapping comes from: "class_names", "string", "natural", "dataset" or an order file
    skipped : one note per kind of thing that was left out
    numeric_order_differs : whether all names are numbers that string and numeric order put differently
    """

    @property
    def root(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def split(self) -> str | None: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def order(self) -> str: ...
    @property
    def skipped(self) -> tuple[str, ...]: ...
    @property
    def numeric_order_differs(self) -> bool: ...

    def native_size(self, reading: Reading) -> tuple[int, int]:
        """(H, W) of the first image."""
        ...

    def load(
        self,
        reading: Reading,
        *,
        channels: int,
        size: tuple[int, int] | None,
        progress: Progress | None = None,
    ) -> ImageSet:
        """The images, class by class; the rest as ``load_images``."""
        ...


@dataclass(frozen=True)
class FileCollection:
    """Image files in class folders, or Tiny-ImageNet's."""

    folder: ClassFolder
    kind: str
    split: str | None

    @property
    def root(self) -> Path:
        return self.folder.root

    @property
    def names(self) -> tuple[str, ...]:
        return self.folder.names

    @property
    def order(self) -> str:
        return self.folder.order

    @property
    def skipped(self) -> tuple[str, ...]:
        return self.folder.skipped

    @property
    def numeric_order_differs(self) -> bool:
        return self.folder.numeric_order_differs

    def native_size(self, reading: Reading) -> tuple[int, int]:
        return native_size(self.folder, exif=reading.exif, skip_bad=reading.skip_bad)

    def load(
        self,
        reading: Reading,
        *,
        channels: int,
        size: tuple[int, int] | None,
        progress: Progress | None = None,
    ) -> ImageSet:
        return load_images(
            self.folder,
            channels=channels,
            size=size,
            per_class=reading.per_class,
            seed=reading.seed,
            exif=reading.exif,
            skip_bad=reading.skip_bad,
            progress=progress,
        )


@dataclass(frozen=True)
class ArrayCollection:
    """A data set whose files hold arrays: read at once, and kept.

    images : with the labels and names of the output indices
    """

    root: Path
    kind: str
    split: str | None
    order: str
    images: ImageSet
    skipped: tuple[str, ...] = ()
    numeric_order_differs: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.images.names

    def native_size(self, reading: Reading) -> tuple[int, int]:
        height, width = self.images.pixels.shape[2:]
        return height, width

    def load(
        self,
        reading: Reading,
        *,
        channels: int,
        size: tuple[int, int] | None,
        progress: Progress | None = None,
    ) -> ImageSet:
        from rlu_cli.images.datasets.pixels import fit
        from rlu_cli.images.datasets.subset import draw_per_class

        rows = draw_per_class(self.images, reading.per_class, reading.seed)
        drawn = replace(self.images, pixels=self.images.pixels[rows], labels=self.images.labels[rows])
        return fit(drawn, channels=channels, size=size, progress=progress)


def open_collection(
    path: Path,
    *,
    class_names: Sequence[str] | None = None,
    order: str | None = None,
    split: str | None = None,
    svhn_digit_zero: Literal["first", "last"] | None = None,
) -> ImageCollection:
    """Find the images at `path` and give every class its output index.

    Parameters
    ----------
    class_names : the checkpoint's, by output index
    order : "string", "natural", "dataset" or a file with one class name per line; outranks the names
    split : "train" or "test", where the source has both; by default "test", which clients that trained on
        the official training images have not seen
    svhn_digit_zero : whether SVHN's digit 0 is the first class, as in torchvision and by default, or the
        last, as in code that lowers each label by one

    Raises
    ------
    FileError, MismatchError, UsageError
    """
    from rlu_cli.images.datasets.recognise import Kind, recognise, split_folder

    found = recognise(path)
    if svhn_digit_zero is not None and found.kind is not Kind.SVHN:
        raise UsageError(
            f"expected --svhn-digit-zero with SVHN's .mat files only, and {path} is of another kind "
            f"({found.kind.value}): leave it out"
        )
    chosen = found.split(split, preferred="test")
    if found.kind is Kind.CLASS_FOLDERS:
        root = path if chosen is None else split_folder(path, chosen)
        return FileCollection(
            scan_class_folder(root, class_names=class_names, order=order), found.kind.value, chosen
        )
    if found.kind is Kind.TINY_IMAGENET:
        from rlu_cli.images.datasets.tiny_imagenet import scan_tiny_imagenet

        assert chosen is not None
        folder = scan_tiny_imagenet(path, split=chosen, class_names=class_names, order=order)
        return FileCollection(folder, found.kind.value, chosen)
    return _array_collection(found, chosen, class_names, order, zero_is_ten=svhn_digit_zero != "last")


def _array_collection(
    found: Recognised,
    split: str | None,
    class_names: Sequence[str] | None,
    order: str | None,
    *,
    zero_is_ten: bool,
) -> ArrayCollection:
    """Read the arrays, and renumber their classes by the order wanted."""
    import torch

    from rlu_cli.images.datasets.open import read_arrays

    images = read_arrays(found, split, zero_is_ten=zero_is_ten)
    where = str(found.path)
    names, origin = dataset_order(images.names, class_names, order, where=where)
    if names != images.names:
        place = {name: n for n, name in enumerate(names)}
        new = torch.tensor([place[name] for name in images.names], dtype=torch.int64)
        images = replace(images, labels=new[images.labels], names=names)
    check_filled(found.path, names, images.counts)
    return ArrayCollection(found.path, found.kind.value, split, origin, images)
