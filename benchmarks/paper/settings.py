"""The paper's settings, the data that stand in for its data sets, and how much is run.

Source: the paper's section 4.1 and its appendix "Experimental Settings". Its "local epochs" m are steps of
one batch each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.rounds import Pretraining, Round
from rlu_cli.audit.options import SimulationOptions, StepOptions
from rlu_cli.core.methods import METHODS
from rlu_cli.images.datasets.recognise import Kind

AUX_PER_CLASS = 100
CLIENTS = 10
STEPS = (1, 10)
UNTRAINED_LR = 0.01

_OWN = ("regression", "replay", "surrogate")
"""Methods of ours that are no part of the comparison: of several steps the first says what `gls` says; the
others replay training 100 times and more."""


@dataclass(frozen=True)
class Dataset:
    """One of the paper's data sets with all that it fixes, and its stand-in.

    lr : η of Table 4 and the figures; Table 2 and 3 have 0.01 throughout
    official, classes : what its own files are
    stand_in : a name of `benchmarks.data.images`
    """

    name: str
    model: str
    activations: tuple[str, str]
    batch_size: int
    alpha: float
    lr: float
    normalize: str
    stand_in: str
    stand_in_label: str
    stand_in_normalize: str
    official: Kind
    classes: int


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "SVHN",
            "lenet5",
            ("relu", "tanh"),
            32,
            0.5,
            0.01,
            "svhn",
            "fashion-mnist-32-2000",
            "Fashion-MNIST",
            "mean=0.286;std=0.353",
            Kind.SVHN,
            10,
        ),
        Dataset(
            "CIFAR-10",
            "vgg16",
            ("relu", "elu"),
            64,
            0.5,
            0.05,
            "cifar10",
            "fashion-mnist-32-2000",
            "Fashion-MNIST",
            "mean=0.286;std=0.353",
            Kind.CIFAR,
            10,
        ),
        Dataset(
            "CIFAR-100",
            "vgg16",
            ("relu", "selu"),
            256,
            0.1,
            0.05,
            "cifar100",
            "glyphs-100-32-300",
            "glyphs, 100 classes",
            "half",
            Kind.CIFAR,
            100,
        ),
        Dataset(
            "Tiny-ImageNet",
            "resnet50",
            ("relu", "silu"),
            256,
            0.1,
            0.05,
            "tiny-imagenet",
            "glyphs-200-64-200",
            "glyphs, 200 classes",
            "half",
            Kind.TINY_IMAGENET,
            200,
        ),
    )
}
"""In the order of Table 2."""

MODEL_NAMES = {"lenet5": "LeNet-5", "vgg16": "VGG-16", "resnet50": "ResNet-50"}


@dataclass(frozen=True)
class Size:
    """How much of one model's rows is run: seeds, clients of the 10, auxiliary images a class."""

    seeds: int
    clients: int
    aux_per_class: int
    several_steps: bool = True
    activations: int = 2


@dataclass(frozen=True)
class Scale:
    """How much is run of everything.

    sizes : by data set, for the paper's own network
    lenet : by data set, where LeNet-5 takes the place of a network that takes hours
    swapped : tables and figures in which it does
    stages : steps of central training at which the progress figure looks
    without : methods that are left out
    """

    name: str
    sizes: Mapping[str, Size]
    lenet: Mapping[str, Size]
    swapped: frozenset[str]
    stages: tuple[int, ...]
    without: tuple[str, ...] = ()

    def size(self, dataset: Dataset, model: str) -> Size:
        return self.sizes[dataset.name] if model == dataset.model else self.lenet[dataset.name]


_PAPER = Size(3, CLIENTS, AUX_PER_CLASS)
_MANY_ROUNDS = frozenset({"table3", "table4", "progress", "aux-size"})

