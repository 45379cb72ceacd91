"""The posterior search, against a literal, slow reading of Alg. 2."""

from __future__ import annotations

import numpy as np
import pytest
from core_cases import moments_of
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core import search as module
from rlu_cli.core.confidence import LogitSampler, monte_carlo_confidence
from rlu_cli.core.search import MeanSimulator, posterior_search
from rlu_cli.core.types import LocalTraining, LogitMoments

CLASSES = 4
SAMPLES = 60


def make_case(seed: int, classes: int = CLASSES) -> tuple[LogitMoments, np.ndarray]:
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=(classes, classes)) + np.eye(classes)
    factor = rng.normal(size=(classes, 3, classes)) / 2
    embeddings = np.abs(rng.normal(size=(classes, 6)))
    return moments_of(mean, factor), embeddings @ embeddings.T + 1.0


def literal_final_means(
    moments: LogitMoments,
    gram: np.ndarray,
    training: LocalTraining,
    counts: np.ndarray,
    constant: np.ndarray | float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """Every step, class and draw one by one, softmax anew each time, SGD spelt out."""
    N, m, B, lr = len(counts), training.steps, training.batch_size, float(training.lr)  # type: ignore[arg-type]
    blocks = LogitSampler(moments, samples=SAMPLES, seed=seed)
    draws = np.concatenate([q.reshape(-1, N, N).double().numpy() for q in blocks])
    start = moments.mean
    means, velocity = start.copy(), None
    for _ in range(m):
        gradient = np.zeros((N, N))
        for n in range(N):
            S = np.zeros(N)
            for draw in draws:
                e = np.exp(draw[n] + (means[n] - start[n]))
                S += e / e.sum() / len(draws)
            for moved in range(N):
                for j in range(N):
                    gradient[moved, j] += gram[moved, n] * (counts[n] / m) / B * (S[j] - (n == j))
        d = gradient + training.prox * (means - start) + training.weight_decay * means + constant
        if training.momentum:
            velocity = d if velocity is None else training.momentum * velocity + d
            d = d + training.momentum * velocity if training.nesterov else velocity
        means = means - lr * d
    return np.asarray(means)


def literal_search(
    moments: LogitMoments,
    gram: np.ndarray,
    training: LocalTraining,
    final_mean: np.ndarray,
    counts: np.ndarray,
    iterations: int,
) -> tuple[list[int], float]:
    """Alg. 2 as it must be read: all iterates first, then the best of them."""
    history: list[tuple[float, list[int]]] = []
    current = counts.tolist()
    for _ in range(iterations + 1):
        means = literal_final_means(moments, gram, training, np.array(current))
        history.append((float(np.sum((means - final_mean) ** 2)), list(current)))
        over = [sum(means[n][j] - final_mean[n][j] for n in range(len(current))) for j in range(len(current))]
        candidates = [j for j in range(len(current)) if current[j] > 0]
        giver = max(candidates, key=lambda j: over[j])
        taker = min(range(len(current)), key=lambda j: over[j])
        if over[giver] <= 0 or over[taker] >= 0 or giver == taker:
            break
        amount = min(training.steps, current[giver])
        current[giver] -= amount
        current[taker] += amount
        if any(current == past for _, past in history):
            break
    mismatch, best = min(history, key=lambda entry: entry[0])
    return best, mismatch


TRAININGS = {
    "sgd": LocalTraining(5, 8, 0.1),
    "momentum": LocalTraining(5, 8, 0.05, momentum=0.9),
    "nesterov": LocalTraining(5, 8, 0.05, momentum=0.9, nesterov=True),
    "prox and decay": LocalTraining(5, 8, 0.1, prox=0.5, weight_decay=0.1),
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("counts", [[10, 10, 10, 10], [0, 25, 0, 15], [40, 0, 0, 0]])
def test_final_means_agree_with_the_literal_loops(name: str, counts: list[int]) -> None:
    moments, gram = make_case(1)
    simulator = MeanSimulator(moments, gram, TRAININGS[name], samples=SAMPLES)
    expected = literal_final_means(moments, gram, TRAININGS[name], np.array(counts))
    assert np.abs(expected - moments.mean).max() > 0.1
    np.testing.assert_allclose(simulator.final_means(np.array(counts)), expected, atol=1e-5)


def test_constant_gradient_moves_the_means_too() -> None:
    moments, gram = make_case(2)
    constant = np.random.default_rng(3).normal(size=(CLASSES, CLASSES))
    training, counts = LocalTraining(4, 8, 0.1, scheme="scaffold"), np.array([8, 8, 8, 8])
    simulator = MeanSimulator(moments, gram, training, constant=constant, samples=SAMPLES)
    expected = literal_final_means(moments, gram, training, counts, constant)
    np.testing.assert_allclose(simulator.final_means(counts), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "momentum"])
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7])
def test_search_finds_the_same_counts_as_the_literal_one(name: str, seed: int) -> None:
    moments, gram = make_case(10 + seed)
    training = TRAININGS[name]
    rng = np.random.default_rng(seed)
    truth, first = (rng.multinomial(40, rng.dirichlet(np.ones(CLASSES))) for _ in range(2))
    final_mean = literal_final_means(moments, gram, training, truth, seed=9)
    result = posterior_search(
        MeanSimulator(moments, gram, training, samples=SAMPLES), final_mean, first.astype(np.int64), 6
    )
    best, mismatch = literal_search(moments, gram, training, final_mean, first, 6)
    assert result.counts.tolist() == best
    assert result.mismatch == pytest.approx(mismatch, rel=1e-3, abs=1e-8)
    assert result.moves > 0  # else the case says nothing


