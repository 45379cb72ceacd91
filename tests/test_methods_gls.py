"""Generalised least squares: its error model against literal sums and draws, its answers on real training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import exact_residuals, random_confidence, scripted_observation
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.core.error_model import ResidualModel, fit, solutions_of_like_updates
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.reliability import reliability
from rlu_cli.core.residuals import ResidualMoments, ResidualPath, residual_moments, residuals
from rlu_cli.core.schemes import impulse_response
from rlu_cli.core.types import FloatArray, HeadUpdate, IntArray, LocalTraining, Observation
from rlu_cli.core.unit_direction import UnitDirection
from rlu_cli.errors import MismatchError

N = 6


def samples(seed: int, each: int = 40, spread: float = 1.5) -> tuple[FloatArray, IntArray]:
    """Logits of every class about means of its own, with labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(N), each)
    logits = (
        2.0 * np.eye(N)[labels] + rng.normal(size=(N, N))[labels] + spread * rng.normal(size=(N * each, N))
    )
    return logits, labels


def exact_moments(seed: int) -> ResidualMoments:
    """Residuals that don't vary within a class."""
    return exact_residuals(np.eye(N) - random_confidence(np.random.default_rng(seed), N))


def test_residuals_are_the_gradient_of_cross_entropy() -> None:
    import torch

    logits, labels = samples(0)
    q = torch.from_numpy(logits).requires_grad_(True)
    torch.nn.functional.cross_entropy(q, torch.from_numpy(labels), reduction="sum").backward()
    assert q.grad is not None
    np.testing.assert_allclose(residuals(logits, labels), -q.grad.numpy(), atol=1e-12)


def test_moments_are_means_and_covariances_by_class() -> None:
    values = residuals(*samples(1))
    labels = samples(1)[1]
    found = residual_moments(values, labels)
    for n in range(N):
        rows = values[labels == n]
        np.testing.assert_allclose(found.mean[n], rows.mean(axis=0), atol=1e-12)
        np.testing.assert_allclose(found.covariance()[n], np.cov(rows.T), atol=1e-12)


def test_covariance_is_the_literal_sum() -> None:
    training = LocalTraining(5, 8, 0.1, momentum=0.9)
    values, labels = residuals(*samples(2)), samples(2)[1]
    model = ResidualModel([(1.0, residual_moments(values, labels))], training)
    z = np.random.default_rng(3).dirichlet(np.ones(N))
    rho = impulse_response(training)
    share = rho / rho.sum()
    C = [np.cov(values[labels == n].T)[:-1, :-1] for n in range(N)]
    weight = [z[n] * np.sum(share**2) / 8 + z[n] ** 2 / 40 for n in range(N)]
    expected = 0.9 * sum(w * c for w, c in zip(weight, C, strict=True)) + 0.1 * np.mean(weight) * sum(C)
    M = model.mean
    expected += np.sum((share - 0.2) ** 2) / 8 * M @ (np.diag(z) - np.outer(z, z)) @ M.T
    expected += 1e-3 * np.trace(expected) / (N - 1) * np.eye(N - 1)
    np.testing.assert_allclose(model.covariance(z), expected, rtol=1e-10)


def test_no_bounds_beyond_the_steps_that_they_were_checked_for() -> None:
    for steps in (1, 10, 20, 21, 100):
        observation, truth = scripted_observation(LocalTraining(steps, 16, 0.01))
        found = recover_labels(observation, method="gls")
        bounds = (found.low, found.high, found.presence)
        assert [part is not None for part in bounds] == [steps <= 20] * 3
        assert found.counts.sum() == truth.sum()


def test_two_ends_leave_the_place_between_them_uncertain() -> None:
    training, z = LocalTraining(10, 8, 0.1), np.full(N, 1 / N)
    first, second = exact_moments(4), exact_moments(5)
    two = ResidualModel([(0.4, first), (0.6, second)], training)
    way = (second.mean - first.mean).T[:-1] @ z
    found = two.covariance(z)
    floor = found[0, 0] - 0.01 * way[0] ** 2
    np.testing.assert_allclose(found, 0.01 * np.outer(way, way) + floor * np.eye(N - 1), atol=1e-15)


