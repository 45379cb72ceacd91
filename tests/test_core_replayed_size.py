"""Sizes of updates beside replayed ones that point alike: left-out errors, factors, and what is warned of."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from core_cases import model_means, random_head
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from rlu_cli.core.client_views import WEIGHT_FEATURES, ClientView, Replays, class_features
from rlu_cli.core.kernel_regression import squared_distances
from rlu_cli.core.replayed_size import RelativeSize, SizeModel, repeats, signal_size, size_notes
from rlu_cli.core.types import FloatArray, Head, IntArray
from rlu_cli.core.update_shape import update_shape

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


@pytest.mark.parametrize("halves", [None, np.arange(20) % 2])
def test_left_out_clients_are_likeliest_under_what_is_chosen(halves: IntArray | None) -> None:
    """The inverse's short cut against Gaussian processes of all others, and the chosen one's prediction."""
    known = replace(replays(noise=0.1, clients=20), halves=halves)
    alone = np.arange(20) if halves is None else halves
    model = SizeModel(known)
    directions = known.features[:, :, WEIGHT_FEATURES].reshape(20, -1)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    distances = squared_distances(*[(directions - directions.mean(axis=0)) / directions.std(axis=0)] * 2)
    sizes = known.shapes[:, 0] - known.shapes[:, 0].mean()
    found = {}
    for width, ridge in product((0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (1e-3, 1e-2, 1e-1, 1.0)):
        kernel = np.exp(-distances / (2 * width**2 * distances.mean()))
        errors, variances = np.transpose([_left_out(kernel, sizes, b, ridge, alone) for b in range(20)])
        scale = np.mean(errors**2 / variances)
        found[norm.logpdf(errors, scale=np.sqrt(scale * variances)).sum()] = (width, ridge, scale)
    width, ridge, scale = found[max(found)]
    assert model._reach == pytest.approx(2 * width**2 * distances.mean())
    new = replays(7, clients=1)
    direction = new.features[:, :, WEIGHT_FEATURES].reshape(1, -1)
    direction /= np.linalg.norm(direction)
    place = np.concatenate((directions, direction))
    place = (place - directions.mean(axis=0)) / directions.std(axis=0)
    kernel = np.exp(-squared_distances(place, place) / model._reach)
    error, variance = _left_out(kernel, np.append(sizes, 0.25), 20, ridge, np.append(alone, 99))
    said = model(new.features[0], known.shapes[:, 0].mean() + 0.25)
    assert said.logarithm == pytest.approx(error, rel=1e-6)
    assert said.deviation == pytest.approx(math.sqrt(scale * variance), rel=1e-6)


def _left_out(
    kernel: FloatArray, sizes: FloatArray, b: int, ridge: float, groups: IntArray
) -> tuple[float, float]:
    """Error at client b, and its variance, of a Gaussian process given those of other groups."""
    others = groups != groups[b]
    inner = kernel[np.ix_(others, others)] + ridge * np.eye(int(others.sum()))
    gain = np.linalg.solve(inner, kernel[others, b])
    return float(sizes[b] - gain @ sizes[others]), float(1 + ridge - gain @ kernel[others, b])


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
    deviations = np.array([one.deviation for one in found])
    assert np.mean(((logarithms - math.log(factor)) / deviations) ** 2) == pytest.approx(1.0, abs=0.6)


def test_clients_whose_labels_are_as_the_model_guesses_are_right_too() -> None:
    """What is left of their gradients is chance, which is small and points like no replayed client's."""
    rng = np.random.default_rng(6)
    directions, typical = rng.normal(size=(N, N * 10)), []

    def drawn(z: FloatArray) -> Replays:
        x = (z - 1 / N) @ directions + 0.05 * rng.normal(size=(len(z), N * 10))
        features = np.zeros((len(z), N, F))
        features[:, :, WEIGHT_FEATURES] = x.reshape(len(z), N, 10)
        sizes = 0.5 * np.log(np.mean(x**2, axis=1))
        return Replays(z, features, np.column_stack((sizes, np.zeros(len(z)))))

    model = SizeModel(drawn(rng.dirichlet(np.ones(N), size=60)))
    like, unlike = drawn(rng.dirichlet(np.ones(N), size=20)), drawn(np.full((20, N), 1 / N))
    for clients in (like, unlike):
        found = [model(f, size) for f, (size, _) in zip(clients.features, clients.shapes, strict=True)]
        typical.append(np.median([one.deviation for one in found]))
        assert all(one.is_right for one in found)
    assert typical[1] > 3 * typical[0]


@given(st.floats(1e-6, 1e6))
def test_only_the_direction_counts(factor: float) -> None:
    model, new = MODEL, replays(2, clients=1)
    plain, scaled = model(new.features[0], 0.5), model(factor * new.features[0], 0.5)
    assert scaled.logarithm == pytest.approx(plain.logarithm, abs=1e-6)


MODEL = SizeModel(replays())


