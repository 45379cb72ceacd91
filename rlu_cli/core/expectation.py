"""Expected softmax of Gaussian logits, at the measured means and wherever a shift takes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

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

_PART = 2**22
"""Numbers of the factors that are prepared at once."""

_FAR = 60.0
"""Spread of a shift up to which exp(q − max q)·exp(shift) can't underflow float32."""

_Block = tuple[slice, tuple[Tensor, ...]]
"""Which of the g × frames, and E of all draws in them or of a part, shape (frames, draws, N), of one sign or
of both."""


@dataclass
class _Bundle:
    """Classes whose draws are made at once: g families, each of the classes that share one factor.

    families : the classes of each
    factor : F of each, shape (g, r, N), without the part common to all logits, which softmax doesn't see
    tame : whether every logit's standard deviation is at most `_TAME`; wild bundles have one class
    keeps : whether the exponentials stay for the next shift
    """

    families: list[list[int]]
    factor: Tensor
    tame: bool
    keeps: bool = False
    kept: list[_Block] = field(default_factory=list)


@dataclass(frozen=True)
class _Pass:
    """One pass over a bundle's draws: the rows ``start`` to ``stop`` of a `_Plan`, as many of each family."""

    bundle: _Bundle
    start: int
    stop: int
    around: int


_AROUND_ZERO, _AROUND_MEAN, _AROUND_SHIFTED = range(3)
"""What a row's exponentials are made around: of x alone, of μ + x, or of μ + δ + x. The shift's rest is w."""


