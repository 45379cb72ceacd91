"""Sizes of updates beside replayed ones that point alike: left-out errors, factors, and what is warned of."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from core_cases import model_means, random_head
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core.client_views import WEIGHT_FEATURES, ClientView, Replays, class_features
from rlu_cli.core.replayed_size import RelativeSize, SizeModel, size_notes
from rlu_cli.core.types import FloatArray, Head

N, R, F = 4, 60, 13


def replays(seed: int = 0, *, noise: float = 0.02, clients: int = R) -> Replays:
    """Clients whose size follows from where they point, but for noise."""
    rng = np.random.default_rng(seed)
    z = rng.dirichlet(np.ones(N), size=clients)
    x = (z - 1 / N) @ np.random.default_rng(99).normal(size=(N, N * 10))
    d = x / np.linalg.norm(x, axis=1, keepdims=True)
    sizes = d @ np.full(N * 10, 0.3) + noise * rng.normal(size=clients)
    features = rng.normal(size=(clients, N, F))
    features[:, :, WEIGHT_FEATURES] = (np.exp(sizes)[:, None] * d).reshape(clients, N, 10)
    return Replays(z, features, np.column_stack((sizes, np.zeros(clients))))


def test_left_out_errors_are_those_of_fits_without_the_client() -> None:
    """The inverse's short cut against fits to all others with the same constants."""
    known = replays(noise=0.1, clients=20)
    model = SizeModel(known)
    kernel = np.exp(-_distances(model._known) / model._reach)
    sizes, errors = known.shapes[:, 0] - model._offset, []
    for b in range(20):
        others = np.arange(20) != b
        best = [_fit(kernel, sizes, others, b, ridge) for ridge in (1e-3, 1e-2, 1e-1, 1.0)]
        errors.append(sizes[b] - np.array(best))
    deviations = np.sqrt(np.mean(np.square(errors), axis=0))
    assert model._deviation == pytest.approx(deviations.min(), rel=1e-6)


def _distances(x: FloatArray) -> FloatArray:
    return np.asarray(np.square(x[:, None] - x[None]).sum(axis=2))


def _fit(kernel: FloatArray, sizes: FloatArray, others: FloatArray, b: int, ridge: float) -> float:
    inner = kernel[np.ix_(others, others)] + ridge * np.eye(int(others.sum()))
    return float(kernel[b, others] @ np.linalg.solve(inner, sizes[others]))


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_the_factor_is_found(factor: float) -> None:
    model, new = SizeModel(replays()), replays(1)
    found = [
        model(factor * features, size + math.log(factor))
        for features, (size, _) in zip(new.features, new.shapes, strict=True)
    ]
    logarithms = np.array([one.logarithm for one in found])
    assert abs(np.median(logarithms) - math.log(factor)) < 0.1
    assert np.mean([one.is_right for one in found]) == (1.0 if factor == 1.0 else 0.0)
    assert np.std(logarithms) < 3 * found[0].deviation


def test_nothing_is_said_where_none_points_alike() -> None:
    new = replays(5, clients=1)
    assert MODEL(new.features[0], 0.5) is not None
    turned = new.features[0].copy()
    turned[:, WEIGHT_FEATURES] = np.random.default_rng(1).normal(size=turned[:, WEIGHT_FEATURES].shape)
    assert MODEL(turned, 0.5) is None


@given(st.floats(1e-6, 1e6))
def test_only_the_direction_counts(factor: float) -> None:
    model, new = MODEL, replays(2, clients=1)
    plain, scaled = model(new.features[0], 0.5), model(factor * new.features[0], 0.5)
    assert scaled.logarithm == pytest.approx(plain.logarithm, abs=1e-6)


MODEL = SizeModel(replays())


@pytest.mark.parametrize(
    ("logarithm", "deviation", "right"),
    [(0.24, 0.01, True), (-0.26, 0.01, False), (-0.9, 0.2, True), (-1.1, 0.2, False), (1.1, 0.2, False)],
)
def test_what_is_too_small_or_too_large(logarithm: float, deviation: float, right: bool) -> None:
    notes = size_notes(RelativeSize(logarithm, deviation))
    assert [note.code for note in notes] == ([] if right else ["update-misscaled"])
    if not right:
        assert f"{math.exp(logarithm):.2g} times as large" in notes[0].message
        assert "--clip" in notes[0].message


@pytest.mark.parametrize(("logarithm", "right"), [(-0.84, True), (0.84, True), (-0.86, False), (0.86, False)])
def test_coarse_updates_may_be_further_off(logarithm: float, right: bool) -> None:
    """Right clients' of six bits, which may lose a tenth, seemed to be 0.6 to 0.75 times as large."""
    found = RelativeSize(logarithm, 0.05, damage=0.1)
    assert found.is_right is right
    if not right:
        edges = (math.exp(logarithm + side * (1.96 * 0.05 + 0.6)) for side in (-1, 1))
        assert "(95 %: {:.2g} to {:.2g})".format(*edges) in size_notes(found)[0].message


def test_directions_are_of_the_weight_alone() -> None:
    """Those columns that are c times as large for a weight update c times as large, and no others are."""
    rng = np.random.default_rng(0)
    gradient, head = random_head(rng, N, 6), random_head(rng, N, 6)
    means = model_means(rng.normal(size=(N, N)))
    view = ClientView(gradient, means, model_means(rng.normal(size=(N, N))), 0.1)
    doubled = replace(view, gradient=Head(2 * gradient.weight, gradient.bias))
    embeddings, guesses = rng.normal(size=(N, 6)), rng.dirichlet(np.ones(N), size=2).T
    plain, large = (class_features(one, head, embeddings, guesses) for one in (view, doubled))
    weight = np.zeros(plain.shape[1], dtype=bool)
    weight[WEIGHT_FEATURES] = True
    np.testing.assert_allclose(large[:, weight], 2 * plain[:, weight])
    np.testing.assert_array_equal(large[:, ~weight], plain[:, ~weight])


def test_clients_that_are_all_alike_are_no_obstacle() -> None:
    one = replays(3, clients=1)
    same = Replays(*(np.repeat(part, 20, axis=0) for part in (one.proportions, one.features, one.shapes)))
    found = SizeModel(same)(one.features[0], float(one.shapes[0, 0]))
    assert found.is_right
    assert not SizeModel(same)(one.features[0], float(one.shapes[0, 0]) - 1).is_right
