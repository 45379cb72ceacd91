"""Regression on replayed clients: label proportions as a function of all that several steps did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from rlu_cli.core.checks import check_size
from rlu_cli.core.client_views import (
    ClientView,
    ModelMeans,
    ReplayedClient,
    ReplayPlan,
    Replays,
    class_features,
)
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.fits import Fits
from rlu_cli.core.gradients import mean_gradient, normalised_update
from rlu_cli.core.kernel_regression import ClassPrediction, KernelRegression
from rlu_cli.core.methods.base import Capabilities, Method, Problem, check_diverging
from rlu_cli.core.methods.gls import (
    Fit,
    ResidualModel,
    fit,
    middle,
    solutions_of_like_updates,
    solve_instead,
)
from rlu_cli.core.misfit import motion
from rlu_cli.core.noise import centred, normalised_noise
from rlu_cli.core.replayed_size import RelativeSize, SizeModel, repeats, signal_size, size_notes
from rlu_cli.core.residuals import ResidualMoments, ResidualPath
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.scale_levels import scale_level
from rlu_cli.core.schemes import pace, path_position
from rlu_cli.core.synthetic_clients import draw_mixes, mixes_near
from rlu_cli.core.trained import is_trained
from rlu_cli.core.types import (
    Estimate,
    FloatArray,
    Head,
    HeadUpdate,
    IntArray,
    LocalTraining,
    ModelStatistics,
    Note,
    Observation,
)
from rlu_cli.core.update_shape import check_shape, update_shape
from rlu_cli.core.update_size import RIGHT_SIZE, size_error
from rlu_cli.errors import MismatchError

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

_SURE = 0.1
"""Error on clients left out below which replays near the answer are worth it: where the samples' chance
decides, and not what training makes of them, they tell nothing new."""

_NEAR, _LEAST_NEAR = 8, 4
_NEAR_WORK, _LEAST_NEAR_WORK = 7e10, 4e11
"""Floating-point operations of the replays near one client's answer, a second or two of a small processor: as
many replays as that makes, but not fewer than the least number unless those take more than the second."""

_CONCENTRATION = 300.0
"""How near to z their mixes are, see `mixes_near`: by 0.02 where a class has a tenth of the samples."""

_FEW_CLASSES = 4
"""Up to which replayed clients draw from halves of the auxiliary samples. All draw nearly the same ones
otherwise, and what their training makes of these is learnt: 60 to 94 % of the bounds held."""

_LATE = 0.75
"""Where between both models `gls` is asked as well, beside where a steady gradient was taken."""

_GUESSES = 3
"""Both, and `class_features`' own."""

_MOST_CLASSES, _FEWEST_AUXILIARY = 100, 10

_STRANGE = 2.0
"""How much stranger than all replayed clients one may be."""

_SLIGHT = 0.05
"""Logarithm of an early model's update size, over what its training values say, from which it is doubted: its
likelihood tells no less surely (of 239 right clients of six networks it was that of one)."""

_UNLIKE = "the update is unlike that of any replayed client (noise, other data or training values?)"


_regressions: Fits[KernelRegression] = Fits("replay", KernelRegression.arrays)
_sizes: WeakKeyDictionary[KernelRegression, SizeModel] = WeakKeyDictionary()


