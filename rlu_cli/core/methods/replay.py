"""Ridge regression on replayed clients: what the trained model does, as a function of the label mix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem
from rlu_cli.core.methods.gls import GLS
from rlu_cli.core.methods.gls import solve as solve_by_gls
from rlu_cli.core.residuals import Replay, ReplayedClient
from rlu_cli.core.ridge import fit_ridge
from rlu_cli.core.synthetic_clients import draw_mixes
from rlu_cli.core.types import Estimate, FloatArray, IntArray, LocalTraining, Note

_CLIENTS = 100
_NEAREST = 200
"""Left-out predictions (client and class) that say how far off such a prediction is."""

_LEVEL = 0.95
_MOST_CLASSES, FEWEST_AUXILIARY = 20, 10


def solve(problem: Problem) -> Estimate:
    """Label proportions by ridge regression on replayed clients.

        √z ≈ a linear function of f,     f = (Δb, E[q_local − q_global | class])

    Over many steps a model adapts to the client's mix, and gradients say ever less of it; what the client has
    taught the whole network says more. 100 clients are made up: a mix z drawn at random, auxiliary samples
    drawn by it, weighted anew for each client, and the client's own training on them from the global model
    on. f is the change of the head's bias and of each class's mean logits. √z makes the errors of rare and
    frequent classes alike. The penalty is the one that predicts left-out clients best.

    Bounds are the 2.5 % and 97.5 % quantiles of the left-out errors among the 200 predictions (of any client
    and class) nearest to this one; presence is the share of them with any sample.

    Assumptions: auxiliary samples like the client's; the client's optimiser known.
    Uses the local model's logits and Δb.
    Source: regression for simulators (Beaumont et al. 2002) on replayed training.
    """
    path = problem.observation.residuals
    assert path is not None
    why = out_of_scope(path.start.counts, problem.observation.training)
    if path.replay is None:
        why = "the client's training can't be replayed (single steps, logits alone and schemes with memory)"
    if why is not None or path.replay is None:
        return _by_gls(problem, why or "")
    clients = _clients(problem, path.replay)
    observed = path.replay.observed()
    if len(clients) < _CLIENTS // 2:
        return _by_gls(problem, f"{_CLIENTS - len(clients)} of {_CLIENTS} replays diverge: is --lr right?")
    true = np.sqrt(np.stack([client.counts / client.counts.sum() for client in clients]))
    ridge = fit_ridge(np.stack([client.features for client in clients]), true)
    root = np.maximum(ridge(observed), 0.0)
    low, high, presence = _bounds(root, ridge.left_out, true, problem.total)
    z = root**2 / np.sum(root**2)
    counts = problem.total * z
    errors = np.abs(_proportions(ridge.left_out) - true**2).sum(axis=1) / 2
    return Estimate(
        z,
        {
            "residual": problem.residual(z),
            "replays": len(clients),
            "replay_error": float(errors.mean()),
        },
        low=np.clip(low, 0, np.floor(counts)),
        high=np.clip(high, np.ceil(counts), problem.total),
        presence=presence,
    )


def out_of_scope(counts: IntArray, training: LocalTraining) -> str | None:
    """Why clients like this are not replayed, None where they are.

    Parameters
    ----------
    counts : auxiliary samples of each class
    """
    if training.steps == 1:
        return "the client took one step, of which gradients say all"
    if len(counts) > _MOST_CLASSES:
        return f"there are {len(counts)} classes, and replay is made for {_MOST_CLASSES} at most"
    if counts.min() < FEWEST_AUXILIARY:
        return f"a class has {int(counts.min())} auxiliary samples, and replay needs {FEWEST_AUXILIARY}"
    return None


def _by_gls(problem: Problem, why: str) -> Estimate:
    estimate = solve_by_gls(problem)
    note = Note("replay-not-fitted", f"{why}: the counts are those of gls")
    return replace(estimate, warnings=(*estimate.warnings, note))


def _clients(problem: Problem, replay: Replay) -> list[ReplayedClient]:
    observation = problem.observation
    mixes = draw_mixes(_CLIENTS, problem.num_classes, np.random.default_rng(observation.seed))
    found = []
    for draw, z in enumerate(mixes):
        client = replay.client(z, draw)
        if client is not None:
            found.append(client)
        observation.progress(draw + 1, _CLIENTS)
    return found


def _proportions(roots: FloatArray) -> FloatArray:
    squares = np.maximum(roots, 0.0) ** 2
    return np.asarray(squares / np.maximum(squares.sum(axis=-1, keepdims=True), 1e-300))


def _bounds(
    root: FloatArray, left_out: FloatArray, true: FloatArray, total: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bounds of the counts and presence for predictions √z, from what others like them were off."""
    predicted, missed = np.maximum(left_out, 0.0).ravel(), (true - np.maximum(left_out, 0.0)).ravel()
    edge = (1 - _LEVEL) / 2
    bounds = np.empty((3, len(root)))
    for n, value in enumerate(root):
        near = np.argsort(np.abs(predicted - value), kind="stable")[:_NEAREST]
        around = value + np.quantile(missed[near], [edge, 1 - edge])
        bounds[:2, n] = np.rint(total * np.clip(around, 0.0, 1.0) ** 2)
        bounds[2, n] = np.mean(true.ravel()[near] > 0)
    return bounds[0], bounds[1], bounds[2]


REPLAY = Method(
    name="replay",
    summary="a regression on replayed clients, for clients that train long on a trained model",
    reference="regression for simulators (Beaumont et al. 2002), on replayed training",
    solve=solve,
    needs_end=GLS.needs_end,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=True,
        trained_model=True,
    ),
    needs_bias=True,
    uses_auxiliary=True,
    needs_residuals=True,
)
