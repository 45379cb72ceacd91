"""How often the self-checks warn: with right inputs (never, one hopes) and with wrong ones.

    python benchmarks/self_checks.py --seeds 10      (about two hours on one core)
    python benchmarks/self_checks.py --seeds 2       (half an hour)

Real training: LeNet-5, Fashion-MNIST, 100 auxiliary images a class, 10 clients a round from global models of
four accuracies, Dirichlet 0.5 and 0.1 by turns; ResNet-32 with BatchNorm on 62 classes of rendered glyphs;
LeNet-5 on scikit-learn's digits, whose clients have so few images that they see each several times. Prints
Markdown; writes each round's numbers to results/self_checks.ndjson.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import NORMALIZATION, lenet_at_accuracy, machine, markdown, write_ndjson

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.options import ModelOptions, RunOptions, SimulationOptions, StepOptions, TrainingOptions
from rlu_cli.core.metrics import score_counts
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.models.spec import ModelSpec, parse_spec
from rlu_cli.simulation.archive import AUX, read_truth_lines, round_folder
from rlu_cli.simulation.run import Simulator
from rlu_cli.simulation.settings import Simulation

STAGES = {"untrained": 0.0, "27 %": 0.27, "60 %": 0.6, "80 %": 0.8}
SETTINGS: dict[str, dict[str, Any]] = {
    "m = 1": {"steps": 1},
    "m = 1, B = 128": {"steps": 1, "batch_size": 128},
    "m = 10": {"steps": 10},
    "m = 10, momentum 0.9": {"steps": 10, "momentum": 0.9},
    "m = 10, lr 0.05": {"steps": 10, "lr": "0.05"},
}
WRONG_SEEDS = 2
"""Seeds of which the wrong inputs are tried too."""

RUN = RunOptions(samples=500)
"""The misfit doesn't use the Monte Carlo S, and the counts hardly feel it."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--archives", type=Path, required=True, help="where simulated rounds are kept")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "self_checks.ndjson"
    )
    arguments = parser.parse_args()
    rows: list[Row] = []
    for archive, labels, seed in archives(arguments.archives, arguments.seeds):
        kept = archive / "scores.json"  # an interrupted run goes on where it stopped
        if not kept.exists():
            kept.write_text(json.dumps(list(scores(archive, wrong=seed < WRONG_SEEDS))), encoding="utf-8")
        rows += [{**labels, "seed": seed, **row} for row in json.loads(kept.read_text(encoding="utf-8"))]
    write_ndjson(arguments.output, rows)
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients\n")
    print(table(rows))


def archives(root: Path, seeds: int) -> Iterator[tuple[Path, dict[str, str], int]]:
    """Simulated rounds, made where they are missing: the folder, what it is, its seed."""
    fashion, digits = open_dataset("fashion-mnist"), open_dataset("digits")
    for seed in range(seeds):
        for stage, target in STAGES.items():
            start = lenet_at_accuracy(fashion, target, seed=seed)
            for setting, options in SETTINGS.items():
                folder = root / f"lenet5-{stage}-{setting}-{seed}".replace(" ", "")
                simulate(folder, fashion, "lenet5", NORMALIZATION, seed, options, start)
                yield folder, {"data": "Fashion-MNIST", "model": stage, "setting": setting}, seed
        for setting in ("m = 1", "m = 10"):
            folder = root / f"digits-{setting}-{seed}".replace(" ", "")
            options = {**SETTINGS[setting], "lr": "0.05"}
            simulate(folder, digits, "lenet5", "half", seed, options, rounds=8, aux_per_class=30)
            yield folder, {"data": "digits", "model": "8 rounds", "setting": setting}, seed


def simulate(
    folder: Path,
    images: ImageSet,
    arch: str,
    normalize: str,
    seed: int,
    options: dict[str, Any],
    start: Any = None,
    **more: Any,
) -> None:
    training = StepOptions(**{"lr": "0.01", "batch_size": 32, **options})
    federation = SimulationOptions(**{"rounds": 1, "alpha": (0.5, 0.1)[seed % 2], **more})
    simulation = Simulation(folder.name, arch, normalize, seed, training, federation)
    if not (folder / "final.safetensors").exists():
        for _ in Simulator(simulation, images, folder, start=start).run():
            pass


