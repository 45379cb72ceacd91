"""The learning rate, where nobody says it, from the update and auxiliary samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rlu_cli.core.gradients import normalised_update, without_drift
from rlu_cli.core.path import solve_on_path
from rlu_cli.core.residuals import MOST_CLASSES, residuals
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import batch_variance, impulse_response, step_rates
from rlu_cli.core.simplex import simplex_least_squares
from rlu_cli.core.types import Activations, FloatArray, LocalTraining, Observation
from rlu_cli.errors import MismatchError

_DIRECTIONS, _MANY_CLASSES = 3, 40
"""Directions of the embedding, those in which the classes differ most; of more classes, one is enough."""

_SWEEPS = 3
"""Alternations of weights and proportions."""

_POOLED, _FLOOR, _ASTRAY = 0.1, 1e-3, 0.1
"""As in gls: the classes' common covariance, least variance, where on its way the model was."""

_LARGEST, _COARSE = 1000.0, 0.15
"""Range above the least possible rate, and the steps (of its logarithm) of the first look."""

_AMID = 10.0
"""Of the least possible rate: where u is about 0.1, as usual."""

_AROUND = 1.5
"""How far from the estimate (of its logarithm) those of like updates are looked for."""

_DRAWS = 20
"""Updates drawn again, whose estimates scatter as this one's error does."""

_REPLAYS, _RISE, _FLATTEST = 5, 0.26, 0.1
"""Of training, for its distance; steps of the rate's logarithm; the least slope that is believed."""

_STUDENT = {_DRAWS: 2.093, _REPLAYS: 2.776}
"""95 % points of Student's t, for standard deviations from so many."""

_DRIFT_SHARE = 0.5
"""As in the misfit: what of the way between both ends may be unknown."""

_LEAST = 0.005
"""Error of the logarithm beside all that is drawn: of the search, and of what was not modelled."""

_FEWEST = 10
"""Auxiliary samples of every class."""


@dataclass(frozen=True)
class LearningRate:
    """A factor of the rates that were given, with its 95 % interval."""

    scale: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """high / low."""
        return self.high / self.low

    def widened(self, motion: float) -> LearningRate:
        """With the error beside sampling: interpolation may be off by half of the way between both ends.

        Parameters
        ----------
        motion : how far training moved the predictions, see `rlu_cli.core.misfit.motion`
        """
        wider = (
            float(np.hypot(np.log(end / self.scale), _DRIFT_SHARE * motion)) for end in (self.low, self.high)
        )
        below, above = (float(np.exp(half)) for half in wider)
        return LearningRate(self.scale, self.scale / below, self.scale * above)


def scaled(training: LocalTraining, scale: float) -> LocalTraining:
    """The same training with all rates times ``scale``."""
    rates = tuple((scale * step_rates(training)).tolist())
    return replace(training, lr=rates if isinstance(training.lr, tuple) else rates[0])


def least_scale(observation: Observation) -> float:
    """The factor of the rates at which some |u_j| is 1, as no training can exceed; pulls are left out.

    Half of it for a head without bias, whose u is an estimate.
    """
    plain = replace(observation.training, prox=0.0, weight_decay=0.0)
    largest = float(np.abs(normalised_update(replace(observation, training=plain))).max())
    return largest if observation.head.bias is not None else largest / 2


def estimate_learning_rate(
    observation: Observation, start: Activations, end: Activations | None
) -> LearningRate:
    """The factor c of the rates that makes the update likeliest.

        (Δ + h)_f / (c Σ_τ w^τ) = Φ z + ε,   ε ~ N(0, Σ(z)),   z on the simplex

    f are views of the head's update: the bias, and the weight along the three directions in which the
    classes' embeddings differ most. One sample of class n moves them by r ⊗ g, r = onehot − s, with mean Φ_n
    and covariance C_n over the auxiliary samples; Σ(z) = Σ_n C_n (z_n β + z_n²/K_n) and, between the two
    ends of several steps, (0.1)² d dᵀ with d = (Φ_end − Φ_start) z. The bias alone can't tell c: I − Sᵀ has a
    null vector on the simplex, and c moves z along it. The weight can, as the classes' embeddings differ, and
    so can absent classes, since z ≥ 0. c maximises the likelihood, z with it:

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
        No embeddings, too few samples of a class, or more than 200 classes.
    """
    views = _Views(observation, start, end)
    lowest, highest = np.log(views.range())
    grid = np.arange(lowest, highest, _COARSE)
    at = int(np.argmin([views.cost(x) for x in grid]))
    edges = (grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)])
    found = _least(views.cost, edges)
    ends = (max(found - _AROUND, lowest), min(found + _AROUND, highest))
    errors = np.array([_least(views.cost_of(moved), ends) for moved in views.like_updates(found)]) - found
    return _with_interval(found, _STUDENT[_DRAWS] * float(np.sqrt(np.mean(errors**2))))


