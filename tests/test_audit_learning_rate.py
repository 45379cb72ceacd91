"""Which way the rate is told, what is said of it, and when it is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from methods_cases import known_round, random_head

from rlu_cli.audit import learning_rate
from rlu_cli.audit.learning_rate import with_estimated_rate
from rlu_cli.core.rate_likelihood import LearningRate
from rlu_cli.core.types import Activations, Observation
from rlu_cli.errors import MismatchError

SAMPLES = Activations(np.zeros((1, 4)), np.zeros((1, 3)), np.zeros(1, dtype=np.int64))
"""Nobody looks at them: the estimate itself is tested elsewhere."""


def one_step() -> Observation:
    return known_round(np.array([5, 2, 0, 3]), random_head(4, 3))


def said(spread: float, monkeypatch: pytest.MonkeyPatch) -> tuple[float, str, str]:
    """Rate, code and message for an estimate of twice the rate told, whose interval is so wide."""
    found = LearningRate(2.0, 2.0 / spread**0.5, 2.0 * spread**0.5)
    monkeypatch.setattr(learning_rate, "estimate_learning_rate", lambda *_: found)
    training, note = with_estimated_rate(one_step(), SAMPLES, None, None)
    assert isinstance(training.lr, float)
    return training.lr, note.code, note.message


def test_the_warning_says_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, code, message = said(1.21, monkeypatch)
    assert (rate, code) == (pytest.approx(0.2), "lr-estimated")
    assert "it is 0.2 (95 %: 0.1818 to 0.22)" in message
    assert said(3.9, monkeypatch)[1] == "lr-estimated"
    assert said(4.1, monkeypatch)[1] == "lr-uncertain"


def test_what_tells_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MismatchError, match="factor of 11"):
        said(11.0, monkeypatch)


def test_several_steps_of_a_model_that_moved_need_a_replay() -> None:
    observation = one_step()
    far = replace(observation.start, confidence=np.eye(4)[[1, 2, 3, 0]])
    moved = replace(observation, training=replace(observation.training, steps=3), end=far)
    with pytest.raises(MismatchError, match="--lr RATE"):
        with_estimated_rate(moved, SAMPLES, SAMPLES, None)
