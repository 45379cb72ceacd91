"""Options beside a statistics file: what it was made with stands, and no flag may contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from rlu_cli.audit.annotations import image_size
from rlu_cli.audit.options import ModelOptions
from rlu_cli.errors import FileError, UsageError
from rlu_cli.images import parse_normalization
from rlu_cli.models import parse_spec

_LIBRARIES = ("builtin", "torchvision", "timm")

_DROPOUT: Mapping[str | None, Literal["off", "on"]] = {"off": "off", "on": "on"}


def options_beside(options: ModelOptions, about: Mapping[str, Any], path: Path) -> ModelOptions:
    """The options, completed by what the statistics in ``path`` were made with.

    A local model must be fed as the global one was. Only an architecture that is the user's own code is
    not taken from the file: that comes from ``--arch`` alone.

    Raises
    ------
    UsageError
        A flag says something else.
    FileError
        What the file says can't be read.
    """
    names = [field.name for field in fields(ModelOptions) if field.name != "key"]  # checked against the file
    stored = {name: _text(about.get(name)) for name in names}
    _check(stored, path)
    for name, said in stored.items():
        given = getattr(options, name)
        if given is not None and not _same(name, given, said):
            found = "none" if said is None else said
            raise UsageError(
                f"expected no --{name.replace('_', '-')} beside --stats, or what {path} was made with "
                f"({found}), found {given}: leave it out, or run `rlu estimate-logits` again with it"
            )
    arch = stored["arch"]
    if arch is not None and parse_spec(arch).kind not in _LIBRARIES:
        arch = None
    return replace(
        options,
        arch=options.arch or arch,
        head=options.head or stored["head"],
        normalize=options.normalize or stored["normalize"],
        image_size=options.image_size or stored["image_size"],
        batch_norm=options.batch_norm or ("running" if stored["batch_norm"] == "running" else None),
        dropout=options.dropout or _DROPOUT.get(stored["dropout"]),
    )


def _check(stored: Mapping[str, str | None], path: Path) -> None:
    """Refuse values that no flag could have given."""
    readers = {"arch": parse_spec, "normalize": parse_normalization, "image_size": image_size}
    for name, read in readers.items():
        value = stored[name]
        try:
            if value is not None:
                read(value)
        except (UsageError, ValueError) as error:
            raise FileError(
                f"{path}: damaged statistics file: {str(error).rstrip('.')}; write it again with `rlu "
                "estimate-logits -o`"
            ) from error


def _text(value: object) -> str | None:
    """A value of the statistics file as its flag would give it."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return None if value is None else str(value)


def _same(name: str, given: str, said: str | None) -> bool:
    """Whether a flag means what the statistics were made with."""
    if said is None or given == said:
        return given == said
    if name == "arch":
        asked, built = parse_spec(given), parse_spec(said)
        return asked.name == built.name and asked.kwargs.items() <= built.kwargs.items()
    if name == "normalize":
        return str(parse_normalization(given)) == said
    if name == "image_size":
        try:
            return image_size(given) == image_size(said)
        except ValueError:
            return False
    return False
