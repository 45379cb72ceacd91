"""Monte Carlo confidence, against closed forms, integrals and plain sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_cases import moments_of, random_confidence
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core import confidence as module
from rlu_cli.core.confidence import LogitSampler, coefficient_matrix, monte_carlo_confidence
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


@pytest.mark.parametrize("seed", range(4))
def test_two_classes_against_numerical_integration(seed: int) -> None:
    """q_0 − q_1 is Gaussian, so S[n, 0] is a one-dimensional integral of the logistic function."""
    moments = random_moments(2, 2, seed=seed, spread=2.0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    result = monte_carlo_confidence(moments, samples=20_000, seed=seed)
    for n, covariance in enumerate(moments.covariance()):
        mu = moments.mean[n, 0] - moments.mean[n, 1]
        sigma = np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
        exact = weights @ (1 / (1 + np.exp(-(mu + sigma * nodes)))) / weights.sum()
        assert abs(result.mean[n, 0] - exact) < 4 * result.standard_error[n, 0] + 1e-6
        assert result.standard_error[n, 0] < 0.005


@pytest.mark.parametrize("rank", [2, 5], ids=["singular", "full"])
def test_against_plain_sampling_of_the_full_covariance(rank: int) -> None:
    moments = random_moments(5, rank, seed=7, spread=1.5)
    rng = np.random.default_rng(8)
    result = monte_carlo_confidence(moments, samples=20_000)
    for n, covariance in enumerate(moments.covariance()):
        draws = softmax(rng.multivariate_normal(moments.mean[n], covariance, size=40_000, method="eigh"))
        error = np.hypot(result.standard_error[n], draws.std(axis=0) / np.sqrt(len(draws)))
        assert np.all(np.abs(result.mean[n] - draws.mean(axis=0)) < 4 * error + 1e-6)


def test_draws_have_the_moments() -> None:
    moments = random_moments(4, 3, seed=1)
    draws = np.concatenate(
        [q.reshape(-1, 4, 4).double().numpy() for q in LogitSampler(moments, samples=60_000, seed=0)]
    )
    assert draws.shape == (60_000, 4, 4)
    np.testing.assert_allclose(draws.mean(axis=0), moments.mean, atol=1e-5)  # antithetic: exact but rounding
    for n, covariance in enumerate(moments.covariance()):
        np.testing.assert_allclose(np.cov(draws[:, n], rowvar=False), covariance, atol=0.05)


def test_standard_error_is_the_spread_over_seeds() -> None:
    moments = random_moments(4, 4, seed=2, spread=1.5)
    runs = [monte_carlo_confidence(moments, samples=200, seed=seed) for seed in range(200)]
    spread = np.std([run.mean for run in runs], axis=0, ddof=1)
    reported = np.mean([run.standard_error for run in runs], axis=0)
    # 200 seeds know a spread to 5 %; 16 entries and heavy tails leave it within a quarter.
    assert np.all(spread / reported < 1.25)
    assert np.all(spread / reported > 0.8)


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
    np.testing.assert_allclose(results[0].mean, results[1].mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("block_bytes", [1, 1000, 12_345, 10**9])
@pytest.mark.parametrize("rank", [1, 5, 7])
def test_block_size_does_not_matter(monkeypatch: pytest.MonkeyPatch, block_bytes: int, rank: int) -> None:
    """torch.randn gives other numbers when asked for them in other portions; the sampler must not."""
    moments = random_moments(5, rank, seed=5)
    expected = monte_carlo_confidence(moments, samples=10_001 if block_bytes > 1 else 501)
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    result = monte_carlo_confidence(moments, samples=10_001 if block_bytes > 1 else 501)
    np.testing.assert_allclose(result.mean, expected.mean, rtol=0, atol=1e-7)
    np.testing.assert_allclose(result.standard_error, expected.standard_error, rtol=0, atol=1e-6)


def test_odd_sample_counts_round_up() -> None:
    assert LogitSampler(random_moments(3, 2, seed=0), samples=7, seed=0).pairs == 4
    with pytest.raises(ValueError, match="at least 2"):
        LogitSampler(random_moments(3, 2, seed=0), samples=1, seed=0)


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
