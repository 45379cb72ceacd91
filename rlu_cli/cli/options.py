"""The flags that commands share, each written once.

A command takes whole groups of flags: `with_options` turns the fields of a dataclass into options of the
command and hands it a filled dataclass. What a flag means is said here; its type and default are the
field's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rlu_cli.audit.options import (
    AuxOptions,
    HistoryOptions,
    LogitsOptions,
    ModelOptions,
    RunOptions,
    SimulationOptions,
    StepOptions,
    TrainingOptions,
)

LARGEST_SEED = 2**63 - 1
"""What all random generators take."""


def show_version(value: bool) -> None:
    """``--version``."""
    if value:
        from rlu_cli import __version__

        typer.echo(f"rlu {__version__}")
        raise typer.Exit


@dataclass(frozen=True)
class OutputOptions:
    """Where to write, and how much to say."""

    output: str = "-"
    quiet: bool = False
    verbose: int = 0
    version: bool = False


_STEPS: dict[str, Any] = {
    "lr": typer.Option(metavar="RATE", help="Learning rate, or one for each step: 0.1,0.1,0.01."),
    "lr_decay": typer.Option(help="Factor that the learning rate shrinks by after each step."),
    "batch_size": typer.Option(min=1, metavar="N", help="Samples a step."),
    "steps": typer.Option(min=1, metavar="N", help="Local optimiser steps."),
    "epochs": typer.Option(min=1, metavar="N", help="Passes over the client's data, instead of --steps."),
    "scheme": typer.Option(help="fedavg, fedprox, scaffold, feddyn or feddc."),
    "lambda_": typer.Option("--lambda", help="Coefficient of FedProx, FedDyn, FedDC."),
    "optimizer": typer.Option(help="sgd, adam or adamw."),
    "beta1": typer.Option(help="As in torch.optim.Adam; 0.9 by default."),
    "beta2": typer.Option(help="As in torch.optim.Adam; 0.999 by default."),
    "eps": typer.Option(help="As in torch.optim.Adam; 1e-8 by default."),
    "momentum": typer.Option(help="As in torch.optim.SGD."),
    "dampening": typer.Option(help="As in torch.optim.SGD."),
    "nesterov": typer.Option("--nesterov/--no-nesterov", help="As in torch.optim.SGD."),
    "weight_decay": typer.Option(help="As in torch's optimiser of that name; AdamW's 0.01 must be said."),
}

_AUX_LOGITS = typer.Option(
    metavar="FILE",
    help="Logits of the global model on labelled samples (.npz), instead of --aux and --arch.",
)

_KEY: Any = typer.Option(
    metavar="NAME", help="Where the weights lie in nested checkpoints, such as state_dict_ema."
)

_HELP: dict[type, dict[str, Any]] = {
    ModelOptions: {
        "key": _KEY,
        "arch": typer.Option(
            metavar="SPEC",
            help="lenet5, vgg16, resnet32, resnet50 (keyword arguments after a colon: vgg16:activation=elu), "
            "torchvision:NAME, timm:NAME, package.module:factory or path/to/file.py:factory (runs it).",
        ),
        "head": typer.Option(metavar="NAME", help="Prefix of the output layer's tensors."),
        "normalize": typer.Option(
            metavar="SPEC",
            help="imagenet, cifar10, cifar100, svhn, tiny-imagenet, half, none or 'mean=…;std=…'.",
        ),
        "image_size": typer.Option(metavar="H[xW]", help="Size that images are resized to."),
        "batch_norm": typer.Option(
            help="Statistics of BatchNorm layers in aux passes: the batch's, as in training, which is the "
            "default, or the stored."
        ),
        "dropout": typer.Option(
            help="Whether dropout layers drop in aux passes; by default they do, as in training."
        ),
        "class_order": typer.Option(
            metavar="ORDER",
            help="How aux classes map to outputs: string, natural, dataset (a data set's label numbers) or a "
            "file with one name per line; by default the checkpoint's names, else string for folders.",
        ),
    },
    AuxOptions: {
        "aux_split": typer.Option(
            help="Which part of a data set that has both; by default test, which clients have not seen."
        ),
        "aux_per_class": typer.Option(
            min=1, metavar="K", help="Use at most K auxiliary images a class, drawn by --seed."
        ),
        "svhn_digit_zero": typer.Option(
            help="SVHN's digit 0 is the first class, as in torchvision (the default), or the last."
        ),
        "skip_bad": typer.Option(
            "--skip-bad", help="Leave out images that can't be decoded, with a warning."
        ),
        "exif": typer.Option(
            "--exif", help="Turn images as their EXIF orientation says, which training pipelines don't."
        ),
    },
    StepOptions: _STEPS,
    TrainingOptions: {
        **_STEPS,
        "lr": typer.Option(
            metavar="RATE",
            help="Learning rate, or one for each step: 0.1,0.1,0.01; auto estimates it from the update.",
        ),
        "dataset_size": typer.Option(min=1, metavar="N", help="Samples that the client has, with --epochs."),
        "update": typer.Option(
            help="Whether the local file holds weights or local − global.  [default: weights]"
        ),
        "noise_std": typer.Option(
            metavar="SIGMA", help="Standard deviation of the Gaussian noise on each value of the update."
        ),
        "clip": typer.Option(metavar="NORM", help="Largest L2 norm that the whole update was let have."),
    },
    LogitsOptions: {
        "aux_logits": _AUX_LOGITS,
        "local_logits": typer.Option(
            metavar="FILE",
            help="Logits of the local model on the same samples, for several steps; one for each --local.",
        ),
    },
    HistoryOptions: {
        "history": typer.Option(
            metavar="PATH",
            help="The client's earlier rounds, for scaffold, feddyn and feddc: a folder of round folders or "
            "an NDJSON manifest.",
        ),
        "server_control": typer.Option(metavar="FILE", help="Scaffold's archived server variate."),
        "client_control": typer.Option(metavar="FILE", help="Scaffold's archived client variate."),
        "round": typer.Option(min=1, metavar="N", help="Number of this round; 1 is the first."),
        "participation": typer.Option(help="Share of the clients that trained in each round."),
    },
    RunOptions: {
        "device": typer.Option(help="auto, cpu, cuda, cuda:N or mps."),
        "seed": typer.Option(
            min=0, max=LARGEST_SEED, metavar="N", help="Same seed and same inputs, same bytes out."
        ),
        "samples": typer.Option(min=2, metavar="M", help="Monte Carlo samples a class."),
        "search_iterations": typer.Option(
            min=0, metavar="T", help="Iterations of the paper's posterior search; 0 measured best."
        ),
        "cache": typer.Option(
            metavar="DIR",
            help="Keep models' statistics and methods' fits there, and use what is there already.",
        ),
    },
    SimulationOptions: {
        "clients": typer.Option(help="K, clients that the data are shared out to."),
        "alpha": typer.Option(help="Dirichlet concentration: the smaller, the fewer classes a client has."),
        "participation": typer.Option(help="Share of the clients that take part in each round."),
        "rounds": typer.Option(help="Rounds in all; an archive can be made longer later."),
        "averaging": typer.Option(help="Weigh clients by their data or equally (FedAvg and FedProx)."),
        "aux_per_class": typer.Option(help="Images of each class kept apart as auxiliary data."),
        "test_size": typer.Option(
            help="Images kept apart to measure the global model's accuracy; by default 1000, or a fifth of "
            "those beside the auxiliary ones where that is fewer."
        ),
        "clip": typer.Option(help="Defence: largest L2 norm of an update."),
        "noise_std": typer.Option(help="Defence: standard deviation of Gaussian noise on each value."),
        "top_k": typer.Option(help="Defence: share of the values that are sent, the largest ones."),
        "quantize": typer.Option(help="Defence: bits of uniform quantisation."),
    },
    OutputOptions: {
        "output": typer.Option("-o", "--output", metavar="FILE", help="Where to write; - is stdout."),
        "quiet": typer.Option("-q", "--quiet", help="No progress, tables or warnings on stderr."),
        "verbose": typer.Option(
            "-v", "--verbose", count=True, help="Tables on stderr in any case; -vv adds tracebacks."
        ),
        "version": typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=show_version
        ),
    },
}

GlobalPath = Annotated[
    Path, typer.Option("--global", metavar="FILE", help="Checkpoint that the server sent out.")
]
LocalPaths = Annotated[
    list[Path],
    typer.Option("--local", metavar="FILE", help="Checkpoint that a client sent back; may be repeated."),
]
AuxPath = Annotated[
    Path | None,
    typer.Option(
        "--aux",
        metavar="PATH",
        help="Labelled images: a folder with one sub-folder per class, or the official files of CIFAR, SVHN, "
        "Tiny-ImageNet, MNIST (IDX), or an .npz file.",
    ),
]
AuxLogitsPath = Annotated[Path | None, _AUX_LOGITS]
StatsPath = Annotated[
    Path | None,
    typer.Option("--stats", metavar="FILE", help="Statistics of the global model, by estimate-logits."),
]

CheckpointKey = Annotated[str | None, _KEY]


def with_options(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the fields of dataclasses to a command's flags.

    ``@with_options(model=ModelOptions)`` replaces the command's parameter ``model`` by one option per
    field of `ModelOptions` and passes it a filled `ModelOptions`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                parameters += _options(groups[name], _HELP[groups[name]])
            else:
                parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))

        def call(**values: Any) -> None:
            filled = {
                name: group(**{field.name: values.pop(field.name) for field in fields(group)})
                for name, group in groups.items()
            }
            command(**values, **filled)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def _options(group: type, described: Mapping[str, Any]) -> list[inspect.Parameter]:
    """One keyword parameter per field, annotated with its typer option."""
    types = get_type_hints(group)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[types[field.name], described[field.name]],
        )
        for field in fields(group)
    ]


def given(*groups: Any) -> list[str]:
    """The flags whose values in these filled dataclasses are not the defaults."""
    return [
        _flag(type(group), field.name)
        for group in groups
        for field in fields(group)
        if getattr(group, field.name) != field.default
    ]


def _flag(group: type, name: str) -> str:
    """How a field's flag is spelt."""
    option = _HELP[group][name]
    words = (option.default, *(option.param_decls or ()))  # typer takes the first word for a default
    declared = [word for word in words if isinstance(word, str) and word.startswith("--")]
    return declared[0].split("/")[0] if declared else "--" + name.replace("_", "-")
