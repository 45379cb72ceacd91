"""Whether label counts can explain the update at all, given what sampling alone makes it miss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlu_cli.core.responses import directions
from rlu_cli.core.schemes import batch_variance, pace
from rlu_cli.core.simplex import simplex_least_squares
from rlu_cli.core.trained import is_trained
from rlu_cli.core.types import FloatArray, HeadUpdate, LocalTraining, ModelStatistics, Responses

_CLASS_DIRECTIONS = 3
"""Directions in which the classes' mean embeddings differ most that are compared."""

_DRIFT_SHARE = 0.5
"""Share of the way between the models' two ends by which interpolating between them may be wrong."""

_RELATIVE = 0.15
"""Share of the update that no model of it, however right, is expected to explain."""

_SHARED = 0.4
"""The same where a batch's samples share statistics (BatchNorm), which the client's classes shift."""

_STRAYS = 0.05
"""Samples unlike all auxiliary ones that are expected of a client, above which they are allowed for."""

_SCALES = 0.5 ** (np.arange(12) / 2)
"""Factors that are tried where an update was scaled by an unknown one."""

_ROUNDS = 3
"""The expected miss depends on the proportions, and they on it; this many rounds settle both."""


@dataclass(frozen=True)
class _View:
    """The update and its explanation in F views: the bias, and the weight along chosen directions.

    update : shape (F, N)
    start, end : mean responses at both ends, shape (F, N, N)
    spread : within-class variance at both ends, averaged along the way, shape (F, N)
    noise : expected square of the known noise, shape (F,)
    strays : the same of samples unlike all auxiliary ones, shape (F,)
    """

    update: FloatArray
    start: FloatArray
    end: FloatArray
    spread: FloatArray
    noise: FloatArray
    strays: FloatArray

    def enlarged(self, factor: float) -> _View:
        """With an update, and its noise, so many times as large."""
        return replace(self, update=factor * self.update, noise=factor**2 * self.noise)


def misfit(
    update: HeadUpdate,
    training: LocalTraining,
    start: ModelStatistics,
    end: ModelStatistics | None,
    position: float,
    noise: float = 0.0,
    *,
    scaled: bool = False,
    variance: float | None = None,
    shared: bool = False,
) -> float | None:
    """The squared residual of the best label proportions, relative to what is to be expected.

    Each sample of class n moves the head by r ⊗ g (see `class_response`), with mean Φ_n and variance
    σ_n² in each view f: the bias, the weight along the mean embedding, and the weight along the three
    directions in which the classes' embeddings differ most. With proportions z the update is Φ z, and misses
    it by

        E‖u_f − Φ_f z‖² = Σ_n σ²_fn (z_n β + z_n²/K_n) + (½‖(Φ′_f − Φ_f) z‖)² + (0.15‖u_f‖)² + N σ_f² + γ_f
        β = Σ_τ (w^τ)² / (B (Σ_τ w^τ)²)

    where the first term is the client's batches, the second the K_n auxiliary samples, the third that Φ is
    known at both ends of training only, the fourth what is beyond the model, and the fifth known noise. Of a
    model that gets nearly all right no auxiliary sample may move it much, while one of the client's does more
    than all others. By the rule of succession λ = mB/(K + 1) of its samples are unlike all K auxiliary ones;
    where that is above 1/20, of a trained model,

        γ_f = max(λ, 1) · 2 ḡ_f² / (mB)²,     else 0

    with ḡ_f² the mean square of g_f, each sample weighted by ‖r‖², or that of the classes' means if it is
    more: a sample that the model gets wholly wrong has ‖r‖² = 2, and may look like any class. The result is

        min_z mean_f ‖u_f − Φ_f z‖² / E‖u_f − Φ_f z‖²

    About 0.1 to 1 where the inputs are right. All views share one z, so it is no coincidence if they
    fit: for the bias alone nearly any update has proportions that explain it.

    None where it can't be told: without embeddings, without the local model's statistics after several
    steps, or with single auxiliary samples only.

    Parameters
    ----------
    update : ΔW + h and Δb + h: what the samples did
    position : ᾱ, where between the two ends the gradients were taken
    noise : standard deviation of known noise on each element of u and of ∇W
    scaled : whether the update was scaled down by an unknown factor: then the one that explains it best is
        taken
    variance : β, where the method knows more of the batches than the training values say
    shared : whether a batch's samples share statistics, as BatchNorm's do
    """
    if start.responses is None or start.embedding_mean is None:
        return None
    last = start if training.steps == 1 else end
    if last is None or last.responses is None:
        return None
    counts = start.moments.counts
    if counts.max() < 2:
        return None
    view = _look(update, training, start, start.responses, last.responses, position, noise)
    batches = batch_variance(training) if variance is None else variance
    known = counts.astype(np.float64)
    factors = _SCALES if scaled else (1.0,)
    relative = _SHARED if shared else _RELATIVE
    return min(_least_misfit(view.enlarged(1 / c), batches, known, position, relative) for c in factors)


