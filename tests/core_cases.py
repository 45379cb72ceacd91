"""Cases that the core's tests share: known S, scripted gradients, statistics made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rlu_cli.core.client_views import ModelMeans
from rlu_cli.core.embedding import subtract_heads
from rlu_cli.core.recover import head_update
from rlu_cli.core.residuals import ResidualMoments, ResidualPath, residual_moments, residuals
from rlu_cli.core.types import (
    FloatArray,
    Head,
    IntArray,
    LocalTraining,
    LogitMoments,
    ModelStatistics,
    Observation,
)


def random_confidence(rng: np.random.Generator, classes: int, *, own: float = 0.4) -> FloatArray:
    """A row-stochastic S that is far from symmetric, with ``own`` added to the diagonal."""
    rows = rng.dirichlet(np.full(classes, 0.7), size=classes) + 0.02
    rows /= rows.sum(axis=1, keepdims=True)
    S = (1 - own) * rows + own * np.eye(classes)
    return np.asarray(S)


def moments_of(mean: FloatArray, factor: FloatArray | None = None) -> LogitMoments:
    """Moments with the given means and, unless given, zero covariance."""
    classes = len(mean)
    factor = np.zeros((classes, 1, classes)) if factor is None else factor
    return LogitMoments(mean, factor, np.full(classes, 10))


def statistics_of(S: FloatArray, embeddings: FloatArray) -> ModelStatistics:
    """Statistics whose S is exactly the given one: zero covariance, mean logits log S."""
    return ModelStatistics(
        moments=moments_of(np.log(S)),
        confidence=S,
        standard_error=np.zeros_like(S),
        embedding_mean=embeddings,
        gradient_sum=(S - np.eye(len(S))) * embeddings.sum(axis=1, keepdims=True),
        accuracy=np.ones(len(S)),
    )


def exact_residuals(mean: FloatArray) -> ResidualMoments:
    """Residuals that don't vary within a class."""
    found = moments_of(mean)
    return ResidualMoments(found.mean, found.factor, found.counts)


def model_means(logits: FloatArray, *, samples: int = 4) -> ModelMeans:
    """Of samples whose logits are their class's row."""
    labels = np.repeat(np.arange(len(logits)), samples)
    return ModelMeans(logits, residual_moments(residuals(logits[labels], labels), labels))


def random_head(rng: np.random.Generator, classes: int, size: int, *, bias: bool = True) -> Head:
    return Head(rng.normal(size=(classes, size)), rng.normal(size=classes) if bias else None)


def scripted_round(
    S: FloatArray,
    embeddings: FloatArray,
    proportions: FloatArray,
    training: LocalTraining,
    head: Head,
    constant: Head | None = None,
) -> Head:
    """The local head after torch's own SGD on the expected gradients of a client with a known S.

    Every step's batch has the given class mix and every sample of class n confidence S[n] and embedding
    ē_n, so the cross-entropy gradients are Σ_n z_n (S[n] − 1_n) for b and the same times ē_nᵀ for W.
    """
    residuals = proportions[:, None] * (S - np.eye(len(S)))
    gradients = [torch.from_numpy(residuals.T @ embeddings), torch.from_numpy(residuals.sum(axis=0))]
    values = [head.weight] if head.bias is None else [head.weight, head.bias]
    pulls = [None, None] if constant is None else [constant.weight, constant.bias]
    parameters = [torch.nn.Parameter(torch.from_numpy(v.copy())) for v in values]
    anchors = [p.detach().clone() for p in parameters]
    rates = np.broadcast_to(np.asarray(training.lr, dtype=np.float64), (training.steps,))
    optimizer = torch.optim.SGD(
        parameters,
        lr=1.0,
        momentum=training.momentum,
        dampening=training.dampening,
        nesterov=training.nesterov,
        weight_decay=training.weight_decay,
    )
    for rate in rates:
        optimizer.param_groups[0]["lr"] = float(rate)
        for p, anchor, gradient, pull in zip(parameters, anchors, gradients, pulls, strict=False):
            p.grad = gradient + training.prox * (p.detach() - anchor)
            if pull is not None:
                p.grad = p.grad + torch.from_numpy(pull)
        optimizer.step()
    local = [p.detach().numpy().copy() for p in parameters]
    return Head(local[0], None if head.bias is None else local[1])


def scripted_observation(
    training: LocalTraining,
    *,
    classes: int = 6,
    size: int = 8,
    seed: int = 0,
    bias: bool = True,
    constant: bool = False,
    per_batch: IntArray | None = None,
) -> tuple[Observation, IntArray]:
    """An observation without any noise, and the true counts. S is the same at both ends."""
    rng = np.random.default_rng(seed)
    S = random_confidence(rng, classes)
    embeddings = np.abs(rng.normal(size=(classes, size))) + 0.5
    if not bias:  # then Δb is read off along one mean embedding: exact where all classes share it
        embeddings = np.broadcast_to(embeddings[0], embeddings.shape).copy()
    if per_batch is None:
        z = rng.dirichlet(np.full(classes, 0.5))
        per_batch = rng.multinomial(training.batch_size, z)
    head = random_head(rng, classes, size, bias=bias)
    k = random_head(rng, classes, size, bias=bias) if constant else None
    if k is not None:
        k = Head(0.3 * k.weight, None if k.bias is None else 0.3 * k.bias)
    local = scripted_round(S, embeddings, per_batch / per_batch.sum(), training, head, k)
    statistics = statistics_of(S, embeddings)
    observation = Observation(
        update=head_update(local, head),
        head=head,
        training=training,
        start=statistics,
        end=statistics,
        residuals=ResidualPath(exact_residuals(np.eye(classes) - S)),
        constant_gradient=k,
        replayed_update=lambda z, draw: subtract_heads(
            scripted_round(S, embeddings, z, training, head, k), head
        ),
    )
    return observation, np.asarray(per_batch * training.steps)


def with_bias_update(observation: Observation, bias: FloatArray) -> Observation:
    """The same observation with another Δb."""
    update = type(observation.update)(observation.update.weight, bias)
    return replace(observation, update=update)
