"""Weight normalisation undone: magnitude and direction joined into the weight that the layer uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlu_cli.files.text import names

if TYPE_CHECKING:
    from torch import Tensor

_NEW = re.compile(r"(?P<layer>(?:.*\.)?)parametrizations\.(?P<name>weight\w*)\.original0\Z", re.DOTALL)
_OLD = re.compile(r"(?P<layer>(?:.*\.)?)(?P<name>weight\w*)_g\Z", re.DOTALL)


def _partner(key: str) -> tuple[str, str] | None:
    """The direction's name and the joined weight's, where ``key`` names a magnitude."""
    match = _NEW.match(key)
    if match is not None:
        return key.removesuffix("original0") + "original1", match["layer"] + match["name"]
    match = _OLD.match(key)
    if match is not None:
        return key.removesuffix("_g") + "_v", match["layer"] + match["name"]
    return None


def joined_name(key: str) -> str | None:
    """The weight that a magnitude or direction is a part of, None for other tensors."""
    magnitude = key
    for direction_end, magnitude_end in ((".original1", ".original0"), ("_v", "_g")):
        if key.endswith(direction_end):
            magnitude = key.removesuffix(direction_end) + magnitude_end
    pair = _partner(magnitude)
    return None if pair is None else pair[1]


def _join(magnitude: Tensor, direction: Tensor) -> Tensor | None:
    """``g · v / ‖v‖``, the norm over the dimensions that ``g`` lacks; None where the shapes don't fit."""
    import torch

    if not (magnitude.is_floating_point() and direction.is_floating_point()):
        return None
    if magnitude.ndim == direction.ndim and magnitude.ndim > 0:
        if tuple(magnitude.shape) == (direction.shape[0],) + (1,) * (direction.ndim - 1):
            if direction.dtype in (torch.float32, torch.float64) and magnitude.dtype == direction.dtype:
                joined: Tensor = torch._weight_norm(direction, magnitude, 0)
                return joined
        elif not all(g in (1, v) for g, v in zip(magnitude.shape, direction.shape, strict=True)):
            return None
        over = [dim for dim in range(direction.ndim) if magnitude.shape[dim] == 1]
    elif magnitude.ndim == 0 and direction.ndim > 0:
        over = list(range(direction.ndim))
    else:
        return None
    wide = direction.to(torch.float64)
    norm = torch.linalg.vector_norm(wide, dim=over, keepdim=True)
    result: Tensor = (wide * (magnitude.to(torch.float64) / norm)).to(direction.dtype)
    return result


def join_weight_norm(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """``X.parametrizations.weight.original0/1`` and ``X.weight_g/_v`` as ``X.weight``, in place; and notes.

    Don't call this on a difference of checkpoints: join each, then subtract.
    """
    replacement: dict[str, tuple[str, Tensor]] = {}
    gone: set[str] = set()
    for key, tensor in tensors.items():
        pair = _partner(key)
        if pair is None or pair[0] not in tensors or pair[1] in tensors:
            continue
        joined = _join(tensor, tensors[pair[0]])
        if joined is not None:
            replacement[key] = (pair[1], joined)
            gone.add(pair[0])
    result: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key in replacement:
            name, joined = replacement[key]
            result[name] = joined
        elif key not in gone:
            result[key] = tensor
    joined_names = [name for name, _ in replacement.values()]
    return result, [f"weight norm joined into {names(joined_names)}"] if joined_names else []
