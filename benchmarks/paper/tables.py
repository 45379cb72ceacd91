"""The paper's tables as Markdown, each from its own rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.common import markdown, mean_sd
from benchmarks.paper import published
from benchmarks.paper.settings import DATASETS, MODEL_NAMES, STEPS, Dataset, Plan
from benchmarks.rounds import Bench, Round, Rows
from rlu_cli.audit.archive_evaluation import UNIFORM
from rlu_cli.core.methods import METHODS
from rlu_cli.core.methods.table import capability_table

ALPHAS = (0.05, 0.1, 0.5, 1.0, 5.0)
FEDPROX = (0.5, 5.0)
MOMENTUM = (0.1, 0.9)
NEGATIVE = ("tanh", "selu")
"""Activations whose sum over a layer can be negative, which a network shows that ends in one: LeNet-5."""

SCHEME_DATASETS = ("SVHN", "CIFAR-10", "CIFAR-100")

Printed = Mapping[str, Sequence[float]]
"""What the paper has of a line, by score."""

Line = tuple[tuple[str, ...], Printed, list[Round]]
"""A table's line: what it says first, what the paper prints for it, and the rounds that it is made of."""

Group = tuple[tuple[str, ...], Printed, Rows]
"""A line with the scores of its rounds' clients."""


def table2(plan: Plan, bench: Bench) -> str:
    """Untrained models: every network, data set and activation of the paper, one step and ten."""

    def lines() -> Iterator[Line]:
        for steps in STEPS:
            for dataset in DATASETS.values():
                size = plan.scale.size(dataset, dataset.model)
                if steps > 1 and not size.several_steps:
                    continue
                for activation in dataset.activations[: size.activations]:
                    rounds = plan.rounds(dataset, steps=steps, activation=activation)
                    head = (MODEL_NAMES[dataset.model], plan.label(dataset), activation, str(steps))
                    key = (dataset.name, activation, steps)
                    printed = {"iAcc": published.TABLE_2[key], "cAcc": published.TABLE_2_CACC[key]}
                    yield head, printed, list(rounds)
            for activation in NEGATIVE:
                dataset = DATASETS["CIFAR-100"]
                rounds = plan.rounds(dataset, steps=steps, model="lenet5", activation=activation)
                head = (
                    f"{MODEL_NAMES['lenet5']} (not in the paper)",
                    plan.label(dataset),
                    activation,
                    str(steps),
                )
                yield head, {}, list(rounds)

    return _score_tables(("model", "data", "activation", "m"), measured(lines(), bench))


def table3(plan: Plan, bench: Bench) -> str:
    """Heterogeneity: α from 0.05 to 5, ten steps, untrained."""
    dataset = DATASETS["CIFAR-10"]
    model = plan.model(dataset, "table3")

    def lines() -> Iterator[Line]:
        for alpha in ALPHAS:
            rounds = plan.rounds(dataset, steps=10, model=model, alpha=alpha)
            yield (str(alpha),), {"iAcc": published.TABLE_3[alpha]}, list(rounds)

    return f"{network_label(plan, dataset, model)}.\n\n" + _score_tables(("α",), measured(lines(), bench))


def table4(plan: Plan, bench: Bench) -> str:
    """FedProx and SGD with momentum, ten steps, untrained. Every method is told the scheme."""

    def lines() -> Iterator[Line]:
        for name in SCHEME_DATASETS:
            dataset = DATASETS[name]
            model = plan.model(dataset, "table4")
            for scheme, symbol, values in (("fedprox", "FedProx λ", FEDPROX), ("sgdm", "SGDm γ", MOMENTUM)):
                for value in values:
                    told = (
                        {"scheme": scheme, "lambda_": value} if scheme == "fedprox" else {"momentum": value}
                    )
                    rounds = plan.rounds(dataset, steps=10, model=model, lr=dataset.lr, **told)
                    head = (f"{symbol} = {value}", network_label(plan, dataset, model))
                    yield head, {"iAcc": published.TABLE_4[scheme, value, name]}, list(rounds)

    return _score_tables(("scheme", "model and data"), measured(lines(), bench))


def plain_vgg(plan: Plan, bench: Bench) -> str:
    """Ten steps of an untrained VGG-16 without BatchNorm; the paper doesn't say whether its own has it."""

    def lines() -> Iterator[Line]:
        for name in ("CIFAR-10", "CIFAR-100"):
            size = plan.scale.sizes[name]
            if size.several_steps:
                for activation in DATASETS[name].activations[: size.activations]:
                    yield line(name, activation, "", published.TABLE_2[name, activation, 10])
        yield line("CIFAR-10", "relu", "α = 5", published.TABLE_3[5.0], alpha=5.0)
        lr = DATASETS["CIFAR-10"].lr
        prox, fast = published.TABLE_4["fedprox", 5.0, "CIFAR-10"], published.TABLE_4["sgdm", 0.9, "CIFAR-10"]
        yield line("CIFAR-10", "relu", "FedProx λ = 5", prox, lr=lr, scheme="fedprox", lambda_=5.0)
        yield line("CIFAR-10", "relu", "SGDm γ = 0.9", fast, lr=lr, momentum=0.9)

    def line(name: str, activation: str, what: str, printed: Sequence[float], **settings: Any) -> Line:
        dataset = DATASETS[name]
        rounds = plan.rounds(dataset, steps=10, activation=activation, batch_norm=False, **settings)
        return (plan.label(dataset), activation, what), {"iAcc": printed}, list(rounds)

    return _score_tables(("data", "activation", "setting"), measured(lines(), bench))


