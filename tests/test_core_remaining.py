"""Labels of the samples that remain: against sums over all possible ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rlu_cli.core.remaining import Lookalikes, lookalikes, remaining_labels
from rlu_cli.core.types import FloatArray, IntArray

N = 3
_ALPHAS = np.geomspace(0.1, 3.0, 16)


def samples(seed: int = 0, each: int = 4) -> tuple[FloatArray, IntArray]:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(N), each)
    s = rng.dirichlet(np.ones(N), len(labels))
    return np.eye(N)[labels] - s, labels


def enumerated(
    known: IntArray, count: int, t: FloatArray, width: float, like: Lookalikes
) -> tuple[FloatArray, FloatArray]:
    """The posterior's mean and presence, by summing over all auxiliary samples and a fine grid of mixes."""
    rng = np.random.default_rng(1)
    evidence = []
    for alpha in _ALPHAS:
        p, seen = 1.0, np.zeros(N)
        for label in np.repeat(np.arange(N), known):
            p *= (alpha + seen[label]) / (N * alpha + seen.sum())
            seen[label] += 1
        evidence.append(p)
    mixes = np.concatenate(
        [
            rng.dirichlet(known + alpha, round(200_000 * p / sum(evidence)))
            for alpha, p in zip(_ALPHAS, evidence, strict=True)
        ]
    )
    of_class = np.bincount(like.labels)
    mean, presence, mass = np.zeros(N), np.zeros(N), 0.0
    moments = {
        labels: float(np.mean(np.prod(mixes[:, list(labels)], axis=1)))
        for labels in product(range(N), repeat=count)
    }
    for rows in product(range(len(like.labels)), repeat=count):
        labels = tuple(int(like.labels[row]) for row in rows)
        weight = moments[labels] * np.prod([like.missed[row] / of_class[like.labels[row]] for row in rows])
        rest = t - like.residuals[list(rows)].sum(axis=0)
        weight *= np.exp(-(rest @ rest) / (2 * width**2))
        drawn = np.bincount(labels, minlength=N)
        mean, presence, mass = mean + weight * drawn, presence + weight * (drawn > 0), mass + weight
    return mean / mass, presence / mass


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("missed", [1.0, None])
def test_the_posterior_is_that_of_the_enumeration(
    count: int, missed: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlu_cli.core.remaining._UNEVEN", 0.0)
    r, labels = samples()
    share = np.full(len(r), missed) if missed else np.linspace(0.05, 1.0, len(r))
    like = Lookalikes(r, labels, share)
    known, t = np.array([5, 2, 0]), r[[0, 5]][:count].sum(axis=0) + 0.05
    found = remaining_labels(known, count, t, 0.3, like, seed=0)
    mean, presence = enumerated(known, count, t, 0.3, like)
    assert found.mean == pytest.approx(mean, abs=0.02)
    assert found.presence == pytest.approx(presence, abs=0.02)
    assert found.mean.sum() == pytest.approx(count)


def test_nothing_remains() -> None:
    r, labels = samples()
    found = remaining_labels(
        np.array([1, 2, 3]), 0, np.zeros(N), 0.1, Lookalikes(r, labels, np.ones(12)), seed=0
    )
    assert not found.mean.any() and not found.high.any() and not found.presence.any()


def test_bounds_hold_most_of_the_weight() -> None:
    r, labels = samples(each=30)
    like = Lookalikes(r, labels, np.ones(len(r)))
    found = remaining_labels(np.array([9, 3, 0]), 6, np.zeros(N), 1.0, like, seed=0)
    assert np.all(found.low <= found.mean) and np.all(found.mean <= found.high)
    assert found.high.max() <= 6 and found.low.min() >= 0


def test_bounds_are_calibrated() -> None:
    """Counts drawn as the model says they are lie within 95 % bounds at least as often."""
    rng = np.random.default_rng(2)
    r, labels = samples(each=40)
    like = Lookalikes(r, labels, np.ones(len(r)))
    held = []
    for seed in range(60):
        mix = rng.dirichlet(np.full(N, np.exp(rng.uniform(np.log(0.1), np.log(3.0)))))
        known = np.bincount(rng.choice(N, 20, p=mix), minlength=N)
        rest = rng.choice(N, 5, p=mix)
        rows = [rng.choice(np.flatnonzero(labels == label)) for label in rest]
        found = remaining_labels(known, 5, r[rows].sum(axis=0), 0.01, like, seed=seed)
        truth = np.bincount(rest, minlength=N)
        held.append((found.low <= truth) & (truth <= found.high))
    assert 0.93 <= np.mean(held) <= 1.0


def test_small_residuals_are_what_remains() -> None:
    """Larger ones than the smallest found remain as seldom as samples above the noise weren't found."""
    r = np.array([[0.9, -0.9], [0.5, -0.5], [0.1, -0.1], [0.01, -0.01]])
    like = lookalikes(r, np.array([0, 0, 1, 1]), r[:2], above_noise=3)
    assert like.missed.tolist() == [0.375, 0.375, 1.0, 1.0]
    assert like.of_class(2).tolist() == [0.375, 1.0]


def test_where_nothing_was_found_all_samples_are_alike() -> None:
    r, labels = samples()
    assert lookalikes(r, labels, np.zeros((0, N)), above_noise=4).missed.tolist() == [1.0] * len(r)
