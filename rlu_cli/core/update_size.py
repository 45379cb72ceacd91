"""Whether an update is as large as its training values make it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from rlu_cli.core.coarse import Coarsening, coarsening
from rlu_cli.core.gradients import normalised_update
from rlu_cli.core.noise import is_rounding
from rlu_cli.core.path import solve_on_path
from rlu_cli.core.rate_likelihood import (
    FEWEST,
    Explanation,
    LearningRate,
    Views,
    explanation_of,
    position_between,
    stands_still,
)
from rlu_cli.core.residuals import residuals
from rlu_cli.core.trained import is_trained
from rlu_cli.core.types import Activations, FloatArray, Head, HeadUpdate, ModelStatistics, Observation
from rlu_cli.core.whole_counts import off_whole

_CAUTION = 0.5
"""Of the motion up to which a model stands still, where the size of an update is doubted."""

_OTHERWISE = 3.0
"""Misfit of the likeliest size above which something else is wrong: 0.2 to 1 where the samples are alike, 5
and more for clients that shift or mirror their images, or change their contrast."""

RIGHT_SIZE = 0.1
"""Logarithm of an update's size, over what its training values say, that is no error."""

_NO_SIZE = 4
"""Different numbers of a quantised update that tell no size: of 20 right updates of two bits seven were
doubted or called misscaled."""

_FEWEST_SAMPLES = 8
"""Of a trained model, below which a sum of samples is no Gaussian: most do nothing, and a few much. Of right
clients of 1, 2, 3, 4 and 5 samples 80, 63, 30, 20 and 7 % were called misscaled, of 8 none."""

_by_logits: WeakKeyDictionary[ModelStatistics, Explanation] = WeakKeyDictionary()
"""Of each global model."""


def size_is_doubted(observation: Observation) -> bool:
    """Whether one step's update has another size than its training values say; see `size_error`."""
    if coarsening(observation).any:
        return False
    z = solve_on_path(observation, normalised_update(observation)).solution.z
    return size_error(observation, z, 0.0) is not None or off_whole(observation) is not None


def size_error(
    observation: Observation, z: FloatArray, moved: float, *, least: float = RIGHT_SIZE
) -> LearningRate | None:
    """c of an update that is c times as large as its training values say, None where it is as large.

    The likelihood of `estimate_learning_rate`, of the samples that statistics keep: their logits for their
    embeddings, since ΔW Wᵀ = Σ r ⊗ (q − b). An error of ``least`` is none, nor one of less than twice the
    interval's half, in logarithms, nor one that explains the update badly too: then the auxiliary samples
    are unlike the client's. None too where it can't be told: no bias, more than 20 classes, few auxiliary
    samples, weight decay or gradients from outside, several steps that moved the model, a
    handful of samples of a trained one.

    Parameters
    ----------
    z : the proportions found with the size that the training values say
    moved : the local model's `motion`
    least : of the logarithm of c
    """
    views = _views(observation, moved)
    if views is None or views.may_be_right(z, least):
        return None
    found = _likeliest(views)
    if abs(found) <= least or views.misfit(found) > _OTHERWISE:
        return None
    interval = views.interval(found, soon=not views.noise.any()).widened(moved)
    return interval if interval.excludes(1.0, halves=2.0) else None


def is_likeliest(observation: Observation, moved: float) -> bool:
    """Whether the likelihood of `size_error` tells sizes here, and finds the one of the training values.

    An update that it explains badly counts too: images unlike the auxiliary ones make another update, but at
    any other size an early model's would be far unlikelier still.
    """
    views = _views(observation, moved)
    return views is not None and abs(_likeliest(views)) <= RIGHT_SIZE


def _likeliest(views: Views) -> float:
    """log c; known noise weighs otherwise at every scale."""
    return views.likeliest() if views.noise.any() else views.soon_likeliest()


