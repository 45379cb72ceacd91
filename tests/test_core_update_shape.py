"""Size and evenness of updates: closed forms, and what is warned of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlu_cli.core.update_shape import check_shape, update_shape

NUMBERS = st.floats(-1e30, 1e30, allow_nan=False)


def test_shapes_of_known_updates() -> None:
    signs = np.where(np.random.default_rng(0).random((40, 50)) < 0.5, -0.003, 0.003)
    np.testing.assert_allclose(update_shape(signs), [math.log(0.003), 0.0], atol=1e-12)
    one = np.zeros((4, 25))
    one[1, 3] = -2.0
    np.testing.assert_allclose(update_shape(one), [math.log(2 / 10), math.log(1 / 10)])
    normal = np.random.default_rng(1).normal(size=(500, 800))
    np.testing.assert_allclose(update_shape(normal), [0.0, math.log(math.sqrt(2 / math.pi))], atol=0.01)


@given(arrays(np.float64, (3, 4), elements=NUMBERS), st.floats(1e-3, 1e3))
def test_evenness_has_no_scale(weight: np.ndarray, factor: float) -> None:
    size, evenness = update_shape(weight)
    assert math.isfinite(size) and -math.log(12) / 2 - 1e-9 <= evenness <= 1e-9
    if np.abs(weight).max() > 1e-200:
        scaled = update_shape(factor * weight)
        np.testing.assert_allclose(scaled, [size + math.log(factor), evenness], atol=1e-6)


REPLAYED = np.column_stack((np.linspace(-1.0, 1.0, 50), np.linspace(-0.2, -0.1, 50)))
"""Standard deviations 0.59 and 0.03, of which the second counts as 0.05."""


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((0.0, -0.15), ()),
        ((2.3, -0.15), ()),
        ((-2.3, -0.34), ()),
        ((2.4, -0.15), ("11 times as large as those",)),
        ((-2.4, -0.15), ("0.0907 times as large as those",)),
        ((0.0, -0.36), ("less even than those",)),
        ((2.4, 0.06), ("11 times as large as", "more even than those")),
    ],
)
def test_what_lies_far_from_the_replays_is_warned_of(
    shape: tuple[float, float], words: tuple[str, ...]
) -> None:
    notes = check_shape(np.array(shape), REPLAYED)
    assert [note.code for note in notes] == (["update-unlike-replays"] if words else [])
    for word in words:
        assert word in notes[0].message


def test_size_says_nothing_of_a_clipped_update() -> None:
    assert check_shape(np.array([9.0, -0.15]), REPLAYED, sized=False) == ()
    assert "even" in check_shape(np.array([9.0, 0.2]), REPLAYED, sized=False)[0].message


def test_replays_that_never_moved_are_told_without_overflow() -> None:
    """Where a huge eps keeps Adam from moving, all numbers are equally small."""
    tiny = float(np.finfo(np.float64).tiny)
    still = update_shape(np.zeros((3, 4)))
    np.testing.assert_allclose(still, [math.log(tiny), 0.0], atol=1e-12)
    (note,) = check_shape(update_shape(np.full((3, 4), 1e30)), np.tile(still, (3, 1)))
    assert "1.01e+304 times as large" in note.message
