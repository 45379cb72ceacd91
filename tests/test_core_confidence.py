"""Monte Carlo confidence, against closed forms, integrals and plain sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_cases import moments_of, random_confidence
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlu_cli.core.confidence import coefficient_matrix, monte_carlo_confidence
from rlu_cli.core.simplex import simplex_least_squares
from rlu_cli.core.types import LogitMoments


def softmax(q: np.ndarray) -> np.ndarray:
    e = np.exp(q - q.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def random_moments(classes: int, rank: int, *, seed: int, spread: float = 1.0) -> LogitMoments:
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=(classes, classes)) + 1.5 * np.eye(classes)
    return moments_of(mean, spread * rng.normal(size=(classes, rank, classes)) / np.sqrt(rank))


def test_zero_covariance_is_softmax_of_the_mean() -> None:
    mean = np.array([[2.0, -1.0], [0.3, 0.7]])
    result = monte_carlo_confidence(moments_of(mean), samples=100)
    np.testing.assert_allclose(result.mean, softmax(mean), atol=1e-7)
    assert result.standard_error.max() < 1e-4  # zero but for float32 squares


def test_huge_logits_neither_overflow_nor_underflow() -> None:
    mean = np.array([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0], [-1e4, -1e4, -1e4 + 500]])
    result = monte_carlo_confidence(moments_of(mean), samples=10)
    np.testing.assert_allclose(result.mean, softmax(mean), atol=1e-7)


def two_class_integral(moments: LogitMoments, n: int) -> float:
    """S[n, 0] of two classes: q_0 − q_1 is Gaussian, so it is an integral of the logistic function."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    covariance = moments.covariance()[n]
    mu = moments.mean[n, 0] - moments.mean[n, 1]
    sigma = np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    return float(weights @ (1 / (1 + np.exp(-(mu + sigma * nodes)))) / weights.sum())


@pytest.mark.parametrize("seed", range(4))
def test_two_classes_against_numerical_integration(seed: int) -> None:
    moments = random_moments(2, 2, seed=seed, spread=2.0)
    result = monte_carlo_confidence(moments, samples=20_000, seed=seed)
    for n in range(2):
        # Student's t with 9 degrees of freedom: 5 of its errors are beyond one in a thousand.
        assert (
            abs(result.mean[n, 0] - two_class_integral(moments, n)) < 5 * result.standard_error[n, 0] + 1e-6
        )
        assert result.standard_error[n, 0] < 0.001


@pytest.mark.parametrize("rank", [2, 5], ids=["singular", "full"])
def test_against_plain_sampling_of_the_full_covariance(rank: int) -> None:
    moments = random_moments(5, rank, seed=7, spread=1.5)
    rng = np.random.default_rng(8)
    result = monte_carlo_confidence(moments, samples=20_000)
    for n, covariance in enumerate(moments.covariance()):
        draws = softmax(rng.multivariate_normal(moments.mean[n], covariance, size=40_000, method="eigh"))
        error = np.hypot(result.standard_error[n], draws.std(axis=0) / np.sqrt(len(draws)))
        assert np.all(np.abs(result.mean[n] - draws.mean(axis=0)) < 4 * error + 1e-6)


@pytest.mark.parametrize("spread", [1.5, 20.0], ids=["tame", "wild"])
@pytest.mark.parametrize("samples", [200, 1000])
def test_standard_error_is_the_spread_over_seeds(spread: float, samples: int) -> None:
    moments = random_moments(4, 4, seed=2, spread=spread)
    runs = [monte_carlo_confidence(moments, samples=samples, seed=seed) for seed in range(200)]
    spread_found = np.std([run.mean for run in runs], axis=0, ddof=1)
    reported = np.sqrt(np.mean([run.standard_error**2 for run in runs], axis=0))
    # 200 seeds know a spread to 5 %; 16 entries and heavy tails leave it within a quarter.
    assert np.all(spread_found / reported < 1.25)
    assert np.all(spread_found / reported > 0.8)


def test_errors_are_students_t() -> None:
    """(S − truth)/error over seeds, against the exact integral: Student's t of the frames, not biased."""
    moments = random_moments(2, 2, seed=3, spread=2.0)
    truth = two_class_integral(moments, 0)
    runs = [monte_carlo_confidence(moments, samples=400, seed=seed) for seed in range(400)]
    ratios = np.array([(run.mean[0, 0] - truth) / run.standard_error[0, 0] for run in runs])
    assert stats.kstest(ratios, stats.t(df=9).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("spread", "gain"), [(0.3, 100.0), (1.0, 20.0), (6.0, 1.2)])
