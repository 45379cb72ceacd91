"""The grade of a recovery, and the iAcc that its bounds promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from methods_cases import known_round, untrained

from rlu_cli.core.metrics import expected_i_acc
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.reliability import UNRELIABLE, UNRELIABLE_TOGETHER, reliability
from rlu_cli.core.types import Recovery

TOTAL = 1000


def recovery(*, width: float | None = 0.0, own: float = 0.2, motion: float | None = None) -> Recovery:
    """Four classes, each with bounds so many samples apart; chance is an own confidence of 0.25."""
    estimate = np.full(4, TOTAL / 4)
    widths = None if width is None else np.full(4, width)
    half = None if widths is None else widths / 2
    diagnostics: dict[str, Any] = {"own_confidence": own, "motion": motion}
    low, high = (None, None) if half is None else (estimate - half, estimate + half)
    counts = estimate.astype(np.int64)
    return Recovery("gls", TOTAL, counts, estimate, low, high, None, diagnostics, (), widths)


def test_expected_i_acc_is_the_mean_over_normal_errors() -> None:
    rng = np.random.default_rng(0)
    sigma = np.array([2.0, 10.0, 30.0, 50.0])
    errors = rng.normal(size=(200_000, 4)) * sigma
    literal = 1 - np.abs(errors).sum(axis=1).mean() / 2 / TOTAL
    assert expected_i_acc(2 * 1.96 * sigma, TOTAL) == pytest.approx(literal, abs=2e-4)
    assert expected_i_acc(np.full(4, 1e9), TOTAL) == 0


@pytest.mark.parametrize(
    ("width", "grade", "reasons"),
    # E[iAcc] = 1 - 2 · 0.2035 · width / 1000
    [
        (0, "good", ()),
        (240, "good", ()),
        (250, "fair", ("bounds-wide",)),
        (730, "fair", ("bounds-wide",)),
        (745, "poor", ("bounds-wide",)),
    ],
)
def test_with_bounds_their_width_decides(width: float, grade: str, reasons: tuple[str, ...]) -> None:
    found = reliability(recovery(width=width, own=0.9), [])
    assert (found.grade, found.reasons) == (grade, reasons)
    assert reliability(recovery(width=width, motion=0.9), []).grade == grade
    assert found.document() == {
        "grade": grade,
        "expected_iAcc": pytest.approx(1 - 2 * 0.20354 * width / TOTAL, abs=1e-4),
        "reasons": list(reasons),
    }


def test_bounds_are_trusted_less_where_a_trained_model_moved_far() -> None:
    doubts = ("model-trained", "moved-far")
    for width, grade in ((0, "fair"), (400, "poor"), (2000, "poor")):
        found = reliability(recovery(width=width, own=0.6, motion=0.4), [])
        assert found.grade == grade
        assert found.reasons == (("bounds-wide", *doubts) if width else doubts)


def test_bounds_from_replays_know_of_the_move() -> None:
    replayed = replace(recovery(width=400, own=0.6, motion=0.4), method="replay")
    assert (reliability(replayed, []).grade, reliability(replayed, []).reasons) == ("fair", ("bounds-wide",))
    for code in ("replay-not-fitted", "replay-strange-update"):  # then they are those of gls
        assert reliability(replayed, [code]).reasons == ("bounds-wide", "model-trained", "moved-far")


def test_without_bounds_training_and_motion_each_cost_a_grade() -> None:
    def graded(own: float, motion: float | None) -> tuple[str, tuple[str, ...], float | None]:
        found = reliability(recovery(width=None, own=own, motion=motion), [])
        return found.grade, found.reasons, found.expected_i_acc

    assert graded(0.5, None) == ("good", (), None)
    assert graded(0.51, 0.3) == ("fair", ("model-trained",), None)
    assert graded(0.3, 0.34) == ("fair", ("moved-far",), None)
    assert graded(0.6, 0.34) == ("poor", ("model-trained", "moved-far"), None)


@pytest.mark.parametrize("code", UNRELIABLE)
def test_unreliable_warnings_are_poor_whatever_the_bounds(code: str) -> None:
    for width in (0.0, None):
        found = reliability(recovery(width=width), ["images-resized", code])
        assert (found.grade, found.reasons) == ("poor", (code,))
    assert reliability(recovery(), ["images-resized"]).grade == "good"


def test_what_neither_counts_nor_replays_explain_is_poor() -> None:
    for width in (0.0, None):
        found = reliability(recovery(width=width), ["images-resized", *UNRELIABLE_TOGETHER])
        assert (found.grade, found.reasons) == ("poor", ("update-strayed", "replay-strange-update"))
        for code in UNRELIABLE_TOGETHER:
            assert reliability(recovery(width=width), [code]).grade == "good"


def test_a_recovery_has_what_the_grade_needs() -> None:
    observation = known_round(np.array([5, 3, 0, 8]), untrained(4, 3), steps=2)
    for method in ("rlu", "gls", "llg"):
        assert reliability(recover_labels(observation, method=method), []).grade == "good"
    alone = replace(observation, end=None)
    assert reliability(recover_labels(alone, method="rlu"), []).grade == "good"


def test_the_grade_is_that_of_the_bounds_before_they_were_made_whole() -> None:
    """Between whole numbers lies a sample less a class: of 32 samples bounds of 0.90 said 0.92."""
    plain = recovery(width=240.0)
    whole = replace(plain, widths=np.full(4, 250.0))
    for found, widths in ((plain, 240.0), (whole, 250.0)):
        expected = expected_i_acc(np.full(4, widths), TOTAL)
        assert reliability(found, ()).expected_i_acc == pytest.approx(expected)