def scores(archive: Path, *, wrong: bool) -> Iterator[Row]:
    """Misfit, embedding match, warnings and iAcc of each client, with right inputs and with wrong ones."""
    about = read_checkpoint(archive / "final.safetensors").metadata
    names = json.loads(about["fl.class_names"])
    spec = parse_spec(about["fl.arch"])
    tanh = str(ModelSpec(spec.name, {**spec.kwargs, "activation": "tanh"}))
    inputs = {"right": (ModelOptions(), 1.0)}
    if wrong:
        inputs |= {
            "lr / 2": (ModelOptions(), 0.5),
            "lr × 2": (ModelOptions(), 2.0),
            "normalisation none": (ModelOptions(normalize="none"), 1.0),
            "normalisation half": (ModelOptions(normalize="half"), 1.0),
            "activation tanh": (ModelOptions(arch=tanh), 1.0),
            "classes permuted": (order(archive, "permuted", [*names[3:], *names[:3]]), 1.0),
            "two classes swapped": (order(archive, "swapped", [*names[:-2], names[-1], names[-2]]), 1.0),
        }
    for line in read_truth_lines(archive):
        folder = round_folder(archive, line.round)
        local = folder / f"{line.client}.safetensors"
        trained = read_checkpoint(local).metadata
        for name, (model, factor) in inputs.items():
            auditor = shared(folder / "global.safetensors", local, archive / AUX, model)
            told = TrainingOptions(lr=str(factor * float(trained["fl.lr"])))
            if "momentum" in about and name == "right" and wrong:
                yield row(auditor, local, line, "momentum not told", replace(told, momentum=0.0))
            yield row(auditor, local, line, name, told)


def row(auditor: Auditor, local: Path, line: Any, name: str, told: TrainingOptions) -> Row:
    client = auditor.recover(local, told, ["rlu"])
    found = client.recoveries[0]
    return {
        "inputs": name,
        "round": line.round,
        "client": line.client,
        "accuracy": line.accuracy,
        "misfit": found.diagnostics["misfit"],
        "motion": found.diagnostics["motion"],
        "embedding_match": found.diagnostics["embedding_match"],
        "warnings": [note.code for note in found.warnings],
        "iAcc": score_counts(found.counts, np.array(line.counts)).i_acc,
    }


_AUDITORS: dict[tuple[Path, ModelOptions], Auditor] = {}


def shared(reference: Path, local: Path, aux: Path, model: ModelOptions) -> Auditor:
    """One auditor a global model and way of feeding it."""
    if not any(known == reference for known, _ in _AUDITORS):
        _AUDITORS.clear()
    key = (reference, model)
    if key not in _AUDITORS:
        _AUDITORS[key] = Auditor(reference, [local], aux=aux, model=model, run=RUN)
    return _AUDITORS[key]


def order(archive: Path, how: str, names: list[str]) -> ModelOptions:
    """The classes in an order of one's own."""
    path = archive / f"{how}.txt"
    path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return ModelOptions(class_order=str(path))


def table(rows: list[Row]) -> str:
    """Model × setting: share of rounds that warn, by inputs."""
    kinds = list(dict.fromkeys(row["inputs"] for row in rows))
    cells = list(dict.fromkeys((row["data"], row["model"], row["setting"]) for row in rows))
    lines = []
    for cell in cells:
        mine = [row for row in rows if (row["data"], row["model"], row["setting"]) == cell]
        line = list(cell)
        for kind in kinds:
            found = [row for row in mine if row["inputs"] == kind]
            warned = np.mean(["update-unexplained" in row["warnings"] for row in found]) if found else None
            line.append("" if warned is None else f"{warned:.0%}")
        right = [row for row in mine if row["inputs"] == "right"]
        line.append(str(len(right)))
        line.append(f"{np.mean([row['iAcc'] for row in right]):.3f}")
        lines.append(line)
    return markdown(("data", "model", "setting", *kinds, "rounds", "iAcc"), lines)


if __name__ == "__main__":
    main()
