"""Least squares on the unit simplex, exact, with a certificate of optimality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from rlu_cli.core.types import FloatArray
from rlu_cli.errors import MismatchError

_TOLERANCE = 1e-9
"""Certified suboptimality, relative to the largest squared column norm of M, that counts as exact."""

_SIGN = 1e-12
"""What counts as negative, relative to the largest number it comes from."""

BoolArray = NDArray[np.bool_]
Solver = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class SimplexSolution:
    """Minimiser of ‖A z − u‖² over the simplex, with its certificate.

    z : shape (N,), z ≥ 0, 1ᵀz = 1
    residual : ‖A z − u‖₂
    gap : the duality gap 2(zᵀg − min_j g_j) with g = Mᵀ M z, M = A − u 1ᵀ. The KKT conditions hold exactly
        when it is zero, and ‖A z − u‖² exceeds the minimum by no more than it
    certified : whether the gap is zero to within rounding
    """

    z: FloatArray
    residual: float
    gap: float
    certified: bool


class SimplexSolver:
    """Solves the paper's Eq. minimization for any number of clients that share A.

        min_z ‖A z − u‖²₂   s.t.  z ≥ 0, 1ᵀz = 1

    With H = AᵀA + c 11ᵀ, whose second term is constant on the simplex, the KKT conditions are

        H z − Aᵀu − λ1 = s,   z ≥ 0,  s ≥ 0,  zᵀs = 0,  1ᵀz = 1

    Block principal pivoting finds which z_n are zero, exchanging many at once (Portugal, Júdice & Vicente
    1994): the same pivots as on the non-negative least squares problem ‖(A − u1ᵀ) y‖² + (1ᵀy − 1)² that
    Eq. minimization is equivalent to, with a matrix that doesn't depend on the client. So H and H⁻¹ are
    made once, and a pivot factors the smaller of two blocks, that of the zeros or that of the others. The
    solution is refined with the residual A z − u itself, since AᵀA squares A's condition number.
    Where H⁻¹ is too inexact to certify it, the same is done with factors of H's own blocks; should that fail
    as well (degenerate, badly scaled problems), SciPy's Lawson–Hanson NNLS decides.
    No solution leaves without its duality gap.

    Parameters
    ----------
    A : shape (R, N)
    """

    def __init__(self, A: FloatArray) -> None:
        self.A = np.asarray(A, dtype=np.float64)
        if self.A.ndim != 2:
            raise ValueError(f"expected A of shape (R, N), got {self.A.shape}")
        if not np.all(np.isfinite(self.A)):
            raise ValueError("expected finite A")

    def solve(self, u: FloatArray) -> SimplexSolution:
        """The solution for one client.

        Parameters
        ----------
        u : shape (R,)

        Raises
        ------
        MismatchError
            Numbers so far apart that float64 can't tell any z from another.
        """
        u = np.asarray(u, dtype=np.float64)
        if u.shape != self.A.shape[:1]:
            raise ValueError(f"expected u of shape {self.A.shape[:1]}, got {u.shape}")
        if not np.all(np.isfinite(u)):
            raise ValueError("expected finite u")
        with np.errstate(over="ignore"):  # of what no z is found for below
            scale = float(np.sqrt(np.max(np.sum((self.A - u[:, None]) ** 2, axis=0))))
        if scale == 0.0:  # every z fits exactly: say so evenly
            N = self.A.shape[1]
            return SimplexSolution(np.full(N, 1.0 / N), 0.0, 0.0, True)
        best: SimplexSolution | None = None
        methods = (self._shared_pivoting, self._block_pivoting, self._lawson_hanson)
        for method in methods if np.isfinite(scale) else ():
            z = method(u)
            total = 0.0 if z is None else float(z.sum())
            if z is None or not 0.0 < total < np.inf:  # rounding left nothing of it
                continue
            solution = _certify(z / total, self.A, u, scale)
            if not np.isfinite(solution.gap):
                continue
            if best is None or solution.gap < best.gap:
                best = solution
            if best.certified:
                break
        if best is None:
            raise MismatchError(
                f"expected an update of the size that training makes, found numbers up to {scale:.3g}, among "
                "which no label counts can be told: training diverged, or the learning rate or the noise is "
                "wrong; correct --lr or --noise-std, or use another round"
            )
        return best

    @cached_property
    def _size(self) -> float:
        """Largest squared norm of A's columns, at least the smallest number that can be divided by."""
        return float(max(np.max(np.sum(self.A**2, axis=0)), np.finfo(np.float64).tiny))

    @cached_property
    def _hessian(self) -> FloatArray:
        """AᵀA/‖A‖² + 11ᵀ."""
        return np.asarray(self.A.T @ self.A / self._size + 1.0)

    @cached_property
    def _inverse(self) -> FloatArray | None:
        """H⁻¹, None where H is singular."""
        lower, failed = torch.linalg.cholesky_ex(torch.from_numpy(self._hessian))
        return None if failed else np.asarray(torch.cholesky_inverse(lower))

    def _shared_pivoting(self, u: FloatArray) -> FloatArray | None:
        """z by block principal pivoting with the help of H⁻¹; None where it fails."""
        return None if self._inverse is None else self._block_pivoting(u, self._inverse)

    def _block_pivoting(self, u: FloatArray, inverse: FloatArray | None = None) -> FloatArray | None:
        """z by block principal pivoting; None where it fails."""
        N = self.A.shape[1]
        v = self.A.T @ u / self._size
        passive = np.ones(N, dtype=bool)
        fewest, patience = N + 1, 3
        for _ in range(10 * N + 50):
            solve = _block_solver(self._hessian, inverse, passive)
            if solve is None:
                return None
            z, level = _on_plane(solve, v, 1.0, passive)
            if not np.all(np.isfinite(z)):
                return None
            slack = self._hessian[:, passive] @ z[passive] - v - level
            size = max(1.0, float(np.abs(z).max()))
            wrong = np.where(passive, z < -_SIGN * size, slack < -_SIGN * (size + float(np.abs(v).max())))
            infeasible = int(wrong.sum())
            if infeasible == 0:
                residual = self.A.T @ (u - self.A @ z) / self._size
                z += _on_plane(solve, residual, 1.0 - z.sum(), passive)[0]
                return np.maximum(z, 0.0)
            if infeasible < fewest:
                fewest, patience = infeasible, 3
            elif patience > 0:
                patience -= 1
            elif inverse is not None:  # rounding of H⁻¹, most likely
                return None
            else:  # Murty's rule, slow and certain: only the last infeasible variable moves
                last = int(np.flatnonzero(wrong)[-1])
                wrong = np.zeros(N, dtype=bool)
                wrong[last] = True
            passive ^= wrong
            if not passive.any():
                return None
        return None

    def _lawson_hanson(self, u: FloatArray) -> FloatArray | None:
        """A multiple of z by SciPy's NNLS, imported only when it is needed (it takes a second)."""
        from scipy.optimize import nnls

        M = self.A - u[:, None]
        M /= np.sqrt(np.max(np.sum(M**2, axis=0)))
        target = np.zeros(len(M) + 1)
        target[-1] = 1.0
        try:
            y, _ = nnls(np.vstack((M, np.ones((1, M.shape[1])))), target)
        except RuntimeError:
            return None
        return np.asarray(y, dtype=np.float64) if y.sum() > 0 else None


