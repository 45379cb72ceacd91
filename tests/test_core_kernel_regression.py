"""Kernel ridge regression of proportions: against refits, scikit-learn, and known errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.kernel_ridge import KernelRidge

from rlu_cli.core.client_views import Replays
from rlu_cli.core.kernel_regression import (
    _LIKE,
    KernelRegression,
    _bordered,
    _of_present,
    _on_simplex,
    _with_product,
    left_out,
    squared_distances,
)
from rlu_cli.core.types import FloatArray

N = 4


def clients(count: int, *, noise: float, seed: int = 0, absent: float = 0.1) -> Replays:
    """Features from which the proportions follow, but for noise on their roots; the third is constant."""
    rng = np.random.default_rng(seed)
    z = rng.dirichlet(np.full(N, 0.7), count)
    z[:, 1:][rng.random((count, N - 1)) < absent] = 0.0
    z /= z.sum(axis=1, keepdims=True)
    root = np.sqrt(z) + noise * rng.normal(size=z.shape)
    features = np.stack((root, np.tanh(3 * root - 1), np.ones_like(z), rng.normal(size=z.shape)), axis=2)
    return Replays(z, features, np.zeros((len(z), 2)))


def some(replays: Replays, rows: slice) -> Replays:
    return Replays(replays.proportions[rows], replays.features[rows], replays.shapes[rows])


@pytest.mark.parametrize("halves", [None, [0, 1, 1, 0, 1]])
@pytest.mark.parametrize("ridge", [0.03, 1.0])
def test_errors_of_clients_left_out_are_those_of_refits(ridge: float, halves: list[int] | None) -> None:
    rng = np.random.default_rng(0)
    rows, targets = rng.normal(size=(5 * N, 3)), rng.normal(size=5 * N)
    kernel = np.exp(-0.1 * squared_distances(rows, rows))
    whole = KernelRidge(alpha=ridge, kernel="rbf", gamma=0.1).fit(rows, targets)
    inverse = np.linalg.inv(kernel + ridge * np.eye(5 * N))
    known = replace(clients(5, noise=0.1), halves=None if halves is None else np.array(halves))
    errors, variances = left_out(inverse, whole.dual_coef_, known.groups(N))
    together = np.repeat(np.arange(5) if halves is None else halves, N)
    for block in np.unique(together):
        out, others = np.flatnonzero(together == block), np.flatnonzero(together != block)
        again = KernelRidge(alpha=ridge, kernel="rbf", gamma=0.1).fit(rows[others], targets[others])
        np.testing.assert_allclose(errors[out], targets[out] - again.predict(rows[out]), atol=1e-10)
        inner = np.linalg.inv(kernel[np.ix_(others, others)] + ridge * np.eye(len(others)))
        across = kernel[np.ix_(out, others)]
        unknown = 1 + ridge - np.diag(across @ inner @ across.T)
        np.testing.assert_allclose(variances[out], unknown, atol=1e-10)
    few = known.groups(2, clients=3)
    assert np.array_equal(np.sort(np.concatenate(few)), np.arange(6))
    assert len(few) == (3 if halves is None else 2)


def test_what_is_peculiar_to_the_samples_makes_no_bounds() -> None:
    """Features off by as much for all who drew from the same samples: nothing tells, but halves."""
    rng = np.random.default_rng(1)

    def off(count: int, groups: int, seed: int) -> tuple[Replays, FloatArray]:
        found, group = clients(count, noise=0.01, seed=seed, absent=0.0), np.arange(count) % groups
        peculiar = 0.15 * rng.normal(size=(groups, N, 1))
        features = found.features[:, :, :2] + peculiar[group] * np.array([1.0, 0.7])
        mark = rng.normal(size=(count, N, 1))
        if groups == 2:  # the bank's tells which half it is
            mark = np.where(group == 0, 1.0, -1.0)[:, None, None] + 0.1 * mark
        return replace(found, features=np.concatenate((features, mark), axis=2)), group

    bank, group = off(200, 2, 0)
    others, _ = off(300, 300, 1)
    held = {}
    for name, halves in (("clients", None), ("halves", group)):
        model = KernelRegression(replace(bank, halves=halves), guesses=0)
        inside = [
            (z >= p.low - 1e-9) & (z <= p.high + 1e-9)
            for z, p in zip(others.proportions, map(model, others.features), strict=True)
        ]
        held[name] = float(np.mean(inside))
    assert held["clients"] < 0.7 and held["halves"] > held["clients"] + 0.15
    again = KernelRegression.from_arrays(model.arrays(), N, 3, guesses=0)
    assert again.error == model.error
    wrong = {**model.arrays(), "halves": np.full(200, 2.0)}
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        KernelRegression.from_arrays(wrong, N, 3, guesses=0)


def test_bounds_are_wider_for_images_that_no_replay_drew_from() -> None:
    """All images' features are off by o, those of both halves by o + d and o − d, others' by nothing."""
    rng, group = np.random.default_rng(0), np.arange(60) % 2
    sign = np.where(group == 0, 1.0, -1.0)[:, None, None]

    def off(count: int, seed: int, by: FloatArray) -> Replays:
        found = clients(count, noise=0.03, seed=seed, absent=0.0)
        return replace(found, features=found.features[:, :, :2] + by)

    others = off(100, 2, np.zeros((N, 1)))
    held: dict[str, list[float]] = {"alone": [], "wider": []}
    for _ in range(6):
        whole, half = (0.08 * rng.normal(size=(N, 1)) for _ in range(2))
        bank = KernelRegression(off(150, 0, whole), guesses=0)
        wider = bank.allowing_for_other_images(replace(off(60, 1, whole + sign * half), halves=group))
        for name, model in (("alone", bank), ("wider", wider)):
            inside = [
                (z >= p.low - 1e-9) & (z <= p.high + 1e-9)
                for z, p in zip(others.proportions, map(model, others.features), strict=True)
            ]
            held[name].append(float(np.mean(inside)))
    assert np.mean(held["alone"]) < 0.8
    assert 0.9 < np.mean(held["wider"]) < 0.99
    known = others.features[0]
    np.testing.assert_array_equal(bank(known).proportions, wider(known).proportions)
    alike = replace(off(60, 1, whole), halves=group)  # halves that are no different
    narrow, plain = bank.allowing_for_other_images(alike)(known), bank(known)
    np.testing.assert_allclose(narrow.high - narrow.low, plain.high - plain.low, rtol=0.1)
    again = KernelRegression.from_arrays(wider.arrays(), N, 2, guesses=0)
    np.testing.assert_array_equal(again(known).low, wider(known).low)
    with pytest.raises(ValueError, match="negative"):
        KernelRegression.from_arrays({**wider.arrays(), "unseen": np.array([-1.0])}, N, 2, guesses=0)


def test_a_line_through_the_guesses_is_a_kernel_of_few_ranks_more() -> None:
    rng = np.random.default_rng(0)
    root, V = rng.normal(size=(6, 6)), rng.normal(size=(6, 2))
    A = root @ root.T + np.eye(6)
    for scale in (0.0, 10.0):
        expected = np.linalg.inv(A + scale * V @ V.T)
        np.testing.assert_allclose(_with_product(np.linalg.inv(A), scale, V), expected, atol=1e-10)


def test_more_clients_are_learnt_from_as_if_they_had_been_there_before() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(9, 9))
    A = root @ root.T + np.eye(9)
    np.testing.assert_allclose(
        _bordered(np.linalg.inv(A[:6, :6]), A[:6, 6:], A[6:, 6:]), np.linalg.inv(A), atol=1e-10
    )
    replays = clients(60, noise=0.03)
    features, z = replays.features, replays.proportions
    few = KernelRegression(some(replays, slice(50)), guesses=1)
    more = few.with_more(some(replays, slice(50, 60)))
    assert (few.clients, more.clients) == (50, 60)
    far = np.abs(more(features[55]).proportions - z[55]).sum()
    assert far < np.abs(few(features[55]).proportions - z[55]).sum()
    known = few(features[3]).proportions  # the other one is as it was
    np.testing.assert_array_equal(
        KernelRegression(some(replays, slice(50)), guesses=1)(features[3]).proportions, known
    )


def guessed(rng: np.random.Generator, z: FloatArray, off: FloatArray) -> Replays:
    """Clients whose guess is off by this much."""
    features = np.stack((np.clip(z + off, 0, 1), rng.normal(size=z.shape)), axis=2)
    return Replays(z, features, np.zeros((len(z), 2)))


@pytest.mark.parametrize("alike", [True, False])
def test_clients_near_the_answer_give_the_bounds_half(alike: bool) -> None:
    """Twelve of one mix that are off by the same say little of others: 89 % held (BatchNorm, 84 %)."""
    rng, answer = np.random.default_rng(0), np.array([0.4, 0.3, 0.2, 0.1])

    def errors(count: int, size: float = 0.05) -> FloatArray:
        return size * rng.normal(size=(count, N))

    bank = KernelRegression(guessed(rng, rng.dirichlet(np.ones(N), 100), errors(100)), guesses=1)
    mixes = rng.dirichlet(200 * answer, 200)
    tried = guessed(rng, mixes, errors(200) if alike else errors(200, 0.01))
    off = errors(12, 0.005) + (errors(1) if alike else 0.0)
    widths, held = {}, {}
    for count in (0, 4, 12):
        near = guessed(rng, rng.dirichlet(200 * answer, count), off[:count]) if count else None
        found = bank if near is None else bank.with_more(near)
        predicted = [found(client) for client in tried.features]
        widths[count] = np.mean([p.high - p.low for p in predicted])
        inside = [(p.low <= z) & (z <= p.high) for p, z in zip(predicted, tried.proportions, strict=True)]
        held[count] = np.mean(inside)
    assert N * 4 < _LIKE <= N * 12
    assert widths[4] > 0.8 * widths[0]  # sixteen errors say little
    assert 0.5 * widths[0] < widths[12] < (0.9 if alike else 0.7) * widths[0]
    assert held[12] >= (0.88 if alike else 0.95)


def test_clients_near_the_answer_leave_open_that_a_class_is_absent() -> None:
    """They have a little of each class that was found: 57 % of the bounds of absent ones held, of 42."""
    rng = np.random.default_rng(0)

    def mixes(count: int) -> FloatArray:
        z = rng.dirichlet(np.ones(N), count)
        z[rng.random(count) < 0.5, 0] = 0.0
        return z / z.sum(axis=1, keepdims=True)

    def seen(z: FloatArray) -> Replays:
        return guessed(rng, z, 0.03 * np.abs(rng.normal(size=z.shape)))

    bank = KernelRegression(seen(mixes(150)), guesses=1)
    tried = seen(mixes(300))
    absent = tried.proportions[:, 0] == 0
    alone, nearer = [], []
    for features in tried.features[absent]:
        before = bank(features)
        near = seen(rng.dirichlet(300 * np.maximum(before.proportions, 0.02), 12))
        alone.append(before.low[0] == 0)
        nearer.append(bank.with_more(near)(features).low[0] == 0)
    assert absent.sum() > 100
    assert np.mean(nearer) > 0.95 * np.mean(alone) > 0.85


def test_a_first_guess_that_is_nearly_right_is_followed_beyond_what_was_learnt() -> None:
    """Guesses off by 0.002: clients are found to that, also one more skewed than all that were there."""
    rng = np.random.default_rng(0)

    def guessed(z: FloatArray) -> FloatArray:
        noise = 0.002 * rng.normal(size=z.shape)
        return np.stack((np.clip(z + noise, 0, 1), rng.normal(size=z.shape)), axis=2)

    z = rng.dirichlet(np.full(N, 3.0), 60)
    found = KernelRegression(Replays(z, guessed(z), np.zeros((len(z), 2))), guesses=1)
    assert found.error < 0.006
    skewed = np.array([[0.97, 0.01, 0.01, 0.01]])
    np.testing.assert_allclose(found(guessed(skewed)[0]).proportions, skewed[0], atol=0.03)


def test_proportions_are_found_again_and_the_error_is_that_of_others() -> None:
    found = KernelRegression(clients(80, noise=0.03), guesses=1)
    others = clients(200, noise=0.03, seed=1)
    features, z = others.features, others.proportions
    predicted = [found(client) for client in features]
    error = np.mean([np.abs(p.proportions - true).sum() / 2 for p, true in zip(predicted, z, strict=True)])
    assert error < 0.06
    assert found.error == pytest.approx(error, rel=0.25)
    for p in predicted:
        assert p.proportions.sum() == pytest.approx(1.0)
        assert np.all((p.low <= p.proportions) & (p.proportions <= p.high))
        assert np.all((p.low >= 0) & (p.high <= 1) & (p.presence >= 0) & (p.presence <= 1))


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_bounds_hold_about_as_often_as_they_say(noise: float) -> None:
    found = KernelRegression(clients(150, noise=noise), guesses=1)
    others = clients(400, noise=noise, seed=1)
    features, z = others.features, others.proportions
    predicted = [found(client) for client in features]
    low, high = np.stack([p.low for p in predicted]), np.stack([p.high for p in predicted])
    assert np.mean((low <= z) & (z <= high)) == pytest.approx(0.95, abs=0.025)
    presence = np.stack([p.presence for p in predicted])
    for below, above in ((0.0, 0.5), (0.5, 0.9), (0.9, 1.01)):
        chosen = (presence >= below) & (presence < above)
        if chosen.sum() > 100:
            assert np.mean(z[chosen] > 0) == pytest.approx(presence[chosen].mean(), abs=0.08)


def test_a_class_that_is_likelier_absent_has_no_samples() -> None:
    """The median of such a count is zero, which errs least where it errs by absolute values."""
    found = KernelRegression(clients(200, noise=0.15, absent=0.6), guesses=1)
    others = clients(400, noise=0.15, seed=1, absent=0.6)
    errors = {True: 0.0, False: 0.0}
    for z, features in zip(others.proportions, others.features, strict=True):
        said = found(features)
        assert said.proportions.sum() == pytest.approx(1.0)
        np.testing.assert_array_equal(said.proportions == 0, said.presence < 0.5)
        assert np.all((said.low <= said.proportions) & (said.proportions <= said.high))
        kernel = found._kernel(found._inputs(features[None]), found._guessed(features))
        rooted = _on_simplex((kernel @ found._weights + found._offset)[None])[0]
        for zeroed, answer in ((True, said.proportions), (False, rooted)):
            errors[zeroed] += 0.5 * float(np.abs(answer - z).sum()) / len(others.proportions)
    assert errors[True] < errors[False]


def test_one_class_is_kept_where_all_are_likelier_absent() -> None:
    z = np.array([[0.6, 0.4, 0.0], [0.5, 0.3, 0.2]])
    presence = np.array([[0.4, 0.3, 0.1], [0.9, 0.5, 0.4]])
    np.testing.assert_allclose(_of_present(z, presence), [[0.6, 0.4, 0.0], [0.625, 0.375, 0.0]])


def test_strange_features_are_told_from_known_ones() -> None:
    found = KernelRegression(clients(80, noise=0.03), guesses=1)
    features = clients(50, noise=0.03, seed=1).features
    assert max(found.strangeness(client) for client in features) < 2
    assert found.strangeness(100 * features[0]) > 2
    assert np.isfinite(found(1e6 * features[0]).proportions).all()


def test_where_nothing_can_be_known_all_are_alike() -> None:
    """Features that say nothing: every prediction is near the mean, and bounds span what there was."""
    rng = np.random.default_rng(0)
    z = rng.dirichlet(np.full(N, 0.7), 100)
    found = KernelRegression(Replays(z, rng.normal(size=(100, N, 3)), np.zeros((100, 2))), guesses=0)
    predicted = found(rng.normal(size=(N, 3)))
    np.testing.assert_allclose(predicted.proportions, 1 / N, atol=0.12)
    assert np.mean(predicted.high - predicted.low) > 0.5
