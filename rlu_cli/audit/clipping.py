"""Whether a client's update was clipped to a known norm."""

from __future__ import annotations

import math

from rlu_cli.core.types import Note
from rlu_cli.files.checkpoint import Checkpoint

_SLACK = 0.005
"""How far below the bound a norm may lie that was clipped to it: checkpoints round."""

_DEVIATIONS = 3.0
"""Of the norm under known noise."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def check_clipped(local: Checkpoint, reference: Checkpoint, *, clip: float, noise_std: float) -> list[Note]:
    """A warning where the update's norm is as large as clipping let it be.

        ‖Δ‖² ≈ C² + P σ²     for P numbers, clipped to C, with noise σ on each

    Then Δ was scaled down by an unknown factor min(1, C/‖Δ‖). The size of the update tells a label's share,
    so the counts are drawn towards the model's own guesses by that factor. An update of a smaller norm is
    what it would have been without clipping.

    Parameters
    ----------
    local : the whole local model
    """
    squares, count = 0.0, 0
    for name, before in reference.tensors.items():
        if before.is_floating_point() and name in local.tensors and name.rpartition(".")[2] not in _BUFFERS:
            squares += float((local.tensors[name].double() - before.double()).square().sum())
            count += before.numel()
    excess = squares - count * noise_std**2
    spread = noise_std * math.sqrt(2 * count * noise_std**2 + 4 * clip**2)
    if excess < (clip * (1 - _SLACK)) ** 2 - _DEVIATIONS * spread:
        return []
    return [
        Note(
            "update-clipped",
            f"the update's norm is {math.sqrt(max(excess, 0.0)):.3g}, as much as clipping to {clip:g} "
            "lets it be: it was scaled down by an unknown factor, so the counts are too even, and there "
            "are no bounds",
        )
    ]
