"""Auxiliary images through the network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlu_cli.audit.auxiliary import (
    Auxiliary,
    auxiliary_document,
    load_auxiliary,
    reading,
    scan_auxiliary,
)
from rlu_cli.audit.dense_tail import DenseLayers, find_dense_layers
from rlu_cli.audit.description import ModelDescription
from rlu_cli.audit.frozen import frozen_parameters
from rlu_cli.audit.memory import total_bytes
from rlu_cli.audit.network import Network, build_network, choose_spec
from rlu_cli.audit.options import AuxOptions, ModelOptions, RunOptions
from rlu_cli.audit.probe import batch_that_matters, has_dropout, probe
from rlu_cli.audit.progress import Reporter, Update
from rlu_cli.audit.replay import Replay, replay_nodes
from rlu_cli.core.types import Activations, FloatArray, LocalTraining, Note
from rlu_cli.core.variates import STATEFUL
from rlu_cli.errors import MismatchError, NotInstalledError, UsageError
from rlu_cli.files.checkpoint import Checkpoint
from rlu_cli.files.hashing import sha256_tensors
from rlu_cli.files.state_dict import strip_prefixes
from rlu_cli.images import ImageCollection, ImageSet
from rlu_cli.models import activation_bytes, multiply_adds
from rlu_cli.simulation.vectors import Layout

_ROW_BYTES = 16
"""Of a sample in a replay, beside its pixels: it is dealt, and shuffled."""

_FEW = 4096
"""Images of a batch that nothing is asked about."""


class ImageSource:
    """The `Source` of an auditor who has images and the architecture.

    Images are decoded once and the network is built once, each when it is first needed.
    """

    reads_weights = True

    def __init__(
        self,
        reference: Checkpoint,
        aux: Path | None,
        *,
        aux_options: AuxOptions,
        described: ModelDescription,
        class_names: Sequence[str] | None,
        options: ModelOptions,
        run: RunOptions,
        reporter: Reporter,
    ) -> None:
        self.reference = reference
        self.aux = aux
        self.aux_options = aux_options
        self.described = described
        self.options = options
        self.batch_norm = options.batch_norm or "batch"
        self.run = run
        self.reporter = reporter
        self._given_names = class_names
        self._reading = reading(aux_options, seed=run.seed)
        self._loaded: Checkpoint | None = reference
        self._notes: list[Note] = []

    @cached_property
    def dropout(self) -> str:
        """Whether dropout layers drop: as in the client's training, unless the user says otherwise."""
        return self.options.dropout or ("on" if has_dropout(self.network.model) else "off")

    @property
    def notes(self) -> Sequence[Note]:
        """Warnings about the images and the network so far."""
        return self._notes

    @cached_property
    def collection(self) -> ImageCollection:
        """The auxiliary data: its classes are known, its images not decoded yet."""
        if self.aux is None:
            raise UsageError("expected auxiliary images, found none: pass --aux PATH")
        collection, notes = scan_auxiliary(
            self.aux,
            self.aux_options,
            class_names=self._given_names,
            class_order=self.options.class_order,
        )
        self._notes += notes
        return collection

    @cached_property
    def network(self) -> Network:
        """The model; it holds the weights of the latest pass.

        Raises
        ------
        MismatchError
            The checkpoint doesn't fit it, or its annotations describe none that can be built.
        UsageError
            The flags don't.
        """
        native = self.collection.native_size(self._reading)
        try:
            return self._build(native, self.described.arch)
        except UsageError as error:
            if self.described.arch_by_config:
                return self._without_config(native, error)
            flags = (self.options.arch, self.options.head)
            if isinstance(error, NotInstalledError) or flags != (None, None):
                raise
            raise MismatchError(f"{error} The checkpoint's annotations say so: pass --arch") from None

    def _without_config(self, native: tuple[int, int], error: UsageError) -> Network:
        """A built-in that has the checkpoint's tensors, where timm has no model that a config.json names.

        Not only timm writes files of that name, and other programs mean their own networks.
        """
        assert self.described.arch is not None
        try:
            network = self._build(native, None)
        except MismatchError:
            fault = NotInstalledError if isinstance(error, NotInstalledError) else MismatchError
            raise fault(
                f"{str(error).rstrip('.')}. A config.json beside the checkpoint names it "
                f"({self.described.arch}): pass --arch"
            ) from None
        why = f"{self.described.arch}, which can't be built ({str(error).rstrip('.')})"
        self._notes.append(Note("config-ignored", f"left out of a config.json: {why}"))
        return network

    def _build(self, native: tuple[int, int], arch: str | None) -> Network:
        asked = self.described.image_size
        spec, matched = choose_spec(arch, self.reference.tensors, asked or native)
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
        auxiliary = load_auxiliary(
            self.collection,
            self._reading,
            self.network,
            self.described.normalize,
            resize=self.described.image_size is not None
            or self.network.image_size != self.collection.native_size(self._reading),
            reporter=self.reporter,
        )
        self._notes += auxiliary.notes
        return auxiliary

    @property
    def head_name(self) -> str:
        """The output layer's prefix among a checkpoint's tensors."""
        return self.network.layer.name.removeprefix(self.network.prefix)

    @property
    def class_names(self) -> Sequence[str]:
        """The checkpoint's, unless --class-order overrules its mapping."""
        if self.described.class_names is not None and self.options.class_order is None:
            return self.described.class_names
        return self.collection.names

    @property
    def num_classes(self) -> int:
        """N."""
        return self.network.layer.num_classes

    def about(self) -> dict[str, Any]:
        """Network, inputs and images, in the statistics file's and the report's words."""
        network = self.network
        return {
            "arch": str(network.spec),
            "head": self.head_name,
            "num_classes": self.num_classes,
            "embedding_size": network.layer.embedding_size,
            "image_size": list(network.image_size),
            "channels": network.channels,
            "normalize": str(self.auxiliary.normalization),
            "batch_norm": self.batch_norm,
            "dropout": self.dropout,
            "class_order": self.collection.order,
            "class_names": list(self.class_names),
            "aux": auxiliary_document(self.collection, self.auxiliary.images, self.aux_options),
        }

    def facts(self, local: Checkpoint | None, batch_size: int | None) -> dict[str, Any]:
        """Weights, network, pixels, and how they are fed to it.

        Nobody can tell by its name what code of the user's own does, so the network's answer on two images
        stands for it. (Its source wouldn't do, since it may import anything.)
        """
        spec = self.network.spec
        library = {"timm", "torchvision"} & {spec.kind}
        return {
            "weights": sha256_tensors(self.network.named(self.reference if local is None else local)),
            "network": str(spec),
            "library": [version(name) for name in library],
            "answer": self._answer if spec.kind in ("module", "file") else None,
            "output_layer": self.network.layer.name,
            "images": self.samples_digest,
            "normalize": str(self.auxiliary.normalization),
            "batch_norm": self.batch_norm,
            "dropout": self.dropout,
            "batch_size": batch_size,
        }

    def tensors(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """A checkpoint's tensors by name; only positional ones need the network for that."""
        if not checkpoint.positional:
            return checkpoint.tensors
        return strip_prefixes(self.network.named(checkpoint))[0]

    def effective_batch(self, batch_size: int | None) -> int | None:
        """What the pass depends on of a client's batch size: see `batch_that_matters`."""
        return batch_that_matters(self.network.model, self.batch_norm, batch_size)

    def activations(self, local: Checkpoint | None, batch_size: int | None) -> Activations:
        """A pass over the images, under the weights of ``local`` or the global ones."""
        what = "global model" if local is None else f"local model {local.path.name}"
        images = self.auxiliary.images
        with self.reporter(f"auxiliary images through the {what}") as update:
            return self._pass(images, local, batch_size, update)

    def frozen(self, local: Checkpoint) -> tuple[str, ...]:
        """The network's parameters that a client's training left alone, as far as its model says."""
        names = [name for name, _ in self.network.model.named_parameters()]
        return frozen_parameters(names, self.network.named(self.reference), self.network.named(local))

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
        """The client's training again on the auxiliary images.

        None for schemes that remember where their constant gradient isn't known, and where memory can't hold
        it.
        """
        if (training.scheme in STATEFUL and constant is None) or not self._fits(training):
            return None
        self._loaded = None
        return Replay(
            self.network,
            self.auxiliary.images,
            self.auxiliary.normalization,
            self.network.named(self.reference),
            self.network.named(local),
            training,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
            batch_size=batch_size,
            seed=self.run.seed,
            device=self.run.device,
            noise_std=noise_std,
            along=along,
            constant=None if constant is None else self._layout.split(torch.from_numpy(constant).float()),
            frozen=tuple(frozen),
        )

    def _fits(self, training: LocalTraining) -> bool:
        """Whether a replay may fit into memory: the rows that all steps see, and what one of them keeps.

        Only what surely doesn't is left out, and by all that there is, so that no answer depends on what is
        free.
        """
        if _ROW_BYTES * training.samples > total_bytes():
            return False
        batch = math.ceil(training.samples / training.steps)
        return batch <= _FEW or batch * self._image_bytes <= total_bytes(self.run.device)

    @cached_property
    def _image_bytes(self) -> int:
        """Of an image and its outputs, in a training step."""
        black = self.network.black(self.run.device)
        return black.nbytes + activation_bytes(self.network.model, black)

    def dense_layers(self) -> DenseLayers:
        """The global model's dense layers before the head, found in a pass over the images."""

        def run() -> None:
            self._pass(self.auxiliary.images, None, self.effective_batch(None))

        return find_dense_layers(self.network, run)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.network.model)

    def parameters(self, checkpoint: Checkpoint) -> FloatArray:
        """All parameters of the network in one vector, float64.

        Raises
        ------
        MismatchError
            Some are missing from the file.
        """
        tensors = self.network.named(checkpoint)
        missing = [name for name in self._layout.shapes if name not in tensors]
        if missing:
            raise MismatchError(f"expected all of the network's parameters, found no {missing[0]}")
        return np.asarray(self._layout.flatten(tensors).double().numpy())

    def by_name(self, parameters: FloatArray) -> Mapping[str, Tensor]:
        """A vector of all parameters, by the names that checkpoints have."""
        parts = self._layout.split(torch.from_numpy(parameters))
        return {name.removeprefix(self.network.prefix): part for name, part in parts.items()}

    def replay_cost(self, training: LocalTraining) -> float:
        """Two for each multiplication; a training step takes three passes."""
        if not self._fits(training):
            return math.inf
        passed = len(self.auxiliary.images.labels) * len(replay_nodes(training)[0])
        return 2.0 * self._multiply_adds * (passed + 3 * training.samples)

    @cached_property
    def _multiply_adds(self) -> int:
        return multiply_adds(self.network.model, self.network.black(self.run.device))

    @cached_property
    def samples_digest(self) -> str:
        """Of all pixels and labels."""
        images = self.auxiliary.images
        return sha256_tensors({"pixels": images.pixels, "labels": images.labels})

    @cached_property
    def _answer(self) -> str:
        """What the network makes of two images under the global weights, in short."""
        images = self.auxiliary.images
        few = replace(images, pixels=images.pixels[:2], labels=images.labels[:2])
        found = self._pass(few, None, self.effective_batch(2))
        assert found.embeddings is not None
        return sha256_tensors(
            {"logits": torch.from_numpy(found.logits), "embeddings": torch.from_numpy(found.embeddings)}
        )

    def _pass(
        self,
        images: ImageSet,
        local: Checkpoint | None,
        batch_size: int | None,
        progress: Update | None = None,
    ) -> Activations:
        model = self.reference if local is None else local
        if self._loaded is not model:
            self.network.load(model)
            self._loaded = model
        return probe(
            self.network,
            images,
            self.auxiliary.normalization,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
            batch_size=batch_size,
            seed=self.run.seed,
            device=self.run.device,
            progress=progress,
        )
