"""What clipping, noise, sparsification and quantisation of updates leave of the counts, told and not told.

    python benchmarks/defences.py --seeds 3 --first-seed 60      (about an hour on two cores)
    python benchmarks/defences.py --seeds 1 --only noise --model "80 %"

Real training: LeNet-5, Fashion-MNIST, Dirichlet 0.5, batch 32, lr 0.01, 100 auxiliary images a class, 10
clients a round; with ten steps 4 of them, and one or two strengths of each defence. Each client trains once,
and its update is defended in every way; all of a round are clipped to the same norm. Prints Markdown; writes
every client's scores to results/defences.ndjson.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from common import (
    Row,
    bounds,
    chosen_seeds,
    gathered,
    machine,
    markdown,
    mean_sd,
    seeds_parser,
)
from regimes import clients, simulated
from torch import Tensor

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.options import TrainingOptions
from rlu_cli.core.metrics import score_counts
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import Checkpoint, read_checkpoint
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.archive import save_model
from rlu_cli.simulation.defences import Defence

MODELS = ("untrained", "27 %", "80 %")
STEPS = (1, 10)
DEFENCES: dict[str, dict[float, Defence]] = {
    "none": {0: Defence()},
    "noise": {sigma: Defence(noise_std=sigma) for sigma in (1e-4, 1e-3, 1e-2)},
    "clip": {share: Defence(clip=share) for share in (0.7, 0.3)},
    "clip 0.3, noise": {1e-4: Defence(clip=0.3, noise_std=1e-4)},
    "quantize": {bits: Defence(quantize=int(bits)) for bits in (8, 4, 2)},
    "top-k": {share: Defence(top_k=share) for share in (0.3, 0.1, 0.01)},
    "clip 0.3, quantize": {bits: Defence(clip=0.3, quantize=int(bits)) for bits in (8, 4)},
}
"""By name and strength: σ, bound in units of the round's median norm, bits, share of the values sent."""

FEWER: dict[str, tuple[float, ...]] = {
    "none": (0,),
    "noise": (1e-3,),
    "clip": (0.3,),
    "clip 0.3, noise": (1e-4,),
    "quantize": (4, 2),
    "top-k": (0.1, 0.01),
    "clip 0.3, quantize": (8,),
}
FEW = 4
"""What is measured of ten steps, whose replays take seconds: one or two strengths, and clients a round."""

KNOWN = ("noise", "clip", "clip 0.3, noise")
"""Defences that an auditor can be told of."""

METHODS = ("rlu", "auto")


def main() -> None:
    parser = seeds_parser(__doc__, results="defences.ndjson")
    parser.add_argument("--only", action="append", choices=DEFENCES, help="a defence; may be repeated")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; default: all")
    parser.add_argument("--steps", action="append", type=int, choices=STEPS, help="may be repeated")
    parser.add_argument("--method", action="append", choices=METHODS, help="may be repeated; default: all")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    chosen = {"defences": arguments.only or list(DEFENCES), "methods": arguments.method or METHODS}
    cases = product(arguments.model or MODELS, arguments.steps or STEPS, chosen_seeds(arguments))
    rows = gathered((measure(images, *case, **chosen) for case in cases), arguments.output)
    print(f"{machine()}; {arguments.seeds} seeds, mean ± standard deviation over clients\n")
    print(table(rows))


