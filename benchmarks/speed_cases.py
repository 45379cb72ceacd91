"""Made-up rounds for benchmarks/speed.py: sizes can be chosen freely, and no network has to run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from rlu_cli.core.expectation import SoftmaxExpectation
from rlu_cli.core.search import MeanSimulator
from rlu_cli.core.types import FloatArray, IntArray, LocalTraining, LogitMoments

ITERATIONS = 10
"""T of the posterior search."""


@lru_cache(maxsize=2)
def network_moments(
    classes: int, per_class: int, *, margin: float = 6.0, spread: float = 2.0, seed: int = 0
) -> LogitMoments:
    """Moments of a linear head on clusters of 128 features whose variance falls off as 1/feature.

    Parameters
    ----------
    margin : how far a class's features stand out along its own weights
    spread : how far samples lie from their class's mean, in standard deviations of a logit
    """
    rng = np.random.default_rng(seed)
    size = 128
    scale = np.arange(1, size + 1) ** -0.5
    scale /= np.linalg.norm(scale)
    W = rng.normal(size=(classes, size))
    own = W / np.linalg.norm(W, axis=1, keepdims=True) / np.sqrt(size)
    mean = np.empty((classes, classes))
    factor = np.empty((classes, min(per_class, classes), classes))
    for n in range(classes):
        features = margin * own[n] + spread * scale * rng.normal(size=(per_class, size))
        logits = features @ W.T
        mean[n] = logits.mean(axis=0)
        centred = (logits - mean[n]) / np.sqrt(per_class - 1)
        factor[n] = centred if per_class <= classes else np.linalg.qr(centred, mode="r")
    return LogitMoments(mean, factor, np.full(classes, per_class))


def search_case(classes: int, steps: int) -> tuple[LogitMoments, FloatArray, LocalTraining]:
    """Moments, Gram matrix of the class means and training of a search."""
    means = np.abs(np.random.default_rng(1).normal(size=(classes, 64))) * np.sqrt(20 / 64)
    return network_moments(classes, 100), means @ means.T + 1.0, LocalTraining(steps, 32, 0.01)


def client_counts(classes: int, training: LocalTraining, clients: int) -> tuple[IntArray, IntArray]:
    """True counts of skewed clients, and first guesses far enough from them to keep the search going."""
    rng = np.random.default_rng(2)
    mixes = rng.dirichlet(np.full(classes, 0.5), size=clients)
    truth = rng.multinomial(training.samples, mixes)
    first = rng.multinomial(training.samples, 0.5 * mixes + 0.5 / classes)
    return truth.astype(np.int64), first.astype(np.int64)


def some_moves_away(truth: IntArray, steps: int) -> IntArray:
    """Counts from which some moves of ±m lead back to the true ones."""
    rng = np.random.default_rng(3)
    moved = truth.copy()
    for counts in moved:
        for _ in range(ITERATIONS // 3):
            giver = rng.choice(np.flatnonzero(counts >= steps))
            taker = rng.choice(np.flatnonzero(np.arange(len(counts)) != giver))
            counts[giver] -= steps
            counts[taker] += steps
    return moved


def count_calls(simulator: MeanSimulator, softmax: SoftmaxExpectation) -> list[int]:
    """Makes the simulator count, from now on: simulations, evaluations of S, rows of S evaluated."""
    counted = [0, 0, 0]
    simulate, evaluate = simulator.simulate, softmax.at

    def counting(*arguments: Any) -> Any:
        counted[0] += 1
        return simulate(*arguments)

    def at(shifts: FloatArray, active: Any) -> FloatArray:
        counted[1] += 1
        counted[2] += int(active.sum())
        return evaluate(shifts, active)

    simulator.simulate, softmax.at = counting, at  # type: ignore[method-assign]
    return counted


def check_agreement(device: str) -> float:
    """Largest difference of S between the device and the CPU, at the means and after shifts."""
    largest = 0.0
    # Beyond what one exponential serves where the spread is 8; several classes at once where they are many.
    for classes, spread in ((30, 1.0), (30, 8.0), (120, 1.0)):
        moments = network_moments(classes, 20, spread=spread)
        shifts = np.random.default_rng(0).normal(size=(2, classes, classes))
        active = np.ones((2, classes), dtype=bool)
        found = []
        for where in ("cpu", device):
            expectation = SoftmaxExpectation(moments, samples=5000, seed=0, device=where)
            found.append((expectation.unmoved()[0], expectation.at(shifts, active)))
        largest = max(largest, *(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True)))
    return largest
