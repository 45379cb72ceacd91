"""What compression took from the output layer's update, and from those of made-up clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlu_cli.core.coarse import coarsening, usual_share
from rlu_cli.core.schemes import pace
from rlu_cli.core.types import FloatArray, Observation

_RANGE = 16.0
"""Clients share what is fitted whose least sizes sent, and steps, lie between the same powers of this."""

_ON_ZERO = 0.02
"""Of a step, how far beside 0 a grid may pass it whose zeros are its own."""

_NEARLY_ALL = 0.85
"""Share of signs that are not 0 by chance."""

Range = tuple[float, float]


@dataclass(frozen=True)
class LossKind:
    """What all clients that share what is fitted have in common of their compression.

    apart : how many levels a grid of the bias alone has, from its smallest to its largest value; 0 for that
        of the weight
    signs : share of the numbers whose signs were sent, with a mean size, the largest; 0 where no signs were
    levels : how many values the grid has from the smallest to the largest number of the output layer, or of
        its weight where the bias has another; 0 where it doesn't end there, or that isn't known
    """

    apart: int = 0
    signs: float = 0.0
    levels: int = 0


@dataclass(frozen=True)
class LossRange:
    """Compression of made-up clients, each by values of its own, log-uniform between these bounds.

    least : of the smallest size that is sent, (0, 0) where it isn't sizes that decide
    step : of the distance of the grid's values, (0, 0) for none and where it follows from each client's own
    """

    least: Range
    step: Range
    kind: LossKind = LossKind()

    @property
    def rounded(self) -> bool:
        """Whether there is a grid."""
        return self.step[1] > 0 or self.kind.levels > 0

    @property
    def width(self) -> int:
        """How many numbers `Losses.features` are."""
        return (self.least[1] > 0) + 3 * self.rounded

    @property
    def logarithms(self) -> int:
        """How many of them, the first ones, are logarithms of sizes."""
        return (self.least[1] > 0) + self.rounded

    def steps(self, features: Tensor) -> FloatArray:
        """Distance of the grid's values, of clients whose features end in `Losses.features`, shape (S,)."""
        return np.asarray(np.exp(features[:, -3].double().numpy()))

    def bias_steps(self, bias: FloatArray, features: Tensor) -> FloatArray:
        """The same of the bias's own grid, where it has one; ``bias`` of shape (S, N)."""
        apart = self.kind.apart
        if not apart:
            return self.steps(features)
        sent = torch.from_numpy(bias)
        return np.asarray(_grid(sent, sent != 0, apart)[1].numpy())

    def draw(self, clients: int, rng: np.random.Generator) -> Losses:
        """One a client; the grid passes 0 anywhere between two values, and has no step yet that follows from
        the client's own (`Losses.spanning`).
        """
        drawn = [_log_uniform(ends, clients, rng) for ends in (self.least, self.step)]
        drawn.append(np.full(clients, 0.5) if self.kind.signs else rng.random(clients))
        least, step, phase = (torch.from_numpy(values.astype(np.float32)) for values in drawn)
        return Losses(least, step, phase, self.kind)


@dataclass(frozen=True)
class Losses:
    """Compression of the updates of S clients, each array of shape (S,).

    least : the smallest size of a number that is sent, before it is rounded, others being 0; 0 where it
        isn't sizes that decide
    step : distance of the grid's values, 0 for none; of signs twice their size
    phase : where the grid passes 0, in steps
    seen : whether ``least`` is the size as it was sent, and not before it was rounded
    """

    least: Tensor
    step: Tensor
    phase: Tensor
    kind: LossKind = LossKind()
    seen: bool = False

    def of_bias(self, values: Tensor) -> Tensor:
        """What is left of the clients' bias updates, shape (S, N)."""
        if not self.kind.apart:
            return self.of(values)
        sent = self._sent(values)
        if self.kind.signs:
            sizes = (values.abs() * sent).sum(dim=1, keepdim=True) / sent.sum(dim=1, keepdim=True).clamp(
                min=1
            )
            return torch.where(sent, sizes * values.sign(), 0.0)
        low, step = (part[:, None] for part in _grid(values, sent, self.kind.apart))
        return torch.where(sent, low + ((values - low) / step).round() * step, 0.0)

    def of(self, values: Tensor) -> Tensor:
        """What is left of the clients' numbers, shape (S, …)."""
        sent = self._sent(values)
        if bool(self.step.any()):
            step, phase = _beside(self.step, values), _beside(self.phase, values)
            places = (values / step - phase).round()
            values = values.sign() * step / 2 if self.kind.signs else (phase + places) * step
        return torch.where(sent, values, 0.0)

    def _sent(self, values: Tensor) -> Tensor:
        """Which numbers are."""
        least = self.least
        if self.kind.signs:
            sizes = values.abs().flatten(1)
            count = max(1, round(self.kind.signs * sizes.shape[1]))
            least = sizes.kthvalue(sizes.shape[1] - count + 1, dim=1).values
        return values.abs() >= _beside(least, values)

    def reaching(self, largest: Tensor) -> Losses:
        """The same, but that each client sends its largest number at least, as the real one did."""
        return replace(self, least=torch.minimum(self.least, largest))

    def spanning(self, values: Tensor) -> Losses:
        """The same, on the grid from each client's own smallest to its largest number, where theirs are such.

        Parameters
        ----------
        values : all that lie on one grid of the clients' updates, shape (S, K)
        """
        if not self.kind.levels:
            return self
        low, step = _grid(values, self._sent(values), self.kind.levels)
        return replace(self, step=step, phase=low / step % 1.0)

    @property
    def smallest(self) -> Tensor:
        """The smallest size of a number that was sent, as it is seen, shape (S,)."""
        if self.seen or not bool(self.step.any()):
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
    if not plain or not coarse.even or not (coarse.least or coarse.step):
        return None
    on_zero = bool(coarse.step) and abs(coarse.least - coarse.step) < _ON_ZERO * coarse.step
    by_size = not (coarse.signs or on_zero)  # the grid's own zeros are no others
    phase = coarse.origin / coarse.step % 1.0 if coarse.step else 0.0
    scale = pace(training)
    least, step = coarse.least / scale if by_size else 0.0, coarse.step / scale
    sent = 1 - coarse.zeros  # a few are 0 by themselves
    signs = (1.0 if sent > _NEARLY_ALL else usual_share(sent)) if coarse.signs else 0.0
    levels = coarse.reach if coarse.apart or coarse.reach == observation.levels else 0
    kind = LossKind(coarse.apart, signs, 0 if coarse.signs else levels)
    return Losses(torch.tensor([least]), torch.tensor([step]), torch.tensor([phase]), kind, seen=True)


def loss_range(found: Losses) -> LossRange:
    """Of all clients that share what is fitted with this one."""
    step = (0.0, 0.0) if found.kind.levels else _around(float(found.step[0]))
    return LossRange(_around(float(found.least[0])), step, found.kind)


def _grid(values: Tensor, sent: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The smallest of the numbers that are sent, and the step to the largest by so many levels, each (S,)."""
    low = values.where(sent, torch.inf).amin(dim=1)
    high = values.where(sent, -torch.inf).amax(dim=1)
    wide = high > low  # or there is one number, or none
    return torch.where(sent.any(dim=1), low, 0.0), torch.where(wide, (high - low) / (levels - 1), 1.0)


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
