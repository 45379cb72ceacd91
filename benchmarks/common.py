"""What the benchmarks share: data, models at a given accuracy, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlu_cli.core.types import LocalTraining
from rlu_cli.images import ImageSet, parse_normalization
from rlu_cli.models import LeNet5
from rlu_cli.simulation.client import local_training, step_indices
from rlu_cli.simulation.vectors import snapshot

Row = dict[str, Any]
Changed = Callable[[Tensor], Tensor]

NORMALIZATION = "mean=0.286;std=0.353"
"""Of Fashion-MNIST."""


PEAK = """
import re, sys
from rlu_cli.cli.app import run
code = run(sys.argv[1:])
with open("/proc/self/status") as status:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1], file=sys.stderr)
sys.exit(code)
"""
"""Runs the command line and then says its peak memory in kB on stderr: Linux's own count, which starts anew
with the program, where that of getrusage begins with the parent's."""


def lenet_at_accuracy(images: ImageSet, target: float, *, seed: int, lr: float = 0.01) -> dict[str, Tensor]:
    """A LeNet-5 trained centrally by plain SGD (batch 32) until it reaches an accuracy; untrained for 0.

    Accuracy is measured every 5 steps below 50 % (it rises fast there) and every 100 above, on 2,000
    images drawn by the seed.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = LeNet5()
    if target <= 0:
        return snapshot(model)
    labels = images.labels.numpy()
    normalization = parse_normalization(NORMALIZATION)
    probe = rng.choice(len(labels), 2000, replace=False)
    inputs = normalization.apply(images.pixels[probe])
    steps = 5 if target < 0.5 else 100
    while True:
        model.eval()
        with torch.inference_mode():
            accuracy = float(np.mean(model(inputs).argmax(dim=1).numpy() == labels[probe]))
        if accuracy >= target:
            return snapshot(model)
        _train(model, images, steps, lr=lr, rng=rng)


def lenet_after(
    images: ImageSet, steps: int, *, seed: int, lr: float, changed: Changed | None = None
) -> dict[str, Tensor]:
    """A LeNet-5 of the images' classes after so many steps of central plain SGD (batch 32).

    Parameters
    ----------
    changed : what is done to each batch of normalised images
    """
    torch.manual_seed(seed)
    model = LeNet5(num_classes=len(images.names))
    _train(model, images, steps, lr=lr, rng=np.random.default_rng(seed), changed=changed)
    return snapshot(model)


def _train(
    model: LeNet5,
    images: ImageSet,
    steps: int,
    *,
    lr: float,
    rng: np.random.Generator,
    changed: Changed | None = None,
) -> None:
    normalization = parse_normalization(NORMALIZATION)
    rows = list(step_indices(np.arange(len(images.labels)), steps, 32, rng=rng))
    change = changed or (lambda inputs: inputs)
    batches = ((change(normalization.apply(images.pixels[r])), images.labels[r]) for r in rows)
    local_training(model, batches, LocalTraining(steps=steps, batch_size=32, lr=lr))


def mean_sd(values: Iterable[float]) -> str:
    """``0.987 ± 0.012``: mean and standard deviation over the values; the value alone where there is one."""
    array = np.array(list(values))
    if len(array) == 1:
        return f"{array[0]:.3f}"
    return f"{array.mean():.3f} ± {array.std(ddof=1):.3f}"


def bounds(rows: list[Row], keys: tuple[str, str] = ("bounds_hold", "bounds_width")) -> str:
    """How many of the bounds hold, and how wide they are, as a share of all samples.

    With how many clients have bounds, if not all do.
    """
    bounded = [row for row in rows if keys[0] in row]
    if not bounded:
        return ""
    found = ", ".join(f"{np.mean([row[key] for row in bounded]):.1%}" for key in keys)
    return found if len(bounded) == len(rows) else f"{found} ({len(bounded)} clients)"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write_ndjson(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")


def seeds_parser(doc: str, *, results: str, first_seed: int = 0) -> argparse.ArgumentParser:
    """Arguments of a benchmark of several seeds: --seeds, --first-seed, --output (default ``results``)."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=first_seed)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / results)
    return parser


def chosen_seeds(arguments: argparse.Namespace) -> range:
    """Those that `seeds_parser` has read."""
    return range(arguments.first_seed, arguments.first_seed + arguments.seeds)


def gathered(parts: Iterable[Iterable[Row]], output: Path) -> list[Row]:
    """All rows, written part by part as they come: a run that is stopped leaves what it has measured."""
    rows: list[Row] = []
    for part in parts:
        rows += part
        write_ndjson(output, rows)
    return rows


def machine() -> str:
    """The machine that measured, in a line."""
    card = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{card}{platform.machine()}, {os.cpu_count()} cores, {versions}"
