"""Whether a client's update was clipped to a known norm, and to which part of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlu_cli.audit.network import check_finite
from rlu_cli.audit.reading import Reading
from rlu_cli.audit.seen_noise import with_seen_noise
from rlu_cli.audit.updates import is_trained
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.learning_rate import estimate_learning_rate
from rlu_cli.core.misfit import motion
from rlu_cli.core.rate_likelihood import LearningRate, stands_still
from rlu_cli.core.scale_levels import scale_level
from rlu_cli.core.types import Activations, Clipping, ModelStatistics, Note, Observation
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import Checkpoint

_SLACK = 0.005
"""How far below the bound a norm may lie that was clipped to it: checkpoints round."""

_DEVIATIONS = 3.0
"""Of the norm under known noise."""

_IMPOSSIBLE = 2.0
"""How many times as large as clipping lets it be a norm is that was not clipped: the variance of noise that
is seen is known to a factor of two or so."""

_SHARP, _KNOWN = 1.05, 4.0
"""Upper over lower end of the factor's interval: up to which bounds of the counts need not know of it, and up
to which counts are better with it than without."""

_VAGUE = 0.16
"""Standard deviation of the factor's logarithm beyond which made-up clients tell as much of it."""


@dataclass(frozen=True)
class UpdateNorm:
    """How large an update is that was clipped to a norm C before noise was added and small numbers left out.

        ‖Δ‖² ≈ C² + P σ²,    or less by up to Z min |Δ|²

    for P numbers, with noise σ on each, of which the smallest Z were not sent, if clipping was active. Then Δ
    was scaled down by a factor min(1, C/‖Δ‖) that nobody tells. An update of a smaller norm is what it would
    have been without clipping; one of a larger norm was not clipped to C.

    squares : ‖Δ‖²
    count : P
    hidden : Z min |Δ|²
    """

    squares: float
    count: int
    hidden: float = 0.0

    def without(self, noise_std: float) -> float:
        """The norm without the noise."""
        return math.sqrt(max(self.squares - self.count * noise_std**2, 0.0))

    def reaches(self, clip: float, noise_std: float) -> bool:
        """Whether it is as large as clipping to ``clip`` let it be, or larger."""
        excess = self.squares - self.count * noise_std**2
        spread = noise_std * math.sqrt(2 * self.count * noise_std**2 + 4 * clip**2)
        return excess + self.hidden >= (clip * (1 - _SLACK)) ** 2 - _DEVIATIONS * spread

    def exceeds(self, clip: float, noise_std: float) -> bool:
        """Whether it is far larger than that."""
        return math.sqrt(self.squares) > _IMPOSSIBLE * math.hypot(clip, noise_std * math.sqrt(self.count))


def update_norm(local: Checkpoint, reference: Checkpoint) -> UpdateNorm:
    """The norm of all that was trained.

    Parameters
    ----------
    local : the whole local model

    Raises
    ------
    MismatchError
        Numbers that aren't finite: their norm is none, and no comparison with the bound would hold.
    """
    check_finite(local.tensors, where=local.path)
    squares, count, zeros, least = 0.0, 0, 0, math.inf
    for name, before in reference.tensors.items():
        if name in local.tensors and is_trained(name, before):
            each = (local.tensors[name].double() - before.double()).square()
            squares += float(each.sum())
            count += each.numel()
            sent = each[each > 0]
            zeros += each.numel() - sent.numel()
            least = min(least, float(sent.min())) if sent.numel() else least
    return UpdateNorm(squares, count, zeros * least if zeros and math.isfinite(least) else 0.0)


def told_clipping(
    sent: Reading, reference: Checkpoint, start: ModelStatistics
) -> tuple[Reading, float | None]:
    """The update, and its norm without noise where it is as large as the clipping that was told let it be.

    Where it is far larger, and neither noise that nobody told of nor quantisation made it so, it is read as
    if nothing had been said of clipping, with a note.

    Parameters
    ----------
    reference : the whole global model
    start : its statistics
    """
    clip, noise_std = sent.record.clip, sent.record.noise_std
    if clip is None:
        return sent, None
    norm = update_norm(sent.opened.weights(), reference)
    if not norm.reaches(clip, noise_std):
        return sent, None
    if (
        not norm.exceeds(clip, noise_std)
        or coarsening(sent.observation(start)).quantised
        or not norm.exceeds(clip, with_seen_noise(sent, start, sized=False).record.noise_std)
    ):
        return sent, norm.without(noise_std)
    note = Note(
        "clip-exceeded",
        f"the update's norm is {math.sqrt(norm.squares):.3g}, and clipping to {clip:g} can't have left that: "
        "the bound or the noise is another one, or it was put on single gradients or layers, or the files "
        "are of different rounds; the update is read as if it hadn't been clipped",
    )
    return replace(sent, record=replace(sent.record, clip=None)).noting(note), None


