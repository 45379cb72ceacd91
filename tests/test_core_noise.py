"""Known noise on updates: what is taken of it, and what the error models make of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_cases import scripted_observation
from methods_cases import cross_entropy_gradient, known_round, problem_of, random_head

from rlu_cli.core.checks import check_update
from rlu_cli.core.embedding import weight_direction
from rlu_cli.core.error_model import ResidualModel
from rlu_cli.core.methods import METHODS
from rlu_cli.core.misfit import misfit
from rlu_cli.core.noise import (
    alike,
    is_rounding,
    normalised_noise,
    observed_views,
    rounding_alone,
    unexplained_noise,
)
from rlu_cli.core.rate_likelihood import least_scale
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.residuals import ResidualPath, residual_moments, residual_views
from rlu_cli.core.synthetic_clients import ClientSimulator, FeatureNoise, update_features
from rlu_cli.core.types import Activations, FloatArray, Head, HeadUpdate, LocalTraining, Observation

N, L, SIGMA = 6, 30, 0.05


def samples(seed: int, head: Head, each: int = 60) -> Activations:
    """Embeddings of every class about means of its own, far from the origin."""
    means = 1.0 + 0.6 * np.random.default_rng(0).normal(size=(N, L))
    labels = np.repeat(np.arange(N), each)
    embeddings = means[labels] + 0.5 * np.random.default_rng(seed).normal(size=(N * each, L))
    return Activations(embeddings @ head.weight.T + head.bias, embeddings, labels)


def noisy_round(seed: int, sigma: float) -> tuple[Observation, FloatArray]:
    """A client's one step of rate 1 with noise on its update, and its counts."""
    rng = np.random.default_rng(seed)
    head = random_head(N, L, scale=0.2)
    pool, aux = samples(1000 + seed, head), samples(seed // 10, head)
    counts = rng.multinomial(64, rng.dirichlet(np.full(N, 0.5)))
    rows = np.concatenate([n * 60 + rng.integers(0, 60, count) for n, count in enumerate(counts)])
    assert pool.embeddings is not None
    assert aux.embeddings is not None
    gradient = cross_entropy_gradient(head, pool.embeddings[rows], pool.labels[rows])
    assert gradient.bias is not None
    weight = -gradient.weight + sigma * rng.normal(size=(N, L))
    bias = -gradient.bias + sigma * rng.normal(size=N)
    means = np.stack([aux.embeddings[aux.labels == n].mean(axis=0) for n in range(N)])
    along = weight_direction(means)
    moments = residual_moments(residual_views(aux, along), aux.labels, views=2)
    observation, _ = scripted_observation(LocalTraining(1, 64, 1.0), classes=N, size=L)
    observation = replace(
        observation,
        update=HeadUpdate(weight, bias),
        head=head,
        noise_std=sigma,
        residuals=ResidualPath(moments, along=along),
    )
    return observation, counts


def test_views_are_the_bias_and_the_weight_along_the_mean_embedding() -> None:
    observation, _ = noisy_round(1, SIGMA)
    problem = problem_of(observation)
    views, spread = observed_views(observation, problem.u, problem.gradient)
    path = observation.residuals
    assert path is not None
    assert path.along is not None
    assert observation.update.bias is not None
    for start, literal in ((0, observation.update.bias), (N - 1, observation.update.weight @ path.along)):
        np.testing.assert_allclose(views[start : start + N - 1], (literal - literal.mean())[:-1])
    assert spread == pytest.approx((SIGMA, SIGMA * np.linalg.norm(path.along)))
    assert spread[1] < SIGMA / 3  # the better of the two


def rounded(observation: Observation, step: float) -> Observation:
    """With the noise that is seen of rounding."""
    update = observation.update
    assert update.bias is not None
    grid = [step / 3 + np.rint((part - step / 3) / step) * step for part in (update.weight, update.bias)]
    seen = alike(step / np.sqrt(12))
    return replace(observation, update=HeadUpdate(*grid), noise_std=seen, noise_told=False)


def test_what_rounding_adds_is_that_of_draws() -> None:
    observation = rounded(noisy_round(1, SIGMA)[0], 0.01)
    errors = np.random.default_rng(0).uniform(-0.005, 0.005, 10**5)
    assert rounding_alone(observation) == pytest.approx(errors.std(), rel=0.01)
    two = replace(observation, training=LocalTraining(2, 32, 0.5))
    assert rounding_alone(two) == pytest.approx(rounding_alone(observation))  # η Σρ = 1 too
    assert rounding_alone(replace(observation, noise_told=True)) == 0.0  # there is noise besides
    assert rounding_alone(replace(observation, noise_told=True, noise_std=0.0)) > 0
    assert rounding_alone(noisy_round(1, SIGMA)[0]) == 0.0
    headless = replace(observation, update=HeadUpdate(observation.update.weight, None))
    assert rounding_alone(headless) == 0.0
    assert rounding_alone(rounded(noisy_round(1, SIGMA)[0], 0.001)) == 0.0  # 0.02 of a sample


def test_noise_that_rounding_cant_have_made_is_noise() -> None:
    """It was dropped: of rounded updates with more noise than that 61 % of the bounds held."""
    held = []
    for seed in range(20):
        observation, counts = noisy_round(seed, 0.2)
        found = replace(rounded(observation, 0.05), noise_std=alike(0.2))
        assert not is_rounding(found) and rounding_alone(found) == 0.0
        estimate = METHODS["gls"].solve(problem_of(found))
        assert estimate.low is not None and estimate.high is not None
        held.append((estimate.low <= counts) & (counts <= estimate.high))
    assert np.mean(held) > 0.85
    assert is_rounding(replace(found, noise_std=0.05))
    update = found.update
    assert update.bias is not None
    signs = HeadUpdate(0.1 * np.sign(update.weight), 0.1 * np.sign(update.bias))  # their sums tell nothing
    assert is_rounding(replace(found, update=signs, noise_std=10.0))


def test_a_rounded_update_is_looked_at_in_the_bias_alone_where_that_says_enough() -> None:
    observation = rounded(noisy_round(1, SIGMA)[0], 0.01)
    problem = problem_of(observation)

    def views(given: Observation, *, exact: bool) -> int:
        return len(observed_views(given, problem.u, problem.gradient, exact=exact)[1])

    assert (views(observation, exact=True), views(observation, exact=False)) == (1, 2)
    quiet = replace(observation, noise_std=0.0)
    assert (views(quiet, exact=True), views(quiet, exact=False)) == (1, 1)
    told = replace(observation, noise_told=True)
    assert (views(told, exact=True), views(told, exact=False)) == (2, 2)
    _, spread = observed_views(quiet, problem.u, problem.gradient)
    assert spread == (rounding_alone(quiet),)


def test_noise_is_relative_to_the_steps_weights() -> None:
    observation, _ = noisy_round(1, SIGMA)
    assert normalised_noise(replace(observation, training=LocalTraining(4, 16, 0.5))) == SIGMA / 2
    adam = LocalTraining(4, 16, 0.5, optimizer="adam")
    assert normalised_noise(replace(observation, training=adam)) == SIGMA / 2
    assert normalised_noise(replace(observation, noise_std=0.0)) == 0.0


def test_covariance_of_noise_is_that_of_draws() -> None:
    observation, _ = noisy_round(2, SIGMA)
    path, problem = observation.residuals, problem_of(observation)
    assert path is not None
    _, spread = observed_views(observation, problem.u, problem.gradient)
    z = np.full(N, 1 / N)
    quiet = ResidualModel([(1.0, path.start)], observation.training, noise=(0.0, 0.0)).covariance(z)
    noisy = ResidualModel([(1.0, path.start)], observation.training, noise=spread).covariance(z)
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(20_000):
        bias, weight = SIGMA * rng.normal(size=N), SIGMA * rng.normal(size=(N, L))
        draws.append(observed_views(observation, bias, Head(-weight, None))[0])
    found = np.cov(np.array(draws).T)
    assert np.linalg.norm(noisy - quiet - found) < 0.05 * np.linalg.norm(found)


@pytest.mark.parametrize("sigma", [0.02, 0.2])
def test_bounds_hold_under_known_noise(sigma: float) -> None:
    told, untold, errors = [], [], {True: [], False: []}
    for seed in range(20):
        observation, counts = noisy_round(seed, sigma)
        for known, inside in ((True, told), (False, untold)):
            given = observation if known else _untold(observation)
            found = METHODS["gls"].solve(problem_of(given))
            assert found.low is not None
            assert found.high is not None
            inside.append(np.mean((found.low <= counts) & (counts <= found.high)))
            errors[known].append(np.abs(64 * found.proportions - counts).sum())
    assert np.mean(told) > 0.93
    assert np.mean(errors[True]) < 0.8 * np.mean(errors[False])


def _untold(observation: Observation) -> Observation:
    """What the auditor works with who doesn't know of the noise: the bias alone."""
    path = observation.residuals
    assert path is not None
    mean, factor = path.start.mean[:, :N], path.start.factor[:, :, :N]
    return replace(
        observation, noise_std=0.0, residuals=ResidualPath(replace(path.start, mean=mean, factor=factor))
    )


def test_known_noise_is_no_reason_for_warnings() -> None:
    update, head = HeadUpdate(np.ones((3, 2)), np.ones(3)), Head(np.ones((3, 2)), np.ones(3))
    u = np.array([0.9, 0.3, -0.4])
    assert [note.code for note in check_update(u, update, head)[1]] == ["update-unbalanced"]
    assert not check_update(u, update, head, noise=0.2)[1]
    assert check_update(u, update, head, noise=0.02)[1]
    assert not check_update(np.array([1.3, -0.8, -0.5]), update, head, noise=0.1)[1]


def test_misfit_expects_known_noise() -> None:
    observation = known_round(np.array([8, 4, 2, 1, 1, 0]), random_head(N, L, scale=0.1))
    update = observation.update
    rng = np.random.default_rng(0)
    assert update.bias is not None
    scale = 0.1  # the learning rate
    noisy = HeadUpdate(
        update.weight + scale * rng.normal(size=(N, L)), update.bias + scale * rng.normal(size=N)
    )
    found = [misfit(noisy, observation.training, observation.start, None, 0.0, noise) for noise in (0.0, 1.0)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] > 2 > found[1]


def test_simulated_clients_have_the_noise_of_real_ones() -> None:
    head = random_head(N, L, scale=0.2)
    aux = samples(0, head)
    along = np.full(L, 1 / L)
    noise = FeatureNoise(SIGMA, head.weight, along)
    assert head.bias is not None
    features = []
    for known in (FeatureNoise(0.0, head.weight, along), noise):
        made = ClientSimulator(aux, head.bias, 20, seed=3, noise=known).draw(4000)
        features.append(made.features.double())
    rng = np.random.default_rng(1)
    draws = [
        update_features(Head(SIGMA * rng.normal(size=(N, L)), SIGMA * rng.normal(size=N)), head, noise)
        for _ in range(4000)
    ]
    added = torch.cov(features[1].T) - torch.cov(features[0].T)
    expected = np.cov(np.array(draws).T)
    assert np.linalg.norm(np.diag(added.numpy()) - np.diag(expected)) < 0.2 * np.linalg.norm(
        np.diag(expected)
    )


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.3])
def test_noise_that_nobody_told_of_shows_in_the_columns(sigma: float) -> None:
    for seed in range(5):
        observation, _ = noisy_round(seed, sigma)
        found = unexplained_noise(observation)
        assert sigma / 2 < found < 2 * sigma  # 29 degrees of freedom, and powers of the root of 2
        assert (2 * np.log2(found)) % 1 == pytest.approx(0.0, abs=1e-9)
        without, _ = noisy_round(seed, 0.0)
        assert unexplained_noise(without) == 0.0


