"""The statistics file: what `estimate-logits` keeps of a global model, for `recover` to reuse."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

from rlu_cli.core.residuals import ResidualMoments
from rlu_cli.core.responses import DIRECTIONS
from rlu_cli.core.types import Activations, LogitMoments, ModelStatistics, Responses
from rlu_cli.core.unit_direction import UnitDirection
from rlu_cli.errors import FileError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.hashing import CHECKSUM, sha256_described
from rlu_cli.files.json_io import parse_json
from rlu_cli.files.safetensors_io import save_safetensors

_KIND = "rlu.statistics"
_LOGITS = ("mean", "factor", "counts", "confidence", "standard_error", "accuracy")
_EMBEDDINGS = ("embedding_mean", "gradient_sum")
_RESPONSES = ("response_mean", "response_spread")
_RESIDUALS = ("residual_mean", "residual_factor")
_SAMPLES = ("sample_logits", "sample_labels")
_UNIT = ("unit_direction", "unit_error")
_GROUPS = (_EMBEDDINGS, _RESPONSES, _RESIDUALS, _SAMPLES, _UNIT)
"""Each may be missing: logits may come alone, heads have biases, and older files have fewer."""
SAMPLES = "samples_sha256"
"""Which auxiliary samples the statistics are of; older files don't say it."""

_ABOUT: dict[str, tuple[type, ...]] = {
    "global_sha256": (str,),
    "arch": (str, NoneType),
    "head": (str,),
    "num_classes": (int,),
    "embedding_size": (int, NoneType),
    "image_size": (list, NoneType),
    "channels": (int, NoneType),
    "normalize": (str, NoneType),
    "batch_norm": (str, NoneType),
    "dropout": (str, NoneType),
    "class_order": (str, NoneType),
    "class_names": (list,),
    "aux": (dict,),
}
"""What is said of the numbers, as JSON has it; nothing is known of a network whose logits were given."""


@dataclass(frozen=True)
class StoredStatistics:
    """Statistics of a global model, and how they were made.

    about : JSON values: global_sha256, arch, head, class_names, aux, normalize, samples, seed, …
    """

    statistics: ModelStatistics
    about: dict[str, Any]


def write_statistics(path: Path, stored: StoredStatistics) -> None:
    """Write a safetensors file of tensors, byte for byte the same for the same statistics."""
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
    if s.responses is not None:
        arrays |= {"response_mean": s.responses.mean, "response_spread": s.responses.spread}
    if s.residuals is not None:
        arrays |= {"residual_mean": s.residuals.mean, "residual_factor": s.residuals.factor}
    if s.samples is not None:
        arrays |= {"sample_logits": s.samples.logits, "sample_labels": s.samples.labels}
    if s.unit is not None:
        arrays |= {"unit_direction": s.unit.direction, "unit_error": np.array([s.unit.error])}
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in arrays.items()}
    about = {**stored.about, CHECKSUM: sha256_described(stored.about, tensors)}
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
    N, L = about["num_classes"], about["embedding_size"] or 0  # logits alone have no embeddings
    rank, residual_rank = (_rank(tensors.get(name)) for name in ("factor", "residual_factor"))
    many = len(tensors.get("sample_labels", ()))
    square, width = (N, N), 1 + min(L, DIRECTIONS)
    expected: dict[str, tuple[int, ...]] = {
        **dict(zip(_LOGITS, (square, (N, rank, N), (N,), square, square, (N,)), strict=True)),
        **dict(zip(_EMBEDDINGS, ((N, L), square), strict=True)),
        **dict(zip(_RESPONSES, ((width, N, N), (N, width, width)), strict=True)),
        **dict(zip(_RESIDUALS, (square, (N, residual_rank, N)), strict=True)),
        **dict(zip(_SAMPLES, ((many, N), (many,)), strict=True)),
        **dict(zip(_UNIT, ((L,), (1,)), strict=True)),
    }
    for group in _GROUPS:
        if any(name not in tensors for name in group):
            expected = {name: shape for name, shape in expected.items() if name not in group}
    damaged = [
        f"{name} is {tuple(tensors[name].shape)}"
        for name, shape in expected.items()
        if tuple(tensors[name].shape) != shape or not bool(torch.isfinite(tensors[name]).all())
    ]
    if not damaged and not _labelled(tensors.get("sample_labels"), N):
        damaged = [f"sample_labels are not classes from 0 to {N - 1}"]
    known = {name: tensors[name] for name in expected}
    if not damaged and about.get(CHECKSUM) != sha256_described(about, known):
        damaged = ["its content is not what was written"]
    if damaged:
        raise FileError(
            f"{path}: damaged statistics file, {damaged[0]}; write it again with `rlu estimate-logits -o`"
        )
    names = (*_LOGITS, *(name for group in _GROUPS for name in group))
    arrays: dict[str, Any] = {name: known[name].numpy() if name in known else None for name in names}
    responses = None
    if arrays["response_mean"] is not None:
        responses = Responses(arrays["response_mean"], arrays["response_spread"])
    residuals = None
    if arrays["residual_mean"] is not None:
        residuals = ResidualMoments(arrays["residual_mean"], arrays["residual_factor"], arrays["counts"])
    samples: Activations | None = None
    if arrays["sample_logits"] is not None:
        samples = Activations(arrays["sample_logits"], None, arrays["sample_labels"])
    unit = None
    if arrays["unit_direction"] is not None:
        unit = UnitDirection(arrays["unit_direction"], float(arrays["unit_error"][0]))
    return StoredStatistics(
        ModelStatistics(
            LogitMoments(arrays["mean"], arrays["factor"], arrays["counts"]),
            arrays["confidence"],
            arrays["standard_error"],
            arrays["embedding_mean"],
            arrays["gradient_sum"],
            arrays["accuracy"],
            responses,
            residuals,
            samples,
            unit,
        ),
        about,
    )


def _labelled(labels: torch.Tensor | None, num_classes: int) -> bool:
    """Whether these are labels, of every class some, if they are there at all."""
    if labels is None:
        return True
    return labels.dtype == torch.int64 and torch.unique(labels).tolist() == list(range(num_classes))


def _rank(factor: torch.Tensor | None) -> int:
    """Numbers that a class's variation is made of."""
    return factor.shape[1] if factor is not None and factor.ndim == 3 else 0


def _about(text: str | None) -> dict[str, Any] | None:
    try:
        about = parse_json(text or "")
    except ValueError:
        return None
    if not isinstance(about, dict) or not all(
        isinstance(about.get(name, ...), _ABOUT[name]) for name in _ABOUT
    ):
        return None
    names = about["class_names"]
    return (
        about if len(names) == about["num_classes"] and all(isinstance(name, str) for name in names) else None
    )
