"""Least squares on the simplex, against three oracles that share nothing with it."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from core_cases import random_confidence
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from rlu_cli.core import simplex as module
from rlu_cli.core.confidence import coefficient_matrix
from rlu_cli.core.simplex import SimplexSolution, SimplexSolver, simplex_least_squares
from rlu_cli.errors import MismatchError

Problem = tuple[np.ndarray, np.ndarray]


def project(y: np.ndarray) -> np.ndarray:
    """Nearest point of the simplex (sort and threshold)."""
    ordered = np.sort(y)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(y) + 1)
    return np.maximum(y - excess[np.flatnonzero(ordered > excess)[-1]], 0.0)


def objective(A: np.ndarray, u: np.ndarray, z: np.ndarray) -> float:
    return float(np.sum((A @ z - u) ** 2))


def projected_gradient(A: np.ndarray, u: np.ndarray, steps: int = 3000) -> np.ndarray:
    """FISTA with restarts."""
    N = A.shape[1]
    rate = 1 / max(np.linalg.norm(A, 2) ** 2, 1e-300)
    z = y = np.full(N, 1 / N)
    t = 1.0
    for _ in range(steps):
        nearer = project(y - rate * (A.T @ (A @ y - u)))
        if (y - nearer) @ (nearer - z) > 0:
            t, y = 1.0, nearer
        t_next = (1 + np.sqrt(1 + 4 * t * t)) / 2
        y = nearer + (t - 1) / t_next * (nearer - z)
        z, t = nearer, t_next
    return np.asarray(z)


def slsqp(A: np.ndarray, u: np.ndarray) -> np.ndarray:
    N = A.shape[1]
    scale = max(float(np.abs(A - u[:, None]).max()), 1e-300)
    B, v = A / scale, u / scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = minimize(
            lambda z: np.sum((B @ z - v) ** 2),
            np.full(N, 1 / N),
            jac=lambda z: 2 * B.T @ (B @ z - v),
            method="SLSQP",
            bounds=[(0, 1)] * N,
            constraints=[{"type": "eq", "fun": lambda z: z.sum() - 1, "jac": np.ones_like}],
            options={"ftol": 1e-15, "maxiter": 500},
        )
    return project(result.x)


def all_supports(A: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Exact for a handful of classes: equality-constrained least squares on every support."""
    N = A.shape[1]
    best, least = np.full(N, 1 / N), np.inf
    for size in range(1, N + 1):
        for support in map(list, itertools.combinations(range(N), size)):
            last = A[:, support[-1]]
            free, *_ = np.linalg.lstsq(A[:, support[:-1]] - last[:, None], u - last, rcond=None)
            z = np.zeros(N)
            z[support] = [*free, 1 - free.sum()]
            if z.min() >= -1e-12 and objective(A, u, project(z)) < least:
                best, least = project(z), objective(A, u, project(z))
    return best


def check(A: np.ndarray, u: np.ndarray, oracles: list[Callable[..., np.ndarray]]) -> SimplexSolution:
    """On the simplex, certified, no worse than any oracle, and the gap bounds what is left to gain."""
    solution = simplex_least_squares(A, u)
    z = solution.z
    assert z.min() >= 0
    assert z.sum() == pytest.approx(1.0, abs=1e-12)
    assert solution.certified
    value = objective(A, u, z)
    scale = float(np.max(np.sum((A - u[:, None]) ** 2, axis=0)))
    rounding = 1e-14 * scale
    assert solution.residual**2 == pytest.approx(value, rel=1e-6, abs=rounding)
    for oracle in oracles:
        reached = objective(A, u, oracle(A, u))
        assert value <= reached * (1 + 1e-9) + rounding, oracle.__name__
        assert solution.gap >= value - reached - rounding, oracle.__name__
    return solution


def random_problem(classes: int, seed: int, kind: str) -> Problem:
    rng = np.random.default_rng(seed)
    A = coefficient_matrix(random_confidence(rng, classes, own=rng.uniform(0, 0.9)))
    inside = A @ rng.dirichlet(np.full(classes, 0.5))
    if kind == "inside":
        return A, inside
    if kind == "outside":
        return A, inside + rng.normal(size=classes)
    if kind == "noisy":
        return A, inside + 0.01 * rng.normal(size=classes)
    return rng.normal(size=(classes, classes)), rng.normal(size=classes)


