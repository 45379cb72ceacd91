"""How good a recovery is, given the truth."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.types import FloatArray, IntArray, Recovery

_MEAN_DEVIATION = float(np.sqrt(2 / np.pi)) / (2 * 1.959964)
"""E|x − μ| of a normal variable, as a share of the width of its middle 95 %."""


@dataclass(frozen=True)
class Scores:
    """Scores of recovered counts N̂ against true counts N; see `score_counts`."""

    c_acc: float
    i_acc: float
    exact_counts: float
    total_variation: float

    def document(self) -> dict[str, float]:
        """By the names of the field."""
        values = asdict(self)
        return {"cAcc": values.pop("c_acc"), "iAcc": values.pop("i_acc"), **values}


def score_counts(recovered: IntArray, truth: IntArray) -> Scores:
    """Compare recovered counts with the truth.

        cAcc = |{n : [N̂_n > 0] = [N_n > 0]}| / N     (paper, appendix: XNOR over classes)
        iAcc = Σ_n min(N̂_n, N_n) / Σ_n N_n           (paper, appendix: multiset intersection)
        exact_counts = |{n : N̂_n = N_n}| / N
        total_variation = ½ Σ_n |N̂_n / ΣN̂ − N_n / ΣN|

    iAcc alone flatters: a uniform guess already scores about one half, which is why the others stand
    beside it (see `uniform_counts`).

    Parameters
    ----------
    recovered, truth : shape (N,), non-negative integers with positive sums
    """
    if recovered.shape != truth.shape:
        raise ValueError(f"expected counts of equal shape, got {recovered.shape} and {truth.shape}")
    total, claimed = int(truth.sum()), int(recovered.sum())
    if total <= 0 or claimed <= 0:
        raise ValueError("expected counts with a positive sum")
    return Scores(
        c_acc=float(np.mean((recovered > 0) == (truth > 0))),
        i_acc=float(np.minimum(recovered, truth).sum() / total),
        exact_counts=float(np.mean(recovered == truth)),
        total_variation=float(0.5 * np.abs(recovered / claimed - truth / total).sum()),
    )


def score_bounds(recovery: Recovery, truth: IntArray) -> dict[str, float]:
    """What a method's error bars are worth; empty for a method without.

    bounds_hold = |{n : low_n ≤ N_n ≤ high_n}| / N,     to be 0.95
    bounds_width = Σ_n (high_n − low_n) / (N Σ_n N_n)
    presence_cAcc = |{n : [presence_n > ½] = [N_n > 0]}| / N
    """
    low, high, presence = recovery.low, recovery.high, recovery.presence
    if low is None or high is None or presence is None:
        return {}
    return {
        "bounds_hold": float(np.mean((low <= truth) & (truth <= high))),
        "bounds_width": float(np.mean(high - low) / truth.sum()),
        "presence_cAcc": float(np.mean((presence > 0.5) == (truth > 0))),
    }


def uniform_counts(num_classes: int, total: int) -> IntArray:
    """The guess of someone who saw nothing: total samples spread evenly over the classes."""
    return round_to_total(np.full(num_classes, 1.0 / num_classes), total)


def expected_i_acc(widths: FloatArray, total: int) -> float:
    """The share of labels that the 95 % bounds lead one to expect to be right.

        E[iAcc] = 1 − E ½‖N̂ − N‖₁ / total  ≈  1 − ½ Σ_n (high_n − low_n) √(2/π) / (2·1.96) / total

    since iAcc = Σ_n min(N̂_n, N_n) / total, both sums being the total, and a normal error of standard
    deviation σ has the mean size σ √(2/π) and the bounds ± 1.96 σ.

    Parameters
    ----------
    widths : high − low of real-valued bounds, shape (N,): those between whole numbers are a sample less
    total : samples seen
    """
    return max(0.0, 1.0 - 0.5 * _MEAN_DEVIATION * float(np.sum(widths)) / total)
