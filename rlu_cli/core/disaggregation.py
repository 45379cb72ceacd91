"""Single samples' gradients out of a batch's, by the rank and the zeros of dense layers' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlu_cli.core.dense_layers import DenseTail, Factors, factorise, separable
from rlu_cli.core.gradients import mean_gradient
from rlu_cli.core.parallel import one_thread
from rlu_cli.core.sparse_points import space_of, sparse_points
from rlu_cli.core.types import FloatArray, Head, IntArray, Observation

_STARTS, _FEWEST_STARTS, _WORK = 300, 60, 300 * 64**2
"""Auxiliary samples whose zeros a sweep begins with, fewer where many numbers make a sample: at most so many
times the numbers' square."""

_SWEEPS, _IDLE = 60, 6
"""Sweeps at most, and those in a row that may find nothing."""

_NOISE_RATIO = 2.0
"""How far δ may lie outside the gradient's column space, in units of what noise and rounding put there."""

_FLOAT32 = 2.0**-24
"""Relative error of a number that is rounded to float32, at most."""

_SOFTMAX_ERROR = 0.05
"""By how much r ∝ s − onehot as the column space has it and as the inputs have it may differ, r_y = −1."""

_SCALE_ERROR = 0.15
"""Relative, of the scale that a candidate tells against that of the others."""

_WHOLE = 0.05
"""How far from a whole number the times may be that a sample seems to have been in the batch."""

_FEWEST_COPIES, _MOST_COPIES = 0.25, 2.0
"""Copies of samples above the noise, over the samples that a batch has beside them. Where all are above it
they are all of those; a single seeming one among many is chance."""

AGREEING = 3
"""Samples that must agree on a scale that training values don't explain."""

_SAME = 0.5
"""Above which xᵀ G⁺ δ, B for a sample's own x and δ and 0 for two samples', says that both are one."""

_NEGLIGIBLE = 1e-4
"""What is left of a δ, relative, beside those found, where it is one of them or a mix of them."""


