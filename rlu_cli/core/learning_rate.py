"""The learning rate, where nobody says it, from the update and auxiliary samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from rlu_cli.core.gradients import normalised_update, without_drift
from rlu_cli.core.methods.assumptions import is_trained
from rlu_cli.core.path import solve_on_path
from rlu_cli.core.residuals import MOST_CLASSES, residuals
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import batch_variance, impulse_response, step_rates
from rlu_cli.core.simplex import SimplexSolver, simplex_least_squares
from rlu_cli.core.types import (
    Activations,
    FloatArray,
    Head,
    IntArray,
    LocalTraining,
    ModelStatistics,
    Observation,
)
from rlu_cli.errors import MismatchError

_STILL = 0.1
"""Motion up to which a model that isn't trained yet counts as standing still."""

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

_CAUTION = 0.5
"""Of the motion up to which a model stands still, where the size of an update is doubted."""

_RIGHT = 0.1
"""Logarithm of an update's size, over what its training values say, that is no error."""

_OTHERS, _NEARLY = (-0.6, -0.1, 0.1, 0.6), 8.0
"""Other sizes, as logarithms, and how much likelier (−2 log L) than the right one they may be by chance."""


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


def stands_still(observation: Observation, moved: float) -> bool:
    """Whether the likelihood of an update holds, which knows nothing of models in between.

    Parameters
    ----------
    moved : the local model's `motion`
    """
    return observation.training.steps == 1 or (moved <= _STILL and not is_trained(observation.start))


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
        No embeddings, too few samples of a class, or more than 200 classes.
    """
    _check_samples(observation, start, end)
    models, weights = [start], [1.0]
    if end is not None:
        position = _position(observation)
        models, weights = [start, end], [1 - position, position]
    has_bias = observation.head.bias is not None
    views = _Views(observation, _explanation(models, weights, has_bias=has_bias))
    return views.interval(views.likeliest())


def size_error(observation: Observation, z: FloatArray, moved: float) -> LearningRate | None:
    """c of an update that is c times as large as its training values say, None where it is as large.

    The likelihood of `estimate_learning_rate`, of the samples that statistics keep: the update's logits for
    its embeddings, since ΔW Wᵀ = Σ r ⊗ (q − b). An error of 10 % is none, nor one of less than twice the
    interval's half, in logarithms. None too where it can't be told: no bias, more than 20 classes, few
    auxiliary samples, weight decay or gradients from outside, several steps that moved the model.

    Parameters
    ----------
    z : the proportions found with the size that the training values say
    moved : the local model's `motion`
    """
    head, training = observation.head, observation.training
    models = [observation.start] if training.steps == 1 else [observation.start, observation.end]
    samples = [None if model is None else model.samples for model in models]
    drifts = observation.constant_gradient is not None or training.weight_decay > 0
    still = stands_still(observation, moved / _CAUTION)
    if head.bias is None or observation.update.bias is None or drifts or None in samples or not still:
        return None
    known = [part for part in samples if part is not None]
    if np.bincount(known[0].labels, minlength=head.num_classes).min() < _FEWEST:
        return None
    update = replace(observation.update, weight=observation.update.weight @ head.weight.T)
    noise = observation.noise_std * max(1.0, float(np.linalg.norm(head.weight, 2)))
    products = Head(head.weight @ head.weight.T, head.bias)
    seen = replace(observation, update=update, head=products, noise_std=noise)
    views = _Views(seen, _explained_by_logits(observation, known))
    if views.may_be_right(z):
        return None
    found = views.likeliest()
    if abs(found) <= _RIGHT:
        return None
    interval = views.interval(found).widened(moved)
    far = 2 * max(np.log(interval.high / interval.scale), np.log(interval.scale / interval.low))
    return interval if abs(found) > far else None


def _explained_by_logits(observation: Observation, samples: list[Activations]) -> _Explanation:
    """By the global model's samples, or by those of both."""
    bias, change = observation.head.bias, observation.update.bias
    assert bias is not None and change is not None

    def plain(part: Activations, bias: FloatArray) -> Activations:
        return replace(part, embeddings=part.logits.astype(np.float64) - bias)

    if len(samples) > 1:
        position = _position(observation)
        ends = [plain(samples[0], bias), plain(samples[1], bias + change)]
        return _explanation(ends, [1 - position, position], has_bias=True)
    if observation.start not in _by_logits:
        _by_logits[observation.start] = _explanation([plain(samples[0], bias)], [1.0], has_bias=True)
    return _by_logits[observation.start]