def motion(start: ModelStatistics, end: ModelStatistics | None) -> float | None:
    """How far training moved the model's predictions, in [0, 1].

        ½ mean_n ‖S_local[n] − S_global[n]‖₁

    the total variation between a class's mean predictions at both ends, averaged over the classes. What
    happened between the ends can be interpolated while it is small. None without the local model.
    """
    if end is None:
        return None
    return float(np.abs(end.confidence - start.confidence).sum(axis=1).mean() / 2)


def _strays(combine: FloatArray, means: FloatArray, samples: int, start: ModelStatistics) -> FloatArray:
    """γ of each view; see `misfit`.

    Parameters
    ----------
    combine : the views of the bias and the random directions, shape (F, d + 1)
    means : of the embeddings in these directions by class, shape (N, d)
    """
    expected = samples / (int(start.moments.counts.sum()) + 1)
    if expected <= _STRAYS or not is_trained(start):
        return np.zeros(len(combine))
    assert start.responses is not None
    first = start.responses.mean
    squares = _known(start.responses, start).sum(axis=0) + np.einsum("bnj,cnj->bc", first, first)
    if squares[0, 0] == 0:
        return np.zeros(len(combine))
    hard = np.einsum("fb,bc,fc->f", combine, squares, combine) / squares[0, 0]
    usual = np.square(combine @ np.vstack((np.ones(len(means)), means.T))).mean(axis=1)
    return np.asarray(max(expected, 1.0) * 2 * np.maximum(hard, usual) / samples**2)


def _look(
    update: HeadUpdate,
    training: LocalTraining,
    start: ModelStatistics,
    first: Responses,
    last: Responses,
    position: float,
    noise: float,
) -> _View:
    """Combine the random directions to the ones that say most, alike for update and explanation."""
    assert start.embedding_mean is not None
    V = directions(update.embedding_size)
    means = start.embedding_mean @ V  # (N, d)
    centre = means.mean(axis=0)
    along = centre / max(float(np.linalg.norm(centre)), np.finfo(float).tiny)
    apart = means - centre
    apart = apart - np.outer(apart @ along, along)
    classes = np.linalg.svd(apart, full_matrices=False)[2][:_CLASS_DIRECTIONS]
    combine = np.zeros((2 + len(classes), 1 + V.shape[1]))
    combine[0, 0] = 1.0
    combine[1:, 1:] = np.vstack((along, classes))
    bias = np.zeros(update.num_classes) if update.bias is None else update.bias
    if update.bias is None:
        combine = combine[1:]
    moved = np.column_stack((bias, update.weight @ V)).T / pace(training)  # (d + 1, N)
    spread = (1 - position) * _known(first, start) + position * _known(last, start)
    return _View(
        update=combine @ moved,
        start=np.einsum("fb,bnj->fnj", combine, first.mean),
        end=np.einsum("fb,bnj->fnj", combine, last.mean),
        spread=np.maximum(np.einsum("fb,nbc,fc->fn", combine, spread, combine), 0.0),
        noise=noise**2
        * update.num_classes
        * (combine[:, 0] ** 2 + np.square(combine[:, 1:] @ V.T).sum(axis=1)),
        strays=_strays(combine, means, training.samples, start),
    )


def _known(responses: Responses, statistics: ModelStatistics) -> FloatArray:
    """The spread of each class; of one sample there is none, so the other classes' stands for it."""
    alone = statistics.moments.counts < 2
    spread = np.array(responses.spread)
    spread[alone] = spread[~alone].mean(axis=0)
    return spread


def _least_misfit(view: _View, batches: float, counts: FloatArray, position: float, relative: float) -> float:
    """The smallest misfit over the simplex."""
    N = len(counts)
    mean = (1 - position) * view.start + position * view.end
    drift = view.end - view.start
    power = np.square(view.update).sum(axis=1)
    z = np.full(N, 1.0 / N)
    for _ in range(_ROUNDS):
        expected = (
            view.spread @ (z * batches + z**2 / counts)
            + _DRIFT_SHARE**2 * np.square(np.einsum("fnj,n->fj", drift, z)).sum(axis=1)
            + relative**2 * power
            + view.noise
            + view.strays
        )
        scale = 1.0 / np.sqrt(np.maximum(expected, np.finfo(float).tiny))
        A = (mean * scale[:, None, None]).transpose(0, 2, 1).reshape(-1, N)
        solution = simplex_least_squares(A, (view.update * scale[:, None]).ravel())
        z = solution.z
    return float(solution.residual**2 / len(view.update))
