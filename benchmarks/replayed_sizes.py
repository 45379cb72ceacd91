"""How well `replay` tells the size of an update from where it points: clients as they are, and made smaller.

    python benchmarks/replayed_sizes.py --seeds 3 --first-seed 60      (half an hour on two cores)
    python benchmarks/replayed_sizes.py --seeds 7 --first-seed 60 --only "80 %, m = 10"

Real training of the regimes of benchmarks/regimes.py that take several steps. Every client's update is sent
as it is, and multiplied by 0.6 and 0.3, and nobody says so. Prints Markdown; writes every client to
results/replayed_sizes.ndjson.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from common import Row, bounds, chosen_seeds, gathered, machine, markdown, mean_sd, seeds_parser
from defences import defend, update_of
from regimes import REGIMES, clients, simulated

from rlu_cli.audit.options import TrainingOptions
from rlu_cli.core.metrics import score_bounds, score_counts
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.defences import Defence

SEVERAL = [regime for regime in REGIMES if not regime.endswith("m = 1")]
FACTORS = (1.0, 0.6, 0.3)
_CODES = ("size-doubted", "update-misscaled")


def main() -> None:
    parser = seeds_parser(__doc__, results="replayed_sizes.ndjson")
    parser.add_argument("--only", action="append", choices=SEVERAL, help="a regime; may be repeated")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    cases = product(arguments.only or SEVERAL, chosen_seeds(arguments))
    rows = gathered((measure(images, *case) for case in cases), arguments.output)
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients\n")
    print(table(rows))


def measure(images: ImageSet, regime: str, seed: int) -> Iterator[Row]:
    """The size found of every client's update, as it is and made smaller."""
    with simulated(images, regime, seed) as root:
        for line, trained, auditor in clients(root):
            sent = read_checkpoint(trained)
            reference = read_checkpoint(trained.with_name("global.safetensors"))
            norm, truth = float(update_of(sent, reference).norm()), np.array(line.counts)
            for factor in FACTORS:
                local = root / "smaller.safetensors"
                defence = Defence(clip=factor * norm) if factor < 1 else Defence()
                defend(sent, reference, local, defence, told=False, seed=seed)
                (found,) = auditor.recover(local, TrainingOptions(), ["replay"]).recoveries
                yield {
                    "regime": regime,
                    "seed": seed,
                    "client": line.client,
                    "factor": factor,
                    "size": found.diagnostics["replay_size"],
                    "iAcc": score_counts(found.counts, truth).i_acc,
                    **score_bounds(found, truth),
                    "warnings": [note.code for note in found.warnings],
                }


def table(rows: list[Row]) -> str:
    """Regime by regime: errors of the size, who is warned of, how many labels are found, and the bounds."""
    lines = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        by = {f: [r for r in rows if (r["regime"], r["factor"]) == (regime, f)] for f in FACTORS}
        right = np.abs(np.log([row["size"] for row in by[1.0]]))
        warned = (
            "/".join(str(sum(code in row["warnings"] for row in by[factor])) for code in _CODES)
            for factor in FACTORS
        )
        lines.append(
            (
                regime,
                str(len(right)),
                f"{np.sqrt(np.mean(right**2)):.2f}",
                f"{right.max():.2f}",
                ", ".join(warned),
                *(mean_sd(row["iAcc"] for row in by[factor]) for factor in FACTORS),
                *(bounds(by[factor]) for factor in FACTORS),
            )
        )
    columns = ("model, training", "clients", "error of the logarithm, root mean square", "largest")
    told = "doubted/misscaled at " + ", ".join(f"{f:g}" for f in FACTORS)
    found = (f"{what} at {factor:g}" for what in ("iAcc", "bounds hold, width,") for factor in FACTORS)
    return markdown((*columns, told, *found), lines)


if __name__ == "__main__":
    main()
