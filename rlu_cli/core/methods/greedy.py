"""One label after the other: the rounding that the LLG family shares."""

from __future__ import annotations

import heapq

import numpy as np

from rlu_cli.core.types import FloatArray, IntArray

_ONE_BY_ONE = 10**6
"""Labels that are shared out one by one at most, a second or so; of more, nearly all are given at once."""


def greedy_counts(
    gradient: FloatArray, impact: FloatArray | float, total: int, *, offset: FloatArray | float = 0.0
) -> IntArray:
    """Share out ``total`` labels, each to the class whose gradient is then the most negative.

        each class with g_j < 0 gets one label         (the most negative ones, if there are too many)
        g_j ← g_j − offset_j;  g_j ← g_j − I_j for every label given
        until all are given:  j = argmin g,  one label to j,  g_j ← g_j − I_j

    Equal gradients go to the lower class index. The counts sum to ``total`` by construction. Of a million
    labels and more, nearly all are given at once (`_given_at_once`): the same counts but for rounding errors.

    Parameters
    ----------
    gradient : g, shape (N,)
    impact : I < 0, what one label does to its own class, shape (N,) or one number
    offset : what the other labels do to a class, shape (N,) or one number
    """
    N = len(gradient)
    impacts = np.broadcast_to(np.asarray(impact, dtype=np.float64), (N,)).tolist()
    counts = np.zeros(N, dtype=np.int64)
    order = np.argsort(gradient, kind="stable")
    counts[order[gradient[order] < 0][:total]] = 1
    rest = gradient - offset - counts * impacts
    left = total - int(counts.sum())
    if left > _ONE_BY_ONE:
        given = _given_at_once(rest, -np.asarray(impacts), left)
        counts += given
        rest = rest - given * impacts
        left -= int(given.sum())
    heap = [(value, j) for j, value in enumerate(rest.tolist())]
    heapq.heapify(heap)
    for _ in range(left):
        value, j = heap[0]
        counts[j] += 1
        heapq.heapreplace(heap, (value - impacts[j], j))
    return counts


def _given_at_once(values: FloatArray, rises: FloatArray, number: int) -> IntArray:
    """How many of ``number`` labels each class gets while all values rise to one level; few are left over.

        n_j = ⌊(t − v_j)/r_j⌋    where v_j < t,    t the highest level with Σ_j n_j ≤ number

    No level is above the lowest class whose value doesn't rise: that class gets all the rest.

    Parameters
    ----------
    values : v, shape (N,)
    rises : r, by how much a label raises the value of its class, shape (N,)
    """
    above = values - values.min()  # which leaves levels near the lowest all their digits
    rising = rises > 0
    steady = np.where(rising, np.inf, above)

    def given(level: float) -> FloatArray:
        found = np.zeros(len(values))
        with np.errstate(over="ignore"):
            full = np.floor(np.maximum(level - above[rising], 0.0) / rises[rising])
        found[rising] = np.minimum(full, number)
        return found

    low, high = 0.0, min(float(steady.min()), 2.0 * number * float(rises[int(np.argmin(above))]))
    if high <= 0 or given(high).sum() <= number:
        low = max(high, 0.0)
        more = (np.arange(len(values)) == np.argmin(steady)).astype(np.float64)
    else:
        while low < (middle := low + (high - low) / 2) < high:
            low, high = (middle, high) if given(middle).sum() <= number else (low, middle)
        more = given(high) - given(low)
    counts = given(low)
    left = number - counts.sum() - len(values)  # which may still be owed, one to each
    if left > 0:  # a class's value doesn't rise, or by less than floating point tells apart
        counts += np.floor(more / more.sum() * left)
    return counts.astype(np.int64)
