"""Least squares on the unit simplex, exact, with a certificate of optimality."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlu_cli.core.types import FloatArray

_TOLERANCE = 1e-9
"""Certified suboptimality, relative to the largest squared column norm of M, that counts as exact."""


@dataclass(frozen=True)
class SimplexSolution:
    """Minimiser of ‖A z − u‖² over the simplex, with its certificate.

    z : shape (N,), z ≥ 0, 1ᵀz = 1
    residual : ‖A z − u‖₂
    gap : the duality gap 2(zᵀg − min_j g_j) with g = Mᵀ M z. The KKT conditions hold exactly when it
        is zero, and ‖A z − u‖² exceeds the minimum by no more than it
    certified : whether the gap is zero to within rounding
    """

    z: FloatArray
    residual: float
    gap: float
    certified: bool


def simplex_least_squares(A: FloatArray, u: FloatArray) -> SimplexSolution:
    """Solve the paper's Eq. minimization.

        min_z ‖A z − u‖²₂   s.t.  z ≥ 0, 1ᵀz = 1

    On the simplex A z − u = (A − u 1ᵀ) z =: M z, and for any c > 0 the minimiser of
    ‖M y‖² + c²(1ᵀy − 1)² over y ≥ 0 is a positive multiple of the answer: a plain non-negative least
    squares problem. It is solved by block principal pivoting, an exact active-set method that exchanges
    many variables at once (Portugal, Júdice & Vicente 1994), on the normal equations; the passive
    variables are then refined by one QR solve. Should that fail to certify (degenerate, badly scaled
    problems), SciPy's Lawson–Hanson NNLS decides. No solution leaves without its duality gap.

    Parameters
    ----------
    A : shape (R, N)
    u : shape (R,)
    """
    A = np.asarray(A, dtype=np.float64)
    u = np.asarray(u, dtype=np.float64)
    if A.ndim != 2 or u.shape != (A.shape[0],):
        raise ValueError(f"expected A of shape (R, N) and u of shape (R,), got {A.shape} and {u.shape}")
    if not (np.all(np.isfinite(A)) and np.all(np.isfinite(u))):
        raise ValueError("expected finite A and u")
    M = A - u[:, None]
    scale = float(np.sqrt(np.max(np.einsum("rn,rn->n", M, M))))
    if scale == 0.0:  # every z fits exactly: say so evenly
        N = A.shape[1]
        return SimplexSolution(np.full(N, 1.0 / N), 0.0, 0.0, True)
    stacked = np.vstack((M / scale, np.ones((1, A.shape[1]))))
    best: SimplexSolution | None = None
    for solve in (_block_pivoting, _lawson_hanson):
        y = solve(stacked)
        if y is None:
            continue
        solution = _certify(y / y.sum(), M, scale)
        if best is None or solution.gap < best.gap:
            best = solution
        if best.certified:
            break
    if best is None:
        raise ArithmeticError("non-negative least squares did not converge")
    return best


def _certify(z: FloatArray, M: FloatArray, scale: float) -> SimplexSolution:
    """The duality gap of z (Frank–Wolfe's), an upper bound of what is left to gain."""
    residual = M @ z
    gradient = M.T @ residual
    gap = max(0.0, 2.0 * float(z @ gradient - gradient.min()))
    return SimplexSolution(z, float(np.linalg.norm(residual)), gap, gap <= _TOLERANCE * scale**2)


def _block_pivoting(B: FloatArray) -> FloatArray | None:
    """min ‖B y − e_last‖² over y ≥ 0, by block principal pivoting; None where it fails."""
    N = B.shape[1]
    gram = B.T @ B
    target = B[-1].copy()  # Bᵀ e_last
    tolerance = 1e-12
    passive = np.ones(N, dtype=bool)
    fewest, patience = N + 1, 3
    for _ in range(10 * N + 50):
        y = np.zeros(N)
        try:
            factor = np.linalg.cholesky(gram[np.ix_(passive, passive)])
        except np.linalg.LinAlgError:
            return None
        y[passive] = np.linalg.solve(factor.T, np.linalg.solve(factor, target[passive]))
        multiplier = gram @ y - target
        wrong = np.where(passive, y < -tolerance, multiplier < -tolerance)
        infeasible = int(wrong.sum())
        if infeasible == 0:
            refined = _refine(B, passive)
            return np.maximum(y if refined is None else refined, 0.0)
        if infeasible < fewest:
            fewest, patience = infeasible, 3
        elif patience > 0:
            patience -= 1
        else:  # Murty's rule, slow and certain: only the last infeasible variable moves
            last = int(np.flatnonzero(wrong)[-1])
            wrong = np.zeros(N, dtype=bool)
            wrong[last] = True
        passive ^= wrong
        if not passive.any():
            return None
    return None


def _refine(B: FloatArray, passive: np.ndarray) -> FloatArray | None:
    """The passive variables again, from B itself: the normal equations square its condition number."""
    if passive.sum() > B.shape[0]:  # more variables than equations: not unique
        return None
    Q, R = np.linalg.qr(B[:, passive])
    diagonal = np.abs(np.diag(R))
    if diagonal.min() <= 1e-13 * diagonal.max():
        return None
    y = np.zeros(B.shape[1])
    y[passive] = np.linalg.solve(R, Q[-1])
    return y if y.min() >= -1e-9 else None


def _lawson_hanson(B: FloatArray) -> FloatArray | None:
    """The same problem by SciPy, imported only when it is needed (it takes a second)."""
    from scipy.optimize import nnls

    target = np.zeros(B.shape[0])
    target[-1] = 1.0
    try:
        y, _ = nnls(B, target)
    except RuntimeError:
        return None
    return np.asarray(y, dtype=np.float64) if y.sum() > 0 else None
