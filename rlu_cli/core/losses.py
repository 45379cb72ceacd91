"""What compression took from the output layer's update, and from those of made-up clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlu_cli.core.coarse import coarsening
from rlu_cli.core.schemes import pace
from rlu_cli.core.types import FloatArray, Observation

_RANGE = 16.0
"""Clients share what is fitted whose least sizes sent, and steps, lie between the same powers of this."""

Range = tuple[float, float]


@dataclass(frozen=True)
class LossRange:
    """Compression of made-up clients, each by values of its own, log-uniform between these bounds.

    least : of the smallest size that is sent, (0, 0) where all are
    step : of the distance of the grid's values, (0, 0) for none
    apart : see `Coarsening`
    """

    least: Range
    step: Range
    apart: int = 0

    @property
    def width(self) -> int:
        """How many numbers `Losses.features` are."""
        return (self.least[1] > 0) + 3 * (self.step[1] > 0)

    @property
    def logarithms(self) -> int:
        """How many of them, the first ones, are logarithms of sizes."""
        return (self.least[1] > 0) + (self.step[1] > 0)

    def draw(self, clients: int, rng: np.random.Generator) -> Losses:
        """One a client; the grid passes 0 anywhere between two values."""
        drawn = [_log_uniform(ends, clients, rng) for ends in (self.least, self.step)]
        drawn.append(rng.random(clients))
        least, step, phase = (torch.from_numpy(values.astype(np.float32)) for values in drawn)
        return Losses(least, step, phase, self.apart)


@dataclass(frozen=True)
class Losses:
    """Compression of the updates of S clients, each array of shape (S,).

    least : the smallest size of a number that is sent, others being 0; 0 where all are
    step : distance of the grid's values, 0 for none
    phase : where the grid passes 0, in steps
    apart : how many levels a grid of the bias alone has, from its smallest to its largest value; 0 for the
        same grid
    """

    least: Tensor
    step: Tensor
    phase: Tensor
    apart: int = 0

    def of_bias(self, values: Tensor) -> Tensor:
        """What is left of the clients' bias updates, shape (S, N)."""
        if not self.apart:
            return self.of(values)
        sent = values.abs() >= self.least[:, None]
        low, high = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
        step = ((high - low) / (self.apart - 1)).clamp(min=torch.finfo(values.dtype).tiny)
        return torch.where(sent, low + ((values - low) / step).round() * step, 0.0)

    def of(self, values: Tensor) -> Tensor:
        """What is left of the clients' numbers, shape (S, …)."""
        least, step, phase = (
            v.view(-1, *[1] * (values.ndim - 1)) for v in (self.least, self.step, self.phase)
        )
        sent = values.abs() >= least
        if bool(step.any()):
            values = (phase + (values / step - phase).round()) * step
        return torch.where(sent, values, 0.0)

    def features(self) -> Tensor:
        """What is seen of it, shape (S, `LossRange.width`)."""
        circle = 2 * math.pi * self.phase
        seen = [self.least.log()] if bool(self.least.any()) else []
        if bool(self.step.any()):
            seen += [self.step.log(), circle.cos(), circle.sin()]
        return torch.stack(seen, dim=1) if seen else torch.empty(len(self.least), 0)


def losses(observation: Observation) -> Losses | None:
    """Of one client's update over η Σρ, as −∇b and −∇W are; None where it wasn't compressed.

    None too where a scheme adds gradients or pulls of its own, which were compressed with the samples'.
    """
    coarse, training = coarsening(observation), observation.training
    plain = observation.constant_gradient is None and not training.weight_decay and not training.prox
    if not plain or not coarse.even or not (coarse.least or coarse.step):
        return None
    phase = coarse.origin / coarse.step % 1.0 if coarse.step else 0.0
    scale = pace(training)
    values = np.array([[coarse.least / scale], [coarse.step / scale], [phase]], dtype=np.float32)
    least, step, phases = torch.from_numpy(values)
    return Losses(least, step, phases, coarse.apart)


def loss_range(found: Losses) -> LossRange:
    """Of all clients that share what is fitted with this one."""
    return LossRange(_around(float(found.least[0])), _around(float(found.step[0])), found.apart)


def rounding_noise(found: LossRange) -> float:
    """Standard deviation of what rounding to a grid in the middle of the range adds to a number."""
    return math.sqrt(found.step[0] * found.step[1] / 12)


def _log_uniform(ends: Range, count: int, rng: np.random.Generator) -> FloatArray:
    """So many numbers between both, 0 where there are none."""
    low, high = ends
    return np.exp(rng.uniform(math.log(low), math.log(high), count)) if high > 0 else np.zeros(count)


def _around(value: float) -> Range:
    if value == 0:
        return (0.0, 0.0)
    low = _RANGE ** math.floor(math.log(value, _RANGE))
    return (low, low * _RANGE)
