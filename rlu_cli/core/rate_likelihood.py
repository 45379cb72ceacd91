"""How likely an update is, by the learning rate that it is taken to have had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlu_cli.core.gradients import normalised_update, without_drift
from rlu_cli.core.path import solve_on_path
from rlu_cli.core.residuals import residuals
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import batch_variance, pace, step_rates
from rlu_cli.core.simplex import SimplexSolver, simplex_least_squares
from rlu_cli.core.trained import is_trained
from rlu_cli.core.types import Activations, FloatArray, HeadUpdate, IntArray, LocalTraining, Observation
from rlu_cli.errors import MismatchError

_SIDES = 3.92
"""Standard deviations between both ends of a 95 % interval."""

FEWEST = 10
"""Auxiliary samples of every class that are asked for."""

_STILL = 0.1
"""Motion up to which a model that isn't trained yet counts as standing still."""

_DIRECTIONS, _MANY_CLASSES = 3, 40
"""Directions of the embedding, those in which the classes differ most; of more classes, one is enough."""

_SWEEPS = 3
"""Alternations of weights and proportions."""

_POOLED, _FLOOR, _ASTRAY = 0.1, 1e-3, 0.1
"""As in gls: the classes' common covariance, least variance, where on its way the model was."""

LARGEST, _COARSE = 1000.0, 0.15
"""Range above the least possible rate, and the steps (of its logarithm) of the first look."""

_AMID = 10.0
"""Of the least possible rate: where u is about 0.1, as usual."""

_AROUND = 1.5
"""How far from the estimate (of its logarithm) those of like updates are looked for."""

_DRAWS = 20
"""Updates drawn again, whose estimates scatter as this one's error does."""

_MOST_DRAWN = 100_000
"""Samples of a like update at most: a mean over more is hardly surer."""

_STUDENT = 2.093
"""95 % point of Student's t, for a standard deviation from so many."""

_DRIFT = 0.98
"""Of the way between both ends: the 95 % point of what is unknown of it, half of it being the standard
deviation, as in the misfit."""

_LEAST = 0.005
"""Error of the logarithm beside all that is drawn: of the search, and of what was not modelled."""

