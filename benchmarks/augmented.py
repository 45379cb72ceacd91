"""Clients that shift and mirror their images, audited with plain ones: scores, bounds, and who is warned of.

    python benchmarks/augmented.py --seeds 3      (about 25 minutes on one core)

Real training: LeNet-5, Fashion-MNIST, 10 clients a round, Dirichlet 0.5, batch 32, lr 0.01, 100 auxiliary
images a class. Clients, and the central SGD that made the global model (2,000 steps at lr 0.02), crop every
image anew from one with three more black pixels on each side, and mirror half of them; the auxiliary images
are as they are. Prints Markdown; writes every client's scores to results/augmented.ndjson, round by round.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import (
    Changed,
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
from regimes import EPOCHS, few, lenet_simulator, played, scored
from torch import Tensor
from torch.nn.functional import pad

from rlu_cli.audit.options import SimulationOptions, StepOptions
from rlu_cli.audit.report import client_reliability
from rlu_cli.core.types import IntArray
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.run import Simulator

METHODS = ("rlu", "auto")
SHIFT = 3
"""Pixels, at most, to each side."""

TRAINED, RATE = 2000, 0.02
REGIMES: dict[str, tuple[int, dict[str, Any]]] = {
    "untrained, m = 10": (0, {"steps": 10}),
    "trained, m = 1": (TRAINED, {"steps": 1}),
    "trained, m = 10": (TRAINED, {"steps": 10}),
    "trained, 5 epochs × 1,000": (TRAINED, EPOCHS),
}


def main() -> None:
    parser = seeds_parser(__doc__, results="augmented.ndjson")
    parser.add_argument("--only", action="append", choices=REGIMES, help="a regime; may be repeated")
    chosen = parser.parse_args()
    images = open_dataset("fashion-mnist")
    cases = product(chosen.only or REGIMES, chosen_seeds(chosen))
    rows = gathered((measure(images, *case) for case in cases), chosen.output)
    print(f"{machine()}; {chosen.seeds} seeds × 10 clients, mean ± standard deviation over clients\n")
    print(table(rows))


def measure(images: ImageSet, regime: str, seed: int) -> Iterator[Row]:
    """Scores of every client of one round, by both methods."""
    trained, options = REGIMES[regime]
    start = lenet_after(images, trained, seed=seed, lr=RATE, changed=augmentation(seed))
    data = few(images, seed) if "epochs" in options else images
    training = StepOptions(**{"lr": "0.01", "batch_size": 32, **options})

    def simulator(root: Path) -> Simulator:
        made = lenet_simulator(data, training, SimulationOptions(rounds=1), seed, root, start=start)
        change, plain = augmentation(seed), made.data.batch

        def batch(rows: IntArray) -> tuple[Tensor, Tensor]:
            inputs, labels = plain(rows)
            return change(inputs), labels

        made.data.batch = batch  # type: ignore[method-assign]
        return made

    with played(simulator) as root:
        for scores, auditor, client in scored(root, METHODS):
            grade = client_reliability(auditor, client, client.recoveries[0])
            yield {"regime": regime, "seed": seed, **scores, "grade": grade.grade}


def augmentation(seed: int) -> Changed:
    """Random crops and mirror images of normalised batches (B, C, H, W); what is darkest is black."""
    drawn = torch.Generator().manual_seed(seed)

    def changed(inputs: Tensor) -> Tensor:
        count, _, height, width = inputs.shape
        mirrored = torch.rand(count, generator=drawn) < 0.5
        turned = torch.where(mirrored[:, None, None, None], inputs.flip(3), inputs)
        black = float(inputs.min())
        wide = pad(turned, (SHIFT,) * 4, value=black)
        places = torch.randint(0, 2 * SHIFT + 1, (count, 2), generator=drawn).tolist()
        return torch.stack(
            [image[:, y : y + height, x : x + width] for image, (y, x) in zip(wide, places, strict=True)]
        )

    return changed


def table(rows: list[Row]) -> str:
    """Regime by line, with how many clients were graded poor."""
    lines = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        rlu, auto = (
            [row for row in rows if (row["regime"], row["method"]) == (regime, method)] for method in METHODS
        )
        accuracies = [row["accuracy"] for row in auto]
        lines.append(
            (
                regime,
                f"{min(accuracies):.0%} to {max(accuracies):.0%}",
                str(len(auto)),
                mean_sd(row["iAcc"] for row in rlu),
                mean_sd(row["iAcc"] for row in auto),
                bounds(auto),
                str(sum(row["grade"] == "poor" for row in auto)),
            )
        )
    columns = ("model, training", "models", "clients", "rlu iAcc", "auto iAcc", "auto bounds hold, width")
    return markdown((*columns, "poor"), lines)


if __name__ == "__main__":
    main()
