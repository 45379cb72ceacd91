"""What an optimiser does to gradients: one linear recursion instead of a formula per FL scheme."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.types import FloatArray, LocalTraining
from rlu_cli.errors import MismatchError, UsageError

_POSITION_ROUNDS = 8
"""The positions depend on the gradients at them; this many rounds settle both."""

MOST_STEPS = 100_000
"""Local steps that are followed one by one: beyond, the two ends of training tell nothing anyway."""

_MOST_SAMPLES = 10**12

_RATES = (1e-30, 1e30)
"""Learning rates that arithmetic can take; NaN is outside too."""

OPTIMIZERS = ("sgd", "adam", "adamw")

SCHEMES = ("fedavg", "fedprox", "scaffold", "feddyn", "feddc")


class LinearRecursion:
    """Local training as a linear system driven by the cross-entropy gradients.

    With x = θ − θ_global, per parameter and as torch.optim.SGD does it:

        d   = g + λ x + k + w (θ_global + x)
        v  ← γ v + (1 − δ) d           (v = d at the first step of a fresh buffer)
        x  ← x − η_τ (d + γ v  if Nesterov else  v)

    λ is the proximal pull (FedProx, FedDyn, FedDC), k a constant gradient (Scaffold, FedDyn, FedDC),
    w the weight decay, γ momentum, δ dampening. Works elementwise on arrays of any shape.

    Parameters
    ----------
    training : the client's training values
    shape : of the parameters
    initial : θ_global, needed with weight decay only
    constant : k
    velocity : momentum buffer carried in from an earlier round, None for a fresh one
    """

    def __init__(
        self,
        training: LocalTraining,
        shape: tuple[int, ...],
        *,
        initial: FloatArray | float = 0.0,
        constant: FloatArray | float = 0.0,
        velocity: FloatArray | None = None,
    ) -> None:
        self.training = training
        self.rates = step_rates(training)
        self.initial = initial
        self.constant = constant
        self.velocity = velocity
        self.displacement: NDArray[Any] = np.zeros(shape)
        self.step_index = 0

    def step(self, gradient: FloatArray | float) -> None:
        """One local step with the mean cross-entropy gradient of its batch."""
        t = self.training
        x = self.displacement
        d = gradient + t.prox * x + self.constant + t.weight_decay * (self.initial + x)
        if t.momentum:
            self.velocity = d if self.velocity is None else t.momentum * self.velocity + (1 - t.dampening) * d
            d = d + t.momentum * self.velocity if t.nesterov else self.velocity
        self.displacement = x - self.rates[self.step_index] * d
        self.step_index += 1


def step_rates(training: LocalTraining) -> FloatArray:
    """η of every step, shape (m,)."""
    rates = np.atleast_1d(np.asarray(training.lr, dtype=np.float64))
    if rates.shape not in ((1,), (training.steps,)):
        raise MismatchError(
            f"expected one learning rate or {training.steps} (one a step), found {len(rates)}: correct --lr"
        )
    return np.broadcast_to(rates, (training.steps,))


def check_training(training: LocalTraining) -> None:
    """Refuse training values with which no recovery can be right.

    Raises
    ------
    UsageError
        A value out of its range, or a proximal pull that keeps training itself from converging (λη ≥ 2).
    """
    rates = np.atleast_1d(np.asarray(training.lr, dtype=np.float64))
    if not np.all((rates >= _RATES[0]) & (rates <= _RATES[1])):
        low, high = float(rates.min()), float(rates.max())
        found = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        raise UsageError(
            f"expected a learning rate from {_RATES[0]:g} to {_RATES[1]:g}, found {found}: correct --lr"
        )
    for name, value, most, flag in (
        ("step count", training.steps, MOST_STEPS, "--steps"),
        ("batch size", training.batch_size, _MOST_SAMPLES, "--batch-size"),
        ("number of samples", training.samples, _MOST_SAMPLES, "--dataset-size"),
    ):
        if not 1 <= value <= most:
            raise UsageError(f"expected a {name} from 1 to {most}, found {value}: correct {flag}")
    if not 0 <= training.momentum < 1:
        raise UsageError(f"expected a momentum in [0, 1), found {training.momentum}")
    if not 0 <= training.dampening <= 1:  # beyond, old gradients pull the model back up the slope
        raise UsageError(f"expected a dampening in [0, 1], found {training.dampening}: correct --dampening")
    if training.nesterov and (training.momentum <= 0 or training.dampening != 0):
        raise UsageError("expected a positive momentum and no dampening with Nesterov, as in torch.optim.SGD")
    for name, rate in (("weight decay", training.weight_decay), ("lambda", training.prox)):
        if not 0 <= rate <= _RATES[1]:
            raise UsageError(f"expected a {name} from 0 to {_RATES[1]:g}, found {rate}")
    _check_optimizer(training)
    # Adam divides what it takes for gradients by their size: what pulls there can't diverge
    pulls = {"sgd": training.prox + training.weight_decay, "adamw": training.weight_decay}
    pull = pulls.get(training.optimizer, 0.0) * float(rates.max())
    if pull >= 2:  # at 2 exactly, the steps of an even number cancel and Σρ = 0
        raise UsageError(
            f"expected (lambda + weight decay) × lr below 2, found {pull:g}: such training does not "
            "converge, so one of the three is wrong"
        )
    if training.scheme not in SCHEMES:
        raise UsageError(f"expected a scheme among {', '.join(SCHEMES)}, found {training.scheme!r}")


def _check_optimizer(training: LocalTraining) -> None:
    """Refuse what torch.optim.Adam refuses, and what it doesn't have."""
    if training.optimizer not in OPTIMIZERS:
        raise UsageError(
            f"expected an optimizer among {', '.join(OPTIMIZERS)}, found {training.optimizer!r}: updates of "
            "others can't be replayed here"
        )
    if training.optimizer == "sgd":
        return
    if training.momentum or training.dampening or training.nesterov:
        raise UsageError(
            f"expected no momentum, dampening or Nesterov with {training.optimizer}, which has --beta1 "
            "instead: leave them out"
        )
    if training.scheme not in ("fedavg", "fedprox"):
        raise UsageError(
            f"expected the scheme fedavg or fedprox with {training.optimizer}, found {training.scheme}, "
            "whose corrections are made for SGD"
        )
    for name, beta in (("beta1", training.beta1), ("beta2", training.beta2)):
        if not 0 <= beta < 1:
            raise UsageError(f"expected {name} in [0, 1), found {beta}: correct --{name}")
    if not 0 < training.eps <= _RATES[1]:
        raise UsageError(f"expected eps above 0 and up to {_RATES[1]:g}, found {training.eps}: correct --eps")


