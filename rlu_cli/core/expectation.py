"""Expected softmax of Gaussian logits, at the measured means and wherever a shift takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlu_cli.core.draws import frame_shape, paired_normals
from rlu_cli.core.parallel import for_each
from rlu_cli.core.types import FloatArray, LogitMoments

_CPU_BLOCK = 2**21
"""Bytes of logits held at once: what a core's own cache holds, so that only one of the operations on them
goes to memory."""

_GPU_BLOCK = 2**25
"""The same for the cache that a GPU's cores share; more would only move the logits out to its memory."""

_TAME = 5.0
"""Standard deviation of a logit up to which exp(x) and exp(−x) both keep float32's digits: 7 σ is e^±35."""

_FAR = 60.0
"""Spread of a shift up to which exp(q − max q)·exp(shift) can't underflow float32."""

_Block = tuple[slice, tuple[Tensor, ...]]
"""Which frames, and E of their draws or of a part of them, shape (draws, N), of one sign or of both."""


@dataclass
class _Family:
    """Classes that share one factor, and so all of their draws but the mean.

    factor : F, shape (r, N), without the part common to all logits, which softmax doesn't see
    tame : whether every logit's standard deviation is at most `_TAME`; wild families have one class
    keeps : whether its exponentials stay for the next shift
    """

    classes: list[int]
    factor: Tensor
    tame: bool
    keeps: bool = False
    kept: list[_Block] = field(default_factory=list)