def solve(problem: Problem) -> Estimate:
    """Label proportions by regression on replays of the client's training.

        √z_n ≈ f(x_n),     x_n the features of class n in the update, and in both models' auxiliary logits

    On the way of several steps nothing is linear: S changes with every step, and over whole epochs the model
    adapts to the client's mix until its gradients say little of it. But the auditor can train too. So 20 to
    220 clients are made up: class mixes are `draw_mixes`'s, each client draws its samples from eight in ten
    of the auxiliary ones, with weights of their own, and trains on them as the real one did, from the global
    model on. It is looked at with the auxiliary samples that it has not seen, as the real one is with all of
    them. Up to four classes each draws from one half of them and is looked at with the other, since all would
    draw nearly the same. All clients that train alike share the replays; over whole epochs so do those of
    about as many samples, within a factor of two.

    f is the same for every class (`class_features`, `KernelRegression`), so N samples come of each replay.
    Among the features is what `gls` makes of both models' residuals without replays: where the way between
    them is smooth, f follows it, and where it is not, the replays say how wrong it is. The errors on replays
    left out give the bounds and the presence; a class that is likelier absent than there gets no samples.
    Where these errors are small, four to eight more replays near the answer sharpen it.

    Where the update is of another size than theirs that point alike, but for trained models of two classes,
    or than an early model's likelihood has it, it is read again as if it had been divided by the factor
    (`Observation.rescaled`), by replays whose own estimates miss as far.

    Trained models of two classes say least: there z is the mean of f's and of what least squares with S of
    Gaussian logits find, which errs by other things, and by about as much; and the bounds are half-way
    between f's and those that hold those of `gls` as well: one sample unlike all auxiliary ones makes more
    of such an update than all others, and no replay has one.

    Nothing is asked of the optimiser but that it can be run, so this is the method for Adam too, whose
    update isn't linear in the gradients. There the guesses mean little, and `gls` can't answer in its place.

    Where the client's update was clipped (`Observation.clipping`), the replayed ones are clipped as it was,
    so that what clipping hides they don't know either, and where it was sparsified or quantised they lose as
    much. Where its factor was estimated, and the update divided
    by it, so are theirs, by estimates that miss as far.

    Where a scheme adds gradients of the client's own (Scaffold, FedDyn, FedDC), its replays serve nobody
    else, and are twenty to forty.

    Assumptions: auxiliary samples like the client's; optimiser and steps known. Uses both models' logits, ΔW,
    Δb, the auxiliary images and the network.
    Source: regression for simulators (Beaumont et al. 2002; Papamakarios & Murray 2016); the mean of two
    forecasts (Bates & Granger 1969).
    """
    observation = problem.observation
    path = observation.residuals
    assert path is not None
    linear = observation.training.optimizer == "sgd"
    why = _why_not(observation, path)
    if why is not None and linear:
        return solve_instead(problem, Note("replay-not-fitted", f"{why}: the counts are those of gls"))
    if why is not None or path.end is None or observation.end is None:
        raise MismatchError(f"expected clients that replay can learn from, but {why}: try --method surrogate")
    view = ClientView(
        problem.gradient,
        _means(observation.start, path.start),
        _means(observation.end, path.end),
        pace(observation.training),
    )
    features = _features(observation, view)
    regression = _regression(observation, features.shape[1])
    strangeness = regression.strangeness(features)
    found: dict[str, float] = {"replay_error": regression.error, "replay_strangeness": strangeness}
    strange = not strangeness <= _STRANGE
    doubts = () if linear else _doubts(observation, view, regression, strange)
    prediction = _predicted(problem, view, regression, features)
    if linear and not observation.scaled:
        size = _relative_size(observation, view, _size_model(regression), features)
        found["replay_size"] = math.exp(size.logarithm)
        answer = _rescaled(observation, size, prediction.proportions)
        if answer is not None:
            return answer
        doubts = size_notes(size, read=False)
    if strange and linear:
        note = Note("replay-strange-update", f"{_UNLIKE}: the counts are those of gls")
        return solve_instead(problem, note, *doubts, **found)
    if doubts:
        found["replays"] = regression.clients
        return Estimate(prediction.proportions, found, doubts)
    number = _nearby(observation)
    if regression.error < _SURE and number:
        regression = regression.with_more(_near(observation, prediction.proportions, number))
        prediction = _predicted(problem, view, regression, features)
        found["replay_error"] = regression.error
    found["replays"] = regression.clients
    z = prediction.proportions
    if linear:
        found["residual"] = problem.residual(z)
    return Estimate(
        z,
        found,
        low=problem.total * prediction.low,
        high=problem.total * prediction.high,
        presence=prediction.presence,
        any_size=observation.clipping is not None,
    )


