"""The images of the benchmarks by name: official files where a path is given, else stand-ins."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from benchmarks.glyphs import font_versions, glyph_images, write_npz
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset, per_class_subset

CACHE = Path(os.environ.get("RLU_BENCHMARK_CACHE", Path.home() / ".cache" / "rlu-benchmarks"))
"""Where drawn and resized images are kept between runs."""


@lru_cache(maxsize=2)
def images(name: str) -> ImageSet:
    """A data set by name.

    ``glyphs-62-32-200``: 62 classes of 200 images of side 32, see `benchmarks.glyphs`;
    ``fashion-mnist-32-2000``: 2,000 images a class in colour, resized to side 32;
    anything else is what `open_dataset` takes, as it is.
    """
    kind, *numbers = name.rsplit("-", 3) if name.startswith("glyphs-") else name.rsplit("-", 2)
    if kind == "glyphs":
        classes, size, per_class = map(int, numbers)
        drawn_by = hashlib.sha256(font_versions().encode()).hexdigest()[:12]
        path = CACHE / f"{name}-{drawn_by}.npz"
        if not path.exists():
            _save(glyph_images(classes, per_class=per_class, size=size), path)
        return open_dataset(str(path))
    if kind == "fashion-mnist" and len(numbers) == 2:
        size, per_class = map(int, numbers)
        path = CACHE / f"{name}.npz"
        if not path.exists():
            whole = open_dataset("fashion-mnist", channels=3, size=(size, size))
            rows = per_class_subset(whole, per_class, seed=0)
            _save(ImageSet(whole.pixels[rows], whole.labels[rows], whole.names), path)
        return open_dataset(str(path))
    return open_dataset(name)


def _save(made: ImageSet, path: Path) -> None:
    """Whole or not at all: another benchmark may be reading."""
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    write_npz(made, unfinished)
    unfinished.rename(path)
