"""Checks that every update must pass before its counts mean anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlu_cli.core.confidence import coefficient_matrix
from rlu_cli.core.gradients import mean_gradient
from rlu_cli.core.noise import normalised_noise
from rlu_cli.core.simplex import simplex_least_squares
from rlu_cli.core.types import FloatArray, Head, HeadUpdate, Note, Observation
from rlu_cli.errors import MismatchError

if TYPE_CHECKING:
    from rlu_cli.core.rate_likelihood import LearningRate

_LARGEST = 1e40
"""Beyond what float32 holds; squares and products stay finite in float64."""

_MOST_STEEP = 1e12
"""Mean gradient or noise on it beyond which float64 says nothing of labels, whose share of u is at most 1."""

_BIAS_SLACK = 0.01
"""|u_j| may pass 1 by this much before it is called impossible: float32 checkpoints round."""

_BALANCE_SLACK = 0.01
"""|Σ_j u_j| allowed, relative to ‖u‖₁."""

_NOISE_SLACK = 4.0
"""Standard deviations of known noise that are no reason for a warning."""

_PRECISION_SLACK = 0.02
"""Share of the update that may be rounding error before it is reported."""

_SIGN_MISFIT = 0.4
"""Relative residual above which an update's sign is questioned, if the opposite one fits twice as well."""

_MISFIT_LIMIT = 2.0
"""Misfit up to which an update counts as explained."""

_MOTION_LIMIT = 1 / 3
"""How far predictions may move in training for the way to be interpolated between its ends."""

_MATCH_FLOOR = 0.9
"""Embedding match below which something about the model is probably wrong."""


def check_classes(num_classes: int) -> None:
    """Refuse models of one class: their updates are the same whatever the labels.

    Raises
    ------
    MismatchError
    """
    if num_classes < 2:
        raise MismatchError(
            f"expected an output layer of at least two classes, found {num_classes}: there is nothing to "
            "tell apart (a sigmoid's two classes need an output each); use a model with an output for each "
            "class, or name its output layer with --head"
        )


def check_heads(local: Head, reference: Head) -> None:
    """Refuse heads that don't belong to the same network, or hold values that aren't numbers.

    Raises
    ------
    MismatchError
    """
    if local.weight.shape != reference.weight.shape or (local.bias is None) != (reference.bias is None):
        raise MismatchError(
            f"expected global and local heads of equal shape, found {_shape(reference)} and {_shape(local)}: "
            "the two checkpoints are of different networks"
        )
    check_classes(len(reference.weight))
    for name, head in (("global", reference), ("local", local)):
        for values in (head.weight, head.bias):
            if values is not None and not np.all(np.abs(values) <= _LARGEST):
                raise MismatchError(
                    f"expected finite numbers in the {name} checkpoint's output layer, found NaN, infinity "
                    f"or more than {_LARGEST:g}: training diverged or the file is damaged, and nothing can "
                    "be recovered from it"
                )


def check_moved(update: HeadUpdate) -> None:
    """Refuse an update of exactly zero.

    Raises
    ------
    MismatchError
    """
    if not np.any(update.weight) and (update.bias is None or not np.any(update.bias)):
        raise MismatchError(
            "expected a local output layer that training has moved, found one identical to the global "
            "model's: the same file was given twice, the client did not train, or its head was frozen"
        )


def check_range(observation: Observation) -> None:
    """Refuse an update, or noise on it, that is larger by orders than any training of that rate makes.

    Raises
    ------
    MismatchError
    """
    gradient, noise = mean_gradient(observation), normalised_noise(observation)
    largest = max(float(np.abs(part).max()) for part in (gradient.weight, gradient.bias) if part is not None)
    if not largest <= _MOST_STEEP:
        raise MismatchError(
            f"expected an update of a mean gradient of at most {_MOST_STEEP:g}, found {largest:.3g}: "
            "training diverged, the checkpoints are damaged, or the learning rate is wrong; correct --lr, or "
            "use another round"
        )
    if not noise <= _MOST_STEEP:
        raise MismatchError(
            f"expected noise of at most {_MOST_STEEP:g} on the mean gradient, found {noise:.3g}, which "
            "leaves nothing of any labels: correct --noise-std or --lr"
        )


