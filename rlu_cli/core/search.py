"""The posterior search over label counts (paper, Alg. 2), by shifting fixed draws."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.expectation import SoftmaxExpectation
from rlu_cli.core.schemes import LinearRecursion, impulse_response
from rlu_cli.core.types import FloatArray, IntArray, LocalTraining, LogitMoments

T = TypeVar("T")

_NODES = 4
"""S is extrapolated through this many steps at which it was evaluated (a cubic)."""

_STRIDE_ERROR = 1e-3
"""How far, in logits, a stride's extrapolated gradients may lead astray; one move of the search leads tens to
hundreds of times as far."""


@dataclass(frozen=True)
class SearchResult:
    """The best counts met, and how well they explain the local model.

    counts : shape (N,), same sum as the first guess
    mismatch : ‖μ̂ − μ‖²_F of those counts, class by class, at the end of training
    initial_mismatch : that of the first guess
    moves : moves made before the best counts were met
    """

    counts: IntArray
    mismatch: float
    initial_mismatch: float
    moves: int


Asked = tuple[FloatArray, NDArray[np.bool_]]
"""Where S is wanted: the shifts of one client's mean logits, shape (N, N), and the classes, shape (N,)."""


class MeanSimulator:
    """Simulates how the class-mean logits move while clients train on given label counts.

    Each step is a mean over its batch, large or small, so it is expected to move the head by the mean
    gradient of the client's mix z = N/ΣN, and the head moves the mean logits of class n' by

        ∇μ_{n', j} = Σ_n G[n', n] z_n (S[n, j] − δ_{nj}),    G[n', n] = ē_n'·ē_n + 1

    (the paper's Δμ = Δb·‖ē‖² forgets that the bias moves the logits too, and gives every class the same
    ē). These gradients go through the client's own recursion, so momentum, decay and pulls come for
    free. S along the way takes no new draws and no exponentials (`SoftmaxExpectation`); classes with
    g_n = 0 cost nothing, and clients of one round share the work.

    Where many steps change the gradient slowly, S is evaluated at strides only: in between, the gradient is
    the cubic through the last four evaluations. A stride at whose end the gradient differs from the cubic
    by so much that `_STRIDE_ERROR` may be exceeded is taken again at half the length; stride 1 is the
    recursion itself. Each client has strides of its own, so its numbers don't depend on the
    others, but for the order in which float32 products add.

    Parameters
    ----------
    moments : of the global model
    gram : G, shape (N, N)
    training : the clients' training values
    samples, seed, device, keep : as `SoftmaxExpectation` has them
    """

    def __init__(
        self,
        moments: LogitMoments,
        gram: FloatArray,
        training: LocalTraining,
        *,
        samples: int = 10_000,
        seed: int = 0,
        device: str = "cpu",
        keep: int = 2**30,
    ) -> None:
        self.mean = moments.mean
        self.gram = gram
        self.training = training
        self.softmax = SoftmaxExpectation(moments, samples=samples, seed=seed, device=device, keep=keep)

    def final_means(self, counts: IntArray, constant: FloatArray | float = 0.0) -> FloatArray:
        """μ̂ of the models that training on ``counts`` would have produced, shape (C, N, N).

        Parameters
        ----------
        counts : shape (C, N), one row a client
        constant : the scheme's constant gradient, as it moves the mean logits, shape (C, N, N) or less
        """
        constants = np.broadcast_to(np.asarray(constant, dtype=np.float64), (len(counts), *self.gram.shape))
        return np.stack(self.together(map(self.simulate, counts, constants)))

    def simulate(
        self, counts: IntArray, constant: FloatArray | float = 0.0
    ) -> Generator[Asked, FloatArray, FloatArray]:
        """`final_means` of one client, shape (N, N): asks for S where it needs it."""
        t = self.training
        reach = self.gram * (counts / t.samples)  # class moved, class trained on
        active = counts > 0
        target = np.eye(len(self.mean))
        scale = float(np.max(np.abs(impulse_response(t))))

        def gradient(state: LinearRecursion) -> Generator[Asked, FloatArray, FloatArray]:
            confidence = yield state.displacement, active
            return np.asarray(reach @ (confidence - target))

        state = LinearRecursion(t, reach.shape, initial=self.mean, constant=constant)
        nodes = [(0, (yield from gradient(state)))]
        stride = 1
        while state.step_index < t.steps - 1:
            start = state.step_index
            stride = min(stride, t.steps - 1 - start)
            ahead = copy.copy(state)
            for step in range(start, start + stride):
                ahead.step(_extrapolate(nodes, step))
            found = yield from gradient(ahead)
            miss = stride * scale * float(np.abs(_extrapolate(nodes, start + stride) - found).max())
            if stride > 1 and not miss <= _STRIDE_ERROR:
                stride //= 2
                continue
            state = ahead
            nodes = [*nodes, (start + stride, found)][-_NODES:]
            if len(nodes) == _NODES and miss <= _STRIDE_ERROR / 2**_NODES:
                stride *= 2
        state.step(nodes[-1][1])
        return np.asarray(self.mean + state.displacement)

    def together(self, runs: Iterable[Generator[Asked, FloatArray, T]]) -> list[T]:
        """What the runs return, each of which asks for S and is sent it: side by side, one pass for all."""
        ended: dict[int, T] = {}
        answers: dict[int, FloatArray] = {}
        waiting = dict(enumerate(runs))
        number = len(waiting)
        while waiting:
            asked: dict[int, Asked] = {}
            for index, run in tuple(waiting.items()):
                try:
                    asked[index] = next(run) if index not in answers else run.send(answers[index])
                except StopIteration as end:
                    ended[index] = end.value
                    del waiting[index]
            if asked:
                shifts, active = (np.stack(parts) for parts in zip(*asked.values(), strict=True))
                answers = dict(zip(asked, self.softmax.at(shifts, active), strict=True))
        return [ended[index] for index in range(number)]


