"""The dense layers before the head, whose gradient of one batch has one rank for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlu_cli.core.types import Head, HeadUpdate


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What a layer reads of the auxiliary samples under the global model, x, shape (M, d).

    All clients of a model share it, so what follows from it is worked out once.
    """

    values: Tensor

    @cached_property
    def floors(self) -> Tensor:
        """The least value of each input, shape (d,), float64: 0 behind a rectifier, black for pixels."""
        return self.values.min(dim=0).values.double()

    @cached_property
    def low(self) -> Tensor:
        """Which inputs lie on their floor, shape (M, d)."""
        return self.values <= self.floors

    @cached_property
    def informative(self) -> Tensor:
        """Which inputs lie on their floor for some samples and above it for others, shape (d,)."""
        count, times = len(self.values), self.low.sum(dim=0)
        return (times > max(1.0, 0.01 * count)) & (times < count)

    @cached_property
    def equations(self) -> tuple[float, float]:
        """How many informative inputs of a median sample lie on their floors, and how many there are."""
        zeros = self.low[:, self.informative].sum(dim=1).double().median()
        return float(zeros), float(self.informative.sum())


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """z = W x + b with rectified output max(z, 0), as the global model has it and as the client moved it.

    layer : W (n, d) and b (n,)
    update : ΔW and Δb
    inputs : x of the auxiliary samples
    constant : what the scheme adds to every gradient of W and b, None where nothing
    """

    layer: Head
    update: HeadUpdate
    inputs: LayerInputs
    constant: Head | None = None


@dataclass(frozen=True, eq=False)
class DenseTail:
    """Dense layers in a row, of which each reads the rectified output of the one before.

    layers : the last one's rectified output is the embedding
    searched : how many of them, from the first on, samples are looked for in; one or two
    """

    layers: tuple[DenseLayer, ...]
    searched: int = 1


@dataclass(frozen=True, eq=False)
class Factors:
    """What a layer's mean gradient is made of: G = (1/B) Σ_i δ_i (x_i, 1)ᵀ + noise, by its singular vectors.

    gradient : G = (∇W | ∇b), shape (n′, d′ + 1), without rows and columns of zeros
    rows, columns : of the layer's outputs and inputs, those that are kept, shapes (n′,) and (d′,)
    left, values, right : singular vectors and values above the noise, shapes (n′, R), (R,), (d′ + 1, R)
    noise : standard deviation of the rounding errors in G, from the singular values below
    """

    gradient: Tensor
    rows: Tensor
    columns: Tensor
    left: Tensor
    values: Tensor
    right: Tensor
    noise: float

    @property
    def rank(self) -> int:
        """R: the number of samples, but for those that are below the noise."""
        return len(self.values)

    @cached_property
    def inverse(self) -> Tensor:
        """G⁺, shape (d′ + 1, n′)."""
        return (self.right / self.values) @ self.left.T


_EDGE = 1.3
"""How far above the largest singular value of white noise that of rounding errors may lie: they are larger
for larger weights."""

_PRECISION = 1e-13
"""Of double precision, relative to the largest singular value."""

_BULK = 0.15
"""Of the largest one, which the median singular value of noise exceeds, and that of few samples doesn't."""


def factorise(gradient: Head, most: int) -> Factors:
    """The singular vectors of a layer's gradient, and where its noise begins.

        R = min { k : σ_{k+1} ≤ 1.3 ε_k (√(n−k) + √(d+1−k)) },     ε_k² = Σ_{j>k} σ_j² / ((n−k)(d+1−k))

    Noise of standard deviation ε has no larger singular value than that; and σ_{k+1} must not be much larger
    than the median of those after it, or they are no noise. R is ``most`` at most.
    """
    assert gradient.bias is not None
    whole = torch.cat(
        (torch.from_numpy(gradient.weight), torch.from_numpy(gradient.bias)[:, None]), dim=1
    ).double()
    rows = whole.any(dim=1).nonzero()[:, 0]
    columns = whole[:, :-1].any(dim=0).nonzero()[:, 0]
    kept = whole[rows][:, torch.cat((columns, columns.new_tensor([whole.shape[1] - 1])))]
    left, values, right = torch.linalg.svd(kept, full_matrices=False)
    n, d = kept.shape
    rank, noise = min(n, d, most), 0.0
    for k in range(min(n, d, most + 1)):
        level = float(values[k:].square().sum() / ((n - k) * (d - k))) ** 0.5
        if float(values[k]) <= _PRECISION * float(values[0]):
            rank, noise = k, _PRECISION * float(values[0])
            break
        if k < most and float(values[k:].median()) < _BULK * float(values[k]):
            continue
        if k == most or float(values[k]) <= _EDGE * level * ((n - k) ** 0.5 + (d - k) ** 0.5):
            rank, noise = k, level
            break
    return Factors(kept, rows, columns, left[:, :rank], values[:rank], right[:rank].T, noise)


_SPARE = 10
"""Rows and columns beyond the samples, of which the noise is read and mistakes are seen."""

_MOST_SAMPLES = 100
"""Beyond, the search takes too long."""

_EQUATIONS = 1.4
"""Zeros and links between layers for each of the numbers that make a sample of the row spaces."""


def separable(tail: DenseTail, total: int, num_classes: int) -> DenseTail | None:
    """The part of the layers in which so many samples can be looked for, None where there is none.

    A sample is p in R^total for each layer searched. Its inputs on their floors give an equation each, and so
    does each input of a second layer. That must be two fifths more than numbers.
    """
    if total > _MOST_SAMPLES:
        return None
    large = [min(_shape(each)) >= total + _SPARE + num_classes for each in tail.layers]
    telling = [layer.inputs.equations for layer in tail.layers]
    for first in range(len(large)):
        for searched in (2, 1):
            part = range(first, first + searched)
            if part.stop > len(large) or not all(large[index] for index in part):
                continue
            equations = telling[first][0] + (telling[first + 1][1] if searched == 2 else 0)
            if equations >= _EQUATIONS * total * searched:
                return DenseTail(tail.layers[first:], searched)
    return None


def _shape(layer: DenseLayer) -> tuple[int, int]:
    """Of its gradient; 0 of a layer that was frozen."""
    n, d = layer.layer.weight.shape if layer.update.weight.any() else (0, 0)
    return int(n), int(d) + 1