def measure(
    images: ImageSet, model: str, steps: int, seed: int, *, defences: Sequence[str], methods: Sequence[str]
) -> Iterator[Row]:
    """Scores of every client of one round, under every defence, told of it and not, by each method."""
    with simulated(images, f"{model}, m = {steps}", seed) as root:
        few = list(clients(root))[: FEW if steps > 1 else None]
        reference = read_checkpoint(few[0][1].with_name("global.safetensors"))
        trained = [read_checkpoint(path) for _, path, _ in few]
        median = float(np.median([float(update_of(sent, reference).norm()) for sent in trained]))
        for index, ((line, _, auditor), sent) in enumerate(zip(few, trained, strict=True)):
            local = root / "defended.safetensors"
            truth = np.array(line.counts)
            for name in defences:
                for strength, defence in DEFENCES[name].items():
                    if steps > 1 and strength not in FEWER[name]:
                        continue
                    if defence.clip is not None:
                        defence = replace(defence, clip=median * defence.clip)
                    for told in (False, True) if name in KNOWN else (False,):
                        defend(sent, reference, local, defence, told=told, seed=1000 * seed + index)
                        about = {
                            "model": model,
                            "steps": steps,
                            "seed": seed,
                            "client": line.client,
                            "defence": name,
                            "strength": strength,
                            "told": told,
                        }
                        for method in methods:
                            yield {**about, "method": method, **score(auditor, local, method, truth)}


def defend(
    sent: Checkpoint, reference: Checkpoint, path: Path, defence: Defence, *, told: bool, seed: int
) -> None:
    """Write what a client sends whose update is ``sent`` − ``reference``."""
    names = list(sent.tensors)
    change = defence.apply(update_of(sent, reference), torch.Generator().manual_seed(seed))
    after = _flat(reference, names) + change
    parts = torch.split(after, [sent.tensors[name].numel() for name in names])
    tensors = {name: part.reshape(sent.tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    values = asdict(defence)
    known = {f"fl.{key}": str(values[key]) for key in ("noise_std", "clip") if told and values[key]}
    save_model(path, tensors, {**sent.metadata, **known})


def update_of(sent: Checkpoint, reference: Checkpoint) -> Tensor:
    """A client's whole update, flat."""
    names = list(sent.tensors)
    return _flat(sent, names) - _flat(reference, names)


def _flat(checkpoint: Checkpoint, names: Sequence[str]) -> Tensor:
    return torch.cat([checkpoint.tensors[name].flatten() for name in names])


def score(auditor: Auditor, local: Path, method: str, truth: Any) -> Row:
    """One method on one file."""
    began = perf_counter()
    try:
        client = auditor.recover(local, TrainingOptions(), [method])
    except MismatchError:  # nothing was sent of the output layer, or not of its bias
        return {"warnings": ["refused"]}
    found = client.recoveries[0]
    row = {
        **score_counts(found.counts, truth).document(),
        "seconds": perf_counter() - began,
        "warnings": sorted({note.code for note in (*client.notes, *found.warnings)}),
    }
    if found.low is not None and found.high is not None:
        row["covered"] = float(np.mean((found.low <= truth) & (truth <= found.high)))
        row["width"] = float(np.mean(found.high - found.low)) / found.total
    return row


def table(rows: list[Row]) -> str:
    """A line for each model, step count, defence and strength; bounds as coverage and mean width."""
    lines = []
    methods = [m for m in METHODS if any(row["method"] == m for row in rows)]
    bounded = [m for m in methods if any("covered" in row for row in rows if row["method"] == m)]
    keys = ("model", "steps", "defence", "strength", "told")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        own = [row for row in rows if tuple(row[k] for k in keys) == key]
        by = {m: [row for row in own if row["method"] == m] for m in methods}
        model, steps, defence, strength, told = key
        lines.append(
            (
                model,
                str(steps),
                defence if defence == "none" else f"{defence} {strength:g}",
                ("yes" if told else "no") if defence in KNOWN else "",
                str(len(by[methods[0]])),
                *(mean_of(by[m]) for m in methods),
                *(bounds(by[m], ("covered", "width")) for m in bounded),
                ", ".join(sorted({code for row in own for code in row["warnings"]})),
            )
        )
    return markdown(
        (
            "model",
            "m",
            "defence",
            "told",
            "clients",
            *(f"{m} iAcc" for m in methods),
            *(f"{m} bounds hold, width" for m in bounded),
            "warnings",
        ),
        lines,
    )


def mean_of(rows: list[Row]) -> str:
    """Instance accuracy over the clients whose updates weren't refused."""
    scores = [row["iAcc"] for row in rows if "iAcc" in row]
    return mean_sd(scores) if scores else ""


if __name__ == "__main__":
    main()