SCALES = {
    "full": Scale(
        "full",
        dict.fromkeys(DATASETS, _PAPER),
        {"CIFAR-100": _PAPER},
        frozenset(),
        (0, 25, 50, 100, 200, 400, 800, 1600, 3200),
    ),
    "cpu": Scale(
        "cpu",
        {
            "SVHN": _PAPER,
            "CIFAR-10": Size(1, 2, 50),
            "CIFAR-100": Size(1, 2, 10),
            "Tiny-ImageNet": Size(1, 2, 5),
        },
        {"CIFAR-10": _PAPER, "CIFAR-100": Size(1, 5, AUX_PER_CLASS)},
        _MANY_ROUNDS,
        (0, 25, 50, 100, 200, 400, 800, 1600),
    ),
    "few": Scale(
        "few",
        {
            "SVHN": _PAPER,
            "CIFAR-10": Size(1, CLIENTS, AUX_PER_CLASS),
            "CIFAR-100": Size(1, 2, 10),
            "Tiny-ImageNet": Size(1, 2, 5),
        },
        {"CIFAR-100": Size(1, 5, AUX_PER_CLASS)},
        frozenset(),
        (0, 100, 400),
        without=("gls",),
    ),
    "quick": Scale(
        "quick",
        {
            "SVHN": Size(1, 3, 50),
            "CIFAR-10": Size(1, 1, 20, activations=1),
            "CIFAR-100": Size(1, 1, 5, several_steps=False),
            "Tiny-ImageNet": Size(1, 1, 5, several_steps=False, activations=1),
        },
        {"CIFAR-10": Size(1, 3, 50), "CIFAR-100": Size(1, 1, 50)},
        _MANY_ROUNDS,
        (0, 50, 200, 800),
        without=("gls",),
    ),
}


@dataclass(frozen=True)
class Plan:
    """What to run: a scale, on official files where a path is given.

    paths : of official files by data set
    """

    scale: Scale
    paths: Mapping[str, str]

    def data(self, dataset: Dataset) -> str:
        return self.paths.get(dataset.name, dataset.stand_in)

    def label(self, dataset: Dataset) -> str:
        """How a table names the data: nobody may take a stand-in for the paper's data set."""
        if dataset.name in self.paths:
            return dataset.name
        return f"{dataset.stand_in_label} (stands in for {dataset.name})"

    def model(self, dataset: Dataset, what: str) -> str:
        """The architecture of a table or figure."""
        return "lenet5" if what in self.scale.swapped else dataset.model

    def rounds(
        self,
        dataset: Dataset,
        *,
        steps: int,
        model: str | None = None,
        activation: str = "relu",
        lr: float = UNTRAINED_LR,
        alpha: float | None = None,
        pretraining: int = 0,
        methods: tuple[str, ...] | None = None,
        batch_norm: bool = True,
        **training: object,
    ) -> Iterator[Round]:
        """One round a seed; of all methods, without `gls` where its replays would take hours.

        Parameters
        ----------
        batch_norm : False for VGG-16 as it was before there was any
        """
        model = model or dataset.model
        if methods is None:
            few = model == "lenet5" or (dataset.name == "CIFAR-10" and batch_norm)
            left_out = (*_OWN, *self.scale.without, *(() if few else ("gls",)))
            methods = tuple(name for name in METHODS if name not in left_out)
        size = self.scale.size(dataset, model)
        official = dataset.name in self.paths
        for seed in range(size.seeds):
            yield Round(
                data=self.data(dataset),
                arch=f"{model}:activation={activation}" + ("" if batch_norm else ",batch_norm=false"),
                normalize=dataset.normalize if official else dataset.stand_in_normalize,
                seed=seed,
                training=replace(
                    StepOptions(lr=repr(lr), batch_size=dataset.batch_size, steps=steps),
                    **training,  # type: ignore[arg-type]
                ),
                options=SimulationOptions(
                    rounds=1,
                    clients=CLIENTS,
                    alpha=dataset.alpha if alpha is None else alpha,
                    participation=size.clients / CLIENTS,
                    aux_per_class=size.aux_per_class,
                ),
                pretraining=Pretraining(pretraining, lr=0.01),
                methods=methods,
            )
