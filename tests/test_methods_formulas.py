"""Every method against its formula, written a second time: literally and slowly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from methods_cases import AUX, known_round, problem_of, proportions, random_head
from scipy.optimize import linprog

from rlu_cli.core.gradients import mean_gradient
from rlu_cli.core.methods import METHODS, greedy
from rlu_cli.core.methods.greedy import greedy_counts
from rlu_cli.core.methods.rlg import _separates
from rlu_cli.core.moments import model_statistics
from rlu_cli.core.types import FloatArray, Observation

SEEDS = range(6)


def some_round(seed: int, *, steps: int = 1, classes: int = 6, size: int = 9) -> Observation:
    """A random head and class means, ReLU-like embeddings, uneven counts."""
    rng = np.random.default_rng([seed, 77])
    counts = rng.multinomial(24, rng.dirichlet(np.full(classes, 0.6)))
    means = np.abs(rng.normal(size=(classes, size)))
    head = random_head(classes, size, seed=seed)
    return known_round(counts, head, steps=steps, seed=seed, class_means=means)


def weight_gradient(observation: Observation) -> FloatArray:
    return -observation.update.weight / (0.1 * observation.training.steps)


def bias_gradient(observation: Observation) -> FloatArray:
    assert observation.update.bias is not None
    return -observation.update.bias / (0.1 * observation.training.steps)


def greedy_literally(
    g: FloatArray, impact: FloatArray, total: int, offset: FloatArray | float = 0.0
) -> list[int]:
    """As the papers print it: a list of labels, an argmin for every one."""
    g = g.copy()
    labels = []
    for j in range(len(g)):
        if g[j] < 0:
            labels.append(j)
            g[j] -= impact[j]
    g = g - offset
    while len(labels) < total:
        j = int(np.argmin(g))
        labels.append(j)
        g[j] -= impact[j]
    return np.bincount(labels, minlength=len(g)).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mean_gradient_is_that_of_the_steps(seed: int) -> None:
    observation = some_round(seed, steps=3)
    gradient = mean_gradient(observation)
    np.testing.assert_allclose(gradient.weight, weight_gradient(observation), atol=1e-12)
    assert gradient.bias is not None
    np.testing.assert_allclose(gradient.bias, bias_gradient(observation), atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    g = rng.normal(size=7)
    impact = -rng.uniform(0.05, 0.2, size=7)
    for offset in (0.0, rng.normal(size=7)):
        found = greedy_counts(g, impact, 40, offset=offset)
        assert found.tolist() == greedy_literally(g, impact, 40, offset)


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_counts_of_many_labels_are_the_same_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    g, offset = rng.normal(size=(2, 7))
    for impact in (-rng.uniform(0.05, 0.2, size=7), -1e-5, -np.array([1e-3, 0.1, 0.1, 2.0, 1.0, 0.3, 0.0])):
        monkeypatch.setattr(greedy, "_ONE_BY_ONE", 10**6)
        literal = greedy_counts(g, impact, 20_000, offset=offset)
        monkeypatch.setattr(greedy, "_ONE_BY_ONE", 100)
        found = greedy_counts(g, impact, 20_000, offset=offset)
        assert found.sum() == 20_000
        assert np.abs(found - literal).max() <= 1  # values that differ by rounding errors


def test_greedy_counts_do_not_take_longer_for_more_labels() -> None:
    g = np.array([-0.5, 0.1, -0.2, 0.0])
    total = 10**12
    # All rise to one level: −0.5 + I n_0 = 0.1 + I n_1 = …, with Σ n_j the total.
    assert greedy_counts(g, -1e-12, total).tolist() == [600_000_000_000, 0, 300_000_000_000, 100_000_000_000]
    even = greedy_counts(g, -0.1, total)
    assert even.sum() == total
    np.testing.assert_allclose(even, total / 4, atol=10)
    assert greedy_counts(g, np.array([-0.1, -0.1, 0.0, -0.1]), total).tolist() == [4, 0, total - 4, 0]
    assert greedy_counts(np.zeros(3), 0.0, total).tolist() == [total, 0, 0]
    tiny = greedy_counts(g, np.array([-0.1, -0.1, -1e-30, -0.1]), total)
    assert tiny.sum() == total
    np.testing.assert_allclose(tiny, [3, 0, total, 0], atol=2)


def test_greedy_counts_by_hand() -> None:
    g = np.array([-0.5, 0.1, -0.2, 0.0])
    # Classes 0 and 2 get one each: −0.4, −0.1. Then 0 (−0.3), 0 (−0.2), 0 (−0.1), and the tie goes to 0.
    assert greedy_counts(g, -0.1, 6).tolist() == [5, 0, 1, 0]
    assert greedy_counts(g, -0.1, 1).tolist() == [1, 0, 0, 0]  # fewer labels than negative classes
    assert greedy_counts(np.zeros(3), 0.0, 2).tolist() == [2, 0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_idlg(seed: int) -> None:
    observation = some_round(seed)
    sums = [sum(row) for row in weight_gradient(observation)]
    expected = np.eye(6)[sums.index(min(sums))]
    np.testing.assert_array_equal(proportions("idlg", observation), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradinversion(seed: int) -> None:
    observation = some_round(seed)
    minima = [min(row) for row in weight_gradient(observation)]
    negative = [j for j in range(6) if minima[j] < 0]  # more samples than classes
    expected = np.isin(np.arange(6), negative) / len(negative)
    np.testing.assert_allclose(proportions("gradinversion", observation), expected)
    few = replace(observation, training=replace(observation.training, total=3))
    best = sorted(range(6), key=lambda j: minima[j])[:3]
    np.testing.assert_allclose(proportions("gradinversion", few), np.isin(np.arange(6), best) / 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_rlg(seed: int) -> None:
    """Against the feasibility problem on ∇Wᵀ itself, without an SVD."""
    N, L = 12, 14
    rng = np.random.default_rng([seed, 5])
    counts = np.zeros(N, dtype=np.int64)
    for j in rng.choice(N, size=4, replace=False):
        counts[j] = rng.integers(1, 3)
    means = np.abs(rng.normal(size=(N, L))) + 0.1
    observation = known_round(counts, random_head(N, L, seed=seed), seed=seed, class_means=means)
    columns = 100 * weight_gradient(observation)
    expected = []
    for j in range(N):
        rows = np.vstack((columns[j], -np.delete(columns, j, axis=0)))
        limits = np.concatenate(([-1.0], np.zeros(N - 1)))
        found = linprog(np.zeros(L), A_ub=rows, b_ub=limits, bounds=(-1e6, 1e6))
        expected.append(found.status == 0)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))  # others can be separable by chance
    np.testing.assert_allclose(proportions("rlg", observation), np.array(expected) / sum(expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_llg(seed: int) -> None:
    observation = some_round(seed)
    g = weight_gradient(observation).sum(axis=1)
    impact = (1 + 1 / 6) * sum(value for value in g if value < 0) / 24
    expected = greedy_literally(g, np.full(6, impact), 24)
    np.testing.assert_allclose(24 * proportions("llg", observation), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_llg_plus(seed: int) -> None:
    """Impact and offset as the authors' loop over batches of one class adds them up."""
    observation = some_round(seed)
    g = weight_gradient(observation).sum(axis=1)
    impact, offset = 0.0, np.zeros(6)
    for i in range(6):
        for j in range(6):
            value = observation.start.gradient_sum[i, j]
            if i == j:
                impact += value / (6 * 24)
            else:
                offset[j] += value / 5
    expected = greedy_literally(g, np.full(6, impact * (1 + 1 / 6)), 24, offset)
    np.testing.assert_allclose(24 * proportions("llg+", observation), expected)


