"""The posterior search, against a literal, slow reading of Alg. 2."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest
from core_cases import moments_of
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core import search as module
from rlu_cli.core.confidence import monte_carlo_confidence
from rlu_cli.core.draws import paired_normals
from rlu_cli.core.search import Asked, MeanSimulator, SearchResult, posterior_search
from rlu_cli.core.types import LocalTraining, LogitMoments

CLASSES = 4
SAMPLES = 60


def final_means(
    simulator: MeanSimulator, counts: np.ndarray | list[int], *constant: np.ndarray
) -> np.ndarray:
    """Of one client."""
    return simulator.final_means(np.array(counts)[None], *constant)[0]


def search(
    simulator: MeanSimulator, final_mean: np.ndarray, counts: np.ndarray | list[int], iterations: int
) -> SearchResult:
    """For one client."""
    return posterior_search(simulator, final_mean[None], np.array(counts, dtype=np.int64)[None], iterations)[
        0
    ]


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
    xi = (
        paired_normals(SAMPLES // 2, moments.factor.shape[1], seed).double().numpy().reshape(SAMPLES // 2, -1)
    )
    spread = np.einsum("pr,nrj->pnj", xi, moments.factor)
    draws = np.concatenate([moments.mean + spread, moments.mean - spread])
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
    np.testing.assert_allclose(final_means(simulator, counts), expected, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_smaller_last_batches_weigh_as_much_as_full_ones(changes: dict[str, float]) -> None:
    """The loss is each batch's mean: five epochs of 33 samples in batches of 32 and 1 moved half as far."""
    moments, gram = make_case(3)
    counts = np.array([50, 60, 30, 25])
    epochs = LocalTraining(10, 32, 0.1, total=165, distinct=33, **changes)
    full = LocalTraining(10, 32, 0.1, **changes)
    expected = literal_final_means(moments, gram, full, counts * (320 / 165))
    assert np.abs(expected - moments.mean).max() > 0.1
    found = final_means(MeanSimulator(moments, gram, epochs, samples=SAMPLES), counts)
    np.testing.assert_allclose(found, expected, atol=module._STRIDE_ERROR)


def test_constant_gradient_moves_the_means_too() -> None:
    moments, gram = make_case(2)
    constant = np.random.default_rng(3).normal(size=(CLASSES, CLASSES))
    training, counts = LocalTraining(4, 8, 0.1, scheme="scaffold"), np.array([8, 8, 8, 8])
    simulator = MeanSimulator(moments, gram, training, samples=SAMPLES)
    expected = literal_final_means(moments, gram, training, counts, constant)
    np.testing.assert_allclose(final_means(simulator, counts, constant), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "momentum"])
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7])
def test_search_finds_the_same_counts_as_the_literal_one(name: str, seed: int) -> None:
    moments, gram = make_case(10 + seed)
    training = TRAININGS[name]
    rng = np.random.default_rng(seed)
    truth, first = (rng.multinomial(40, rng.dirichlet(np.ones(CLASSES))) for _ in range(2))
    final_mean = literal_final_means(moments, gram, training, truth, seed=9)
    result = search(MeanSimulator(moments, gram, training, samples=SAMPLES), final_mean, first, 6)
    best, mismatch = literal_search(moments, gram, training, final_mean, first, 6)
    assert result.counts.tolist() == best
    assert result.mismatch == pytest.approx(mismatch, rel=1e-3, abs=1e-8)
    assert result.moves > 0  # else the case says nothing


def test_search_goes_from_a_wrong_guess_to_the_truth() -> None:
    moments, gram = make_case(20)
    training = LocalTraining(2, 20, 0.05)
    simulator = MeanSimulator(moments, gram, training, samples=SAMPLES)
    truth = np.array([10, 6, 20, 4])
    result = search(simulator, final_means(simulator, truth), [14, 6, 16, 4], 10)
    assert result.counts.tolist() == truth.tolist()
    assert result.mismatch == 0
    assert result.moves == 2


def test_draws_made_again_are_the_kept_ones() -> None:
    moments, gram = make_case(4)
    counts, training = np.array([10, 0, 20, 10]), TRAININGS["momentum"]
    kept = final_means(MeanSimulator(moments, gram, training, samples=5001), counts)
    made_again = final_means(MeanSimulator(moments, gram, training, samples=5001, keep=0), counts)
    assert made_again.tobytes() == kept.tobytes()


def test_search_shifts_the_draws_of_the_confidence() -> None:
    moments, gram = make_case(5)
    simulator = MeanSimulator(moments, gram, TRAININGS["sgd"], samples=4000, seed=6)
    S = simulator.softmax.at(np.zeros((1, CLASSES, CLASSES)), np.ones((1, CLASSES), dtype=bool))[0]
    expected = monte_carlo_confidence(moments, samples=4000, seed=6)
    np.testing.assert_allclose(S, expected.mean, atol=1e-6)