class SoftmaxExpectation:
    """E[softmax(μ_n + δ + x)], x ~ N(0, Σ̄_n), for all classes n and any shifts δ, over the same draws.

        x = ±F_nᵀ ξ,     ξ from `paired_normals`: one set for all classes, each with both signs

    F_n is the factor of `LogitMoments`: x has exactly the covariance Σ̄_n, singular or not, for r normal
    numbers. No softmax is formed. With E = exp(x) and w = exp(μ_n + δ), block of draws by block,

        Σ softmax(μ_n + δ + x) = w ∘ Eᵀ(1 / E w),     Σ softmax(μ_n + δ − x): the same with 1/E for E

    so a pair of draws takes one exponential a logit, and a further shift (another client, a later step) none,
    only the two products. Classes of the same factor share E, classes without covariance need no draws, and
    one of few samples only as many numbers. Where a logit spreads so widely that exp(x) would leave
    float32, E = exp(q − max q) of q = μ_n ± x instead, and of q = μ_n + δ ± x where δ is too large for that.

    Parameters
    ----------
    samples : M a class, rounded up to whole frames of pairs
    seed : of the draws; the same on every device
    device : "cpu", "cuda", "cuda:1", …
    keep : bytes of E to keep for further shifts; what doesn't fit is made again from the draws
    """

    def __init__(
        self, moments: LogitMoments, *, samples: int, seed: int, device: str = "cpu", keep: int = 0
    ) -> None:
        if samples < 2:
            raise ValueError(f"expected at least 2 Monte Carlo samples, got {samples}")
        pairs = (samples + 1) // 2
        self.device = torch.device(device)
        # MPS has no float64; its sums stay in float32.
        self.wide = torch.float32 if self.device.type == "mps" else torch.float64
        self.mean = torch.from_numpy(moments.mean).to(self.device, self.wide)
        self.frames, self.rows = frame_shape(pairs)
        self.block = max(1, (_CPU_BLOCK if self.device.type == "cpu" else _GPU_BLOCK) // (4 * len(self.mean)))
        """Draws in a block."""
        self.draws = paired_normals(pairs, moments.factor.shape[1], seed, device)
        self.families = _families(moments.factor, self.device)
        covered = {n for family in self.families for n in family.classes}
        self.fixed = [n for n in range(len(self.mean)) if n not in covered]
        """Classes without covariance."""
        for family in self.families:
            size = 4 * self.frames * self.rows * len(self.mean) * (1 if family.tame else 2)
            family.keeps = size <= keep
            keep -= size if family.keeps else 0

    def unmoved(self) -> tuple[FloatArray, FloatArray]:
        """The expectation at δ = 0 and its standard error, each of shape (N, N).

        The error is the spread of the frames' means, which are independent, over √frames.
        """
        mean = torch.softmax(self.mean, dim=-1)
        error = torch.zeros_like(mean)

        def work(family: _Family) -> None:
            by_frame = self._by_frame(family, family.classes, torch.zeros_like(mean[family.classes]))
            mean[family.classes] = by_frame.mean(dim=0)
            error[family.classes] = by_frame.std(dim=0) / self.frames**0.5

        self._for_each_family(work)
        return _numpy(mean), _numpy(error)

    def at(self, shifts: FloatArray, active: NDArray[np.bool_]) -> FloatArray:
        """The expectation at δ = shifts[c, n] for every c and n that is active, zero elsewhere.

        Parameters
        ----------
        shifts : shape (C, N, N), one matrix a client
        active : shape (C, N)
        """
        moved = torch.from_numpy(shifts).to(self.device, self.wide)
        out = torch.zeros_like(moved)
        where = [np.flatnonzero(column).tolist() for column in active.T]
        for n in self.fixed:
            out[where[n], n] = torch.softmax(self.mean[n] + moved[where[n], n], dim=-1)

        def work(family: _Family) -> None:
            clients = [c for n in family.classes for c in where[n]]
            classes = [n for n in family.classes for _ in where[n]]
            if clients:
                by_frame = self._by_frame(family, classes, moved[clients, classes])
                out[clients, classes] = by_frame.mean(dim=0)

        self._for_each_family(work)
        return _numpy(out)

    def _for_each_family(self, work: Callable[[_Family], None]) -> None:
        if self.device.type == "cpu":
            for_each(work, self.families)
        else:
            for family in self.families:
                work(family)

    def _by_frame(self, family: _Family, classes: list[int], shifts: Tensor) -> Tensor:
        """Means over each frame, shape (frames, k, N), of k classes of one family, each with its shift."""
        means = self.mean[classes]
        if family.tame:
            return self._weigh(self._odds(family), means + shifts)
        out = shifts.new_empty((self.frames, *shifts.shape))
        far = (shifts.amax(dim=1) - shifts.amin(dim=1) > _FAR).tolist()
        near = [k for k, is_far in enumerate(far) if not is_far]
        if near:
            out[:, near] = self._weigh(self._odds(family, means[0]), shifts[near])
        for k, is_far in enumerate(far):
            if is_far:
                blocks = self._blocks(family, means[0] + shifts[k])
                odds = ((frames, E) for frames, both in blocks for E in both)
                out[:, k : k + 1] = self._weigh(odds, torch.zeros_like(shifts[:1]))
        return out

    def _weigh(self, odds: Iterable[tuple[slice, Tensor]], log_weights: Tensor) -> Tensor:
        """Means of w ∘ E / (E w) over each frame and both signs, shape (frames, k, N)."""
        weights = (log_weights - log_weights.amax(dim=1, keepdim=True)).exp().to(self.draws.dtype)
        sums = torch.zeros((self.frames, *weights.shape), dtype=self.wide, device=self.device)
        for frames, E in odds:
            share = torch.mm(weights, E.t()).reciprocal_()  # (k, draws): weights first is the faster order
            f = frames.stop - frames.start
            by_frame = share.view(len(weights), f, -1).transpose(0, 1), E.view(f, -1, E.shape[1])
            sums[frames] += torch.bmm(*by_frame)
        return sums.mul_(weights / (2 * self.rows))

    def _odds(self, family: _Family, mean: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """E of all draws of one sign and of the other, shape (draws, N), block by block.

        Each is valid until the next: unless they are kept, all of them go through one buffer.
        """
        buffer = self._empty(min(self.block, self.frames * self.rows))
        if family.keeps and not family.kept:
            family.kept = list(self._blocks(family, mean))
        for frames, signs in family.kept if family.keeps else self._blocks(family, mean, buffer):
            yield frames, signs[0]
            if mean is None:
                yield frames, torch.reciprocal(signs[0], out=buffer[: len(signs[0])])
            else:
                yield frames, signs[1]

    def _blocks(
        self, family: _Family, mean: Tensor | None = None, buffer: Tensor | None = None
    ) -> Iterator[_Block]:
        """exp(x) of all draws or, given the mean, exp(q − max q) of both q = mean ± x."""
        rank = len(family.factor)
        for frames in _slices(self.frames, max(1, self.block // self.rows)):
            for rows in _slices(self.rows, self.block):
                xi = self.draws[frames, rows, :rank].flatten(0, 1)
                out = self._empty(len(xi)) if buffer is None else buffer[: len(xi)]
                x = torch.mm(xi, family.factor, out=out)
                if mean is None:
                    yield frames, (x.exp_(),)
                else:
                    both = (mean.to(x.dtype) + x, mean.to(x.dtype) - x)
                    yield frames, tuple(q.sub_(q.amax(dim=1, keepdim=True)).exp_() for q in both)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, len(self.mean)), dtype=self.draws.dtype, device=self.device)


def _families(factor: FloatArray, device: torch.device) -> list[_Family]:
    """The classes with covariance, those of equal tame factors together."""
    families: list[_Family] = []
    alike: dict[bytes, list[_Family]] = {}
    for n, F in enumerate(factor):
        filled = np.flatnonzero(np.any(F != 0, axis=1))
        if not len(filled):
            continue
        F = F[: filled[-1] + 1]
        F = (F - F.mean(axis=1, keepdims=True)).astype(np.float32)
        tame = float(np.square(F).sum(axis=0).max()) <= _TAME**2
        candidates = alike.setdefault(F[0].tobytes(), []) if tame else []
        for family in candidates:
            if np.array_equal(family.factor.cpu().numpy(), F):
                family.classes.append(n)
                break
        else:
            families.append(_Family([n], torch.from_numpy(F).to(device), tame))
            candidates.append(families[-1])
    return families


def _slices(total: int, limit: int) -> Iterator[slice]:
    """0 … total in the fewest, even slices of at most ``limit``."""
    size = -(-total // -(-total // limit))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _numpy(tensor: Tensor) -> FloatArray:
    return tensor.cpu().numpy().astype(np.float64)