def test_gradient_sum_is_that_of_batches_of_one_class() -> None:
    rng = np.random.default_rng(3)
    embeddings, labels = rng.normal(size=(30, 4)), np.arange(30) % 3
    head = random_head(3, 4)
    assert head.bias is not None
    logits = embeddings @ head.weight.T + head.bias
    found = model_statistics(logits, embeddings, labels, 3, samples=10).gradient_sum
    expected = np.zeros((3, 3))
    for i in range(30):
        s = np.exp(logits[i]) / np.exp(logits[i]).sum()
        for j in range(3):
            expected[labels[i], j] += (s[j] - (labels[i] == j)) * sum(embeddings[i]) / 10
    np.testing.assert_allclose(found, expected, atol=1e-12)


def clip(z: FloatArray) -> FloatArray:
    z = np.array([max(value, 0.0) for value in z])
    return np.asarray(z / z.sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_zlg(seed: int) -> None:
    observation = some_round(seed)
    W, b = weight_gradient(observation), bias_gradient(observation)
    head = observation.head
    assert head.bias is not None
    embedding = [sum(b[j] * W[j, el] for j in range(6)) / sum(b**2) for el in range(9)]
    powers = np.exp(head.weight @ embedding + head.bias)
    expected = [powers[j] / powers.sum() - sum(W[j]) / sum(embedding) for j in range(6)]
    np.testing.assert_allclose(proportions("zlg", observation), clip(np.array(expected)), atol=1e-9)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_zlg_plus_and_dimitrov(seed: int, steps: int) -> None:
    observation = some_round(seed, steps=steps)
    other = some_round(seed + 100).start
    observation = replace(observation, end=other)
    g = weight_gradient(observation).sum(axis=1)
    found = []
    for k in range(steps):
        a = k / steps
        p = np.zeros(6)
        embedding_sum = 0.0
        for n in range(6):
            share = AUX / (6 * AUX)
            for weight, model in ((1 - a, observation.start), (a, other)):
                p += weight * share * model.confidence[n]
                embedding_sum += weight * share * sum(model.embedding_mean[n])
        found.append([p[j] - g[j] / embedding_sum for j in range(6)])
    np.testing.assert_allclose(proportions("zlg+", observation), clip(np.array(found[0])), atol=1e-12)
    expected = clip(np.mean(found, axis=0))
    np.testing.assert_allclose(proportions("dimitrov", observation), expected, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_ilrg(seed: int) -> None:
    observation = some_round(seed)
    W, b = weight_gradient(observation), bias_gradient(observation)
    head = observation.head
    assert head.bias is not None
    P = []
    for j in range(6):
        q = head.weight @ (W[j] / b[j]) + head.bias
        P.append(np.exp(q - max(q)) / np.exp(q - max(q)).sum())
    system = [[1.0] * 6] + [[P[j][i] - (i == j) for j in range(6)] for i in range(6)]
    counts = np.linalg.lstsq(np.array(system), 24 * np.array([1.0, *b]), rcond=1e-15)[0]
    np.testing.assert_allclose(proportions("ilrg", observation), clip(counts), atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_ebi(seed: int) -> None:
    observation = some_round(seed)
    b = bias_gradient(observation)
    impact = sum(value for value in b if value < 0) / 24
    expected = greedy_literally(b, np.full(6, impact), 24)
    np.testing.assert_allclose(24 * proportions("ebi", observation), expected)


@pytest.mark.parametrize("own", [0.2, 0.8])
@pytest.mark.parametrize("seed", SEEDS)
def test_llbg(seed: int, own: float) -> None:
    """Summed over the steps, as the authors' code has it: impact 1/B, offset steps/N."""
    observation = some_round(seed, steps=5)
    S = np.full((6, 6), (1 - own) / 5)
    np.fill_diagonal(S, own + 0.05 * np.arange(6) / 6)
    observation = replace(observation, start=replace(observation.start, confidence=S))
    b = 5 * bias_gradient(observation)
    confidence = np.diag(S) if own > 0.5 else np.zeros(6)
    expected = greedy_literally(b, -(1 - confidence) / 24, 120, 5 / 6)
    np.testing.assert_allclose(120 * proportions("llbg", observation), expected)


def test_every_method_leaves_the_simplex_nowhere() -> None:
    for seed in SEEDS:
        problem = problem_of(some_round(seed, steps=2))
        for method in METHODS.values():
            z = method.solve(problem).proportions
            assert z.min() >= 0
            assert z.sum() == pytest.approx(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_rlg_shortcuts_are_what_the_programs_say(seed: int) -> None:
    """N points in N − 1 dimensions are all separable; a column too small for any r is not."""
    full = np.linalg.svd(np.eye(7) - 1 / 7)[2][:6]
    assert all(_separates(full, j) for j in range(7))
    observation = some_round(seed)  # 24 samples of 6 classes: the rank is 5
    np.testing.assert_allclose(proportions("rlg", observation), 1 / 6)
    small = np.random.default_rng(seed).normal(size=(3, 9))
    small[:, 4] *= 0.4 / np.abs(small[:, 4]).sum()
    assert not _separates(small, 4)