_by_logits: WeakKeyDictionary[ModelStatistics, _Explanation] = WeakKeyDictionary()
"""Of each global model, for `size_error`."""


def _check_samples(observation: Observation, start: Activations, end: Activations | None) -> None:
    """Refuse samples that can't explain an update."""
    N = observation.head.num_classes
    if start.embeddings is None or (end is not None and end.embeddings is None):
        raise MismatchError(
            "expected embeddings beside the logits, which --lr auto needs, found logits alone: add the "
            "array `embeddings`, or say --lr"
        )
    if N > MOST_CLASSES:
        raise MismatchError(
            f"expected at most {MOST_CLASSES} classes for --lr auto, found {N}: say --lr RATE"
        )
    fewest = np.bincount(start.labels, minlength=N).min()
    if fewest < _FEWEST:
        raise MismatchError(
            f"expected at least {_FEWEST} auxiliary samples of every class for --lr auto, found "
            f"{fewest} of one: add images, or say --lr"
        )


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


@dataclass(frozen=True)
class _Explanation:
    """What single auxiliary samples do to the update in F views, flat in D = (N − 1) F numbers.

    weight_view : shape (L, F), directions of the embedding
    bias_view : shape (F,), how much of the bias each view has
    labels : shape (M,)
    responses : r ⊗ g of each sample without its last output, which the others determine, shape (M, D)
    mean : Φ by class, shape (N, D)
    spread : C by class, shape (N, D, D)
    drift : Φ_end − Φ_start, None for one model
    """

    weight_view: FloatArray
    bias_view: FloatArray
    labels: IntArray
    responses: FloatArray
    mean: FloatArray
    spread: FloatArray
    drift: FloatArray | None

    @property
    def counts(self) -> IntArray:
        """K_n."""
        return np.bincount(self.labels, minlength=len(self.mean))


def _explanation(samples: Sequence[Activations], weights: Sequence[float], *, has_bias: bool) -> _Explanation:
    """Of one model, or averaged over several; the first one's embeddings, shape (M, L), give the directions.

    With a bias the first view is the bias, and the others are centred by it.
    """
    labels = samples[0].labels
    N = samples[0].logits.shape[1]
    embeddings = [np.asarray(model.embeddings, dtype=np.float64) for model in samples]
    centre = embeddings[0].mean(axis=0)
    apart = _class_means(embeddings[0], labels, N) - centre
    d = 1 if N > _MANY_CLASSES else min(_DIRECTIONS, N - 1)
    V = np.linalg.svd(apart, full_matrices=False)[2][:d].T  # (L, d)
    if has_bias:
        weight_view = np.column_stack((np.zeros(len(centre)), V))
        bias_view = np.concatenate(([1.0], -centre @ V))
    else:
        along = centre / max(float(np.linalg.norm(centre)), np.finfo(float).tiny)
        weight_view, bias_view = np.column_stack((along, V)), np.zeros(1 + V.shape[1])
    found = []
    for model, e in zip(samples, embeddings, strict=True):
        r = residuals(model.logits, labels)[:, :-1]
        found.append((r[:, :, None] * (e @ weight_view + bias_view)[:, None, :]).reshape(len(r), -1))
    responses = np.asarray(sum(w * part for w, part in zip(weights, found, strict=True)))
    mean = _class_means(responses, labels, N)
    spread = np.empty((N, responses.shape[1], responses.shape[1]))
    for n in range(N):
        rows = responses[labels == n] - mean[n]
        spread[n] = rows.T @ rows / (len(rows) - 1)
    drift = None
    if len(found) > 1:
        drift = _class_means(found[-1], labels, N) - _class_means(found[0], labels, N)
    return _Explanation(weight_view, bias_view, labels, responses, mean, spread, drift)


def _class_means(values: FloatArray, labels: IntArray, num_classes: int) -> FloatArray:
    return np.stack([values[labels == n].mean(axis=0) for n in range(num_classes)])


def _position(observation: Observation) -> float:
    """Where between both ends the gradients were taken, at a rate amid those that are possible."""
    low, high = _range(observation)
    changed = replace(observation, training=scaled(observation.training, min(_AMID * low, high)))
    return solve_on_path(changed, normalised_update(changed)).position


