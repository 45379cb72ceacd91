"""Regressions on replayed clients, made once for all clients of a global model that train alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlu_cli.core.client_views import (
    ClientView,
    ModelMeans,
    ReplayedClient,
    ReplayPlan,
    Replays,
    class_features,
)
from rlu_cli.core.error_model import Fit, ResidualModel, fit
from rlu_cli.core.fits import Fits
from rlu_cli.core.gradients import mean_gradient
from rlu_cli.core.kernel_regression import KernelRegression
from rlu_cli.core.methods.base import check_diverging
from rlu_cli.core.noise import centred, normalised_noise
from rlu_cli.core.replayed_size import signal_size
from rlu_cli.core.residuals import ResidualMoments
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import pace, path_position
from rlu_cli.core.synthetic_clients import draw_mixes, mixes_near
from rlu_cli.core.types import (
    FloatArray,
    Head,
    HeadUpdate,
    IntArray,
    LocalTraining,
    ModelStatistics,
    Observation,
)
from rlu_cli.core.update_shape import update_shape

_REPLAYS, _FEWEST = 220, 20
"""Replays a global model with the default ``--samples``; fewer where they are dear."""

_OWN, _OWN_WORK = 40, 1e11
"""Replays that serve one client alone, and floating-point operations of them all that make them fewer, but
not fewer than twenty."""

_ROWS = 4000
"""Replays times classes, at most: the regression's time grows with the cube."""

_LEAST = 20
"""Replays with ever so few ``--samples``."""

_WORK = 1e12
"""Floating-point operations of them all that keep them from being fewer."""

_DEFAULT_SAMPLES = 10_000

_NEAR, _LEAST_NEAR = 8, 4
_NEAR_WORK, _LEAST_NEAR_WORK = 7e10, 4e11
"""Floating-point operations of the replays near one client's answer, a second or two of a small processor: as
many replays as that makes, but not fewer than the least number unless those take more than the second."""

_CONCENTRATION = 300.0
"""How near to z their mixes are, see `mixes_near`: by 0.02 where a class has a tenth of the samples."""

_FEW_CLASSES, _OFTEN = 4, 16
"""Up to so many classes, and where a client sees more than so many samples for each auxiliary one, replayed
clients draw from halves of these. All draw nearly the same ones otherwise, over and over, and what their
training makes of these is learnt: 60 to 94 % of the bounds of few classes held, of five epochs with ten or
twenty auxiliary images a class 63 to 77 %."""

_FEW_IMAGES = 50
"""Of a class, up to which other images than those that replays share are allowed for: of a hundred bounds
would be wider by a twentieth, and hold without."""

_HALVED, _LEAST_HALVED = 0.2, 20
"""Replays of halves of the images that tell how much, as a share of the others, and how many at least."""

_LATE = 0.75
"""Where between both models `gls` is asked as well, beside where a steady gradient was taken."""

_GUESSES = 3
"""Both, and `class_features`' own."""

_regressions: Fits[KernelRegression] = Fits("replay", KernelRegression.arrays)


