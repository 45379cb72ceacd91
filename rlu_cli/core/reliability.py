"""How far one client's counts can be trusted, in a word and, where there are bounds, in a number."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from rlu_cli.core.checks import moved_far
from rlu_cli.core.metrics import expected_i_acc
from rlu_cli.core.trained import shows_training
from rlu_cli.core.types import Recovery

Grade = Literal["good", "fair", "poor"]
GRADES: tuple[Grade, ...] = ("good", "fair", "poor")

UNRELIABLE = (
    "update-too-large",
    "update-unbalanced",
    "update-near-precision",
    "update-clipped",
    "clip-exceeded",
    "update-misscaled",
    "counts-not-whole",
    "update-unlike-replays",
    "update-sign-reversed",
    "local-looks-like-delta",
    "delta-looks-like-weights",
    "update-unexplained",
    "embedding-mismatch",
    "predictions-swing",
    "class-names-disagree",
    "solver-uncertified",
    "local-statistics-missing",
    "method-undetermined",
    "counts-random",
    "lr-uncertain",
    "assumes-few-samples",
    "assumes-nonnegative-embedding",
    "assumes-one-sample",
    "assumes-one-step",
    "assumes-unique-labels",
    "assumes-untrained-model",
)
"""Warnings after which the counts are not to be trusted."""

UNRELIABLE_TOGETHER = ("update-strayed", "replay-strange-update")
"""The same of all at once: replays move as far, so the way is no excuse for what none of them explains."""

_GOOD, _FAIR = 0.9, 0.7
"""Expected iAcc from which a grade is given: one label in ten wrong, three in ten."""


@dataclass(frozen=True)
class Reliability:
    """A grade, and what it rests on.

    expected_i_acc : expected share of labels recovered, None for methods without bounds
    reasons : why it is no better, none for ``good``: codes of warnings, or bounds-wide, model-trained and
        moved-far
    """

    grade: Grade
    expected_i_acc: float | None
    reasons: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """By the names of the JSON."""
        return {"grade": self.grade, "expected_iAcc": self.expected_i_acc, "reasons": list(self.reasons)}


def reliability(recovery: Recovery, codes: Collection[str]) -> Reliability:
    """Grade one client's recovery.

    With bounds the expected iAcc decides: good from 0.9, fair from 0.7. Those of one model or two can't know
    how the model moved between, so the grade is one lower where a trained model moved far; those of `replay`
    come from clients that moved as far. Without bounds, a trained
    model and one that moved far each lower the grade by one. ``poor`` in any case after a warning of
    `UNRELIABLE`, or all of `UNRELIABLE_TOGETHER`.

    Parameters
    ----------
    codes : of all warnings about this client: the method's, and those of files and training values
    """
    failed = [code for code in UNRELIABLE if code in codes]
    if set(UNRELIABLE_TOGETHER) <= set(codes):
        failed += UNRELIABLE_TOGETHER
    trained = shows_training(recovery.diagnostics["own_confidence"], len(recovery.counts))
    far = moved_far(recovery.diagnostics["motion"])
    doubts = [name for name, holds in (("model-trained", trained), ("moved-far", far)) if holds]
    if recovery.widths is None:
        expected, grade = None, len(doubts)
    else:
        expected = expected_i_acc(recovery.widths, recovery.total)
        wide = (expected < _GOOD) + (expected < _FAIR)
        doubts = doubts if trained and far and not _learnt_from_replays(recovery, codes) else []
        grade = min(wide + bool(doubts), 2)
        if wide:
            doubts.insert(0, "bounds-wide")
    if failed:
        return Reliability("poor", expected, (*failed, *doubts))
    return Reliability(GRADES[grade], expected, tuple(doubts))


def _learnt_from_replays(recovery: Recovery, codes: Collection[str]) -> bool:
    """Whether the bounds are those of `replay`, and not of `gls` in its stead."""
    return recovery.method == "replay" and not {"replay-not-fitted", "replay-strange-update"} & set(codes)
