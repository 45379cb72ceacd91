"""One global model and its auxiliary data, ready to recover any number of its clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from rlu_cli.audit.annotations import Annotations, whole
from rlu_cli.audit.client_round import ClientRound, OpenedRound, recovered
from rlu_cli.audit.description import check_described_alike, describe_model
from rlu_cli.audit.devices import choose_device
from rlu_cli.audit.given_logits import GivenLogits
from rlu_cli.audit.history import History, constant_gradient, unstack
from rlu_cli.audit.ignored_flags import refuse_ignored
from rlu_cli.audit.image_source import ImageSource
from rlu_cli.audit.learning_rate import with_estimated_rate
from rlu_cli.audit.local_model import layer_head, open_local
from rlu_cli.audit.measurements import Measurements
from rlu_cli.audit.network import check_finite
from rlu_cli.audit.observer import Observer
from rlu_cli.audit.options import (
    AuxOptions,
    HistoryOptions,
    LogitsOptions,
    ModelOptions,
    RunOptions,
    TrainingOptions,
)
from rlu_cli.audit.progress import Reporter, silent
from rlu_cli.audit.reading import Reading
from rlu_cli.audit.replay import with_training
from rlu_cli.audit.source import Measurement, Source
from rlu_cli.audit.statistics_file import SAMPLES, StoredStatistics, read_statistics
from rlu_cli.audit.stored_options import options_beside
from rlu_cli.audit.training import resolve_training
from rlu_cli.audit.updates import update_kind
from rlu_cli.core.checks import check_sign
from rlu_cli.core.gradients import normalised_update
from rlu_cli.core.methods import Method
from rlu_cli.core.types import FloatArray, Head, LocalTraining, ModelStatistics, Note, Observation
from rlu_cli.core.variates import STATEFUL
from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.files.checkpoint import Checkpoint, read_checkpoint
from rlu_cli.files.metadata import read_sidecar
from rlu_cli.files.model_config import ModelConfig, read_config
from rlu_cli.files.shards import sha256_checkpoint
from rlu_cli.files.state_dict import join_weight_norm


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
        self.options = self._asked = model or ModelOptions()
        first = self._read(locals_[0]) if locals_ else None
        self.reference = self._read(reference, alone=first is None)
        self.sha256 = sha256_checkpoint(reference)
        check_finite(self.reference.tensors, where=reference)
        self.config = read_config(reference)
        self.annotations = self._annotations(first, self._config_beside(first))
        aux_options = aux_options or AuxOptions()
        if aux is None and aux_options != AuxOptions():
            raise UsageError(
                "expected --aux with the flags that say how auxiliary images are read, found none: pass "
                "--aux PATH, or leave them out"
            )
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
        self._reporter = reporter
        self.measured = Measurements(
            self.source,
            self.run,
            self.reference,
            self.sha256,
            stored=self.stored,
            has_samples=aux is not None or logits.aux_logits is not None,
            head=lambda: self.head,
        )
        self._observer = Observer(
            self.source,
            self.measured,
            self.run,
            reference=self.reference,
            named=self._named,
            head_name=lambda: self.head_name,
        )

    def _read(self, path: Path, *, alone: bool = False) -> Checkpoint:
        """A checkpoint, under the key asked for; of two files, one may hold its weights plainly."""
        return read_checkpoint(path, key=self.options.key, key_optional=not alone)

    def _annotations(self, local: Checkpoint | None, config: ModelConfig) -> Annotations:
        """What is written of a client's round, or of the global model alone."""
        near = self.reference if local is None else local
        metadata = {} if local is None else local.metadata
        return Annotations(metadata, self.reference.metadata, read_sidecar(near.path), config.values)

    def _config_beside(self, local: Checkpoint | None) -> ModelConfig:
        """The global model's ``config.json``, else this client's own: another client's says nothing of it."""
        return self.config if local is None or self.config.path is not None else read_config(local.path)

    def _read_stored(self, path: Path) -> StoredStatistics:
        stored = read_statistics(path)
        if stored.about.get("global_sha256") != self.sha256:
            raise MismatchError(
                f"expected statistics of {self.reference.path} in {path}, found those of another "
                f"global model (sha256 {str(stored.about.get('global_sha256'))[:12]}…): write them again "
                "with `rlu estimate-logits -o`"
            )
        key = stored.about.get("key")
        if key != self.reference.key:
            raise MismatchError(
                f"expected the weights that the statistics in {path} are of ({_under(key)}), found those "
                f"{_under(self.reference.key)}: pass the same --key, or write the statistics again"
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
        return layer_head(self._named(self.reference), self.head_name)

    @property
    def names(self) -> Sequence[str]:
        """Class names by output index: the checkpoint's, unless --class-order overrules its mapping."""
        return self.source.class_names if self.stored is None else self.stored.about["class_names"]

    @property
    def model_sources(self) -> dict[str, str]:
        """Who said what is known of the network and of its inputs: flag, stats, local, …"""
        names = ("arch", "normalize", "image_size", "class_names")
        sources = {name: self.annotations.sources[name] for name in names if name in self.annotations.sources}
        if sources.get("arch") == "config" and not str(self.described_inputs()["arch"]).startswith("timm:"):
            del sources["arch"]  # it named what can't be built
        taken = [
            name for name, source in sources.items() if source == "flag" and not getattr(self._asked, name)
        ]
        return {**sources, **dict.fromkeys(taken, "stats")}

    @property
    def statistics(self) -> ModelStatistics:
        """Statistics of the global model, for a client of the batch size that its metadata says."""
        return self.measured.start(self._annotated_batch())

    def described_inputs(self) -> dict[str, Any]:
        """The network and the auxiliary data, for the report; the same whatever batches clients had."""
        return self.source.about() if self.stored is None else self.stored.about

    def about(self) -> dict[str, Any]:
        """How the statistics were made, for the statistics file."""
        batch_size = self.source.effective_batch(self._annotated_batch())
        return {**self.measured.about(self.sha256, batch_size), SAMPLES: self.source.samples_digest}

    def _annotated_batch(self) -> int | None:
        return self.annotations.get("batch_size", None, whole)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Warnings about the global model and the auxiliary data so far."""
        return (*_ignored(self.config), *self.source.notes, *self.measured.notes)

    # What one client did.

    def refuse_ignored(
        self, paths: Iterable[Path], options: TrainingOptions, history: HistoryOptions
    ) -> None:
        """Refuse flags that none of these clients takes; see `refuse_ignored`."""
        locals_ = map(self._read, paths)
        refuse_ignored(
            options, history, (self._annotations(local, self._config_beside(local)) for local in locals_)
        )

    def recover(
        self,
        path: Path,
        options: TrainingOptions,
        methods: Sequence[str],
        history: HistoryOptions | None = None,
    ) -> ClientRound:
        """Recover one client's label counts by each of ``methods``.

        Where no method needs the local model's statistics, nothing is read of the local checkpoint's tensors
        but names, shapes and the output layer's numbers, and for single samples those of the dense layers
        before it (files that can't be mapped are read whole, and so are all for a norm or a history).

        Raises
        ------
        MismatchError
            The local checkpoint is not of this round's network, or training values are missing.
        """
        return next(self.recover_each([path], options, methods, history))

    def recover_each(
        self,
        paths: Iterable[Path],
        options: TrainingOptions,
        methods: Sequence[str],
        history: HistoryOptions | None = None,
    ) -> Iterator[ClientRound]:
        """`recover` of one client after the other; what comes before one that can't be recovered is there."""
        archived = history or HistoryOptions()
        return recovered(self._open(path, options, methods, archived) for path in paths)

    def _open(
        self, path: Path, options: TrainingOptions, methods: Sequence[str], history: HistoryOptions
    ) -> OpenedRound:
        """What a client's counts are recovered from, and how."""
        local = self._read(path)
        self._check_key(local)
        config = self._config_beside(local)
        annotations = self._annotations(local, config)
        check_described_alike(self.described, describe_model(self.options, annotations))
        record = resolve_training(options, annotations, may_estimate=True)
        kind = update_kind(options.update, annotations)
        opened = open_local(self._named(local), self._named(self.reference), kind, self.head_name)
        of = (local, record.training, annotations, options, history)
        found, notes = self._constant_gradient(*of)
        constant = None if found is None else unstack(found, self.head)
        notes += self._stored_for_another_batch(record.training.batch_size)
        sent = Reading(
            opened, record, constant=constant, whole_constant=cache(partial(self._whole_constant, *of))
        )
        read = self._observer.readings(sent, methods)
        chosen = [method for method, _ in read]
        methods_of: dict[Reading, list[Method]] = {}
        for method, reading in read:
            methods_of.setdefault(reading, []).append(method)
        observed = {reading: self._observer.observe(reading, those) for reading, those in methods_of.items()}
        observations = [observed[reading][0] for _, reading in read]
        if record.lr_unknown:  # then all methods read alike
            training, note = self._estimated_rate(*observed[read[0][1]])
            observations = [with_training(observation, training) for observation in observations]
            record = record.with_rates(training)
            notes.append(note)
        if kind == "delta" and record.training.optimizer == "sgd":
            first = observations[0]
            notes += check_sign(normalised_update(first), first.start.confidence)
        several = record.training.steps > 1
        slow = any(method.needs_samples or (method.needs_residuals and several) for method in chosen)
        return OpenedRound(
            path=path,
            training=record,
            notes=(*(() if config is self.config else _ignored(config)), *opened.notes, *notes),
            update=kind,
            observations=tuple(observations),
            methods=tuple(chosen),
            report=self._reporter if slow else silent,
        )

    def _estimated_rate(
        self, observation: Observation, local: Checkpoint, end: Measurement | None
    ) -> tuple[LocalTraining, Note]:
        """The client's training with the learning rate found; see `with_estimated_rate`."""
        training = observation.training
        samples = self.measured.measured_start(training.batch_size).activations
        if end is None:
            return with_estimated_rate(observation, samples, None, None)
        effective, frozen = self.source.effective_batch(training.batch_size), self.source.frozen(local)
        replay = self.source.replay(local, training, effective, frozen=frozen)
        return with_estimated_rate(observation, samples, end.activations, replay)

    def _check_key(self, local: Checkpoint) -> None:
        key = self.options.key
        if key is not None and self.reference.key is None and local.key is None:
            raise MismatchError(
                f"expected tensors under the key {key!r} in {self.reference.path} or {local.path}, found "
                "nothing nested in either: leave out --key"
            )

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

    def _named(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with its tensors by name; only positional ones need the source for that."""
        if not checkpoint.positional:
            return checkpoint
        named = dict(self.source.tensors(checkpoint))
        return replace(checkpoint, tensors=join_weight_norm(named)[0], unjoined=named)

    def _constant_gradient(
        self,
        local: Checkpoint,
        training: LocalTraining,
        annotations: Annotations,
        options: TrainingOptions,
        archived: HistoryOptions,
        *,
        whole: bool = False,
    ) -> tuple[FloatArray | None, list[Note]]:
        """What the scheme adds to every gradient of the head, or of all parameters; None where nothing."""
        if training.scheme not in STATEFUL:
            return None, []
        parameters = self.source.parameters if whole else None
        history = History(self._named, self.head_name, options, self.options.key, parameters)
        return constant_gradient(
            history,
            history.vector(self._named(self.reference)),
            training,
            client=local.path.stem,
            archived=archived,
            annotations=annotations,
        )

    def _whole_constant(self, *of: Any) -> FloatArray | None:
        """The same of all parameters, for replays; None too where the archive holds it of the head alone."""
        try:
            return self._constant_gradient(*of, whole=True)[0]
        except MismatchError:
            return None


def _ignored(config: ModelConfig) -> list[Note]:
    return [Note("config-ignored", f"left out of a config.json: {why}") for why in config.ignored]


def _under(key: str | None) -> str:
    return "read without --key" if key is None else f"under the key {key!r}"


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
