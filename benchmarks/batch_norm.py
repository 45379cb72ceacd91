"""Batch or stored statistics in the auxiliary passes; dropout off or on; heads of several forms.

    python -m benchmarks.batch_norm                      (small networks)
    python -m benchmarks.batch_norm --networks large     (VGG-16 and ResNet-50, fewer clients)

Real SGD clients on 62 classes of rendered glyphs, 32x32 RGB, batch 128, lr 0.05, Dirichlet 0.5. "Trained"
is central SGD on what the clients hold. Prints Markdown; every client's scores are in
results/batch_norm.ndjson, and rounds that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import machine, markdown, mean_sd
from benchmarks.data import images
from benchmarks.rounds import Bench, Pretraining, Results, Round, Rows
from rlu_cli.audit.options import SimulationOptions, StepOptions

DATA = "glyphs-62-32-200"
SMALL = "benchmarks/networks.py:small_cnn"
BATCH_NORM = ("batch", "running")

SMALL_NETWORKS = {
    "BatchNorm CNN": SMALL,
    "GroupNorm CNN": f"{SMALL}:norm=group",
    "GroupNorm CNN, no head bias": f"{SMALL}:bias=false,norm=group",
    "GroupNorm CNN, 1x1-convolution head": f"{SMALL}:head=conv,norm=group",
    "GroupNorm CNN, 1x1-convolution head, no bias": f"{SMALL}:bias=false,head=conv,norm=group",
    "BatchNorm CNN, dropout 0.5": f"{SMALL}:dropout=0.5",
}
LARGE_NETWORKS = {"VGG-16": "vgg16", "ResNet-50": "resnet50"}
STAGES = {"small": (0, 2500), "large": (0,)}
"""Steps of central training."""


def rounds(networks: str, *, seeds: int, clients: int, aux: int) -> Iterator[Round]:
    """Every round of the comparison."""
    table = SMALL_NETWORKS if networks == "small" else LARGE_NETWORKS
    options = SimulationOptions(rounds=1, aux_per_class=aux, participation=clients / 10)
    for pretraining in STAGES[networks]:
        for arch in table.values():
            batch = "norm=group" not in arch
            for steps in (1, 10):
                for seed in range(seeds):
                    base = Round(
                        DATA,
                        arch,
                        "half",
                        seed,
                        StepOptions(lr="0.05", batch_size=128, steps=steps),
                        options,
                        Pretraining(pretraining),
                    )
                    yield base
                    if batch:
                        yield _with(base, batch_norm="running")
                    if "dropout" in arch:
                        yield _with(base, audited=f"{arch},steady=true")


def _with(round_: Round, **changes: str) -> Round:
    from dataclasses import replace

    return replace(round_, **changes)  # type: ignore[arg-type]


def table(rows: Rows) -> str:
    """Network and stage by line; iAcc of each way of auditing."""
    names = {arch: name for name, arch in (SMALL_NETWORKS | LARGE_NETWORKS).items()}
    groups: dict[tuple[int, str, int], Rows] = {}
    for row in rows:
        r: Round = row["round"]
        if row["method"] == "rlu":
            groups.setdefault((r.pretraining.steps, r.arch, r.training.steps or 0), []).append(row)
    lines = []
    for (pretraining, arch, steps), found in groups.items():
        batch = [row for row in found if row["round"].batch_norm == "batch" and not row["round"].audited]
        running = [row for row in found if row["round"].batch_norm == "running"]
        steady = [row for row in found if row["round"].audited]
        accuracy = sum(row["model_accuracy"] for row in batch) / len(batch)
        lines.append(
            (
                names[arch],
                "untrained" if not pretraining else f"{accuracy:.0%}",
                str(steps),
                str(len(batch)),
                mean_sd(row["iAcc"] for row in batch),
                mean_sd(row["iAcc"] for row in running) if running else "",
                mean_sd(row["iAcc"] for row in steady) if steady else "",
            )
        )
    columns = (
        "network",
        "model",
        "m",
        "clients",
        "iAcc, default",
        "iAcc, `--batch-norm running`",
        "dropout on",
    )
    return markdown(columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", choices=("small", "large"), default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=5, help="of 10, a round")
    parser.add_argument("--aux-per-class", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "batch_norm.ndjson"
    )
    chosen = parser.parse_args()
    bench = Bench(
        Results(chosen.results),
        images,
        device=chosen.device,
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )
    wanted = rounds(chosen.networks, seeds=chosen.seeds, clients=chosen.clients, aux=chosen.aux_per_class)
    rows = bench.measure(wanted)
    print(f"{machine()}; {chosen.seeds} seeds, mean ± standard deviation over clients\n")
    print(table(rows))


if __name__ == "__main__":
    main()