@dataclass(frozen=True, eq=False)
class Disaggregated:
    """The samples of a batch that could be told apart, those that were in it several times as often.

    labels : shape (K,)
    times : how often each is in the batch, shape (K,)
    residuals : r = onehot − s of each, shape (K, N)
    errors : how far r is off, shape (K,)
    scale : of the update, relative to what the training values make of it
    deviation : standard error of its logarithm
    rank : different samples that are above the noise
    """

    labels: IntArray
    times: IntArray
    residuals: FloatArray
    errors: FloatArray
    scale: float
    deviation: float
    rank: int


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
    parts = (part for each in gradients for part in (each.weight, each.bias) if part is not None)
    if not all(np.isfinite(part).all() for part in parts):
        return None
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

    A sample that is in the batch k times has xᵀ G⁺ δ = B/k, where one has B. So where the rank is below B, as
    of a client with fewer samples than its batch, and the size of G is known, it tells k.

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
        self._repeats = False
        self._generator = torch.Generator().manual_seed(seed)
        self._spaces = [
            space_of(layer.layer, layer.inputs, each)
            for layer, each in zip(tail.layers, factors, strict=False)
        ]
        self._layers = [
            (torch.from_numpy(layer.layer.weight), torch.from_numpy(layer.layer.bias))
            for layer in tail.layers
            if layer.layer.bias is not None
        ]
        self._head = torch.from_numpy(head.weight)
        self._head_bias = torch.zeros(len(head.weight)) if head.bias is None else torch.from_numpy(head.bias)
        self._rounding = _rounding([*(len(weight) for weight, _ in self._layers[1:]), len(head.weight)])
        N = head.num_classes
        self._sum_zero = torch.linalg.qr(torch.eye(N, dtype=torch.float64) - 1.0 / N).Q[:, : N - 1]
        self._rank = max(each.rank for each in factors)
        self._least = min(each.rank for each in factors)
        self._explained = [each.gradient.new_zeros(len(each.gradient), 0) for each in factors]
        self._duals = factors[0].gradient.new_zeros(0, factors[0].gradient.shape[1])
        self._found: list[tuple[int, Tensor, float, int]] = []
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
        N, times = len(self._head), [k for *_, k in self._found]
        labels = np.array([label for label, *_ in self._found], dtype=np.int64)
        residuals = torch.stack([r for _, r, *_ in self._found]) if self._found else torch.zeros(0, N)
        errors = np.array([error for _, _, error, _ in self._found], dtype=np.float64)
        scale, deviation = _middle(self._scales)
        if len(set(times)) == 1 and len(times) >= AGREEING and times[0] * self._rank > self._total:
            scale, times = scale * times[0], [1] * len(times)  # no room for copies: the update is larger
        return Disaggregated(
            labels.repeat(times),
            np.repeat(times, times),
            residuals.double().numpy().repeat(times, axis=0),
            errors.repeat(times),
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
        candidates = sparse_points(self._spaces, bases, starts)
        inputs = candidates.inputs[candidates.plausible]
        if not len(inputs):
            return 0
        return self._accept(self._verified(inputs))

    def _verified(self, inputs: Tensor) -> _Verified:
        jacobians, confidence = self._jacobians(inputs)
        first = self._spaces[0].factors
        views = jacobians[0] @ self._sum_zero
        outside = views - first.left @ (first.left.T @ views)
        squares = torch.nan_to_num(outside.transpose(1, 2) @ outside)
        small = torch.linalg.eigh(squares).eigenvectors[:, :, 0]
        r = small @ self._sum_zero.T
        r = torch.where((r > 0).sum(1, keepdim=True) * 2 >= r.shape[1], r, -r)
        whole = torch.cat((inputs[:, first.columns], torch.ones(len(inputs), 1, dtype=inputs.dtype)), dim=1)
        if r.shape[1] == 2:  # of (1, −1) and (−1, 1) that of which the update has a positive share
            own_duals = (jacobians[0] @ r[:, :, None])[:, :, 0] @ first.inverse.T
            r = torch.where((whole * own_duals).sum(dim=1, keepdim=True) >= 0, r, -r)
        labels = r.argmin(dim=1)
        r = r / -r.gather(1, labels[:, None]).clamp(max=-1e-300)
        own = confidence.gather(1, labels[:, None])
        told = (confidence / (1 - own).clamp(min=1e-300)).scatter(1, labels[:, None], -1.0)
        deltas = [(jacobian @ r[:, :, None])[:, :, 0] for jacobian in jacobians]
        delta = deltas[0]
        duals = delta @ first.inverse.T
        beyond = (delta - (delta @ first.left) @ first.left.T).norm(dim=1)
        noise = first.noise * (len(first.left) - first.rank) ** 0.5 * duals.norm(dim=1)
        expected = torch.hypot(noise, self._rounding * delta.norm(dim=1))
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
            scales = found.scales[good]
            self._repeats = self._scale_known and _may_repeat(scales, self._rank, self._spare)
            self._scale = 1.0 if self._repeats else _scale_of(scales, known=self._scale_known)
        if self._scale is None:
            return 0
        times = self._times(found.scales)
        good &= (found.scales * self._scale * times - 1).abs() < _SCALE_ERROR
        order = (found.ratios.clamp(min=1) * (1 + 100 * found.errors)).argsort()
        new = 0
        for index in order[good[order]].tolist():
            if len(self._found) >= self._least:
                break
            new += self._keep(found, index, int(times[index]))
        return new

    def _times(self, scales: Tensor) -> Tensor:
        """How often candidates were in the batch, 0 for those that fit no number of times."""
        if not self._repeats:
            return torch.ones_like(scales)
        times = _whole_times(scales)
        once = (scales - 1).abs() < _SCALE_ERROR
        return torch.where(once, 1.0, torch.where(times <= self._spare + 1, times, 0.0))

    @property
    def _spare(self) -> int:
        """How many samples of the batch may still be copies of those above the noise."""
        return max(0, self._total - self._rank - sum(k - 1 for *_, k in self._found))

    def _keep(self, found: _Verified, index: int, times: int) -> bool:
        """Add a candidate to those found, so many times, unless it is one of them or there are no more."""
        if times - 1 > self._spare:
            return False
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
        self._scales.append(times * float(found.scales[index]))
        self._duals = torch.cat((self._duals, (times * found.duals[index] * (1 - own))[None]))
        r = -found.residuals[index] * (1 - own)
        self._found.append((int(found.labels[index]), r, float(found.errors[index]) * (1 - own), times))
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


def _rounding(sums: Sequence[int]) -> float:
    """Relative error of a δ that was propagated back in float32.

        ρ² = u² Σ_l (1 + n_l/6),     u = 2⁻²⁴

    A sum of n terms of random signs, added one after another, rounds partial sums of size √k to u/√3 each:
    u √(n/6) of the whole. The noise below G's singular values doesn't show it: it is the same for all columns
    of a sample's share, and turns its δ. With few samples, whose share is large, it is more than that noise.

    Parameters
    ----------
    sums : terms that each layer behind sums up, n
    """
    return _FLOAT32 * math.sqrt(sum(1 + n / 6 for n in sums))


def _middle(scales: Sequence[float]) -> tuple[float, float]:
    """The median scale of the update over what single samples say, and its relative standard error."""
    if not scales:
        return 1.0, math.inf
    logs = np.log(scales)
    middle = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - middle)))
    return math.exp(-middle), 1.2533 * spread / math.sqrt(len(logs))


def _may_repeat(scales: Tensor, rank: int, spare: int) -> bool:
    """Whether candidates were in the batch several times, rather than its gradient being of another size.

    Then most are so a whole number of times, and the copies of all that are above the noise are about as many
    as the batch has samples beside them.

    Parameters
    ----------
    scales : xᵀ G⁺ δ / B
    spare : samples of the batch beside those above the noise
    """
    times = _whole_times(scales)
    times = times[times > 0]
    if spare < 1 or 2 * len(times) < len(scales) or not bool((times > 1).any()):
        return False
    copies = float((times - 1).mean()) * rank
    return _FEWEST_COPIES * spare <= copies <= _MOST_COPIES * spare + 1


def _whole_times(scales: Tensor) -> Tensor:
    """How often samples seem to have been in the batch, 0 for those that fit no whole number of times."""
    seen = 1 / scales
    times = seen.round().clamp(min=1)
    return torch.where((seen - times).abs() < _WHOLE, times, 0.0)


def _scale_of(scales: Tensor, *, known: bool) -> float | None:
    """The scale on which most candidates agree, with a handicap for 1 where it is known to be that."""
    near = (scales[:, None] / scales - 1).abs() < _SCALE_ERROR
    support = near.sum(dim=1)
    most = int(support.max())
    told = int(((scales - 1).abs() < _SCALE_ERROR).sum())
    if known and told and 2 * told >= most:
        return 1.0
    return None if most < AGREEING else 1.0 / float(scales[near[int(support.argmax())]].median())