def shared_regression(observation: Observation, width: int) -> KernelRegression:
    """What all clients of the global model share that train like this one; ``width`` features a class."""
    clients = observation.replayed_clients
    assert clients is not None
    own = clients.own
    training, sizes = _alike(observation)
    N, seed = observation.head.num_classes, observation.seed

    def make() -> KernelRegression:
        cost = clients.cost(training.resized(math.isqrt(sizes[0] * sizes[1])))
        most, work = (_REPLAYS, _WORK) if own is None else (_OWN, _OWN_WORK)
        affordable = min(most, _ROWS // N, work / cost)
        number = max(_LEAST, int(_share(observation) * max(_FEWEST, affordable)))
        rng = np.random.default_rng(seed)

        def drawn(number: int, *, first: int, halves: bool) -> Replays:
            mixes = draw_mixes(number, N, rng)
            logarithms = rng.uniform(math.log(sizes[0]), math.log(sizes[1]), number)
            seen = np.rint(np.exp(logarithms)).astype(int)
            return _replayed(observation, training, mixes, seen, first=first, halves=halves)

        in_halves = _in_halves(observation)
        found = drawn(number, first=0, halves=in_halves)
        regression = KernelRegression(found, guesses=_GUESSES)
        if in_halves or observation.start.moments.counts.min() > _FEW_IMAGES:
            return regression
        halved = max(_LEAST_HALVED, int(_HALVED * number))
        return regression.allowing_for_other_images(drawn(halved, first=_REPLAYS + _NEAR, halves=True))

    values: dict[str, Any] = {
        "training": asdict(training),
        "sizes": sizes,
        "samples": observation.samples,
        "seed": seed,
        "own": own,
        "frozen": observation.frozen,
    }
    treatment = clients.treatment
    if treatment.clipping is None:
        values["noise_std"] = treatment.noise_std
    else:  # what noise is after dividing by the factor is each client's own
        values["clipping"] = asdict(treatment.clipping)
    if treatment.compression is not None:
        values["compression"] = asdict(treatment.compression)
    return _regressions.get(
        observation,
        values,
        make=make,
        unpack=lambda arrays: KernelRegression.from_arrays(arrays, N, width, guesses=_GUESSES),
    )


def bias_means(statistics: ModelStatistics, residuals: ResidualMoments) -> ModelMeans:
    """Of the bias alone, as replayed clients have them."""
    N = statistics.num_classes
    bias = ResidualMoments(residuals.mean[:, :N], residuals.factor[:, :, :N], residuals.counts)
    return ModelMeans(statistics.moments.mean, bias)


def _share(observation: Observation) -> float:
    """Of the replays of the default ``--samples``, never more than all."""
    return min(1.0, observation.samples / _DEFAULT_SAMPLES)


def number_nearby(observation: Observation) -> int:
    """How many replays of the client's own training are worth their time."""
    assert observation.replayed_clients is not None
    cost = observation.replayed_clients.cost(observation.training)
    if _LEAST_NEAR * cost > _LEAST_NEAR_WORK:
        return 0
    return max(_LEAST_NEAR, int(min(_share(observation) * _NEAR, _NEAR_WORK / cost)))


def replayed_near(observation: Observation, z: FloatArray, number: int) -> Replays:
    """So many replays of the client's own training on mixes near z."""
    rng = np.random.default_rng((observation.seed, 1))
    mixes = mixes_near(z, number, rng, concentration=_CONCENTRATION)
    sizes = [observation.training.seen] * number
    halves = _in_halves(observation)
    return _replayed(observation, observation.training, mixes, sizes, first=_REPLAYS, halves=halves)


def _replayed(
    observation: Observation,
    training: LocalTraining,
    mixes: FloatArray,
    sizes: Sequence[int] | IntArray,
    *,
    first: int,
    halves: bool,
) -> Replays:
    """Training replayed on each of the mixes, without those that diverge.

    Parameters
    ----------
    first : number of the first one's random choices
    halves : whether they draw from one half of each class's auxiliary samples and the other in turn

    Raises
    ------
    MismatchError
        More than half diverge.
    """
    plans = [
        ReplayPlan(
            round_to_total(z, int(size)),
            training.resized(int(size)),
            first + draw,
            draw % 2 if halves else None,
        )
        for draw, (z, size) in enumerate(zip(mixes, sizes, strict=True))
    ]
    assert observation.replayed_clients is not None
    clients = observation.replayed_clients(plans, observation.progress)
    kept = [(plan, client) for plan, client in zip(plans, clients, strict=True) if client is not None]
    check_diverging(len(plans) - len(kept), len(plans))
    views = [_view(observation, plan, client) for plan, client in kept]
    return Replays(
        np.stack([client.proportions for _, client in kept]),
        np.stack([client_features(seen, view) for seen, view in views]),
        np.stack([_shape(view.gradient.weight, observation) for _, view in views]),
        np.array([plan.half for plan, _ in kept]) if halves else None,
    )


def _shape(weight: FloatArray, observation: Observation) -> FloatArray:
    """`update_shape` of a replayed client, of SGD's with the size that is left without noise."""
    assert observation.replayed_clients is not None
    how, shape = observation.replayed_clients.treatment.compression, update_shape(weight)
    if observation.training.optimizer == "sgd":
        shape[0], _ = head_size(weight, sparsified=how is not None and how.sparsified)
    return shape


def head_size(weight: FloatArray, *, sparsified: bool) -> tuple[float, float]:
    """`signal_size`, or where parts of the columns are missing, which sum to anything then, the plain one."""
    return (float(update_shape(weight)[0]), 0.0) if sparsified else signal_size(weight)


def _view(
    observation: Observation, plan: ReplayPlan, client: ReplayedClient
) -> tuple[Observation, ClientView]:
    """What is observed of a replayed client in the real one's place, as far as its features need it."""
    update = HeadUpdate(client.change.weight, client.change.bias)
    seen = replace(observation, update=update, training=plan.training, noise_std=client.noise_std)
    gradient: Head = mean_gradient(seen)
    return seen, ClientView(gradient, client.start, client.end, pace(plan.training))


def client_features(observation: Observation, view: ClientView) -> FloatArray:
    """Of one client, real or replayed; with what `gls` makes of its two models."""
    positions = (path_position(observation.training), _LATE)
    guesses = [between_ends(observation, view, position).solution.z for position in positions]
    means, _ = observation.start.embeddings_for("replay")
    return class_features(view, observation.head, means, np.column_stack(guesses))


def between_ends(observation: Observation, view: ClientView, position: float) -> Fit:
    """What `gls` makes of both models without replays, with the gradients taken at this place between."""
    assert view.gradient.bias is not None
    parts = [(1 - position, view.start.residuals), (position, view.end.residuals)]
    model = ResidualModel(parts, observation.training, noise=(normalised_noise(observation),))
    return fit(model, centred(-view.gradient.bias)[:-1])


def _in_halves(observation: Observation) -> bool:
    """Whether replayed clients draw from halves of the auxiliary samples."""
    training, (low, high) = _alike(observation)
    counts = observation.start.moments.counts
    seen = training.resized(math.isqrt(low * high)).samples
    return len(counts) <= _FEW_CLASSES or seen > _OFTEN * int(counts.sum())


def _alike(observation: Observation) -> tuple[LocalTraining, tuple[int, int]]:
    """The training of all that share replays, resized to one batch, and how many samples they have."""
    training = observation.training
    assert observation.replayed_clients is not None
    size, alike = training.seen, training.resized(training.batch_size)
    if alike is training or observation.replayed_clients.own is not None:
        return training, (size, size)
    low = 2 ** int(math.log2(size))
    return alike, (low, 2 * low)
