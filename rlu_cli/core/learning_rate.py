"""The learning rate, where nobody says it, from the update and auxiliary samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlu_cli.core.disaggregation import AGREEING, told_apart
from rlu_cli.core.rate_likelihood import (
    FEWEST,
    LARGEST,
    LearningRate,
    Views,
    explanation_of,
    from_logarithm,
    position_between,
)
from rlu_cli.core.residuals import MOST_CLASSES
from rlu_cli.core.types import Activations, Observation
from rlu_cli.errors import MismatchError

_FEWEST_CLASSES = 3

_REPLAYS, _RISE, _FLATTEST = 5, 0.26, 0.1
"""Of training, for its distance; steps of the rate's logarithm; the least slope that is believed."""

_NORMAL = 1.96
"""95 % point of the normal distribution."""

_STUDENT = 2.776
"""95 % point of Student's t, for a standard deviation from so many."""


def estimate_learning_rate(
    observation: Observation, start: Activations, end: Activations | None
) -> LearningRate:
    """The factor c of the rates that makes the update likeliest.

        (Δ + h)_f / (c Σ_τ w^τ) = Φ z + ε,   ε ~ N(0, Σ(z)),   z on the simplex

    f are views of the head's update: the bias, and the weight along the three directions in which the
    classes' embeddings differ most. One sample of class n moves them by r ⊗ g, r = onehot − s, with mean Φ_n
    and covariance C_n over the auxiliary samples; Σ(z) = Σ_n C_n (z_n β + z_n²/K_n) and, between the two
    ends of several steps, (0.1)² d dᵀ with d = (Φ_end − Φ_start) z, and of known noise. The bias alone can't
    tell c: I − Sᵀ has a null vector on the simplex, and c moves z along it. The weight can, as the classes'
    embeddings differ, and so can absent classes, since z ≥ 0. c maximises the likelihood, z with it:

        −2 log L(c) = min_z ‖u(c) − Φ z‖²_Σ + log det Σ + 2 D log c

    Updates made up of auxiliary samples with the labels found, 20 of them, are estimated as well, and the
    root mean square of their errors gives the interval. (On trained models their mean was no good correction:
    it measured worse than none.) For several steps all this holds while the model hardly moves; beyond,
    see `rate_by_distance`.

    Parameters
    ----------
    observation : with rates that are right up to a factor
    start, end : single samples under the global and, for several steps, the local model, with embeddings

    Raises
    ------
    MismatchError
        No embeddings, too few samples of a class, two classes, whose update is two numbers in these views and
        tells no more than the labels at a given rate, or more than 200.
    """
    _check_samples(observation, start, end)
    models, weights = [start], [1.0]
    if end is not None:
        position = position_between(observation)
        models, weights = [start, end], [1 - position, position]
    has_bias = observation.head.bias is not None
    views = Views(observation, explanation_of(models, weights, has_bias=has_bias))
    return views.interval(views.likeliest())


def rate_by_samples(observation: Observation) -> LearningRate | None:
    """The same factor from single samples of one step, None where they can't be told apart (`disaggregate`).

    In G = (c/B) Σ_i δ_i (x_i, 1)ᵀ a sample's inputs x and its δ say c = B / (xᵀ G⁺ δ). The median over the
    samples is it.
    """
    found = told_apart(observation, scale_known=False)
    if found is None or len(found.labels) < AGREEING:
        return None
    return from_logarithm(math.log(found.scale), _NORMAL * found.deviation)


def _check_samples(observation: Observation, start: Activations, end: Activations | None) -> None:
    """Refuse samples that can't explain an update."""
    N = observation.head.num_classes
    if start.embeddings is None or (end is not None and end.embeddings is None):
        raise MismatchError(
            "expected embeddings beside the logits, which --lr auto needs, found logits alone: add the "
            "array `embeddings`, or say --lr"
        )
    if not _FEWEST_CLASSES <= N <= MOST_CLASSES:
        raise MismatchError(
            f"expected {_FEWEST_CLASSES} to {MOST_CLASSES} classes for --lr auto, where single samples can't "
            f"be told apart, found {N}: say --lr RATE"
        )
    fewest = np.bincount(start.labels, minlength=N).min()
    if fewest < FEWEST:
        raise MismatchError(
            f"expected at least {FEWEST} auxiliary samples of every class for --lr auto, found "
            f"{fewest} of one: add images, or say --lr"
        )


def rate_by_distance(
    distance: Callable[[float, int], float], travelled: float, *, least: float, error: float = 0.0
) -> LearningRate | None:
    """The factor c of the rates with which replayed training travels as far as the client did.

        mean_r log D_r(c) = log ‖θ_local − θ_global‖

    over five replays r. Rates that are too small need a single class to explain the update, and that may
    travel as far too, so of several such c the largest is it. The distance is followed from ``least`` up by
    factors of 1.3 until it is e times too long; the line through the points around the last crossing gives c,
    and the spread s of the replays its interval, as the client's way is one more draw of the same kind:
    ± t_{4} √(s² (1 + 1/5) + e²) / slope. None where no rate in reach does it.

    Parameters
    ----------
    distance : D_r(c), of a scale and the number of a replay; not finite where training diverges
    travelled : ‖θ_local − θ_global‖
    error : e, standard deviation of its logarithm, as noise leaves one
    least : a scale that is surely too small
    """
    points: list[tuple[float, float, float]] = []
    for x in np.log(least) + np.arange(0.0, np.log(LARGEST), _RISE):
        with np.errstate(invalid="ignore", over="ignore"):
            excess = np.log([distance(float(np.exp(x)), draw) / travelled for draw in range(_REPLAYS)])
        if not np.all(np.isfinite(excess)):
            break
        points.append((float(x), float(excess.mean()), float(excess.std(ddof=1))))
        if points[-1][1] > 1:
            break
    way = np.array(points).reshape(-1, 3)
    crossings = np.flatnonzero((way[:-1, 1] <= 0) & (way[1:, 1] > 0))
    if not len(crossings):
        return None
    near = way[max(crossings[-1] - 1, 0) : crossings[-1] + 3]
    slope = max(float(np.polyfit(near[:, 0], near[:, 1], 1)[0]), _FLATTEST)
    found = float(near[:, 0].mean() - near[:, 1].mean() / slope)
    spread = float(np.hypot(near[:, 2].mean() * np.sqrt(1 + 1 / _REPLAYS), error))
    return from_logarithm(found, _STUDENT * spread / slope)