def test_search_goes_from_a_wrong_guess_to_the_truth() -> None:
    moments, gram = make_case(20)
    training = LocalTraining(2, 20, 0.05)
    simulator = MeanSimulator(moments, gram, training, samples=SAMPLES)
    truth = np.array([10, 6, 20, 4])
    result = posterior_search(simulator, simulator.final_means(truth), np.array([14, 6, 16, 4]), 10)
    assert result.counts.tolist() == truth.tolist()
    assert result.mismatch == 0
    assert result.moves == 2


def test_regenerated_draws_are_the_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, gram = make_case(4)
    counts, training = np.array([10, 0, 20, 10]), TRAININGS["momentum"]
    kept = MeanSimulator(moments, gram, training, samples=5001)
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    regenerated = MeanSimulator(moments, gram, training, samples=5001)
    assert kept.kept is not None
    assert regenerated.kept is None
    np.testing.assert_array_equal(regenerated.final_means(counts), kept.final_means(counts))


def test_unmoved_confidence_is_the_monte_carlo_one() -> None:
    """softmax(q + 0) over the same draws: S itself."""
    moments, gram = make_case(5)
    simulator = MeanSimulator(moments, gram, TRAININGS["sgd"], samples=4000, seed=6)
    active = np.array([0, 2, 3])
    S = simulator.confidence(np.zeros((3, CLASSES)), active)
    expected = monte_carlo_confidence(moments, samples=4000, seed=6)
    np.testing.assert_allclose(S, expected.mean[active], atol=1e-6)


def test_a_common_shift_changes_nothing() -> None:
    moments, gram = make_case(5)
    simulator = MeanSimulator(moments, gram, TRAININGS["sgd"], samples=200)
    every = np.arange(CLASSES)
    shift = np.random.default_rng(0).normal(size=(CLASSES, CLASSES))
    np.testing.assert_allclose(
        simulator.confidence(shift + 500.0, every), simulator.confidence(shift, every), atol=1e-6
    )


@pytest.mark.parametrize("gap", [50.0, 100.0, 1000.0])
def test_shifts_larger_than_float32_exponents_stay_finite(gap: float) -> None:
    """A model sure of class 0, moved until it is sure of class 1."""
    moments = moments_of(np.array([[gap, 0.0], [0.0, gap]]))
    simulator = MeanSimulator(moments, np.ones((2, 2)), LocalTraining(2, 8, 0.1), samples=10)
    for shift, expected in ((3 * gap, 0.0), (gap, 0.5), (gap - 1, 1 / (1 + np.exp(-1.0)))):
        S = simulator.confidence(np.array([[0.0, shift]]), np.array([0]))
        np.testing.assert_allclose(S, [[expected, 1 - expected]], atol=1e-5)


