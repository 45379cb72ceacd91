"""Largest-remainder rounding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core.rounding import round_to_total, whole_bounds

WEIGHTS = st.lists(st.floats(0, 1e6).filter(lambda x: x == 0 or x > 1e-6), min_size=1, max_size=30).filter(
    lambda weights: sum(weights) > 0
)


@given(WEIGHTS, st.integers(0, 100_000))
def test_integers_that_sum_to_total_within_one_of_exact(weights: list[float], total: int) -> None:
    proportions = np.array(weights)
    counts = round_to_total(proportions, total)
    exact = total * proportions / proportions.sum()
    assert counts.dtype == np.int64
    assert counts.sum() == total
    assert np.all(counts >= 0)
    assert np.all(np.abs(counts - exact) < 1 + 1e-6)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any), st.integers(0, 9))
def test_no_integers_are_nearer(weights: list[int], total: int) -> None:
    proportions = np.array(weights, dtype=np.float64)
    exact = total * proportions / proportions.sum()
    everything = itertools.product(range(total + 1), repeat=len(weights))
    least = min(np.abs(np.array(c) - exact).sum() for c in everything if sum(c) == total)
    assert np.abs(round_to_total(proportions, total) - exact).sum() <= least + 1e-8


@pytest.mark.parametrize(
    ("proportions", "total", "expected"),
    [
        ([0.25, 0.25, 0.25, 0.25], 2, [1, 1, 0, 0]),
        ([1 / 3, 1 / 3, 1 / 3], 4, [2, 1, 1]),
        ([0.1] * 10, 13, [2, 2, 2, 1, 1, 1, 1, 1, 1, 1]),
        ([0.3, 0.1 + 0.2, 0.4], 5, [2, 1, 2]),  # 0.1 + 0.2 > 0.3, but only by rounding error
        ([0.0, 1.0], 7, [0, 7]),
        ([3.0, 1.0], 4, [3, 1]),  # normalised
    ],
)
def test_ties_go_to_the_lower_class(proportions: list[float], total: int, expected: list[int]) -> None:
    assert round_to_total(np.array(proportions), total).tolist() == expected


def test_too_many_after_rounding_error_are_taken_back() -> None:
    # Past 2^53 the floors of exact shares can sum to more than the total.
    total = 2**53 + 1
    counts = round_to_total(np.array([0.5, 0.5]), total)
    assert counts.sum() == total


@pytest.mark.parametrize(
    ("proportions", "total"),
    [([0.5, -0.1], 3), ([0.0, 0.0], 3), ([np.nan, 1.0], 3), ([np.inf, 1.0], 3), ([1.0], -1)],
)
def test_refuses_what_is_no_distribution(proportions: list[float], total: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        round_to_total(np.array(proportions), total)


@given(st.floats(0, 40), st.floats(0, 10), st.floats(0, 10))
def test_whole_bounds_hold_the_numbers_inside_and_the_count(
    centre: float, below: float, above: float
) -> None:
    count, low, high = round(centre), centre - below, centre + above
    found = whole_bounds(np.array([low]), np.array([high]), np.array([count]))
    inside = [n for n in range(-11, 52) if low - 1e-6 <= n <= high + 1e-6]
    expected = [count, *inside]
    assert [int(edge) for (edge,) in found] == [min(expected), max(expected)]


def test_whole_bounds_of_what_is_known_exactly() -> None:
    """Rounding errors don't push a bound past the number that it is, and no count falls out of its bounds."""
    low, high = np.array([5 + 1e-9, 4.1, 2.0, 7.6]), np.array([5 + 1e-9, 4.2, 3 - 1e-9, 9.4])
    found = whole_bounds(low, high, np.array([5, 4, 2, 7]))
    np.testing.assert_array_equal(found, [[5, 4, 2, 7], [5, 4, 3, 9]])


def test_whole_bounds_are_integers_and_zero_has_no_sign() -> None:
    low, high = whole_bounds(np.zeros(1), np.full(1, 0.5), np.zeros(1, dtype=np.int64))
    assert (low.dtype, high.dtype) == (np.int64, np.int64)
    assert str(low[0].item()) == "0"
