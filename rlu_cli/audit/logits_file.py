"""Logits, labels and embeddings that the user computed: a NumPy archive, checked before it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlu_cli.core.types import Activations, Head, IntArray
from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.npz_io import read_npz
from rlu_cli.files.sniff import FileKind, sniff
from rlu_cli.files.text import names as listed

LOCAL = "local_"
"""What the arrays of a local model begin with, in a file that has the global model's too."""

_PROBABILITY_SLACK = 1e-3
_REPRODUCED = 3e-2
"""Largest deviation from W e + b, in units of the largest logit: half precision and TF32 have room."""

_EXPORT = "write it with np.savez(path, logits=…, labels=…, embeddings=…)"


@dataclass(frozen=True)
class LogitsFile:
    """The numeric arrays of one file, by name."""

    path: Path
    tensors: Mapping[str, Tensor]

    def has(self, name: str) -> bool:
        """Whether there is an array of this name."""
        return name in self.tensors

    def activations(
        self, prefix: str = "", *, num_classes: int | None = None, labels: IntArray | None = None
    ) -> Activations:
        """The arrays ``logits``, ``labels`` and ``embeddings``, with ``prefix`` before their names.

        Parameters
        ----------
        num_classes : N, where the file can't decide it
        labels : of the samples, for a file without labels of its own

        Raises
        ------
        FileError
            An array is missing.
        MismatchError
            Arrays of the wrong type or shape, numbers that aren't finite, or probabilities.
        """
        logits = self._matrix(f"{prefix}logits", "(M samples, N classes)")
        self._check_logits(f"{prefix}logits", logits, num_classes)
        name = f"{prefix}labels"
        if labels is None or name in self.tensors:
            labels = self._labels(name, logits.shape[1])
        if len(labels) != len(logits):
            raise self._wrong(f"{prefix}logits", f"{len(labels)} rows, one for each label", f"{len(logits)}")
        embeddings = None
        name = f"{prefix}embeddings"
        if name in self.tensors:
            embeddings = self._matrix(name, "(M samples, L embedding values)")
            if len(embeddings) != len(logits):
                raise self._wrong(name, f"{len(logits)} rows, as the logits have", f"{len(embeddings)}")
        return Activations(logits, embeddings, labels)

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self.tensors:
            raise FileError(
                f"{self.path}: expected an array called {name}, found {listed(self.tensors, 12)}: {_EXPORT}"
            )
        return np.asarray(self.tensors[name].numpy())

    def _matrix(self, name: str, form: str) -> NDArray[np.floating]:
        array = self._array(name)
        if array.dtype.kind != "f" or array.ndim != 2 or array.size == 0:
            raise self._wrong(
                name, f"floating-point numbers of shape {form}", f"{array.dtype} of shape {array.shape}"
            )
        if not np.all(np.isfinite(array)):
            raise self._wrong(name, "finite numbers", "NaN or infinity")
        return array.astype(np.float32) if array.dtype.itemsize < 4 else array

    def _labels(self, name: str, num_classes: int) -> IntArray:
        array = self._array(name)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise self._wrong(
                name, "whole numbers of shape (M,)", f"{array.dtype} of shape {tuple(array.shape)}"
            )
        if len(array) and not 0 <= array.min() <= array.max() < num_classes:
            found = f"{array.min()} to {array.max()}"
            raise self._wrong(name, f"output indices from 0 to {num_classes - 1}", found)
        return array.astype(np.int64)

    def _check_logits(self, name: str, logits: NDArray[np.floating], num_classes: int | None) -> None:
        if num_classes is not None and logits.shape[1] != num_classes:
            raise self._wrong(name, f"{num_classes} columns, one for each class", f"{logits.shape[1]}")
        if logits.min() >= 0 and np.allclose(logits.sum(axis=1), 1.0, atol=_PROBABILITY_SLACK):
            raise self._wrong(name, "logits, which go into the softmax", "rows of probabilities")

    def _wrong(self, name: str, expected: str, found: str) -> MismatchError:
        return MismatchError(f"{self.path}: expected in {name} {expected}, found {found}: {_EXPORT}")


def read_logits(path: Path) -> LogitsFile:
    """Read a file of logits; nothing in it is ever unpickled.

    Raises
    ------
    FileError
        Unreadable, damaged, of another kind, or without numeric arrays.
    """
    kind = sniff(path)
    if kind is not FileKind.NPZ:
        raise FileError(
            f"{path}: expected a NumPy archive (.npz) with the arrays logits and labels, found a "
            f"{kind.value}: {_EXPORT}"
        )
    tensors, _ = read_npz(path)
    return LogitsFile(path, tensors)


def reproduces(activations: Activations, head: Head) -> bool:
    """Whether logits = embeddings · Wᵀ + b, to rounding; True where embeddings are unknown."""
    if activations.embeddings is None:
        return True
    expected = activations.embeddings.astype(np.float64) @ head.weight.T
    if head.bias is not None:
        expected += head.bias
    deviation = float(np.abs(expected - activations.logits).max())
    return deviation <= _REPRODUCED * float(np.abs(activations.logits).max())


def as_tensors(activations: Activations) -> dict[str, Tensor]:
    """Logits, embeddings and labels, for a digest."""
    known = {"logits": activations.logits, "labels": activations.labels}
    if activations.embeddings is not None:
        known["embeddings"] = activations.embeddings
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in known.items()}
