"""Single samples' gradients out of a batch's, by the rank and the zeros of dense layers' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlu_cli.core.dense_layers import DenseTail, Factors, factorise, informative, input_floors, separable
from rlu_cli.core.gradients import mean_gradient
from rlu_cli.core.parallel import one_thread
from rlu_cli.core.types import FloatArray, Head, IntArray, Observation

_STARTS, _FEWEST_STARTS, _WORK = 300, 60, 300 * 64**2
"""Auxiliary samples whose zeros a sweep begins with, fewer where many numbers make a sample: at most so many
times the numbers' square."""

_COORDINATES = 600
"""Inputs of a layer that the search looks at, at most."""

_SWEEPS, _IDLE = 60, 6
"""Sweeps at most, and those in a row that may find nothing."""

_ITERATIONS = 25
_OWN_FROM = 10
"""Reweightings, from where on a candidate's own zeros count and not its start's."""

_NOISE_RATIO = 2.0
"""How far δ may lie outside the gradient's column space, in units of what noise puts there."""

_SOFTMAX_ERROR = 0.05
"""By how much r ∝ s − onehot as the column space has it and as the inputs have it may differ, r_y = −1."""

_SCALE_ERROR, _AGREEING = 0.15, 3
"""Relative, of the scale that a candidate tells against that of the others, and how many must agree on one
that training values don't explain."""

_SAME = 0.5
"""Above which xᵀ G⁺ δ, B for a sample's own x and δ and 0 for two samples', says that both are one."""

_NEGLIGIBLE = 1e-4
"""What is left of a δ, relative, beside those found, where it is one of them or a mix of them."""

_BELOW = 0.02
"""How far below its floor an input may be found, relative to the largest."""


@dataclass(frozen=True, eq=False)
class Disaggregated:
    """The samples of a batch that could be told apart.

    labels : shape (K,)
    residuals : r = onehot − s of each, shape (K, N)
    errors : how far r is off, shape (K,)
    scale : of the update, relative to what the training values make of it
    deviation : standard error of its logarithm
    rank : samples that are above the noise
    """

    labels: IntArray
    residuals: FloatArray
    errors: FloatArray
    scale: float
    deviation: float
    rank: int


@dataclass(frozen=True, eq=False)
class _Space:
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
class _Candidates:
    """Possible samples: x = V p, with x's constant 1.

    inputs : of the first layer, all d of them, on or above their floors, shape (K, d)
    plausible : whether no input lies below its floor by more than noise
    """

    inputs: Tensor
    plausible: Tensor


@dataclass(frozen=True, eq=False)
class _Verified:
    """Candidates with the residual that fits the gradient best.

    residuals : r with r_y = −1 before scaling by 1 − s_y, shape (K, N), sum 0
    own : s_y under the candidate's inputs, shape (K,)
    errors : largest difference of r and (s − onehot)/(1 − s_y)
    ratios : how far δ lies outside the column space of G, in units of the noise there
    deltas : δ of each layer, on its kept rows
    duals : G⁺ δ of the first layer
    scales : xᵀ G⁺ δ / B
    """

    labels: Tensor
    residuals: Tensor
    own: Tensor
    errors: Tensor
    ratios: Tensor
    deltas: list[Tensor]
    duals: Tensor
    inputs: Tensor
    scales: Tensor


def told_apart(observation: Observation, *, scale_known: bool) -> Disaggregated | None:
    """`disaggregate` for a client of one step; None too where no layers are large enough for it."""
    training, N = observation.training, observation.head.num_classes
    if observation.dense is None:
        return None
    tail = separable(observation.dense, training.samples, N)
    if tail is None:
        return None
    gradients = [
        mean_gradient(
            replace(observation, head=layer.layer, update=layer.update, constant_gradient=layer.constant)
        )
        for layer in tail.layers
    ]
    with one_thread():  # many small systems
        return disaggregate(
            tail,
            gradients,
            observation.head,
            training.samples,
            scale_known=scale_known,
            seed=observation.seed,
        )


