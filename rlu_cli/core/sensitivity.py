"""How counts move if a training value that was told is a little off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlu_cli.core.schemes import check_training, step_rates
from rlu_cli.core.types import IntArray, LocalTraining, Recovery
from rlu_cli.errors import MismatchError, UsageError

_OFF = 0.1
"""Share by which each value is taken to be off."""


@dataclass(frozen=True)
class Perturbation:
    """Training with one value changed.

    value : lr, steps or batch_size
    factor : the value used, relative to the one told
    """

    value: str
    factor: float
    training: LocalTraining

    @property
    def used(self) -> float | list[float]:
        """The changed value itself."""
        found = getattr(self.training, self.value)
        return list(found) if isinstance(found, tuple) else found


@dataclass(frozen=True)
class Moved:
    """What became of the counts.

    moved : ½‖z′ − z‖₁ between the label proportions before rounding, in [0, 1]
    """

    perturbation: Perturbation
    total: int
    counts: IntArray
    moved: float

    def document(self) -> dict[str, Any]:
        """By the names of the JSON."""
        return {
            "value": self.perturbation.value,
            "factor": self.perturbation.factor,
            "used": self.perturbation.used,
            "total": self.total,
            "counts": self.counts.tolist(),
            "moved": self.moved,
        }


def sensitivity(
    recovery: Recovery, training: LocalTraining, again: Callable[[LocalTraining], Recovery]
) -> tuple[Moved, ...]:
    """Recover again with each of `perturbations`, but those that no client can have trained with.

    Parameters
    ----------
    recovery : with the training values as they were told
    again : the same recovery under other training values
    """
    before = recovery.estimate / recovery.total
    found = []
    for perturbation in perturbations(training):
        try:
            other = again(perturbation.training)
        except MismatchError:  # as of replays that diverge, or batches too small for BatchNorm
            continue
        moved = 0.5 * float(np.abs(other.estimate / other.total - before).sum())
        found.append(Moved(perturbation, other.total, other.counts, moved))
    return tuple(found)


def perturbations(training: LocalTraining) -> Iterator[Perturbation]:
    """The learning rate, the steps and the batch size 10 % less and more, the latter two by one at least.

    What follows from a value follows it: the samples seen are as many as the steps and the batch size make,
    rates listed step by step are cut short or go on with the last one, and over whole epochs
    (samples = E · distinct) another batch size makes other steps of the same samples. Values that no training
    can have are left out.
    """
    for sign in (-1, 1):
        factor = 1 + sign * _OFF
        rates = step_rates(training) * factor
        lr = tuple(rates.tolist()) if isinstance(training.lr, tuple) else float(rates[0])
        yield from _possible("lr", factor, replace(training, lr=lr))
    for value, change in (("steps", _with_steps), ("batch_size", _with_batch_size)):
        told: int = getattr(training, value)
        for sign in (-1, 1):
            used = told + sign * max(1, round(_OFF * told))
            if used >= 1:
                yield from _possible(value, used / told, change(training, used))


def _possible(value: str, factor: float, training: LocalTraining) -> Iterator[Perturbation]:
    try:
        check_training(training)
    except UsageError:
        return
    yield Perturbation(value, factor, training)


def _with_steps(training: LocalTraining, steps: int) -> LocalTraining:
    lr = training.lr
    if isinstance(lr, tuple):
        lr = (*lr, *[lr[-1]] * steps)[:steps]
    return replace(training, steps=steps, lr=lr, total=round(training.samples * steps / training.steps))


def _with_batch_size(training: LocalTraining, batch_size: int) -> LocalTraining:
    epochs, distinct = training.epochs, training.distinct
    if epochs is None or distinct is None:
        total = round(training.samples * batch_size / training.batch_size)
        return replace(training, batch_size=batch_size, total=total)
    steps = epochs * math.ceil(distinct / batch_size)
    return replace(_with_steps(training, steps), batch_size=batch_size, total=training.samples)