def _views(observation: Observation, moved: float) -> Views | None:
    """The update as its likelihood sees it, None where that can't tell its size."""
    head, training = observation.head, observation.training
    if training.samples < _FEWEST_SAMPLES and is_trained(observation.start):
        return None
    models = [observation.start] if training.steps == 1 else [observation.start, observation.end]
    samples = [None if model is None else model.samples for model in models]
    drifts = observation.constant_gradient is not None or training.weight_decay > 0
    still = stands_still(observation, moved / _CAUTION)
    if head.bias is None or observation.update.bias is None or drifts or None in samples or not still:
        return None
    known = [part for part in samples if part is not None]
    if np.bincount(known[0].labels, minlength=head.num_classes).min() < FEWEST:
        return None
    update = replace(observation.update, weight=observation.update.weight @ head.weight.T)
    noise = observation.noise_std * max(1.0, float(np.linalg.norm(head.weight, 2)))
    products = Head(head.weight @ head.weight.T, head.bias)
    seen = replace(observation, update=update, head=products, noise_std=noise)
    return Views(seen, _explained_by_logits(observation, known))


def damaged_size_error(observation: Observation, samples: Activations) -> LearningRate | None:
    """`size_error` of one step's update with noise, or made coarser, from the embeddings themselves.

    ΔW Wᵀ adds noise up, and leaves most directions of the embedding out in which classes differ. The updates
    that say how far estimates miss lose what the client's lost; their labels are drawn too, as what rounding
    takes hangs on them. As what is read as of any size has bounds, which are wider, a size is doubted as soon
    as its interval leaves 1 out. Up to four different numbers tell none: what rounding adds isn't normal
    then.

    Parameters
    ----------
    samples : auxiliary samples under the global model, with embeddings
    """
    head = observation.head
    drifts = observation.constant_gradient is not None or observation.training.weight_decay > 0
    fewest = np.bincount(samples.labels, minlength=head.num_classes).min()
    if head.bias is None or drifts or samples.embeddings is None or fewest < FEWEST:
        return None
    damage, added = coarsening(observation), observation.noise_std
    if damage.values is not None and damage.values[0] <= _NO_SIZE:
        return None
    if is_rounding(observation):
        added = 0.0
    beside = max(observation.noise_std, math.hypot(added, damage.deviation))
    views = Views(replace(observation, noise_std=beside), explanation_of([samples], [1.0], has_bias=True))
    found = views.likeliest()
    if abs(found) <= RIGHT_SIZE or views.misfit(found) > _OTHERWISE:
        return None
    like = _damaged(views, samples, damage, added, found) if damage.any else None
    interval = views.interval(found, like=like)
    right = abs(math.log(interval.scale)) <= RIGHT_SIZE or not interval.excludes(1.0)
    return None if right else interval


def _damaged(
    views: Views, samples: Activations, damage: Coarsening, added: float, log_scale: float
) -> Iterator[FloatArray]:
    """Updates of auxiliary samples with the labels found, damaged as the client's was, in the views.

    Parameters
    ----------
    added : standard deviation of the noise that was there before they were made coarser
    """
    rng = np.random.default_rng(views.observation.seed)
    assert samples.embeddings is not None
    r, e = residuals(samples.logits, samples.labels), samples.embeddings.astype(np.float64)
    total = views.at(float(np.exp(log_scale)))[1]
    for taken in views.like_samples(log_scale, rng, drawn_labels=True):
        weight, bias = total * r[taken].T @ e[taken] / len(taken), total * r[taken].mean(axis=0)
        if added:
            weight = weight + added * rng.standard_normal(weight.shape)
            bias = bias + added * rng.standard_normal(bias.shape)
        yield views.of(damage.of(HeadUpdate(weight, bias)))


def _explained_by_logits(observation: Observation, samples: list[Activations]) -> Explanation:
    """By the global model's samples, or by those of both."""
    bias, change = observation.head.bias, observation.update.bias
    assert bias is not None and change is not None

    def plain(part: Activations, bias: FloatArray) -> Activations:
        return replace(part, embeddings=part.logits.astype(np.float64) - bias)

    if len(samples) > 1:
        position = position_between(observation)
        ends = [plain(samples[0], bias), plain(samples[1], bias + change)]
        return explanation_of(ends, [1 - position, position], has_bias=True)
    if observation.start not in _by_logits:
        _by_logits[observation.start] = explanation_of([plain(samples[0], bias)], [1.0], has_bias=True)
    return _by_logits[observation.start]