@pytest.mark.parametrize(
    ("logarithm", "deviation", "found"),
    [
        (0.14, 0.01, "right"),
        (0.16, 0.01, "doubted"),
        (-0.19, 0.01, "doubted"),
        (-0.21, 0.01, "wrong"),
        (-0.59, 0.2, "right"),
        (-0.7, 0.2, "doubted"),
        (-0.9, 0.2, "wrong"),
        (0.9, 0.2, "wrong"),
    ],
)
def test_what_is_too_small_or_too_large(logarithm: float, deviation: float, found: str) -> None:
    size = RelativeSize(logarithm, deviation)
    assert (size.is_doubted, size.is_right) == (found != "right", found != "wrong")
    for read in (False, True):
        codes = [note.code for note in size_notes(size, read=read)]
        doubted = ["size-doubted"] if read else []
        assert codes == {"right": [], "doubted": doubted, "wrong": ["update-misscaled"]}[found]
    if found == "wrong":
        for read, then in (
            (False, "there are no bounds"),
            (True, "it is read as if it had been divided by that"),
        ):
            message = size_notes(size, read=read)[0].message
            assert f"is {math.exp(logarithm):.2g} times as large" in message and message.endswith(then)
            assert "--clip is for the whole update's norm, not for each step's gradient" in message


def test_the_error_of_a_size_that_may_be_right_reaches_it() -> None:
    assert RelativeSize(-0.9, 0.2).error == pytest.approx(0.2)
    assert RelativeSize(-0.9, 0.1, damage=0.02).error == pytest.approx(math.hypot(0.1, 0.02))
    assert RelativeSize(-0.7, 0.2).error == pytest.approx(0.35)


@pytest.mark.parametrize(("logarithm", "right"), [(-0.79, True), (0.79, True), (-0.81, False), (0.81, False)])
def test_coarse_updates_may_be_further_off(logarithm: float, right: bool) -> None:
    """Right clients' of six bits, which may lose a tenth, seemed to be 0.6 to 0.75 times as large."""
    found = RelativeSize(logarithm, 0.05, damage=0.1)
    assert found.is_right is right
    assert not RelativeSize(0.54, 0.05, damage=0.1).is_doubted
    assert RelativeSize(0.56, 0.05, damage=0.1).is_doubted


@pytest.mark.parametrize(("logarithm", "right"), [(-0.54, True), (-0.56, False), (0.19, True), (0.21, False)])
def test_updates_may_be_smaller_whose_samples_outnumber_the_auxiliary_ones(
    logarithm: float, right: bool
) -> None:
    """62 classes of 10 images and clients of 1,280 seemed to be a third as large as replays (0.2 at four
    standard deviations): chance is less in them."""
    assert repeats(100, 100) == repeats(10, 100) == 0.0
    more = repeats(201, 100)
    assert more == pytest.approx(0.35, abs=0.01)
    found = RelativeSize(logarithm, 0.05, repeats=more)
    assert found.is_right is right
    assert found.factor == pytest.approx(math.exp(logarithm + more / 2))


def test_the_interval_that_is_told_is_that_of_the_bounds() -> None:
    found = RelativeSize(-1.0, 0.06, damage=0.03, repeats=0.1)
    half = 2 * math.sqrt(0.06**2 + 0.03**2 + 0.025**2)
    expected = f"is {math.exp(-0.95):.2g} times as large"
    (note,) = size_notes(found, read=True)
    assert expected in note.message
    assert f"(95 %: {math.exp(-0.95 - half):.2g} to {math.exp(-0.95 + half):.2g})" in note.message


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


def test_noise_is_no_part_of_a_size() -> None:
    """A third of an update under noise as large as itself seemed to be more than half of it."""
    rng = np.random.default_rng(4)
    whole = rng.normal(size=(10, 84))
    whole -= whole.mean(axis=0)
    size, error = signal_size(whole)
    assert size == pytest.approx(update_shape(whole)[0]) and error < 1e-12
    for factor, noise in ((1.0, 1.0), (0.3, 0.3), (1e-200, 1e-200), (1e200, 1e200)):
        found = [signal_size(factor * whole + noise * rng.normal(size=whole.shape)) for _ in range(200)]
        logarithms, errors = np.transpose(found)
        assert np.mean(logarithms) == pytest.approx(math.log(factor) + size, abs=0.03)
        assert np.std(logarithms) < 1.5 * np.mean(errors) < 0.2
    assert signal_size(1e-9 * whole + rng.normal(size=whole.shape))[0] < math.log(0.6)
    hidden = signal_size(1e-9 * whole + rng.normal(size=whole.shape))
    assert hidden[1] == math.inf or hidden[1] > 0.1
    flat = np.tile(rng.normal(size=84), (10, 1))  # noise and nothing else, as far as the columns tell
    assert signal_size(flat)[1] == math.inf
    assert not RelativeSize(-9.0, math.inf).is_doubted
    assert math.isfinite(signal_size(np.zeros((3, 4)))[0])
