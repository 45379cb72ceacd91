"""How well ``--lr auto`` finds the learning rate, and what the counts lose by it.

    python benchmarks/unknown_lr.py --seeds 3      (about 20 minutes on one core)
    python benchmarks/unknown_lr.py --seeds 3 --noise 1e-4

Real training: the rounds of benchmarks/regimes.py (LeNet-5, Fashion-MNIST, Dirichlet 0.5, batch 32, 100
auxiliary images a class). Prints Markdown; writes every client to results/unknown_lr.ndjson,
or to unknown_lr_noise.ndjson.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import numpy as np
from common import Row, chosen_seeds, gathered, machine, markdown, mean_sd, seeds_parser
from defences import defend
from regimes import clients, simulated

from rlu_cli.audit.options import TrainingOptions
from rlu_cli.core.metrics import score_counts
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.defences import Defence

TRIED = (
    "untrained, m = 1",
    "27 %, m = 1",
    "80 %, m = 1",
    "untrained, m = 10",
    "27 %, m = 10",
    "80 %, m = 10",
    "untrained, m = 10, lr 0.05",
    "27 %, m = 10, lr 0.05",
    "80 %, m = 10, lr 0.05",
)


def main() -> None:
    parser = seeds_parser(__doc__, results="unknown_lr.ndjson")
    parser.add_argument("--only", action="append", choices=TRIED, help="a regime; may be repeated")
    parser.add_argument("--method", default="rlu")
    parser.add_argument("--noise", type=float, default=0.0, help="on the updates, which nobody tells of")
    arguments = parser.parse_args()
    images, method, noise = open_dataset("fashion-mnist"), arguments.method, arguments.noise
    if noise and arguments.output == parser.get_default("output"):
        arguments.output = arguments.output.with_stem("unknown_lr_noise")
    cases = product(arguments.only or TRIED, chosen_seeds(arguments))
    rows = gathered((measure(images, *case, method, noise) for case in cases), arguments.output)
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients, method {method}, noise {noise:g}\n")
    print(table(rows))


def measure(images: ImageSet, regime: str, seed: int, method: str, noise: float) -> Iterator[Row]:
    """Each client of one round with its rate told, and not told."""
    with simulated(images, regime, seed) as root:
        for index, (line, local, auditor) in enumerate(clients(root)):
            if noise:
                sent, reference = (
                    read_checkpoint(path) for path in (local, local.with_name("global.safetensors"))
                )
                defend(sent, reference, local, Defence(noise_std=noise), told=False, seed=1000 * seed + index)
            told = auditor.recover(local, TrainingOptions(), [method])
            truth = np.array(line.counts)
            row = {
                "regime": regime,
                "seed": seed,
                "client": line.client,
                "method": method,
                "noise": noise,
                "iAcc_told": score_counts(told.recoveries[0].counts, truth).i_acc,
                "refused": False,
            }
            try:
                found = auditor.recover(local, TrainingOptions(lr="auto"), [method])
            except MismatchError:
                yield {**row, "refused": True}
                continue
            true = told.training.values["lr"]
            (note,) = (note for note in found.notes if note.code.startswith("lr-"))
            low, high = map(float, re.findall(r"95 %: (\S+) to (\S+)\)", note.message)[0])
            yield {
                **row,
                "ratio": found.training.values["lr"] / true,
                "held": low <= true <= high,
                "spread": high / low,
                "warning": note.code,
                "iAcc": score_counts(found.recoveries[0].counts, truth).i_acc,
            }


def table(rows: list[Row]) -> str:
    """Regime: error of the rate found, its interval, and iAcc with it and with the rate told."""
    lines = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        mine = [row for row in rows if row["regime"] == regime]
        found = [row for row in mine if not row["refused"]]
        errors = np.log([row["ratio"] for row in found])
        seeds = np.array([row["seed"] for row in found])
        pooled = [np.expm1(errors[seeds == seed].mean()) for seed in np.unique(seeds)]
        uncertain = [row for row in found if row["warning"] == "lr-uncertain"]
        lines.append(
            (
                regime,
                f"{len(found)} of {len(mine)}",
                f"{np.exp(np.median(errors)) - 1:+.1%}",
                f"{np.median(np.abs(np.expm1(errors))):.1%}",
                f"{np.max(np.abs(np.expm1(errors))):.0%}",
                f"{np.max(np.abs(pooled)):.1%}",
                f"{np.mean([row['held'] for row in found]):.0%}",
                f"{np.median([row['spread'] for row in found]):.2f}",
                str(len(uncertain)),
                mean_sd(row["iAcc_told"] for row in found),
                mean_sd(row["iAcc"] for row in found),
            )
        )
    columns = (
        "model, training",
        "clients with an answer",
        "median error",
        "median of its size",
        "largest",
        "largest, of a round's geometric mean",
        "interval holds",
        "its upper over lower end",
        "`lr-uncertain`",
        "iAcc, lr told",
        "iAcc, lr auto",
    )
    return markdown(columns, lines)


if __name__ == "__main__":
    main()
