"""How a sparsified or quantised update was compressed, and the same done to another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlu_cli.audit.updates import is_trained
from rlu_cli.core.coarse import Coarsening, usual_share
from rlu_cli.core.types import Compression
from rlu_cli.files.checkpoint import Checkpoint

_ABOUT = 0.02
"""Of the numbers that each tensor's share makes it keep, by how much it may miss, beside one number."""

_MOST_LEVELS = 4096
"""Beyond, rounding is nothing, and levels are hard to count."""


def compression(local: Checkpoint, reference: Checkpoint, coarse: Coarsening) -> Compression | None:
    """How a client compressed its whole update, None where it did not, or no way that is known.

        K = share · P    largest of P numbers, of all of them or of each tensor's

    Where every tensor has the share of the largest one, or one number, they are taken to have been chosen
    tensor by tensor.
    Levels are counted from the smallest to the largest number sent.

    Parameters
    ----------
    local : the whole local model
    coarse : what its output layer shows
    """
    changes = [
        local.tensors[name].double() - before.double()
        for name, before in reference.tensors.items()
        if name in local.tensors and is_trained(name, before) and before.numel()
    ]
    share, by_tensor, levels = 1.0, coarse.apart > 0, 0
    if coarse.sparsified:
        kept, numbers = [int((c != 0).sum()) for c in changes], [c.numel() for c in changes]
        one = max((n, k / n) for k, n in zip(kept, numbers, strict=True))[1]  # of the largest
        each = by_tensor or (len(changes) > 1 and _is_share_of_each(one, kept, numbers))
        share, by_tensor = usual_share(one if each else sum(kept) / sum(numbers)), each
    if coarse.step and coarse.even:
        levels = coarse.apart or round(_extent(changes, sparsified=coarse.sparsified) / coarse.step) + 1
        levels = levels if levels <= _MOST_LEVELS else 0
    if share == 1 and not levels:
        return None
    return Compression(share, by_tensor, levels, coarse.signs and levels == 2)


def _is_share_of_each(share: float, kept: Sequence[int], numbers: Sequence[int]) -> bool:
    wanted = [max(1.0, share * n) for n in numbers]
    return all(abs(k - one) <= 1.0 + _ABOUT * one for k, one in zip(kept, wanted, strict=True))


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
    sent = torch.cat([value[kept] for value, kept in zip(values, there, strict=True)])
    if how.signs and len(sent):
        size = sent.abs().mean()
        values, step = [size * value.sign() for value in values], float(2 * size)
    elif how.levels > 1 and len(sent):
        low, high = torch.aminmax(sent)
        step = float((high - low) / (how.levels - 1))
    if step > 0 and not how.signs:
        values = [low + ((value - low) / step).round() * step for value in values]
    return [torch.where(kept, value, 0.0) for value, kept in zip(values, there, strict=True)], step


def _least(values: Sequence[Tensor], share: float) -> Tensor:
    """The size of the least number of that share of them that are largest."""
    sizes = torch.cat([value.abs().flatten() for value in values])
    keep = min(max(1, round(share * len(sizes))), len(sizes))
    return torch.kthvalue(sizes, len(sizes) - keep + 1).values
