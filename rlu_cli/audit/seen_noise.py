"""Noise on an update that nobody told of."""

from __future__ import annotations

from dataclasses import replace

from rlu_cli.audit.training import TrainingRecord
from rlu_cli.core.coarse import check_coarse, storage_resolution
from rlu_cli.core.noise import unexplained_noise
from rlu_cli.core.types import Note, Observation


def with_seen_noise(record: TrainingRecord, observation: Observation) -> tuple[TrainingRecord, list[Note]]:
    """How the client trained, with the noise that its update shows where none was told, and a note of it.

    Sparsified updates are left alone: what they lack is no noise, and the bias is among what they keep.

    Parameters
    ----------
    observation : of which the update, the head, the training and the constant gradient are looked at
    """
    if record.noise_std or record.lr_unknown:
        return record, []
    found = unexplained_noise(observation)
    if not found:
        return record, []
    coarse = check_coarse(observation.update, resolution=storage_resolution(observation))
    if any(note.code == "update-sparsified" for note in coarse):
        return record, []
    note = Note(
        "noise-seen",
        f"the output layer's update has noise of about {found:.1g} each, which no training makes (it was "
        "added, or is quantisation or another loss): bounds allow for it; if it was added, say --noise-std",
    )
    return replace(record, noise_std=found), [note]
