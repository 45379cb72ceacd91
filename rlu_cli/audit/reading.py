"""A client's update as methods are to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlu_cli.audit.local_model import LocalModel, open_local
from rlu_cli.audit.training import TrainingRecord
from rlu_cli.audit.updates import enlarged
from rlu_cli.core.types import Clipping, FloatArray, Head, ModelStatistics, Note, Observation


@dataclass(frozen=True, eq=False)
class Reading:
    """What is known of an update, as it was sent or as it is taken to have been. Compared by identity.

    opened : the local model
    record : how the client trained, with the noise that lies on this update
    noise_told : see `Observation`
    scaled, clipping : likewise
    constant : what the scheme adds to every gradient of the output layer, None where nothing
    whole_constant : the same of all parameters, None too where the archive holds it of the output layer alone
    magnified : see `Observation`
    notes : what is to be said of it
    """

    opened: LocalModel
    record: TrainingRecord
    noise_told: bool = True
    scaled: bool = False
    clipping: Clipping | None = None
    constant: Head | None = None
    whole_constant: Callable[[], FloatArray | None] = lambda: None
    magnified: float = 1.0
    notes: tuple[Note, ...] = ()

    def observation(self, start: ModelStatistics, end: ModelStatistics | None = None) -> Observation:
        """What methods may look at of it, with both models' statistics."""
        return Observation(
            update=self.opened.update,
            head=self.opened.head,
            training=self.record.training,
            start=start,
            end=end,
            constant_gradient=self.constant,
            rounding=self.opened.rounding,
            magnified=self.magnified,
            noise_std=self.record.noise_std,
            noise_told=self.noise_told,
            scaled=self.scaled,
            clipping=self.clipping,
            notes=self.notes,
        )

    def noting(self, *notes: Note) -> Reading:
        """With more to be said of it."""
        return replace(self, notes=(*self.notes, *notes))

    def enlarged(self, factor: float, head_name: str) -> Reading:
        """As it was if ``factor`` of the update was sent, with noise that grows alike."""
        opened = self.opened
        whole = enlarged(opened.weights(), opened.reference, factor)
        again = open_local(whole, opened.reference, "weights", head_name)
        again = replace(again, notes=opened.notes, rounding=opened.rounding / factor)
        noisy = replace(self.record, noise_std=self.record.noise_std / factor)
        return replace(self, opened=again, record=noisy, magnified=self.magnified / factor)
