"""One step: samples told apart by `disaggregation`, beside rlu and `regression`, by network, model and batch.

    python -m benchmarks.single_steps      (about half an hour on one core)

Real SGD clients, ten classes of Fashion-MNIST in colour, 32x32, Dirichlet 0.5, lr 0.01; global models from
central SGD on what the clients hold, five clients of each of three. Prints Markdown; every client's scores
are in results/single_steps.ndjson, and rounds that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import bounds, machine, markdown, mean_sd
from benchmarks.data import images
from benchmarks.rounds import Bench, Pretraining, Results, Round, Rows
from rlu_cli.audit.options import SimulationOptions, StepOptions

CODE = "benchmarks/networks.py"
NETWORKS = {
    "LeNet-5": "lenet5",
    "MLP, 2 × 100": f"{CODE}:mlp:inputs=3072",
    "FedAvg's CNN": f"{CODE}:fedavg_cnn:channels=3,size=32",
}
CASES = (
    ("LeNet-5", 300, 8, 100),
    ("LeNet-5", 300, 32, 100),
    ("LeNet-5", 300, 32, 10),
    ("LeNet-5", 300, 64, 100),
    ("LeNet-5", 3000, 8, 100),
    ("LeNet-5", 3000, 32, 100),
    ("LeNet-5", 3000, 64, 100),
    ("MLP, 2 × 100", 300, 32, 100),
    ("MLP, 2 × 100", 3000, 32, 100),
    ("FedAvg's CNN", 300, 32, 100),
    ("FedAvg's CNN", 300, 64, 100),
)
"""Network, steps that trained the global model, batch size, auxiliary images a class."""

METHODS = ("rlu", "regression", "disaggregation")


def rounds(seeds: int) -> Iterator[Round]:
    """Seed by seed."""
    for seed in range(seeds):
        for name, steps, batch_size, aux in CASES:
            yield Round(
                "fashion-mnist-32-2000",
                NETWORKS[name],
                "half",
                seed,
                StepOptions(lr="0.01", batch_size=batch_size, steps=1),
                SimulationOptions(rounds=1, aux_per_class=aux, clients=10, participation=0.5),
                Pretraining(steps, lr=0.02),
                methods=METHODS,
            )


def table(rows: Rows) -> str:
    """Network, model and batch by line, the methods side by side."""
    names = {arch: name for name, arch in NETWORKS.items()}
    groups: dict[tuple[str, int, int, int], Rows] = {}
    for row in rows:
        r: Round = row["round"]
        aux = r.options.aux_per_class
        key = (names[r.arch], r.pretraining.steps, r.training.batch_size or 0, aux)
        groups.setdefault(key, []).append(row)
    lines = []
    for (name, steps, batch_size, aux), found in groups.items():
        by = {method: [row for row in found if row["method"] == method] for method in METHODS}
        if not by["rlu"]:
            continue
        accuracy = np.mean([row["model_accuracy"] for row in by["rlu"]])
        lines.append(
            (
                name,
                f"{steps} steps ({accuracy:.0%})",
                str(batch_size),
                str(aux),
                str(len(by["rlu"])),
                *(mean_sd(row["iAcc"] for row in by[method]) for method in METHODS),
                *(bounds(by[method]) for method in METHODS[1:]),
            )
        )
    columns = ("network", "model", "B", "aux a class", "clients", *(f"{m} iAcc" for m in METHODS))
    return markdown((*columns, *(f"{m} bounds hold, width" for m in METHODS[1:])), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "single_steps.ndjson"
    )
    chosen = parser.parse_args()
    bench = Bench(
        Results(chosen.results), images, device="cpu", log=lambda text: print(text, file=sys.stderr)
    )
    rows = bench.measure(rounds(chosen.seeds))
    print(f"{machine()}; mean ± standard deviation over clients\n")
    print(table(rows))


if __name__ == "__main__":
    main()