def _predicted(
    problem: Problem,
    view: ClientView,
    regression: Callable[[FloatArray], ClassPrediction],
    features: FloatArray,
) -> ClassPrediction:
    """f of the features; of trained models of two classes with what least squares say.

    But for updates that were scaled or lost numbers, which least squares know nothing of.
    """
    found, observation = regression(features), problem.observation
    if observation.training.optimizer != "sgd" or not _is_sure_of_two(observation):
        return found
    if observation.scaled or coarsening(observation).sparsified:
        return found
    z = (found.proportions + problem.path.solution.z) / 2
    between = _between_ends(observation, view, path_position(observation.training))
    low, high = middle(solutions_of_like_updates(between, seed=observation.seed))
    low = (found.low + np.minimum(found.low, low)) / 2
    high = (found.high + np.maximum(found.high, high)) / 2
    return replace(found, proportions=z, low=np.minimum(low, z), high=np.maximum(high, z))


def _is_sure_of_two(observation: Observation) -> bool:
    """Whether it is a trained model of two classes: its updates point one of two ways, at any size."""
    return observation.head.num_classes == 2 and is_trained(observation.start)


def _relative_size(
    observation: Observation, view: ClientView, model: SizeModel, features: FloatArray
) -> RelativeSize:
    """The client's size beside replays that point alike, with all by which it may miss."""
    weight, coarse = view.gradient.weight, coarsening(observation)
    assert observation.replayed_clients is not None
    alike = observation.replayed_clients.treatment.compression is not None
    own, error = _size(weight, sparsified=coarse.sparsified)
    size = model(features, own)
    return replace(
        size,
        deviation=math.hypot(size.deviation, error),
        damage=0.0 if alike else coarse.error,
        repeats=repeats(observation.training.seen, int(view.start.residuals.counts.sum())),
    )


def _rescaled(observation: Observation, size: RelativeSize, z: FloatArray) -> Estimate | None:
    """The answer for the update as it was before it got another size.

    None where it is as large as it should be, where the scheme adds gradients that were scaled with the
    samples' and hide the factor, of trained models of two classes (of 140 right clients six would be
    doubted), and where replays aren't like it at that size either: the likelihood of early models' updates
    and the replays tell the size of the head's update, and other layers may have been scaled otherwise.

    Parameters
    ----------
    z : the proportions as far as they are known
    """
    if observation.rescaled is None or observation.constant_gradient is not None:
        return None
    if _is_sure_of_two(observation):
        return None
    found = _other_size(observation, size, z)
    if found is None:
        return None
    factor, deviation, note = found
    try:
        divided = observation.rescaled(factor, scale_level(deviation))
        divided = replace(divided, progress=observation.progress)
        answer = solve(Problem(divided, normalised_update(divided), mean_gradient(divided)))
    except MismatchError:  # numbers beyond any size
        return None
    if not answer.any_size:
        return None
    return replace(
        answer,
        diagnostics={**answer.diagnostics, "replay_size": math.exp(size.logarithm)},
        warnings=(*answer.warnings, note),
        divided_by=factor,
    )


def _other_size(
    observation: Observation, size: RelativeSize, z: FloatArray
) -> tuple[float, float, Note] | None:
    """The factor of an update of another size, its logarithm's standard deviation, and what is to be said."""
    moved = motion(observation.start, observation.end) or 0.0
    likeliest = None
    if not coarsening(observation).any:
        least = RIGHT_SIZE if size.is_doubted else _SLIGHT
        likeliest = size_error(observation, z, moved, least=least)
    if likeliest is not None and not (size.is_doubted and size.error < likeliest.deviation):
        doubt = abs(math.log(likeliest.scale))
        slight = doubt <= RIGHT_SIZE
        (note,) = check_size(likeliest, read=True, slight=slight)
        return likeliest.scale, max(likeliest.deviation, doubt / 2 if slight else 0.0), note
    if size.is_doubted:
        (note,) = size_notes(size, read=True)
        return size.factor, size.error, note
    return None