def impulse_response(training: LocalTraining) -> FloatArray:
    """How much each step's gradient weighs in the update: η ρ^τ of the paper's Table 1.

        −Δ = Σ_τ w^τ g^τ + h,     w^τ = η ρ^τ

    Returns shape (m,). The recursion of `LinearRecursion` is run once backwards: what the final x gains from
    a change of x and of v after each step, hence from that step's gradient.
    """
    t, rates = training, step_rates(training)
    weights = np.empty(t.steps)
    pull = t.prox + t.weight_decay
    by_x, by_v = 1.0, 0.0
    for step in range(t.steps - 1, -1, -1):
        by_direction = -float(rates[step]) * by_x
        by_d = by_direction
        if t.momentum:
            fresh = step == 0
            by_velocity = by_v + (t.momentum * by_direction if t.nesterov else by_direction)
            by_d = (by_direction if t.nesterov else 0.0) + by_velocity * (1.0 if fresh else 1 - t.dampening)
            by_v = t.momentum * by_velocity
        weights[step] = -by_d
        by_x += pull * by_d
    return weights


def pace(training: LocalTraining) -> float:
    """How far a steady gradient of 1 moves a parameter: η Σ_τ ρ^τ, and Σ_τ η_τ for Adam's steps of size η."""
    return float(np.sum(impulse_response(training) if training.optimizer == "sgd" else step_rates(training)))


def batch_variance(training: LocalTraining) -> float:
    """How much of one sample's variance is left in the update per unit of Σ_τ w^τ.

        β = Σ_τ (w^τ)² / (B (Σ_τ w^τ)²),   at least one over the number of different samples

    A batch B of m steps is on average samples/m.
    """
    weights = impulse_response(training)
    share = weights / weights.sum()
    batch = training.samples / training.steps
    return max(float(share @ share) / batch, 1.0 / (training.distinct or training.samples))


def drift(
    training: LocalTraining,
    *,
    initial: FloatArray,
    constant: FloatArray | float = 0.0,
    velocity: FloatArray | None = None,
) -> FloatArray:
    """h of the paper's Table 1: what training does to a parameter with all cross-entropy gradients zero.

    Parameters
    ----------
    initial : the global value, for weight decay, any shape
    constant : the scheme's constant gradient k
    velocity : momentum buffer carried in
    """
    recursion = LinearRecursion(
        training, initial.shape, initial=initial, constant=constant, velocity=velocity
    )
    for _ in range(training.steps):
        recursion.step(0.0)
    return -recursion.displacement


def path_position(training: LocalTraining, *, decay: float = 1.0) -> float:
    """Where on the straight path from global to local model the average gradient was taken, in [0, 1].

        ᾱ = Σ_τ w^τ α_τ / Σ_τ w^τ,     α_τ = x_{τ−1} / x_m

    with w^τ of `impulse_response` and x the displacement under gradients κ^α: the gradient keeps its
    direction and shrinks (or grows) evenly on the way, to κ = ``decay`` at its end. One step: 0, its
    gradient is the global model's. Plain SGD with κ = 1: (m − 1)/2m. Momentum moves late and weighs early
    gradients more, so it sits lower; a shrinking gradient moves early, so it sits higher.
    """
    if training.steps == 1:
        return 0.0
    alphas = np.zeros(training.steps)
    for _ in range(1 if decay == 1.0 else _POSITION_ROUNDS):
        recursion = LinearRecursion(training, ())
        positions = []
        for gradient in decay**alphas:
            positions.append(float(recursion.displacement))
            recursion.step(float(gradient))
        alphas = np.clip(np.array(positions) / float(recursion.displacement), 0.0, 1.0)
    weights = impulse_response(training)
    return float(np.clip(np.sum(weights * alphas) / np.sum(weights), 0.0, 1.0))
