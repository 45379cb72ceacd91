"""A client's recovery again, from what was measured already, under other training values."""

from __future__ import annotations

from dataclasses import replace

from rlu_cli.audit.replay import with_training
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.sensitivity import Moved, sensitivity
from rlu_cli.core.types import LocalTraining, Observation, Recovery


def client_sensitivity(observation: Observation, recovery: Recovery) -> tuple[Moved, ...]:
    """How one method's counts move. Only replays are trained anew: no model is measured again.

    An update that is read at its own size stays so: what is asked is what a wrong value does to the counts,
    not whether it would be noticed.
    """
    if "update_divided_by" not in recovery.diagnostics:
        observation = replace(observation, rescaled=None)

    def again(training: LocalTraining) -> Recovery:
        return recover_labels(with_training(observation, training), method=recovery.method)

    return sensitivity(recovery, observation.training, again)
