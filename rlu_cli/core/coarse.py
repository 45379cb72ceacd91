"""Signs that an update was sparsified or quantised before it was sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


_SHARES = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
"""Times a power of ten: what shares are taken for, so that clients whose shares are alike have the same; from
0.85 on to one hundredth."""

_EXACTLY = 1e-3
"""How much smaller a number may come out of the same rounding than the least that was sent."""

_OFF = 0.15
"""Of a step that values on a grid may lie beside it at most."""


@dataclass(frozen=True)
class Coarsening:
    """What sparsification and quantisation left of an update's numbers.

    least : the smallest size that was sent, others being 0; 0 where all were
    zeros : share of the output layer's numbers that are 0
    origin, step : of the grid of the values sent; a step of 0 for none
    apart, bias_step : how many levels the weight's own grid has, where the bias has another one, and the
        step of that; 0 where there is one for both
    even : whether the values sent lie on such grids, with nothing between
    signs : whether there are two values, and one is the other's negative
    values : how many different values and numbers there are, None for no grid
    deviation : √((n step²/12 + Z least²/3)/(n + Z)), of what n rounded numbers and Z left out lost
    error : √(n + Z) times that over ‖Δ‖
    reach : how many values the grid has from the smallest to the largest number, or of the weight alone where
        the bias has another; 0 for no grid
    """

    least: float
    zeros: float
    origin: float
    step: float
    values: tuple[int, int] | None
    deviation: float
    error: float
    apart: int = 0
    bias_step: float = 0.0
    even: bool = True
    signs: bool = False
    reach: int = 0

    @property
    def any(self) -> bool:
        """Whether the update was made coarser at all."""
        return self.sparsified or self.quantised

    @property
    def rounding(self) -> float:
        """Standard deviation of what rounding added to a number of the bias, step/√12."""
        return (self.bias_step or self.step) / math.sqrt(12)

    @property
    def sparsified(self) -> bool:
        return self.least > 0

    @property
    def quantised(self) -> bool:
        return self.values is not None

    def most_lost(self, values: FloatArray) -> float:
        """By how much the sum of such numbers of the bias update may be off."""
        sent, rounded = int(np.count_nonzero(values)), (self.bias_step or self.step) / 2
        return (len(values) - sent) * max(self.least, rounded) + sent * rounded

    def of(self, update: HeadUpdate) -> HeadUpdate:
        """What it would have left of another one."""
        bias = update.bias
        if bias is not None:
            own = (float(bias.min()), float(np.ptp(bias)) / (self.apart - 1)) if self.apart else None
            bias = self._left(bias, *(own or (self.origin, self.step)))
        return HeadUpdate(self._left(update.weight, self.origin, self.step), bias)

    def _left(self, values: FloatArray, origin: float, step: float) -> FloatArray:
        if self.signs:
            count = max(1, round((1 - self.zeros) * values.size))
            least = np.sort(np.abs(values), axis=None)[-count]
            return np.where(np.abs(values) < least, 0.0, self.step / 2 * np.sign(values))
        on_grid = origin + np.rint((values - origin) / step) * step if step else values
        return (
            np.where(np.abs(on_grid) < self.least * (1 - _EXACTLY), 0.0, on_grid) if self.least else on_grid
        )


def coarsening(observation: Observation) -> Coarsening:
    """`coarsening_of` an observed update."""
    return coarsening_of(observation.update, resolution=_resolution(observation))


def coarsening_of(update: HeadUpdate, *, resolution: float) -> Coarsening:
    """What the output layer's update shows that training doesn't make: zeros, or steps.

    Sparsified: at least 2 % of the numbers are exactly 0 while all others are far from it, by 16 times
    ``resolution``. Quantised: fewer than half of the other numbers differ, and those that do by at least as
    much. Columns of ΔW without a single number are no sign: their input was never active. Nor are such rows:
    the model was too sure that nothing is of their classes.

    Parameters
    ----------
    resolution : the largest rounding error of a difference of two stored numbers
    """
    rows, columns = (np.any(update.weight != 0, axis=axis) for axis in (1, 0))
    live = update.weight[rows][:, columns]
    bias = None if update.bias is None else update.bias[rows | (update.bias != 0)]
    values = live.ravel() if bias is None else np.concatenate((live.ravel(), bias))
    if len(values) < _FEWEST:
        return Coarsening(0.0, 0.0, 0.0, 0.0, None, 0.0, 0.0)
    gap = _CLEAR * max(resolution, np.finfo(float).tiny)
    sent = values[values != 0]
    zeros = 1 - len(sent) / len(values)
    smallest = float(np.abs(sent).min()) if len(sent) else 0.0
    least = smallest if zeros >= _ZEROS and smallest > gap else 0.0
    origin, step, apart, bias_step, different = 0.0, 0.0, 0, 0.0, None
    levels, even = _few_levels(sent, gap), True
    if bias is not None:  # tensors may have been quantised one by one
        alone = _grid_apart(levels, live, bias, gap)
        if alone is not None:
            levels, apart = alone, round(float(np.ptp(alone)) / _step(alone)) + 1
            bias_step = float(np.ptp(bias[bias != 0] if least and np.any(bias) else bias)) / (apart - 1)
    if levels is not None:
        origin, different = float(levels[0]), (len(levels), len(sent))
        step, even = (_step(levels), _is_even(levels, gap)) if len(levels) > 1 else (0.0, True)
    reach = 0 if levels is None else 1 + (round(float(np.ptp(levels)) / step) if step else 0)
    signs = _are_signs(levels, gap)
    lost = len(sent) * step**2 / 12 + (len(values) - len(sent)) * least**2 / 3
    error = math.sqrt(lost) / float(np.linalg.norm(sent)) if lost else 0.0
    deviation = math.sqrt(lost / len(values))
    return Coarsening(
        least, zeros, origin, step, different, deviation, error, apart, bias_step, even, signs, reach
    )


def check_coarse(found: Coarsening) -> list[Note]:
    """A warning for each way in which an update was made coarser."""
    notes = []
    if found.sparsified:
        notes.append(
            Note(
                "update-sparsified",
                f"{found.zeros:.0%} of the output layer's numbers didn't change at all, and the others "
                "by more than rounding: the client seems to have sent only its largest changes; counts of "
                "classes with few samples are less sure",
            )
        )
    if found.values is not None:
        levels, count = found.values
        notes.append(
            Note(
                "update-quantised",
                f"the output layer's {count} changes have {levels} different values: "
                "the client seems to have rounded its update; counts of classes with few samples are "
                "less sure",
            )
        )
    return notes


def _resolution(observation: Observation) -> float:
    """The largest rounding error of the output layer's update, as float32 or a coarser type stores it."""
    head, update = observation.head, observation.update
    stored = head.weight if head.bias is None else np.append(head.weight, head.bias)
    moved = update.weight if update.bias is None else np.append(update.weight, update.bias)
    largest = float(np.max(np.abs(stored)) + np.max(np.abs(moved)))
    return max(float(np.finfo(np.float32).eps) * largest * observation.magnified, observation.rounding)


