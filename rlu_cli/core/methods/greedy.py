"""One label after the other: the rounding that the LLG family shares."""

from __future__ import annotations

import heapq

import numpy as np

from rlu_cli.core.types import FloatArray, IntArray


def greedy_counts(
    gradient: FloatArray, impact: FloatArray | float, total: int, *, offset: FloatArray | float = 0.0
) -> IntArray:
    """Share out ``total`` labels, each to the class whose gradient is then the most negative.

        each class with g_j < 0 gets one label         (the most negative ones, if there are too many)
        g_j ← g_j − offset_j;  g_j ← g_j − I_j for every label given
        until all are given:  j = argmin g,  one label to j,  g_j ← g_j − I_j

    Equal gradients go to the lower class index. The counts sum to ``total`` by construction.

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
    rest = (gradient - offset - counts * impacts).tolist()
    heap = [(value, j) for j, value in enumerate(rest)]
    heapq.heapify(heap)
    for _ in range(total - int(counts.sum())):
        value, j = heap[0]
        counts[j] += 1
        heapq.heapreplace(heap, (value - impacts[j], j))
    return counts
