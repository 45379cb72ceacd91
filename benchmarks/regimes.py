"""Methods rlu, gls, regression and replay where they differ: scores, and how often bounds hold.

    python benchmarks/regimes.py --seeds 3      (about an hour on 2 cores)
    python benchmarks/regimes.py --seeds 1 --only "80 %, m = 1"
    python benchmarks/regimes.py --seeds 3 --alpha 0.01 --only "80 %, m = 10"      (one class or two a client)
    python benchmarks/regimes.py --seeds 3 --aux 10 --only "80 %, m = 10"      (ten auxiliary images a class)

Real training: LeNet-5, Fashion-MNIST, 10 clients a round, Dirichlet 0.5, batch 32, lr 0.01, 100 auxiliary
images a class. Prints Markdown; writes every client's scores to results/regimes.ndjson, round by round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from common import (
    NORMALIZATION,
    Row,
    bounds,
    chosen_seeds,
    gathered,
    lenet_at_accuracy,
    machine,
    markdown,
    mean_sd,
    seeds_parser,
)
from torch import Tensor

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.client_round import ClientRound
from rlu_cli.audit.options import (
    AuxOptions,
    ModelOptions,
    RunOptions,
    SimulationOptions,
    StepOptions,
    TrainingOptions,
)
from rlu_cli.audit.report import client_reliability
from rlu_cli.core.metrics import score_bounds, score_counts, uniform_counts
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.archive import AUX, TruthLine, read_truth_lines, round_folder
from rlu_cli.simulation.run import Simulator
from rlu_cli.simulation.settings import Simulation

FEW = 12_000
"""Images of the federation whose clients run epochs: about 1,000 a client."""

EPOCHS: dict[str, Any] = {"epochs": 5}
MOMENTUM: dict[str, Any] = {"steps": 10, "momentum": 0.9}
FAST = "0.05"
REGIMES: dict[str, tuple[float, dict[str, Any]]] = {
    "untrained, m = 1": (0.0, {"steps": 1}),
    "untrained, m = 10": (0.0, {"steps": 10}),
    "27 %, m = 1": (0.27, {"steps": 1}),
    "27 %, m = 10": (0.27, {"steps": 10}),
    "27 %, m = 10, momentum 0.9": (0.27, MOMENTUM),
    "27 %, m = 10, Nesterov 0.9": (0.27, {**MOMENTUM, "nesterov": True}),
    "27 %, m = 10, FedProx λ = 5": (0.27, {"steps": 10, "scheme": "fedprox", "lambda_": 5.0}),
    "80 %, m = 1": (0.8, {"steps": 1}),
    "80 %, m = 10": (0.8, {"steps": 10}),
    "untrained, m = 10, lr 0.05": (0.0, {"steps": 10, "lr": FAST}),
    "27 %, m = 10, lr 0.05": (0.27, {"steps": 10, "lr": FAST}),
    "80 %, m = 10, lr 0.05": (0.8, {"steps": 10, "lr": FAST}),
    "untrained, 5 epochs × 1,000": (0.0, EPOCHS),
    "80 %, 5 epochs × 1,000": (0.8, EPOCHS),
}
ALPHA = 0.5
METHODS = ("rlu", "gls", "disaggregation", "regression", "replay", "auto")


def main() -> None:
    parser = seeds_parser(__doc__, results="regimes.ndjson")
    parser.add_argument("--only", action="append", choices=REGIMES, help="a regime; may be repeated")
    parser.add_argument("--method", action="append", choices=METHODS, help="may be repeated; default: all")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="of the clients' label skew; default: 0.5")
    parser.add_argument("--aux", type=int, help="auxiliary images of a class that the auditor has of the 100")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    cases = product(arguments.only or REGIMES, chosen_seeds(arguments))
    methods = arguments.method or METHODS
    aux = AuxOptions(aux_per_class=arguments.aux)
    rows = gathered(
        (measure(images, regime, seed, methods, arguments.alpha, aux) for regime, seed in cases),
        arguments.output,
    )
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients, mean ± standard deviation over clients\n")
    print(table(rows))


def measure(
    images: ImageSet, regime: str, seed: int, methods: Sequence[str], alpha: float, aux: AuxOptions
) -> Iterator[Row]:
    """Scores of every client of one round, by each of ``methods`` on the same files."""
    with simulated(images, regime, seed, alpha=alpha) as root:
        for scores, auditor, client in scored(root, methods, aux=aux):
            found = client.recoveries[0]
            grade = client_reliability(auditor, client, found)
            yield {
                "regime": regime,
                "seed": seed,
                "aux": aux.aux_per_class,
                **scores,
                "grade": grade.grade,
                "expected_iAcc": grade.expected_i_acc,
                "motion": found.diagnostics["motion"],
                "own_confidence": found.diagnostics["own_confidence"],
            }


def clients(
    root: Path, model: ModelOptions | None = None, aux: AuxOptions | None = None
) -> Iterator[tuple[TruthLine, Path, Auditor]]:
    """What each client of an archive of one round trained on, its file, and the auditor of them all."""
    auditor = None
    for line in read_truth_lines(root):
        round_ = round_folder(root, line.round)
        local = round_ / f"{line.client}.safetensors"
        if auditor is None:
            reference = round_ / "global.safetensors"
            auditor = Auditor(
                reference,
                [local],
                aux=root / AUX,
                aux_options=aux,
                model=model or ModelOptions(),
                run=RunOptions(),
            )
        yield line, local, auditor


def scored(
    root: Path,
    methods: Sequence[str],
    told: TrainingOptions | None = None,
    *,
    model: ModelOptions | None = None,
    aux: AuxOptions | None = None,
) -> Iterator[tuple[Row, Auditor, ClientRound]]:
    """Every client of an archive of one round by each method: its scores, and what they come from.

    Parameters
    ----------
    told : training values other than the files'
    model : likewise
    aux : which of the auxiliary images the auditor has
    """
    for line, local, auditor in clients(root, model, aux):
        truth = np.array(line.counts)
        for method in methods:
            began = perf_counter()
            client = auditor.recover(local, told or TrainingOptions(), [method])
            seconds = perf_counter() - began
            found = client.recoveries[0]
            scores = {
                "client": line.client,
                "method": method,
                "accuracy": line.accuracy,
                "samples": found.total,
                **score_counts(found.counts, truth).document(),
                **score_bounds(found, truth),
                "uniform_iAcc": score_counts(uniform_counts(len(truth), found.total), truth).i_acc,
                "seconds": seconds,
                "warnings": [note.code for note in found.warnings],
            }
            yield scores, auditor, client


def simulator(images: ImageSet, regime: str, seed: int, root: Path, *, alpha: float = ALPHA) -> Simulator:
    """One round, to be simulated into the folder ``root``."""
    reached, options = REGIMES[regime]
    start = lenet_at_accuracy(images, reached, seed=seed)
    if "epochs" in options:
        images = few(images, seed)
    training = StepOptions(**{"lr": "0.01", "batch_size": 32, **options})
    federation = SimulationOptions(rounds=1, alpha=alpha)
    return lenet_simulator(images, training, federation, seed, root, start=start)


def lenet_simulator(
    images: ImageSet,
    training: StepOptions,
    federation: SimulationOptions,
    seed: int,
    root: Path,
    *,
    start: Mapping[str, Tensor] | None,
) -> Simulator:
    """LeNet-5 on Fashion-MNIST, to be simulated into the folder ``root``."""
    simulation = Simulation("fashion-mnist", "lenet5", NORMALIZATION, seed, training, federation)
    return Simulator(simulation, images, root, start=start)


def simulated(
    images: ImageSet, regime: str, seed: int, *, alpha: float = ALPHA
) -> AbstractContextManager[Path]:
    """The archive of one round."""
    return played(lambda root: simulator(images, regime, seed, root, alpha=alpha))


@contextmanager
def played(make: Callable[[Path], Simulator]) -> Iterator[Path]:
    """The archive of what is simulated into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "archive"
        for _ in make(root).run():
            pass
        yield root


