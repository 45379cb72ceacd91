"""Whether grades and bounds can be trusted where archives are not as they are said to be.

    python benchmarks/honesty.py --seeds 1 --first-seed 90      (about 15 minutes on one core)

Real training: LeNet-5, Fashion-MNIST, Dirichlet 0.5, batch 32, lr 0.01, 100 auxiliary images a class; rounds
of seven kinds and five clients of each. What each client does to its update, what the auditor is told of it,
how the file stores it and the learning rate that is told are drawn at random; nothing is chosen by hand. The
default method answers. Prints Markdown; writes every client to results/honesty.ndjson.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from common import Row, chosen_seeds, gathered, machine, markdown, seeds_parser
from defences import defend, update_of
from regimes import clients, simulated

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.options import TrainingOptions
from rlu_cli.audit.report import client_reliability
from rlu_cli.core.methods import AUTO
from rlu_cli.core.metrics import score_bounds, score_counts
from rlu_cli.core.reliability import GRADES
from rlu_cli.core.types import FloatArray
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import Checkpoint, read_checkpoint
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.archive import save_model
from rlu_cli.simulation.defences import Defence

KINDS = (
    "untrained, m = 1",
    "untrained, m = 10",
    "27 %, m = 1",
    "27 %, m = 10",
    "80 %, m = 1",
    "80 %, m = 10",
    "80 %, 5 epochs × 1,000",
)
CLIENTS = 5
STORED = {"float32": 0.7, "float16": 0.1, "bfloat16": 0.1, "delta": 0.1}
"""How a file stores the local model, and how often; ``delta`` is its update in half precision."""

RATES = {None: 0.7, "auto": 0.1, "0.005": 0.05, "0.008": 0.05, "0.0125": 0.05, "0.03": 0.05}
"""The rate that the auditor is told, and how often; None for the right one, 0.01."""

FAILED = 0.7
"""Share of a client's bounds that hold, below which they promised too much."""


@dataclass(frozen=True)
class Case:
    """What a client did, and what its auditor is told.

    said : of the defence
    rate : told, None for the right one
    """

    defence: Defence
    said: Defence
    stored: str
    rate: str | None

    @property
    def sort(self) -> str:
        """What an auditor would have to know of it and doesn't."""
        right = self.rate is None or self.rate == "auto"
        if not self.defence.active:
            return "no defence, right values" if right else "no defence, wrong rate"
        hidden = self.said != replace(self.defence, top_k=1.0, quantize=None)
        told = "a defence that nobody tells of" if hidden else "a defence, told or seen"
        return told if right else f"{told}, wrong rate"


def main() -> None:
    parser = seeds_parser(__doc__, results="honesty.ndjson", first_seed=90)
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    cases = product(chosen_seeds(arguments), KINDS)
    rows = gathered((measure(images, seed, kind) for seed, kind in cases), arguments.output)
    print(f"{machine()}; seeds {arguments.first_seed} to {arguments.first_seed + arguments.seeds - 1}\n")
    print(table(rows))
    print(surprises(rows))


def measure(images: ImageSet, seed: int, kind: str) -> Iterator[Row]:
    """Grade, bounds and scores of a round's first clients, each in a case of its own."""
    drawn = np.random.default_rng((seed, KINDS.index(kind)))
    with simulated(images, kind, seed) as root:
        for line, path, auditor in islice(clients(root), CLIENTS):
            sent, reference = (read_checkpoint(of) for of in (path, path.with_name("global.safetensors")))
            case = draw(drawn, float(update_of(sent, reference).norm()))
            local = root / "defended.safetensors"
            defend(sent, reference, local, case.defence, told=False, seed=int(drawn.integers(2**31)))
            store(local, reference, case.stored)
            told = TrainingOptions(
                lr=case.rate,
                clip=case.said.clip,
                noise_std=case.said.noise_std or None,
                update="delta" if case.stored == "delta" else None,
            )
            yield {
                "seed": seed,
                "kind": kind,
                "client": line.client,
                "sort": case.sort,
                "defence": vars(case.defence),
                "said": vars(case.said),
                "stored": case.stored,
                "rate": case.rate,
                **answered(auditor, local, told, np.array(line.counts)),
            }


