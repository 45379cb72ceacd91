"""Logits computed elsewhere, from a file: no images, no architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from rlu_cli.audit.auxiliary import few_samples
from rlu_cli.audit.candidates import head_candidates
from rlu_cli.audit.dense_tail import DenseLayers
from rlu_cli.audit.logits_file import LOCAL, LogitsFile, as_tensors, read_logits, reproduces
from rlu_cli.audit.network import read_head
from rlu_cli.audit.options import LogitsOptions, ModelOptions
from rlu_cli.audit.replay import Replay
from rlu_cli.core.types import Activations, FloatArray, LocalTraining, Note
from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.files.checkpoint import Checkpoint
from rlu_cli.files.hashing import sha256_file, sha256_tensors
from rlu_cli.files.positional import layers_by_position

_UNUSED = ("arch", "normalize", "image_size", "batch_norm", "dropout", "class_order")
"""Flags that say how images go through a network."""


class GivenLogits:
    """The `Source` of an auditor who has the models' logits on labelled samples.

    Where embeddings are known too, logits must be what the output layer makes of them.

    Parameters
    ----------
    locals_ : the local checkpoints, in the order of ``files.local_logits``
    class_names : by output index, where anybody says them

    Raises
    ------
    FileError, MismatchError, UsageError
    """

    reads_weights = False

    def __init__(
        self,
        reference: Checkpoint,
        locals_: Sequence[Path],
        files: LogitsOptions,
        *,
        class_names: Sequence[str] | None,
        options: ModelOptions,
    ) -> None:
        assert files.aux_logits is not None
        for name in _UNUSED:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"expected no --{name.replace('_', '-')} with --aux-logits, which needs no network: "
                    "leave it out"
                )
        self.reference = reference
        self.path = files.aux_logits
        self._file = read_logits(self.path)
        self._global = self._file.activations()
        self._clients = len(locals_)
        self._local_files = _by_client(locals_, files.local_logits)
        self._given_names = class_names
        self._override = options.head
        if class_names is not None and len(class_names) != self.num_classes:
            raise MismatchError(
                f"expected {len(class_names)} columns of logits in {self.path}, one for each class that "
                f"{reference.path} names, found {self.num_classes}: they are of another model"
            )
        self._notes = few_samples(self.class_names, self._counts())

    @property
    def notes(self) -> Sequence[Note]:
        """Warnings about the samples."""
        return self._notes

    @property
    def num_classes(self) -> int:
        """N."""
        return int(self._global.logits.shape[1])

    @property
    def class_names(self) -> Sequence[str]:
        """The checkpoint's, else the output indices."""
        return self._given_names or [str(n) for n in range(self.num_classes)]

    @cached_property
    def head_name(self) -> str:
        """The layer that --head names, or the only one that fits the logits and embeddings."""
        tensors, given = self.tensors(self.reference), self._global
        columns = "L" if given.embeddings is None else str(given.embeddings.shape[1])
        wanted = f"an output layer of shape ({self.num_classes}, {columns}) in {self.reference.path}"
        if self._override is not None:
            name = self._override.removesuffix(".weight").removesuffix(".bias").removesuffix(".")
            if not self._fits(name):
                shape = tensors[f"{name}.weight"].shape if f"{name}.weight" in tensors else None
                found = "no such layer" if shape is None else f"one of shape {tuple(shape)}"
                raise MismatchError(f"--head {name}: expected {wanted}, found {found}: name another")
            self._check_reproduced([name])
            return name
        fitting = [name for name in head_candidates(tensors) if self._fits(name)]
        if not fitting:
            raise MismatchError(
                f"expected {wanted}, to match the logits in {self.path}, found none: they are of another "
                "model, or --head names the layer"
            )
        answering = self._check_reproduced(fitting)
        if len(answering) > 1:
            raise MismatchError(
                f"expected {wanted}, found {len(answering)} that fit ({', '.join(answering)}): name the "
                "right one with --head"
            )
        return answering[0]

    def about(self) -> dict[str, Any]:
        """The file, in the statistics file's and the report's words; nothing is known of a network."""
        unknown = ("arch", "image_size", "channels", "normalize", "batch_norm", "dropout", "class_order")
        head = read_head(self.tensors(self.reference), self.head_name, where=str(self.reference.path))
        return {
            **dict.fromkeys(unknown),
            "head": self.head_name,
            "num_classes": self.num_classes,
            "embedding_size": head.embedding_size,
            "class_names": list(self.class_names),
            "aux": {
                "path": str(self.path),
                "images": len(self._global.labels),
                "classes": self.num_classes,
                "kind": "logits",
                "sha256": sha256_file(self.path),
                "embeddings": self._global.embeddings is not None,
            },
        }

    @property
    def samples_digest(self) -> str:
        """Of the file that has the global model's logits."""
        return sha256_file(self.path)

    def facts(self, local: Checkpoint | None, batch_size: int | None) -> dict[str, Any]:
        """The arrays themselves."""
        return {"logits": sha256_tensors(as_tensors(self.activations(local, batch_size)))}

    def tensors(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """A checkpoint's tensors by name; positional ones are named by layer."""
        return layers_by_position(checkpoint.tensors) if checkpoint.positional else checkpoint.tensors

    def effective_batch(self, batch_size: int | None) -> int | None:
        """None: what is in the file does not depend on it."""
        return None

    def frozen(self, local: Checkpoint) -> tuple[str, ...]:
        """None are known."""
        return ()

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
        """None: nothing here can be trained."""
        return None

    def parameters(self, checkpoint: Checkpoint) -> FloatArray:
        """None are known."""
        raise MismatchError("expected a network, found logits alone")

    def dense_layers(self) -> DenseLayers:
        """None: the samples' inputs to other layers than the head are unknown."""
        return DenseLayers({})

    def by_name(self, parameters: FloatArray) -> Mapping[str, Tensor]:
        """None have names."""
        return {}

    def replay_cost(self, training: LocalTraining) -> float:
        """Infinite."""
        return math.inf

    def activations(self, local: Checkpoint | None, batch_size: int | None) -> Activations:
        """What the files say of a local model, or of the global one."""
        if local is None:
            return self._global
        file, prefix = self._local_file(local.path)
        found = file.activations(prefix, num_classes=self.num_classes, labels=self._global.labels)
        head = read_head(self.tensors(local), self.head_name, where=str(local.path))
        if found.embeddings is not None and found.embeddings.shape[1] != head.embedding_size:
            raise MismatchError(
                f"expected {head.embedding_size} embedding values a sample in {file.path}, as the output "
                f"layer of {local.path} reads, found {found.embeddings.shape[1]}: they are of another layer"
            )
        if not reproduces(found, head):
            raise _not_reproduced(file.path, local.path, self.head_name)
        return found

    def _local_file(self, path: Path) -> tuple[LogitsFile, str]:
        """The file that holds a local model's logits, and what its arrays' names begin with."""
        if path in self._local_files:
            return read_logits(self._local_files[path]), ""
        if self._file.has(f"{LOCAL}logits"):
            if self._clients == 1:
                return self._file, LOCAL
            raise UsageError(
                f"expected --local-logits FILE for each of {self._clients} local models, found the logits of "
                f"one in {self.path}: they could be any client's"
            )
        raise MismatchError(
            f"missing logits of {path}: with several local steps the method needs those of the local model "
            f"too: pass --local-logits FILE, or add the array {LOCAL}logits to {self.path}"
        )

    def _counts(self) -> list[int]:
        return [int((self._global.labels == n).sum()) for n in range(self.num_classes)]

    def _fits(self, name: str) -> bool:
        """Whether a layer has an output for each logit, and reads as many values as the embeddings have."""
        weight = self.tensors(self.reference).get(f"{name}.weight" if name else "weight")
        if weight is None or weight.ndim < 2 or weight.shape[0] != self.num_classes:
            return False
        embeddings = self._global.embeddings
        return embeddings is None or weight.shape[1] == embeddings.shape[1]

    def _check_reproduced(self, names: Sequence[str]) -> list[str]:
        """Those of the layers that turn the embeddings into the logits: at least one must."""
        where = str(self.reference.path)
        tensors = self.tensors(self.reference)
        found = [name for name in names if reproduces(self._global, read_head(tensors, name, where=where))]
        if not found:
            raise _not_reproduced(self.path, self.reference.path, names[0])
        return found


def _by_client(locals_: Sequence[Path], files: Sequence[Path] | None) -> dict[Path, Path]:
    """Each local checkpoint's logits file.

    Raises
    ------
    UsageError
        Not one for each.
    """
    if files is None:
        return {}
    if len(files) != len(locals_):
        raise UsageError(
            f"expected one --local-logits for each --local, in the same order, found {len(files)} for "
            f"{len(locals_)}"
        )
    found: dict[Path, Path] = {}
    for path, file in zip(locals_, files, strict=True):
        if found.setdefault(path, file) != file:
            raise UsageError(f"expected one --local-logits for {path}, found {found[path]} and {file}")
    return found


def _not_reproduced(logits: Path, checkpoint: Path, layer: str) -> MismatchError:
    return MismatchError(
        f"expected embeddings in {logits} that the output layer {layer} of {checkpoint} turns into the "
        "logits beside them, found others: they are of another model or layer, or the logits went through a "
        "softmax"
    )
