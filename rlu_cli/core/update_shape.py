"""Size and evenness of an update beside those of replayed ones: whether training was as it was told."""

from __future__ import annotations

import math

import numpy as np

from rlu_cli.core.types import FloatArray, Note

_FARTHEST = 4.0
"""Standard deviations that an update may be away from the replayed ones' mean."""

_SPREAD = 0.05
"""The least of them, in logarithms: after one step of Adam all updates are equally large."""


_MOST = 700.0
"""The largest logarithm that is shown: beyond, float64 has no number."""


def update_shape(weight: FloatArray) -> FloatArray:
    """(log √mean ΔW², log (mean |ΔW| / √mean ΔW²)), shape (2,): how large ΔW is, and how even.

    The second is 0 where all numbers are equally large, as Adam's first step makes them, and −0.23 for
    normal ones. Zero counts as the least positive number.

    Parameters
    ----------
    weight : ΔW or a multiple, shape (N, L)
    """
    tiny = float(np.finfo(np.float64).tiny)
    magnitudes = np.abs(weight)
    largest = max(float(magnitudes.max()), tiny)  # first, so that no square overflows or vanishes
    magnitudes = np.maximum(magnitudes, tiny) / largest
    size, mean = (max(float(v), tiny) for v in (np.sqrt(np.mean(magnitudes**2)), np.mean(magnitudes)))
    return np.array([math.log(largest) + math.log(size), math.log(mean / size)])


def check_shape(shape: FloatArray, replayed: FloatArray, *, sized: bool = True) -> tuple[Note, ...]:
    """Warn of an update whose size or evenness is none that the training makes that was told.

    For Adam, which gives every number of an update nearly the same size whatever the gradient's, so that
    the labels hardly matter for both. Of SGD's, `check_update` and `size_error` say more.

    Parameters
    ----------
    shape : the client's `update_shape`
    replayed : those of replayed clients, shape (R, 2)
    sized : False for an update that was scaled by a factor that nobody knows: then evenness alone counts
    """
    apart = shape - replayed.mean(axis=0)
    away = np.abs(apart) / np.maximum(replayed.std(axis=0), _SPREAD)
    if not sized:
        away[0] = 0.0
    if away.max() <= _FARTHEST:
        return ()
    how = []
    if away[0] > _FARTHEST:
        how.append(f"{math.exp(min(apart[0], _MOST)):.3g} times as large as")
    if away[1] > _FARTHEST:
        how.append("less even than" if apart[1] < 0 else "more even than")
    return (
        Note(
            "update-unlike-replays",
            f"the output layer's update is {' and '.join(how)} those of replays of the training that was "
            "told: another --optimizer, --lr or --steps, or a defence; the counts mean little and have no "
            "bounds",
        ),
    )
