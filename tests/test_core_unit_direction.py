"""What stands for the bias of a head without one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import scripted_observation
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core import unit_direction as module
from rlu_cli.core.gradients import mean_gradient, normalised_update
from rlu_cli.core.types import FloatArray, LocalTraining
from rlu_cli.core.unit_direction import UnitDirection, stands_for_bias, unit_direction


def embeddings(seed: int, M: int, L: int, *, spread: float = 0.3) -> FloatArray:
    """Of samples whose lengths along one direction differ little, and along the others much."""
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.normal(size=(L, L)))[0]
    E = rng.normal(size=(M, L))
    E[:, 0] = 2.0 + spread * rng.normal(size=M)
    return np.asarray(E @ turned)


def found_direction(E: FloatArray) -> UnitDirection:
    found = unit_direction(E)
    assert found is not None
    return found


def literal(E: FloatArray, ridge: float) -> float:
    """The leave-one-out error, each sample left out in turn."""
    errors = []
    for i in range(len(E)):
        rest = np.delete(E, i, axis=0)
        v = np.linalg.solve(rest.T @ rest + ridge * np.eye(E.shape[1]), rest.sum(axis=0))
        errors.append(E[i] @ v - 1.0)
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize(("M", "L"), [(40, 6), (12, 30)], ids=["tall", "wide"])
def test_error_is_the_least_of_those_left_out(M: int, L: int) -> None:
    E = embeddings(0, M, L)
    largest = np.linalg.eigvalsh(E.T @ E)[-1]
    errors = {ridge: literal(E, ridge) for ridge in module._RIDGES[8:] * largest}  # solvable literally
    found = found_direction(E)
    assert found.error == pytest.approx(min(errors.values()), rel=1e-3)
    best = min(errors, key=lambda ridge: errors[ridge])
    expected = np.linalg.solve(E.T @ E + best * np.eye(L), E.sum(axis=0))
    np.testing.assert_allclose(found.direction, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("M", "L"), [(50, 8), (8, 50)])
def test_a_length_that_all_share_is_found(M: int, L: int) -> None:
    rng = np.random.default_rng(1)
    E = rng.normal(size=(M, L))
    E[:, -1] = 1.0 - E[:, :-1].sum(axis=1) if M > L else 1.0  # 1 along (1, …, 1), or the last axis
    found = found_direction(E)
    np.testing.assert_allclose(E @ found.direction, 1.0, atol=1e-4 if M > L else 0.5)
    if M > L:
        assert found.error < 1e-4


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_units_dont_matter(seed: int, scale: float) -> None:
    E = embeddings(seed, 30, 5)
    plain, scaled = found_direction(E), found_direction(scale * E)
    assert scaled.error == pytest.approx(plain.error, rel=1e-6)
    np.testing.assert_allclose(scale * scaled.direction, plain.direction, rtol=1e-5, atol=1e-8)


def test_the_error_is_that_of_new_samples() -> None:
    everything = embeddings(2, 4000, 10, spread=0.2)
    found = found_direction(everything[:100])
    fresh = np.sqrt(np.mean(np.square(everything[100:] @ found.direction - 1.0)))
    assert found.error == pytest.approx(fresh, rel=0.15)


def test_many_samples_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    E = embeddings(3, 1001, 5)
    monkeypatch.setattr(module, "_ROWS", 100)
    thinned = found_direction(E)
    monkeypatch.undo()
    np.testing.assert_array_equal(thinned.direction, found_direction(E[::11]).direction)


def test_embeddings_without_such_a_direction_stand_for_nothing() -> None:
    observation, _ = scripted_observation(LocalTraining(1, 32, 0.1), bias=False)
    centred = np.random.default_rng(4).normal(size=(200, 6))
    for E, stands in ((centred, False), (embeddings(4, 200, 6, spread=0.05), True)):
        start = replace(observation.start, unit=found_direction(E))
        assert stands_for_bias(observation.head, start, 0.0) == stands
        assert not stands_for_bias(observation.head, start, 1e-6)
    assert not stands_for_bias(observation.head, replace(observation.start, unit=None), 0.0)
    with_bias, _ = scripted_observation(LocalTraining(1, 32, 0.1), bias=True)
    assert stands_for_bias(with_bias.head, with_bias.start, 1.0)


@pytest.mark.parametrize("steps", [1, 10])
def test_the_update_is_read_along_it(steps: int) -> None:
    """Not along the mean embedding, unless the update has noise."""
    observation, _ = scripted_observation(LocalTraining(steps, 32, 0.1), bias=False)
    L = observation.head.embedding_size
    v = np.random.default_rng(5).normal(size=L)
    known = replace(observation, start=replace(observation.start, unit=UnitDirection(v, 0.02)))
    expected = observation.update.weight @ v / (0.1 * steps)
    np.testing.assert_allclose(normalised_update(known), expected, rtol=1e-12)
    gradient = mean_gradient(known)
    assert gradient.bias is not None
    np.testing.assert_allclose(gradient.bias, -expected, rtol=1e-12)
    plain = normalised_update(observation)
    np.testing.assert_array_equal(normalised_update(replace(known, noise_std=1e-9)), plain)
    assert not np.allclose(plain, expected)


@pytest.mark.parametrize(("M", "L"), [(40, 6), (12, 30)], ids=["tall", "wide"])
def test_dead_embeddings_have_no_such_direction(M: int, L: int) -> None:
    assert unit_direction(np.zeros((M, L))) is None
    one = np.zeros((M, L))
    one[0, 0] = 2.0  # a single sample that isn't dead says nothing of the others
    assert found_direction(one).error == pytest.approx(1.0)