def test_unequal_steps_see_unequal_mixes() -> None:
    """The term v M (diag z − z zᵀ) Mᵀ against decks of known counts, shuffled and dealt to the steps."""
    training = LocalTraining(4, 10, 0.1, momentum=0.9)
    moments = exact_moments(6)
    counts = np.array([20, 12, 5, 3, 0, 0])
    rho = impulse_response(training)
    share = np.repeat(rho / rho.sum(), 10) / 10
    rng = np.random.default_rng(7)
    deck = moments.mean[np.repeat(np.arange(N), counts)][:, :-1]
    drawn = np.stack([share @ deck[rng.permutation(40)] for _ in range(40_000)])
    # a deck is dealt without replacement: its covariance is 40/39 of the formula's
    expected = 40 / 39 * ResidualModel([(1.0, moments)], training).covariance(counts / 40)
    assert np.linalg.norm(np.cov(drawn.T) - expected) < 0.03 * np.linalg.norm(expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_exact_updates_are_solved_exactly(seed: int) -> None:
    z = np.random.default_rng(seed).dirichlet(np.full(N, 0.5))
    model = ResidualModel([(1.0, exact_moments(seed))], LocalTraining(1, 32, 0.1))
    found = fit(model, model.mean @ z)
    np.testing.assert_allclose(found.solution.z, z, atol=1e-6)
    assert np.max(np.abs(solutions_of_like_updates(found, seed=0) - z)) < 1e-3


def clients(
    seed: int, count: int
) -> tuple[ResidualMoments, LocalTraining, list[tuple[IntArray, FloatArray]]]:
    """Aux moments, and the counts and updates of clients whose samples are others of the same kind."""
    rng = np.random.default_rng(seed)
    logits, labels = samples(seed, each=400)
    chosen = np.concatenate([np.flatnonzero(labels == n)[:60] for n in range(N)])
    values, total = residuals(logits, labels), 64
    found = []
    for _ in range(count):
        counts = rng.multinomial(total, rng.dirichlet(np.ones(N)))
        rows = [rng.choice(np.flatnonzero(labels == n)[60:], counts[n], replace=False) for n in range(N)]
        found.append((counts, values[np.concatenate(rows)].mean(axis=0)[:-1]))
    return residual_moments(values[chosen], labels[chosen]), LocalTraining(1, total, 0.1), found


def test_intervals_cover_what_they_promise() -> None:
    """95 % bounds over several auxiliary sets; 60 clients × 6 classes, clients share their aux set."""
    inside, widths = [], []
    for seed in range(20):
        moments, training, found = clients(seed, 3)
        model = ResidualModel([(1.0, moments)], training)
        for counts, u in found:
            draws = 64 * solutions_of_like_updates(fit(model, u), seed=seed)
            low, high = np.rint(np.quantile(draws, [0.025, 0.975], axis=0))
            inside.append((low <= counts) & (counts <= high))
            widths.append(high - low)
    assert 0.92 <= np.mean(inside) <= 0.99
    assert np.mean(widths) < 25  # of 64: bounds that say something


def test_weights_beat_plain_least_squares_where_classes_differ_in_spread() -> None:
    from rlu_cli.core.simplex import simplex_least_squares

    weighed, plain = [], []
    for seed in range(15):
        moments, training, found = clients(seed, 15)
        model = ResidualModel([(1.0, moments)], training)
        for counts, u in found:
            weighed.append(np.abs(fit(model, u).solution.z - counts / 64).sum())
            full = np.append(u, -u.sum())
            plain.append(np.abs(simplex_least_squares(moments.mean.T, full).z - counts / 64).sum())
    assert np.mean(weighed) < np.mean(plain)


def test_an_update_out_of_reach_widens_the_bounds() -> None:
    moments, training, found = clients(3, 1)
    model = ResidualModel([(1.0, moments)], training)
    near = fit(model, found[0][1])
    far = replace(near, chi_squared=100.0, freedom=3)
    spread = [np.std(solutions_of_like_updates(f, seed=0), axis=0).sum() for f in (near, far)]
    assert spread[1] > 1.5 * spread[0]


@pytest.mark.parametrize("steps", [1, 10])
def test_a_head_without_bias_is_solved_by_what_shows_along_its_direction(steps: int) -> None:
    """Classes whose embeddings are longer or shorter along it than 1, as after some training."""
    rng = np.random.default_rng(6)
    training = LocalTraining(steps, 32, 0.1)
    observation, counts = scripted_observation(training, bias=False)
    z, S, E = counts / counts.sum(), observation.start.confidence, rng.normal(size=(N, 8))
    lengths = rng.uniform(0.8, 1.2, N)
    v = np.linalg.lstsq(E, lengths, rcond=None)[0]
    statistics = replace(observation.start, embedding_mean=E, unit=UnitDirection(v, 0.1))
    rest = exact_residuals(np.eye(N) - S)
    seen = replace(
        observation,
        update=HeadUpdate(0.1 * steps * np.einsum("n,nj,nl->jl", z, np.eye(N) - S, E), None),
        start=statistics,
        end=statistics,
        residuals=ResidualPath(rest, rest),
    )
    found = recover_labels(seen, method="gls")
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.estimate, counts, atol=1e-3 * counts.sum())


def test_a_class_without_samples_is_refused() -> None:
    values, labels = residuals(*samples(8)), samples(8)[1]
    keep = labels != 2
    with pytest.raises(MismatchError, match="class index 2"):
        residual_moments(values[keep], labels[keep])


def test_observations_without_residuals_are_refused() -> None:
    observation, _ = scripted_observation(LocalTraining(3, 16, 0.05))
    with pytest.raises(MismatchError, match="which gls works on"):
        recover_labels(replace(observation, residuals=None), method="gls")


def swung(change: float) -> Observation:
    """A client of ten steps whose local model moved its predictions to and fro; ``change`` says how far."""
    observation, _ = scripted_observation(LocalTraining(10, 32, 0.01), classes=N)
    start = observation.start.confidence
    away = np.zeros((N, N))
    away[:, 0], away[:, 1] = change, -change
    path = observation.residuals
    assert path is not None
    ends = [exact_residuals(np.eye(N) - S) for S in (start, start + away)]
    return replace(
        observation,
        end=replace(observation.start, confidence=start + away),
        residuals=ResidualPath(*ends),
    )


@pytest.mark.parametrize("method", ["rlu", "gls"])
def test_predictions_that_swing_are_told_of_and_have_no_bounds(method: str) -> None:
    calm = recover_labels(swung(1e-3), method=method)
    assert calm.diagnostics["swing"] < 0.1
    assert "predictions-swing" not in {note.code for note in calm.warnings}
    assert (calm.low is None) == (method == "rlu")
    wild = swung(0.0)
    u = wild.update.bias / impulse_response(wild.training).sum()  # type: ignore[operator]
    change = 6 * float(np.linalg.norm(u)) / np.sqrt(2)
    found = recover_labels(swung(change), method=method)
    assert found.diagnostics["swing"] == pytest.approx(6.0)  # each row of S moved alike
    notes = {note.code: note.message for note in found.warnings}
    assert "6.0 times" in notes["predictions-swing"]
    assert found.low is None and found.high is None and found.presence is None
    assert reliability(found, list(notes)).grade == "poor"
