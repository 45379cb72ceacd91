"""Features by class: the same function of every class, and finite."""

from __future__ import annotations

import numpy as np
import pytest
from core_cases import model_means
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.core.client_views import ClientView, ModelMeans, class_features
from rlu_cli.core.types import FloatArray, Head, LocalTraining


def view_of(rng: np.random.Generator, N: int, L: int, sharp: float) -> tuple[ClientView, Head, FloatArray]:
    def means() -> ModelMeans:
        logits = sharp * rng.normal(size=(N, N))
        return model_means(logits)

    def head() -> Head:
        return Head(rng.normal(size=(N, L)), rng.normal(size=N))

    return ClientView(head(), means(), means(), 0.1), head(), rng.normal(size=(N, L))


def permuted(client: ClientView, order: list[int]) -> ClientView:
    def means(of: ModelMeans) -> ModelMeans:
        return model_means(of.logits[order][:, order])

    assert client.gradient.bias is not None
    gradient = Head(client.gradient.weight[order], client.gradient.bias[order])
    return ClientView(gradient, means(client.start), means(client.end), client.pace)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.permutations(range(5)))
def test_other_names_for_classes_change_nothing(seed: int, order: list[int]) -> None:
    client, head, means = view_of(np.random.default_rng(seed), 5, 7, sharp=2.0)
    assert head.bias is not None
    renamed = Head(head.weight[order], head.bias[order])
    guesses = np.random.default_rng(seed).dirichlet(np.ones(5), 2).T
    expected = class_features(client, head, means, guesses)[order]
    found = class_features(permuted(client, order), renamed, means[order], guesses[order])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("sharp", [0.0, 1.0, 1e3])
def test_sure_models_have_finite_features(sharp: float) -> None:
    client, head, means = view_of(np.random.default_rng(0), 3, 4, sharp)
    assert np.isfinite(class_features(client, head, means, np.eye(3, 1))).all()


def test_what_moved_is_where_it_is_expected() -> None:
    """One class's logit rises by 2 on its own samples, and by 1 on all others'."""
    N = 4
    moved = np.ones((N, N)) * np.array([0.0, 1.0, 0.0, 0.0])
    moved[1, 1] = 2.0
    before = model_means(np.zeros((N, N)))
    after = model_means(moved)
    client = ClientView(Head(np.zeros((N, 2)), np.zeros(N)), before, after, 0.5)
    features = class_features(client, Head(np.zeros((N, 2)), np.zeros(N)), np.ones((N, 2)), np.empty((N, 0)))
    own, others = features[:, 6], features[:, 8]
    np.testing.assert_allclose(own, [0, 2, 0, 0])
    np.testing.assert_allclose(others, [0, 1, 0, 0])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 700), st.integers(1, 64), st.integers(1, 700))
def test_training_over_other_numbers_of_samples(epochs: int, size: int, batch: int, other: int) -> None:
    steps = epochs * -(-size // batch)
    training = LocalTraining(steps, batch, 0.1, total=epochs * size, distinct=size)
    assert training.epochs == epochs
    assert training.seen == size
    again = training.resized(other)
    assert (again.epochs, again.seen, again.samples) == (epochs, other, epochs * other)
    assert again.resized(size) == training


@pytest.mark.parametrize(
    ("training", "seen"),
    [
        (LocalTraining(10, 32, 0.1), 320),
        (LocalTraining(10, 32, 0.1, distinct=500), 320),
        (LocalTraining(10, 32, 0.1, distinct=100), 100),
        (LocalTraining(6, 32, 0.1, total=192, distinct=100), 100),
    ],
)
def test_training_counted_in_steps_stays_as_it_is(training: LocalTraining, seen: int) -> None:
    assert training.epochs is None
    assert training.seen == seen
    assert training.resized(50) is training


def test_rates_by_step_are_of_one_size() -> None:
    training = LocalTraining(2, 32, (0.1, 0.05), total=64, distinct=32)
    assert training.epochs == 2
    assert training.resized(50) is training
