"""Whether a client's update was clipped to a known norm, and to which part of itself."""

from __future__ import annotations

import math
from dataclasses import replace

from rlu_cli.audit.local_model import LocalModel, open_local
from rlu_cli.audit.updates import enlarged, is_trained
from rlu_cli.core.learning_rate import estimate_learning_rate
from rlu_cli.core.misfit import motion
from rlu_cli.core.rate_likelihood import LearningRate, stands_still
from rlu_cli.core.types import Activations, Note, Observation
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import Checkpoint

_SLACK = 0.005
"""How far below the bound a norm may lie that was clipped to it: checkpoints round."""

_DEVIATIONS = 3.0
"""Of the norm under known noise."""

_SHARP, _KNOWN = 1.05, 4.0
"""Upper over lower end of the factor's interval: up to which bounds of the counts need not know of it, and up
to which counts are better with it than without."""


def clipped_norm(local: Checkpoint, reference: Checkpoint, *, clip: float, noise_std: float) -> float | None:
    """The update's norm where it is as large as clipping let it be, None where it is smaller.

        ‖Δ‖² ≈ C² + P σ²     for P numbers, clipped to C, with noise σ on each

    Then Δ was scaled down by a factor min(1, C/‖Δ‖) that nobody tells. An update of a smaller norm is what it
    would have been without clipping.

    Parameters
    ----------
    local : the whole local model
    """
    squares, count = 0.0, 0
    for name, before in reference.tensors.items():
        if name in local.tensors and is_trained(name, before):
            squares += float((local.tensors[name].double() - before.double()).square().sum())
            count += before.numel()
    excess = squares - count * noise_std**2
    spread = noise_std * math.sqrt(2 * count * noise_std**2 + 4 * clip**2)
    if excess < (clip * (1 - _SLACK)) ** 2 - _DEVIATIONS * spread:
        return None
    return math.sqrt(max(excess, 0.0))


def clip_factor(observation: Observation, start: Activations, end: Activations | None) -> LearningRate | None:
    """c of an update c Δ, with its interval; None where the update doesn't tell.

    To the head an update scaled by c is one at c times the learning rate, which `estimate_learning_rate`
    finds where the model hardly moves and schemes add nothing to its gradients.

    Parameters
    ----------
    observation : of the update as it was sent
    start, end : single samples under the global and, for several steps, the local model, with embeddings
    """
    training = observation.training
    if observation.constant_gradient is not None or training.weight_decay:
        return None
    moved = motion(observation.start, observation.end) or 0.0
    try:
        found = estimate_learning_rate(observation, start, end)
    except MismatchError:  # too few auxiliary samples, or no embeddings
        return None
    if not stands_still(observation, moved / found.scale):
        return None
    found = found.widened(moved / found.scale)
    if found.spread > _KNOWN or found.low > 1.0:
        return None
    return replace(found, scale=min(found.scale, 1.0))


def unclipped(opened: LocalModel, factor: float, head_name: str) -> LocalModel:
    """The model that sent ``factor`` of its update, before that."""
    whole = enlarged(opened.weights(), opened.reference, factor)
    again = open_local(whole, opened.reference, "weights", head_name)
    return replace(again, notes=opened.notes, rounding=opened.rounding / factor)


def is_sharp(found: LearningRate) -> bool:
    """Whether a factor is known well enough for bounds on the counts."""
    return found.spread <= _SHARP


def clipping_note(norm: float, clip: float, found: LearningRate | None) -> Note:
    """What is to be said of a clipped update: a warning, milder where its factor is well known."""
    text = f"the update's norm is {norm:.3g}, as much as clipping to {clip:g} lets it be: it was scaled down"
    if found is None:
        unknown = "by an unknown factor, so the counts are too even, and there are no bounds"
        return Note("update-clipped", f"{text} {unknown}")
    text += (
        f" to about {found.scale:.3g} of itself (95 %: {found.low:.3g} to {found.high:.3g}), as the output "
        "layer's weights say, and is read as if it hadn't been"
    )
    if is_sharp(found):
        return Note("clip-estimated", text)
    return Note("update-clipped", f"{text}; that is too vague for bounds")
