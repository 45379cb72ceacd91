"""Every FL scheme told right, by rlu and by default, and told to be plain FedAvg with SGD.

    python benchmarks/schemes.py                     (about an hour on 2 cores)
    python benchmarks/schemes.py --seeds 1 --stage untrained
    python benchmarks/schemes.py --epochs --only Scaffold --only "FedDyn λ = 0.1" --only "FedDC λ = 0.1"

Real training: LeNet-5, Fashion-MNIST, 10 clients, Dirichlet 0.5, batch 32, lr 0.01, 100 auxiliary images a
class; one or ten steps, or with --epochs five epochs of about 1,000 images. From a global model of each
accuracy three rounds are simulated; the clients of the last are recovered, so that schemes that remember have
something to remember. Prints Markdown; writes every pair's scores to results/schemes.ndjson.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from common import (
    Row,
    bounds,
    chosen_seeds,
    lenet_at_accuracy,
    machine,
    markdown,
    mean_sd,
    seeds_parser,
    write_ndjson,
)
from regimes import few, lenet_simulator, played
from torch import Tensor

from rlu_cli.audit.archive_evaluation import UNIFORM, evaluate_archive
from rlu_cli.audit.options import SimulationOptions, StepOptions, TrainingOptions
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset

SCHEMES: dict[str, dict[str, Any]] = {
    "FedAvg, SGD": {},
    "FedAvg, SGD momentum 0.9": {"momentum": 0.9},
    "FedAvg, Nesterov 0.9": {"momentum": 0.9, "nesterov": True},
    "FedProx λ = 5": {"scheme": "fedprox", "lambda_": 5.0},
    "Scaffold": {"scheme": "scaffold"},
    "FedDyn λ = 0.1": {"scheme": "feddyn", "lambda_": 0.1},
    "FedDC λ = 0.1": {"scheme": "feddc", "lambda_": 0.1},
}
STAGES = {"untrained": 0.0, "27 %": 0.27, "80 %": 0.8}
PLAIN = TrainingOptions(scheme="fedavg", momentum=0.0, nesterov=False, lambda_=0.0)
ROUNDS = 3
EPOCHS = "5 epochs"
ASKED = (("right", "rlu"), ("right", "auto"), ("plain", "rlu"))
"""How the auditor is told that clients trained, and the method."""


def main() -> None:
    parser = seeds_parser(__doc__, results="schemes.ndjson")
    parser.set_defaults(seeds=2)
    parser.add_argument("--epochs", action="store_true", help="five epochs instead of one or ten steps")
    parser.add_argument("--only", action="append", choices=SCHEMES, help="a scheme; may be repeated")
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be repeated; default: all")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    stages = {stage: STAGES[stage] for stage in arguments.stage or STAGES}
    rows = []
    for seed in chosen_seeds(arguments):
        for stage, target in stages.items():
            start = lenet_at_accuracy(images, target, seed=seed)
            for name in arguments.only or SCHEMES:
                short = ("1", "10") if name == "FedAvg, SGD" else ("10",)
                for long in (EPOCHS,) if arguments.epochs else short:
                    rows += measure(images, start, seed, stage, name, long)
                    write_ndjson(arguments.output, rows)
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients, mean ± standard deviation over clients\n")
    print(table(rows, list(stages)))


def measure(
    images: ImageSet, start: Mapping[str, Tensor], seed: int, stage: str, name: str, long: str
) -> list[Row]:
    """Scores of every client of the last round, told right and told plain."""
    if long == EPOCHS:
        images, trained = few(images, seed), {"epochs": 5}
    else:
        trained = {"steps": int(long)}
    training = StepOptions(lr="0.01", batch_size=32, **trained, **SCHEMES[name])
    federation = SimulationOptions(rounds=ROUNDS)
    rows = []
    with played(lambda root: lenet_simulator(images, training, federation, seed, root, start=start)) as root:
        for told, asked in ASKED:
            override = PLAIN if told == "plain" else TrainingOptions()
            for pair in evaluate_archive(root, [asked], training=override, rounds=[ROUNDS]):
                if pair.method == UNIFORM and (told, asked) != ASKED[0]:
                    continue  # known by then
                rows.append(
                    {
                        "seed": seed,
                        "stage": stage,
                        "scheme": name,
                        "steps": long,
                        "told": told,
                        "client": pair.client,
                        "asked": asked,
                        "method": pair.method,
                        "model_accuracy": pair.accuracy,
                        **pair.numbers(),
                        "warnings": list(pair.warnings),
                    }
                )
    return rows


def table(rows: list[Row], stages: list[str]) -> str:
    """Scheme × stage: scores told right by either method, by rlu told plain FedAvg; bounds of the default."""
    lines = []
    for name, long, stage in product(SCHEMES, ("1", "10", EPOCHS), stages):
        own = [row for row in rows if (row["scheme"], row["steps"], row["stage"]) == (name, long, stage)]
        if not own:
            continue
        rlu, auto, plain = (
            [row for row in own if (row["told"], row["asked"]) == which and row["method"] != UNIFORM]
            for which in ASKED
        )
        uniform = [row for row in own if row["method"] == UNIFORM]
        accuracy = sum(row["model_accuracy"] for row in rlu) / len(rlu)
        lines.append(
            (
                name,
                long,
                f"{stage} ({accuracy:.0%})",
                str(len(rlu)),
                *(mean_sd(row["iAcc"] for row in part) for part in (rlu, auto)),
                *(mean_sd(row["cAcc"] for row in part) for part in (rlu, auto)),
                bounds(auto),
                mean_sd(row["iAcc"] for row in plain),
                mean_sd(row["iAcc"] for row in uniform),
            )
        )
    columns = (
        "scheme",
        "m",
        "model",
        "clients",
        "rlu iAcc",
        "auto iAcc",
        "rlu cAcc",
        "auto cAcc",
        "auto bounds hold, width",
        "rlu iAcc, told FedAvg",
        "uniform iAcc",
    )
    return markdown(columns, lines)


if __name__ == "__main__":
    main()
