"""The same number of images of every class."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import MismatchError
from rlu_cli.images.load import ImageSet, check_per_class, draw
from rlu_cli.images.order import some


def per_class_subset(images: ImageSet, per_class: int, seed: int) -> npt.NDArray[np.int64]:
    """Indices of exactly `per_class` images of each class, drawn as by :func:`draw_per_class`.

    Raises
    ------
    MismatchError
        A class has fewer images.
    """
    check_per_class(per_class)
    few = [
        f"{name} ({count})"
        for name, count in zip(images.names, images.counts, strict=True)
        if count < per_class
    ]
    if few:
        raise MismatchError(
            f"expected at least {per_class} images of each class, but {len(few)} of {len(images.names)} "
            f"classes have fewer ({some(few)}): ask for fewer per class or use a larger data set"
        )
    return draw_per_class(images, per_class, seed)


def draw_per_class(images: ImageSet, per_class: int | None, seed: int) -> npt.NDArray[np.int64]:
    """Indices of at most `per_class` images of each class (None: all), class by class, ascending in each.

    The draw is the one that ``load_images`` makes from a class folder.
    """
    check_per_class(per_class)
    labels = images.labels.numpy()
    chosen = []
    for index, name in enumerate(images.names):
        members = np.flatnonzero(labels == index)
        if per_class is not None and len(members) > per_class:
            members = members[draw(name, len(members), per_class, seed)]
        chosen.append(members)
    return np.concatenate(chosen).astype(np.int64)