def _size_model(regression: KernelRegression) -> SizeModel:
    """Of the clients that a regression was learnt from."""
    if regression not in _sizes:
        _sizes[regression] = SizeModel(regression.replays)
    return _sizes[regression]


def _doubts(
    observation: Observation, view: ClientView, regression: KernelRegression, strange: bool
) -> tuple[Note, ...]:
    """Why no replay of Adam is like this update, none where some are."""
    own = update_shape(view.gradient.weight)
    sized = not observation.scaled or observation.clipping is not None
    notes = check_shape(own, regression.replays.shapes, sized=sized)
    if strange and sized and not notes:
        message = f"{_UNLIKE}: the counts mean little and have no bounds"
        return (Note("update-unlike-replays", message),)
    return notes


def _why_not(observation: Observation, path: ResidualPath) -> str | None:
    """Why the client isn't replayed, None where it is."""
    why = out_of_scope(path.start.counts, observation.training)
    if why is not None:
        return why
    if observation.start.embedding_mean is None:
        return "the auxiliary samples' embeddings are unknown"
    if observation.replayed_clients is None:
        return "the client's training can't be replayed"
    if observation.scaled and observation.clipping is None and observation.training.optimizer == "sgd":
        return "the update was clipped, by a factor that nobody knows"
    if path.end is None or observation.end is None:
        return "the local model's statistics are unknown"
    return None


def out_of_scope(counts: IntArray, training: LocalTraining) -> str | None:
    """Why such a client isn't replayed, None where it is.

    Parameters
    ----------
    counts : auxiliary samples of each class
    """
    classes, fewest = len(counts), int(counts.min())
    if training.steps == 1 and training.optimizer == "sgd":
        return "the client took one step, and replays are for several"
    if classes > _MOST_CLASSES:
        return f"there are {classes} classes, and replays are made for {_MOST_CLASSES} at most"
    if fewest < _FEWEST_AUXILIARY:
        return f"a class has {fewest} auxiliary samples, and replays need {_FEWEST_AUXILIARY}"
    return None


def _means(statistics: ModelStatistics, residuals: ResidualMoments) -> ModelMeans:
    """Of the bias alone, as replayed clients have them."""
    N = statistics.num_classes
    bias = ResidualMoments(residuals.mean[:, :N], residuals.factor[:, :, :N], residuals.counts)
    return ModelMeans(statistics.moments.mean, bias)