def _extrapolate(nodes: list[tuple[int, FloatArray]], step: int) -> FloatArray:
    """The polynomial through the nodes, at a step (Lagrange)."""
    total = np.zeros_like(nodes[0][1])
    for at, value in nodes:
        weight = 1.0
        for other, _ in nodes:
            if other != at:
                weight *= (step - other) / (at - other)
        if weight:
            total += weight * value
    return total


def posterior_search(
    simulator: MeanSimulator,
    final_mean: FloatArray,
    counts: IntArray,
    iterations: int,
    constant: FloatArray | float = 0.0,
) -> list[SearchResult]:
    """Move counts between classes until the simulated local models look like the real ones.

    Each iteration compares Σ_n μ̂_{n,j} with Σ_n μ_{n,j}: the class most overestimated (arg max of the
    positive differences) gives m samples, the one most underestimated (arg min of the negative ones;
    the paper prints arg max) gets them. Counts stay non-negative and keep their sum. Moves are coarse,
    so the iterate kept is the one with the smallest class-resolved mismatch ‖μ̂ − μ‖²_F, the first
    guess included, and the search ends when it comes back to counts it has seen.

    Clients of one round, which started from one model and trained alike, are searched side by side, each as
    if it were alone.

    Parameters
    ----------
    final_mean : μ^{m+1} of the local models, shape (C, N, N)
    counts : the first guesses, shape (C, N)
    iterations : T, at most
    constant : see `MeanSimulator.final_means`
    """
    constants = np.broadcast_to(np.asarray(constant, dtype=np.float64), final_mean.shape)
    clients = zip(final_mean, counts, constants, strict=True)
    return simulator.together(_search(simulator, *client, iterations) for client in clients)


def _search(
    simulator: MeanSimulator, final_mean: FloatArray, counts: IntArray, constant: FloatArray, iterations: int
) -> Generator[Asked, FloatArray, SearchResult]:
    """Of one client."""
    seen: set[bytes] = set()
    best: SearchResult | None = None
    for move in range(iterations + 1):
        difference = (yield from simulator.simulate(counts, constant)) - final_mean
        mismatch = float(np.sum(difference**2))
        if best is None:
            best = SearchResult(counts.copy(), mismatch, mismatch, 0)
        elif mismatch < best.mismatch:
            best = SearchResult(counts, mismatch, best.initial_mismatch, move)
        seen.add(counts.tobytes())
        moved = _move(counts, difference.sum(axis=0), simulator.training.steps)
        if moved is None or moved.tobytes() in seen:
            break
        counts = moved
    assert best is not None
    return best


def _move(counts: IntArray, excess: FloatArray, amount: int) -> IntArray | None:
    """Counts after a move from the most over- to the most underestimated class, None where there is none."""
    giver = int(np.argmax(np.where(counts > 0, excess, -np.inf)))
    taker = int(np.argmin(excess))
    if excess[giver] <= 0 or excess[taker] >= 0 or giver == taker:
        return None
    moved: IntArray = counts.copy()
    amount = min(amount, int(counts[giver]))
    moved[giver] -= amount
    moved[taker] += amount
    return moved