def _range(observation: Observation) -> tuple[float, float]:
    """Scales between which c must be: |u_j| ≤ 1, and no step may diverge."""
    training = observation.training
    least = least_scale(observation)
    pull = (training.prox + training.weight_decay) * float(step_rates(training).max())
    highest = min(_LARGEST * least, 1.9 / pull if pull > 0 else np.inf)
    return min(least, highest / 2), highest


class _Views:
    """An update in the views of an explanation."""

    def __init__(self, observation: Observation, explanation: _Explanation) -> None:
        self.observation, self.explanation = observation, explanation
        N = observation.head.num_classes
        views = np.vstack((explanation.weight_view, explanation.bias_view))
        self.noise = observation.noise_std**2 * np.kron(np.eye(N - 1), views.T @ views)
        """Of known noise, on the update in the views."""

    def at(self, scale: float) -> tuple[FloatArray, float]:
        """(Δ + h)/Σ_τ w^τ in the views, shape ((N − 1) F,), and Σ_τ w^τ, with the rates times ``scale``."""
        observation = replace(self.observation, training=scaled(self.observation.training, scale))
        update = without_drift(observation)
        total = float(impulse_response(observation.training).sum())
        moved = update.weight @ self.explanation.weight_view
        if update.bias is not None:
            moved = moved + np.outer(update.bias, self.explanation.bias_view)
        return moved[:-1].ravel() / total, total

    def may_be_right(self, z: FloatArray) -> bool:
        """Whether c = 1 is nearly as likely as some other c, with the weights of z for all: soon told."""
        u, total = self.at(1.0)
        root = np.linalg.cholesky(self.covariance(z) + self.noise / total**2)
        white = np.linalg.solve(root, np.column_stack((self.explanation.mean.T, u)))
        solver = SimplexSolver(white[:, :-1])
        told, *others = (
            solver.solve(white[:, -1] / np.exp(x)).residual ** 2 + 2 * len(u) * x for x in (0.0, *_OTHERS)
        )
        return told <= min(others) + _NEARLY

    def likeliest(self) -> float:
        """log c."""
        lowest, highest = np.log(_range(self.observation))
        grid = np.arange(lowest, highest, _COARSE)
        at = int(np.argmin([self.cost(x) for x in grid]))
        return _least(self.cost, (grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]))

    def interval(self, found: float) -> LearningRate:
        """c, with what the estimates of like updates are off by."""
        lowest, highest = np.log(_range(self.observation))
        ends = (max(found - _AROUND, lowest), min(found + _AROUND, highest))
        errors = np.array([_least(self.cost_of(moved), ends) for moved in self.like_updates(found)]) - found
        return _with_interval(found, _STUDENT[_DRAWS] * float(np.sqrt(np.mean(errors**2))))

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
        known, rng = self.explanation, np.random.default_rng(self.observation.seed)
        for _ in range(_DRAWS):
            taken = [
                rng.choice(np.flatnonzero(known.labels == n), count)
                for n, count in enumerate(counts)
                if count
            ]
            noise = rng.multivariate_normal(np.zeros(len(u)), self.noise) if self.noise.any() else 0.0
            yield total * known.responses[np.concatenate(taken)].mean(axis=0) + noise

    def _fitted(self, u: FloatArray, total: float) -> tuple[FloatArray, float]:
        """z, and −2 log L."""
        mean = self.explanation.mean
        N, D = len(mean), len(u)
        z = np.full(N, 1.0 / N)
        for _ in range(_SWEEPS):
            root = np.linalg.cholesky(self.covariance(z) + self.noise / total**2)
            white = np.linalg.solve(root, np.column_stack((mean.T, u)))
            solution = simplex_least_squares(white[:, :-1], white[:, -1])
            z = solution.z
        spread = 2 * float(np.log(np.diag(root)).sum())
        return z, solution.residual**2 + spread + 2 * D * float(np.log(total))

    def covariance(self, z: FloatArray) -> FloatArray:
        """Σ(z), shape (D, D)."""
        training, known = self.observation.training, self.explanation
        z = np.maximum(z, 1.0 / (2 * training.samples))
        own = z * batch_variance(training) + z**2 / known.counts
        kept = np.tensordot((1 - _POOLED) * own + _POOLED * own.mean(), known.spread, axes=1)
        if known.drift is not None:
            drift = known.drift.T @ z
            kept += _ASTRAY**2 * np.outer(drift, drift)
        floor = _FLOOR * float(np.trace(kept)) / len(kept)
        return np.asarray(kept + max(floor, 1e-16) * np.eye(len(kept)))
