"""The default method against `rlu` in settings drawn at random: scores, bounds and grades.

    OMP_NUM_THREADS=1 python -m benchmarks.random_settings --first 200 --settings 40      (about 20 minutes)

No one setting is chosen: data (Fashion-MNIST, scikit-learn's digits, 62 classes of glyphs), network, how
trained the model is, learning rate, batch size, steps or epochs, optimiser, skew, auxiliary images, and known
noise are drawn by the setting's number. Three clients each, real SGD. The default was developed on settings
below 200. Prints Markdown; every client is in results/random_settings.ndjson, and settings that are there
already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, markdown
from benchmarks.data import images
from benchmarks.rounds import Pretraining, Round, global_model
from rlu_cli.audit.archive_evaluation import UNIFORM, evaluate_archive
from rlu_cli.audit.options import ModelOptions, RunOptions, SimulationOptions, StepOptions
from rlu_cli.core.reliability import GRADES
from rlu_cli.errors import RluError
from rlu_cli.simulation.run import Simulator
from rlu_cli.simulation.settings import Simulation

NETWORKS = "benchmarks/networks.py"
SMALL, MLP, VGG = (f"{NETWORKS}:{name}" for name in ("small_cnn", "mlp", "small_vgg"))
CLIENTS = 3
Row = dict[str, Any]

FASHION = (
    "lenet5",
    "lenet5:activation=tanh",
    "lenet5:activation=leaky_relu",
    f"{SMALL}:num_classes=10",
    f"{SMALL}:num_classes=10,norm=group",
    f"{SMALL}:num_classes=10,norm=none",
    f"{MLP}:inputs=3072",
    f"{VGG}:width=16",
    f"{VGG}:width=16,norm=group",
)
DIGITS = ("lenet5", f"{MLP}:inputs=64", f"{MLP}:inputs=64,depth=1")
GLYPHS = ("lenet5", SMALL, f"{SMALL}:norm=group", f"{SMALL}:norm=group,head=conv")


def setting(number: int) -> Round:
    """The round of this number."""
    drawn = random.Random(1000 + number)
    kind = drawn.choice(("fashion", "fashion", "fashion", "digits", "glyphs"))
    data, networks = {
        "fashion": ("fashion-mnist-32-2000", FASHION),
        "digits": ("digits", DIGITS),
        "glyphs": ("glyphs-62-32-200", GLYPHS),
    }[kind]
    arch = drawn.choice(networks)
    pretraining = drawn.choice((0, 0, 50, 300, 1000, 3000))
    lr = drawn.choice(("0.01", "0.01", "0.02", "0.05"))
    if kind == "digits":
        lr = drawn.choice(("0.05", "0.1"))
    batch_size = drawn.choice((8, 16, 32, 32, 64, 128))
    length = drawn.choice(("1", "1", "5", "10", "10", "10", "20", "e1", "e2", "e5"))
    more: dict[str, Any] = {}
    which = drawn.random()
    if which < 0.1:
        more = {"momentum": 0.9}
    elif which < 0.15:
        more = {"momentum": 0.9, "nesterov": True}
    elif which < 0.2:
        more = {"scheme": "fedprox", "lambda_": drawn.choice((0.1, 1.0))}
    elif which < 0.25:
        more = {"weight_decay": 1e-3}
    elif which < 0.32:
        more, lr = {"optimizer": "adam"}, "0.001"
    span = {"epochs": int(length[1:])} if length.startswith("e") else {"steps": int(length)}
    aux = drawn.choice((10, 20, 50, 100, 100))
    if kind != "fashion":
        aux = drawn.choice((10, 20, 30 if kind == "digits" else 50))
    clients = drawn.choice((10, 20, 40))
    noise = drawn.choice((0.0, 0.0, 0.0, 0.0, 0.0, 1e-4, 1e-3))
    return Round(
        data,
        arch,
        "half",
        number,
        StepOptions(lr=lr, batch_size=batch_size, **span, **more),
        SimulationOptions(
            rounds=1,
            aux_per_class=aux,
            clients=clients,
            participation=CLIENTS / clients,
            alpha=drawn.choice((0.1, 0.3, 0.5, 1.0, 5.0)),
            noise_std=noise,
        ),
        Pretraining(pretraining, lr=0.02 if kind == "fashion" else 0.05),
        methods=("auto",) if "optimizer" in more else ("rlu", "auto"),
    )


def measure(round_: Round) -> list[Row]:
    """Scores of every client by each method; where the round can't be recovered, one row that says why."""
    simulation = Simulation(
        round_.data, round_.arch, round_.normalize, round_.seed, round_.training, round_.options
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rlu-benchmark-") as folder:
        root = Path(folder) / "archive"
        start = global_model(round_, images, "cpu")
        simulator = Simulator(
            simulation, images(round_.data), root, start=start, allow_user_code=True, device="cpu"
        )
        try:
            for _ in simulator.run():
                pass
            model = ModelOptions(arch=round_.arch if ".py:" in round_.arch else None)
            pairs = list(evaluate_archive(root, round_.methods, model=model, run=RunOptions(device="cpu")))
        except RluError as error:
            return [{"refused": str(error)}]
    asked = (*round_.methods, UNIFORM)
    for place, pair in enumerate(pairs):
        rows.append(
            {
                "client": pair.client,
                "asked": asked[place % len(asked)],
                "method": pair.method,
                "model_accuracy": pair.accuracy,
                **pair.numbers(),
                "warnings": list(pair.warnings),
                "grade": None if pair.reliability is None else pair.reliability.grade,
                "expected_iAcc": None if pair.reliability is None else pair.reliability.expected_i_acc,
            }
        )
    return rows


def table(rows: Iterable[Row]) -> str:
    """A line for each method that ``auto`` was, and for each grade of those with bounds."""
    clients: dict[tuple[Any, str], dict[str, Row]] = {}
    for row in rows:
        if "refused" not in row:
            clients.setdefault((row["number"], row["client"]), {})[row["asked"]] = row
    whole = [found for found in clients.values() if "rlu" in found]
    bounded = [found for found in whole if "bounds_hold" in found["auto"]]
    lines = []
    for method in sorted({found["auto"]["method"] for found in whole}):
        lines.append(_line(f"`{method}`", [f for f in whole if f["auto"]["method"] == method]))
    for grade in GRADES:
        lines.append(_line(f"with bounds, {grade}", [f for f in bounded if f["auto"]["grade"] == grade]))
    lines.append(_line("all", whole))
    columns = ("`auto` is", "clients", "rlu iAcc", "auto iAcc", "expected iAcc", "bounds hold, width")
    return markdown((*columns, "worse than rlu by 0.05", "better"), lines)


def _line(name: str, found: list[dict[str, Row]]) -> tuple[str, ...]:
    if not found:
        return (name, "0", *[""] * 6)
    rlu, auto = (np.array([f[asked]["iAcc"] for f in found]) for asked in ("rlu", "auto"))
    expected = [f["auto"]["expected_iAcc"] for f in found if f["auto"]["expected_iAcc"] is not None]
    bounds = [f["auto"] for f in found if "bounds_hold" in f["auto"]]
    return (
        name,
        str(len(found)),
        f"{rlu.mean():.3f}",
        f"{auto.mean():.3f}",
        f"{np.mean(expected):.3f}" if expected else "",
        ", ".join(f"{np.mean([row[key] for row in bounds]):.1%}" for key in ("bounds_hold", "bounds_width"))
        if bounds
        else "",
        str(int(np.sum(auto < rlu - 0.05))),
        str(int(np.sum(auto > rlu + 0.05))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "random_settings.ndjson"
    )
    chosen = parser.parse_args()
    text = chosen.results.read_text(encoding="utf-8") if chosen.results.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    there = {row["number"] for row in rows}
    numbers = range(chosen.first, chosen.first + chosen.settings)
    for number in numbers:
        if number in there:
            continue
        round_ = setting(number)
        found = [{"number": number, **row} for row in measure(round_)]
        found[0]["round"] = {key: value for key, value in asdict(round_).items() if key != "methods"}
        with chosen.results.open("a", encoding="utf-8") as handle:
            handle.writelines(json.dumps(row) + "\n" for row in found)
        rows += found
    print(f"{machine()}; settings {numbers.start} to {numbers.stop - 1}\n")
    print(table(row for row in rows if row["number"] in numbers))


if __name__ == "__main__":
    main()
