"""What the user said, before files are asked; None stands for "not said"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelOptions:
    """How to rebuild the network and feed it images (the flags of the same names)."""

    arch: str | None = None
    head: str | None = None
    normalize: str | None = None
    image_size: str | None = None
    batch_norm: Literal["batch", "running"] = "batch"
    class_order: str | None = None


@dataclass(frozen=True)
class TrainingOptions:
    """How the client trained (the flags of the same names; ``lr`` may list one rate a step)."""

    lr: str | None = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: int | None = None
    dataset_size: int | None = None
    scheme: str | None = None
    lambda_: float | None = None
    optimizer: str | None = None
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class RunOptions:
    """How to compute."""

    device: str = "auto"
    seed: int = 0
    samples: int = 10_000
    search_iterations: int = 0
