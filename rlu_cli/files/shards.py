"""Sharded checkpoints: an index JSON that says which file beside it holds which tensor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlu_cli.errors import FileError
from rlu_cli.files.hashing import sha256_file
from rlu_cli.files.json_io import read_json
from rlu_cli.files.metadata import as_text
from rlu_cli.files.refusals import describe_refusal
from rlu_cli.files.regular import is_file
from rlu_cli.files.safetensors_io import read_safetensors
from rlu_cli.files.sniff import FileKind, sniff
from rlu_cli.files.text import names, one_line
from rlu_cli.files.torch_io import read_torch

if TYPE_CHECKING:
    from torch import Tensor

INDEX_LIMIT = 64 * 1024 * 1024


def _is_plain_name(value: object) -> bool:
    """A file's own name: no folder, no drive, nothing that leaves the index's folder."""
    return isinstance(value, str) and value not in {"", ".", ".."} and not set(value) & set("/\\:\0")


def _weight_map(path: Path, document: Any) -> dict[str, str]:
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(
            f"{path}: expected 'weight_map' to map tensor names to files, found none; download it again."
        )
    wrong = [name for name, shard in weight_map.items() if not _is_plain_name(shard)]
    if wrong:
        raise FileError(
            f"{path}: expected plain file names in 'weight_map', found"
            f" {one_line(repr(weight_map[wrong[0]]), 80)} for {one_line(wrong[0], 80)}; shards must lie"
            " beside the index."
        )
    return weight_map


def _read_shard(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    kind = sniff(path)
    if kind is FileKind.SAFETENSORS:
        return read_safetensors(path)
    if kind in {FileKind.TORCH_ZIP, FileKind.TORCH_LEGACY}:
        found = read_torch(path, is_zip=kind is FileKind.TORCH_ZIP)
        return found if isinstance(found, dict) else {}, {}
    raise FileError(describe_refusal(kind, path))


def sha256_checkpoint(path: Path) -> str:
    """Hexadecimal SHA-256 of a checkpoint's file; of a sharded one, of the digests of its index and shards.

    An index alone is the same in every round: names and sizes are all that it holds.
    """
    own = sha256_file(path)
    if sniff(path) is not FileKind.SAFETENSORS_INDEX:
        return own
    shards = sorted(set(_weight_map(path, read_json(path, limit=INDEX_LIMIT)).values()))
    digests = [own, *(sha256_file(path.parent / name) for name in shards)]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def read_sharded(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that the index lists, in its order, and the metadata of index and shards together.

    Raises:
        FileError: A bad index, a shard that is missing or damaged, or a tensor missing from its shard.
    """
    document = read_json(path, limit=INDEX_LIMIT)
    weight_map = _weight_map(path, document)
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not is_file(path.parent / name)]
    if missing:
        raise FileError(
            f"{path}: {len(missing)} of {len(files)} shards are missing beside it ({names(missing)});"
            " download them too."
        )
    about = document.get("metadata")
    metadata: dict[str, str] = {}
    for key, value in (about if isinstance(about, dict) else {}).items():
        text = as_text(value)
        if text is not None:
            metadata[key] = text
    shards: dict[str, dict[str, Tensor]] = {}
    for name in files:
        shards[name], extra = _read_shard(path.parent / name)
        metadata = {**extra, **metadata}
    absent = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if absent:
        raise FileError(
            f"{path}: {len(absent)} tensors aren't in the shards that it names ({names(absent)}); index and"
            " shards belong to different checkpoints, so download all of them again."
        )
    return {name: shards[shard][name] for name, shard in weight_map.items()}, metadata
