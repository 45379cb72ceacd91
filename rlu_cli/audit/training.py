"""The client's training values, from whoever says them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rlu_cli.audit.annotations import Annotations, boolean, number, numbers, text, whole
from rlu_cli.audit.options import TrainingOptions
from rlu_cli.core.rate_likelihood import scaled
from rlu_cli.core.schemes import MOST_STEPS, SCHEMES, check_training, step_rates
from rlu_cli.core.types import LocalTraining
from rlu_cli.core.variates import STATEFUL
from rlu_cli.errors import MismatchError, UsageError

ESTIMATED = "auto"
"""What ``--lr`` says where nobody knows the rate."""

_TINY = 1e-6
"""A factor of an unknown rate with which the other values can be checked."""

_PULLED = 0.01
"""How far proximal pulls and weight decay may take a model back while its rate is unknown."""

MOST = 1e30
"""Noise and clipping norms that arithmetic can take."""

PULLED = ("fedprox", "feddyn", "feddc")
"""Schemes with a coefficient, which must be said."""

_HARMLESS = "1e-9"
"""A learning rate that no other value is too large for."""


@dataclass(frozen=True)
class TrainingRecord:
    """Training values ready for the core, and for the report.

    values : as the JSON shows them
    sources : where each came from: flag, local, global, sidecar, default or estimated
    lr_unknown : whether the rates are right up to a factor only, which is to be estimated
    noise_std : standard deviation of the Gaussian noise on each parameter's update
    clip : largest norm that the whole update was let have, None where there was no bound
    """

    training: LocalTraining
    values: dict[str, Any]
    sources: dict[str, str]
    lr_unknown: bool = False
    noise_std: float = 0.0
    clip: float | None = None

    def with_rates(self, training: LocalTraining) -> TrainingRecord:
        """The same with the rates that were found."""
        return replace(self, training=training, values={**self.values, "lr": _shown(training.lr)})


def resolve_training(
    options: TrainingOptions, annotations: Annotations, *, may_estimate: bool = False
) -> TrainingRecord:
    """The training values: see `_resolve`. What is out of range in files alone is no usage error.

    Parameters
    ----------
    may_estimate : whether ``--lr auto`` is allowed: the record then has rates that are right up to a factor

    Raises
    ------
    MismatchError
        Values that are needed and nobody says, that contradict each other, or that files have out of range.
    UsageError
        Flags out of range.
    """
    try:
        return _resolve(options, annotations, may_estimate=may_estimate)
    except UsageError as error:
        if _at_fault(options, may_estimate=may_estimate):
            raise
        raise MismatchError(
            f"{error}. The checkpoints' metadata or a file beside them say so: pass the right value as a flag"
        ) from None


def _at_fault(options: TrainingOptions, *, may_estimate: bool) -> bool:
    """Whether the flags are out of range by themselves, where nothing else could be wrong."""
    alone = replace(
        options,
        lr=options.lr or _HARMLESS,
        batch_size=1 if options.batch_size is None else options.batch_size,
        steps=1 if options.steps is None and options.epochs is None else options.steps,
        lambda_=0.0 if options.lambda_ is None else options.lambda_,
    )
    try:
        _resolve(alone, Annotations(), may_estimate=may_estimate)
    except UsageError:
        return True
    except MismatchError:
        pass
    return False


def _resolve(options: TrainingOptions, annotations: Annotations, *, may_estimate: bool) -> TrainingRecord:
    """Collect the training values, and name at once everything that is missing.

    ``steps`` counts optimiser steps; ``epochs`` with ``dataset_size`` n means epochs·⌈n/B⌉ of them, over
    epochs·n samples.

    Raises
    ------
    MismatchError
        Values that are needed and nobody says, or that contradict each other.
    UsageError
        Values out of range.
    """
    get = annotations.get
    unknown = may_estimate and options.lr is not None and options.lr.strip() == ESTIMATED
    lr: tuple[float, ...] | None = (1.0,) if unknown else get("lr", options.lr, numbers)
    batch_size = get("batch_size", options.batch_size, whole)
    steps = get("steps", options.steps, whole)
    epochs = get("epochs", options.epochs, whole)
    dataset_size = get("dataset_size", options.dataset_size, whole)
    scheme = (get("scheme", options.scheme, text) or "fedavg").lower()
    optimizer = (get("optimizer", options.optimizer, text) or "sgd").lower()
    pull = get("lambda", options.lambda_, number)
    if options.steps is not None and options.epochs is None:
        epochs = None  # the flag outranks what a file says of epochs
    if options.epochs is not None and options.steps is None:
        steps = None
        annotations.sources.pop("steps", None)
    _refuse_ignored(options, steps, epochs, dataset_size)
    counted = steps is not None or (epochs is not None and dataset_size is not None)
    missing = [
        what
        for what, absent in (
            ("lr (--lr; auto estimates it)" if may_estimate else "lr (--lr)", lr is None),
            ("batch size (--batch-size)", batch_size is None),
            ("steps (--steps, or --epochs with --dataset-size)", not counted),
            ("lambda (--lambda)", scheme in PULLED and pull is None),
        )
        if absent
    ]
    if missing:
        raise MismatchError(
            f"missing training values: {'; '.join(missing)}. Neither the command line, nor the checkpoints' "
            "metadata, nor a round.json beside the local checkpoint says them: pass the flags named"
        )
    assert lr is not None and batch_size is not None
    if scheme not in SCHEMES:
        raise UsageError(f"expected a scheme among {', '.join(SCHEMES)}, found {scheme!r}: correct --scheme")
    if unknown and scheme in STATEFUL:
        raise UsageError(
            f"expected a learning rate for {scheme}, whose earlier rounds need it, found --lr {ESTIMATED}: "
            "say the rate"
        )
    if batch_size < 1:
        raise UsageError(f"expected a batch size of at least 1, found {batch_size}")
    if dataset_size is not None and dataset_size < 1:
        raise UsageError(f"expected a data set of at least one sample, found {dataset_size}")
    steps, total = _steps_and_total(steps, epochs, dataset_size, batch_size)
    if steps > MOST_STEPS:
        raise UsageError(f"expected at most {MOST_STEPS} steps, found {steps}: correct --steps or --epochs")
    training = LocalTraining(
        steps=steps,
        batch_size=batch_size,
        lr=_rates(lr, get("lr_decay", options.lr_decay, number), steps),
        total=total,
        distinct=dataset_size,
        momentum=get("momentum", options.momentum, number) or 0.0,
        dampening=get("dampening", options.dampening, number) or 0.0,
        nesterov=bool(get("nesterov", options.nesterov, boolean)),
        weight_decay=get("weight_decay", options.weight_decay, number) or 0.0,
        prox=(pull or 0.0) if scheme in PULLED else 0.0,
        scheme=scheme,
        optimizer=optimizer,
        **_adam_values(options, annotations, optimizer),
    )
    if unknown:
        training = _hardly_pulled(training)
    check_training(scaled(training, _TINY) if unknown else training)
    noise_std = get("noise_std", options.noise_std, number) or 0.0
    clip = get("clip", options.clip, number)
    if not 0 <= noise_std <= MOST:
        raise UsageError(f"expected a noise from 0 to {MOST:g}, found {noise_std}: correct --noise-std")
    if clip is not None and not 0 < clip <= MOST:
        raise UsageError(f"expected a clipping norm above 0 and up to {MOST:g}, found {clip}: correct --clip")
    values: dict[str, Any] = {
        "scheme": scheme,
        "optimizer": optimizer,
        "lr": _shown(training.lr),
        "batch_size": batch_size,
        "steps": steps,
        "epochs": epochs,
        "dataset_size": dataset_size,
        "momentum": training.momentum,
        "dampening": training.dampening,
        "nesterov": training.nesterov,
        "weight_decay": training.weight_decay,
        "lambda": pull if scheme in PULLED else None,
        "beta1": None if optimizer == "sgd" else training.beta1,
        "beta2": None if optimizer == "sgd" else training.beta2,
        "eps": None if optimizer == "sgd" else training.eps,
        "noise_std": noise_std,
        "clip": clip,
    }
    sources = {name: annotations.sources.get(name, "default") for name in values if values[name] is not None}
    if steps is not None and "steps" not in annotations.sources:
        sources["steps"] = annotations.sources["epochs"]
    if unknown:
        sources["lr"] = "estimated"
    return TrainingRecord(training, values, sources, unknown, noise_std, clip)


def _hardly_pulled(training: LocalTraining) -> LocalTraining:
    """With unknown rates that are small enough for pulls to do little, whatever they are in truth.

    What is looked at before the rate is found must not hang on them: at a rate of 1 a pull of 2 would turn
    every second step round.
    """
    pulled = (training.prox + training.weight_decay) * float(step_rates(training).sum())
    return scaled(training, _PULLED / pulled) if pulled > _PULLED else training


def _shown(lr: float | tuple[float, ...]) -> float | list[float]:
    return list(lr) if isinstance(lr, tuple) else lr


def _adam_values(options: TrainingOptions, annotations: Annotations, optimizer: str) -> dict[str, float]:
    """Adam's own values, where anybody says them.

    Raises
    ------
    UsageError
        Flags of Adam's with another optimiser.
    """
    flags = {"beta1": options.beta1, "beta2": options.beta2, "eps": options.eps}
    if optimizer == "sgd":
        given = [f"--{name}" for name, value in flags.items() if value is not None]
        if given:
            raise UsageError(
                f"expected {', '.join(given)} with --optimizer adam or adamw alone, found sgd: pass it, or "
                "leave them out"
            )
        return {}
    found = {name: annotations.get(name, value, number) for name, value in flags.items()}
    return {name: value for name, value in found.items() if value is not None}


def _refuse_ignored(
    options: TrainingOptions, steps: int | None, epochs: int | None, dataset_size: int | None
) -> None:
    """Refuse flags that say nothing, since steps are given and only half of epochs and data set size.

    Raises
    ------
    UsageError
    """
    if steps is None:
        return
    if options.dataset_size is not None and epochs is None:
        raise UsageError(
            "expected --epochs with --dataset-size, which says how long an epoch is, found steps alone: pass "
            "--epochs too, or leave --dataset-size out"
        )
    if options.epochs is not None and dataset_size is None:
        raise UsageError(
            "expected --dataset-size with --epochs, found steps instead: pass it too, or leave --epochs out"
        )


def _rates(lr: tuple[float, ...], decay: float | None, steps: int) -> float | tuple[float, ...]:
    """η_τ of every step: as listed, or η·decay^(τ−1)."""
    if decay is not None and decay != 1.0:
        if len(lr) != 1 or not 0 < decay <= 1:
            raise UsageError(
                f"expected a decay in (0, 1] of a single learning rate, found {decay} of {len(lr)}: correct "
                "--lr-decay or --lr"
            )
        return tuple(lr[0] * decay**step for step in range(steps))
    whole_list = len(lr) in (1, steps)  # one of another length is refused, even if its rates are equal
    return lr[0] if whole_list and len(set(lr)) == 1 else lr


def _steps_and_total(
    steps: int | None, epochs: int | None, dataset_size: int | None, batch_size: int
) -> tuple[int, int]:
    """Steps, and the samples they see."""
    if epochs is None or dataset_size is None:
        assert steps is not None
        return steps, steps * batch_size
    if epochs < 1:
        raise UsageError(f"expected at least one epoch, found {epochs}")
    implied = epochs * math.ceil(dataset_size / batch_size)
    if steps is None or steps == implied:
        return implied, epochs * dataset_size
    if steps == epochs * (dataset_size // batch_size):  # a loader that drops the last, smaller batch
        return steps, steps * batch_size
    raise MismatchError(
        f"expected {implied} steps for {epochs} epochs of {dataset_size} samples in batches of {batch_size}, "
        f"found {steps}: correct --steps, or leave it out"
    )
