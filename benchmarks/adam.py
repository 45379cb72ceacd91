"""Clients that train by Adam or AdamW: methods replay and surrogate against a uniform guess.

Also clients of whom something wrong is told, and how often replay warns of it.

    python benchmarks/adam.py --seeds 3      (about 80 minutes on one core)

Real training: LeNet-5, Fashion-MNIST, 10 clients a round, Dirichlet 0.5, batch 32, 100 auxiliary images
a class. Prints Markdown and writes every client's scores to results/adam.ndjson.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from common import (
    Row,
    bounds,
    chosen_seeds,
    gathered,
    lenet_at_accuracy,
    machine,
    markdown,
    mean_sd,
    seeds_parser,
)
from regimes import few, lenet_simulator, played, scored

from rlu_cli.audit.options import SimulationOptions, StepOptions, TrainingOptions
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset

CLIENTS = 10
"""A round."""

FEW = 4000
"""Images in all where clients run epochs: of those, clients have about 100 each."""

ADAM: dict[str, Any] = {"optimizer": "adam", "lr": "0.001"}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": "0.001", "weight_decay": 0.01}
TRUE: dict[str, tuple[float, dict[str, Any]]] = {
    "untrained, Adam, m = 1": (0.0, {**ADAM, "steps": 1}),
    "untrained, Adam, m = 10": (0.0, {**ADAM, "steps": 10}),
    "untrained, AdamW, m = 10": (0.0, {**ADAMW, "steps": 10}),
    "untrained, Adam, 5 epochs": (0.0, {**ADAM, "epochs": 5}),
    "27 %, Adam, m = 1": (0.27, {**ADAM, "steps": 1}),
    "27 %, Adam, m = 10": (0.27, {**ADAM, "steps": 10}),
    "80 %, Adam, m = 10": (0.8, {**ADAM, "steps": 10}),
}

SGD: dict[str, Any] = {"lr": "0.01", "steps": 10}
WRONG: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {
    "untrained, SGD said to be Adam, m = 10": (0.0, SGD, ADAM),
    "80 %, SGD said to be Adam, m = 10": (0.8, SGD, ADAM),
    "80 %, SGD said to be Adam, m = 1": (0.8, {**SGD, "steps": 1}, ADAM),
    "untrained, Adam, m = 1, lr said 1.5 times": (0.0, {**ADAM, "steps": 1}, {"lr": "0.0015"}),
    "untrained, Adam, m = 10, lr said twice": (0.0, {**ADAM, "steps": 10}, {"lr": "0.002"}),
    "80 %, Adam, m = 10, lr said twice": (0.8, {**ADAM, "steps": 10}, {"lr": "0.002"}),
    "80 %, Adam, m = 10, lr said three times": (0.8, {**ADAM, "steps": 10}, {"lr": "0.003"}),
}
"""What was so, and what is told of it, where that is something else."""

REGIMES = {**{name: (*regime, {}) for name, regime in TRUE.items()}, **WRONG}

METHODS = ("replay", "surrogate")


def main() -> None:
    parser = seeds_parser(__doc__, results="adam.ndjson")
    parser.add_argument("--only", action="append", choices=REGIMES, help="a regime; may be repeated")
    parser.add_argument("--method", action="append", choices=METHODS, help="may be repeated; default: both")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    cases = product(arguments.only or REGIMES, chosen_seeds(arguments))
    methods = arguments.method or METHODS
    rows = gathered((measure(images, regime, seed, methods) for regime, seed in cases), arguments.output)
    print(f"{machine()}; {arguments.seeds} seeds × {CLIENTS} clients, mean ± standard deviation over them\n")
    print(table(rows))


def measure(images: ImageSet, regime: str, seed: int, methods: Sequence[str]) -> Iterator[Row]:
    """Scores of every client of one round."""
    reached, options, wrong = REGIMES[regime]
    start = lenet_at_accuracy(images, reached, seed=seed)
    federation = SimulationOptions(rounds=1, clients=CLIENTS)
    if "epochs" in options:
        images = few(images, seed, FEW)
        federation = replace(federation, clients=2 * CLIENTS, participation=0.5)
    training = StepOptions(batch_size=32, **options)
    with played(lambda root: lenet_simulator(images, training, federation, seed, root, start=start)) as root:
        asked = [method for method in methods if method == "replay" or not wrong]
        for scores, _, _ in scored(root, asked, TrainingOptions(**wrong)):
            yield {"regime": regime, "seed": seed, **scores}


def table(rows: list[Row]) -> str:
    """A line a regime, the methods side by side."""
    lines = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        own = [row for row in rows if row["regime"] == regime]
        by = [[row for row in own if row["method"] == method] for method in METHODS]
        warned = sum("update-unlike-replays" in row["warnings"] for row in by[0])
        lines.append(
            (
                regime,
                str(len(by[0])),
                *(
                    mean_sd(r[key] for r in found) if found else ""
                    for key in ("iAcc", "cAcc")
                    for found in by
                ),
                bounds(by[0]),
                f"{warned} of {len(by[0])}",
                mean_sd(row["uniform_iAcc"] for row in by[0]),
                *(f"{np.median([row['seconds'] for row in found]):.1f}" if found else "" for found in by),
            )
        )
    scores = (f"{method} {score}" for score in ("iAcc", "cAcc") for method in METHODS)
    costs = (f"{method}, s a client" for method in METHODS)
    return markdown(
        ("model, training", "clients", *scores, "bounds hold, width", "warned", "uniform iAcc", *costs), lines
    )


if __name__ == "__main__":
    main()
