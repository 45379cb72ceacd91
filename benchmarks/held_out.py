"""Untrained networks on 62 classes of glyphs: what the default settings must reach, and one that doesn't.

    python -m benchmarks.held_out

Real SGD clients, 32x32 RGB, Dirichlet 0.5, 50 auxiliary images a class; seeds and training values that
`benchmarks.batch_norm` doesn't use. Every client is recovered with `rlu` and no flag but its own network.
A 1x1-convolution head starts from the weights of its linear twin and sees the same batches. Prints Markdown
and ends with exit code 1 where a target is missed; every client's scores are in results/held_out.ndjson, and
rounds that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.batch_norm import GLYPHS, SMALL
from benchmarks.common import machine, markdown, mean_sd
from benchmarks.data import images
from benchmarks.rounds import Bench, Results, Round, Rows
from rlu_cli.audit.options import SimulationOptions, StepOptions

SEEDS = (10, 11, 12)
TRAINING = {"B = 128, lr 0.05": ("0.05", 128), "B = 32, lr 0.02": ("0.02", 32)}

BATCH, DEEP = SMALL, "resnet32"
LINEAR, CONVOLUTION = f"{SMALL}:bias=false,norm=group", f"{SMALL}:bias=false,head=conv,norm=group"
NAMES = {
    BATCH: "BatchNorm CNN",
    LINEAR: "GroupNorm CNN, no head bias",
    CONVOLUTION: "the same, 1x1-convolution head",
    DEEP: "ResNet-32 (31 BatchNorm layers)",
}
TARGETS = {
    (BATCH, 1): 0.99,
    (BATCH, 10): 0.95,
    (LINEAR, 1): 0.99,
    (LINEAR, 10): None,
    (CONVOLUTION, 1): 0.99,
    (CONVOLUTION, 10): None,
    (DEEP, 1): None,
}
"""Least mean iAcc of a network and a number of steps; a convolution head must equal its twin besides."""

ALIKE = 0.005
"""Difference of the mean iAcc between twin heads that counts as none: their arithmetic differs in order."""


def rounds(values: str) -> Iterator[Round]:
    """The rounds of one pair of training values."""
    lr, batch = TRAINING[values]
    for arch, steps in TARGETS:
        if arch == DEEP and batch != 128:  # it takes too long for both
            continue
        for seed in SEEDS:
            yield Round(
                GLYPHS,
                arch,
                "half",
                seed,
                StepOptions(lr=lr, batch_size=batch, steps=steps),
                SimulationOptions(rounds=1, aux_per_class=50, participation=0.3 if arch == DEEP else 0.5),
            )


def judged(values: str, rows: Rows) -> tuple[list[tuple[str, ...]], bool]:
    """Lines of the table, and whether all targets are reached."""
    scores: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        r: Round = row["round"]
        if row["method"] == "rlu":
            scores.setdefault((r.arch, r.training.steps or 0), []).append(row["iAcc"])
    means = {key: sum(found) / len(found) for key, found in scores.items()}
    lines, reached = [], True
    for (arch, steps), found in scores.items():
        least = TARGETS[arch, steps]
        met = least is None or means[arch, steps] >= least
        if arch == CONVOLUTION:
            met &= abs(means[arch, steps] - means[LINEAR, steps]) <= ALIKE
        reached &= met
        wanted = "" if least is None else f"≥ {least}"
        lines.append(
            (
                *(NAMES[arch], values, str(steps), str(len(found))),
                *(mean_sd(found), f"{min(found):.3f}", wanted, _verdict(arch, least, met)),
            )
        )
    return lines, reached


def _verdict(arch: str, least: float | None, met: bool) -> str:
    judged = least is not None or arch == CONVOLUTION
    return ("yes" if met else "no") if judged else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "held_out.ndjson")
    results = Results(parser.parse_args().results)
    bench = Bench(results, images, log=lambda text: print(text, file=sys.stderr, flush=True))
    lines: list[tuple[str, ...]] = []
    reached = True
    for values in TRAINING:
        more, met = judged(values, bench.measure(rounds(values)))
        lines += more
        reached &= met
    print(f"{machine()}; mean ± standard deviation over the clients of {len(SEEDS)} seeds\n")
    print(markdown(("network", "training", "m", "clients", "iAcc", "least", "target", "met"), lines))
    sys.exit(not reached)


if __name__ == "__main__":
    main()