def test_plain_softmax_takes_over_without_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, gram = make_case(7)
    simulator = MeanSimulator(moments, gram, TRAININGS["sgd"], samples=200)
    shift, active = 10 * np.random.default_rng(1).normal(size=(2, CLASSES)), np.array([1, 3])
    fast = simulator.confidence(shift, active)
    monkeypatch.setattr(module, "_SHIFT_LIMIT", 0.0)
    np.testing.assert_allclose(simulator.confidence(shift, active), fast, atol=1e-6)


def test_training_that_diverges_still_gives_finite_numbers() -> None:
    moments, gram = make_case(8)
    simulator = MeanSimulator(moments, gram, LocalTraining(5, 8, 1000.0), samples=20)
    result = posterior_search(simulator, moments.mean, np.array([10, 10, 10, 10]), 3)
    assert np.isfinite(result.mismatch)


@given(
    st.integers(0, 10_000),
    st.integers(2, 5),
    st.integers(1, 6),
    st.floats(0.01, 3.0),
    st.integers(0, 12),
)
def test_counts_keep_their_sum_and_the_best_iterate_is_kept(
    seed: int, classes: int, steps: int, lr: float, iterations: int
) -> None:
    moments, gram = make_case(seed, classes)
    rng = np.random.default_rng(seed)
    simulator = MeanSimulator(moments, gram, LocalTraining(steps, 8, lr), samples=20)
    first = rng.multinomial(8 * steps, rng.dirichlet(np.full(classes, 0.5))).astype(np.int64)
    before = first.copy()
    final_mean = moments.mean + rng.normal(size=(classes, classes))
    result = posterior_search(simulator, final_mean, first, iterations)
    assert result.counts.sum() == first.sum()
    assert np.all(result.counts >= 0)
    assert result.mismatch <= result.initial_mismatch
    assert 0 <= result.moves <= iterations
    np.testing.assert_array_equal(first, before)  # the caller's array is left alone
    assert result.mismatch == pytest.approx(np.sum((simulator.final_means(result.counts) - final_mean) ** 2))


def test_best_iterate_is_kept_where_the_last_is_worse() -> None:
    """Of a stubborn simulator's means, the mismatch is least after one move and grows again."""

    class Scripted(MeanSimulator):
        def __init__(self) -> None:
            self.training = LocalTraining(1, 8, 0.1)
            self.calls = 0

        def final_means(self, counts: np.ndarray) -> np.ndarray:
            size = [3.0, 1.0, 2.0, 4.0][self.calls]
            self.calls += 1
            return np.array([[size, -size], [0.0, 0.0]])

    result = posterior_search(Scripted(), np.zeros((2, 2)), np.array([8, 0]), 3)
    assert result.counts.tolist() == [7, 1]
    assert (result.moves, result.mismatch, result.initial_mismatch) == (1, 2.0, 18.0)


def test_search_ends_when_it_comes_back() -> None:
    class Wavering(MeanSimulator):
        def __init__(self) -> None:
            self.training = LocalTraining(2, 8, 0.1)
            self.asked: list[list[int]] = []

        def final_means(self, counts: np.ndarray) -> np.ndarray:
            self.asked.append(counts.tolist())
            sign = 1.0 if counts[0] == 10 else -1.0
            return sign * np.array([[1.0, -1.0], [0.0, 0.0]])

    simulator = Wavering()
    posterior_search(simulator, np.zeros((2, 2)), np.array([10, 6]), 50)
    assert simulator.asked == [[10, 6], [8, 8]]


@pytest.mark.cuda
def test_cuda_agrees_with_cpu() -> None:
    moments, gram = make_case(6)
    counts = np.array([10, 10, 15, 5])
    on_cpu, on_cuda = (
        MeanSimulator(moments, gram, TRAININGS["momentum"], samples=1000, device=device).final_means(counts)
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(on_cuda, on_cpu, atol=1e-4)
