"""Class-conditional moments, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from rlu_cli.core.moments import logit_moments, model_statistics
from rlu_cli.errors import MismatchError


def draw(samples: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Correlated logits with samples[n] rows of class n, shuffled."""
    rng = np.random.default_rng(seed)
    N = len(samples)
    labels = rng.permutation(np.repeat(np.arange(N), samples))
    logits = rng.normal(size=(len(labels), N)) @ rng.normal(size=(N, N)) + 3.0 * np.eye(N)[labels]
    return logits, labels


@pytest.mark.parametrize(
    "samples",
    [[40, 50, 60, 45], [3, 2, 4, 3], [4, 4, 4, 4], [2, 30, 5, 3], [1, 1, 1, 1], [1, 6, 2, 9]],
    ids=["K>N", "K<=N", "K=N", "mixed", "K=1", "some K=1"],
)
def test_mean_and_covariance_are_numpys(samples: list[int]) -> None:
    logits, labels = draw(samples)
    N = len(samples)
    moments = logit_moments(logits, labels, N)
    assert moments.counts.tolist() == samples
    assert moments.factor.shape == (N, min(max(samples), N), N)
    covariance = moments.covariance()
    for n, K in enumerate(samples):
        rows = logits[labels == n]
        np.testing.assert_allclose(moments.mean[n], rows.mean(axis=0), rtol=1e-12, atol=1e-12)
        expected = np.cov(rows, rowvar=False) if K > 1 else np.zeros((N, N))
        np.testing.assert_allclose(covariance[n], expected, rtol=1e-10, atol=1e-10)


def test_one_sample_has_zero_covariance() -> None:
    logits, labels = draw([1, 5, 5])
    moments = logit_moments(logits, labels, 3)
    assert not moments.factor[0].any()
    np.testing.assert_array_equal(moments.mean[0], logits[labels == 0][0])


def test_float32_logits_are_averaged_in_float64() -> None:
    logits = np.array([[1e4, 0.0], [1e4 + 0.5, 0.0], [0.0, 1.0]], dtype=np.float32)
    moments = logit_moments(logits, np.array([0, 0, 1]), 2)
    assert moments.mean.dtype == np.float64
    assert moments.mean[0, 0] == 1e4 + 0.25
    assert moments.covariance()[0, 0, 0] == pytest.approx(0.125, rel=1e-12)


def test_missing_class_is_refused() -> None:
    logits, labels = draw([4, 4, 4])
    labels = np.where(labels == 1, 0, labels)
    with pytest.raises(MismatchError, match="none of class index 1"):
        logit_moments(logits, labels, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits, labels = draw([4, 4, 4])
    logits[5, 1] = bad
    with pytest.raises(MismatchError, match="finite"):
        logit_moments(logits, labels, 3)


def test_model_statistics() -> None:
    logits, labels = draw([20, 10, 30], seed=3)
    rng = np.random.default_rng(4)
    embeddings = rng.normal(size=(60, 5))
    statistics = model_statistics(logits, embeddings, labels, 3, samples=500)
    for n in range(3):
        rows = labels == n
        np.testing.assert_allclose(statistics.embedding_mean[n], embeddings[rows].mean(axis=0), atol=1e-12)
        assert statistics.accuracy[n] == pytest.approx(np.mean(logits[rows].argmax(axis=1) == n))
    assert statistics.overall_accuracy == pytest.approx(np.mean(logits.argmax(axis=1) == labels))
    np.testing.assert_allclose(statistics.confidence.sum(axis=1), 1.0, atol=1e-12)
    assert statistics.num_classes == 3