def _regression(observation: Observation, width: int) -> KernelRegression:
    """What all clients of the global model share that train like this one; ``width`` features a class."""
    clients = observation.replayed_clients
    assert clients is not None
    own = clients.own
    size = observation.training.seen
    training, sizes = _shared(observation.training) if own is None else (observation.training, (size, size))
    N, seed = observation.head.num_classes, observation.seed

    def make() -> KernelRegression:
        cost = clients.cost(training.resized(math.isqrt(sizes[0] * sizes[1])))
        most, work = (_REPLAYS, _WORK) if own is None else (_OWN, _OWN_WORK)
        affordable = min(most, _ROWS // N, work / cost)
        number = max(_LEAST, int(_share(observation) * max(_FEWEST, affordable)))
        rng = np.random.default_rng(seed)
        mixes = draw_mixes(number, N, rng)
        logarithms = rng.uniform(math.log(sizes[0]), math.log(sizes[1]), number)
        found = _replayed(observation, training, mixes, np.rint(np.exp(logarithms)).astype(int), first=0)
        return KernelRegression(found, guesses=_GUESSES)

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


def _share(observation: Observation) -> float:
    """Of the replays of the default ``--samples``, never more than all."""
    return min(1.0, observation.samples / _DEFAULT_SAMPLES)


def _nearby(observation: Observation) -> int:
    """How many replays of the client's own training are worth their time."""
    assert observation.replayed_clients is not None
    cost = observation.replayed_clients.cost(observation.training)
    if _LEAST_NEAR * cost > _LEAST_NEAR_WORK:
        return 0
    return max(_LEAST_NEAR, int(min(_share(observation) * _NEAR, _NEAR_WORK / cost)))


def _near(observation: Observation, z: FloatArray, number: int) -> Replays:
    """So many replays of the client's own training on mixes near z."""
    rng = np.random.default_rng((observation.seed, 1))
    mixes = mixes_near(z, number, rng, concentration=_CONCENTRATION)
    sizes = [observation.training.seen] * number
    return _replayed(observation, observation.training, mixes, sizes, first=_REPLAYS)


def _replayed(
    observation: Observation,
    training: LocalTraining,
    mixes: FloatArray,
    sizes: Sequence[int] | IntArray,
    *,
    first: int,
) -> Replays:
    """Training replayed on each of the mixes, without those that diverge.

    Raises
    ------
    MismatchError
        More than half diverge.
    """
    few = mixes.shape[1] <= _FEW_CLASSES
    plans = [
        ReplayPlan(
            round_to_total(z, int(size)), training.resized(int(size)), first + draw, draw % 2 if few else None
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
        np.stack([_features(seen, view) for seen, view in views]),
        np.stack([_shape(view.gradient.weight, observation) for _, view in views]),
        np.array([plan.half for plan, _ in kept]) if few else None,
    )


def _shape(weight: FloatArray, observation: Observation) -> FloatArray:
    """`update_shape` of a replayed client, of SGD's with the size that is left without noise."""
    assert observation.replayed_clients is not None
    how, shape = observation.replayed_clients.treatment.compression, update_shape(weight)
    if observation.training.optimizer == "sgd":
        shape[0], _ = _size(weight, sparsified=how is not None and how.sparsified)
    return shape


def _size(weight: FloatArray, *, sparsified: bool) -> tuple[float, float]:
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


def _features(observation: Observation, view: ClientView) -> FloatArray:
    """Of one client, real or replayed; with what `gls` makes of its two models."""
    positions = (path_position(observation.training), _LATE)
    guesses = [_between_ends(observation, view, position).solution.z for position in positions]
    means, _ = observation.start.embeddings_for("replay")
    return class_features(view, observation.head, means, np.column_stack(guesses))


def _between_ends(observation: Observation, view: ClientView, position: float) -> Fit:
    """What `gls` makes of both models without replays, with the gradients taken at this place between."""
    assert view.gradient.bias is not None
    parts = [(1 - position, view.start.residuals), (position, view.end.residuals)]
    model = ResidualModel(parts, observation.training, noise=(normalised_noise(observation),))
    return fit(model, centred(-view.gradient.bias)[:-1])


def _shared(training: LocalTraining) -> tuple[LocalTraining, tuple[int, int]]:
    """The training of all that share replays, resized to one batch, and how many samples they have."""
    size, alike = training.seen, training.resized(training.batch_size)
    if alike is training:
        return training, (size, size)
    low = 2 ** int(math.log2(size))
    return alike, (low, 2 * low)


REPLAY = Method(
    name="replay",
    summary="a regression on replayed clients of several steps, shared by all clients, with error bars",
    reference="regression for simulators (Beaumont et al. 2002), on replayed training",
    solve=solve,
    needs_end=lambda training: training.steps > 1 or training.optimizer != "sgd",
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=True,
        trained_model=True,
    ),
    needs_bias=True,
    or_unit=True,
    uses_auxiliary=True,
    needs_residuals=True,
    needs_replayed_clients=True,
    any_optimizer=True,
    out_of_scope=out_of_scope,
)
