"""The same number of images of every class."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.images.load import ImageSet, draw
from rlu_cli.images.order import some


def per_class_subset(images: ImageSet, per_class: int, seed: int) -> npt.NDArray[np.int64]:
    """Indices of `per_class` images of each class, class by class, ascending in each.

    A class's draw depends on the seed, its name and its size only: it is the one that ``load_images``
    makes from a class folder.

    Raises
    ------
    MismatchError
        A class has fewer images.
    """
    if per_class < 1:
        raise UsageError(f"expected at least 1 image per class, got {per_class}")
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
    labels = images.labels.numpy()
    chosen = []
    for index, name in enumerate(images.names):
        members = np.flatnonzero(labels == index)
        chosen.append(members[draw(name, len(members), per_class, seed)])
    return np.concatenate(chosen).astype(np.int64)