def _with_interval(found: float, half: float) -> LearningRate:
    """From logarithms."""
    half += _LEAST
    return LearningRate(*(float(np.exp(found + step)) for step in (0.0, -half, half)))


def rate_by_distance(
    distance: Callable[[float, int], float], travelled: float, *, least: float
) -> LearningRate | None:
    """The factor c of the rates with which replayed training travels as far as the client did.

        mean_r log D_r(c) = log ‖θ_local − θ_global‖

    over five replays r. Rates that are too small need a single class to explain the update, and that may
    travel as far too, so of several such c the largest is it. The distance is followed from ``least`` up by
    factors of 1.3 until it is e times too long; the line through the points around the last crossing gives c,
    and the spread s of the replays its interval, as the client's way is one more draw of the same kind:
    ± t_{4} s √(1 + 1/5) / slope. None where no rate in reach does it.

    Parameters
    ----------
    distance : D_r(c), of a scale and the number of a replay; not finite where training diverges
    travelled : ‖θ_local − θ_global‖
    least : a scale that is surely too small
    """
    points: list[tuple[float, float, float]] = []
    for x in np.log(least) + np.arange(0.0, np.log(_LARGEST), _RISE):
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
    spread = float(near[:, 2].mean()) * float(np.sqrt(1 + 1 / _REPLAYS))
    return _with_interval(found, _STUDENT[_REPLAYS] * spread / slope)


