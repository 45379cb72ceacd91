"""Checks on heads and updates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_cases import random_head, scripted_observation
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.core.checks import check_heads, check_moved, check_range, check_sign, check_update
from rlu_cli.core.coarse import coarsening_of
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.types import Head, HeadUpdate, LocalTraining
from rlu_cli.errors import MismatchError
from rlu_cli.simulation.defences import Defence

RNG = np.random.default_rng(0)
GLOBAL = random_head(RNG, 4, 3)
LOCAL = random_head(RNG, 4, 3)


def test_update_is_the_difference() -> None:
    update = head_update(LOCAL, GLOBAL)
    np.testing.assert_array_equal(update.weight, LOCAL.weight - GLOBAL.weight)


@pytest.mark.parametrize(
    "local",
    [random_head(RNG, 5, 3), random_head(RNG, 4, 2), random_head(RNG, 4, 3, bias=False)],
    ids=["classes", "embedding", "bias"],
)
def test_heads_of_other_shapes_are_refused(local: Head) -> None:
    with pytest.raises(MismatchError, match="different networks"):
        head_update(local, GLOBAL)


@pytest.mark.parametrize("bias", [True, False])
def test_one_class_is_refused(bias: bool) -> None:
    local, reference = (random_head(RNG, 1, 3, bias=bias) for _ in range(2))
    with pytest.raises(MismatchError, match="at least two classes, found 1"):
        head_update(local, reference)
    observation, _ = scripted_observation(LocalTraining(1, 32, 0.1), bias=bias)
    with pytest.raises(MismatchError, match="at least two classes, found 1"):
        recover_labels(replace(observation, head=reference))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["global", "local"])
@pytest.mark.parametrize("tensor", ["weight", "bias"])
def test_numbers_that_are_none_are_refused(bad: float, which: str, tensor: str) -> None:
    damaged = Head(LOCAL.weight.copy(), np.array(LOCAL.bias))
    getattr(damaged, tensor)[1] = bad
    pair = (damaged, GLOBAL) if which == "local" else (GLOBAL, damaged)
    with pytest.raises(MismatchError, match=f"{which} checkpoint"):
        check_heads(*pair)


def test_update_of_zero_is_refused() -> None:
    with pytest.raises(MismatchError, match="identical"):
        head_update(GLOBAL, GLOBAL)
    with pytest.raises(MismatchError, match="identical"):
        check_moved(HeadUpdate(np.zeros((2, 2)), None))
    check_moved(HeadUpdate(np.zeros((2, 2)), np.array([0.0, 1e-30])))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_absurd_sizes_are_refused(bias: bool, optimizer: str) -> None:
    training = LocalTraining(1, 32, 0.1)
    observation, _ = scripted_observation(training, bias=bias)
    observation = replace(observation, training=replace(training, optimizer=optimizer))
    check_range(observation)
    check_range(replace(observation, noise_std=1e10))
    with pytest.raises(MismatchError, match=r"noise of at most 1e\+12 on the mean gradient, found 1e\+13"):
        check_range(replace(observation, noise_std=1e12))
    update = observation.update
    for factor in (1e20, 1e250):
        huge = HeadUpdate(factor * update.weight, None if update.bias is None else factor * update.bias)
        with pytest.raises(MismatchError, match="training diverged"):
            check_range(replace(observation, update=huge))
    with pytest.raises(MismatchError, match="correct --lr"):
        check_range(replace(observation, training=replace(observation.training, lr=1e-20)))


def codes(u: list[float], *, change: float = 1.0, value: float = 1.0) -> list[str]:
    update = HeadUpdate(np.full((len(u), 2), change), np.full(len(u), change))
    head = Head(np.full((len(u), 2), value), np.full(len(u), value))
    _, notes = check_update(np.array(u), update, head)
    return [note.code for note in notes]


def test_warnings() -> None:
    assert codes([0.5, -0.5, 0.0]) == []
    assert codes([1.0, -0.4, -0.6]) == []
    assert codes([0.0, 0.0]) == []
    assert codes([1.2, -0.6, -0.6]) == ["update-too-large"]
    assert codes([0.6, 0.6, -1.2]) == ["update-too-large"]
    assert codes([0.5, -0.4, 0.0]) == ["update-unbalanced"]
    assert codes([5.0, 4.0]) == ["update-too-large", "update-unbalanced"]
    assert codes([0.5, -0.5], change=1e-7) == ["update-near-precision"]
    assert codes([0.5, -0.5], change=1e-5) == []
    assert codes([0.5, -0.5], change=1e-7, value=0.0) == []


def test_diagnostics_are_finite_numbers() -> None:
    for change in (0.0, 1e-300, 1.0):
        update = HeadUpdate(np.full((2, 2), 1.0), np.full(2, change))
        diagnostics, _ = check_update(np.array([0.3, -0.2]), update, Head(np.ones((2, 2)), np.ones(2)))
        assert all(np.isfinite(value) for value in diagnostics.values())
        assert diagnostics["update_max"] == 0.3
        assert diagnostics["update_balance"] == pytest.approx(0.2)


def test_rounding_of_a_coarser_type_counts_where_it_is_more() -> None:
    update, head = HeadUpdate(np.full((2, 2), 0.1), np.array([0.3, -0.3])), Head(np.ones((2, 2)), np.ones(2))
    u = np.array([0.3, -0.3])
    assert not check_update(u, update, head)[1]
    assert not check_update(u, update, head, rounding=1e-12)[1]
    diagnostics, notes = check_update(u, update, head, rounding=0.1)
    assert [note.code for note in notes] == ["update-near-precision"]
    assert diagnostics["update_rounding"] == pytest.approx(0.1 / np.hypot(0.3, 0.3))


def test_what_compression_lost_of_the_bias_is_no_imbalance() -> None:
    """By how much a sum may be off: those left out by the least that was sent, others by half a step."""
    rng = np.random.default_rng(0)
    whole = rng.standard_t(3, size=(10, 85))
    whole -= whole.mean(axis=0)
    for defence in (Defence(top_k=0.3), Defence(quantize=3), Defence(top_k=0.5, quantize=3)):
        flat = defence.apply(torch.from_numpy(whole.ravel().copy()), torch.Generator()).numpy()
        sent = flat.reshape(whole.shape)
        update = HeadUpdate(sent[:, :-1], sent[:, -1])
        assert update.bias is not None
        lost = coarsening_of(update, resolution=1e-12).most_lost(update.bias)
        assert 0 < abs(update.bias.sum()) <= lost
        u, head = update.bias / 10, Head(np.zeros((10, 84)), np.zeros(10))
        codes = [note.code for note in check_update(u, update, head)[1]]
        assert "update-unbalanced" in codes
        told = [note.code for note in check_update(u, update, head, lost=lost / 10)[1]]
        assert "update-unbalanced" not in told


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.floats(0.05, 20))
def test_right_signs_are_never_questioned(seed: int, concentration: float) -> None:
    chance = np.random.default_rng(seed)
    confidence = chance.dirichlet(np.full(6, concentration), 6)
    z = chance.dirichlet(np.full(6, concentration))
    assert not check_sign(z - confidence.T @ z, confidence)


def test_reversed_sign_of_a_client_of_one_class_is_seen() -> None:
    for n in range(6):
        u = np.eye(6)[n] - 1 / 6
        assert [note.code for note in check_sign(-u, np.full((6, 6), 1 / 6))] == ["update-sign-reversed"]
    assert not check_sign(np.zeros(6), np.full((6, 6), 1 / 6))
