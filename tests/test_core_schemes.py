"""The optimiser's recursion, against the paper's Table 1 and against torch.optim.SGD."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core.schemes import (
    MOST_STEPS,
    LinearRecursion,
    batch_variance,
    check_training,
    drift,
    impulse_response,
    path_position,
    step_rates,
)
from rlu_cli.core.types import LocalTraining
from rlu_cli.errors import MismatchError, UsageError

STEPS = [1, 2, 10, 100, 1000]
GAMMAS = [0.0, 1e-8, 1e-3, 0.1, 0.5, 0.9, 0.99, 0.999]
PULLS = [0.0, 1e-9, 1e-4, 0.01, 0.1, 0.5, 0.9, 0.99]
LR = 0.05


def geometric(ratio: float, terms: np.ndarray) -> np.ndarray:
    """(1 − ratio^terms)/(1 − ratio), smooth at ratio → 0."""
    if ratio == 0:
        return (terms > 0).astype(np.float64)
    return np.asarray(-np.expm1(terms * np.log(ratio)) / (1 - ratio))


def assert_weights(training: LocalTraining, rho: np.ndarray) -> None:
    np.testing.assert_allclose(impulse_response(training), LR * rho, rtol=1e-12, atol=1e-12 * LR * rho.max())


@pytest.mark.parametrize("m", STEPS)
def test_sgd_weighs_all_steps_alike(m: int) -> None:
    assert_weights(LocalTraining(m, 4, LR), np.ones(m))


@pytest.mark.parametrize("m", STEPS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_momentum(m: int, gamma: float) -> None:
    """SGDm: ρ^τ = (1 − γ^{m+1−τ})/(1 − γ)."""
    tau = np.arange(1, m + 1)
    assert_weights(LocalTraining(m, 4, LR, momentum=gamma), geometric(gamma, m + 1 - tau))


@pytest.mark.parametrize("m", STEPS)
@pytest.mark.parametrize("gamma", GAMMAS[1:])
def test_nesterov(m: int, gamma: float) -> None:
    """NAG as PyTorch does it: ρ^τ = (1 − γ^{m+2−τ})/(1 − γ)."""
    tau = np.arange(1, m + 1)
    training = LocalTraining(m, 4, LR, momentum=gamma, nesterov=True)
    assert_weights(training, geometric(gamma, m + 2 - tau))


@pytest.mark.parametrize("m", STEPS)
@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("kind", ["prox", "weight_decay"])
def test_proximal_pull_and_weight_decay(m: int, pull: float, kind: str) -> None:
    """FedProx, FedDyn, FedDC and weight decay: ρ^τ = (1 − λη)^{m−τ}."""
    tau = np.arange(1, m + 1)
    training = replace(LocalTraining(m, 4, LR), **{kind: pull / LR})
    assert_weights(training, (1 - pull) ** (m - tau))


def run_torch(
    training: LocalTraining,
    gradients: np.ndarray,
    initial: np.ndarray,
    constant: np.ndarray | None = None,
    velocity: np.ndarray | None = None,
) -> np.ndarray:
    """θ_m − θ_0 by torch's own optimiser, float64, on scripted gradients."""
    parameter = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = torch.optim.SGD(
        [parameter],
        lr=1.0,
        momentum=training.momentum,
        dampening=training.dampening,
        nesterov=training.nesterov,
        weight_decay=training.weight_decay,
    )
    if velocity is not None:
        optimizer.state[parameter]["momentum_buffer"] = torch.from_numpy(velocity.copy())
    rates = np.broadcast_to(np.asarray(training.lr, dtype=np.float64), (training.steps,))
    for rate, gradient in zip(rates, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = float(rate)
        pulled = gradient + training.prox * (parameter.detach().numpy() - initial)
        parameter.grad = torch.from_numpy(pulled if constant is None else pulled + constant)
        optimizer.step()
    return np.asarray(parameter.detach().numpy() - initial)


@st.composite
def trainings(draw: Any) -> LocalTraining:
    m = draw(st.integers(1, 12))
    rate = st.floats(1e-3, 0.5)
    momentum = draw(st.sampled_from([0.0, 0.0, 0.3, 0.9, 0.99]))
    nesterov = momentum > 0 and draw(st.booleans())
    dampening = draw(st.sampled_from([0.0, 0.1, 0.9])) if momentum > 0 and not nesterov else 0.0
    return LocalTraining(
        steps=m,
        batch_size=8,
        lr=draw(st.one_of(rate, st.lists(rate, min_size=m, max_size=m).map(tuple))),
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=draw(st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0])),
        prox=draw(st.sampled_from([0.0, 0.0, 1e-3, 0.1, 2.0])),
    )


