"""How a sparsified or quantised update was compressed, and the same done to another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlu_cli.audit.updates import is_trained
from rlu_cli.core.coarse import Coarsening
from rlu_cli.core.types import Compression
from rlu_cli.files.checkpoint import Checkpoint

_SHARES = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
"""Times a power of ten: what shares are taken for, so that clients whose shares are alike have the same. The
usual ones are among them."""

_MOST_LEVELS = 4096
"""Beyond, rounding is nothing, and levels are hard to count."""


def compression(local: Checkpoint, reference: Checkpoint, coarse: Coarsening) -> Compression | None:
    """How a client compressed its whole update, None where it did not, or no way that is known.

        K = share · P    largest of P numbers, of all of them or of each tensor's

    Where every tensor has its share, to one number, they are taken to have been chosen tensor by tensor.
    Levels are counted from the smallest to the largest number sent.

    Parameters
    ----------
    local : the whole local model
    coarse : what its output layer shows
    """
    changes = [
        local.tensors[name].double() - before.double()
        for name, before in reference.tensors.items()
        if name in local.tensors and is_trained(name, before)
    ]
    share, by_tensor, levels = 1.0, coarse.apart > 0, 0
    if coarse.sparsified:
        kept, numbers = [int((c != 0).sum()) for c in changes], [c.numel() for c in changes]
        found = sum(kept) / sum(numbers)
        own = [abs(k - max(1.0, found * n)) <= 1.0 for k, n in zip(kept, numbers, strict=True)]
        share, by_tensor = _usual(found), by_tensor or (len(own) > 1 and all(own))
    if coarse.step and coarse.even:
        levels = coarse.apart or round(_extent(changes, sparsified=coarse.sparsified) / coarse.step) + 1
        levels = levels if levels <= _MOST_LEVELS else 0
    return Compression(share, by_tensor, levels) if share < 1 or levels else None


def _extent(changes: Sequence[Tensor], *, sparsified: bool) -> float:
    """From the smallest to the largest of the numbers sent."""
    ends = [torch.aminmax(c[c != 0] if sparsified else c) for c in changes if bool(c.any())]
    return max(float(end.max) for end in ends) - min(float(end.min) for end in ends)


def compressed(change: Mapping[str, Tensor], how: Compression) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A whole update after sparsification and quantisation, in that order, and the distance of its levels.

    Parameters
    ----------
    change : all tensors that training may move
    """
    together = [[name] for name in change] if how.by_tensor else [list(change)]
    found: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for names in together:
        left, step = _compressed([change[name] for name in names], how)
        found |= zip(names, left, strict=True)
        steps |= dict.fromkeys(names, step)
    return found, steps


def _compressed(values: list[Tensor], how: Compression) -> tuple[list[Tensor], float]:
    """Of numbers that are compressed together."""
    there = [torch.ones_like(value, dtype=torch.bool) for value in values]
    if how.share < 1:
        least = _least(values, how.share)
        there = [value.abs() >= least for value in values]
    step = 0.0
    if how.levels > 1:
        low, high = torch.aminmax(torch.cat([v[sent] for v, sent in zip(values, there, strict=True)]))
        step = float((high - low) / (how.levels - 1))
    if step > 0:
        values = [low + ((value - low) / step).round() * step for value in values]
    return [torch.where(sent, value, 0.0) for value, sent in zip(values, there, strict=True)], step


def _least(values: Sequence[Tensor], share: float) -> Tensor:
    """The size of the least number of that share of them that are largest."""
    sizes = torch.cat([value.abs().flatten() for value in values])
    keep = min(max(1, round(share * len(sizes))), len(sizes))
    return torch.kthvalue(sizes, len(sizes) - keep + 1).values


def _usual(share: float) -> float:
    """The nearest of the shares that there are, in logarithms."""
    decade = math.floor(math.log10(share))
    usual = [float(f"{step:g}e{decade}") for step in (*_SHARES, 10.0)]
    return min(1.0, min(usual, key=lambda known: abs(math.log(known / share))))