def test_noise_shows_whatever_the_rate_is_taken_for() -> None:
    for seed in range(5):
        observation, _ = noisy_round(seed, 0.05)
        found = unexplained_noise(observation)
        for rate in (0.1, 1.0, 10.0):
            told = replace(observation, training=replace(observation.training, lr=rate))
            assert unexplained_noise(told, least_scale=least_scale(told)) == found
        without, _ = noisy_round(seed, 0.0)
        assert unexplained_noise(without, least_scale=least_scale(without)) == 0.0


def test_decay_of_an_unknown_rate_is_no_noise() -> None:
    training = LocalTraining(10, 32, 0.01, momentum=0.9, weight_decay=0.1)
    observation, _ = scripted_observation(training, classes=N, size=L)
    told = replace(observation, training=replace(training, lr=1.0))
    assert unexplained_noise(told) > 0.0
    assert unexplained_noise(told, least_scale=least_scale(told)) == 0.0


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(10, 32, 0.01, momentum=0.9, weight_decay=0.1),
        LocalTraining(10, 32, 0.01, scheme="fedprox", prox=1.0),
        LocalTraining(1, 32, 0.01),
    ],
)
def test_decay_pulls_and_rounding_are_no_noise(training: LocalTraining) -> None:
    observation, _ = scripted_observation(training, classes=N, size=L)
    assert unexplained_noise(observation) == 0.0
    rounded = np.float32(observation.head.weight + observation.update.weight) - np.float32(
        observation.head.weight
    )
    stored = replace(observation, update=HeadUpdate(rounded.astype(np.float64), observation.update.bias))
    assert unexplained_noise(stored) == 0.0


def test_seen_noise_widens_bounds_but_excuses_nothing() -> None:
    observation, _ = noisy_round(3, SIGMA)
    told = replace(observation, noise_std=SIGMA)
    seen = replace(told, noise_told=False)
    ignored = replace(observation, noise_std=0.0)
    by = {
        name: recover_labels(o, method="gls")
        for name, o in (("told", told), ("seen", seen), ("ignored", ignored))
    }
    assert by["seen"].estimate.tolist() == by["told"].estimate.tolist()
    codes = {name: {note.code for note in found.warnings} for name, found in by.items()}
    assert "update-unbalanced" in codes["seen"] and "update-unbalanced" in codes["ignored"]
    assert "update-unbalanced" not in codes["told"]
