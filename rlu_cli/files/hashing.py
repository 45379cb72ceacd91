"""File digests, so that a result says exactly which inputs it came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlu_cli.errors import FileError
from rlu_cli.files.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 256 * 1024

CHECKSUM = "sha256"
"""Under which a description holds `sha256_described` of itself."""


def sha256_file(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb", buffering=0) as handle:
            buffer = memoryview(bytearray(_CHUNK))
            while count := handle.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise FileError(
            f"{path}: can't be read ({one_line(error.strerror)}); check the path and permissions."
        ) from error
    return digest.hexdigest()


def sha256_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hexadecimal SHA-256 of tensors: names, types, shapes and numbers, whatever file they come from."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256_described(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Of all numbers and of all that is said of them, JSON values, but for an older such digest."""
    said = json.dumps({key: value for key, value in about.items() if key != CHECKSUM}, sort_keys=True)
    return hashlib.sha256(f"{said}\0{sha256_tensors(tensors)}".encode()).hexdigest()
