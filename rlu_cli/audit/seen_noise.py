"""Noise on an update that nobody told of."""

from __future__ import annotations

from dataclasses import replace

from rlu_cli.audit.reading import Reading
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.noise import unexplained_noise
from rlu_cli.core.rate_likelihood import least_scale
from rlu_cli.core.types import ModelStatistics, Note


def with_seen_noise(reading: Reading, start: ModelStatistics, *, sized: bool = True) -> Reading:
    """The update with the noise that it shows where none was told, and a note of it.

    Sparsified updates are left alone: what they lack is no noise, and the bias is among what they keep.

    Parameters
    ----------
    start : the global model's statistics
    sized : whether the update has its size; not where the learning rate is unknown, or its clipping
    """
    record = reading.record
    if record.noise_std:
        return reading
    observation = reading.observation(start)
    found = unexplained_noise(observation, least_scale=None if sized else least_scale(observation))
    if not found or coarsening(observation).sparsified:
        return reading
    note = Note(
        "noise-seen",
        f"the output layer's update has noise of about {found:.1g} each, which no training makes (it was "
        "added, or is quantisation or another loss): bounds allow for it; if it was added, say --noise-std",
    )
    return replace(reading, record=replace(record, noise_std=found), noise_told=False).noting(note)
