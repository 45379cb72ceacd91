"""Integers that keep their sum."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.types import FloatArray, IntArray

_SLACK = 1e-6
"""Of a sample: rounding errors of bounds that are whole."""


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


def whole_bounds(low: FloatArray, high: FloatArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """The whole numbers between real bounds, and the counts themselves.

        ⌈low⌉ and ⌊high⌋, or the count where that is beyond them

    A count is a whole number, so as many lie between these as between the real bounds; rounding them to the
    nearest would add half a sample to either side.

    Parameters
    ----------
    low, high : bounds of the counts, shape (N,)
    counts : as they were rounded, shape (N,)
    """
    above, below = np.ceil(low - _SLACK).astype(np.int64), np.floor(high + _SLACK).astype(np.int64)
    return np.minimum(above, counts), np.maximum(below, counts)
