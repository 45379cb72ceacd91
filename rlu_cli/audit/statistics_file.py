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
from rlu_cli.files.safetensors_io import save_safetensors

_KIND = "rlu.statistics"
_TENSORS = (
    "mean",
    "factor",
    "counts",
    "confidence",
    "standard_error",
    "embedding_mean",
    "gradient_sum",
    "accuracy",
)
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
        "embedding_mean": s.embedding_mean,
        "gradient_sum": s.gradient_sum,
        "accuracy": s.accuracy,
    }
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in arrays.items()}
    save_safetensors(path, tensors, {_KIND: json.dumps(stored.about, sort_keys=True, allow_nan=False)})


def read_statistics(path: Path) -> StoredStatistics:
    """Read a statistics file.

    Raises
    ------
    FileError
        Unreadable, or not written by `write_statistics`.
    """
    checkpoint = read_checkpoint(path)
    about = _about(checkpoint.metadata.get(_KIND))
    if about is None or any(name not in checkpoint.tensors for name in _TENSORS):
        raise FileError(
            f"{path}: expected a statistics file written by `rlu estimate-logits -o`, found another "
            f"{checkpoint.format} file: pass the right file to --stats"
        )
    arrays = {name: checkpoint.tensors[name].numpy() for name in _TENSORS}
    N = len(arrays["counts"])
    L = arrays["embedding_mean"].shape[-1]
    rank = arrays["factor"].shape[1] if arrays["factor"].ndim == 3 else 0
    expected = ((N, N), (N, rank, N), (N,), (N, N), (N, N), (N, L), (N, N), (N,))
    for name, shape in zip(_TENSORS, expected, strict=True):
        if arrays[name].shape != shape or not bool(torch.isfinite(checkpoint.tensors[name]).all()):
            raise FileError(
                f"{path}: damaged statistics file, {name} is {arrays[name].shape}; "
                "write it again with `rlu estimate-logits -o`"
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
