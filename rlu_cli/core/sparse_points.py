"""Points of the row spaces of dense layers' gradients that have many zeros: where samples may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlu_cli.core.dense_layers import Factors, LayerInputs
from rlu_cli.core.types import Head

_COORDINATES = 600
"""Inputs of a layer that the search looks at, at most."""

_ITERATIONS = 25
_OWN_FROM = 10
"""Reweightings, from where on a candidate's own zeros count and not its start's."""

_BELOW = 0.02
"""How far below its floor an input may be found, relative to the largest."""


@dataclass(frozen=True, eq=False)
class Space:
    """A layer as the search sees it.

    factors : of its gradient
    weight, bias : of all outputs and inputs
    used : of the kept inputs, those that the search looks at
    zeros : of the starts, on these inputs, shape (M, len(used))
    floors : of all inputs
    """

    factors: Factors
    weight: Tensor
    bias: Tensor
    used: Tensor
    zeros: Tensor
    floors: Tensor

    def basis(self, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of p: the inputs looked at above their floors, all kept inputs, and the constant."""
        floor = self.floors[self.factors.columns]
        above = right[:-1] - floor[:, None] * right[-1]
        return above[self.used], right[:-1], right[-1]


@dataclass(frozen=True, eq=False)
class SparsePoints:
    """Possible samples: x = V p, with x's constant 1.

    inputs : of the first layer, all d of them, shape (K, d)
    plausible : whether no input lies below its floor by more than noise
    """

    inputs: Tensor
    plausible: Tensor


def space_of(layer: Head, inputs: LayerInputs, factors: Factors) -> Space:
    """How the search sees a layer with these inputs of auxiliary samples, and its gradient."""
    kept = factors.columns
    used = inputs.informative[kept].nonzero()[:, 0]
    if len(used) > _COORDINATES:
        share = inputs.low.double().mean(dim=0)
        telling = (share * (1 - share))[kept][used].argsort(descending=True, stable=True)[:_COORDINATES]
        used = used[telling.sort().values]
    assert layer.bias is not None
    weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    return Space(factors, weight, bias, used, inputs.low[:, kept[used]], inputs.floors)


def sparse_points(
    spaces: Sequence[Space], bases: Sequence[tuple[Tensor, Tensor]], starts: Sequence[Tensor]
) -> SparsePoints:
    """Points of the row space with many inputs on their floors.

        min_p Σ_j w_j (V p)_j²,   w_j = 1/(|(V p)_j| + e)     again and again, with e getting smaller

    j goes over the start's zeros and what is below its floor, later over what is near it. Of two layers the
    second one's inputs are either 0 or what the first one puts out, whichever is closer.
    """
    first, second = spaces[0], spaces[1] if len(spaces) > 1 else None
    V, kept, constant = first.basis(bases[0][1])
    R = V.shape[1]
    squares = _outer(V, V)
    normal = V.new_zeros(R if second is None else R + bases[1][1].shape[1])
    normal[:R] = constant
    weights = starts[0].to(V.dtype)
    if second is not None:
        link = _Link(first, second, bases, starts[1])
    for step in range(_ITERATIONS):
        system = (weights @ squares).view(-1, R, R)
        if second is not None:
            system = link.system(system)
        trace = system.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]
        if second is not None:
            system = system + trace * link.one_scale
        system = system + 1e-13 * trace * torch.eye(len(normal), dtype=V.dtype)
        p = torch.linalg.solve_ex(system, normal.expand(len(system), -1)).result
        p = p / (p[:, :R] @ constant)[:, None]
        above = p[:, :R] @ V.T
        typical = above.abs().mean(dim=1, keepdim=True)
        noise = first.factors.noise * (p[:, :R] / bases[0][0]).norm(dim=1, keepdim=True)
        floor = torch.maximum(typical * max(0.5 * 0.6**step, 1e-4), noise)
        if step >= _OWN_FROM:
            near = torch.maximum(typical * max(0.3 * 0.6 ** (step - _OWN_FROM), 1e-2), 3 * noise)
            on = above < near
        else:
            on = starts[0] | (above < 0)
        weights = on / (above.abs() + floor)
        if second is not None:
            link.update(p, step)
    columns = first.factors.columns
    inputs = V.new_zeros(len(p), len(first.floors))  # where all of G's column is 0, all of x is
    x = p[:, :R] @ kept.T
    depth = x - first.floors[columns]
    largest = depth.amax(dim=1, keepdim=True)
    plausible = (depth.amin(dim=1, keepdim=True) > -torch.maximum(_BELOW * largest, 5 * noise))[:, 0]
    inputs[:, columns] = torch.where(depth < 3 * noise, first.floors[columns], x)
    return SparsePoints(inputs, plausible & torch.isfinite(x).all(dim=1))


class _Link:
    """The equations of the second of two layers: V₂ p₂ is 0, or W₁ V₁ p₁ + b₁ where that is positive."""

    def __init__(
        self, first: Space, second: Space, bases: Sequence[tuple[Tensor, Tensor]], zeros: Tensor
    ) -> None:
        self._values = bases[1][0]
        self._noise = second.factors.noise
        _, kept, constant = first.basis(bases[0][1])
        self._V, _, self._constant = second.basis(bases[1][1])
        rows = second.factors.columns[second.used]
        columns = first.factors.columns  # the other inputs are 0 for all of the client's samples
        self._T = (first.weight[rows][:, columns] @ kept) + first.bias[rows, None] * constant
        self._on = ~zeros
        self._weights = torch.ones_like(zeros, dtype=self._V.dtype)
        self._TT, self._TV = _outer(self._T, self._T), _outer(self._T, self._V)
        self._VV = _outer(self._V, self._V)
        same = torch.cat((-constant, self._constant))
        self.one_scale = torch.outer(same, same)

    def system(self, first: Tensor) -> Tensor:
        """The normal equations of both layers, from those of the first one's zeros."""
        R, S = self._T.shape[1], self._V.shape[1]
        joined = self._weights * self._on
        corner = first + (joined @ self._TT).view(-1, R, R)
        cross = -(joined @ self._TV).view(-1, R, S)
        last = (self._weights @ self._VV).view(-1, S, S)
        return torch.cat(
            (torch.cat((corner, cross), dim=2), torch.cat((cross.transpose(1, 2), last), dim=2)), dim=1
        )

    def update(self, p: Tensor, step: int) -> None:
        """New weights, and later new zeros, from a solution."""
        R = self._T.shape[1]
        a, z = p[:, R:] @ self._V.T, p[:, :R] @ self._T.T
        if step >= _OWN_FROM:
            self._on = (a - z).abs() < a.abs()
        rest = torch.where(self._on, a - z, a).abs()
        noise = self._noise * (p[:, R:] / self._values).norm(dim=1, keepdim=True)
        typical = a.abs().mean(dim=1, keepdim=True)
        self._weights = 1 / (rest + torch.maximum(typical * max(0.5 * 0.6**step, 1e-4), noise))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """The products of all columns of two matrices, row by row, flattened."""
    return (a[:, :, None] * b[:, None, :]).flatten(1)
