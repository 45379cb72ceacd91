"""Regression on replayed clients: label proportions as a function of all that several steps did."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from rlu_cli.core.checks import check_size
from rlu_cli.core.client_views import ClientView
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.error_model import middle, solutions_of_like_updates
from rlu_cli.core.gradients import mean_gradient, normalised_update
from rlu_cli.core.kernel_regression import ClassPrediction, KernelRegression
from rlu_cli.core.methods.base import Capabilities, Method, Problem
from rlu_cli.core.methods.gls import solve_instead
from rlu_cli.core.misfit import motion
from rlu_cli.core.replay_regression import (
    between_ends,
    bias_means,
    client_features,
    head_size,
    number_nearby,
    replayed_near,
    shared_regression,
)
from rlu_cli.core.replayed_size import RelativeSize, SizeModel, repeats, size_notes
from rlu_cli.core.residuals import ResidualPath
from rlu_cli.core.scale_levels import scale_level
from rlu_cli.core.schemes import pace, path_position
from rlu_cli.core.trained import is_trained
from rlu_cli.core.types import (
    Estimate,
    FloatArray,
    IntArray,
    LocalTraining,
    Note,
    Observation,
)
from rlu_cli.core.update_shape import check_shape, update_shape
from rlu_cli.core.update_size import RIGHT_SIZE, is_likeliest, size_error
from rlu_cli.errors import MismatchError

_SURE = 0.1
"""Error on clients left out below which replays near the answer are worth it: where the samples' chance
decides, and not what training makes of them, they tell nothing new."""

_MOST_CLASSES, _FEWEST_AUXILIARY = 100, 10

_STRANGE = 2.0
"""How much stranger than all replayed clients one may be."""

_SLIGHT = 0.05
"""Logarithm of an early model's update size, over what its training values say, from which it is doubted: its
likelihood tells no less surely (of 239 right clients of six networks it was that of one)."""

_UNLIKE = "the update is unlike that of any replayed client (noise, other data or training values?)"


_sizes: WeakKeyDictionary[KernelRegression, SizeModel] = WeakKeyDictionary()


def solve(problem: Problem) -> Estimate:
    """Label proportions by regression on replays of the client's training.

        √z_n ≈ f(x_n),     x_n the features of class n in the update, and in both models' auxiliary logits

    On the way of several steps nothing is linear: S changes with every step, and over whole epochs the model
    adapts to the client's mix until its gradients say little of it. But the auditor can train too. So 20 to
    220 clients are made up: class mixes are `draw_mixes`'s, each client draws its samples from eight in ten
    of the auxiliary ones, with weights of their own, and trains on them as the real one did, from the global
    model on. It is looked at with the auxiliary samples that it has not seen, as the real one is with all of
    them. Up to four classes, and where a client sees more than sixteen samples for each auxiliary one, each
    draws from one half of them and is looked at with the other, since all would draw nearly the same. All
    clients that train alike share the replays; over whole epochs so do those of
    about as many samples, within a factor of two.

    f is the same for every class (`class_features`, `KernelRegression`), so N samples come of each replay.
    Among the features is what `gls` makes of both models' residuals without replays: where the way between
    them is smooth, f follows it, and where it is not, the replays say how wrong it is. The errors on replays
    left out give the bounds and the presence; a class that is likelier absent than there gets no samples.
    Where these errors are small, four to eight more replays near the answer sharpen it. Up to fifty auxiliary
    samples of a class the bounds are wider, by what more replays of both halves of them tell.

    Where the update is of another size than theirs that point alike, but for trained models of two classes,
    or than an early model's likelihood has it, it is read again as if it had been divided by the factor
    (`Observation.rescaled`), by replays whose own estimates miss as far. Where that likelihood finds the size
    that was told, replays count for nothing.

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
        bias_means(observation.start, path.start),
        bias_means(observation.end, path.end),
        pace(observation.training),
    )
    features = client_features(observation, view)
    regression = shared_regression(observation, features.shape[1])
    strangeness = regression.strangeness(features)
    found: dict[str, float] = {"replay_error": regression.error, "replay_strangeness": strangeness}
    strange = not strangeness <= _STRANGE
    doubts = () if linear else _doubts(observation, view, regression, strange)
    prediction = _predicted(problem, view, regression, features)
    if linear and not observation.scaled:
        size = _relative_size(observation, view, _size_model(regression), features)
        found["replay_size"] = math.exp(size.logarithm)
        if not (size.is_doubted and _is_likeliest(observation)):
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
    number = number_nearby(observation)
    if regression.error < _SURE and number:
        regression = regression.with_more(replayed_near(observation, prediction.proportions, number))
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
    between = between_ends(observation, view, path_position(observation.training))
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
    own, error = head_size(weight, sparsified=coarse.sparsified)
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


def _is_likeliest(observation: Observation) -> bool:
    """Whether an early model's likelihood finds the size that the training values say.

    It is the sharper of the two, and replays of plain images are larger than those of shifted and mirrored
    ones: of 30 right clients that had such, of an untrained model, ten were doubted.
    """
    if coarsening(observation).any:
        return False
    return is_likeliest(observation, motion(observation.start, observation.end) or 0.0)


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