def _least(cost: Callable[[float], float], bounds: tuple[float, float]) -> float:
    """Where the cost is least."""
    from scipy.optimize import minimize_scalar  # half of SciPy, for those who ask alone

    return float(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": _LEAST / 4}).x)


class _Views:
    """The update in F views, and what single auxiliary samples do to them."""

    def __init__(self, observation: Observation, start: Activations, end: Activations | None) -> None:
        self.observation = observation
        self.labels = start.labels
        N = observation.head.num_classes
        self.counts = np.bincount(start.labels, minlength=N)
        if start.embeddings is None or (end is not None and end.embeddings is None):
            raise MismatchError(
                "expected embeddings beside the logits, which --lr auto needs, found logits alone: add the "
                "array `embeddings`, or say --lr"
            )
        if N > MOST_CLASSES:
            raise MismatchError(
                f"expected at most {MOST_CLASSES} classes for --lr auto, found {N}: say --lr RATE"
            )
        if self.counts.min() < _FEWEST:
            raise MismatchError(
                f"expected at least {_FEWEST} auxiliary samples of every class for --lr auto, found "
                f"{self.counts.min()} of one: add images, or say --lr"
            )
        self._look(np.asarray(start.embeddings, dtype=np.float64))
        models = [start] if end is None else [start, end]
        self.position = 0.0 if end is None else self._position()
        weights = [1.0] if end is None else [1 - self.position, self.position]
        found = [self._responses(model) for model in models]
        self.means = [self._class_means(part) for part in found]
        self.responses = np.asarray(sum(w * part for w, part in zip(weights, found, strict=True)))
        self.mean = self._class_means(self.responses)
        self.rows = self.responses - self.mean[self.labels]

    def _look(self, embeddings: FloatArray) -> None:
        """The directions of the views, from the global model's embeddings e, shape (M, L).

        With a bias the first view is the bias, and the others are centred by it.
        """
        centre = embeddings.mean(axis=0)
        N = len(self.counts)
        apart = np.stack([embeddings[self.labels == n].mean(axis=0) for n in range(N)]) - centre
        d = 1 if N > _MANY_CLASSES else min(_DIRECTIONS, N - 1)
        V = np.linalg.svd(apart, full_matrices=False)[2][:d].T  # (L, d)
        if self.observation.head.bias is None:
            along = centre / max(float(np.linalg.norm(centre)), np.finfo(float).tiny)
            self.weight_view, self.bias_view = np.column_stack((along, V)), np.zeros(1 + V.shape[1])
        else:
            self.weight_view = np.column_stack((np.zeros(len(centre)), V))
            self.bias_view = np.concatenate(([1.0], -centre @ V))

    def _responses(self, model: Activations) -> FloatArray:
        """r ⊗ g of each sample without its last output, which the others determine, shape (M, (N − 1) F)."""
        assert model.embeddings is not None
        g = np.asarray(model.embeddings, dtype=np.float64) @ self.weight_view + self.bias_view
        r = residuals(model.logits, model.labels)[:, :-1]
        return np.asarray((r[:, :, None] * g[:, None, :]).reshape(len(r), -1))

    def _class_means(self, values: FloatArray) -> FloatArray:
        return np.stack([values[self.labels == n].mean(axis=0) for n in range(len(self.counts))])

    def _position(self) -> float:
        """Where between both ends the gradients were taken, at a rate amid those that are possible."""
        low, high = self.range()
        training = scaled(self.observation.training, min(_AMID * low, high))
        changed = replace(self.observation, training=training)
        return solve_on_path(changed, normalised_update(changed)).position

    def at(self, scale: float) -> tuple[FloatArray, float]:
        """(Δ + h)/Σ_τ w^τ in the views, shape ((N − 1) F,), and Σ_τ w^τ, with the rates times ``scale``."""
        observation = replace(self.observation, training=scaled(self.observation.training, scale))
        update = without_drift(observation)
        total = float(impulse_response(observation.training).sum())
        moved = update.weight @ self.weight_view
        if update.bias is not None:
            moved = moved + np.outer(update.bias, self.bias_view)
        return moved[:-1].ravel() / total, total

    def range(self) -> tuple[float, float]:
        """Scales between which c must be: |u_j| ≤ 1, and no step may diverge."""
        training = self.observation.training
        least = least_scale(self.observation)
        pull = (training.prox + training.weight_decay) * float(step_rates(training).max())
        highest = min(_LARGEST * least, 1.9 / pull if pull > 0 else np.inf)
        return min(least, highest / 2), highest

    def cost(self, log_scale: float) -> float:
        """−2 log L."""
        return self._fitted(*self.at(float(np.exp(log_scale))))[1]

    def cost_of(self, moved: FloatArray) -> Callable[[float], float]:
        """−2 log L of another Δ + h in these views."""

        def cost(log_scale: float) -> float:
            total = self.at(float(np.exp(log_scale)))[1]
            return self._fitted(moved / total, total)[1]

        return cost

    def like_updates(self, log_scale: float) -> Iterator[FloatArray]:
        """Δ + h in the views, of auxiliary samples with the labels found."""
        u, total = self.at(float(np.exp(log_scale)))
        counts = round_to_total(self._fitted(u, total)[0], self.observation.training.samples)
        rng = np.random.default_rng(self.observation.seed)
        for _ in range(_DRAWS):
            taken = [
                rng.choice(np.flatnonzero(self.labels == n), count) for n, count in enumerate(counts) if count
            ]
            yield total * self.responses[np.concatenate(taken)].mean(axis=0)

    def _fitted(self, u: FloatArray, total: float) -> tuple[FloatArray, float]:
        """z, and −2 log L."""
        N, D = len(self.counts), len(u)
        z = np.full(N, 1.0 / N)
        for _ in range(_SWEEPS):
            root = np.linalg.cholesky(self.covariance(z))
            white = np.linalg.solve(root, np.column_stack((self.mean.T, u)))
            solution = simplex_least_squares(white[:, :-1], white[:, -1])
            z = solution.z
        spread = 2 * float(np.log(np.diag(root)).sum())
        return z, solution.residual**2 + spread + 2 * D * float(np.log(total))

    def covariance(self, z: FloatArray) -> FloatArray:
        """Σ(z), shape ((N − 1) F, (N − 1) F)."""
        training = self.observation.training
        z = np.maximum(z, 1.0 / (2 * training.samples))
        own = z * batch_variance(training) + z**2 / self.counts
        share = ((1 - _POOLED) * own + _POOLED * own.mean()) / (self.counts - 1)
        rows = self.rows * np.sqrt(share)[self.labels, None]
        kept = rows.T @ rows
        if len(self.means) == 2:
            drift = (self.means[1] - self.means[0]).T @ z
            kept += _ASTRAY**2 * np.outer(drift, drift)
        floor = _FLOOR * float(np.trace(kept)) / len(kept)
        return np.asarray(kept + max(floor, 1e-16) * np.eye(len(kept)))
