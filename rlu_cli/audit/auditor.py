"""One global model and its auxiliary data, ready to recover any number of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from rlu_cli.audit.annotations import Annotations, image_size, name_list, text, whole
from rlu_cli.audit.auxiliary import Auxiliary, load_auxiliary, scan_auxiliary
from rlu_cli.audit.devices import choose_device
from rlu_cli.audit.history import History, constant_gradient
from rlu_cli.audit.network import (
    Network,
    build_network,
    check_finite,
    check_same_network,
    choose_spec,
    read_head,
)
from rlu_cli.audit.options import HistoryOptions, ModelOptions, RunOptions, TrainingOptions
from rlu_cli.audit.probe import probe
from rlu_cli.audit.progress import Reporter, silent
from rlu_cli.audit.statistics_file import StoredStatistics, read_statistics
from rlu_cli.audit.training import TrainingRecord, resolve_training
from rlu_cli.core.methods import get_method
from rlu_cli.core.moments import model_statistics
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.types import Head, LocalTraining, ModelStatistics, Note, Observation, Recovery
from rlu_cli.core.variates import STATEFUL
from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.files.checkpoint import Checkpoint, read_checkpoint
from rlu_cli.files.hashing import sha256_file
from rlu_cli.files.metadata import read_sidecar
from rlu_cli.files.state_dict import strip_prefixes
from rlu_cli.images import ClassFolder, native_size

_MODEL_KEYS = ("fl.arch", "fl.normalize", "fl.image_size", "fl.class_names")


@dataclass(frozen=True)
class ClientRound:
    """What was recovered of one client, by each of the methods asked for, in their order."""

    path: Path
    sha256: str
    training: TrainingRecord
    recoveries: tuple[Recovery, ...]
    notes: tuple[Note, ...]


class Auditor:
    """Holds what is common to all clients of a round: the global model, its statistics, the aux images.

    Nothing is read twice, and the passes over the auxiliary images are made only when a method needs
    them.

    Parameters
    ----------
    reference : path of the global checkpoint
    aux : folder of auxiliary images, or None where stored statistics are enough
    stats : statistics file of the global model, instead of a pass over the auxiliary images
    first_local : a local checkpoint whose metadata may say what the global one leaves open
    """

    def __init__(
        self,
        reference: Path,
        *,
        aux: Path | None = None,
        stats: Path | None = None,
        model: ModelOptions | None = None,
        run: RunOptions | None = None,
        first_local: Checkpoint | None = None,
        reporter: Reporter = silent,
    ) -> None:
        self.options = model or ModelOptions()
        run = run or RunOptions()
        self.run = replace(run, device=choose_device(run.device))
        self.aux = aux
        self.reporter = reporter
        self.reference = read_checkpoint(reference)
        self.sha256 = sha256_file(reference)
        check_finite(self.reference)
        nearby = first_local.path if first_local is not None else Path(reference)
        self.annotations = Annotations(
            first_local.metadata if first_local is not None else {},
            self.reference.metadata,
            read_sidecar(nearby),
        )
        self.stored = None if stats is None else self._read_stored(stats)
        self.class_names = self.annotations.get("class_names", None, name_list)
        self._batch_size: int | None = None
        self._notes: list[Note] = []

    def _read_stored(self, path: Path) -> StoredStatistics:
        stored = read_statistics(path)
        if stored.about.get("global_sha256") != self.sha256:
            raise MismatchError(
                f"expected statistics of {self.reference.path} in {path}, found those of another "
                f"global model (sha256 {str(stored.about.get('global_sha256'))[:12]}…): write them again "
                "with `rlu estimate-logits -o`"
            )
        return stored

    # What the model and the auxiliary data are.

    @cached_property
    def folder(self) -> ClassFolder:
        """The class folders of the auxiliary data."""
        if self.aux is None:
            raise UsageError("expected the folder of auxiliary images, found none: pass --aux DIR")
        names = self.class_names
        if names is None and self.options.class_order is None and self.stored is not None:
            names = tuple(self.stored.about["class_names"])
        folder, notes = scan_auxiliary(self.aux, class_names=names, class_order=self.options.class_order)
        self._notes += notes
        return folder

    @cached_property
    def network(self) -> Network:
        """The model, with the global weights."""
        asked = self.annotations.get("image_size", self.options.image_size, image_size)
        native = native_size(self.folder)
        tensors = self.reference.tensors
        arch = self.annotations.get("arch", self.options.arch, text)
        spec, matched = choose_spec(arch, tensors, asked or native)
        if matched:
            self._notes.append(
                Note(
                    "architecture-matched",
                    f"no architecture was given; the tensors are those of {spec}, with the activation "
                    "assumed: pass --arch if it is another",
                )
            )
        return build_network(
            spec,
            self.reference,
            allow_user_code=self.options.arch is not None,
            image_size=asked,
            native_size=native,
            head=self.options.head,
            matched=matched,
            device=self.run.device,
        )

    @cached_property
    def auxiliary(self) -> Auxiliary:
        """The auxiliary images, decoded."""
        normalize = self.annotations.get("normalize", self.options.normalize, text)
        auxiliary = load_auxiliary(
            self.folder,
            self.network,
            normalize,
            resize="image_size" in self.annotations.sources
            or self.network.image_size != native_size(self.folder),
            seed=self.run.seed,
            reporter=self.reporter,
        )
        self._notes += auxiliary.notes
        return auxiliary

    @property
    def head_name(self) -> str:
        """The output layer's prefix among a checkpoint's tensors."""
        if self.stored is not None:
            return str(self.stored.about["head"])
        return self.network.layer.name.removeprefix(self.network.prefix)

    @cached_property
    def head(self) -> Head:
        """The global model's output layer."""
        return read_head(self._tensors(self.reference), self.head_name, where=str(self.reference.path))

    def _tensors(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """A checkpoint's tensors by name; only positional ones need the network for that."""
        if not checkpoint.positional:
            return checkpoint.tensors
        return strip_prefixes(self.network.named(checkpoint))[0]

    @cached_property
    def statistics(self) -> ModelStatistics:
        """Statistics of the global model: stored ones, or a pass over the auxiliary images."""
        if self.stored is not None:
            return self.stored.statistics
        return self._measure("global model")

    @property
    def names(self) -> Sequence[str]:
        """Class names by output index: the checkpoint's, unless --class-order overrules its mapping."""
        if self.class_names is not None and self.options.class_order is None:
            return self.class_names
        return self.folder.names if self.stored is None else self.stored.about["class_names"]

    def about(self) -> dict[str, Any]:
        """How the statistics were made, for the statistics file and the report."""
        if self.stored is not None:
            return {**self.stored.about, "stats": True}
        network = self.network
        return {
            "global_sha256": self.sha256,
            "arch": str(network.spec),
            "head": self.head_name,
            "num_classes": network.layer.num_classes,
            "embedding_size": network.layer.embedding_size,
            "image_size": list(network.image_size),
            "channels": network.channels,
            "normalize": str(self.auxiliary.normalization),
            "batch_norm": self.options.batch_norm,
            "class_order": self.folder.order,
            "class_names": list(self.names),
            "aux": {
                "path": str(self.aux),
                "images": len(self.auxiliary.images.labels),
                "classes": len(self.folder.names),
            },
            "samples": self.run.samples,
            "seed": self.run.seed,
        }

    @property
    def notes(self) -> tuple[Note, ...]:
        """Warnings about the global model and the auxiliary data so far."""
        return tuple(self._notes)

    def _measure(self, what: str) -> ModelStatistics:
        """Statistics of the weights that the model holds now."""
        auxiliary = self.auxiliary
        with self.reporter(f"auxiliary images through the {what}") as update:
            found = probe(
                self.network,
                auxiliary.images,
                auxiliary.normalization,
                batch_norm=self.options.batch_norm,
                batch_size=self._batch_size or self.annotations.get("batch_size", None, whole),
                seed=self.run.seed,
                device=self.run.device,
                progress=update,
            )
        return model_statistics(
            found.logits,
            found.embeddings,
            found.labels,
            self.network.layer.num_classes,
            samples=self.run.samples,
            seed=self.run.seed,
            device=self.run.device,
        )

    # What one client did.

    def recover(
        self,
        local: Checkpoint,
        options: TrainingOptions,
        methods: Sequence[str],
        history: HistoryOptions | None = None,
    ) -> ClientRound:
        """Recover one client's label counts by each of ``methods``.

        Raises
        ------
        MismatchError
            The local checkpoint is not of this round's network, or training values are missing.
        """
        self._check_metadata(local.metadata)
        check_finite(local)
        annotations = Annotations(local.metadata, self.reference.metadata, read_sidecar(local.path))
        record = resolve_training(options, annotations)
        self._batch_size = self._batch_size or record.training.batch_size
        chosen = [get_method(name) for name in methods]
        needs_end = any(method.needs_end(record.training) for method in chosen)
        tensors = self._tensors(local)
        check_same_network(self._tensors(self.reference), tensors, where=(self.reference.path, local.path))
        update = head_update(read_head(tensors, self.head_name, where=str(local.path)), self.head)
        constant, notes = self._constant_gradient(
            local, record.training, annotations, options, history or HistoryOptions()
        )
        start = self.statistics
        end = None
        if needs_end:
            self.network.load(local)
            end = self._measure(f"local model {local.path.name}")
        observation = Observation(
            update=update,
            head=self.head,
            training=record.training,
            start=start,
            end=end,
            constant_gradient=constant,
            samples=self.run.samples,
            search_iterations=self.run.search_iterations,
            seed=self.run.seed,
            device=self.run.device,
        )
        recoveries = tuple(recover_labels(observation, method=method.name) for method in chosen)
        return ClientRound(local.path, sha256_file(local.path), record, recoveries, tuple(notes))

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

    def _check_metadata(self, metadata: Mapping[str, str]) -> None:
        """All clients of one call share the network that the first one's metadata described."""
        for key in _MODEL_KEYS:
            if key in metadata and self.annotations.local.get(key, metadata[key]) != metadata[key]:
                raise MismatchError(
                    f"expected all local checkpoints of one call to agree on {key}, found "
                    f"{self.annotations.local[key]!r} and {metadata[key]!r}: recover them in separate calls"
                )
