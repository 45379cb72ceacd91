"""What each group of features is worth to `replay`: the regression learnt again without it, on real clients.

    OMP_NUM_THREADS=1 python benchmarks/replay_features.py --seeds 3      (about 20 minutes)

The replays and the real clients are those of benchmarks/regimes.py. No replays near the answer are made:
their mixes would hang on the features. Prints Markdown; every client is in results/replay_features.ndjson.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from common import Row, chosen_seeds, gathered, machine, markdown, mean_sd, seeds_parser
from regimes import clients, simulated

from rlu_cli.audit.options import TrainingOptions
from rlu_cli.core.kernel_regression import ClassPrediction, KernelRegression
from rlu_cli.core.methods import replay
from rlu_cli.core.metrics import score_counts
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.types import FloatArray
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset

REGIMES = (
    "27 %, m = 10, lr 0.05",
    "80 %, m = 10",
    "80 %, m = 10, lr 0.05",
    "untrained, 5 epochs × 1,000",
    "80 %, 5 epochs × 1,000",
)
WIDTH = 38
GROUPS: dict[str, Sequence[int]] = {
    "the guesses of gls": (0, 1, 6, 7),
    "least squares": (2, 5, 8),
    "the bias update": (3, 4, 9),
    "how logits moved": range(10, 17),
    "confidences": range(17, 28),
    "the weight along mean embeddings": range(28, 33),
    "the weight along the head's rows": range(33, 38),
}
"""Columns of `class_features`, with two guesses before its own."""

GUESSES = {"the guesses of gls": 1, "least squares": 2}
"""How many of the first columns are guesses without a group; three with all."""


def main() -> None:
    parser = seeds_parser(__doc__, results="replay_features.ndjson", first_seed=30)
    parser.add_argument("--only", action="append", choices=REGIMES, help="a regime; may be repeated")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    regimes = arguments.only or REGIMES
    parts = (measure(images, regime, seed) for regime in regimes for seed in chosen_seeds(arguments))
    rows = gathered(parts, arguments.output)
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients, mean iAcc ± standard deviation over clients\n")
    print(table(rows))


def measure(images: ImageSet, regime: str, seed: int) -> Iterator[Row]:
    """Every client of one round, by the regression with all features and without each group."""
    learnt: dict[tuple[KernelRegression, str], KernelRegression] = {}
    with simulated(images, regime, seed) as root:
        for line, local, auditor in clients(root):
            truth = np.array(line.counts)
            with spied() as asked:
                auditor.recover(local, TrainingOptions(), ["replay"])
            whole, features = asked[0]
            if features.shape[1] != WIDTH:
                raise RuntimeError(f"expected {WIDTH} features, found {features.shape[1]}: correct GROUPS")
            for name in ("none", *GROUPS):
                kept = np.setdiff1d(np.arange(WIDTH), GROUPS.get(name, ()))
                if (whole, name) not in learnt:  # whole epochs have several, by the clients' sizes
                    bank = replace(whole.replays, features=whole.replays.features[:, :, kept])
                    learnt[whole, name] = KernelRegression(bank, guesses=GUESSES.get(name, 3))
                z = learnt[whole, name](features[:, kept]).proportions
                found = score_counts(round_to_total(z, int(truth.sum())), truth).document()
                yield {"regime": regime, "seed": seed, "client": line.client, "without": name, **found}


@contextmanager
def spied() -> Iterator[list[tuple[KernelRegression, FloatArray]]]:
    """What `replay` asks of which regression; without replays near the answer."""
    asked: list[tuple[KernelRegression, FloatArray]] = []
    answer, nearby = KernelRegression.__call__, replay.number_nearby

    def spy(regression: KernelRegression, features: FloatArray) -> ClassPrediction:
        asked.append((regression, features))
        return answer(regression, features)

    KernelRegression.__call__ = spy  # type: ignore[method-assign]
    replay.number_nearby = lambda observation: 0
    try:
        yield asked
    finally:
        KernelRegression.__call__ = answer  # type: ignore[method-assign]
        replay.number_nearby = nearby


def table(rows: list[Row]) -> str:
    """Regime by group left out, with the mean of all regimes."""
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    lines = []
    for name in ("none", *GROUPS):
        by = [[r["iAcc"] for r in rows if r["without"] == name and r["regime"] == g] for g in regimes]
        lines.append((name, *map(mean_sd, by), f"{np.mean([np.mean(values) for values in by]):.4f}"))
    return markdown(("left out", *regimes, "mean"), lines)


if __name__ == "__main__":
    main()