def usual_share(share: float) -> float:
    """The nearest of the shares that there are, in logarithms, of an update of which something is missing."""
    if share > 0.85:
        return min(0.99, round(share, 2))
    decade = math.floor(math.log10(share))
    usual = [float(f"{step:g}e{decade}") for step in (*_SHARES, 10.0)]
    return min(usual, key=lambda known: abs(math.log(known / share)))


def _few_levels(sent: FloatArray, gap: float) -> FloatArray | None:
    """The different values of those sent, None where they aren't few."""
    levels = _levels(sent, gap)
    return levels if levels is not None and len(levels) < _SHARED * len(sent) else None


def _grid_apart(
    together: FloatArray | None, weight: FloatArray, bias: FloatArray, gap: float
) -> FloatArray | None:
    """The weight's levels, where they lie on a grid that isn't the bias's as well; None where they don't.

    Signs with a size for each tensor are four values, which lie on a grid by chance.

    Parameters
    ----------
    together : levels of both, None where they aren't few
    """
    alone = _few_levels(weight[weight != 0], gap)
    if alone is None or len(alone) < 2 or not _is_even(alone, gap):
        return None
    if together is None or not _is_even(together, gap):
        return alone
    both = (alone, _levels(bias[bias != 0], gap))
    return alone if len(together) == 4 and all(_are_signs(levels, gap) for levels in both) else None


def _are_signs(levels: FloatArray | None, gap: float) -> bool:
    """Whether they are two, one the other's negative."""
    return levels is not None and len(levels) == 2 and bool(abs(levels.mean()) <= gap)


def _step(levels: FloatArray) -> float:
    """Of the grid that they may lie on: no two lie closer."""
    steps = np.diff(levels)
    return float(np.ptp(levels) / np.rint(steps / steps.min()).sum())


def _is_even(levels: FloatArray, gap: float) -> bool:
    """Whether they lie on a grid, but for what storing them rounds."""
    if len(levels) < 2:
        return True
    step = _step(levels)
    places = (levels - levels[0]) / step
    return bool(np.abs(places - np.rint(places)).max() <= min(_OFF, gap / step))


def _levels(values: FloatArray, gap: float) -> FloatArray | None:
    """The different values, None where some are neither alike nor clearly apart.

    Rounding makes those that are alike differ by twice the resolution at most, all of them.
    """
    ordered = np.sort(values)
    steps, close = np.diff(ordered), 2 * gap / _CLEAR
    alike = steps <= close
    if np.any(~alike & (steps < gap)) or not len(ordered):
        return None
    first = np.flatnonzero(np.concatenate(([True], ~alike)))
    last = np.append(first[1:], len(ordered)) - 1
    return None if np.any(ordered[last] - ordered[first] > close) else np.asarray(ordered[first])