@pytest.mark.parametrize("kind", ["inside", "outside", "noisy", "dense"])
@pytest.mark.parametrize("seed", range(4))
def test_no_worse_than_the_oracles(kind: str, seed: int) -> None:
    A, u = random_problem(4 + seed, seed, kind)
    check(A, u, [slsqp, projected_gradient, all_supports])


@pytest.mark.parametrize("kind", ["inside", "outside", "noisy", "dense"])
def test_a_hundred_classes(kind: str) -> None:
    A, u = random_problem(100, 5, kind)
    check(A, u, [projected_gradient])


def degenerate_problems() -> dict[str, Problem]:
    rng = np.random.default_rng(11)
    A, u = random_problem(6, 12, "noisy")
    D, v = random_problem(6, 13, "dense")
    identity = coefficient_matrix(np.eye(5))
    return {
        "A zero": (np.zeros((5, 5)), rng.normal(size=5)),
        "A zero, u zero": (np.zeros((5, 5)), np.zeros(5)),
        "S identity": (identity, np.array([0.5, -0.5, 0, 0, 0])),
        "u zero": (A, np.zeros(6)),
        "u zero, dense": (D, np.zeros(6)),
        "rank one": (np.outer(rng.normal(size=6), rng.normal(size=6)), u),
        "uniform S": (coefficient_matrix(np.full((6, 6), 1 / 6)), u),
        "duplicated columns": (D[:, [0, 0, 1, 1, 2, 2]], v),
        "all columns equal": (np.repeat(D[:, :1], 6, axis=1), v),
        "nearly duplicated columns": (D[:, [0, 0, 1, 1, 2, 2]] + 1e-9 * rng.normal(size=(6, 6)), v),
        "duplicated, target inside": (D[:, [0, 0, 1, 1]], D[:, [0, 1]] @ [0.3, 0.7]),
        "a vertex": (A, A[:, 2].copy()),
        "N=1": (np.array([[0.0]]), np.array([0.3])),
        "N=1 exact": (np.array([[2.0]]), np.array([2.0])),
        "N=2": (coefficient_matrix(np.array([[0.9, 0.1], [0.3, 0.7]])), np.array([0.2, -0.2])),
        "N=2 beyond": (coefficient_matrix(np.array([[0.9, 0.1], [0.3, 0.7]])), np.array([0.9, -0.9])),
        "tiny": (1e-9 * A, 1e-9 * u),
        "tiny, dense": (1e-9 * D, 1e-9 * v),
        "tiny A": (1e-9 * D, v),
        "huge": (1e9 * D, 1e9 * v),
        "huge A": (1e6 * D, v),
        "far target": (D, 1e4 * v),
        "wide": (rng.normal(size=(3, 7)), rng.normal(size=3)),
        "wide, target inside": (rng.normal(size=(3, 7)), np.zeros(3)),
        "wide, more passive than rows": (
            np.array([[2.0, 1, -1, -1, 0], [1, 0, 0, 1, -2]]),
            np.array([1.0, 0]),
        ),
        "tall": (rng.normal(size=(20, 5)), rng.normal(size=20)),
        "columns of very unequal size": (D * np.logspace(-8, 0, 6), v),
        "sure classes": (coefficient_matrix(np.eye(6) * (1 - 6e-7) + 1e-7), 1e-7 * u),
    }


DEGENERATE = degenerate_problems()


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_problems(name: str) -> None:
    check(*DEGENERATE[name], oracles=[slsqp, projected_gradient, all_supports])


def test_nothing_to_tell_apart_is_uniform() -> None:
    np.testing.assert_array_equal(simplex_least_squares(np.zeros((4, 4)), np.zeros(4)).z, np.full(4, 0.25))