def disaggregate(
    tail: DenseTail,
    gradients: Sequence[Head],
    head: Head,
    total: int,
    *,
    scale_known: bool = True,
    seed: int = 0,
) -> Disaggregated | None:
    """The samples of one batch, one by one, as far as they can be told apart.

        G = (1/B) Σ_i δ_i (x_i, 1)ᵀ,     δ_i = M_i Wᵀ (s(x_i) − onehot(y_i)),   x_i ≥ floor, often on it

    The gradient of a dense layer has rank B while B is smaller than its sides, so each (x_i, 1) = V p_i lies
    in its row space. There it is a point with many zeros: from the zeros of an auxiliary sample, reweighted
    least squares min_p Σ_j |(V p)_j| over those j find such points, over two layers in a row at once where
    there are, as then V₂ p₂ = max(W₁ V₁ p₁ + b₁, 0) as well. A point is a sample if the residual r that puts
    δ = M Wᵀ r closest to the column space of G puts it there up to the noise, has one negative entry, and
    is proportional to s(x) − onehot(y). The column space without the δ found holds the others.

    Parameters
    ----------
    gradients : ∇W and ∇b of each layer of ``tail``, means over the batch
    head : the output layer after them
    total : B
    scale_known : whether G is of the size that training made it, as far as is known; else samples must agree

    Returns
    -------
    None where G has no rank that noise would leave it

    Source: after Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning, NeurIPS
    2024, who sample the zeros of δ at random.
    """
    factors = [factorise(gradient, total) for gradient in gradients[: tail.searched]]
    if not all(0 < each.rank < min(each.gradient.shape) - head.num_classes for each in factors):
        return None
    return _Search(tail, factors, head, total, scale_known, seed).run()


