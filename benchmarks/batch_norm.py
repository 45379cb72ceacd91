"""Batch or stored statistics in the auxiliary passes; dropout on or off; heads of several forms.

    python -m benchmarks.batch_norm                      (small networks)
    python -m benchmarks.batch_norm --networks large     (VGG-16 and ResNet-50, fewer clients)

Real SGD clients on 62 classes of rendered glyphs, 32x32 RGB, batch 128, lr 0.05, Dirichlet 0.5. Trained
models come from central SGD on what the clients hold; the large ones on ten classes of Fashion-MNIST.
Prints Markdown; every client's scores are in results/batch_norm.ndjson, and rounds that are there already
are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.common import machine, markdown, mean_sd
from benchmarks.data import images
from benchmarks.rounds import Bench, Pretraining, Results, Round, Rows
from rlu_cli.audit.options import SimulationOptions, StepOptions

GLYPHS = "glyphs-62-32-200"
FASHION = "fashion-mnist-32-2000"
SMALL = "benchmarks/networks.py:small_cnn"

SMALL_NETWORKS = {
    "BatchNorm CNN": SMALL,
    "GroupNorm CNN": f"{SMALL}:norm=group",
    "GroupNorm CNN, no head bias": f"{SMALL}:bias=false,norm=group",
    "GroupNorm CNN, 1x1-convolution head": f"{SMALL}:head=conv,norm=group",
    "GroupNorm CNN, 1x1-convolution head, no bias": f"{SMALL}:bias=false,head=conv,norm=group",
    "BatchNorm CNN, dropout 0.5": f"{SMALL}:dropout=0.5",
}
LARGE_NETWORKS = {"VGG-16": "vgg16", "ResNet-50": "resnet50"}
TRAINING_STEPS = 2500
LARGE_STEPS = 100


def small_rounds() -> Iterator[Round]:
    """Three seeds of five clients each, untrained and trained; one seed of trained convolution heads."""
    for pretraining in (0, TRAINING_STEPS):
        for arch in SMALL_NETWORKS.values():
            for seed in range(1 if pretraining and "head=conv" in arch else 3):
                for steps in (1, 10):
                    yield from _ways(
                        _round(GLYPHS, arch, seed, steps, clients=5, aux=50, pretraining=pretraining)
                    )


def large_rounds() -> Iterator[Round]:
    """Few clients, as a step takes seconds: 12 of three seeds for one step, 3 for ten (6 of trained models).

    Trained ones on ten classes of Fashion-MNIST, which takes hundreds of steps and not thousands.
    """
    for arch in LARGE_NETWORKS.values():
        for seed in range(3):
            yield from _ways(_round(GLYPHS, arch, seed, 1, clients=4, aux=20))
        for seed in range(3):
            yield from _ways(_round(GLYPHS, arch, seed, 10, clients=1, aux=20))
        for seed in range(3):
            for steps, clients in ((1, 4), (10, 2)):
                yield from _ways(
                    _round(FASHION, arch, seed, steps, clients=clients, aux=50, pretraining=LARGE_STEPS)
                )


def _round(
    data: str, arch: str, seed: int, steps: int, *, clients: int, aux: int, pretraining: int = 0
) -> Round:
    return Round(
        data,
        arch,
        "half",
        seed,
        StepOptions(lr="0.05", batch_size=128, steps=steps),
        SimulationOptions(rounds=1, aux_per_class=aux, participation=clients / 10),
        Pretraining(pretraining),
    )


def _ways(base: Round) -> Iterator[Round]:
    """The default, and what else there is to choose for its network."""
    yield base
    if "norm=group" not in base.arch:
        yield replace(base, batch_norm="running")
    if "dropout" in base.arch:
        yield replace(base, dropout="off")


def table(rows: Rows) -> str:
    """Network and stage by line; iAcc of each way of auditing."""
    names = {arch: name for name, arch in (SMALL_NETWORKS | LARGE_NETWORKS).items()}
    groups: dict[tuple[str, int, str, int], Rows] = {}
    for row in rows:
        r: Round = row["round"]
        if row["method"] == "rlu":
            groups.setdefault((r.data, r.pretraining.steps, r.arch, r.training.steps or 0), []).append(row)
    lines = []
    for (data, pretraining, arch, steps), found in groups.items():
        default = [row for row in found if not row["round"].batch_norm and not row["round"].dropout]
        running = [row for row in found if row["round"].batch_norm == "running"]
        without = [row for row in found if row["round"].dropout]
        accuracy = sum(row["model_accuracy"] for row in default) / len(default)
        lines.append(
            (
                names[arch],
                "glyphs" if data == GLYPHS else "Fashion-MNIST",
                "untrained" if not pretraining else f"{accuracy:.0%}",
                str(steps),
                str(len({row["round"].seed for row in default})),
                str(len(default)),
                mean_sd(row["iAcc"] for row in default),
                mean_sd(row["iAcc"] for row in running) if running else "",
                mean_sd(row["iAcc"] for row in without) if without else "",
            )
        )
    scores = ("iAcc, default", "iAcc, `--batch-norm running`", "iAcc, `--dropout off`")
    return markdown(("network", "data", "model", "m", "seeds", "clients", *scores), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", choices=("small", "large"), default="small")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "batch_norm.ndjson"
    )
    chosen = parser.parse_args()
    bench = Bench(
        Results(chosen.results),
        images,
        device=chosen.device,
        jobs=chosen.jobs,
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )
    rows = bench.measure(small_rounds() if chosen.networks == "small" else large_rounds())
    print(f"{machine()}; mean ± standard deviation over clients\n")
    print(table(rows))


if __name__ == "__main__":
    main()