@given(st.integers(1, 40), st.integers(0, 10_000), st.integers(1, 40))
def test_recovers_the_mix_exactly_when_it_fits(classes: int, seed: int, present: int) -> None:
    rng = np.random.default_rng(seed)
    A = coefficient_matrix(random_confidence(rng, classes))
    z = np.zeros(classes)
    chosen = rng.permutation(classes)[:present]
    z[chosen] = rng.dirichlet(np.ones(len(chosen)))
    solution = check(A, A @ z, oracles=[])
    np.testing.assert_allclose(solution.z, z, atol=1e-9)
    assert solution.residual < 1e-9


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10_000), st.floats(-12, 12))
def test_certified_at_every_shape_and_scale(rows: int, classes: int, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    A, u = rng.normal(size=(rows, classes)), rng.normal(size=rows)
    solution = check(10**exponent * A, 10**exponent * u, oracles=[])
    # Scaling both changes nothing but the residual.
    same = simplex_least_squares(A, u)
    assert solution.residual == pytest.approx(10**exponent * same.residual, rel=1e-6, abs=1e-9 * 10**exponent)


@given(st.integers(1, 30), st.integers(0, 10_000), st.sampled_from(["inside", "outside", "noisy", "dense"]))
def test_block_pivoting_alone_solves_regular_problems(classes: int, seed: int, kind: str) -> None:
    A, u = random_problem(classes, seed, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimplexSolver, "_lawson_hanson", lambda self, u: pytest.fail("pivoting gave up"))
        assert simplex_least_squares(A, u).certified


@given(st.integers(2, 6), st.integers(0, 10_000))
def test_gap_bounds_what_is_left_to_gain_anywhere_on_the_simplex(classes: int, seed: int) -> None:
    A, u = random_problem(classes, seed, "dense")
    least = objective(A, u, all_supports(A, u))
    vertices = np.eye(classes)
    for z in (*vertices, *np.random.default_rng(seed).dirichlet(np.ones(classes), size=5)):
        M = A - u[:, None]
        gap = module._certify(z, A, u, 1.0).gap
        assert gap >= objective(A, u, z) - least - 1e-9
        # It is the slope of the objective toward the best vertex (Frank and Wolfe's gap).
        towards = [2 * (M @ z) @ (M @ (z - vertex)) for vertex in vertices]
        assert gap == pytest.approx(max(towards), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["inside", "outside", "noisy", "dense"])
def test_lawson_hanson_takes_over(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    A, u = random_problem(12, 21, kind)
    expected = simplex_least_squares(A, u)
    for name in ("_shared_pivoting", "_block_pivoting"):
        monkeypatch.setattr(SimplexSolver, name, lambda self, u: None)
    solution = check(A, u, [projected_gradient])
    np.testing.assert_allclose(solution.z, expected.z, atol=1e-8)


def test_the_better_of_two_failures_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    A, u = random_problem(5, 22, "outside")
    monkeypatch.setattr(SimplexSolver, "_shared_pivoting", lambda self, u: None)
    monkeypatch.setattr(SimplexSolver, "_block_pivoting", lambda self, u: np.eye(5)[0])
    monkeypatch.setattr(SimplexSolver, "_lawson_hanson", lambda self, u: np.eye(5)[1])
    solution = simplex_least_squares(A, u)
    least = min(objective(A, u, z) for z in (slsqp(A, u), projected_gradient(A, u)))
    assert not solution.certified
    assert solution.gap >= objective(A, u, solution.z) - least > 0


@pytest.mark.parametrize("power", [2, 6, 10, 13, 16, 20, 40, 100, 150, 170, 300])
def test_targets_out_of_all_proportion(power: int) -> None:
    """‖A z − s u‖² is least at the corner of largest A_n·u, as far as float64 tells; never NaN."""
    rng = np.random.default_rng(power)
    for _ in range(20):
        A = coefficient_matrix(random_confidence(rng, 6))
        u = rng.normal(size=6)
        u -= u.mean()
        if power > 150:  # squares overflow
            with pytest.raises(MismatchError, match="--lr or --noise-std"):
                simplex_least_squares(A, 10.0**power * u)
            continue
        z = simplex_least_squares(A, 10.0**power * u).z
        assert np.all(z >= 0)
        assert z.sum() == pytest.approx(1.0)
        if power <= 10:
            np.testing.assert_allclose(z, np.eye(6)[np.argmax(A.T @ u)], atol=1e-3 if power > 2 else 0.2)


def test_no_solver_converging_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_shared_pivoting", "_block_pivoting"):
        monkeypatch.setattr(SimplexSolver, name, lambda self, u: None)
    monkeypatch.setattr(SimplexSolver, "_lawson_hanson", lambda self, u: None)
    with pytest.raises(MismatchError, match="no label counts can be told"):
        simplex_least_squares(np.eye(3), np.ones(3))


@pytest.mark.parametrize(
    ("A", "u"),
    [
        (np.eye(3), np.ones(2)),
        (np.ones(3), np.ones(3)),
        (np.full((2, 2), np.nan), np.ones(2)),
        (np.eye(2), np.array([np.inf, 0.0])),
    ],
)
def test_refuses_bad_arguments(A: np.ndarray, u: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected"):
        simplex_least_squares(A, u)


@pytest.mark.parametrize("kind", ["inside", "outside", "noisy"])
@pytest.mark.parametrize("classes", [3, 30, 120])
def test_clients_that_share_a_get_the_same_bytes_in_any_order(kind: str, classes: int) -> None:
    rng = np.random.default_rng(classes)
    A, _ = random_problem(classes, 31, kind)
    updates = [A @ rng.dirichlet(np.full(classes, 0.3)) for _ in range(6)]
    if kind != "inside":
        updates = [u + rng.normal(size=classes) * (1.0 if kind == "outside" else 0.01) for u in updates]
    shared, backwards = SimplexSolver(A), SimplexSolver(A)
    forth = [shared.solve(u) for u in updates]
    back = [backwards.solve(u) for u in updates[::-1]][::-1]
    for u, first, second in zip(updates, forth, back, strict=True):
        assert first.certified
        assert first.z.tobytes() == second.z.tobytes() == simplex_least_squares(A, u).z.tobytes()
        assert (first.residual, first.gap) == (second.residual, second.gap)


@given(st.integers(2, 40), st.integers(0, 10_000), st.sampled_from(["inside", "outside", "noisy", "dense"]))
def test_same_solution_without_the_shared_inverse_and_by_lawson_hanson(
    classes: int, seed: int, kind: str
) -> None:
    A, u = random_problem(classes, seed, kind)
    found = simplex_least_squares(A, u)
    for methods in (("_shared_pivoting",), ("_shared_pivoting", "_block_pivoting")):
        with pytest.MonkeyPatch.context() as patch:
            for name in methods:
                patch.setattr(SimplexSolver, name, lambda self, u: None)
            other = simplex_least_squares(A, u)
        assert other.certified
        assert objective(A, u, found.z) <= objective(A, u, other.z) * (1 + 1e-9) + 1e-13
        if kind != "dense":
            np.testing.assert_allclose(found.z, other.z, atol=1e-7)


@pytest.mark.parametrize("smallest", [1e-4, 1e-6, 1e-8])
def test_models_that_are_sure_need_no_other_solver(monkeypatch: pytest.MonkeyPatch, smallest: float) -> None:
    """Errors of very unequal size make A ill-conditioned: H⁻¹ may fail, pivoting must not."""
    rng = np.random.default_rng(5)
    classes = 60
    wrong = np.exp(rng.uniform(np.log(smallest), np.log(0.1), size=classes))
    rows = rng.dirichlet(np.full(classes, 0.3), size=classes)
    A = coefficient_matrix((1 - wrong)[:, None] * np.eye(classes) + wrong[:, None] * rows)
    monkeypatch.setattr(SimplexSolver, "_lawson_hanson", lambda self, u: pytest.fail("pivoting gave up"))
    z = rng.dirichlet(np.full(classes, 0.3))
    assert check(A, A @ z, oracles=[]).residual < 1e-10
    check(A, A @ z + 1e-3 * rng.normal(size=classes), oracles=[])


def test_a_client_more_costs_less_than_the_first() -> None:
    """AᵀA and its inverse are shared."""
    A, u = random_problem(1000, 6, "noisy")
    solver = SimplexSolver(A)
    rng = np.random.default_rng(7)
    times = []
    for _ in range(4):
        start = time.process_time()
        assert solver.solve(u).certified
        times.append(time.process_time() - start)
        u = u + 0.01 * rng.normal(size=1000)
    assert min(times[1:]) < times[0]
