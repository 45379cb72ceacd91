"""Single samples told apart by the rank and zeros of dense layers' gradients; the rest by their posterior."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rlu_cli.core.dense_layers import DenseTail, separable
from rlu_cli.core.disaggregation import AGREEING, Disaggregated, told_apart
from rlu_cli.core.error_model import is_exact
from rlu_cli.core.methods.base import Capabilities, Method, Problem
from rlu_cli.core.methods.gls import GLS
from rlu_cli.core.methods.regression import REGRESSION
from rlu_cli.core.methods.regression import out_of_scope as no_regression
from rlu_cli.core.methods.rlu import RLU
from rlu_cli.core.remaining import Remaining, lookalikes, remaining_labels
from rlu_cli.core.residuals import residuals, too_few
from rlu_cli.core.types import (
    Estimate,
    FloatArray,
    IntArray,
    LocalTraining,
    Note,
    Observation,
)

_LEAST_FOUND = 0.25
"""Share of the samples above the noise that must be told apart for the rest to be estimated from them."""

_CROWD, _HARDLY = 4, 0.1
"""More samples above the noise than so many, of which less than such a share is told apart, hint at other
training. Only a hint: right clients of 64 samples with ten auxiliary images a class may look so too."""

_SLACK = 0.25
"""How far, in samples, the head's update may lie beyond what the samples that remain can add to it."""

_MISSCALED = 1.1
"""Ratio of sizes from which a warning says so."""

_VAGUE = 1.0
"""Error of the sum of residuals where a unit direction stands for the bias: it says next to nothing."""


def solve(problem: Problem) -> Estimate:
    """Label counts of one batch, sample by sample.

        G = (1/B) Σ_i δ_i (x_i, 1)ᵀ,     counts = Σ_i onehot(y_i)

    The gradients of rectified dense layers before the head are taken apart into those of single samples
    (`disaggregate`): each of them found has its label to itself, whatever the model makes of it. Samples
    that can't be told apart, since the model is so sure of them that rounding hides them or since others are
    too much like them, are estimated from their residuals' sum and the labels of the others
    (`remaining_labels`). An update scaled by an unknown factor is as good as one that isn't: a sample's own
    inputs tell its scale. Where samples remain and the model hardly tells classes apart, `gls` is exact and
    answers.

    Assumptions: one step, an exact update (no noise, float32 or better), fewer samples than the layers have
    inputs and outputs. `regression` or `gls` answers where they don't hold, or `rlu` where auxiliary samples
    are few.
    Uses the updates of the dense layers, and auxiliary samples' inputs to them to begin the search with.
    Source: after Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning (2024).
    """
    observation = problem.observation
    why = out_of_reach(observation)
    if why is not None:
        return _solve_instead(problem, Note("disaggregation-not-possible", why))
    found = told_apart(observation, scale_known=not observation.scaled)
    if found is None:
        why = f"the gradients' rank is not that of {problem.total} samples (noise, other training values?)"
        return _solve_instead(problem, Note("disaggregation-incomplete", why))
    total, count = problem.total, problem.total - len(found.labels)
    diagnostics: dict[str, float] = {"samples_found": len(found.labels), "gradient_rank": found.rank}
    if len(found.labels) < _LEAST_FOUND * found.rank:
        why = f"{len(found.labels)} of {total} samples could be told apart"
        if found.rank > _CROWD and len(found.labels) < _HARDLY * found.rank:
            why += (
                f", though {found.rank} stand out of the rounding errors: is the loss another (label "
                "smoothing, class weights), or was there dropout, mixed precision or weight decay?"
            )
        return _solve_instead(problem, Note("disaggregation-incomplete", why), **diagnostics)
    left = total * problem.u / found.scale - found.residuals.sum(axis=0)
    has_bias = observation.head.bias is not None
    if has_bias and float(np.abs(left).max()) > count + _SLACK:
        why = f"those told apart leave {np.abs(left).max():.2g} of a class for {count} samples more"
        return _solve_instead(problem, Note("disaggregation-incomplete", why), **diagnostics)
    diagnostics["update_scale"] = found.scale
    notes = () if observation.scaled else _size_notes(found)
    variance = float(found.times.sum() + count) / total**2
    path = observation.residuals
    assert path is not None
    if count and is_exact(path.start, observation.training):
        estimate = GLS.solve(_resized(problem, found.scale))
        told = {**estimate.diagnostics, **diagnostics}
        return replace(
            estimate,
            diagnostics=told,
            warnings=(*estimate.warnings, *notes),
            any_size=True,
            batch_variance=variance,
            settled=found.scale,
        )
    known = np.bincount(found.labels, minlength=problem.num_classes)
    rest = _rest(problem, known, found, left)
    z = (known + rest.mean) / total
    return Estimate(
        z,
        {**diagnostics, "residual": problem.residual(z)},
        warnings=notes,
        low=(known + rest.low).astype(np.float64),
        high=(known + rest.high).astype(np.float64),
        presence=np.where(known > 0, 1.0, rest.presence),
        any_size=True,
        batch_variance=variance,
    )


