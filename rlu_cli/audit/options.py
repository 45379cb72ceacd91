"""What the user said, before files are asked; None stands for "not said"."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Update = Literal["weights", "delta"]
"""What a local file holds: the weights after training, or what training added to the global ones."""


@dataclass(frozen=True)
class ModelOptions:
    """How to rebuild the network and feed it images (the flags of the same names)."""

    key: str | None = None
    arch: str | None = None
    head: str | None = None
    normalize: str | None = None
    image_size: str | None = None
    batch_norm: Literal["batch", "running"] | None = None
    dropout: Literal["off", "on"] | None = None
    class_order: str | None = None


@dataclass(frozen=True)
class AuxOptions:
    """Which of the auxiliary images are read, and how (the flags of the same names)."""

    aux_split: Literal["train", "test"] | None = None
    aux_per_class: int | None = None
    svhn_digit_zero: Literal["first", "last"] | None = None
    skip_bad: bool = False
    exif: bool = False


@dataclass(frozen=True)
class LogitsOptions:
    """Logits computed elsewhere, instead of images and an architecture (the flags of the same names)."""

    aux_logits: Path | None = None
    local_logits: list[Path] | None = None


@dataclass(frozen=True)
class StepOptions:
    """How a client trains (the flags of the same names; ``lr`` may list one rate a step)."""

    lr: str | None = None
    lr_decay: float | None = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: int | None = None
    scheme: str | None = None
    lambda_: float | None = None
    optimizer: str | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class TrainingOptions(StepOptions):
    """How a client trained that is audited, and what its file holds of that."""

    dataset_size: int | None = None
    update: Update | None = None
    noise_std: float | None = None
    clip: float | None = None


@dataclass(frozen=True)
class HistoryOptions:
    """What is archived of earlier rounds (Scaffold, FedDyn, FedDC)."""

    history: list[Path] | None = None
    server_control: Path | None = None
    client_control: Path | None = None
    round: int | None = None
    participation: float | None = None


@dataclass(frozen=True)
class SimulationOptions:
    """Who trains on what, for how long (the flags of the same names)."""

    clients: int = 10
    alpha: float = 0.5
    participation: float = 1.0
    rounds: int = 10
    averaging: Literal["size", "uniform"] = "size"
    aux_per_class: int = 100
    test_size: int | None = None
    clip: float | None = None
    noise_std: float = 0.0
    top_k: float = 1.0
    quantize: int | None = None


@dataclass(frozen=True)
class RunOptions:
    """How to compute."""

    device: str = "auto"
    seed: int = 0
    samples: int = 10_000
    search_iterations: int = 0
    cache: Path | None = None
