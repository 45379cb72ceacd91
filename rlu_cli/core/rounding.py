"""Integers that keep their sum."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.types import FloatArray, IntArray


def round_to_total(proportions: FloatArray, total: int) -> IntArray:
    """Largest-remainder rounding: the integers nearest to total·z that sum to total.

        min_c ‖c − total·z‖₁   s.t.  c ∈ ℕ^N, 1ᵀc = total

    The paper's element-wise ⌊·⌉ need not sum to |B|, which its own metric assumes. Equal remainders
    go to the lower class index, so that the result is a function of its arguments alone.

    Parameters
    ----------
    proportions : shape (N,), non-negative, not all zero; normalised here to sum to 1
    total : number of samples to share out
    """
    if total < 0:
        raise ValueError(f"expected a total of at least 0, got {total}")
    mass = float(np.sum(proportions))
    if np.any(proportions < 0) or not np.isfinite(mass) or mass <= 0:
        raise ValueError("expected non-negative proportions with a positive, finite sum")
    exact = proportions * (total / mass)
    counts = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    if missing < 0:  # floor(x + rounding error) can pass the total by a unit
        order = np.argsort(exact - counts, kind="stable")
        order = order[counts[order] > 0]
        counts[order[:-missing]] -= 1
    elif missing > 0:
        # Remainders equal but for rounding error count as ties.
        remainder = np.round(exact - counts, 9)
        counts[np.argsort(-remainder, kind="stable")[:missing]] += 1
    return counts