def out_of_scope(tail: DenseTail | None, training: LocalTraining, num_classes: int) -> str | None:
    """Why single samples of such a client can't be told apart, None where they may.

    Parameters
    ----------
    tail : the dense layers, None where there are none
    """
    if training.steps > 1:
        return f"the client took {training.steps} steps, and disaggregation takes one apart"
    if tail is None:
        return (
            "there are no rectified dense layers with biases before the output layer whose exact update is "
            "known (convolutions, other activations, noise or coarser numbers than float32)"
        )
    if separable(tail, training.samples, num_classes) is None:
        return f"{training.samples} samples are too many for the dense layers' inputs and outputs"
    return None


def out_of_reach(observation: Observation) -> str | None:
    """`out_of_scope` of an observation."""
    return out_of_scope(observation.dense, observation.training, observation.head.num_classes)


def _resized(problem: Problem, scale: float) -> Problem:
    """The same of an update that had its size."""
    observation = problem.observation
    return Problem(
        replace(observation, update=observation.update.divided(scale)),
        problem.u / scale,
        problem.gradient.divided(scale),
    )


def _rest(problem: Problem, known: IntArray, found: Disaggregated, left: FloatArray) -> Remaining:
    """The labels of the samples that were not told apart, of whose residuals the sum is left."""
    observation = problem.observation
    path = observation.residuals
    assert path is not None and path.samples is not None
    values = residuals(path.samples.logits, path.samples.labels)
    like = lookalikes(values, path.samples.labels, found.residuals, max(found.rank, len(found.labels)))
    error = float(np.linalg.norm(found.errors)) if observation.head.bias is not None else _VAGUE
    count = problem.total - len(found.labels)
    return remaining_labels(known, count, left, error, like, seed=observation.seed)


def _size_notes(found: Disaggregated) -> tuple[Note, ...]:
    """A warning where the update is of another size than the training values make it."""
    scale = found.scale
    if abs(math.log(scale)) < math.log(_MISSCALED) or len(found.labels) < AGREEING:
        return ()
    message = (
        f"the update is {scale:.3g} times what the training values make of these samples: the learning "
        "rate or the batch size is another, or the update was scaled (clipping); the counts don't hang on it"
    )
    return (Note("update-misscaled", message),)


def _solve_instead(problem: Problem, why: Note, **found: float) -> Estimate:
    """The answer of `regression`, or where that is out of its scope of `gls`, or of few samples of `rlu`."""
    observation = problem.observation
    path = observation.residuals
    assert path is not None
    fits = path.samples is not None and no_regression(path.start.counts, observation.training) is None
    other = REGRESSION if fits else RLU if too_few(path.start.counts) else GLS
    estimate = other.solve(problem)
    note = replace(why, message=f"{why.message}: the counts are those of {other.name}")
    return replace(
        estimate, diagnostics={**estimate.diagnostics, **found}, warnings=(*estimate.warnings, note)
    )


DISAGGREGATION = Method(
    name="disaggregation",
    summary="single samples told apart in dense layers' gradients of one step, with error bars",
    reference="after Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches, NeurIPS 2024",
    solve=solve,
    needs_end=REGRESSION.needs_end,
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
    needs_samples=True,
    needs_dense=True,
)