class _Plan:
    """Rows, each the expectation of a class for a client, in the order in which passes compute them.

    A pass takes as many rows of each family of its bundle: where one has fewer, unwanted rows fill up.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []
        """Client, class, and what the exponentials are made around."""
        self.wanted: list[int] = []
        self.passes: list[_Pass] = []

    def add(self, pairs: Iterable[tuple[int, int]], around: int) -> None:
        """Rows for pairs of a client and a class."""
        for client, n in pairs:
            self.wanted.append(len(self.rows))
            self.rows.append((client, n, around))

    def add_pass(self, bundle: _Bundle, pairs: list[list[tuple[int, int]]], around: int) -> None:
        """Rows that one pass computes, pairs by family."""
        start, most = len(self.rows), max(map(len, pairs))
        for of_family in pairs:
            self.add(of_family, around)
            self.rows += [(0, 0, around)] * (most - len(of_family))
        self.passes.append(_Pass(bundle, start, len(self.rows), around))


class SoftmaxExpectation:
    """E[softmax(μ_n + δ + x)], x ~ N(0, Σ̄_n), for all classes n and any shifts δ, over the same draws.

        x = ±F_nᵀ ξ,     ξ from `paired_normals`: one set for all classes, each with both signs

    F_n is the factor of `LogitMoments`: x has exactly the covariance Σ̄_n, singular or not, for r normal
    numbers. No softmax is formed. With E = exp(x) and w = exp(μ_n + δ), block of draws by block,

        Σ softmax(μ_n + δ + x) = w ∘ Eᵀ(1 / E w),     Σ softmax(μ_n + δ − x): the same with 1/E for E

    so a pair of draws takes one exponential a logit, and a further shift (another client, a later step) none,
    only the two products. Classes of the same factor share E, classes without covariance need no draws,
    one of few samples takes about as many numbers, and small classes are computed together. Where a logit
    spreads so widely that exp(x) would leave float32, E = exp(q − max q) of q = μ_n ± x instead, and of
    q = μ_n + δ ± x where δ is too large for that.

    Parameters
    ----------
    samples : M a class, rounded up to whole frames of pairs
    seed : of the draws; the same on every device
    device : "cpu", "cuda", …; products are in full float32, unless the program has asked torch for TF32
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
        self._local = threading.local()
        together = max(1, self.block // (self.frames * self.rows))
        self.bundles = _bundles(moments.factor, together, self.device)
        covered = {n for bundle in self.bundles for family in bundle.families for n in family}
        self.fixed = [n for n in range(len(self.mean)) if n not in covered]
        """Classes without covariance."""
        for bundle in self.bundles:
            size = 4 * self.frames * self.rows * len(self.mean)
            size *= len(bundle.families) if bundle.tame else 2
            bundle.keeps = size <= keep
            keep -= size if bundle.keeps else 0

    def unmoved(self) -> tuple[FloatArray, FloatArray]:
        """The expectation at δ = 0 and its standard error, each of shape (N, N).

        The error is the spread of the frames' means, which are independent, over √frames.
        """
        N = len(self.mean)
        mean, error = self._evaluate(np.zeros((1, N, N)), np.ones((1, N), dtype=np.bool_), with_error=True)
        return _numpy(mean[0]), _numpy(error[0])

    def at(self, shifts: FloatArray, active: NDArray[np.bool_]) -> FloatArray:
        """The expectation at δ = shifts[c, n] for every c and n that is active, zero elsewhere.

        Parameters
        ----------
        shifts : shape (C, N, N), one matrix a client
        active : shape (C, N)
        """
        return _numpy(self._evaluate(shifts, active, with_error=False)[0])

    def _evaluate(
        self, shifts: FloatArray, active: NDArray[np.bool_], *, with_error: bool
    ) -> tuple[Tensor, Tensor]:
        """Expectations and, if wanted, their standard errors, else zeros, each of shape (C, N, N).

        The device gets all it needs before the first pass and gives back nothing until after the last.
        """
        plan = self._plan(shifts, active)
        rows = torch.tensor(plan.rows, dtype=torch.int64).reshape(-1, 3).T.contiguous().to(self.device)
        wanted = torch.tensor(plan.wanted, dtype=torch.int64).to(self.device)
        clients, classes, around = rows[0], rows[1], rows[2, :, None]
        moved = torch.from_numpy(shifts).to(self.device, self.wide)
        mean = self.mean[classes]
        total = mean + moved[clients, classes]
        zero = torch.zeros_like(mean[:1])
        centre = torch.where(
            around == _AROUND_SHIFTED, total, torch.where(around == _AROUND_MEAN, mean, zero)
        )
        weights = total - centre
        weights = (weights - weights.amax(dim=1, keepdim=True)).exp_().to(self.draws.dtype)
        found, error = torch.softmax(total, dim=-1), torch.zeros_like(total)

        def work(one: _Pass) -> None:
            g, N = len(one.bundle.families), len(self.mean)
            odds = self._odds(one, None if one.around == _AROUND_ZERO else centre[one.start])
            by_frame = self._weigh(odds, weights[one.start : one.stop].view(g, -1, N))
            over_frames = by_frame.mean(dim=0)
            found[one.start : one.stop] = over_frames
            if with_error:
                spread = by_frame.sub_(over_frames).square_().sum(dim=0)
                error[one.start : one.stop] = spread.div_(self.frames * (self.frames - 1)).sqrt_()

        if self.device.type == "cpu":
            for_each(work, plan.passes)
        else:
            for one in plan.passes:
                work(one)
        where = clients[wanted], classes[wanted]
        return (
            torch.zeros_like(moved).index_put_(where, found[wanted]),
            torch.zeros_like(moved).index_put_(where, error[wanted]),
        )

    def _plan(self, shifts: FloatArray, active: NDArray[np.bool_]) -> _Plan:
        plan = _Plan()
        pairs = [[(int(c), n) for c in np.flatnonzero(column)] for n, column in enumerate(active.T)]
        for bundle in self.bundles:
            by_family = [[pair for n in family for pair in pairs[n]] for family in bundle.families]
            if not any(by_family):
                continue
            if bundle.tame:
                plan.add_pass(bundle, by_family, _AROUND_ZERO)
                continue
            far = [pair for pair in by_family[0] if np.ptp(shifts[pair]) > _FAR]
            near = [pair for pair in by_family[0] if pair not in far]
            if near:
                plan.add_pass(bundle, [near], _AROUND_MEAN)
            for pair in far:
                plan.add_pass(bundle, [[pair]], _AROUND_SHIFTED)
        for n in self.fixed:
            plan.add(pairs[n], _AROUND_SHIFTED)
        return plan

    def _weigh(self, odds: Iterable[tuple[slice, Tensor]], weights: Tensor) -> Tensor:
        """Means of w ∘ E / (E w) over each frame and both signs, shape (frames, g·k, N), for g·k weights."""
        g, k, N = weights.shape
        by_frame = weights[:, None].expand(g, self.frames, k, N).reshape(-1, k, N)
        sums = torch.zeros_like(by_frame)
        for frames, E in odds:
            # Weights first, draws last: several times faster than E w for a few weights.
            share = torch.bmm(by_frame[frames], E.transpose(1, 2)).reciprocal_()
            sums[frames].baddbmm_(share, E)
        means = sums.view(g, self.frames, k, N).transpose(0, 1).to(self.wide)
        return means.mul_(weights / (2 * self.rows)).flatten(1, 2)

    def _odds(self, one: _Pass, centre: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """E of all draws of one sign and of the other, block by block, as in `_Block`.

        Each is valid until the next: unless they are kept, all of them go through one buffer.
        """
        bundle = one.bundle
        keeps = bundle.keeps and one.around != _AROUND_SHIFTED
        buffer = self._buffer(len(bundle.families))
        if keeps and not bundle.kept:
            bundle.kept = list(self._blocks(bundle, centre))
        for frames, signs in bundle.kept if keeps else self._blocks(bundle, centre, buffer):
            yield frames, signs[0]
            if centre is None:
                E = signs[0]
                yield frames, torch.reciprocal(E, out=buffer.view(-1)[: E.numel()].view(E.shape))
            else:
                yield frames, signs[1]

    def _blocks(
        self, bundle: _Bundle, centre: Tensor | None, buffer: Tensor | None = None
    ) -> Iterator[_Block]:
        """exp(x) of all draws or, given a centre, exp(q − max q) of both q = centre ± x."""
        g, rank, N = bundle.factor.shape
        for frames in _slices(self.frames, max(1, self.block // self.rows)):
            for rows in _slices(self.rows, self.block):
                xi = self.draws[frames, rows, :rank].flatten(0, 1)
                out = self._empty(g, len(xi)) if buffer is None else buffer[:, : len(xi)]
                x = torch.bmm(xi.expand(g, -1, -1), bundle.factor, out=out)
                x = x.view(-1, rows.stop - rows.start, N)
                which = frames if g == 1 else slice(g * self.frames)
                if centre is None:
                    yield which, (x.exp_(),)
                else:
                    both = (centre.to(x.dtype) + x, centre.to(x.dtype) - x)
                    yield which, tuple(q.sub_(q.amax(dim=2, keepdim=True)).exp_() for q in both)

    def _buffer(self, g: int) -> Tensor:
        """One a thread, since fresh memory costs a page fault every 4 KB."""
        rows = min(self.block, self.frames * self.rows)
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < g:
            buffer = self._local.buffer = self._empty(g, rows)
        return buffer[:g]

    def _empty(self, g: int, rows: int) -> Tensor:
        return torch.empty((g, rows, len(self.mean)), dtype=self.draws.dtype, device=self.device)


class _Family(NamedTuple):
    """Classes of one factor F, shape (r, N): equal ones where they are tame, else a single class."""

    rank: int
    tame: bool
    classes: list[int]


def _families(factor: FloatArray) -> tuple[Tensor, list[_Family]]:
    """Factors without the part common to all logits, float32, and the classes with covariance by factor."""
    centred = torch.empty(factor.shape, dtype=torch.float32)
    families: list[_Family] = []
    alike: dict[bytes, list[_Family]] = {}
    count = torch.arange(1, factor.shape[1] + 1)
    for part in _slices(len(factor), max(1, _PART // factor[0].size)):
        F = torch.from_numpy(factor[part])
        used = torch.linalg.vector_norm(F, dim=2) > 0  # several times faster than any()
        ranks = (used * count).amax(dim=1).tolist()
        centred[part] = F - F.mean(dim=2, keepdim=True)
        largest = centred[part].square().sum(dim=1).amax(dim=1).tolist()
        for n, rank, variance in zip(range(part.start, part.stop), ranks, largest, strict=True):
            if not rank:
                continue
            tame = variance <= _TAME**2
            candidates = alike.setdefault(centred[n, 0].numpy().tobytes(), []) if tame else []
            for family in candidates:
                if torch.equal(centred[family.classes[0]], centred[n]):
                    family.classes.append(n)
                    break
            else:
                families.append(_Family(rank, tame, [n]))
                candidates.append(families[-1])
    return centred, families


def _bundles(factor: FloatArray, together: int, device: torch.device) -> list[_Bundle]:
    """Tame families of about the same rank, ``together`` of them at most; each wild one alone."""
    centred, families = _families(factor)
    centred = centred.to(device)
    groups: list[list[_Family]] = []
    for family in sorted(families, key=lambda family: (family.tame, family.rank)):
        last = groups[-1] if groups else []
        near = last and last[0].tame and 3 * family.rank <= 4 * last[0].rank
        if near and len(last) < together:
            last.append(family)
        else:
            groups.append([family])
    bundles = []
    for group in groups:
        rank, first = group[-1].rank, [family.classes[0] for family in group]
        F = centred[first[0] : first[0] + 1] if len(group) == 1 else centred[first]
        bundles.append(_Bundle([family.classes for family in group], F[:, :rank], group[0].tame))
    return bundles


def _slices(total: int, limit: int) -> Iterator[slice]:
    """0 … total in the fewest, even slices of at most ``limit``."""
    size = -(-total // -(-total // limit))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _numpy(tensor: Tensor) -> FloatArray:
    return tensor.cpu().numpy().astype(np.float64)
