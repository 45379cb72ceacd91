"""Whether one step's counts come out whole, as they must where the update is what training made it."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.error_model import ResidualModel, deviations, fit
from rlu_cli.core.gradients import normalised_update
from rlu_cli.core.noise import column_noise
from rlu_cli.core.residuals import MOST_SAMPLED
from rlu_cli.core.schemes import pace
from rlu_cli.core.types import Note, Observation

_FAR, _SURELY = 0.25, 8.0
"""Of a sample, and standard deviations: right clients of early models are 0.00 to 0.10 off."""


def off_whole(observation: Observation, *, exact: bool = False) -> float | None:
    """How far one step's counts are from whole numbers, where that is too far for their error; else None.

        max_n |B ẑ_n − ⌊B ẑ_n⌉|  >  max(1/4, 8 sd_n)

    with ẑ and sd as `gls` has them. On a model that hardly tells classes apart ẑ is known to a hundredth of a
    sample, and B z is whole. An update that is 5 % too large draws B ẑ away from what the model itself makes
    of B samples by 5 %, and few of them stay whole. None too of several steps, of updates of any size or with
    known noise, of more than 20 classes and without bias. Noise that can't change a count is part of sd.

    Parameters
    ----------
    observation : of an update that was neither sparsified nor quantised (`coarsening`)
    exact : whether single samples were told apart in it, at its size: then what misfits is no noise
    """
    residuals, training = observation.start.residuals, observation.training
    known = observation.scaled or observation.noise_std > 0
    if training.steps > 1 or training.optimizer != "sgd" or known or observation.head.bias is None:
        return None
    if residuals is None or observation.head.num_classes > MOST_SAMPLED or observation.update.bias is None:
        return None
    total = training.samples
    found = fit(ResidualModel([(1.0, residuals)], training), normalised_update(observation)[:-1])
    counts = total * found.solution.z
    off = np.abs(counts - np.rint(counts))
    if off.max() <= _FAR:
        return None
    birge = 1.0 if exact else found.birge
    spread = birge * total * deviations(found.model, found.solution.z)
    unseen = total * column_noise(observation) / pace(training)
    far = off > np.maximum(_FAR, _SURELY * np.hypot(spread, unseen))
    return float(off[far].max()) if far.any() else None


def check_whole(off: float | None) -> list[Note]:
    """A warning of counts that aren't whole, so many samples off."""
    if off is None:
        return []
    return [
        Note(
            "counts-not-whole",
            f"counts are whole numbers, and the best are up to {off:.2g} off, far more than their error: the "
            "update is of another size (clipping, another learning rate or batch size), or its loss or the "
            "client's images are other than told; there are no bounds",
        )
    ]
