"""Files of a fit's numbers, as `--cache` keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlu_cli.core.fits import Arrays
from rlu_cli.errors import FileError
from rlu_cli.files.hashing import CHECKSUM, sha256_described
from rlu_cli.files.json_io import parse_json
from rlu_cli.files.safetensors_io import read_safetensors, save_safetensors

_KIND = "rlu.fit"


def write_fit(path: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Write a safetensors file, byte for byte the same for the same numbers.

    Parameters
    ----------
    about : JSON values
    """
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in arrays.items()}
    described = {**about, CHECKSUM: sha256_described(about, tensors)}
    save_safetensors(path, tensors, {_KIND: json.dumps(described, sort_keys=True, allow_nan=False)})


def read_fit(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays, and what is said of them.

    Raises
    ------
    FileError
        Unreadable, or not as `write_fit` left it.
    """
    tensors, metadata = read_safetensors(path)
    try:
        about = parse_json(metadata.get(_KIND, ""))
    except ValueError:
        about = None
    if not isinstance(about, dict) or about.get(CHECKSUM) != sha256_described(about, tensors):
        raise FileError(f"{path}: expected a fit as rlu keeps it, found other content")
    return {name: tensor.numpy() for name, tensor in tensors.items()}, about
