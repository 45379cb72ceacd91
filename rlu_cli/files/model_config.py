"""``config.json`` beside a checkpoint, as timm and transformers write it: what a network is, and is fed.

The user didn't name the file, and it is read as data: what it says becomes the same annotations that a
checkpoint's metadata may hold, and an architecture is only ever a name in timm's registry. What can't be used
is left out, with a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlu_cli.errors import FileError
from rlu_cli.files.json_io import read_json
from rlu_cli.files.text import names, one_line

CONFIG_NAME = "config.json"
CONFIG_LIMIT = 16 * 1024 * 1024

_REGISTRY_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)?\Z")
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]+\Z")
_PLACEHOLDER = re.compile(r"LABEL_\d+\Z")
"""What transformers calls classes that nobody named."""
_SIDE_LIMIT = 100_000
_LARGEST = 1e15


@dataclass(frozen=True)
class ModelConfig:
    """What a ``config.json`` says.

    values : annotations: ``fl.arch``, ``fl.class_names``, ``fl.normalize``, ``fl.image_size``
    ignored : what it says that can't be used, and why
    """

    path: Path | None = None
    values: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def read_config(*checkpoints: Path) -> ModelConfig:
    """The ``config.json`` beside the first of ``checkpoints`` that has one; empty where none does.

    A file of that name that isn't a model's says nothing, and one that can't be read is only noted.
    """
    for checkpoint in checkpoints:
        path = Path(checkpoint).parent / CONFIG_NAME
        if not path.is_file():
            continue
        try:
            document = read_json(path, limit=CONFIG_LIMIT)
        except FileError as error:
            return ModelConfig(path, {}, (str(error),))
        return _interpret(path, document) if isinstance(document, dict) else ModelConfig(path)
    return ModelConfig()


def _interpret(path: Path, document: Mapping[str, Any]) -> ModelConfig:
    values: dict[str, str] = {}
    ignored: list[str] = []
    about = document.get("pretrained_cfg")
    about = about if isinstance(about, dict) else {}
    readers: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]] = {
        "fl.arch": _architecture,
        "fl.class_names": _class_names,
        "fl.normalize": _normalization,
        "fl.image_size": _image_size,
    }
    for key, reader in readers.items():
        try:
            value = reader(document, about)
        except ValueError as error:
            ignored.append(f"{path}: {error}")
        else:
            if value is not None:
                values[key] = value
    return ModelConfig(path, values, tuple(ignored))


def _architecture(document: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """timm's ``architecture`` with its arguments, as ``--arch`` takes it."""
    name = document.get("architecture", about.get("architecture"))
    if name is None:
        return None
    if not isinstance(name, str) or not _REGISTRY_NAME.match(name):
        raise ValueError(
            f"expected architecture to be a name in timm's registry, found {one_line(repr(name), 60)}"
        )
    arguments = document.get("model_args")
    arguments = dict(arguments) if isinstance(arguments, dict) else {}
    classes = document.get("num_classes")
    if isinstance(classes, int) and not isinstance(classes, bool):
        arguments.setdefault("num_classes", classes)
    channels = _input_size(about)[:1]
    if channels and channels != (3,):
        arguments.setdefault("in_chans", channels[0])
    for key, value in arguments.items():
        if isinstance(value, list) and len(value) == 2 and all(map(_is_side, value)):
            arguments[key] = f"{value[0]}x{value[1]}"
    wrong = [key for key, value in arguments.items() if not _is_argument(key, value)]
    if wrong:
        raise ValueError(
            f"expected model_args to be plain values, found others ({names(wrong)}); give the architecture"
            " with --arch"
        )
    written = ",".join(f"{key}={_written(arguments[key])}" for key in sorted(arguments))
    return f"timm:{name}:{written}" if written else f"timm:{name}"


def _is_argument(key: object, value: object) -> bool:
    if not isinstance(key, str) or not key.isidentifier():
        return False
    if isinstance(value, str):
        return bool(_PLAIN.match(value))
    return isinstance(value, bool) or _is_number(value)


def _is_number(value: object) -> bool:
    """A finite number of a size that its text keeps."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _class_names(document: Mapping[str, Any], _about: Mapping[str, Any]) -> str | None:
    """timm's ``label_names``, or transformers' ``id2label``, as a JSON list by output index."""
    listed = document.get("label_names")
    numbered = document.get("id2label")
    if not isinstance(listed, list):
        if not isinstance(numbered, dict) or not numbered:
            return None
        by_index = {int(key): value for key, value in numbered.items() if str(key).isdecimal()}
        if sorted(by_index) != list(range(len(numbered))):
            raise ValueError("expected id2label to name the outputs 0, 1, 2, …, found gaps")
        listed = [by_index[index] for index in range(len(by_index))]
    if not all(isinstance(name, str) for name in listed):
        raise ValueError("expected class names to be text, found others")
    if not listed or all(_PLACEHOLDER.match(name) for name in listed):
        return None
    return json.dumps(listed, ensure_ascii=False)


def _normalization(_document: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """``mean`` and ``std`` of the inputs, as ``--normalize`` takes them."""
    mean, std = about.get("mean"), about.get("std")
    if mean is None and std is None:
        return None
    for value in (mean, std):
        if not isinstance(value, list) or not 0 < len(value) <= 64 or not all(map(_is_number, value)):
            raise ValueError("expected mean and std to be lists of numbers, found others")
    assert isinstance(mean, list) and isinstance(std, list)
    if min(std) <= 0:
        raise ValueError("expected each std to be above 0, found others")
    return ";".join(f"{key}={','.join(map(repr, value))}" for key, value in (("mean", mean), ("std", std)))


def _input_size(about: Mapping[str, Any]) -> tuple[int, ...]:
    """``input_size`` (channels, height, width); empty where there is none."""
    size = about.get("input_size")
    if size is None:
        return ()
    if not isinstance(size, list) or len(size) != 3 or not all(map(_is_side, size)):
        found = one_line(repr(size), 60)
        raise ValueError(f"expected input_size to be [channels, height, width], found {found}")
    return tuple(size)


def _is_side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _SIDE_LIMIT


def _image_size(_document: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    size = _input_size(about)
    return f"{size[1]}x{size[2]}" if size else None