_OTHERS, _NEARLY = (0.1, 0.6), 8.0
"""Other sizes' logarithms, to either side, and how much likelier (−2 log L) than the right one they may be by
chance."""


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

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm."""
        return float(np.log(self.spread)) / _SIDES

    def excludes(self, scale: float, *, halves: float = 1.0) -> bool:
        """Whether a factor is more than so many halves of the interval away, in logarithms."""
        half = max(np.log(self.high / self.scale), np.log(self.scale / self.low))
        return bool(abs(np.log(self.scale / scale)) > halves * half)

    def widened(self, motion: float) -> LearningRate:
        """With the error beside sampling: half of the way between both ends, as one standard deviation.

        Parameters
        ----------
        motion : how far training moved the predictions, see `rlu_cli.core.misfit.motion`
        """
        wider = (float(np.hypot(np.log(end / self.scale), _DRIFT * motion)) for end in (self.low, self.high))
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


def from_logarithm(found: float, half: float) -> LearningRate:
    """From logarithms."""
    half += _LEAST
    return LearningRate(*(float(np.exp(found + step)) for step in (0.0, -half, half)))


def _least(cost: Callable[[float], float], bounds: tuple[float, float]) -> float:
    """Where the cost is least."""
    from scipy.optimize import minimize_scalar  # half of SciPy, for those who ask alone

    return float(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": _LEAST / 4}).x)


def _beside(grid: FloatArray, costs: Sequence[float]) -> tuple[float, float]:
    """The neighbours of the place of least cost."""
    at = int(np.argmin(costs))
    return float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])


@dataclass(frozen=True)
class Explanation:
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


def explanation_of(
    samples: Sequence[Activations], weights: Sequence[float], *, has_bias: bool
) -> Explanation:
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
    return Explanation(weight_view, bias_view, labels, responses, mean, spread, drift)


def _class_means(values: FloatArray, labels: IntArray, num_classes: int) -> FloatArray:
    return np.stack([values[labels == n].mean(axis=0) for n in range(num_classes)])


def position_between(observation: Observation) -> float:
    """Where between both ends the gradients were taken, at a rate amid those that are possible."""
    low, high = _range(observation)
    changed = replace(observation, training=scaled(observation.training, min(_AMID * low, high)))
    return solve_on_path(changed, normalised_update(changed)).position


def _range(observation: Observation) -> tuple[float, float]:
    """Scales between which c must be: |u_j| ≤ 1, and no step may diverge."""
    training = observation.training
    least = least_scale(observation)
    if least == 0.0:  # a dead layer before a head without bias, say
        raise MismatchError(
            "expected an update that tells its learning rate, found nothing that moved the bias, or what "
            "stands for it: say --lr RATE"
        )
    pull = (training.prox + training.weight_decay) * float(step_rates(training).max())
    highest = min(LARGEST * least, 1.9 / pull if pull > 0 else np.inf)
    return min(least, highest / 2), highest


class Views:
    """An update in the views of an explanation, and how likely it is at each learning rate."""

    def __init__(self, observation: Observation, explanation: Explanation) -> None:
        self.observation, self.explanation = observation, explanation
        N = observation.head.num_classes
        views = np.vstack((explanation.weight_view, explanation.bias_view))
        self.noise = observation.noise_std**2 * np.kron(np.eye(N - 1), views.T @ views)
        """Of known noise, on the update in the views."""

    def at(self, scale: float) -> tuple[FloatArray, float]:
        """(Δ + h)/Σ_τ w^τ in the views, shape ((N − 1) F,), and Σ_τ w^τ, with the rates times ``scale``."""
        observation = replace(self.observation, training=scaled(self.observation.training, scale))
        update = without_drift(observation)
        total = pace(observation.training)
        return self.of(update) / total, total

    def of(self, update: HeadUpdate) -> FloatArray:
        """An update in the views, shape ((N − 1) F,)."""
        moved = update.weight @ self.explanation.weight_view
        if update.bias is not None:
            moved = moved + np.outer(update.bias, self.explanation.bias_view)
        return np.asarray(moved[:-1].ravel())

    def may_be_right(self, z: FloatArray, least: float) -> bool:
        """Whether c = 1 is nearly as likely as some other c, with the weights of z for all: soon told.

        Parameters
        ----------
        least : of another c's logarithm, beside 0.1 and 0.6
        """
        u, total = self.at(1.0)
        cost = self.weighted(z, 0.0)(total * u)
        others = (cost(side * x) for x in (least, *_OTHERS) for side in (-1.0, 1.0))
        return cost(0.0) <= min(others) + _NEARLY

    def likeliest(self) -> float:
        """log c."""
        grid = self._grid()
        return _least(self.cost, _beside(grid, [self.cost(x) for x in grid]))

    def soon_likeliest(self) -> float:
        """log c, looked for with fixed weights at first."""
        grid, found = self._grid(), 0.0
        u, total = self.at(1.0)
        for _ in range(2):
            cost = self.weighted(self.best(found), found)(total * u)
            ends = _beside(grid, [cost(x) for x in grid])
            found = sum(ends) / 2
        return _least(self.cost, ends)

    def _grid(self) -> FloatArray:
        lowest, highest = np.log(_range(self.observation))
        return np.arange(lowest, highest, _COARSE)

    def interval(
        self, found: float, *, soon: bool = False, like: Iterable[FloatArray] | None = None
    ) -> LearningRate:
        """c, with what the estimates of like updates are off by, by Birge's ratio more where it misfits.

        Parameters
        ----------
        soon : with the weights of c for all of them, five times as fast
        like : these updates, in the views, which then tell the estimate's bias too; default: `like_updates`
        """
        lowest, highest = np.log(_range(self.observation))
        ends = (max(found - _AROUND, lowest), min(found + _AROUND, highest))
        cost_of = self.weighted(self.best(found), found) if soon else self.cost_of
        updates = self.like_updates(found) if like is None else like
        errors = np.array([_least(cost_of(moved), ends) for moved in updates]) - found
        birge = float(np.sqrt(max(1.0, self.misfit(found))))
        half = birge * _STUDENT * float(np.sqrt(np.mean(errors**2)))
        return from_logarithm(found if like is None else found - float(np.mean(errors)), half)

    def cost(self, log_scale: float) -> float:
        """−2 log L."""
        return self._fitted(*self.at(float(np.exp(log_scale))))[1]

    def misfit(self, log_scale: float) -> float:
        """‖u(c) − Φ z‖²_Σ / D, about 1 where the samples are like the auxiliary ones."""
        u, total = self.at(float(np.exp(log_scale)))
        return self._fitted(u, total)[2] / len(u)

    def cost_of(self, moved: FloatArray) -> Callable[[float], float]:
        """−2 log L of another Δ + h in these views."""

        def cost(log_scale: float) -> float:
            total = self.at(float(np.exp(log_scale)))[1]
            return self._fitted(moved / total, total)[1]

        return cost

    def weighted(self, z: FloatArray, log_scale: float) -> Callable[[FloatArray], Callable[[float], float]]:
        """From any Δ + h to its −2 log L, but for a constant, always with the weights of z at c."""
        total = self.at(float(np.exp(log_scale)))[1]
        root = np.linalg.cholesky(self.covariance(z) + self.noise / total**2)
        solver = SimplexSolver(np.linalg.solve(root, self.explanation.mean.T))

        def cost_of(moved: FloatArray) -> Callable[[float], float]:
            white = np.linalg.solve(root, moved / total)

            def cost(x: float) -> float:
                scaled_back = white * np.exp(log_scale - x)
                return float(solver.solve(scaled_back).residual ** 2 + 2 * len(white) * x)

            return cost

        return cost_of

    def best(self, log_scale: float) -> FloatArray:
        """z at c."""
        return self._fitted(*self.at(float(np.exp(log_scale))))[0]

    def like_updates(self, log_scale: float) -> Iterator[FloatArray]:
        """Δ + h in the views, of auxiliary samples with the labels found."""
        total = self.at(float(np.exp(log_scale)))[1]
        rng, zero = np.random.default_rng(self.observation.seed), np.zeros(len(self.noise))
        for taken in self.like_samples(log_scale, rng):
            noise = rng.multivariate_normal(zero, self.noise) if self.noise.any() else 0.0
            yield total * self.explanation.responses[taken].mean(axis=0) + noise

    def like_samples(
        self, log_scale: float, rng: np.random.Generator, *, drawn_labels: bool = False
    ) -> Iterator[IntArray]:
        """Auxiliary samples with the labels found, twenty times.

        Parameters
        ----------
        drawn_labels : whether other labels are drawn each time, by the proportions found
        """
        drawn = min(self.observation.training.samples, _MOST_DRAWN)
        z, labels = self.best(log_scale), self.explanation.labels
        counts = round_to_total(z, drawn)
        for _ in range(_DRAWS):
            if drawn_labels:
                counts = rng.multinomial(drawn, z / z.sum())
            taken = [
                rng.choice(np.flatnonzero(labels == n), count) for n, count in enumerate(counts) if count
            ]
            yield np.concatenate(taken)

    def _fitted(self, u: FloatArray, total: float) -> tuple[FloatArray, float, float]:
        """z, −2 log L, and its part ‖u − Φ z‖²_Σ."""
        mean = self.explanation.mean
        N, D = len(mean), len(u)
        z = np.full(N, 1.0 / N)
        for _ in range(_SWEEPS):
            root = np.linalg.cholesky(self.covariance(z) + self.noise / total**2)
            white = np.linalg.solve(root, np.column_stack((mean.T, u)))
            solution = simplex_least_squares(white[:, :-1], white[:, -1])
            z = solution.z
        spread = 2 * float(np.log(np.diag(root)).sum())
        squares = solution.residual**2
        return z, squares + spread + 2 * D * float(np.log(total)), squares

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
