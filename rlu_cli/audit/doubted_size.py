"""A single step with noise, or made coarser, whose update is of another size than training makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlu_cli.audit.reading import Reading
from rlu_cli.audit.seen_noise import with_seen_noise
from rlu_cli.core.checks import check_damaged_size
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.residuals import MOST_SAMPLED
from rlu_cli.core.types import Activations, ModelStatistics
from rlu_cli.core.update_size import damaged_size_error


def of_any_size(
    sent: Reading, start: ModelStatistics, samples: Callable[[], Activations], *, seed: int
) -> Reading | None:
    """The update as one of any size, with a note; None where its size isn't doubted, or can't be told.

    Noise that can't change a count is looked at too: it may hide that the update was scaled.

    Parameters
    ----------
    start : the global model's statistics
    samples : makes the auxiliary samples under it, where noise is seen
    """
    record, training = sent.record, sent.record.training
    single = training.steps == 1 and training.optimizer == "sgd"
    if not single or record.lr_unknown or start.num_classes > MOST_SAMPLED:
        return None
    seen = with_seen_noise(sent, start, sized=False)
    observation = replace(seen.observation(start), seed=seed)
    if not observation.noise_std and not coarsening(observation).any:
        return None
    notes = check_damaged_size(damaged_size_error(observation, samples()))
    return replace(seen, scaled=True).noting(*notes) if notes else None
