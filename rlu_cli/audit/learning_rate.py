"""``--lr auto``: the client's learning rate from its update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlu_cli.audit.replay import Replay, ReplayedUpdates, with_training
from rlu_cli.core.gradients import normalised_update
from rlu_cli.core.learning_rate import estimate_learning_rate, rate_by_distance, rate_by_samples
from rlu_cli.core.misfit import motion
from rlu_cli.core.path import solve_on_path
from rlu_cli.core.rate_likelihood import LearningRate, least_scale, scaled, stands_still
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.types import Activations, FloatArray, LocalTraining, Note, Observation
from rlu_cli.errors import MismatchError

_UNCERTAIN, _UNKNOWN = 4.0, 10.0
"""Upper over lower end of the interval: beyond, the counts are unreliable; and beyond, there are none."""


_ADAM_ROUNDS = 2
"""Of labels and then the rate, after a first one."""

_ADAM_STEP = 10.0
"""How many times its rate a step of Adam may move the bias, and as much room as SGD's least scale has."""


def with_estimated_rate(
    observation: Observation, start: Activations, end: Activations | None, replay: Replay | None
) -> tuple[LocalTraining, Note]:
    """The client's training with the rates found, and a warning that says how well they are known.

    One step whose samples can be told apart is told by each of them; others, and several that hardly moved an
    untrained model, by the update's likelihood; the rest, and all of Adam's, by how far replayed training
    gets.

    Parameters
    ----------
    observation : with rates that are right up to a factor
    start, end : the auxiliary samples under the global and the local model
    replay : of the client's training, where that can be trained again

    Raises
    ------
    MismatchError
        The rate can't be told.
    """
    moved = motion(observation.start, observation.end) or 0.0
    linear = observation.training.optimizer == "sgd"  # in the gradients, as Adam's updates aren't
    found = rate_by_samples(observation) if linear else None
    if found is None and linear and stands_still(observation, moved):
        found = estimate_learning_rate(observation, start, end)
    elif found is None and replay is not None:
        found = (_by_replays if linear else _by_adams_replays)(observation, replay)
    found = None if found is None else found.widened(moved)
    if found is None or found.spread > _UNKNOWN:
        known = "nothing" if found is None else f"an interval of a factor of {found.spread:.0f}"
        raise MismatchError(
            f"expected an update that tells its learning rate, found {known}: training of several steps "
            "moved the model, or was Adam's, and can't be replayed, or noise or too few samples hide it; say "
            "--lr RATE"
        )
    training = scaled(observation.training, found.scale)
    rate = training.lr if isinstance(training.lr, float) else training.lr[0]
    low, high = rate * found.low / found.scale, rate * found.high / found.scale
    it = "it times the unknown factor of the clipping" if observation.scaled else "it"
    text = f"nobody said the learning rate; estimated, {it} is {rate:.4g} (95 %: {low:.4g} to {high:.4g})"
    if found.spread > _UNCERTAIN:
        return training, Note("lr-uncertain", f"{text}, which is too wide for counts to rely on")
    return training, Note("lr-estimated", f"{text}; bounds of the counts don't know of that")


def _by_replays(observation: Observation, replay: Replay) -> LearningRate | None:
    def distance(scale: float, draw: int) -> float:
        changed = replace(observation, training=scaled(observation.training, scale))
        z = solve_on_path(changed, normalised_update(changed)).solution.z
        return replace(replay, training=changed.training).distance(z, draw)

    known = replay.travelled_without_noise(observation.noise_std)
    if known is None:
        return None
    travelled, error = known
    return rate_by_distance(distance, travelled, least=least_scale(observation), error=error)


def _by_adams_replays(observation: Observation, replay: Replay) -> LearningRate | None:
    """The same for Adam, whose update gives no labels by its size, nor its size by the labels.

    One step goes equally far whatever the labels. Of several, evenly mixed ones tell the rate roughly, which
    is enough for `surrogate` to find the labels, and with these it is told better.
    """
    known = replay.travelled_without_noise(observation.noise_std)
    several = observation.training.steps > 1
    if known is None or (several and observation.head.bias is None):  # which `surrogate` needs
        return None
    travelled, error = known
    least = least_scale(observation) / _ADAM_STEP

    def rate_with(z: FloatArray) -> LearningRate | None:
        def distance(scale: float, draw: int) -> float:
            return replace(replay, training=scaled(observation.training, scale)).distance(z, draw)

        return rate_by_distance(distance, travelled, least=least, error=error)

    N = observation.head.num_classes
    found = rate_with(np.full(N, 1.0 / N))
    for _ in range(_ADAM_ROUNDS if several else 0):
        if found is None:
            break
        training = scaled(observation.training, found.scale)
        updates = replace(observation, residuals=None, replayed_update=ReplayedUpdates(replay))
        seen = with_training(updates, training)
        found = rate_with(recover_labels(seen, method="surrogate").estimate / training.samples)
    return found
