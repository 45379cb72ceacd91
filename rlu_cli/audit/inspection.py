"""What a checkpoint says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlu_cli.audit.candidates import head_candidates
from rlu_cli.audit.report import envelope
from rlu_cli.errors import RluError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.shards import sha256_checkpoint
from rlu_cli.files.state_dict import layer_tensors
from rlu_cli.models import ModelSpec, build_model, find_head, match_builtin


def inspection_document(path: Path, key: str | None = None) -> dict[str, Any]:
    """Format, tensors, output layer, annotations and matching built-in architecture of one file."""
    checkpoint = read_checkpoint(path, key=key)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    spec = match_builtin(shapes)
    candidates = head_candidates(checkpoint.tensors)
    name = _built_head(spec) if spec is not None else (candidates[0] if candidates else None)
    return {
        **envelope("inspect"),
        "path": str(path),
        "sha256": sha256_checkpoint(path),
        "bytes": path.stat().st_size,
        "format": checkpoint.format,
        "tensors": [
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in checkpoint.tensors.items()
        ],
        "parameters": sum(t.numel() for t in checkpoint.tensors.values() if t.is_floating_point()),
        "arch": None if spec is None else str(spec),
        "head": None if name is None else _describe(name, checkpoint.tensors),
        "head_candidates": candidates,
        "metadata": dict(sorted(checkpoint.metadata.items())),  # safetensors hands them out in any order
        "notes": list(checkpoint.notes),
    }


def _built_head(spec: ModelSpec) -> str | None:
    """The output layer of a built-in architecture."""
    try:
        return find_head(build_model(spec, allow_user_code=False)).name
    except RluError:
        return None


def _describe(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    weight_name, bias_name = layer_tensors(name)
    weight = tensors[weight_name]
    return {
        "name": name,
        "num_classes": int(weight.shape[0]),
        "embedding_size": int(weight.shape[1]),
        "bias": bias_name in tensors,
    }
