"""The statistics file: what `estimate-logits` keeps of a global model, for `recover` to reuse."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlu_cli.core.types import LogitMoments, ModelStatistics
from rlu_cli.errors import FileError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.hashing import sha256_tensors
from rlu_cli.files.safetensors_io import save_safetensors

_KIND = "rlu.statistics"
_LOGITS = ("mean", "factor", "counts", "confidence", "standard_error", "accuracy")
_EMBEDDINGS = ("embedding_mean", "gradient_sum")
_CHECKSUM = "sha256"
_ABOUT = (
    "global_sha256",
    "arch",
    "head",
    "num_classes",
    "embedding_size",
    "image_size",
    "channels",
    "normalize",
    "batch_norm",
    "class_order",
    "class_names",
    "aux",
)


@dataclass(frozen=True)
class StoredStatistics:
    """Statistics of a global model, and how they were made.

    about : JSON values: global_sha256, arch, head, class_names, aux, normalize, samples, seed, …
    """

    statistics: ModelStatistics
    about: dict[str, Any]


def write_statistics(path: Path, stored: StoredStatistics) -> None:
    """Write a safetensors file of float64 tensors, byte for byte the same for the same statistics."""
    s = stored.statistics
    arrays = {
        "mean": s.moments.mean,
        "factor": s.moments.factor,
        "counts": s.moments.counts,
        "confidence": s.confidence,
        "standard_error": s.standard_error,
        "accuracy": s.accuracy,
    }
    if s.embedding_mean is not None and s.gradient_sum is not None:
        arrays |= {"embedding_mean": s.embedding_mean, "gradient_sum": s.gradient_sum}
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in arrays.items()}
    about = {**stored.about, _CHECKSUM: sha256_tensors(tensors)}
    save_safetensors(path, tensors, {_KIND: json.dumps(about, sort_keys=True, allow_nan=False)})


def read_statistics(path: Path) -> StoredStatistics:
    """Read a statistics file.

    Raises
    ------
    FileError
        Unreadable, or not written by `write_statistics`.
    """
    checkpoint = read_checkpoint(path)
    about = _about(checkpoint.metadata.get(_KIND))
    tensors = checkpoint.tensors
    if about is None or any(name not in tensors for name in _LOGITS):
        raise FileError(
            f"{path}: expected a statistics file written by `rlu estimate-logits -o`, found another "
            f"{checkpoint.format} file: pass the right file to --stats"
        )
    known = (*_LOGITS, *(_EMBEDDINGS if all(name in tensors for name in _EMBEDDINGS) else ()))
    arrays: dict[str, Any] = dict.fromkeys(_EMBEDDINGS) | {name: tensors[name].numpy() for name in known}
    N, L = len(arrays["counts"]), about["embedding_size"]
    rank = arrays["factor"].shape[1] if arrays["factor"].ndim == 3 else 0
    square = (N, N)
    expected = ((N, N), (N, rank, N), (N,), square, square, (N,), (N, L), square)
    damaged = [
        f"{name} is {tuple(tensors[name].shape)}"
        for name, shape in zip(known, expected, strict=False)
        if tuple(tensors[name].shape) != shape or not bool(torch.isfinite(tensors[name]).all())
    ]
    if not damaged and about.get(_CHECKSUM) != sha256_tensors({name: tensors[name] for name in known}):
        damaged = ["its numbers are not those that were written"]
    if damaged:
        raise FileError(
            f"{path}: damaged statistics file, {damaged[0]}; write it again with `rlu estimate-logits -o`"
        )
    return StoredStatistics(
        ModelStatistics(
            LogitMoments(arrays["mean"], arrays["factor"], arrays["counts"]),
            arrays["confidence"],
            arrays["standard_error"],
            arrays["embedding_mean"],
            arrays["gradient_sum"],
            arrays["accuracy"],
        ),
        about,
    )


def _about(text: str | None) -> dict[str, Any] | None:
    try:
        about = json.loads(text or "")
    except ValueError:
        return None
    if not isinstance(about, dict) or any(name not in about for name in _ABOUT):
        return None
    return about
