"""The ``fl.*`` annotations of an archived round, from a checkpoint's metadata or a sidecar file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from rlu_cli.errors import FileError
from rlu_cli.files.json_io import read_json

PREFIX = "fl."
SIDECAR_NAME = "round.json"
SIDECAR_LIMIT = 1_000_000

TRAINING_KEYS = (
    "fl.lr",
    "fl.lr_decay",
    "fl.batch_size",
    "fl.steps",
    "fl.epochs",
    "fl.dataset_size",
    "fl.scheme",
    "fl.optimizer",
    "fl.momentum",
    "fl.dampening",
    "fl.nesterov",
    "fl.weight_decay",
    "fl.lambda",
    "fl.beta1",
    "fl.beta2",
    "fl.eps",
    "fl.noise_std",
    "fl.clip",
)
MODEL_KEYS = ("fl.arch", "fl.normalize", "fl.image_size", "fl.class_names")
ROUND_KEYS = ("fl.round", "fl.client", "fl.participation", "fl.update")
KEYS = frozenset((*TRAINING_KEYS, *MODEL_KEYS, *ROUND_KEYS))
"""All that is read; a network may have weights of other names that begin so."""

Source = Literal["flag", "local", "global", "sidecar", "config"]
T = TypeVar("T")


def as_text(value: object) -> str | None:
    """A metadata string for a JSON value: ``true``, ``0.1``, ``["cat", "dog"]``; None for null."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def normalise(values: Mapping[str, object]) -> dict[str, str]:
    """``values`` as metadata: every key with the ``fl.`` prefix, every value a string, nulls left out.

    Raises:
        ValueError: A key is there both with and without the prefix, or a value has no JSON text.
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        full = key if key.startswith(PREFIX) else PREFIX + key
        if full in found:
            raise ValueError(f"{full} is given twice, with and without the prefix {PREFIX}")
        text = as_text(value)
        if text is not None:
            found[full] = text
    return found


def read_sidecar(local: Path | str) -> dict[str, str]:
    """The annotations in ``round.json`` beside a local checkpoint; empty where there is none.

    Raises:
        FileError: The file is unreadable, too large, or no JSON object.
    """
    path = Path(local).parent / SIDECAR_NAME
    if not path.exists():
        return {}
    values = read_json(path, limit=SIDECAR_LIMIT)
    if not isinstance(values, dict):
        raise FileError(
            f'{path}: expected a JSON object such as {{"fl.lr": 0.1}}, found a {type(values).__name__}.'
        )
    try:
        return normalise(values)
    except ValueError as error:
        raise FileError(f"{path}: {error}; keep one.") from error


def first_of(
    name: str,
    flag: T | None,
    local_md: Mapping[str, str],
    global_md: Mapping[str, str],
    sidecar: Mapping[str, str],
    config: Mapping[str, str] = MappingProxyType({}),
) -> tuple[T | str | None, Source | None]:
    """The value of annotation ``name`` and where it came from: the first source that has it.

    The flag comes back as it is, the others as strings; ``(None, None)`` where nobody says.
    ``name`` may leave out the ``fl.`` prefix.
    """
    if flag is not None:
        return flag, "flag"
    key = name if name.startswith(PREFIX) else PREFIX + name
    sources: tuple[tuple[Source, Mapping[str, str]], ...] = (
        ("local", local_md),
        ("global", global_md),
        ("sidecar", sidecar),
        ("config", config),
    )
    for source, values in sources:
        if key in values:
            return values[key], source
    return None, None
