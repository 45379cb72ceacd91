"""Made-up clients: their updates against torch's own SGD and literal sums, their mixes, their randomness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_cases import random_head, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.core.gradients import mean_gradient
from rlu_cli.core.moments import softmax
from rlu_cli.core.recover import head_update
from rlu_cli.core.synthetic_clients import (
    ClientSimulator,
    bandwidth,
    draw_mixes,
    sample_features,
    update_features,
    without_size,
)
from rlu_cli.core.types import Activations, Head, LocalTraining, Observation

N, L = 5, 7


def simulator(
    seed: int = 0, *, total: int = 16, alike: bool = False, each: int = 20, scaled: bool = False
) -> ClientSimulator:
    """Clients of normal logits, those of one class all the same if ``alike``."""
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(N), each)
    logits = rng.normal(size=(N, N))[labels] + 2 * np.eye(N)[labels]
    if not alike:
        logits = logits + rng.normal(size=logits.shape)
    shuffled = rng.permutation(len(labels))
    samples = Activations(logits[shuffled], None, labels[shuffled])
    return ClientSimulator(samples, rng.normal(size=N), total, seed=seed, scaled=scaled)


def test_features_are_those_of_a_step_of_torchs_sgd() -> None:
    """One step with weight decay on real cross-entropy; features from the update and from the logits."""
    rng = np.random.default_rng(0)
    head, embeddings = random_head(rng, N, L), rng.normal(size=(12, L))
    labels = rng.integers(0, N, 12)
    assert head.bias is not None
    layer = torch.nn.Linear(L, N, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight))
        layer.bias.copy_(torch.from_numpy(head.bias))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, weight_decay=0.1)
    logits = layer(torch.from_numpy(embeddings))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
    optimizer.step()
    local = Head(layer.weight.detach().numpy(), layer.bias.detach().numpy())
    start = statistics_of(np.full((N, N), 1 / N), np.ones((N, L)))
    training = LocalTraining(1, 12, 0.05, weight_decay=0.1)
    gradient = mean_gradient(Observation(head_update(local, head), head, training, start))
    plain = torch.from_numpy(embeddings @ head.weight.T)
    found = sample_features(plain, torch.from_numpy(head.bias), torch.from_numpy(labels), 1)[0].numpy()
    np.testing.assert_allclose(update_features(gradient, head), found, atol=1e-12)
    literal = np.zeros((N, N + 1))
    for e, y in zip(embeddings, labels, strict=True):
        r = np.eye(N)[y] - softmax(head.weight @ e + head.bias)
        literal += np.outer(r, [1.0, *(head.weight @ e)]) / 12
    np.testing.assert_allclose(found, np.concatenate((literal[:, 0], literal[:, 1:].ravel())), atol=1e-12)


def test_features_follow_from_the_counts_where_samples_are_alike() -> None:
    made = simulator(alike=True)
    clients = made.draw(700)
    plain, bias = made._means, made._bias
    own = torch.stack([sample_features(plain[n : n + 1], bias, torch.tensor([n]), 1)[0] for n in range(N)])
    expected = torch.from_numpy(clients.counts / 16).float() @ own
    torch.testing.assert_close(clients.features, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 5))
def test_counts_are_those_of_the_total(seed: int, total: int, each: int) -> None:
    clients = simulator(seed, total=total, each=each).draw(410)
    assert clients.counts.shape == (410, N) and clients.counts.min() >= 0
    assert np.all(clients.counts.sum(axis=1) == total)
    assert bool(torch.isfinite(clients.features).all())


def test_mixes_are_of_all_kinds() -> None:
    counts = simulator().draw(4000).counts
    present = (counts > 0).sum(axis=1)
    assert np.all(np.bincount(present, minlength=N + 1)[1:] > 100)
    np.testing.assert_allclose(counts.mean(axis=0), 16 / N, atol=0.3)


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 100])
def test_one_mix_in_eleven_is_of_few_classes(classes: int) -> None:
    drawn = 11_000
    mixes = draw_mixes(drawn, classes, np.random.default_rng(0))
    np.testing.assert_allclose(mixes.sum(axis=1), 1.0)
    assert np.all(mixes >= 0)
    absent = (mixes == 0).sum(axis=1)
    few = absent > 0
    if classes == 1:
        assert not few.any()
        return
    assert abs(few.sum() - drawn / 11) < 4 * np.sqrt(drawn / 11)
    there = classes - absent[few]
    assert there.max() <= max(1, classes // 2)
    assert set(range(1, min(4, classes // 2) + 1)) <= set(there.tolist())
    np.testing.assert_allclose(mixes.mean(axis=0), 1 / classes, atol=5 / np.sqrt(drawn * classes))


def test_draws_follow_the_seed() -> None:
    first, again, other = (simulator(seed).draw(500) for seed in (3, 3, 4))
    assert torch.equal(first.features, again.features)
    np.testing.assert_array_equal(first.counts, again.counts)
    assert not torch.equal(first.features, other.features)


def test_groups_weigh_the_auxiliary_samples_differently() -> None:
    """Of clients of one class alone, means of 60 differ between groups as the Bayesian bootstrap says.

    With weights uniform on the simplex the mean of K values has the variance of the values /(K + 1).
    """
    K = 9
    labels = np.repeat(np.arange(2), K)
    logits = np.random.default_rng(0).normal(size=(2 * K, 2))
    made = ClientSimulator(Activations(logits, None, labels), np.zeros(2), 50, seed=0)
    rng = np.random.default_rng(1)
    means = [float(made._features(np.tile([50, 0], (60, 1)), rng)[:, 0].mean()) for _ in range(300)]
    residual = softmax(logits[labels == 0])[:, 1]  # r_0 of class 0
    assert 0.6 < np.var(means) / (np.var(residual) / (K + 1)) < 1.6


@pytest.mark.parametrize(("each", "wide", "narrow"), [(8, 1.35, 0.77), (400, 1.15, 0.9)])
def test_few_samples_may_be_wider_apart(each: int, wide: float, narrow: float) -> None:
    """Clients of one sample show its logits, r ⊗ q over r: their spread differs from group to group.

    Where the auxiliary samples' weights alone differ, the quantiles are 1.17 and 0.85 with eight samples.
    """
    labels = np.repeat([0, 1], each)
    logits = np.random.default_rng(4).normal(size=(2 * each, 2)) + 2 * np.eye(2)[labels]
    made = ClientSimulator(Activations(logits, None, labels), np.zeros(2), 1, seed=0).draw(400 * 400)
    q = (made.features[:, 2:4] / made.features[:, :1]).numpy().reshape(400, 400, 2)
    own = made.counts.reshape(400, 400, 2)[:, :, 0] > 0
    spreads = np.array([q[group, own[group], 0].std() for group in range(400)])
    spreads /= np.median(spreads)
    assert (np.quantile(spreads, 0.9) > wide) == (each == 8)
    assert (np.quantile(spreads, 0.1) < narrow) == (each == 8)


def test_smoothing_is_silvermans() -> None:
    """Of one dimension the well-known 1.06 K^(−1/5), and less for more samples in any."""
    assert bandwidth(32, 1) == (4 / 3) ** 0.2 / 2
    assert bandwidth(100, 10) < bandwidth(30, 10) < 1


def test_scaled_clients_are_others_made_smaller() -> None:
    """Factors log-uniform from 0.05 to 1 on whole updates, and nothing else changed."""
    plain, scaled = (simulator(3, scaled=some).draw(800) for some in (False, True))
    group = slice(0, 400)  # whose random numbers before the first factor are the same
    np.testing.assert_array_equal(plain.counts[group], scaled.counts[group])
    factors = (scaled.features[group] / plain.features[group]).numpy()
    np.testing.assert_allclose(factors, np.repeat(factors[:, :1], factors.shape[1], axis=1), rtol=1e-3)
    logarithms = np.log(factors[:, 0]) / np.log(0.05)
    assert logarithms.min() >= -1e-6 and logarithms.max() <= 1 + 1e-6
    np.testing.assert_allclose(np.quantile(logarithms, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.08)


@given(st.floats(1e-4, 1e4), st.booleans())
def test_without_size_only_the_direction_is_left(factor: float, noisy: bool) -> None:
    features = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, scaled = (without_size(f, noisy=noisy) for f in (features, factor * features))
    torch.testing.assert_close(scaled[:, :8], plain[:, :8])
    torch.testing.assert_close(torch.linalg.norm(plain[:, :8], dim=1), torch.ones(3, dtype=torch.float64))
    if noisy:
        torch.testing.assert_close(scaled[:, 8] - plain[:, 8], torch.full((3,), np.log(factor)).double())
    assert not torch.isnan(without_size(torch.zeros(1, 8), noisy=noisy)).any()
