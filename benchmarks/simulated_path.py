"""Label proportions by regression on clients made up along a known path of models, for oracles.py.

What `regression` does for one step, for an auditor who knows all models that the client's steps started from:
a client's update is the sum of what its samples do at the model of their step,

    −∇b = Σ_τ ρ^τ mean_i r_i^τ / Σ_τ ρ^τ,     −∇W W_0ᵀ the same of r_i^τ ⊗ W_0 e_i^τ

so clients are made up by drawing for each sample an auxiliary one and a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from rlu_cli.core.regressor import Regressor
from rlu_cli.core.residuals import residuals
from rlu_cli.core.synthetic_clients import SyntheticClients, bandwidth, draw_mixes, smoothing, update_features
from rlu_cli.core.types import FloatArray, Head, IntArray

CLIENTS, _TOGETHER = 60_000, 400
"""Clients made up, and those of them that share one reweighting of the auxiliary samples."""

_COPIES = 5
"""Smoothed copies of each auxiliary sample at each model."""


@dataclass(frozen=True)
class Path:
    """Auxiliary samples at the models of a client's steps.

    logits, embeddings : shapes (T, M, N) and (T, M, L)
    labels : shape (M,)
    weights : ρ of the steps over their sum, shape (T,)
    """

    logits: FloatArray
    embeddings: FloatArray
    labels: IntArray
    weights: FloatArray


def by_regression(path: Path, head: Head, gradient: Head, total: int, *, seed: int) -> FloatArray:
    """z of a client with so many samples, each seen once; ``head`` is the global model's."""
    rng = np.random.default_rng(seed)
    made_up = _clients(path, _table(path, head.weight, rng), total, rng)
    seen = torch.from_numpy(update_features(gradient, head).astype(np.float32))
    found: FloatArray = Regressor.fitted(made_up, seed=seed)(seen[None]).proportions[0]
    return found


def _table(path: Path, weight: FloatArray, rng: np.random.Generator) -> torch.Tensor:
    """What single samples add, shape (T · copies · M, N + N²): smoothed as `ClientSimulator` has it."""
    M, N = path.logits.shape[1:]
    rows = []
    for logits, embeddings in zip(path.logits, path.embeddings, strict=True):
        both = np.column_stack((logits, embeddings @ weight.T))
        for _ in range(_COPIES):
            drawn = both.copy()
            for n in range(N):
                members = np.flatnonzero(path.labels == n)
                K = len(members)
                drawn[members] += smoothing(both[members], bandwidth(K, N), K, rng)
            r = residuals(drawn[:, :N], path.labels)
            along = r[:, :, None] * drawn[:, None, N:]
            rows.append(np.concatenate((r, along.reshape(M, -1)), axis=1).astype(np.float32))
    return torch.from_numpy(np.concatenate(rows))


def _clients(path: Path, table: torch.Tensor, total: int, rng: np.random.Generator) -> SyntheticClients:
    T, M, N = path.logits.shape
    counts, features = np.empty((CLIENTS, N), dtype=np.int64), torch.empty(CLIENTS, table.shape[1])
    members = [np.flatnonzero(path.labels == n) for n in range(N)]
    for first in range(0, CLIENTS, _TOGETHER):
        group = slice(first, first + _TOGETHER)
        counts[group] = rng.multinomial(total, draw_mixes(_TOGETHER, N, rng))
        labels = np.repeat(np.tile(np.arange(N), _TOGETHER), counts[group].ravel())
        chosen = np.empty(len(labels), dtype=np.int64)
        for n, rows in enumerate(members):
            places = np.flatnonzero(labels == n)
            chosen[places] = rng.choice(rows, len(places), p=rng.dirichlet(np.ones(len(rows))))
        step = rng.choice(T, len(labels), p=path.weights)
        chosen += M * (_COPIES * step + rng.integers(0, _COPIES, len(labels)))
        bags = torch.from_numpy(chosen.reshape(_TOGETHER, total))
        features[group] = functional.embedding_bag(bags, table, mode="mean")
    return SyntheticClients(counts, features)
