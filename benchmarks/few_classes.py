"""Models of few classes, which training makes sure of: scores, bounds, and who is warned of wrongly.

    python benchmarks/few_classes.py --seeds 3      (about 25 minutes on one core)
    python benchmarks/few_classes.py --classes 2 --steps 1 --training 2000 --output one_step.ndjson
    python benchmarks/few_classes.py --classes 2 --normalize "mean=0;std=1" --output wrong.ndjson

Real training: LeNet-5 on as many of Fashion-MNIST's classes, drawn by the seed; central SGD at lr 0.02, then
10 clients a round, batch 32, lr 0.01, 100 auxiliary images a class. Prints Markdown; writes every client's
scores to results/few_classes.ndjson, round by round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from common import (
    Row,
    bounds,
    chosen_seeds,
    gathered,
    lenet_after,
    machine,
    markdown,
    mean_sd,
    seeds_parser,
)
from regimes import lenet_simulator, played, scored

from rlu_cli.audit.options import ModelOptions, SimulationOptions, StepOptions
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset

CLASSES, ALPHAS, TRAINED, STEPS = (2, 3, 4), (0.5, 2.0), 1000, 10
METHODS = ("rlu", "auto")
RATE = 0.02
"""Of central SGD."""

UNEXPLAINED = "update-unexplained"


def main() -> None:
    parser = seeds_parser(__doc__, results="few_classes.ndjson")
    parser.add_argument("--classes", action="append", type=int, choices=range(2, 11), metavar="N")
    parser.add_argument("--alpha", action="append", type=float, help="of the label skew; may be repeated")
    parser.add_argument("--training", type=int, default=TRAINED, help="steps of central SGD; default: 1000")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a client; default: 10")
    parser.add_argument("--normalize", help="what the auditor is told, instead of what is right")
    chosen = parser.parse_args()
    images = open_dataset("fashion-mnist")
    model = ModelOptions(normalize=chosen.normalize)
    cases = product(chosen.classes or CLASSES, chosen.alpha or ALPHAS, chosen_seeds(chosen))
    rows = gathered(
        (measure(images, *case, chosen.training, chosen.steps, model) for case in cases), chosen.output
    )
    print(f"{machine()}; {chosen.seeds} seeds × 10 clients, mean ± standard deviation over clients\n")
    print(table(rows))


def measure(
    images: ImageSet, classes: int, alpha: float, seed: int, trained: int, steps: int, model: ModelOptions
) -> Iterator[Row]:
    """Scores of every client of one round, by both methods."""
    data = some_classes(images, classes, seed)
    start = lenet_after(data, trained, seed=seed, lr=RATE)
    training = StepOptions(lr="0.01", batch_size=32, steps=steps)
    federation = SimulationOptions(rounds=1, alpha=alpha)
    with played(lambda root: lenet_simulator(data, training, federation, seed, root, start=start)) as root:
        for scores, _, _ in scored(root, METHODS, model=model):
            yield {
                "classes": classes,
                "alpha": alpha,
                "seed": seed,
                "training": trained,
                "steps": steps,
                "told": model.normalize,
                **scores,
            }


def some_classes(images: ImageSet, classes: int, seed: int) -> ImageSet:
    """The images of so many classes, drawn by the seed."""
    drawn = np.random.default_rng(1000 * seed + classes).choice(len(images.names), classes, replace=False)
    kept = torch.from_numpy(np.sort(drawn))
    rows = torch.isin(images.labels, kept)
    return replace(
        images,
        pixels=images.pixels[rows],
        labels=torch.searchsorted(kept, images.labels[rows]),
        names=tuple(images.names[n] for n in kept.tolist()),
    )


def table(rows: list[Row]) -> str:
    """Classes and α by line, with how many clients were warned of as unlike their auxiliary images."""
    lines = []
    for classes, alpha in dict.fromkeys((row["classes"], row["alpha"]) for row in rows):
        own = [row for row in rows if (row["classes"], row["alpha"]) == (classes, alpha)]
        rlu, auto = ([row for row in own if row["method"] == method] for method in METHODS)
        accuracies = [row["accuracy"] for row in auto]
        lines.append(
            (
                str(classes),
                f"{alpha:g}",
                f"{min(accuracies):.0%} to {max(accuracies):.0%}",
                str(len(auto)),
                mean_sd(row["uniform_iAcc"] for row in auto),
                mean_sd(row["iAcc"] for row in rlu),
                mean_sd(row["iAcc"] for row in auto),
                bounds(auto),
                str(sum(UNEXPLAINED in row["warnings"] for row in auto)),
            )
        )
    columns = ("classes", "α", "models", "clients", "uniform iAcc", "rlu iAcc", "auto iAcc")
    return markdown((*columns, "auto bounds hold, width", f"`{UNEXPLAINED}`"), lines)


if __name__ == "__main__":
    main()
