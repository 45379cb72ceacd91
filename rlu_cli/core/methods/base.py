"""What a recovery method is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlu_cli.core.types import Estimate, FloatArray, LocalTraining, Observation


@dataclass(frozen=True)
class Problem:
    """The observation, reduced to what all methods share.

    u : (Δb + h) / (η Σ_τ ρ^τ), shape (N,): on average A z
    """

    observation: Observation
    u: FloatArray


@dataclass(frozen=True)
class Method:
    """A named way from an update to label proportions.

    solve : the method itself
    needs_end : whether it wants the local model's statistics, given how the client trained
    reference : where it comes from
    """

    name: str
    summary: str
    reference: str
    solve: Callable[[Problem], Estimate]
    needs_end: Callable[[LocalTraining], bool]