def check_update(
    u: FloatArray,
    update: HeadUpdate,
    head: Head,
    *,
    rounding: float = 0.0,
    noise: float = 0.0,
    lost: float = 0.0,
    rounded: float = 0.0,
) -> tuple[dict[str, float], list[Note]]:
    """Diagnostics of u = (Δb + h)/(ηΣρ), shape (N,), with a warning for each that is out of bounds.

    - |u_j| ≤ 1 for every j, as u_j is a mean of onehot(y)_j − s_j;
    - Σ_j u_j = 0, as softmax and one-hot both sum to one;
    - the update is larger than the rounding of the two checkpoints: float32's, or ``rounding``, the norm of
      the error of a coarser type, where that is more.

    Known noise of standard deviation ``noise`` on each u_j may pass these bounds by four of its own, what
    quantisation ``rounded`` at most makes each |u_j| so much larger, and Σ_j u_j is 0 but for what that and
    sparsification ``lost`` of it at most.

    They catch a wrong learning rate or step count, a wrong layer, optimiser or scheme, and pairs from
    different rounds.
    """
    notes: list[Note] = []
    largest = float(np.abs(u).max())
    if largest > 1 + _BIAS_SLACK + _NOISE_SLACK * noise + rounded:
        notes.append(
            Note(
                "update-too-large",
                f"max |u_j| = {largest:.3g}, but no such training can exceed 1: the learning rate or step "
                "count is too small, another optimiser or scheme, or files of different rounds",
            )
        )
    norm = float(np.abs(u).sum())
    balance = float(abs(u.sum()) / norm) if norm > 0 else 0.0
    if abs(u.sum()) > _BALANCE_SLACK * norm + _NOISE_SLACK * noise * np.sqrt(len(u)) + lost:
        notes.append(
            Note(
                "update-unbalanced",
                f"Σ_j u_j is {balance:.1%} of Σ_j |u_j|, but softmax cross-entropy with SGD makes it 0: "
                "another loss or optimiser (Adam), noise on the update, weight decay that was not declared, "
                "or the wrong layer",
            )
        )
    change, values = (
        (update.weight, head.weight) if update.bias is None or head.bias is None else (update.bias, head.bias)
    )
    moved = float(np.linalg.norm(change))
    rounding = max(rounding, float(np.finfo(np.float32).eps / 2 * np.linalg.norm(values)))
    precision = rounding / moved if moved > 0 else np.inf
    if precision > _PRECISION_SLACK:
        notes.append(
            Note(
                "update-near-precision",
                f"about {min(precision, 1.0):.1%} of the update is rounding error of the numbers as stored: "
                "counts of rare classes can't be trusted",
            )
        )
    diagnostics = {
        "update_norm": moved,
        "update_max": largest,
        "update_balance": balance,
        "update_rounding": float(precision) if np.isfinite(precision) else 1.0,
        "update_noise": noise,
    }
    return diagnostics, notes


def check_sign(u: FloatArray, confidence: FloatArray) -> list[Note]:
    """Warn when u, shape (N,), fits no label proportions, and −u does.

        r(u) = min_z ‖(I − Sᵀ) z − u‖,   z on the simplex, S of the global model
        warned of: r(u) > 0.4 ‖u‖ and r(−u) < r(u)/2

    For files that hold an update, which some frameworks store as global − local. Where both signs fit, as
    for clients whose labels are spread like the model's guesses, nothing can be said. The
    bound leaves room for what S misses over many steps.
    """
    A = coefficient_matrix(confidence)
    residual = simplex_least_squares(A, u).residual
    opposite = simplex_least_squares(A, -u).residual
    if residual <= _SIGN_MISFIT * float(np.linalg.norm(u)) or opposite >= residual / 2:
        return []
    return [
        Note(
            "update-sign-reversed",
            "the update fits no label counts, but with its sign reversed it does: the file seems to hold "
            "global − local, where local − global is expected; negate its tensors",
        )
    ]