@given(trainings(), st.integers(0, 10_000), st.booleans())
def test_recursion_is_torch_sgd(training: LocalTraining, seed: int, with_constant: bool) -> None:
    rng = np.random.default_rng(seed)
    gradients, initial = rng.normal(size=(training.steps, 5)), rng.normal(size=5)
    constant = rng.normal(size=5) if with_constant else None
    expected = run_torch(training, gradients, initial, constant)
    recursion = LinearRecursion(
        training, (5,), initial=initial, constant=0.0 if constant is None else constant
    )
    for gradient in gradients:
        recursion.step(gradient)
    np.testing.assert_allclose(recursion.displacement, expected, rtol=1e-9, atol=1e-11)
    # … and so is its split into an impulse response and a drift: −Δ = Σ_τ w^τ g^τ + h.
    h = drift(training, initial=initial, constant=0.0 if constant is None else constant)
    np.testing.assert_allclose(-(impulse_response(training) @ gradients + h), expected, rtol=1e-9, atol=1e-11)


@given(
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)
def test_impulses_one_by_one(
    m: int, momentum: float, dampening: float, nesterov: bool, prox: float, decay: float, schedule: bool
) -> None:
    """The backward pass gives what each unit gradient does when it goes through the recursion alone."""
    nesterov = nesterov and momentum > 0
    training = LocalTraining(
        m,
        4,
        tuple(LR * 0.9**k for k in range(m)) if schedule else LR,
        momentum=momentum,
        dampening=0.0 if nesterov else dampening,
        nesterov=nesterov,
        weight_decay=decay,
        prox=prox,
    )
    recursion = LinearRecursion(training, (m,))
    for pulse in np.eye(m):
        recursion.step(pulse)
    np.testing.assert_allclose(impulse_response(training), -recursion.displacement, rtol=1e-12, atol=1e-15)


def test_many_steps_take_little_memory() -> None:
    weights = impulse_response(LocalTraining(MOST_STEPS, 4, 1e-6, momentum=0.9))
    assert weights[0] == pytest.approx(1e-5) and weights[-1] == pytest.approx(1e-6)


@given(trainings(), st.integers(0, 10_000))
def test_drift_is_torch_sgd_without_gradients(training: LocalTraining, seed: int) -> None:
    rng = np.random.default_rng(seed)
    initial, velocity = rng.normal(size=(3, 2)), rng.normal(size=(3, 2))
    nothing = np.zeros((training.steps, 3, 2))
    carried = velocity if training.momentum else None
    np.testing.assert_allclose(
        -drift(training, initial=initial, velocity=carried),
        run_torch(training, nothing, initial, velocity=carried),
        rtol=1e-9,
        atol=1e-11,
    )