def draw(drawn: np.random.Generator, norm: float) -> Case:
    """A case for an update of this norm: none, one or two defences, each of which is told with even odds."""

    def between(low: float, high: float) -> float:
        return float(np.exp(drawn.uniform(np.log(low), np.log(high))))

    making: dict[str, Callable[[], Defence]] = {
        "clip": lambda: Defence(clip=norm * between(0.1, 1.5)),
        "noise_std": lambda: Defence(noise_std=between(1e-5, 1e-2)),
        "top_k": lambda: Defence(top_k=between(0.01, 0.5)),
        "quantize": lambda: Defence(quantize=int(drawn.integers(3, 9))),
    }
    defence = said = Defence()
    for name in drawn.choice(list(making), drawn.choice(3, p=(0.4, 0.4, 0.2)), replace=False):
        changed = {name: getattr(making[name](), name)}
        defence = replace(defence, **changed)
        if name in ("clip", "noise_std") and drawn.random() < 0.5:
            said = replace(said, **changed)
    stored = str(drawn.choice(list(STORED), p=list(STORED.values())))
    rate = list(RATES)[int(drawn.choice(len(RATES), p=list(RATES.values())))]
    return Case(defence, said, stored, rate)


def store(local: Path, reference: Checkpoint, stored: str) -> None:
    """Write a local model again in the precision, or as the update, that a file is to have."""
    if stored == "float32":
        return
    sent = read_checkpoint(local)
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float16
    base = reference.tensors if stored == "delta" else dict.fromkeys(sent.tensors, 0)
    tensors = {name: (tensor - base[name]).to(dtype) for name, tensor in sent.tensors.items()}
    save_model(local, tensors, sent.metadata)


def answered(auditor: Auditor, local: Path, told: TrainingOptions, truth: FloatArray) -> Row:
    """What the default says of a file, and how right that is."""
    try:
        client = auditor.recover(local, told, [AUTO])
    except MismatchError as error:
        return {"refused": str(error)}
    found = client.recoveries[0]
    grade = client_reliability(auditor, client, found)
    return {
        "method": found.method,
        "grade": grade.grade,
        "expected_iAcc": grade.expected_i_acc,
        **score_counts(found.counts, truth).document(),
        **score_bounds(found, truth),
        "warnings": sorted({note.code for note in (*auditor.notes, *client.notes, *found.warnings)}),
    }


def table(rows: list[Row]) -> str:
    """What was not told by grade: clients, labels found and expected, bounds, and clients they failed."""
    lines = []
    for sort in (*sorted({row["sort"] for row in rows}), None):
        of = [row for row in rows if sort in (row["sort"], None) and "refused" not in row]
        for grade in GRADES:
            mine = [row for row in of if row["grade"] == grade]
            if not mine:
                continue
            bounded = [row for row in mine if "bounds_hold" in row]
            held = [row["bounds_hold"] for row in bounded]
            lines.append(
                (
                    sort or "all",
                    grade,
                    str(len(mine)),
                    f"{np.mean([row['iAcc'] for row in mine]):.3f}",
                    f"{np.mean([row['expected_iAcc'] for row in bounded]):.3f}" if bounded else "",
                    str(len(bounded)),
                    f"{np.mean(held):.1%}" if bounded else "",
                    str(sum(share < FAILED for share in held)),
                )
            )
    columns = ("archive", "grade", "clients", "iAcc", "expected iAcc", "with bounds", "bounds hold")
    return markdown((*columns, f"fewer than {FAILED:.0%} hold"), lines)


def surprises(rows: list[Row]) -> str:
    """The clients that were not graded poor and whose bounds failed."""
    lines = [
        (
            f"{row['seed']}, {row['kind']}, {row['client']}",
            row["grade"],
            f"{row['bounds_hold']:.0%}",
            f"{row['iAcc']:.3f}",
            str({name: value for name, value in row["defence"].items() if value != row["said"][name]}),
            f"{row['stored']}, lr {row['rate'] or 'right'}",
            ", ".join(row["warnings"]),
        )
        for row in rows
        if row.get("bounds_hold", 1.0) < FAILED and row["grade"] != "poor"
    ]
    columns = ("client", "grade", "bounds hold", "iAcc", "defence not told", "file, rate", "warnings")
    return markdown(columns, lines)


if __name__ == "__main__":
    main()
