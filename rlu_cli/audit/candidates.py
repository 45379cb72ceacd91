"""Which layer may be the output layer, by the names and shapes of a checkpoint's tensors alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_HEAD_WORDS = ("fc", "head", "classifier", "linear", "output", "out", "logits", "last")


def head_candidates(tensors: Mapping[str, Tensor]) -> list[str]:
    """Layers that may be the output layer, by name and shape alone, the likeliest first.

    A candidate has a matrix or 1x1 convolution as weight, and a bias of one number a row or none. A name
    that output layers usually have comes first, then the later layer in natural order of names.
    """
    found = []
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")  # a linear layer saved alone has no name: weight, bias
        if part != "weight" or tensor.ndim not in (2, 4) or any(side != 1 for side in tensor.shape[2:]):
            continue
        bias = tensors.get(f"{layer}.bias" if layer else "bias")
        if bias is None or bias.shape == tensor.shape[:1]:
            found.append(layer)
    return sorted(found, key=_likelihood, reverse=True)


def _likelihood(layer: str) -> tuple[bool, list[tuple[int, str]]]:
    words = re.split(r"[._]", re.sub(r"\d+", "", layer.lower()))
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", layer)]
    return words[-1] in _HEAD_WORDS or words[0] in _HEAD_WORDS, numbers