@given(trainings(), st.integers(0, 10_000))
def test_drift_is_linear_and_elementwise(training: LocalTraining, seed: int) -> None:
    rng = np.random.default_rng(seed)
    initial, constant = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    of_initial = drift(training, initial=np.ones(()))
    of_constant = drift(training, initial=np.zeros(()), constant=1.0)
    np.testing.assert_allclose(
        drift(training, initial=initial, constant=constant),
        of_initial * initial + of_constant * constant,
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.parametrize("m", STEPS)
def test_drift_of_scaffold(m: int) -> None:
    """h = η m (c − c_k)."""
    rng = np.random.default_rng(0)
    c, c_k, b = rng.normal(size=(3, 6))
    h = drift(LocalTraining(m, 4, LR, scheme="scaffold"), initial=b, constant=c - c_k)
    np.testing.assert_allclose(h, LR * m * (c - c_k), rtol=1e-11)


@pytest.mark.parametrize("m", STEPS)
@pytest.mark.parametrize("pull", PULLS[1:])
def test_drift_of_feddyn(m: int, pull: float) -> None:
    """h = (1 − (1 − λη)^m) Σ_{r<t} Δb^(r), the client's linear term being λ Σ Δb."""
    rng = np.random.default_rng(1)
    history, b = rng.normal(size=(4, 6)), rng.normal(size=6)
    lam = pull / LR
    training = LocalTraining(m, 4, LR, prox=lam, scheme="feddyn")
    h = drift(training, initial=b, constant=lam * history.sum(axis=0))
    np.testing.assert_allclose(h, -np.expm1(m * np.log1p(-pull)) * history.sum(axis=0), rtol=1e-10)


@pytest.mark.parametrize("m", STEPS)
@pytest.mark.parametrize("pull", PULLS[1:])
def test_drift_of_feddc(m: int, pull: float) -> None:
    """FedDyn's h plus (1 − (1 − λη)^m)/(λ η m) · (Δb^(t−1) − ΔB^(t−1))."""
    rng = np.random.default_rng(2)
    history, change, b = rng.normal(size=(4, 6)), rng.normal(size=6), rng.normal(size=6)
    lam = pull / LR
    training = LocalTraining(m, 4, LR, prox=lam, scheme="feddc")
    constant = lam * history.sum(axis=0) + (history[-1] - change) / (LR * m)
    shrunk = -np.expm1(m * np.log1p(-pull))
    expected = shrunk * history.sum(axis=0) + shrunk / (pull * m) * (history[-1] - change)
    np.testing.assert_allclose(drift(training, initial=b, constant=constant), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("m", STEPS)
@pytest.mark.parametrize("pull", PULLS[1:])
def test_drift_of_weight_decay(m: int, pull: float) -> None:
    """h = (1 − (1 − ηw)^m) b."""
    b = np.random.default_rng(3).normal(size=6)
    h = drift(LocalTraining(m, 4, LR, weight_decay=pull / LR), initial=b)
    np.testing.assert_allclose(h, -np.expm1(m * np.log1p(-pull)) * b, rtol=1e-10)


@pytest.mark.parametrize("m", STEPS)
@pytest.mark.parametrize("gamma", GAMMAS[1:])
def test_drift_of_carried_momentum(m: int, gamma: float) -> None:
    """h = η γ (1 − γ^m)/(1 − γ) · v_before."""
    v = np.random.default_rng(4).normal(size=6)
    h = drift(LocalTraining(m, 4, LR, momentum=gamma), initial=np.zeros(6), velocity=v)
    np.testing.assert_allclose(h, LR * gamma * geometric(gamma, np.array([m]))[0] * v, rtol=1e-10)


def test_nothing_drifts_in_plain_sgd() -> None:
    assert not drift(LocalTraining(10, 4, LR, momentum=0.9), initial=np.ones(5)).any()


def test_path_position_of_one_step_is_the_start() -> None:
    assert path_position(LocalTraining(1, 4, LR, momentum=0.9, prox=1.0)) == 0.0


@pytest.mark.parametrize("m", STEPS[1:])
def test_path_position_of_plain_sgd(m: int) -> None:
    assert path_position(LocalTraining(m, 4, LR)) == pytest.approx((m - 1) / (2 * m), rel=1e-12)


def test_path_position_of_momentum_by_hand() -> None:
    # m = 2, γ = 0.5: x = 0, −η, −η − 1.5η; weights 1.5 and 1; positions 0 and 1/2.5.
    assert path_position(LocalTraining(2, 4, LR, momentum=0.5)) == pytest.approx((1 / 2.5) / 2.5)


@given(trainings())
def test_path_position_does_not_depend_on_the_scale_of_lr(training: LocalTraining) -> None:
    plain = replace(training, weight_decay=0.0, prox=0.0)
    assert 0 <= path_position(plain) < 1
    slower = replace(plain, lr=tuple(step_rates(plain) / 7))
    assert path_position(slower) == pytest.approx(path_position(plain), rel=1e-9, abs=1e-12)


def test_path_position_is_higher_where_the_gradient_shrinks() -> None:
    training = LocalTraining(10, 4, LR)
    positions = [path_position(training, decay=decay) for decay in (4.0, 1.0, 0.25, 0.02)]
    assert positions == sorted(positions)
    assert 0 < positions[0] < positions[-1] < 1


def test_path_position_of_a_decaying_gradient_solves_its_own_equation() -> None:
    """Two steps: α_2 = g_1/(g_1 + g_2) with g_1 = 1 and g_2 = κ^α_2."""
    position = path_position(LocalTraining(2, 4, LR), decay=0.25)
    alpha = 2 * position  # ᾱ = (0 + α_2)/2
    assert alpha == pytest.approx(1 / (1 + 0.25**alpha), abs=1e-4)


@pytest.mark.parametrize("prox", [1.5 / LR, 1.9 / LR])
def test_path_position_stays_on_the_path_under_a_pull_that_overshoots(prox: float) -> None:
    assert 0 <= path_position(LocalTraining(2, 4, LR, prox=prox)) <= 1


def test_path_position_is_lower_with_momentum() -> None:
    assert path_position(LocalTraining(10, 4, LR, momentum=0.9)) < path_position(LocalTraining(10, 4, LR))


def test_step_rates() -> None:
    assert step_rates(LocalTraining(3, 4, 0.1)).tolist() == [0.1, 0.1, 0.1]
    assert step_rates(LocalTraining(3, 4, (0.3, 0.2, 0.1))).tolist() == [0.3, 0.2, 0.1]
    assert step_rates(LocalTraining(3, 4, (0.1,))).tolist() == [0.1, 0.1, 0.1]
    with pytest.raises(MismatchError, match="one learning rate or 3"):
        step_rates(LocalTraining(3, 4, (0.3, 0.2)))


GOOD = LocalTraining(10, 32, 0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.0},
        {"lr": -0.1},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"lr": (0.1,) * 9 + (0.0,)},
        {"steps": 0},
        {"batch_size": 0},
        {"total": 0},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"momentum": float("nan")},
        {"momentum": 0.5, "dampening": 2.5},  # of two steps, Σρ = 0
        {"momentum": 0.5, "dampening": 1.1},
        {"momentum": 0.5, "dampening": -0.1},
        {"dampening": float("nan")},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {"weight_decay": -1e-4},
        {"weight_decay": float("nan")},
        {"prox": -1.0},
        {"prox": float("inf")},
        {"prox": 40.1},
        {"prox": 40.0},  # λη = 2: two steps cancel, Σρ = 0
        {"prox": 20.0, "weight_decay": 21.0},
        {"optimizer": "adam", "weight_decay": 1e300},
        {"optimizer": "adamw", "weight_decay": 40.0},
        {"optimizer": "adam", "eps": 1e300},
        {"optimizer": "adam", "eps": 0.0},
        {"scheme": "fedsomething"},
    ],
    ids=str,
)
def test_impossible_training_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        check_training(replace(GOOD, **change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"momentum": 0.999},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "dampening": 1.0},
        {"prox": 39.0},
        {"weight_decay": 0.1},
        {"optimizer": "adam", "weight_decay": 40.0},
        {"optimizer": "adamw", "weight_decay": 39.0},
        {"total": 300},
        {"lr": (0.1,) * 10},
        *({"scheme": name} for name in ("fedavg", "fedprox", "scaffold", "feddyn", "feddc")),
    ],
    ids=str,
)
def test_possible_training_is_accepted(change: dict[str, Any]) -> None:
    check_training(replace(GOOD, **change))


def test_batch_variance() -> None:
    assert batch_variance(LocalTraining(10, 32, 0.05)) == pytest.approx(1 / 320)
    assert batch_variance(LocalTraining(10, 32, 0.05, distinct=100)) == pytest.approx(1 / 100)
    momentum = LocalTraining(3, 8, 0.1, momentum=0.5)  # ρ = 1.75, 1.5, 1
    assert batch_variance(momentum) == pytest.approx((1.75**2 + 1.5**2 + 1) / (8 * 4.25**2))