class _Search:
    """Finds samples, sweep by sweep."""

    def __init__(
        self,
        tail: DenseTail,
        factors: list[Factors],
        head: Head,
        total: int,
        scale_known: bool,
        seed: int,
    ) -> None:
        self._total, self._scale_known = total, scale_known
        self._generator = torch.Generator().manual_seed(seed)
        self._spaces = [
            _space(layer.layer, layer.inputs, each) for layer, each in zip(tail.layers, factors, strict=False)
        ]
        self._layers = [
            (torch.from_numpy(layer.layer.weight), torch.from_numpy(layer.layer.bias))
            for layer in tail.layers
            if layer.layer.bias is not None
        ]
        self._head = torch.from_numpy(head.weight)
        self._head_bias = torch.zeros(len(head.weight)) if head.bias is None else torch.from_numpy(head.bias)
        N = head.num_classes
        self._sum_zero = torch.linalg.qr(torch.eye(N, dtype=torch.float64) - 1.0 / N).Q[:, : N - 1]
        self._rank = max(each.rank for each in factors)
        self._least = min(each.rank for each in factors)
        self._explained = [each.gradient.new_zeros(len(each.gradient), 0) for each in factors]
        self._duals = factors[0].gradient.new_zeros(0, factors[0].gradient.shape[1])
        self._found: list[tuple[int, Tensor, float]] = []
        self._scale: float | None = None
        self._scales: list[float] = []

    def run(self) -> Disaggregated:
        """Sweeps until all are found or nothing comes any more."""
        idle = 0
        for _ in range(_SWEEPS):
            if len(self._found) >= self._least or idle >= _IDLE:
                break
            new = self._sweep(thinned=idle > 0)
            idle = 0 if new else idle + 1
        labels = [label for label, _, _ in self._found]
        N = len(self._head)
        residuals = torch.stack([r for _, r, _ in self._found]) if self._found else torch.zeros(0, N)
        errors = torch.tensor([error for _, _, error in self._found], dtype=torch.float64)
        scale, deviation = _middle(self._scales)
        return Disaggregated(
            np.array(labels, dtype=np.int64),
            residuals.double().numpy(),
            errors.numpy(),
            scale,
            deviation,
            self._rank,
        )

    def _sweep(self, *, thinned: bool) -> int:
        """How many samples one more sweep over the auxiliary samples' zeros finds."""
        count = len(self._spaces[0].zeros)
        left = sum(space.factors.rank - len(self._found) for space in self._spaces)
        starts_now = max(_FEWEST_STARTS, min(_STARTS, _WORK // left**2))
        picked = torch.randperm(count, generator=self._generator)[:starts_now]
        starts = [space.zeros[picked] for space in self._spaces]
        if thinned:
            size = starts[0].shape
            share = 0.5 + 0.5 * torch.rand(size[0], 1, generator=self._generator)
            starts[0] = starts[0] & (torch.rand(size, generator=self._generator) < share)
        bases = []
        for space, explained in zip(self._spaces, self._explained, strict=True):
            factors = space.factors
            left = factors.rank - explained.shape[1]
            rest = (factors.left - explained @ (explained.T @ factors.left)) * factors.values
            _, values, turn = torch.linalg.svd(rest, full_matrices=False)
            bases.append((values[:left], factors.right @ turn[:left].T))
        candidates = _candidates(self._spaces, bases, starts)
        inputs = candidates.inputs[candidates.plausible]
        if not len(inputs):
            return 0
        return self._accept(self._verified(inputs))

    def _verified(self, inputs: Tensor) -> _Verified:
        jacobians, confidence = self._jacobians(inputs)
        first = self._spaces[0].factors
        views = jacobians[0] @ self._sum_zero
        outside = views - first.left @ (first.left.T @ views)
        small = torch.linalg.eigh(outside.transpose(1, 2) @ outside).eigenvectors[:, :, 0]
        r = small @ self._sum_zero.T
        r = torch.where((r > 0).sum(1, keepdim=True) * 2 >= r.shape[1], r, -r)
        labels = r.argmin(dim=1)
        r = r / -r.gather(1, labels[:, None]).clamp(max=-1e-300)
        own = confidence.gather(1, labels[:, None])
        told = (confidence / (1 - own).clamp(min=1e-300)).scatter(1, labels[:, None], -1.0)
        deltas = [(jacobian @ r[:, :, None])[:, :, 0] for jacobian in jacobians]
        delta = deltas[0]
        duals = delta @ first.inverse.T
        beyond = (delta - (delta @ first.left) @ first.left.T).norm(dim=1)
        expected = first.noise * (len(first.left) - first.rank) ** 0.5 * duals.norm(dim=1)
        whole = torch.cat((inputs[:, first.columns], torch.ones(len(inputs), 1, dtype=inputs.dtype)), dim=1)
        scales = (whole * duals).sum(dim=1) * (1 - own[:, 0]) / self._total
        return _Verified(
            labels,
            r,
            own[:, 0],
            torch.nan_to_num((r - told).abs().amax(dim=1), nan=torch.inf),
            torch.nan_to_num(beyond / expected, nan=torch.inf),
            deltas,
            duals,
            whole,
            scales,
        )

    def _accept(self, found: _Verified) -> int:
        """Keep the candidates that are samples, the surest first."""
        good = (found.errors < _SOFTMAX_ERROR) & (found.ratios < _NOISE_RATIO) & (found.scales > 0)
        if not good.any():
            return 0
        if self._scale is None:
            self._scale = _scale_of(found.scales[good], known=self._scale_known)
        if self._scale is None:
            return 0
        good &= (found.scales * self._scale - 1).abs() < _SCALE_ERROR
        order = (found.ratios.clamp(min=1) * (1 + 100 * found.errors)).argsort()
        new = 0
        for index in order[good[order]].tolist():
            if len(self._found) >= self._least:
                break
            new += self._keep(found, index)
        return new

    def _keep(self, found: _Verified, index: int) -> bool:
        """Add a candidate to those found, unless it is one of them."""
        scale = self._scale or 1.0
        own = float(found.own[index])
        shared = self._duals @ found.inputs[index] * (scale / self._total)
        if len(shared) and float(shared.abs().max()) > _SAME:
            return False
        rests = []
        for explained, deltas in zip(self._explained, found.deltas, strict=True):
            delta = deltas[index] / deltas[index].norm()
            rest = delta - explained @ (explained.T @ delta)
            rests.append(rest - explained @ (explained.T @ rest))
        if float(rests[0].norm()) < _NEGLIGIBLE:
            return False
        self._explained = [
            torch.cat((explained, (rest / rest.norm())[:, None]), dim=1)
            for explained, rest in zip(self._explained, rests, strict=True)
        ]
        self._scales.append(float(found.scales[index]))
        self._duals = torch.cat((self._duals, (found.duals[index] * (1 - own))[None]))
        r = -found.residuals[index] * (1 - own)
        self._found.append((int(found.labels[index]), r, float(found.errors[index]) * (1 - own)))
        return True

    def _jacobians(self, inputs: Tensor) -> tuple[list[Tensor], Tensor]:
        """∂q/∂z of each layer on its kept rows, shape (K, n′, N), and s."""
        states, x = [], inputs
        for weight, bias in self._layers:
            z = x @ weight.T + bias
            states.append(z > 0)
            x = z.clamp(min=0)
        confidence = (x @ self._head.T + self._head_bias).softmax(dim=1)
        jacobians: list[Tensor] = []
        after = self._head.T.expand(len(inputs), -1, -1)
        for index in reversed(range(len(self._layers))):
            jacobians.insert(0, after * states[index][:, :, None])
            if index:
                after = self._layers[index][0].T @ jacobians[0]
        kept = zip(jacobians, self._spaces, strict=False)
        return [jacobian[:, space.factors.rows] for jacobian, space in kept], confidence


def _middle(scales: Sequence[float]) -> tuple[float, float]:
    """The median scale of the update over what single samples say, and its relative standard error."""
    if not scales:
        return 1.0, math.inf
    logs = np.log(scales)
    middle = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - middle)))
    return math.exp(-middle), 1.2533 * spread / math.sqrt(len(logs))


