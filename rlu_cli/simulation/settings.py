"""What a simulation is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlu_cli.audit.options import SimulationOptions, StepOptions
from rlu_cli.audit.training import MOST, PULLED
from rlu_cli.core.types import LocalTraining
from rlu_cli.core.variates import STATEFUL
from rlu_cli.errors import UsageError
from rlu_cli.simulation.defences import Defence


@dataclass(frozen=True)
class Simulation:
    """A complete description: the same one makes the same archive.

    data, arch, normalize : as on the command line
    training : how each client trains; epochs and dataset size are settled per client
    init : SHA-256 of the first global model's file, None for a fresh model
    """

    data: str
    arch: str
    normalize: str
    seed: int
    training: StepOptions
    options: SimulationOptions = field(default_factory=SimulationOptions)
    init: str | None = None

    def document(self) -> dict[str, Any]:
        """All values that shape the archive, but the number of rounds, which may grow."""
        values = asdict(self)
        values["options"].pop("rounds")
        return values


def training_annotations(
    simulation: Simulation, training: LocalTraining, size: int, participants: int
) -> dict[str, str]:
    """What the checkpoint of a client with ``size`` samples says of its training."""
    epochs, options = simulation.training.epochs, simulation.options
    rates = training.lr if isinstance(training.lr, tuple) else (training.lr,)
    adaptive = training.optimizer != "sgd"
    values: dict[str, object] = {
        "scheme": training.scheme,
        "optimizer": training.optimizer,
        "beta1": training.beta1 if adaptive else None,
        "beta2": training.beta2 if adaptive else None,
        "eps": training.eps if adaptive else None,
        "lr": ",".join(repr(rate) for rate in rates),
        "batch_size": training.batch_size,
        "steps": None if epochs is not None else training.steps,
        "epochs": epochs,
        "dataset_size": size if epochs is not None else None,
        "momentum": training.momentum or None,
        "dampening": training.dampening or None,
        "nesterov": "true" if training.nesterov else None,
        "weight_decay": training.weight_decay or None,
        "lambda": training.prox if training.scheme in PULLED else None,
        "participation": participants / options.clients if training.scheme in STATEFUL else None,
        "clip": options.clip,
        "noise_std": options.noise_std or None,
    }
    return {f"fl.{name}": str(value) for name, value in values.items() if value is not None}


def check_options(options: SimulationOptions) -> None:
    """Refuse values out of range.

    Raises
    ------
    UsageError
    """
    conditions = (
        ("clients", options.clients >= 1, "at least 1"),
        ("rounds", options.rounds >= 1, "at least 1"),
        ("alpha", 0 < options.alpha <= MOST, f"above 0 and up to {MOST:g}"),
        ("participation", 0 < options.participation <= 1, "in (0, 1]"),
        ("aux-per-class", options.aux_per_class >= 0, "at least 0"),
        ("test-size", options.test_size is None or options.test_size >= 1, "at least 1"),
        ("clip", options.clip is None or 0 < options.clip <= MOST, f"above 0 and up to {MOST:g}"),
        ("noise-std", 0 <= options.noise_std <= MOST, f"from 0 to {MOST:g}"),
        ("top-k", 0 < options.top_k <= 1, "in (0, 1]"),
        ("quantize", options.quantize is None or 1 <= options.quantize <= 16, "from 1 to 16"),
    )
    for name, good, expected in conditions:
        if not good:
            value = getattr(options, name.replace("-", "_"))
            raise UsageError(f"expected --{name} {expected}, found {value}")


def defence_of(options: SimulationOptions) -> Defence:
    """What clients do to their updates."""
    return Defence(options.clip, options.noise_std, options.top_k, options.quantize)
