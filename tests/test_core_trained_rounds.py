"""Recovery on rounds that were really trained: scikit-learn's digits, a small MLP, torch's own SGD."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rlu_cli.core import path as path_module
from rlu_cli.core.metrics import Scores, score_counts
from rlu_cli.core.moments import model_statistics
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.types import Head, IntArray, LocalTraining, ModelStatistics, Observation, Recovery
from rlu_cli.simulation.client import local_training, step_indices
from rlu_cli.simulation.partition import dirichlet_partition

CLASSES, AUX, BATCH, LR = 10, 30, 32, 0.05


@dataclass(frozen=True)
class Data:
    images: Tensor
    labels: Tensor
    aux: IntArray
    rest: IntArray


@cache
def digits(seed: int) -> Data:
    """Digits in [0, 1], 30 auxiliary images a class, the rest for the clients."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    aux = np.concatenate([rng.permutation(np.flatnonzero(y == n))[:AUX] for n in range(CLASSES)])
    rest = np.setdiff1d(np.arange(len(y)), aux)
    return Data(torch.from_numpy(x / 16).float(), torch.from_numpy(y).long(), aux, rest)


def make_model(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def accuracy(model: nn.Sequential, data: Data) -> float:
    with torch.no_grad():
        guess = model(data.images[data.rest]).argmax(dim=1)
    return float((guess == data.labels[data.rest]).float().mean())


@cache
def global_model(seed: int, reached: float) -> nn.Sequential:
    """Trained centrally until it gets the given share right."""
    data, model = digits(seed), make_model(seed)
    rng = np.random.default_rng(seed)
    while accuracy(model, data) < reached:
        for batch in step_indices(data.rest, 5, BATCH, rng=rng):
            local_training(model, [(data.images[batch], data.labels[batch])], LocalTraining(1, BATCH, LR))
    return model


def statistics(model: nn.Sequential, data: Data) -> ModelStatistics:
    with torch.no_grad():
        embeddings = model[:-1](data.images[data.aux])
        logits = model[-1](embeddings)
    return model_statistics(
        logits.numpy(), embeddings.numpy(), data.labels[data.aux].numpy(), CLASSES, samples=2000
    )


def head_of(model: nn.Sequential) -> Head:
    weight, bias = (p.detach().double().numpy() for p in model[-1].parameters())
    return Head(weight, bias)


def audit_clients(
    seed: int, reached: float, training: LocalTraining, clients: int
) -> list[tuple[Scores, Recovery]]:
    """Train some clients of a Dirichlet partition from one global model and recover their labels."""
    data, model = digits(seed), global_model(seed, reached)
    start = statistics(model, data)
    labels = data.labels[data.rest].numpy()
    shares = [s for s in dirichlet_partition(labels, 10, 0.5, seed=seed) if len(s) > 0][:clients]
    results = []
    for k, share in enumerate(shares):
        rng = np.random.default_rng([seed, k])
        chosen = list(step_indices(data.rest[share], training.steps, BATCH, rng=rng))
        local = copy.deepcopy(model)
        local_training(local, [(data.images[b], data.labels[b]) for b in chosen], training)
        observation = Observation(
            update=head_update(head_of(local), head_of(model)),
            head=head_of(model),
            training=training,
            start=start,
            end=statistics(local, data) if training.steps > 1 else None,
        )
        truth = np.bincount(data.labels[np.concatenate(chosen)].numpy(), minlength=CLASSES)
        recovery = recover_labels(observation, method="rlu")
        results.append((score_counts(recovery.counts, truth), recovery))
    return results


PLAIN = LocalTraining(10, BATCH, LR)
MOMENTUM = LocalTraining(10, BATCH, LR, momentum=0.9)
FEDPROX = LocalTraining(10, BATCH, LR, prox=5.0, scheme="fedprox")

# Bounds lie a little under the lowest seed's mean over five clients, as measured on twenty other
# seeds (100 to 119). Measured there, mean over all | lowest seed's mean | lowest client:
#   untrained   m=1 1.000 | 1.000 | 1.000    m=10 0.996 | 0.993 | 0.972    momentum 0.972 | 0.965 | 0.903
#   at 50 %     m=1 1.000 | 1.000 | 1.000    m=10 0.992 | 0.988 | 0.959    momentum 0.945 | 0.896 | 0.734
#   at 80 %     m=1 0.983 | 0.950 | 0.938    m=10 0.951 | 0.909 | 0.850    momentum 0.815 | 0.768 | 0.616
#   FedProx     untrained 0.973 | 0.963 | 0.934    50 % 0.971 | 0.961 | 0.931    80 % 0.951 | 0.919 | 0.891
BOUNDS = [
    (0.0, LocalTraining(1, BATCH, LR), 0.99),
    (0.0, PLAIN, 0.985),
    (0.0, MOMENTUM, 0.955),
    (0.0, FEDPROX, 0.955),
    (0.5, LocalTraining(1, BATCH, LR), 0.99),
    (0.5, PLAIN, 0.98),
    (0.5, MOMENTUM, 0.885),
    (0.5, FEDPROX, 0.95),
    (0.8, LocalTraining(1, BATCH, LR), 0.94),
    (0.8, PLAIN, 0.9),
    (0.8, MOMENTUM, 0.755),
    (0.8, FEDPROX, 0.91),
]


@pytest.mark.parametrize(("reached", "training", "bound"), BOUNDS)
def test_recovers_the_labels_of_real_training(reached: float, training: LocalTraining, bound: float) -> None:
    results = [r for seed in range(4) for r in audit_clients(seed, reached, training, clients=5)]
    assert np.mean([scores.i_acc for scores, _ in results]) >= bound
    for _, recovery in results:
        assert recovery.counts.sum() == training.steps * BATCH
    # 864 rounds of other seeds (100 to 111): misfit at most 1.65, so never a warning.
    warned = [recovery for _, recovery in results if recovery.warnings]
    assert len(warned) <= 1
    assert all(recovery.diagnostics["misfit"] < 3 for recovery in warned)


def test_one_step_of_an_untrained_model_is_exact() -> None:
    for scores, _ in audit_clients(5, 0.0, LocalTraining(1, BATCH, LR), clients=9):
        assert scores.i_acc == scores.exact_counts == 1.0


@pytest.mark.parametrize("reached", [0.5, 0.8])
def test_the_papers_printed_index_order_is_worse(monkeypatch: pytest.MonkeyPatch, reached: float) -> None:
    """A = I − S instead of I − Sᵀ; on seeds 100 to 109 it loses 8 points at 50 % and 15 at 80 %."""
    ours = [s.i_acc for seed in range(3) for s, _ in audit_clients(seed, reached, PLAIN, clients=5)]
    monkeypatch.setattr(path_module, "coefficient_matrix", lambda S: np.eye(len(S)) - S)
    printed = [s.i_acc for seed in range(3) for s, _ in audit_clients(seed, reached, PLAIN, clients=5)]
    assert np.mean(ours) > np.mean(printed) + 0.04
