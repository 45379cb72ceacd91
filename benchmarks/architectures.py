"""Methods rlu, gls, regression and replay on other networks than LeNet-5: scores, and how often bounds hold.

    python -m benchmarks.architectures
    python -m benchmarks.architectures --kind unbiased --kind large

Real SGD clients, ten classes of Fashion-MNIST in colour, 32x32, Dirichlet 0.5, batch 32, lr 0.01, 100
auxiliary images a class. Trained models come from central SGD on what the clients hold. Kinds of networks:
small ones, small ones whose output layer has no bias, and large ones, for which replays are dear (the FedAvg
paper's CNN on the 28x28 images, with five epochs of some 600 images; ten steps of the others). Prints
Markdown; every client's scores are in results/architectures.ndjson, and rounds that are there already are not
measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import bounds, machine, markdown, mean_sd
from benchmarks.data import images
from benchmarks.rounds import Bench, Pretraining, Results, Round, Rows
from rlu_cli.audit.options import SimulationOptions, StepOptions

DATA = "fashion-mnist-32-2000"
CODE = "benchmarks/networks.py"
SMALL = f"{CODE}:small_cnn:num_classes=10"
FEDAVG = f"{CODE}:fedavg_cnn"
KINDS = {
    "small": {
        "CNN, BatchNorm": SMALL,
        "CNN, GroupNorm": f"{SMALL},norm=group",
        "CNN, no norm": f"{SMALL},norm=none",
        "LeNet-5, tanh": "lenet5:activation=tanh",
    },
    "unbiased": {
        "CNN, BatchNorm, no bias": f"{SMALL},bias=false",
        "CNN, GroupNorm, no bias": f"{SMALL},norm=group,bias=false",
        "CNN, no norm, no bias": f"{SMALL},norm=none,bias=false",
    },
    "large": {
        "FedAvg's CNN": FEDAVG,
        "ResNet-32": "resnet32",
        "VGG-like, BatchNorm": f"{CODE}:small_vgg",
        "VGG-like, GroupNorm": f"{CODE}:small_vgg:norm=group",
    },
}
METHODS = ("rlu", "gls", "regression", "replay")
ELSEWHERE = {1: "replay", 10: "regression"}
"""By steps, the method that says there what another one says."""

CLIENTS = 5


def rounds(kinds: Iterable[str], seeds: int) -> Iterator[Round]:
    """Untrained and trained models for each network and way to train, seed by seed."""
    for seed in range(seeds):
        for kind in kinds:
            large = kind == "large"
            for trained in (False, True):
                for steps in (10,) if large else (1, 10):
                    for arch in KINDS[kind].values():
                        yield _round(arch, steps, seed, trained=trained, large=large)


def _round(arch: str, steps: int, seed: int, *, trained: bool, large: bool) -> Round:
    clients, span, pretraining = 10, {"steps": steps}, Pretraining(1000, lr=0.02)
    if arch == FEDAVG:
        clients, span, pretraining = 100, {"epochs": 5}, Pretraining(300, lr=0.02)
    return Round(
        "fashion-mnist" if arch == FEDAVG else DATA,
        arch,
        "half",
        seed,
        StepOptions(lr="0.01", batch_size=32, **span),
        SimulationOptions(rounds=1, aux_per_class=100, clients=clients, participation=CLIENTS / clients),
        pretraining if trained else Pretraining(),
        methods=("rlu", "replay") if large else tuple(m for m in METHODS if m != ELSEWHERE[steps]),
    )


def table(rows: Rows) -> str:
    """Network and stage by line, the methods side by side."""
    names = {arch: name for networks in KINDS.values() for name, arch in networks.items()}
    groups: dict[tuple[str, str, bool], Rows] = {}
    for row in rows:
        r: Round = row["round"]
        span = str(r.training.steps or f"{r.training.epochs} epochs")
        groups.setdefault((r.arch, span, r.pretraining.steps > 0), []).append(row)
    lines = []
    for (arch, steps, trained), group in groups.items():
        by = {method: [row for row in group if row["method"] == method] for method in METHODS}
        accuracy = float(np.mean([row["model_accuracy"] for row in group]))
        lines.append(
            (
                names[arch],
                f"{accuracy:.0%}" if trained else "untrained",
                steps,
                str(len(by["rlu"])),
                *(mean_sd(row["iAcc"] for row in found) if found else "" for found in by.values()),
                *(bounds(by[method]) for method in METHODS[1:]),
            )
        )
    held = (f"{method} bounds hold, width" for method in METHODS[1:])
    columns = ("network", "model", "m", "clients", *(f"{m} iAcc" for m in METHODS), *held)
    return markdown(columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated; default: small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "architectures.ndjson"
    )
    chosen = parser.parse_args()
    log = sys.stderr
    bench = Bench(
        Results(chosen.results),
        images,
        jobs=chosen.jobs,
        log=lambda text: print(text, file=log, flush=True),
    )
    rows = bench.measure(rounds(chosen.kind or ["small"], chosen.seeds))
    print(f"{machine()}; mean ± standard deviation over clients\n")
    print(table(rows))


if __name__ == "__main__":
    main()
