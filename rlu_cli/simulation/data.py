"""Who holds which images: auxiliary, held out, and the clients' shares."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlu_cli.audit.options import SimulationOptions
from rlu_cli.core.types import IntArray
from rlu_cli.errors import MismatchError
from rlu_cli.files.hashing import sha256_described
from rlu_cli.files.text import one_line
from rlu_cli.images import ImageSet, Normalization
from rlu_cli.images.datasets import per_class_subset
from rlu_cli.simulation.partition import dirichlet_partition
from rlu_cli.simulation.randomness import SHARES, SPLIT, stream_seed

_IN_MEMORY_BYTES = 2**31
"""Normalised images are kept up to this size, and made batch by batch above it."""

_TEST_SIZE = 1000

_LONGEST_NAME = 240
"""Bytes of a folder's name, with room for what marks it unfinished."""


class FederatedData:
    """A data set split into disjoint parts, ready to be fed to a model.

    aux : indices of the auxiliary images, the same number of each class
    test : indices of the held-out images
    shares : indices of each client's images, label-skewed (`dirichlet_partition`)
    """

    def __init__(
        self,
        images: ImageSet,
        normalization: Normalization,
        options: SimulationOptions,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        normalization.check_channels(images.pixels.shape[1])
        self.names = images.names
        self.labels: IntArray = images.labels.numpy()
        self.shape = tuple(images.pixels.shape[1:])
        self.device = device
        self._normalization = normalization
        self._pixels = images.pixels.to(device)
        self._targets = images.labels.to(device)
        small = images.pixels.numel() * 4 <= _IN_MEMORY_BYTES
        self._inputs = normalization.apply(self._pixels) if small else None
        self.aux = np.empty(0, dtype=np.int64)
        if options.aux_per_class:
            _check_folder_names(self.names)
            self.aux = per_class_subset(images, options.aux_per_class, stream_seed(seed, SPLIT))
        rest = np.setdiff1d(np.arange(len(self.labels)), self.aux)
        held_out = options.test_size
        if held_out is None:
            held_out = max(1, min(_TEST_SIZE, len(rest) // 5))
        if len(rest) <= held_out:
            raise MismatchError(
                f"expected more than {held_out} images beside the auxiliary ones, found "
                f"{len(rest)}: lower --test-size or --aux-per-class, or use more data"
            )
        rest = np.random.default_rng(stream_seed(seed, SPLIT, 1)).permutation(rest)
        self.test, train = np.sort(rest[:held_out]), np.sort(rest[held_out:])
        parts = dirichlet_partition(
            self.labels[train], options.clients, options.alpha, seed=stream_seed(seed, SHARES)
        )
        self.shares = [train[part] for part in parts]

    def batch(self, rows: IntArray) -> tuple[Tensor, Tensor]:
        """Normalised images (B, C, H, W) and labels (B,) on the device."""
        index = torch.from_numpy(rows).to(self.device)
        if self._inputs is not None:
            return self._inputs[index], self._targets[index]
        return self._normalization.apply(self._pixels[index]), self._targets[index]

    def counts(self, rows: IntArray) -> list[int]:
        """Samples of each class among ``rows``."""
        return [int(count) for count in np.bincount(self.labels[rows], minlength=len(self.names))]

    def partition_table(self) -> IntArray:
        """Samples of each class that each client holds, shape (K, N)."""
        return np.array([self.counts(share) for share in self.shares], dtype=np.int64)

    def write_aux(self, root: Path) -> None:
        """The auxiliary images as PNGs, one folder per class; a class appears whole or not at all."""
        from PIL import Image

        for n, name in enumerate(self.names):
            rows = self.aux[self.labels[self.aux] == n]
            folder, unfinished = root / name, root / f".{name}.unfinished"
            if folder.is_dir() or not len(rows):
                continue
            unfinished.mkdir(parents=True, exist_ok=True)
            for number, row in enumerate(rows):
                pixels = self._pixels[int(row)].cpu().permute(1, 2, 0).numpy()
                image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
                image.save(unfinished / f"{number:04d}.png")
            unfinished.rename(folder)


def data_digest(images: ImageSet) -> str:
    """SHA-256 of pixels, labels and class names, wherever they came from."""
    return sha256_described(
        {"class_names": list(images.names)}, {"pixels": images.pixels, "labels": images.labels}
    )


def _check_folder_names(names: Sequence[str]) -> None:
    """Refuse class names that would lie elsewhere as folders, be passed over, or be one folder.

    They may come from a file that somebody else made.

    Raises
    ------
    MismatchError
    """
    for name, count in Counter(names).items():
        passed_over = not name or name.startswith(".") or name == "__MACOSX"
        if passed_over or set(name) & set("/\\\0") or len(os.fsencode(name)) > _LONGEST_NAME or count > 1:
            raise MismatchError(
                "expected class names that can be the names of different folders, of auxiliary images, found "
                f"{one_line(repr(name), 60)}: rename the class, or pass --aux-per-class 0"
            )
