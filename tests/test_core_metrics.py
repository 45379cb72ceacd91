"""Scores, against their definitions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core.metrics import score_bounds, score_counts, uniform_counts
from rlu_cli.core.types import FloatArray, Recovery


def test_hand_computed_case() -> None:
    truth = np.array([4, 0, 3, 1, 0])
    recovered = np.array([5, 1, 2, 0, 0])
    scores = score_counts(recovered, truth)
    # presence: 11, 01, 11, 10, 00 → XNOR 1 0 1 0 1
    assert scores.c_acc == pytest.approx(3 / 5)
    # min: 4, 0, 2, 0, 0 of 8 samples
    assert scores.i_acc == pytest.approx(6 / 8)
    assert scores.exact_counts == pytest.approx(1 / 5)
    assert scores.total_variation == pytest.approx(0.5 * (1 + 1 + 1 + 1) / 8)


@pytest.mark.parametrize(
    ("recovered", "c_acc", "i_acc", "exact", "variation"),
    [
        ([3, 5, 0, 0], 1.0, 1.0, 1.0, 0.0),
        ([0, 0, 4, 4], 0.0, 0.0, 0.0, 1.0),
        ([2, 2, 2, 2], 0.5, 0.5, 0.0, 0.5),
        ([8, 0, 0, 0], 0.75, 0.375, 0.5, 0.625),
    ],
)
def test_known_scores(
    recovered: list[int], c_acc: float, i_acc: float, exact: float, variation: float
) -> None:
    scores = score_counts(np.array(recovered), np.array([3, 5, 0, 0]))
    assert (scores.c_acc, scores.i_acc) == pytest.approx((c_acc, i_acc))
    assert (scores.exact_counts, scores.total_variation) == pytest.approx((exact, variation))


COUNTS = st.lists(st.integers(0, 20), min_size=6, max_size=6).filter(any)


@given(COUNTS, COUNTS, st.permutations(range(6)))
def test_definitions_and_invariance(recovered: list[int], truth: list[int], order: list[int]) -> None:
    scores = score_counts(np.array(recovered), np.array(truth))
    # cAcc: XNOR of the presence bits; iAcc: size of the multiset intersection over the samples seen.
    xnor = [not ((r > 0) ^ (t > 0)) for r, t in zip(recovered, truth, strict=True)]
    labels = [Counter(dict(enumerate(c))) for c in (recovered, truth)]
    assert scores.c_acc == pytest.approx(sum(xnor) / 6)
    assert scores.i_acc == pytest.approx((labels[0] & labels[1]).total() / sum(truth))
    # Renaming the classes changes nothing.
    renamed = score_counts(np.array(recovered)[order], np.array(truth)[order])
    assert vars(renamed) == pytest.approx(vars(scores))
    # With equal sums, total variation is what the intersection misses.
    if sum(recovered) == sum(truth):
        assert scores.total_variation == pytest.approx(1 - scores.i_acc)


def test_multiplying_both_changes_nothing() -> None:
    a, b = np.array([1, 0, 4, 3]), np.array([2, 1, 0, 5])
    assert score_counts(7 * a, 7 * b) == score_counts(a, b)


def test_uniform_guess() -> None:
    assert uniform_counts(4, 10).tolist() == [3, 3, 2, 2]
    assert uniform_counts(10, 320).tolist() == [32] * 10
    assert uniform_counts(5, 3).tolist() == [1, 1, 1, 0, 0]
    skewed = np.array([32, 0, 0, 0])
    assert score_counts(uniform_counts(4, 32), skewed).i_acc == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("recovered", "truth"), [([1, 2], [1, 2, 3]), ([0, 0], [1, 2]), ([1, 2], [0, 0]), ([], [])]
)
def test_refuses_what_cannot_be_compared(recovered: list[int], truth: list[int]) -> None:
    with pytest.raises(ValueError, match="expected counts"):
        score_counts(np.array(recovered, dtype=np.int64), np.array(truth, dtype=np.int64))


def test_bounds_by_hand() -> None:
    truth = np.array([4, 0, 3, 1, 0])
    low, high = np.array([4.0, 1, 1, 0, 0]), np.array([4.0, 2, 2, 3, 0])
    presence = np.array([0.9, 0.6, 0.9, 0.2, 0.1])

    def recovery(**bars: FloatArray) -> Recovery:
        bounds = {"low": None, "high": None, "presence": None, **bars}
        return Recovery("gls", 8, truth, 1.0 * truth, **bounds, diagnostics={}, warnings=())

    scores = score_bounds(recovery(low=low, high=high, presence=presence), truth)
    assert scores == pytest.approx(
        {"bounds_hold": 3 / 5, "bounds_width": (0 + 1 + 1 + 3 + 0) / 5 / 8, "presence_cAcc": 3 / 5}
    )
    assert score_bounds(recovery(), truth) == {}