def clip_factor(observation: Observation, start: Activations, end: Activations | None) -> LearningRate | None:
    """c of an update c Δ, with its interval; None where the update doesn't tell.

    To the head an update scaled by c is one at c times the learning rate, which `estimate_learning_rate`
    finds where the model hardly moves and schemes add nothing to its gradients.

    Parameters
    ----------
    observation : of the update as it was sent
    start, end : single samples under the global and, for several steps, the local model, with embeddings
    """
    training = observation.training
    if observation.constant_gradient is not None or training.weight_decay:
        return None
    moved = motion(observation.start, observation.end) or 0.0
    try:
        found = estimate_learning_rate(observation, start, end)
    except MismatchError:  # too few auxiliary samples, or no embeddings
        return None
    if not stands_still(observation, moved / found.scale):
        return None
    found = found.widened(moved / found.scale)
    if found.spread > _KNOWN or found.low > 1.0:
        return None
    return replace(found, scale=min(found.scale, 1.0))


@dataclass(frozen=True)
class Clipped:
    """An update that was clipped.

    norm, clip : its own, and the bound
    found : c and its interval, None where the update doesn't tell
    head_name : the output layer's
    """

    norm: float
    clip: float
    found: LearningRate | None
    head_name: str

    @property
    def sharp(self) -> bool:
        """Whether the factor is known well enough for any bounds on the counts."""
        return self.found is not None and self.found.spread <= _SHARP

    def whole(self, sent: Reading) -> Reading:
        """For methods that take an update to be whole: as large as it was, as far as it tells."""
        found = self.found
        if found is None:
            unknown = "by an unknown factor, so the counts are too even, and there are no bounds"
            if sent.record.lr_unknown and sent.record.training.optimizer == "sgd":
                unknown = (
                    "by an unknown factor, which is part of the learning rate found; there are no bounds"
                )
            return replace(sent, scaled=True).noting(Note("update-clipped", f"{self._said} {unknown}"))
        read = f"{self._estimated}, and is read as if it hadn't been"
        note = Note("clip-estimated", read)
        if not self.sharp:
            note = Note("update-clipped", f"{read}; that is too vague for bounds")
        return replace(sent.enlarged(found.scale, self.head_name), scaled=not self.sharp).noting(note)

    def simulated(self, sent: Reading) -> Reading:
        """For methods that learn from clients of theirs, which are clipped as this one was.

        A factor that is nearly known from several steps is divided by, theirs as well, with as large errors.
        What one step tells of it `regression` sees by itself.
        """
        found, clipping = self.found, Clipping(self.clip, sent.record.noise_std)
        if found is None or sent.record.training.steps == 1 or found.deviation > _VAGUE:
            alike = "by an unknown factor, and so are those of the clients that the counts are learnt from"
            note = Note("clip-simulated", f"{self._said} {alike}")
            return replace(sent, scaled=True, clipping=clipping).noting(note)
        clipping = replace(clipping, deviation=scale_level(found.deviation))
        note = Note("clip-estimated", f"{self._estimated}, and is read as if it hadn't been")
        whole = sent.enlarged(found.scale, self.head_name)
        return replace(whole, scaled=True, clipping=clipping).noting(note)

    @property
    def _said(self) -> str:
        reached = f"as much as clipping to {self.clip:g} lets it be: it was scaled down"
        if self.norm < self.clip * (1 - _SLACK):
            reached = (
                f"and but for its noise, or for what wasn't sent, as much as clipping to {self.clip:g} lets "
                "it be: it was scaled down"
            )
        return f"the update's norm is {self.norm:.3g}, {reached}"

    @property
    def _estimated(self) -> str:
        found = self.found
        assert found is not None
        return (
            f"{self._said} to about {found.scale:.3g} of itself (95 %: {found.low:.3g} to {found.high:.3g}), "
            "as the output layer's weights say"
        )