def few(images: ImageSet, seed: int, count: int = FEW) -> ImageSet:
    """A random part of the images."""
    rows = np.random.default_rng(seed).choice(len(images.labels), count, replace=False)
    return replace(images, pixels=images.pixels[rows], labels=images.labels[rows])


def table(rows: list[Row]) -> str:
    """Regime by method, with the bounds' coverage and mean width as a share of all samples."""
    lines = []
    with_bounds = [m for m in METHODS if any("bounds_hold" in row for row in rows if row["method"] == m)]
    methods = [m for m in METHODS if any(row["method"] == m for row in rows)]
    for regime in dict.fromkeys(row["regime"] for row in rows):
        by = {m: [r for r in rows if r["regime"] == regime and r["method"] == m] for m in methods}
        bounded = [[r for r in by[m] if "bounds_hold" in r] for m in with_bounds]
        lines.append(
            (
                regime,
                str(len(by[methods[0]])),
                *(mean_sd(r["iAcc"] for r in by[m]) if by[m] else "" for m in methods),
                *(mean_sd(r["cAcc"] for r in by[m]) if by[m] else "" for m in methods),
                *(f"{np.mean([r['presence_cAcc'] for r in b]):.3f}" if b else "" for b in bounded),
                *(bounds(by[m]) for m in with_bounds),
            )
        )
    columns = ("model, training", "clients", *(f"{m} iAcc" for m in methods), *(f"{m} cAcc" for m in methods))
    presence = (f"{m} cAcc by presence" for m in with_bounds)
    return markdown((*columns, *presence, *(f"{m} bounds hold, width" for m in with_bounds)), lines)


if __name__ == "__main__":
    main()
