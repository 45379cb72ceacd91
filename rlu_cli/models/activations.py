"""The activations an architecture can be built with, by name.

The paper trains each network with several of them: the sign of the embedding, which depends on the
activation, decides which label-recovery methods work at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from rlu_cli.errors import UsageError

ACTIVATIONS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "relu": nn.ReLU,
        "leaky_relu": nn.LeakyReLU,
        "tanh": nn.Tanh,
        "elu": nn.ELU,
        "selu": nn.SELU,
        "silu": nn.SiLU,
    }
)
"""Canonical name to module class; each is built with PyTorch's default arguments."""

_BY_FOLDED_NAME = {name.replace("_", ""): name for name in ACTIVATIONS}


def make_activation(name: str) -> nn.Module:
    """A new activation module; case, ``-`` and ``_`` in ``name`` don't matter."""
    folded = str(name).lower().replace("-", "").replace("_", "")
    if folded not in _BY_FOLDED_NAME:
        raise UsageError(f"Unknown activation {name!r}: choose one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[_BY_FOLDED_NAME[folded]]()
