"""Rounds whose samples, head and gradient are all known, for the tests of the methods."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlu_cli.core.embedding import subtract_heads
from rlu_cli.core.gradients import mean_gradient, normalised_update
from rlu_cli.core.methods import METHODS
from rlu_cli.core.methods.base import Problem
from rlu_cli.core.moments import model_statistics, softmax
from rlu_cli.core.recover import head_update
from rlu_cli.core.residuals import ResidualPath, residual_moments, residuals
from rlu_cli.core.types import FloatArray, Head, IntArray, LocalTraining, ModelStatistics, Observation

AUX = 20
"""Auxiliary samples a class."""


def cross_entropy_gradient(head: Head, embeddings: FloatArray, labels: IntArray) -> Head:
    """∇W and ∇b of the mean cross-entropy, written out."""
    logits = embeddings @ head.weight.T + (0.0 if head.bias is None else head.bias)
    pulls = softmax(logits) - np.eye(head.num_classes)[labels]
    return Head(pulls.T @ embeddings / len(labels), None if head.bias is None else pulls.mean(axis=0))


def after_steps(head: Head, gradient: Head, training: LocalTraining) -> Head:
    """The local head after plain SGD whose every step has the same gradient."""
    assert isinstance(training.lr, float)
    scale = training.lr * training.steps
    bias = None if head.bias is None or gradient.bias is None else head.bias - scale * gradient.bias
    return Head(head.weight - scale * gradient.weight, bias)


def statistics(head: Head, embeddings: FloatArray, labels: IntArray) -> ModelStatistics:
    logits = embeddings @ head.weight.T + (0.0 if head.bias is None else head.bias)
    return model_statistics(logits, embeddings, labels, head.num_classes, samples=400)


def known_round(
    counts: IntArray,
    head: Head,
    *,
    steps: int = 1,
    seed: int = 0,
    class_means: FloatArray | None = None,
    spread: float = 0.3,
) -> Observation:
    """A client with ``counts`` samples in every step, embeddings class mean ± spread, kept at least 0
    where the mean is; and as many auxiliary samples of every class."""
    rng = np.random.default_rng(seed)
    N, L = head.weight.shape
    means = np.ones((N, L)) if class_means is None else class_means

    def draw(labels: IntArray) -> FloatArray:
        noise = rng.uniform(-spread, spread, size=(len(labels), L))
        return np.asarray(means[labels] * (1 + noise))

    labels = np.repeat(np.arange(N), counts)
    training = LocalTraining(steps, len(labels), 0.1)
    gradient = cross_entropy_gradient(head, draw(labels), labels)
    local = after_steps(head, gradient, training)
    aux = np.repeat(np.arange(N), AUX)
    drawn = draw(aux)
    start = statistics(head, drawn, aux)
    logits = drawn @ head.weight.T + (0.0 if head.bias is None else head.bias)
    moments = residual_moments(residuals(logits, aux), aux)
    path = ResidualPath(moments, moments)
    by_class = [cross_entropy_gradient(head, drawn[aux == n], aux[aux == n]) for n in range(N)]

    def replayed(z: FloatArray, draw: int) -> Head:
        weight = np.einsum("n,njl->jl", z, [part.weight for part in by_class])
        bias = None if head.bias is None else np.einsum("n,nj->j", z, [part.bias for part in by_class])
        return subtract_heads(after_steps(head, Head(weight, bias), training), head)

    return Observation(
        head_update(local, head),
        head,
        training,
        start=start,
        end=start,
        residuals=path,
        replayed_update=replayed,
    )


def untrained(classes: int, size: int, *, bias: bool = True) -> Head:
    """A head with a uniform softmax."""
    return Head(np.zeros((classes, size)), np.zeros(classes) if bias else None)


def random_head(classes: int, size: int, *, seed: int = 0, scale: float = 0.3) -> Head:
    rng = np.random.default_rng(seed)
    return Head(scale * rng.normal(size=(classes, size)), scale * rng.normal(size=classes))


def problem_of(observation: Observation) -> Problem:
    return Problem(observation, normalised_update(observation), mean_gradient(observation))


def proportions(name: str, observation: Observation) -> FloatArray:
    return METHODS[name].solve(problem_of(observation)).proportions


def in_steps(observation: Observation, steps: int) -> Observation:
    """The same samples and mean gradient, as ``steps`` identical steps of an optimiser without memory."""
    training = replace(observation.training, steps=steps, total=observation.training.samples)
    update = type(observation.update)(
        steps * observation.update.weight,
        None if observation.update.bias is None else steps * observation.update.bias,
    )
    once = observation.replayed_update
    assert once is not None

    def replayed(z: FloatArray, draw: int) -> Head | None:
        change = once(z, draw)
        assert change is not None
        return Head(steps * change.weight, None if change.bias is None else steps * change.bias)

    return replace(observation, update=update, training=training, replayed_update=replayed)