@pytest.mark.parametrize("name", TRAININGS)
def test_clients_side_by_side_are_as_alone(name: str) -> None:
    moments, gram = make_case(11)
    rng = np.random.default_rng(3)
    training = TRAININGS[name]
    constant = 0.1 * rng.normal(size=(5, CLASSES, CLASSES))
    counts = rng.multinomial(40, rng.dirichlet(np.full(CLASSES, 0.5), size=5)).astype(np.int64)
    simulator = MeanSimulator(moments, gram, training, samples=SAMPLES)
    truth = rng.multinomial(40, rng.dirichlet(np.ones(CLASSES), size=5))
    final_mean = simulator.final_means(truth, constant)
    together = posterior_search(simulator, final_mean, counts, 6, constant)
    for client, found in enumerate(together):
        one = slice(client, client + 1)
        (alone,) = posterior_search(simulator, final_mean[one], counts[one], 6, constant[one])
        assert found.counts.tolist() == alone.counts.tolist()
        assert found.moves == alone.moves
        assert found.mismatch == pytest.approx(alone.mismatch, rel=1e-4, abs=1e-9)
    assert len({found.moves for found in together}) > 1  # they don't all end together


LONG = {
    "sgd": LocalTraining(100, 32, 0.01),
    "momentum": LocalTraining(150, 32, 0.01, momentum=0.9),
    "prox": LocalTraining(200, 32, 0.05, prox=5.0),
    "decaying rate": LocalTraining(120, 32, tuple(0.05 * 0.98**t for t in range(120)), weight_decay=0.01),
    "whole epochs": LocalTraining(785, 32, 0.05),
    "steps that swing": LocalTraining(40, 32, 0.5, prox=3.5),
    "two more than the cubic": LocalTraining(6, 32, 0.05),
}


@pytest.mark.parametrize("name", LONG)
def test_strides_end_where_single_steps_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """785 steps take tens of evaluations of S, and the means are right to what a stride may miss."""
    moments, gram = make_case(12)
    training = LONG[name]
    rng = np.random.default_rng(4)
    counts = rng.multinomial(training.samples, rng.dirichlet(np.full(CLASSES, 0.7), size=2))
    simulator = MeanSimulator(moments, gram, training, samples=SAMPLES)
    evaluate, calls = simulator.softmax.at, []

    def counted(shifts: np.ndarray, active: np.ndarray) -> np.ndarray:
        calls.append(1)
        return evaluate(shifts, active)

    monkeypatch.setattr(simulator.softmax, "at", counted)
    fast = simulator.final_means(counts)
    strides = len(calls)
    monkeypatch.setattr(module, "_STRIDE_ERROR", -1.0)  # no stride but 1 is good enough
    exact = simulator.final_means(counts)
    assert len(calls) - strides == training.steps
    assert np.abs(exact - moments.mean).max() > 0.3
    np.testing.assert_allclose(fast, exact, rtol=0, atol=1e-3)
    if training.steps > 90:
        assert strides < training.steps / 2
    if name == "whole epochs":
        assert strides < training.steps / 6


def test_training_that_diverges_still_gives_finite_numbers() -> None:
    moments, gram = make_case(8)
    simulator = MeanSimulator(moments, gram, LocalTraining(5, 8, 1000.0), samples=20)
    result = search(simulator, moments.mean, [10, 10, 10, 10], 3)
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
    result = search(simulator, final_mean, first, iterations)
    assert result.counts.sum() == first.sum()
    assert np.all(result.counts >= 0)
    assert result.mismatch <= result.initial_mismatch
    assert 0 <= result.moves <= iterations
    np.testing.assert_array_equal(first, before)  # the caller's array is left alone
    assert result.mismatch == pytest.approx(np.sum((final_means(simulator, result.counts) - final_mean) ** 2))


def test_best_iterate_is_kept_where_the_last_is_worse() -> None:
    """Of a stubborn simulator's means, the mismatch is least after one move and grows again."""

    class Scripted(MeanSimulator):
        def __init__(self) -> None:
            self.training = LocalTraining(1, 8, 0.1)
            self.calls = 0

        def simulate(
            self, counts: np.ndarray, constant: object = None
        ) -> Generator[Asked, np.ndarray, np.ndarray]:
            size = [3.0, 1.0, 2.0, 4.0][self.calls]
            self.calls += 1
            yield from ()
            return np.array([[size, -size], [0.0, 0.0]])

    result = search(Scripted(), np.zeros((2, 2)), [8, 0], 3)
    assert result.counts.tolist() == [7, 1]
    assert (result.moves, result.mismatch, result.initial_mismatch) == (1, 2.0, 18.0)


def test_search_ends_when_it_comes_back() -> None:
    class Wavering(MeanSimulator):
        def __init__(self) -> None:
            self.training = LocalTraining(2, 8, 0.1)
            self.asked: list[list[int]] = []

        def simulate(
            self, counts: np.ndarray, constant: object = None
        ) -> Generator[Asked, np.ndarray, np.ndarray]:
            self.asked.append(counts.tolist())
            sign = 1.0 if counts[0] == 10 else -1.0
            yield from ()
            return sign * np.array([[1.0, -1.0], [0.0, 0.0]])

    simulator = Wavering()
    search(simulator, np.zeros((2, 2)), [10, 6], 50)
    assert simulator.asked == [[10, 6], [8, 8]]


@pytest.mark.cuda
def test_cuda_agrees_with_cpu() -> None:
    moments, gram = make_case(6)
    counts = np.array([10, 10, 15, 5])
    on_cpu, on_cuda = (
        final_means(MeanSimulator(moments, gram, TRAININGS["momentum"], samples=1000, device=device), counts)
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(on_cuda, on_cpu, atol=1e-4)