MISSCALED = (
    "it was clipped (--clip is for the whole update's norm, not for each step's gradient), or the learning "
    "rate, the steps or the loss's reduction are wrong (--lr auto finds the rate)"
)
"""What `update-misscaled` may come of."""

READ_AS_WHOLE, UNBOUNDED = "it is read as if it had been divided by that", "there are no bounds"
"""What is made of it."""


def moved_far(motion: float | None) -> bool:
    """Whether training moved the predictions too far for its way to be known from its two ends."""
    return motion is not None and motion > _MOTION_LIMIT


def check_size(found: LearningRate | None, *, read: bool = False, slight: bool = False) -> list[Note]:
    """Warn of an update whose size isn't what its training values make; see `size_error`.

    Parameters
    ----------
    read : whether it is read as if it had been divided by that
    slight : whether it is too small an error to be sure of
    """
    if found is None:
        return []
    if slight:
        return [Note("size-doubted", f"the update may be {_size(found)}; {READ_AS_WHOLE}")]
    return [Note("update-misscaled", f"the update is {_size(found)}; {READ_AS_WHOLE if read else UNBOUNDED}")]


def check_damaged_size(found: LearningRate | None) -> list[Note]:
    """The same of an update with noise, or made coarser, which may hide it; see `damaged_size_error`."""
    if found is None:
        return []
    then = "it is read as one of any size, for which rlu and gls have no bounds"
    if found.excludes(1.0, halves=2.0):
        return [Note("update-misscaled", f"the update is {_size(found)}; {then}")]
    return [Note("size-doubted", f"the update may be {_size(found)}; {then}")]


def _size(found: LearningRate) -> str:
    return (
        f"{found.scale:.3g} times what its training values make it (95 %: {found.low:.3g} to "
        f"{found.high:.3g}): {MISSCALED}"
    )


def check_misfit(misfit: float | None, motion: float | None) -> list[Note]:
    """Warn when the best counts leave more of the update unexplained than sampling does.

    Where training moved the model far, its two ends may say too little of the way between them: then right
    inputs can misfit too, and the warning says so.
    """
    if misfit is None or misfit <= _MISFIT_LIMIT:
        return []
    excess = (
        f"the best counts leave {misfit:.1f} times as much of the update unexplained as sampling does, "
        f"expected at most {_MISFIT_LIMIT:g}: "
    )
    if motion is not None and moved_far(motion):
        return [
            Note(
                "update-strayed",
                excess
                + f"training moved the model's predictions by {motion:.0%}, too far for its two ends to "
                "tell what happened between them, or the inputs are wrong; the counts are uncertain",
            )
        ]
    return [
        Note(
            "update-unexplained",
            excess + "the normalisation, class order, architecture, learning rate, scheme or --batch-norm is "
            "wrong, or the auxiliary images differ from the client's",
        )
    ]


def check_embedding(match: float | None, misfit: float | None, motion: float | None) -> list[Note]:
    """Warn when the update's embedding is not the aux data's.

    The cosine has no scale of its own: on a trained model few samples make the update, and it strays by
    chance. So where the misfit can tell, it must be out of bounds too.
    """
    if match is None or match >= _MATCH_FLOOR:
        return []
    if misfit is not None and (misfit <= _MISFIT_LIMIT or moved_far(motion)):
        return []
    return [
        Note(
            "embedding-mismatch",
            f"the embedding implied by the update matches the auxiliary data's with cosine {match:.3f}, "
            f"expected at least {_MATCH_FLOOR}: the architecture, activation, normalisation or class order "
            "is probably wrong, or the auxiliary images differ from the client's",
        )
    ]


def _shape(head: Head) -> str:
    return f"{tuple(head.weight.shape)} {'with' if head.bias is not None else 'without'} bias"