def table5(plan: Plan, bench: Bench) -> str:
    """What each method can do, as the methods themselves declare."""
    return capability_table(METHODS)


def measured(lines: Iterable[Line], bench: Bench) -> list[Group]:
    """The lines with their scores; all rounds are asked for at once, to be played side by side."""
    planned = list(lines)
    bench.measure(round_ for _, _, rounds in planned for round_ in rounds)
    return [(head, printed, bench.measure(rounds)) for head, printed, rounds in planned]


TABLES: dict[str, Callable[[Plan, Bench], str]] = {
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "table5": table5,
    "plain-vgg": plain_vgg,
}


def network_label(plan: Plan, dataset: Dataset, model: str) -> str:
    """The model and the data, and which model of the paper it takes the place of."""
    instead = "" if model == dataset.model else f" (in place of {MODEL_NAMES[dataset.model]})"
    return f"{MODEL_NAMES[model]}{instead}, {plan.label(dataset)}"


def _score_tables(columns: tuple[str, ...], groups: list[Group]) -> str:
    """iAcc and cAcc of all methods, the best in bold, then four methods beside the paper's.

    Lines without any scores, of a run that isn't complete, are named below.
    """
    unmeasured = [", ".join(head) for head, _, rows in groups if not rows]
    groups = [(head, printed, rows) for head, printed, rows in groups if rows]
    sizes = ("B", "aux a class", "seeds", "clients")
    methods = list(dict.fromkeys(row["method"] for _, _, rows in groups for row in rows))
    parts = []
    for score in ("iAcc", "cAcc"):
        lines = [(*head, *_sizes(rows), *_scores(rows, methods, score)) for head, _, rows in groups]
        names = [method if method != UNIFORM else "uniform guess" for method in methods]
        parts.append(f"{score}, mean ± standard deviation over clients:\n")
        parts.append(markdown((*columns, *sizes, *names), lines))
    for score in ("iAcc", "cAcc"):
        lines = [
            (
                *head,
                *(
                    f"{_mean(rows, m, score):.3f} ({paper:.3f})"
                    for m, paper in zip(published.METHODS, printed[score], strict=True)
                ),
            )
            for head, printed, rows in groups
            if score in printed
        ]
        if lines:
            parts.append(
                f"{score} here, and in brackets what the paper prints for its own data and settings:\n"
            )
            parts.append(markdown((*columns, *published.METHODS), lines))
    behind = list(_behind(groups, methods))
    parts.append("Where another method is ahead of `rlu` in mean iAcc:\n")
    parts.append("".join(f"- {line}\n" for line in behind) or "- nowhere in this table\n")
    if unmeasured:
        parts.append("Not measured yet (the command goes on with them):\n")
        parts.append("".join(f"- {line}\n" for line in unmeasured))
    return "\n".join(parts)


def _sizes(rows: Rows) -> tuple[str, ...]:
    rounds: list[Round] = [row["round"] for row in rows]
    first = rounds[0]
    seeds = len({round_.seed for round_ in rounds})
    clients = len({(row["round"].seed, row["client"]) for row in rows})
    return str(first.training.batch_size), str(first.options.aux_per_class), str(seeds), str(clients)


def _scores(rows: Rows, methods: Sequence[str], score: str) -> list[str]:
    here = {row["method"] for row in rows}
    means = {method: _mean(rows, method, score) for method in methods if method in here}
    best = max(round(mean, 3) for mean in means.values())
    texts = []
    for method in methods:
        if method not in here:
            texts.append("")
            continue
        text = mean_sd(row[score] for row in rows if row["method"] == method)
        texts.append(f"**{text}**" if round(means[method], 3) == best else text)
    return texts


def _mean(rows: Rows, method: str, score: str = "iAcc") -> float:
    values = [row[score] for row in rows if row["method"] == method]
    return sum(values) / len(values)


def _behind(groups: list[Group], methods: Sequence[str]) -> Iterator[str]:
    for head, _, rows in groups:
        ours = round(_mean(rows, "rlu"), 3)
        here = {row["method"] for row in rows}
        means = {m: round(_mean(rows, m), 3) for m in methods if m in here}
        ahead = {m: mean for m, mean in means.items() if mean > ours}
        if ahead:
            named = ", ".join(f"{method} {mean:.3f}" for method, mean in ahead.items())
            yield f"{', '.join(head)}: rlu {ours:.3f}, {named}"


def training_accuracy(rows: Rows) -> float:
    """Of the global model, on held-out images, averaged over the rounds."""
    by_seed = {row["round"].seed: row["model_accuracy"] for row in rows}
    return sum(by_seed.values()) / len(by_seed)


def by_round(rows: Rows, key: Callable[[Round], float]) -> list[tuple[float, Rows]]:
    """Rows grouped by a value of their round, ascending."""
    ordered = sorted(rows, key=lambda row: key(row["round"]))
    return [(value, list(group)) for value, group in groupby(ordered, key=lambda row: key(row["round"]))]