def simplex_least_squares(A: FloatArray, u: FloatArray) -> SimplexSolution:
    """Solve min_z ‖A z − u‖² over the simplex, for one client (`SimplexSolver`).

    Parameters
    ----------
    A : shape (R, N)
    u : shape (R,)
    """
    return SimplexSolver(A).solve(u)


def _on_plane(solve: Solver, v: FloatArray, total: float, passive: BoolArray) -> tuple[FloatArray, float]:
    """z and λ of H_PP z_P = v_P + λ1 with 1ᵀz = total, z zero elsewhere."""
    ones = np.ones(int(passive.sum()))
    a, b = solve(np.column_stack((v[passive], ones))).T
    level = (total - a.sum()) / b.sum()
    z = np.zeros(len(v))
    z[passive] = a + level * b
    return z, float(level)


def _block_solver(H: FloatArray, inverse: FloatArray | None, passive: BoolArray) -> Solver | None:
    """x ↦ H_PP⁻¹ x of the passive block, x of shape (p, k); None where it is singular.

    With G = H⁻¹ and the zeros C, H_PP⁻¹ = G_PP − G_PC G_CC⁻¹ G_CP.
    """
    if inverse is None or 2 * passive.sum() < len(passive):
        return _cholesky_solver(H[np.ix_(passive, passive)])
    G, zero = inverse, ~passive
    outer = _cholesky_solver(G[np.ix_(zero, zero)])
    if outer is None:
        return None

    def solve(x: FloatArray) -> FloatArray:
        full = G[:, passive] @ x
        return np.asarray(full[passive] - G[np.ix_(passive, zero)] @ outer(full[zero]))

    return solve


def _cholesky_solver(H: FloatArray) -> Solver | None:
    lower, failed = torch.linalg.cholesky_ex(torch.from_numpy(H))
    if failed:
        return None
    return lambda x: np.asarray(torch.cholesky_solve(torch.from_numpy(x), lower))


def _certify(z: FloatArray, A: FloatArray, u: FloatArray, scale: float) -> SimplexSolution:
    """The duality gap of z (Frank–Wolfe's), an upper bound of what is left to gain."""
    residual = A @ z - u  # = M z, since 1ᵀz = 1
    gradient = A.T @ residual - u @ residual
    gap = max(0.0, 2.0 * float(z @ gradient - gradient.min()))
    return SimplexSolution(z, float(np.linalg.norm(residual)), gap, gap <= _TOLERANCE * scale**2)