def _scale_of(scales: Tensor, *, known: bool) -> float | None:
    """1 where it may be and any candidate says so, else the one on which enough of them agree."""
    if known and bool(((scales - 1).abs() < _SCALE_ERROR).any()):
        return 1.0
    middle = scales.median()
    agreeing = scales[(scales / middle - 1).abs() < _SCALE_ERROR]
    return None if len(agreeing) < _AGREEING else 1.0 / float(agreeing.median())


def _space(layer: Head, inputs: FloatArray, factors: Factors) -> _Space:
    x = torch.from_numpy(inputs).double()
    floors = input_floors(x)
    zeros = x <= floors
    share = zeros.double().mean(dim=0)
    kept = factors.columns
    used = informative(x, floors)[kept].nonzero()[:, 0]
    if len(used) > _COORDINATES:
        telling = (share * (1 - share))[kept][used].argsort(descending=True, stable=True)[:_COORDINATES]
        used = used[telling.sort().values]
    assert layer.bias is not None
    weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    return _Space(factors, weight, bias, used, zeros[:, kept][:, used], floors)


def _candidates(
    spaces: Sequence[_Space], bases: Sequence[tuple[Tensor, Tensor]], starts: Sequence[Tensor]
) -> _Candidates:
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
    inputs = first.floors.expand(len(p), -1).clone()
    columns = first.factors.columns
    x = p[:, :R] @ kept.T
    depth = x - first.floors[columns]
    largest = depth.amax(dim=1, keepdim=True)
    plausible = (depth.amin(dim=1, keepdim=True) > -torch.maximum(_BELOW * largest, 5 * noise))[:, 0]
    inputs[:, columns] = torch.where(depth < 3 * noise, first.floors[columns], x)
    return _Candidates(inputs, plausible & torch.isfinite(x).all(dim=1))


class _Link:
    """The equations of the second of two layers: V₂ p₂ is 0, or W₁ V₁ p₁ + b₁ where that is positive."""

    def __init__(
        self, first: _Space, second: _Space, bases: Sequence[tuple[Tensor, Tensor]], zeros: Tensor
    ) -> None:
        self._values = bases[1][0]
        self._noise = second.factors.noise
        _, kept, constant = first.basis(bases[0][1])
        self._V, _, self._constant = second.basis(bases[1][1])
        rows = second.factors.columns[second.used]
        # inputs that are on their floor for all of the client's samples add nothing but that
        lost = torch.ones(first.weight.shape[1], dtype=torch.bool)
        lost[first.factors.columns] = False
        offset = first.bias + first.weight[:, lost] @ first.floors[lost]
        self._T = (first.weight[rows][:, first.factors.columns] @ kept) + offset[rows, None] * constant
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
