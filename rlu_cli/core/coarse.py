"""Signs that an update was sparsified or quantised before it was sent."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.types import FloatArray, HeadUpdate, Note, Observation

_FEWEST = 50
"""Numbers of the output layer below which nothing is said."""

_ZEROS = 0.02
"""Share of exact zeros that training doesn't leave, where no rounding explains them."""

_CLEAR = 16.0
"""Units of rounding that a gap between values must be wide to be no rounding."""

_SHARED = 0.5
"""Values that differ, as a share of all, below which many are the same."""


def check_coarse(update: HeadUpdate, *, resolution: float) -> list[Note]:
    """Warn when the output layer's update has zeros or steps that training doesn't make.

    Sparsified: at least 2 % of the numbers are exactly 0 while all others are far from it, by 16 times
    ``resolution``. Quantised: fewer than half of the other numbers differ, and those that do by at least
    as much. Columns of ΔW without a single number are no sign: their input was never active.

    Parameters
    ----------
    resolution : the largest rounding error of a difference of two stored numbers
    """
    live = update.weight[:, np.any(update.weight != 0, axis=0)]
    values = live.ravel() if update.bias is None else np.concatenate((live.ravel(), update.bias))
    if len(values) < _FEWEST:
        return []
    gap = _CLEAR * max(resolution, np.finfo(float).tiny)
    moved = np.abs(values) > 0
    notes = []
    if np.mean(~moved) >= _ZEROS and np.any(moved) and float(np.abs(values[moved]).min()) > gap:
        notes.append(
            Note(
                "update-sparsified",
                f"{np.mean(~moved):.0%} of the output layer's numbers didn't change at all, and the others "
                "by more than rounding: the client seems to have sent only its largest changes; counts of "
                "classes with few samples are less sure",
            )
        )
    levels = _levels(values[moved], gap)
    if levels is not None and levels < _SHARED * np.count_nonzero(moved):
        notes.append(
            Note(
                "update-quantised",
                f"the output layer's {np.count_nonzero(moved)} changes have {levels} different values: "
                "the client seems to have rounded its update; counts of classes with few samples are "
                "less sure",
            )
        )
    return notes


def is_sparsified(observation: Observation) -> bool:
    """Whether parts of the output layer's update seem not to have been sent."""
    return _shows(observation, "update-sparsified")


def is_quantised(observation: Observation) -> bool:
    """Whether the output layer's update seems to have been rounded to few values."""
    return _shows(observation, "update-quantised")


def _shows(observation: Observation, code: str) -> bool:
    found = check_coarse(observation.update, resolution=storage_resolution(observation))
    return any(note.code == code for note in found)


def storage_resolution(observation: Observation) -> float:
    """The largest rounding error of the output layer's update, as float32 or a coarser type stores it."""
    head, update = observation.head, observation.update
    stored = head.weight if head.bias is None else np.append(head.weight, head.bias)
    moved = update.weight if update.bias is None else np.append(update.weight, update.bias)
    largest = float(np.max(np.abs(stored)) + np.max(np.abs(moved)))
    return max(float(np.finfo(np.float32).eps) * largest, observation.rounding)


def _levels(values: FloatArray, gap: float) -> int | None:
    """How many different values there are, None where some are neither alike nor clearly apart."""
    steps = np.diff(np.sort(values))
    alike = steps <= 2 * gap / _CLEAR
    return None if np.any(~alike & (steps < gap)) else 1 + int(np.count_nonzero(~alike))
