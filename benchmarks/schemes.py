"""Method rlu on every FL scheme, told the right scheme and told plain FedAvg with SGD.

    python benchmarks/schemes.py                     (about 15 minutes on 2 cores)
    python benchmarks/schemes.py --seeds 1 --quick   (2 minutes)
    python benchmarks/schemes.py --method gls --only Scaffold --only "FedDyn λ = 0.1" --only "FedDC λ = 0.1"

Real training: LeNet-5, Fashion-MNIST, 10 clients, Dirichlet 0.5, batch 32, lr 0.01, 100 auxiliary images a
class. From a global model of each accuracy three rounds are simulated; the clients of the last are
recovered, so that schemes that remember have something to remember. Prints Markdown; writes every pair's
scores to results/schemes.ndjson.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import NORMALIZATION, lenet_at_accuracy, machine, markdown, mean_sd, write_ndjson

from rlu_cli.audit.archive_evaluation import evaluate_archive
from rlu_cli.audit.options import SimulationOptions, StepOptions, TrainingOptions
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.run import Simulator
from rlu_cli.simulation.settings import Simulation

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--method", default="rlu", help="instead of rlu")
    parser.add_argument("--only", action="append", choices=SCHEMES, help="a scheme; may be repeated")
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be repeated; default: all")
    parser.add_argument("--quick", action="store_true", help="the first two stages only")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "schemes.ndjson")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    quick = list(STAGES)[: 2 if arguments.quick else 3]
    stages = {stage: STAGES[stage] for stage in arguments.stage or quick}
    rows = []
    for seed in range(arguments.seeds):
        for stage, target in stages.items():
            start = lenet_at_accuracy(images, target, seed=seed)
            for name in arguments.only or SCHEMES:
                for steps in (1, 10) if name == "FedAvg, SGD" else (10,):
                    rows += measure(images, start, seed, stage, name, steps, arguments.method)
    write_ndjson(arguments.output, rows)
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients, mean ± standard deviation over clients\n")
    print(table(rows, list(stages), arguments.method))


def measure(
    images: Any, start: Any, seed: int, stage: str, name: str, steps: int, method: str
) -> list[dict[str, Any]]:
    """Scores of every client of the last round, told right and told plain."""
    training = StepOptions(lr="0.01", batch_size=32, steps=steps, **SCHEMES[name])
    simulation = Simulation(
        "fashion-mnist", "lenet5", NORMALIZATION, seed, training, SimulationOptions(rounds=ROUNDS)
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "archive"
        for _ in Simulator(simulation, images, root, start=start).run():
            pass
        for told, override in (("right", TrainingOptions()), ("plain", PLAIN)):
            for pair in evaluate_archive(root, [method], training=override, rounds=[ROUNDS]):
                rows.append(
                    {
                        "seed": seed,
                        "stage": stage,
                        "scheme": name,
                        "steps": steps,
                        "told": told,
                        "client": pair.client,
                        "method": pair.method,
                        "model_accuracy": pair.accuracy,
                        **pair.numbers(),
                    }
                )
    return rows


def table(rows: list[dict[str, Any]], stages: list[str], method: str) -> str:
    """Scheme × stage: iAcc and cAcc told right, the same told plain FedAvg; bounds where there are any."""
    lines = []
    for name in SCHEMES:
        for steps in (1, 10):
            for stage in stages:
                chosen = [
                    row for row in rows if (row["scheme"], row["steps"], row["stage"]) == (name, steps, stage)
                ]
                if not chosen:
                    continue
                right = [r for r in chosen if r["told"] == "right" and r["method"] == method]
                plain = [r for r in chosen if r["told"] == "plain" and r["method"] == method]
                uniform = [r for r in chosen if r["told"] == "right" and r["method"] != method]
                bounded = [r for r in right if "bounds_hold" in r]
                bounds = (
                    f"{sum(r[key] for r in bounded) / max(len(bounded), 1):.1%}"
                    for key in ("bounds_hold", "bounds_width")
                )
                accuracy = sum(r["model_accuracy"] for r in right) / len(right)
                lines.append(
                    (
                        name,
                        str(steps),
                        f"{stage} ({accuracy:.0%})",
                        mean_sd(r["iAcc"] for r in right),
                        mean_sd(r["cAcc"] for r in right),
                        mean_sd(r["iAcc"] for r in plain),
                        mean_sd(r["cAcc"] for r in plain),
                        mean_sd(r["iAcc"] for r in uniform),
                        ", ".join(bounds) if bounded else "",
                    )
                )
    columns = (
        "scheme",
        "m",
        "model",
        "iAcc",
        "cAcc",
        "iAcc, told FedAvg",
        "cAcc, told FedAvg",
        "uniform iAcc",
        "bounds hold, width",
    )
    return markdown(columns, lines)


if __name__ == "__main__":
    main()