def test_error_is_smaller_than_that_of_independent_draws(spread: float, gain: float) -> None:
    """Per sample, in variance, and at its real spread over seeds: the softer the softmax, the more."""
    moments = random_moments(8, 8, seed=4, spread=spread)
    rng = np.random.default_rng(0)
    plain = np.mean(
        [
            softmax(mean + rng.normal(size=(20_000, 8)) @ F).var(axis=0)
            for mean, F in zip(moments.mean, moments.factor, strict=True)
        ]
    )
    runs = [monte_carlo_confidence(moments, samples=2000, seed=seed).mean for seed in range(40)]
    assert plain / 2000 / np.mean(np.var(runs, axis=0, ddof=1)) > gain


@given(st.integers(1, 12), st.integers(1, 12), st.integers(2, 300), st.integers(0, 1000))
def test_rows_sum_to_one(classes: int, rank: int, samples: int, seed: int) -> None:
    result = monte_carlo_confidence(
        random_moments(classes, rank, seed=seed, spread=3.0), samples=samples, seed=seed
    )
    np.testing.assert_allclose(result.mean.sum(axis=1), 1.0, atol=1e-12)
    assert np.all(result.mean >= 0)
    assert np.all(np.isfinite(result.standard_error))


def test_same_seed_same_bytes() -> None:
    moments = random_moments(6, 4, seed=3)
    first, again = (monte_carlo_confidence(moments, samples=1000, seed=5) for _ in range(2))
    assert first.mean.tobytes() == again.mean.tobytes()
    assert first.standard_error.tobytes() == again.standard_error.tobytes()
    assert not np.array_equal(first.mean, monte_carlo_confidence(moments, samples=1000, seed=6).mean)


def test_thread_count_does_not_matter(torch_threads: None) -> None:
    moments = random_moments(40, 30, seed=4)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(monte_carlo_confidence(moments, samples=2000))
        assert torch.get_num_threads() == threads
    assert results[0].mean.tobytes() == results[1].mean.tobytes()
    assert results[0].standard_error.tobytes() == results[1].standard_error.tobytes()


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        monte_carlo_confidence(random_moments(3, 2, seed=0), samples=1)


@pytest.mark.cuda
def test_cuda_agrees_with_cpu() -> None:
    moments = random_moments(20, 10, seed=6)
    on_cpu = monte_carlo_confidence(moments, samples=5000)
    on_cuda = monte_carlo_confidence(moments, samples=5000, device="cuda")
    np.testing.assert_allclose(on_cuda.mean, on_cpu.mean, rtol=0, atol=1e-5)


@given(st.integers(2, 30), st.integers(0, 1000))
def test_coefficient_matrix(classes: int, seed: int) -> None:
    S = random_confidence(np.random.default_rng(seed), classes)
    A = coefficient_matrix(S)
    np.testing.assert_allclose(A.sum(axis=0), 0.0, atol=1e-14)
    np.testing.assert_allclose(A, np.eye(classes) - S.T, atol=1e-14)


def test_coefficient_matrix_keeps_the_digits_of_a_sure_class() -> None:
    S = np.array([[1.0, 1e-20], [1e-18, 1.0]])
    np.testing.assert_allclose(coefficient_matrix(S), [[1e-20, -1e-18], [-1e-20, 1e-18]], rtol=1e-12)


def test_printed_index_order_of_the_paper_is_the_transpose_and_fails() -> None:
    """E[Δb_j]/η = z_j − Σ_n z_n S[n, j]: class n's samples push class j's bias by S[n, j], not S[j, n]."""
    S = np.array([[0.5, 0.4, 0.1], [0.05, 0.85, 0.1], [0.3, 0.3, 0.4]])
    z = np.array([0.5, 0.1, 0.4])
    u = np.array([z[j] - sum(z[n] * S[n, j] for n in range(3)) for j in range(3)])
    np.testing.assert_allclose(coefficient_matrix(S) @ z, u, atol=1e-15)
    np.testing.assert_allclose(simplex_least_squares(coefficient_matrix(S), u).z, z, atol=1e-12)
    printed = simplex_least_squares(np.eye(3) - S, u).z
    assert np.abs(printed - z).max() > 0.05
