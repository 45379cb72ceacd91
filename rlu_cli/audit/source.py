"""Where a model's logits on labelled auxiliary data come from: images through a network, or a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from rlu_cli.audit.cache import Slot
from rlu_cli.audit.dense_tail import DenseLayers
from rlu_cli.audit.options import RunOptions
from rlu_cli.audit.replay import Replay
from rlu_cli.core.moments import model_statistics
from rlu_cli.core.residuals import (
    MOST_CLASSES,
    MOST_SAMPLED,
    ResidualMoments,
    residual_moments,
    residual_views,
)
from rlu_cli.core.types import Activations, FloatArray, LocalTraining, ModelStatistics, Note
from rlu_cli.core.unit_direction import unit_direction
from rlu_cli.files.checkpoint import Checkpoint


class Source(Protocol):
    """Activations of the global model, and of any local one.

    reads_weights : whether it needs all of a model's weights, not its output layer alone
    """

    reads_weights: bool

    @property
    def notes(self) -> Sequence[Note]:
        """Warnings so far."""

    @property
    def head_name(self) -> str:
        """The output layer's prefix among a checkpoint's tensors."""

    @property
    def class_names(self) -> Sequence[str]:
        """By output index."""

    @property
    def num_classes(self) -> int:
        """N."""

    def about(self) -> dict[str, Any]:
        """How activations come about: the statistics file's and the report's words for it."""

    @property
    def samples_digest(self) -> str:
        """Of the auxiliary samples with their labels."""

    def facts(self, local: Checkpoint | None, batch_size: int | None) -> dict[str, Any]:
        """All that the activations follow from, by content, as JSON values: what a cache goes by."""

    def tensors(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """A checkpoint's tensors by name."""

    def effective_batch(self, batch_size: int | None) -> int | None:
        """The batch size that changes the activations, for a client that trains with ``batch_size``."""

    def activations(self, local: Checkpoint | None, batch_size: int | None) -> Activations:
        """Of a local model, or of the global one; ``batch_size`` is an effective one."""

    def frozen(self, local: Checkpoint) -> tuple[str, ...]:
        """The network's parameters that a client's training left alone, as far as its model says."""

    def replay(
        self,
        local: Checkpoint,
        training: LocalTraining,
        batch_size: int | None,
        *,
        noise_std: float = 0.0,
        along: FloatArray | None = None,
        constant: FloatArray | None = None,
        frozen: Sequence[str] = (),
    ) -> Replay | None:
        """A client's training again on auxiliary samples, None where no network can be trained so.

        noise_std, along, frozen : see `Replay`
        constant : what the scheme adds to every gradient, as `parameters` orders them; schemes that remember
            can't be replayed without
        """

    def parameters(self, checkpoint: Checkpoint) -> FloatArray:
        """All parameters of the network in one vector.

        Raises
        ------
        MismatchError
            Some are missing from the file, or there is no network.
        """

    def dense_layers(self) -> DenseLayers:
        """The global model's dense layers before the head, found in a pass over the samples."""

    def by_name(self, parameters: FloatArray) -> Mapping[str, Tensor]:
        """A vector of all parameters, as `parameters` orders them, by the names that checkpoints have."""

    def replay_cost(self, training: LocalTraining) -> float:
        """Floating-point operations of one replay, infinite where there is none."""


class Measurement:
    """One model on the auxiliary data. Nothing is computed before it is asked for.

    local : a local model, None for the global one
    batch_size : an effective one
    has_unit : whether the direction that stands for a missing bias is worked out
    slot : where the statistics are kept, if anywhere
    about : what is written beside them
    """

    def __init__(
        self,
        source: Source,
        run: RunOptions,
        local: Checkpoint | None,
        batch_size: int | None,
        has_unit: bool = False,
        *,
        slot: Slot | None = None,
        about: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._source = source
        self._run = run
        self._local = local
        self._batch_size = batch_size
        self._has_unit = has_unit
        self._slot = slot
        self._about = about

    @cached_property
    def activations(self) -> Activations:
        """Logits and embeddings of every auxiliary sample: a pass over them."""
        return self._source.activations(self._local, self._batch_size)

    @property
    def residuals(self) -> ResidualMoments:
        """What single samples do to the bias."""
        kept = self.statistics.residuals
        return self._residuals if kept is None else kept

    @cached_property
    def _residuals(self) -> ResidualMoments:
        return self.residuals_along(None)

    def residuals_along(self, direction: FloatArray | None) -> ResidualMoments:
        """The same, with the weight's view along a direction of the embedding, shape (L,)."""
        found = self.activations
        values = residual_views(found, direction)
        return residual_moments(values, found.labels, views=1 if direction is None else 2)

    def forget_activations(self) -> None:
        """Free their memory; they are computed again should they be asked for."""
        self.__dict__.pop("activations", None)

    @cached_property
    def statistics(self) -> ModelStatistics:
        """What the recovery methods need to know of them, from the cache if it is there."""
        kept = None if self._slot is None else self._slot.read()
        if kept is not None:
            return kept
        found = model_statistics(
            self.activations.logits,
            self.activations.embeddings,
            self.activations.labels,
            self._source.num_classes,
            samples=self._run.samples,
            seed=self._run.seed,
            device=self._run.device,
        )
        shared = self._local is None or self._slot is not None
        if shared and found.num_classes <= MOST_CLASSES:  # else when a method asks for them
            found = replace(found, residuals=self._residuals)
        if found.num_classes <= MOST_SAMPLED:
            known = self.activations
            found = replace(found, samples=Activations(known.logits, None, known.labels))
        embeddings = self.activations.embeddings
        if self._has_unit and embeddings is not None:
            found = replace(found, unit=unit_direction(embeddings))
        if self._slot is not None:
            self._slot.write(found, self._about())
        return found
