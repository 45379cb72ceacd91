"""How good a recovery is, given the truth."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.types import IntArray, Recovery


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
