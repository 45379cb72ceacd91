"""What could be had on the rounds of regimes.py, by oracles that know more than an auditor can.

    python benchmarks/oracles.py --seeds 3 --first-seed 30

"True path": least squares as `gls` does them, on the same auxiliary images, but with the client's own models
of every step. "True path, regression": the posterior of clients made up along it (simulated_path.py), where
each sample is seen once. "Own samples" knows besides what the client's own samples did on average, class
by class. The clients are trained again as the simulation had it, which is checked bit by bit against the
archive.

Prints Markdown; writes every client's scores to results/oracles.ndjson.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np
import torch
from common import Row, chosen_seeds, gathered, machine, markdown, mean_sd, seeds_parser
from regimes import REGIMES, simulator
from simulated_path import Path as ModelPath
from simulated_path import by_regression

from rlu_cli.core.error_model import ResidualModel, fit
from rlu_cli.core.metrics import score_counts
from rlu_cli.core.residuals import residual_moments, residuals
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import impulse_response
from rlu_cli.core.simplex import simplex_least_squares
from rlu_cli.core.types import FloatArray, Head, IntArray
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.models import HeadTap, find_head
from rlu_cli.simulation.archive import read_truth_lines, round_folder
from rlu_cli.simulation.client import Batch, local_training
from rlu_cli.simulation.run import Simulator

State = Mapping[str, torch.Tensor]

MISSED = (
    "80 %, m = 1",
    "80 %, m = 10",
    "untrained, 5 epochs × 1,000",
    "80 %, 5 epochs × 1,000",
)
"""Regimes in which the default misses what was reached for."""

CLASSES = 10
_NODES = 40
"""Models on a client's way that the auxiliary images go through."""


def main() -> None:
    parser = seeds_parser(__doc__, results="oracles.ndjson", first_seed=30)
    parser.add_argument("--only", action="append", choices=REGIMES, help="a regime; may be repeated")
    arguments = parser.parse_args()
    images = open_dataset("fashion-mnist")
    cases = product(arguments.only or MISSED, chosen_seeds(arguments))
    rows = gathered((measure(images, regime, seed) for regime, seed in cases), arguments.output)
    print(f"{machine()}; {arguments.seeds} seeds × 10 clients, mean ± standard deviation over clients\n")
    print(table(rows))


def measure(images: ImageSet, regime: str, seed: int) -> Iterator[Row]:
    """Scores of the oracles on every client of one round."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "archive"
        round_ = simulator(images, regime, seed, root)
        for _ in round_.run():
            pass
        for line in read_truth_lines(root):
            local = read_checkpoint(round_folder(root, 1) / f"{line.client}.safetensors").tensors
            truth = np.array(line.counts)
            for oracle, z in solved(round_, root, line.client, local).items():
                counts = round_to_total(z, int(truth.sum()))
                scores = score_counts(counts, truth).document()
                yield {"regime": regime, "seed": seed, "client": line.client, "oracle": oracle, **scores}


def solved(round_: Simulator, root: Path, client: str, local: State) -> dict[str, FloatArray]:
    """Each oracle's proportions of one client, who is trained again."""
    training, batches = round_._plan(1, int(client.rpartition("_")[2]))
    start = read_checkpoint(round_folder(root, 1) / "global.safetensors").tensors
    model = round_.model
    model.load_state_dict(dict(start))
    rho = impulse_response(training)
    edges = np.unique(np.rint(np.linspace(0, training.steps, _NODES + 1)).astype(int))
    weights = dict(
        zip(((edges[:-1] + edges[1:] - 1) // 2).tolist(), np.add.reduceat(rho, edges[:-1]), strict=True)
    )
    aux, labels = round_.data.batch(round_.data.aux)
    layer = find_head(model, aux[:2])
    logits: list[FloatArray] = []
    embeddings: list[FloatArray] = []
    own_sum, own_share = np.zeros((CLASSES, CLASSES)), np.zeros(CLASSES)

    def before(step: int, rows: IntArray) -> Batch:
        pixels, targets = round_.data.batch(rows)
        with torch.inference_mode():
            if step in weights:
                with HeadTap(model, layer) as tap:
                    logits.append(model(aux).double().numpy())
                embeddings.append(tap.embedding.double().numpy())
            found = residuals(model(pixels).numpy(), targets.numpy())
        np.add.at(own_sum, targets.numpy(), rho[step] * found / len(rows))
        np.add.at(own_share, targets.numpy(), rho[step] / len(rows))
        return pixels, targets

    local_training(model, (before(step, rows) for step, rows in enumerate(batches)), training)
    end = model.state_dict()
    assert all(torch.equal(end[name], local[name]) for name in end), f"{client} trained otherwise"
    names = f"{layer.name}.weight", f"{layer.name}.bias"
    W, b = (start[name].double().numpy() for name in names)
    dW, db = ((local[name].double() - start[name].double()).numpy() / rho.sum() for name in names)
    share = np.array(list(weights.values())) / rho.sum()
    on_aux = sum(part * residuals(q, labels.numpy()) for part, q in zip(share, logits, strict=True))
    moments = residual_moments(on_aux, labels.numpy())
    there = own_share > 0
    own = np.where(there[:, None], own_sum / np.maximum(own_share, 1e-12)[:, None], moments.mean)
    found = {"true path": fit(ResidualModel([(1.0, moments)], training), db[:-1]).solution.z}
    if training.epochs is None:
        path = ModelPath(np.stack(logits), np.stack(embeddings), labels.numpy(), share)
        z = by_regression(path, Head(W, b), Head(-dW, -db), training.samples, seed=round_.simulation.seed)
        found["true path, regression"] = z
    found["own samples"] = simplex_least_squares(own.T, db).z
    return found


def table(rows: list[Row]) -> str:
    """Regime by oracle."""
    names = tuple(dict.fromkeys(row["oracle"] for row in rows))
    lines = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        by = [[row for row in rows if (row["regime"], row["oracle"]) == (regime, name)] for name in names]
        means = (mean_sd(row["iAcc"] for row in found) if found else "" for found in by)
        lines.append((regime, str(len(by[0])), *means))
    return markdown(("model, training", "clients", *(f"{name} iAcc" for name in names)), lines)


if __name__ == "__main__":
    main()
