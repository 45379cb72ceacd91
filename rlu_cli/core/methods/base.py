"""What a recovery method is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlu_cli.core.confidence import coefficient_matrix
from rlu_cli.core.path import PathSolution, solve_on_path
from rlu_cli.core.simplex import SimplexSolution
from rlu_cli.core.types import Estimate, FloatArray, Head, IntArray, LocalTraining, Note, Observation
from rlu_cli.errors import MismatchError, UsageError


@dataclass(frozen=True)
class Problem:
    """The observation, reduced to what all methods share.

    u : (Δb + h) / (η Σ_τ ρ^τ), shape (N,): on average A z; −∇b where the head has a bias
    gradient : ∇W and ∇b, −(Δ + h) / (η Σ_τ ρ^τ): the gradient of the mean loss, averaged over the steps.
        What the methods that were made for the gradient of one batch take instead of it
    """

    observation: Observation
    u: FloatArray
    gradient: Head

    @cached_property
    def path(self) -> PathSolution:
        """The least-squares proportions, and S and the embeddings where the gradients were taken."""
        return solve_on_path(self.observation, self.u)

    @property
    def num_classes(self) -> int:
        return self.observation.head.num_classes

    @property
    def total(self) -> int:
        """Samples seen: labels to be shared out."""
        return self.observation.training.samples

    def residual(self, proportions: FloatArray) -> float:
        """‖A z − u‖, A from where the gradients were taken."""
        return float(np.linalg.norm(coefficient_matrix(self.path.confidence) @ proportions - self.u))

    def swing(self, proportions: FloatArray) -> float:
        """How much the predictions changed on the way, in units of the update.

            ‖(S_local − S_global)ᵀ z‖ / ‖u‖,     0 for one step, and where the local model is unknown

        Least squares take u = z − S̄ᵀ z with S̄ between the two; an error of S̄ that is a share of their
        difference is as large a share of u, times this.
        """
        observation = self.observation
        if observation.training.steps == 1 or observation.end is None:
            return 0.0
        change = (observation.end.confidence - observation.start.confidence).T @ proportions
        return float(np.linalg.norm(change)) / max(float(np.linalg.norm(self.u)), np.finfo(float).tiny)

    @property
    def row_sums(self) -> FloatArray:
        """g_j = Σ_l ∇W[j, l], shape (N,)."""
        return np.asarray(self.gradient.weight.sum(axis=1))


@dataclass(frozen=True)
class Capabilities:
    """Where a method's derivation holds: the columns of the RLU paper's Table 5.

    batch : more than one sample
    repeating_labels : several samples of one class
    any_activation : embeddings that can be negative
    several_steps : updates of more than one local step
    trained_model : global models that already tell the classes apart
    """

    batch: bool
    repeating_labels: bool
    any_activation: bool
    several_steps: bool
    trained_model: bool


@dataclass(frozen=True)
class Method:
    """A named way from an update to label proportions.

    solve : the method itself
    needs_end : whether it wants the local model's statistics, given how the client trained
    reference : where it comes from
    capabilities : where it holds, None where that means nothing (random)
    needs_bias : whether the head must have a bias
    or_unit : or else a unit direction, see `stands_for_bias`
    uses_auxiliary : whether the counts depend on the auxiliary data
    needs_residuals : whether it wants single samples' residuals (`Observation.residuals`)
    needs_samples : whether it wants the samples themselves beside them (`ResidualPath.samples`)
    needs_update_replays : whether it wants replayed updates (`Observation.replayed_update`)
    needs_replayed_clients : whether it wants replayed clients (`Observation.replayed_clients`)
    needs_dense : whether it wants the dense layers before the head (`Observation.dense`)
    any_optimizer : whether it reads updates of optimisers that aren't linear in the gradients
    out_of_scope : why it can't learn from clients that it makes up for such a number of auxiliary samples a
        class and such a training, None where it can; None for methods that don't
    solve_together : ``solve`` of several clients at once, where that costs less; but for rounding, the
        answers are the same
    """

    name: str
    summary: str
    reference: str
    solve: Callable[[Problem], Estimate]
    needs_end: Callable[[LocalTraining], bool]
    capabilities: Capabilities | None = None
    needs_bias: bool = False
    or_unit: bool = False
    uses_auxiliary: bool = False
    needs_residuals: bool = False
    needs_samples: bool = False
    needs_update_replays: bool = False
    needs_replayed_clients: bool = False
    needs_dense: bool = False
    any_optimizer: bool = False
    out_of_scope: Callable[[IntArray, LocalTraining], str | None] | None = None
    solve_together: Callable[[Sequence[Problem]], list[Estimate]] | None = None

    def estimates(self, problems: Sequence[Problem]) -> list[Estimate]:
        """The answers to several problems."""
        if self.solve_together is not None:
            return self.solve_together(problems)
        return [self.solve(problem) for problem in problems]


def check_optimizer(method: Method, training: LocalTraining) -> None:
    """Refuse a method that takes the update for a sum of gradients where the optimiser makes it another.

    Raises
    ------
    UsageError
    """
    if training.optimizer != "sgd" and not method.any_optimizer:
        raise UsageError(
            f"expected the optimizer sgd, whose updates are sums of gradients, which {method.name} works on, "
            f"found {training.optimizer}: choose --method replay, surrogate or auto"
        )


def never(training: LocalTraining) -> bool:
    """``needs_end`` of methods that look at the global model alone."""
    return False


def check_diverging(diverged: int, replays: int) -> None:
    """Refuse training values under which most replays of a training diverge.

    Raises
    ------
    MismatchError
    """
    if diverged > replays / 2:
        raise MismatchError(
            f"expected training that can be replayed, found {diverged} of {replays} replays diverge: correct "
            "--lr, --optimizer or --steps"
        )


SWING_LIMIT = 4.0
"""Of bounds by `gls`, 94 % hold up to a swing of 1, 85 % from 2 to 4, 78 % from 4 to 6 and 47 % above 9."""


def swing_notes(swing: float) -> tuple[Note, ...]:
    """A warning where what lies between the two models can't be told from them."""
    if swing <= SWING_LIMIT:
        return ()
    message = (
        f"the model's predictions changed by {swing:.1f} times what the update explains, expected at most "
        f"{SWING_LIMIT:g}: they swing from step to step (is the learning rate right?), and the two models "
        "don't tell what happened between them, so the counts are uncertain; --method replay learns from "
        "training that swings alike"
    )
    return (Note("predictions-swing", message),)


def solution_notes(solution: SimplexSolution, *, known_to_the_end: bool) -> tuple[Note, ...]:
    """What is to be said of a least-squares solution.

    known_to_the_end : whether S was measured at both ends of the client's way
    """
    notes = []
    if not known_to_the_end:
        message = "the local model's statistics are missing, so S is the global model's all along"
        notes.append(Note("local-statistics-missing", message))
    if not solution.certified:
        message = f"the least-squares solution may miss the optimum by {solution.gap:.2g} in squared residual"
        notes.append(Note("solver-uncertified", message))
    return tuple(notes)


def on_simplex(values: FloatArray) -> tuple[FloatArray, tuple[Note, ...]]:
    """max(values, 0), scaled to sum 1; a uniform guess with a note where nothing positive is left."""
    if np.all(np.isfinite(values)):
        positive = np.maximum(values, 0.0)
        mass = float(positive.sum())
        if mass > 0:
            return positive / mass, ()
    note = Note(
        "method-undetermined",
        "the method's formula has no finite, positive answer for this update: the counts are a uniform guess",
    )
    return np.full(len(values), 1.0 / len(values)), (note,)
