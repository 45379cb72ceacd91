"""The models of a round on the auxiliary data: each measured once, and only when a method needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlu_cli.audit.cache import Cache, KeptFits
from rlu_cli.audit.dense_tail import DenseLayers
from rlu_cli.audit.network import check_finite
from rlu_cli.audit.options import RunOptions
from rlu_cli.audit.source import Measurement, Source
from rlu_cli.audit.statistics_file import SAMPLES, StoredStatistics
from rlu_cli.core.embedding import weight_direction
from rlu_cli.core.residuals import ResidualPath
from rlu_cli.core.types import FloatArray, Head, LocalTraining, ModelStatistics, Note
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import Checkpoint
from rlu_cli.files.hashing import CHECKSUM, sha256_tensors
from rlu_cli.files.shards import sha256_checkpoint


class Measurements:
    """What the global model and its clients' models do with the auxiliary data.

    Clients of different batch sizes need different passes where BatchNorm looks at batches.

    Parameters
    ----------
    reference, sha256 : the global checkpoint and its digest
    stored : statistics of the global model from a file, which need no pass
    has_samples : whether there is auxiliary data to pass at all
    head : the global model's output layer, read when it is asked for
    """

    def __init__(
        self,
        source: Source,
        run: RunOptions,
        reference: Checkpoint,
        sha256: str,
        *,
        stored: StoredStatistics | None,
        has_samples: bool,
        head: Callable[[], Head],
    ) -> None:
        self.stored, self.has_samples = stored, has_samples
        self._source, self._run, self._head = source, run, head
        self._reference, self._sha256 = reference, sha256
        self._cache = None if run.cache is None else Cache(run.cache)
        self._dense: DenseLayers | None = None
        self._starts: dict[int | None, Measurement] = {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """Warnings of the cache so far."""
        return () if self._cache is None else tuple(self._cache.notes)

    def about(self, sha256: str, batch_size: int | None) -> dict[str, Any]:
        """How the statistics of the model with this digest are made."""
        return {
            "global_sha256": sha256,
            "key": self._reference.key,
            **self._source.about(),
            "batch_size": batch_size,
            "samples": self._run.samples,
            "seed": self._run.seed,
        }

    def start(self, batch_size: int | None) -> ModelStatistics:
        """Statistics of the global model for a client of this batch size: stored ones, or measured once."""
        if self.stored is not None:
            return self.stored.statistics
        return self.measured_start(batch_size).statistics

    def batch_matters(self, batch_size: int | None) -> bool:
        """Whether the samples of a batch share statistics, in the global model's pass or a client's."""
        if self.stored is not None:
            return self.stored.about.get("batch_size") is not None
        return self._source.effective_batch(batch_size) is not None

    def measured_start(self, batch_size: int | None) -> Measurement:
        """The global model for a client of this batch size, measured once."""
        effective = self._source.effective_batch(batch_size)
        if effective not in self._starts:
            for other in self._starts.values():
                other.forget_activations()
            self._starts[effective] = self._measurement(None, effective)
        return self._starts[effective]

    def end(self, local: Checkpoint, batch_size: int) -> Measurement:
        """A local model, of which all weights are read."""
        if self._source.reads_weights:
            check_finite(local.tensors, where=local.path)
        return self._measurement(local, self._source.effective_batch(batch_size))

    def residuals(
        self,
        end: Measurement | None,
        local: Checkpoint,
        training: LocalTraining,
        *,
        noise_std: float,
        needs_samples: bool,
        compressed: bool = False,
        constant: FloatArray | None = None,
        frozen: Sequence[str] = (),
    ) -> ResidualPath:
        """Single samples' residuals on a client's way; ``local`` is the whole model where ``end`` is.

        Parameters
        ----------
        compressed : whether the update was: then samples are needed with embeddings, where they can be had
        constant, frozen : see `Source.replay`
        """
        start = self.start(training.batch_size).residuals
        if start is None:  # many classes, or an old statistics file
            start = self.measured_start(training.batch_size).residuals
        along = None
        if noise_std and (self.stored is None or end is not None):  # else no sample is known by itself
            along = _direction(self.start(training.batch_size), None if end is None else end.statistics)
        if along is not None:
            start = self.measured_start(training.batch_size).residuals_along(along)
        samples = self.start(training.batch_size).samples
        embedded = along is not None or (compressed and self.has_samples)
        if needs_samples and (samples is None or embedded):  # an old statistics file, or embeddings
            samples = self.measured_start(training.batch_size).activations
        if end is None:
            return ResidualPath(start, samples=samples, along=along)
        effective = self._source.effective_batch(training.batch_size)
        replay = self._source.replay(
            local,
            training,
            effective,
            noise_std=noise_std,
            along=along,
            constant=constant,
            frozen=frozen,
        )
        last = end.residuals if along is None else end.residuals_along(along)
        return ResidualPath(start, last, replay, samples, along)

    def dense_layers(self, batch_size: int) -> DenseLayers:
        """The dense layers before the head of the global model, from the cache if they are there."""
        if self._dense is None:
            store, facts = self.kept_fits(batch_size), {"fit": "dense layers"}
            self._dense = None if store is None else store.read(facts, DenseLayers.from_arrays)
            if self._dense is None:
                self._dense = self._source.dense_layers()
                if store is not None:
                    store.write(facts, self._dense.arrays())
        return self._dense

    def _measurement(self, local: Checkpoint | None, batch_size: int | None) -> Measurement:
        """A model's measurement, with its place in the cache if there is one."""
        self._check_samples()
        has_unit = local is None and self._head().bias is None
        slot = None
        if self._cache is not None:  # the same activations have another entry where the direction is in it
            facts = {**self._source.facts(local, batch_size), "unit": has_unit}
            slot = self._cache.slot(facts, self._run)

        def about() -> dict[str, Any]:
            return self.about(self._sha256 if local is None else sha256_checkpoint(local.path), batch_size)

        return Measurement(self._source, self._run, local, batch_size, has_unit, slot=slot, about=about)

    def _check_samples(self) -> None:
        """Refuse samples beside stored statistics that are others than those that these are of.

        Raises
        ------
        MismatchError
        """
        stored = None if self.stored is None else self.stored.about.get(SAMPLES)
        if stored is not None and stored != self._source.samples_digest:
            raise MismatchError(
                "expected the auxiliary images that the statistics of --stats are of, in the same order of "
                "classes, found others: pass the same --aux with the same flags, or leave --stats out"
            )

    def kept_fits(self, batch_size: int) -> KeptFits | None:
        """Where fits to the global model are kept, for clients of this batch size."""
        if self._cache is None:
            return None

        def facts() -> dict[str, Any]:
            head = {"head_weight": self._head().weight, "head_bias": self._head().bias}
            known = {name: torch.from_numpy(part) for name, part in head.items() if part is not None}
            found: dict[str, Any] = {"head": sha256_tensors(known)}
            if self.stored is not None:
                found["statistics"] = self.stored.about[CHECKSUM]
            if self.stored is None or self.has_samples:
                found |= self._source.facts(None, self._source.effective_batch(batch_size))
            return found

        return KeptFits(self._cache, facts, self._run)


def _direction(start: ModelStatistics, end: ModelStatistics | None) -> FloatArray | None:
    """Along which the weight is looked at, None where embeddings are unknown."""
    known = [found.embedding_mean for found in (start, end) if found is not None]
    return None if known[0] is None or known[-1] is None else weight_direction(known[0])
