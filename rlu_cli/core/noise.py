"""Known Gaussian noise on an update, as differential privacy adds it."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.coarse import coarsening
from rlu_cli.core.gradients import without_drift
from rlu_cli.core.schemes import pace
from rlu_cli.core.types import FloatArray, Head, Observation


def normalised_noise(observation: Observation) -> float:
    """The known noise's standard deviation on each element of u and of ∇W.

    σ_u = σ / (η Σ_τ ρ^τ),     for Adam σ / Σ_τ η_τ
    """
    if observation.noise_std == 0:
        return 0.0
    return observation.noise_std / pace(observation.training)


_FEWEST_COLUMNS = 8
_COUNTED = 0.1
"""Samples by which noise must be able to change a count to be worth its care: rounding isn't."""


_ROUNDING = 4.0
"""How many times as large as step/√12 `column_noise` may be of a rounded update: up to 3.5 where nothing was
added to it, since a column's small numbers are all rounded alike."""

_FEW_VALUES = 4
"""Up to so many, signs above all, the numbers of a column may add up to anything."""


def is_rounding(observation: Observation) -> bool:
    """Whether an update was rounded, and the noise that is seen in it may be what that added."""
    coarse, noise = coarsening(observation), observation.noise_std
    if coarse.values is None or (noise and observation.noise_told):
        return False
    untold = not coarse.even or coarse.values[0] <= _FEW_VALUES
    return untold or noise <= _ROUNDING * coarse.rounding


def rounding_alone(observation: Observation) -> float:
    """σ_u of what rounding to a grid added to each number of the bias, (step/√12)/(η Σ_τ ρ^τ).

    0 where an update wasn't rounded to a grid, has other noise or no bias, or can't change a count by 0.1.
    """
    if not is_rounding(observation) or observation.update.bias is None:
        return 0.0
    coarse, scale = coarsening(observation), pace(observation.training)
    counts = observation.training.samples * coarse.rounding >= _COUNTED * scale
    return coarse.rounding / scale if coarse.even and counts else 0.0


def column_noise(observation: Observation, *, rate_known: bool = True) -> float:
    """The standard deviation of what lies on each number of an SGD client's update beside training.

        σ̂² = Var_l(Σ_j (ΔW + h)[j, l]) / N

    What samples do to a column of ΔW sums to 0 over the classes, whatever they are, so its sum is noise of N
    numbers: Gaussian, of rounding or quantisation, or what another loss does.

    Parameters
    ----------
    rate_known : False where the rates, or the update, are right up to a factor only. What weight decay does
        is then what goes along with Σ_j W[j, l]
    """
    update = without_drift(observation) if rate_known else observation.update
    sums, known = update.weight.sum(axis=0), np.ones((update.embedding_size, 1))
    if not rate_known and observation.training.weight_decay:
        known = np.column_stack((known, observation.head.weight.sum(axis=0)))
    left = sums - known @ np.linalg.lstsq(known, sums, rcond=None)[0]
    variance = float(left @ left) / max(len(sums) - known.shape[1], 1)
    return float(np.sqrt(variance / update.num_classes))


def unexplained_noise(observation: Observation, *, least_scale: float | None = None) -> float:
    """The standard deviation of noise on each number of the update that nobody told of, 0 for none.

    `column_noise`, rounded to a power of √2, so that clients whose noise is alike have equal numbers. Noise
    that can't change a count by 0.1 is none.

    Parameters
    ----------
    least_scale : least factor of the rates, where they, or the update, are right up to a factor only: noise
        counts as it would at the least
    """
    training = observation.training
    if training.optimizer != "sgd" or observation.update.embedding_size < _FEWEST_COLUMNS:
        return 0.0
    found = column_noise(observation, rate_known=least_scale is None)
    if training.samples * found < _COUNTED * (least_scale or 1.0) * pace(training):
        return 0.0
    return alike(found)


def alike(noise_std: float) -> float:
    """The nearest power of √2, so that clients of like noise share what is made up with it; 0 for 0."""
    return float(2.0 ** (np.round(2 * np.log2(noise_std)) / 2)) if noise_std else 0.0


def centred(values: FloatArray) -> FloatArray:
    """values − their mean over classes, the last axis.

    What samples do sums to 0 over the classes, and noise does not: its share along (1, …, 1) is taken
    away, and nothing else is lost.
    """
    return np.asarray(values - values.mean(axis=-1, keepdims=True))


def observed_views(
    observation: Observation, u: FloatArray, gradient: Head, *, exact: bool = False
) -> tuple[FloatArray, tuple[float, ...]]:
    """What `gls` explains of an update, N − 1 numbers a view, and the known noise of each view.

    The views are u, and where `ResidualPath.along` is known −∇W v: each has independent noise of
    covariance σ² (I − 11ᵀ/N), σ the number returned. What rounding adds is not independent, number by
    number: it makes small ones 0. So an update that was rounded, and has no other noise that shows, is looked
    at in u alone where that says enough.

    Parameters
    ----------
    u, gradient : as in `Problem`
    exact : whether samples of a class are so much alike that u alone tells their counts
    """
    path = observation.residuals
    noise = normalised_noise(observation)
    rounded = rounding_alone(observation)
    if rounded and (exact or noise == 0.0):
        return centred(u)[:-1], (rounded,)
    if noise == 0.0:
        return u[:-1], (0.0,)
    views, spread = [u], [noise]
    if path is not None and path.along is not None:
        views.append(-gradient.weight @ path.along)
        spread.append(noise * float(np.linalg.norm(path.along)))
    return np.concatenate([centred(view)[:-1] for view in views]), tuple(spread)
