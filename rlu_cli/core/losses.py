"""What compression took from the output layer's update, and from those of made-up clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
class LossKind:
    """What all clients that share what is fitted have in common of their compression.

    apart : how many levels a grid of the bias alone has, from its smallest to its largest value; 0 for that
        of the weight
    signs : whether signs were sent, and their mean size
    masked : whether the numbers sent were chosen at random
    kept : share of the numbers that were sent, where they were, or their signs; else 1
    """

    apart: int = 0
    signs: bool = False
    masked: bool = False
    kept: float = 1.0


@dataclass(frozen=True)
class LossRange:
    """Compression of made-up clients, each by values of its own, log-uniform between these bounds.

    least : of the smallest size that is sent, (0, 0) where it isn't sizes that decide
    step : of the distance of the grid's values, (0, 0) for none
    """

    least: Range
    step: Range
    kind: LossKind = LossKind()

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
        masks = torch.Generator().manual_seed(int(rng.integers(2**63))) if self.kind.masked else None
        return Losses(least, step, phase, self.kind, masks)


@dataclass(frozen=True)
class Losses:
    """Compression of the updates of S clients, each array of shape (S,).

    least : the smallest size of a number that is sent, before it is rounded, others being 0; 0 where it
        isn't sizes that decide
    step : distance of the grid's values, 0 for none
    phase : where the grid passes 0, in steps
    masks : what chooses numbers at random
    """

    least: Tensor
    step: Tensor
    phase: Tensor
    kind: LossKind = LossKind()
    masks: torch.Generator | None = None

    def of_bias(self, values: Tensor) -> Tensor:
        """What is left of the clients' bias updates, shape (S, N)."""
        if not self.kind.apart or self.kind.signs:
            return self.of(values)
        low, high = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
        step = ((high - low) / (self.kind.apart - 1)).clamp(min=torch.finfo(values.dtype).tiny)
        return torch.where(self._sent(values), low + ((values - low) / step).round() * step, 0.0)

    def of(self, values: Tensor) -> Tensor:
        """What is left of the clients' numbers, shape (S, …)."""
        sent = self._sent(values)
        if self.kind.signs:
            sizes = (values.abs() * sent).flatten(1).sum(dim=1) / sent.flatten(1).sum(dim=1).clamp(min=1)
            values = _beside(sizes, values) * values.sign()
        elif bool(self.step.any()):
            step, phase = _beside(self.step, values), _beside(self.phase, values)
            values = (phase + (values / step - phase).round()) * step
        return torch.where(sent, values, 0.0)

    def _sent(self, values: Tensor) -> Tensor:
        """Which numbers are."""
        if self.kind.masked:
            return torch.rand(values.shape, generator=self.masks) < self.kind.kept
        least = self.least
        if self.kind.signs:
            sizes = values.abs().flatten(1)
            count = max(1, round(self.kind.kept * sizes.shape[1]))
            least = sizes.kthvalue(sizes.shape[1] - count + 1, dim=1).values
        return values.abs() >= _beside(least, values)

    def reaching(self, largest: Tensor) -> Losses:
        """The same, but that each client sends its largest number at least, as the real one did."""
        return replace(self, least=torch.minimum(self.least, largest))

    @property
    def smallest(self) -> Tensor:
        """The smallest size of a number that was sent, as it is seen, shape (S,)."""
        if not bool(self.step.any()):
            return self.least
        below, above = (
            ((self.phase + (size / self.step - self.phase).round()) * self.step).abs()
            for size in (-self.least, self.least)
        )
        near = torch.minimum(below, above)
        return torch.where(near > 1e-3 * self.step, near, self.step)  # what is rounded to 0 isn't seen

    def features(self) -> Tensor:
        """What is seen of it, shape (S, `LossRange.width`)."""
        circle = 2 * math.pi * self.phase
        seen = [self.smallest.log()] if bool(self.least.any()) else []
        if bool(self.step.any()):
            seen += [self.step.log(), circle.cos(), circle.sin()]
        return torch.stack(seen, dim=1) if seen else torch.empty(len(self.least), 0)


def losses(observation: Observation) -> Losses | None:
    """Of one client's update over η Σρ, as −∇b and −∇W are; None where it wasn't compressed.

    None too where a scheme adds gradients or pulls of its own, which were compressed with the samples', and
    where it was rounded to values at any distance.
    """
    coarse, training = coarsening(observation), observation.training
    pulled = training.prox > 0 and training.steps > 1
    plain = observation.constant_gradient is None and not training.weight_decay and not pulled
    if not plain or not coarse.even or not (coarse.sparsified or coarse.step):
        return None
    on_zero = bool(coarse.step) and abs(coarse.least - coarse.step) < 0.1 * coarse.step
    chosen = coarse.masked or coarse.signs or on_zero  # the grid's own zeros are no others
    kept = float(f"{1 - coarse.zeros:.2g}") if coarse.masked or coarse.signs else 1.0
    phase = coarse.origin / coarse.step % 1.0 if coarse.step else 0.0
    least, scale = 0.0 if chosen else coarse.least, pace(training)
    kind = LossKind(coarse.apart, coarse.signs, coarse.masked, kept)
    return Losses(
        torch.tensor([least / scale]), torch.tensor([coarse.step / scale]), torch.tensor([phase]), kind
    )


def loss_range(found: Losses) -> LossRange:
    """Of all clients that share what is fitted with this one."""
    return LossRange(_around(float(found.least[0])), _around(float(found.step[0])), found.kind)


def rounding_noise(found: LossRange) -> float:
    """Standard deviation of what rounding to a grid in the middle of the range adds to a number."""
    return math.sqrt(found.step[0] * found.step[1] / 12)


def _beside(numbers: Tensor, values: Tensor) -> Tensor:
    """Of each client, shape (S, 1, …) beside values of shape (S, …)."""
    return numbers.view(-1, *[1] * (values.ndim - 1))


def _log_uniform(ends: Range, count: int, rng: np.random.Generator) -> FloatArray:
    """So many numbers between both, 0 where there are none."""
    low, high = ends
    return np.exp(rng.uniform(math.log(low), math.log(high), count)) if high > 0 else np.zeros(count)


def _around(value: float) -> Range:
    if value == 0:
        return (0.0, 0.0)
    low = _RANGE ** math.floor(math.log(value, _RANGE))
    return (low, low * _RANGE)
