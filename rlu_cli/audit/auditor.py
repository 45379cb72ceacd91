"""One global model and its auxiliary data, ready to recover any number of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from rlu_cli.audit.annotations import Annotations, whole
from rlu_cli.audit.cache import StatisticsCache
from rlu_cli.audit.description import check_described_alike, describe_model
from rlu_cli.audit.devices import choose_device
from rlu_cli.audit.given_logits import GivenLogits
from rlu_cli.audit.history import History, constant_gradient
from rlu_cli.audit.image_source import ImageSource
from rlu_cli.audit.network import check_finite, check_same_network, read_head
from rlu_cli.audit.options import (
    AuxOptions,
    HistoryOptions,
    LogitsOptions,
    ModelOptions,
    RunOptions,
    TrainingOptions,
)
from rlu_cli.audit.progress import Reporter, silent
from rlu_cli.audit.source import Measurement, Source
from rlu_cli.audit.statistics_file import StoredStatistics, read_statistics
from rlu_cli.audit.stored_options import options_beside
from rlu_cli.audit.training import TrainingRecord, resolve_training
from rlu_cli.core.methods import get_method
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.types import Head, LocalTraining, ModelStatistics, Note, Observation, Recovery
from rlu_cli.core.variates import STATEFUL
from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.files.checkpoint import Checkpoint, read_checkpoint
from rlu_cli.files.hashing import sha256_file
from rlu_cli.files.metadata import read_sidecar


@dataclass(frozen=True)
class ClientRound:
    """What was recovered of one client, by each of the methods asked for, in their order."""

    path: Path
    sha256: str
    training: TrainingRecord
    recoveries: tuple[Recovery, ...]
    notes: tuple[Note, ...]


class Auditor:
    """Holds what is common to all clients of a round: the global model and its statistics.

    Nothing is read twice, and the passes over the auxiliary images are made only when a method needs
    them. Results don't depend on the order of the clients.

    Parameters
    ----------
    reference : path of the global checkpoint
    locals_ : paths of the local checkpoints; the metadata of the first may say what the global one leaves
        open
    aux : auxiliary images, as ``open_collection`` takes them, or None where stored statistics are enough
    aux_options : which of them are read, and how
    stats : statistics file of the global model, instead of a pass over the auxiliary images
    logits : files of logits computed elsewhere, instead of ``aux`` and an architecture
    """

    def __init__(
        self,
        reference: Path,
        locals_: Sequence[Path] = (),
        *,
        aux: Path | None = None,
        aux_options: AuxOptions | None = None,
        stats: Path | None = None,
        logits: LogitsOptions | None = None,
        model: ModelOptions | None = None,
        run: RunOptions | None = None,
        reporter: Reporter = silent,
    ) -> None:
        logits = logits or LogitsOptions()
        _check_one_source(logits, aux=aux, stats=stats)
        run = run or RunOptions()
        self.run = replace(run, device=choose_device(run.device))
        first = read_checkpoint(locals_[0]) if locals_ else None
        self.reference = read_checkpoint(reference)
        self.sha256 = sha256_file(reference)
        check_finite(self.reference.tensors, where=reference)
        self.annotations = self._annotations(first)
        aux_options = aux_options or AuxOptions()
        if aux is None and aux_options != AuxOptions():
            raise UsageError(
                "expected --aux with the flags that say how auxiliary images are read, found none: pass "
                "--aux PATH, or leave them out"
            )
        self.options = model or ModelOptions()
        self.stored = None if stats is None else self._read_stored(stats)
        if self.stored is not None:
            assert stats is not None
            self.options = options_beside(self.options, self.stored.about, stats)
        self.described = describe_model(self.options, self.annotations)
        names = self.described.class_names if self.stored is None else tuple(self.stored.about["class_names"])
        self.source: Source
        if logits.aux_logits is not None:
            self.source = GivenLogits(
                self.reference, locals_, logits, class_names=names, options=self.options
            )
        else:
            self.source = ImageSource(
                self.reference,
                aux,
                described=self.described,
                aux_options=aux_options,
                class_names=names,
                options=self.options,
                run=self.run,
                reporter=reporter,
            )
        self._cache = None if self.run.cache is None else StatisticsCache(self.run.cache)
        self._starts: dict[int | None, Measurement] = {}

    def _annotations(self, local: Checkpoint | None) -> Annotations:
        """What is written of a client's round, or of the global model alone."""
        near = self.reference if local is None else local
        metadata = {} if local is None else local.metadata
        return Annotations(metadata, self.reference.metadata, read_sidecar(near.path))

    def _read_stored(self, path: Path) -> StoredStatistics:
        stored = read_statistics(path)
        if stored.about.get("global_sha256") != self.sha256:
            raise MismatchError(
                f"expected statistics of {self.reference.path} in {path}, found those of another "
                f"global model (sha256 {str(stored.about.get('global_sha256'))[:12]}…): write them again "
                "with `rlu estimate-logits -o`"
            )
        return stored

    # What all clients share.

    @property
    def head_name(self) -> str:
        """The output layer's prefix among a checkpoint's tensors."""
        return self.source.head_name if self.stored is None else str(self.stored.about["head"])

    @cached_property
    def head(self) -> Head:
        """The global model's output layer."""
        return self._head(self.reference)

    @property
    def names(self) -> Sequence[str]:
        """Class names by output index: the checkpoint's, unless --class-order overrules its mapping."""
        return self.source.class_names if self.stored is None else self.stored.about["class_names"]

    @property
    def statistics(self) -> ModelStatistics:
        """Statistics of the global model, for a client of the batch size that its metadata says."""
        return self._start(self._annotated_batch())

    def about(self) -> dict[str, Any]:
        """How the statistics were made, for the statistics file and the report."""
        if self.stored is not None:
            return {**self.stored.about, "stats": True}
        return self._about(self.sha256, self.source.effective_batch(self._annotated_batch()))

    def _about(self, sha256: str, batch_size: int | None) -> dict[str, Any]:
        """How the statistics of the model with this digest are made."""
        return {
            "global_sha256": sha256,
            **self.source.about(),
            "batch_size": batch_size,
            "samples": self.run.samples,
            "seed": self.run.seed,
        }

    def _annotated_batch(self) -> int | None:
        return self.annotations.get("batch_size", None, whole)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Warnings about the global model and the auxiliary data so far."""
        return (*self.source.notes, *(() if self._cache is None else self._cache.notes))

    def _start(self, batch_size: int | None) -> ModelStatistics:
        """Statistics of the global model for a client of this batch size: stored ones, or measured once."""
        if self.stored is not None:
            return self.stored.statistics
        effective = self.source.effective_batch(batch_size)
        if effective not in self._starts:
            for other in self._starts.values():
                other.forget_activations()
            self._starts[effective] = self._measurement(None, effective)
        return self._starts[effective].statistics

    def _end(self, local: Checkpoint, batch_size: int) -> ModelStatistics:
        """Statistics of a local model, of which all weights are read."""
        if self.source.reads_weights:
            check_finite(local.tensors, where=local.path)
        effective = self.source.effective_batch(batch_size)
        return self._measurement(local, effective).statistics

    def _measurement(self, local: Checkpoint | None, batch_size: int | None) -> Measurement:
        """A model's measurement, with its place in the cache if there is one."""
        slot = None
        if self._cache is not None:
            slot = self._cache.slot(self.source.facts(local, batch_size), self.run)

        def about() -> dict[str, Any]:
            return self._about(self.sha256 if local is None else sha256_file(local.path), batch_size)

        return Measurement(self.source, self.run, local, batch_size, slot=slot, about=about)

    # What one client did.

    def recover(
        self,
        path: Path,
        options: TrainingOptions,
        methods: Sequence[str],
        history: HistoryOptions | None = None,
    ) -> ClientRound:
        """Recover one client's label counts by each of ``methods``.

        Where no method needs the local model's statistics, nothing is read of the local checkpoint's tensors
        but names, shapes and the output layer's numbers (files that can't be mapped are read whole).

        Raises
        ------
        MismatchError
            The local checkpoint is not of this round's network, or training values are missing.
        """
        local = read_checkpoint(path)
        annotations = self._annotations(local)
        check_described_alike(self.described, describe_model(self.options, annotations))
        record = resolve_training(options, annotations)
        chosen = [get_method(name) for name in methods]
        check_same_network(
            self._tensors(self.reference), self._tensors(local), where=(self.reference.path, path)
        )
        update = head_update(self._head(local), self.head)
        constant, notes = self._constant_gradient(
            local, record.training, annotations, options, history or HistoryOptions()
        )
        notes += self._stored_for_another_batch(record.training.batch_size)
        needs_end = any(method.needs_end(record.training) for method in chosen)
        observation = Observation(
            update=update,
            head=self.head,
            training=record.training,
            start=self._start(record.training.batch_size),
            end=self._end(local, record.training.batch_size) if needs_end else None,
            constant_gradient=constant,
            samples=self.run.samples,
            search_iterations=self.run.search_iterations,
            seed=self.run.seed,
            device=self.run.device,
        )
        recoveries = tuple(recover_labels(observation, method=method.name) for method in chosen)
        return ClientRound(path, sha256_file(path), record, recoveries, tuple(notes))

    def _stored_for_another_batch(self, batch_size: int) -> list[Note]:
        """A warning where stored statistics hold batch statistics of another batch size."""
        stored = None if self.stored is None else self.stored.about.get("batch_size")
        if stored in (None, batch_size):
            return []
        return [
            Note(
                "stats-batch-size",
                f"the stored statistics are of batches of {stored}, which matters to BatchNorm, but the "
                f"client trained with {batch_size}: pass --aux instead of --stats to have its own measured",
            )
        ]

    def _tensors(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """A checkpoint's tensors by name."""
        return checkpoint.tensors if not checkpoint.positional else self.source.tensors(checkpoint)

    def _head(self, checkpoint: Checkpoint) -> Head:
        return read_head(self._tensors(checkpoint), self.head_name, where=str(checkpoint.path))

    def _constant_gradient(
        self,
        local: Checkpoint,
        training: LocalTraining,
        annotations: Annotations,
        options: TrainingOptions,
        archived: HistoryOptions,
    ) -> tuple[Head | None, list[Note]]:
        """What the scheme adds to every gradient of the head, None where it adds nothing."""
        if training.scheme not in STATEFUL:
            return None, []
        return constant_gradient(
            History(self._tensors, self.head_name, options),
            self.head,
            training,
            client=local.path.stem,
            archived=archived,
            annotations=annotations,
        )


def _check_one_source(logits: LogitsOptions, *, aux: Path | None, stats: Path | None) -> None:
    """Refuse logits beside another source of the same, or a local model's without the global one's."""
    given = [name for name, value in (("--aux", aux), ("--stats", stats)) if value is not None]
    if logits.aux_logits is not None and given:
        raise UsageError(
            f"expected one of --aux, --stats and --aux-logits, found --aux-logits and {given[0]}: leave out "
            "either"
        )
    if logits.local_logits is not None and logits.aux_logits is None:
        raise UsageError(
            "expected --aux-logits beside --local-logits, found none: pass the global model's too"
        )
