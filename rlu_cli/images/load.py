"""All auxiliary images, decoded once into one uint8 tensor."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlu_cli.errors import FileError, MismatchError, UsageError
from rlu_cli.images.decode import decode_pixels, stored_size, strict_pillow
from rlu_cli.images.folder import ClassFolder
from rlu_cli.images.order import some

if TYPE_CHECKING:
    import torch

CHUNK = 16
"""Files a thread takes at a time, and between two reports of progress."""

MANY = 64
"""From this many files on, threads are worth starting."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Decoded images with their class indices."""

    pixels: torch.Tensor
    """uint8 (M, C, H, W)"""
    labels: torch.Tensor
    """int64 (M,)"""
    names: tuple[str, ...]
    """Class names by output index."""
    bad: tuple[Path, ...] = ()
    """Files that were left out because they can't be decoded."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Images per class."""
        return tuple(self.labels.bincount(minlength=len(self.names)).tolist())


def load_images(
    folder: ClassFolder,
    *,
    channels: int,
    size: tuple[int, int] | None,
    per_class: int | None = None,
    seed: int = 0,
    exif: bool = False,
    skip_bad: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> ImageSet:
    """Decode the images of `folder`, class by class, at most `per_class` of each, drawn by `seed`.

    `size` is (H, W); None takes the images' own, which then must be the same for all. `exif` turns images
    as their EXIF orientation says. `skip_bad` leaves out the drawn files that can't be decoded, and keeps
    what was wrong with each. `workers` is the number of decoding threads, 0 for as many as are useful; it
    never changes the result. `progress(done, total)` is called in the calling thread.

    Raises
    ------
    FileError
        A file can't be decoded; with `skip_bad`, none of a class can.
    """
    import torch

    check_per_class(per_class)
    chosen = [
        _choose(name, files, per_class, seed) for name, files in zip(folder.names, folder.files, strict=True)
    ]
    labels = torch.repeat_interleave(
        torch.arange(len(chosen)), torch.tensor([len(group) for group in chosen], dtype=torch.int64)
    )
    return decode_files(
        [path for group in chosen for path in group],
        labels,
        folder.names,
        channels=channels,
        size=size,
        exif=exif,
        skip_bad=skip_bad,
        workers=workers,
        progress=progress,
    )


def decode_files(
    files: Sequence[Path],
    labels: torch.Tensor,
    names: tuple[str, ...],
    *,
    channels: int,
    size: tuple[int, int] | None,
    exif: bool = False,
    skip_bad: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> ImageSet:
    """Decode `files`, in their order, with the class index of each; the rest as :func:`load_images`."""
    check_size(size)
    first = files[0]
    if size is None:
        first, (height, width) = _first_size(files, exif=exif, skip_bad=skip_bad)
    else:
        height, width = size
    pixels = allocate((len(files), channels, height, width))
    view = pixels.numpy()
    bad: dict[int, FileError] = {}

    def decode(index: int) -> None:
        try:
            image = decode_pixels(files[index], channels=channels, size=size, exif=exif)
        except FileError as error:
            if not skip_bad:
                raise
            bad[index] = error
            return
        if image.shape[:2] != (height, width):
            raise MismatchError(
                f"expected images of one size, but {first} is {height}x{width} and {files[index]} is "
                f"{image.shape[0]}x{image.shape[1]} (height x width): pass --image-size with the size "
                "that the client trained on"
            )
        view[index] = image.transpose(2, 0, 1)

    with strict_pillow():
        run_all(decode, len(files), workers, progress)
    images = ImageSet(pixels=pixels, labels=labels, names=names)
    return _without(images, files, bad) if bad else images


def _without(images: ImageSet, files: Sequence[Path], bad: dict[int, FileError]) -> ImageSet:
    """`images` without the rows that could not be decoded; every class must keep one."""
    good = [row for row in range(len(files)) if row not in bad]
    left = ImageSet(
        images.pixels[good], images.labels[good], images.names, tuple(files[row] for row in sorted(bad))
    )
    lost = [
        n
        for n, (before, after) in enumerate(zip(images.counts, left.counts, strict=True))
        if before > after == 0
    ]
    if lost:
        first = min(row for row in bad if images.labels[row] == lost[0])
        raise FileError(
            f"none of the images of {some([images.names[n] for n in lost])} can be decoded; the first: "
            f"{bad[first]}"
        )
    return left


def native_size(folder: ClassFolder, *, exif: bool = False, skip_bad: bool = False) -> tuple[int, int]:
    """(H, W) of the first image, as stored; with `skip_bad`, of the first with a readable header."""
    return _first_size([path for group in folder.files for path in group], exif=exif, skip_bad=skip_bad)[1]


def _first_size(files: Sequence[Path], *, exif: bool, skip_bad: bool) -> tuple[Path, tuple[int, int]]:
    """The first image, or the first that can be opened, and its (H, W)."""
    for path in files[:-1]:
        try:
            return path, stored_size(path, exif=exif)
        except FileError:
            if not skip_bad:
                raise
    return files[-1], stored_size(files[-1], exif=exif)


def check_per_class(per_class: int | None) -> None:
    """Raise UsageError unless `per_class` is None or at least 1."""
    if per_class is not None and per_class < 1:
        raise UsageError(f"expected at least 1 image per class, got {per_class}")


def _choose(name: str, files: Sequence[Path], per_class: int | None, seed: int) -> Sequence[Path]:
    """At most `per_class` of the files, in their order."""
    if per_class is None or len(files) <= per_class:
        return files
    return [files[index] for index in draw(name, len(files), per_class, seed)]


def draw(name: str, count: int, chosen: int, seed: int) -> list[int]:
    """Which `chosen` of a class's `count` images, ascending; depends on seed and class name only."""
    generator = random.Random(f"{seed}/{name}".encode("utf-8", "surrogateescape"))
    return sorted(generator.sample(range(count), chosen))


def check_size(size: tuple[int, int] | None) -> None:
    """Raise UsageError unless `size` is None or at least one pixel each way."""
    if size is not None and min(size) < 1:
        raise UsageError(f"expected an image size of at least 1x1, got {size[0]}x{size[1]}")


def allocate(shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Room for uint8 pixels (M, C, H, W); UsageError where memory does not suffice."""
    import torch

    try:
        return torch.empty(shape, dtype=torch.uint8)
    except RuntimeError as error:
        count, channels, height, width = shape
        gigabytes = count * channels * height * width / 1e9
        raise UsageError(
            f"{count} images of {channels}x{height}x{width} need {gigabytes:.1f} GB, more than there is: "
            "use fewer images per class or a smaller --image-size"
        ) from error


def run_all(task: Callable[[int], None], total: int, workers: int, progress: Progress | None) -> None:
    """Run `task` on every index below `total`, in order or in threads.

    The first failure in order is the one raised. On Ctrl-C or failure only the tasks being run are waited
    for, one a thread.
    """
    stopping = threading.Event()

    def chunk(start: int) -> int:
        stop = min(start + CHUNK, total)
        for index in range(start, stop):
            if stopping.is_set():
                break
            task(index)
        return stop

    starts = range(0, total, CHUNK)
    if workers == 0:
        workers = min(8, os.cpu_count() or 1) if total >= MANY else 1
    if workers <= 1:
        for done in map(chunk, starts):
            if progress is not None:
                progress(done, total)
        return
    executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="rlu-decode")
    try:
        for done in executor.map(chunk, starts):
            if progress is not None:
                progress(done, total)
    finally:
        stopping.set()
        executor.shutdown(wait=True, cancel_futures=True)
