"""Values from flags, checkpoint metadata and sidecars: the first that has one, and who that was."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.files.json_io import parse_json
from rlu_cli.files.metadata import first_of
from rlu_cli.images.normalize import parse_normalization
from rlu_cli.models.spec import parse_spec

T = TypeVar("T")

_WHERE = {
    "flag": "the command line",
    "local": "the local checkpoint's metadata",
    "global": "the global checkpoint's metadata",
    "sidecar": "round.json",
    "config": "config.json",
}


@dataclass
class Annotations:
    """The places that may say what the command line leaves open.

    config : what timm's or transformers' ``config.json`` says
    sources : filled by `get`, name → flag, local, global, sidecar or config
    """

    local: Mapping[str, str] = field(default_factory=dict)
    reference: Mapping[str, str] = field(default_factory=dict)
    sidecar: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, flag: object, parse: Callable[[str], T]) -> T | None:
        """The value of ``name``, parsed, or None where nobody says.

        Raises
        ------
        UsageError, MismatchError
            The flag's value can't be parsed, or a file's; the message says where it stands.
        """
        value, source = first_of(name, flag, self.local, self.reference, self.sidecar, self.config)
        if source is None:
            return None
        self.sources[name] = source
        try:
            return parse(str(value))
        except (ValueError, UsageError) as error:
            if source == "flag" and isinstance(error, UsageError):
                raise
            option = "--" + name.replace("_", "-")
            fault = UsageError if source == "flag" else MismatchError
            raise fault(
                f"{name} in {_WHERE[source]}: {error}; found {str(value)[:60]!r}. Correct it with {option}."
            ) from None


def text(value: str) -> str:
    """Any text, stripped."""
    return value.strip()


def number(value: str) -> float:
    """A finite number."""
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    if not math.isfinite(parsed):
        raise ValueError("expected a number")
    return parsed


def numbers(value: str) -> tuple[float, ...]:
    """One number, or several separated by commas (a JSON list is one too)."""
    return tuple(number(part) for part in value.strip().removeprefix("[").removesuffix("]").split(","))


def whole(value: str) -> int:
    """A whole number."""
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    if not math.isfinite(parsed) or parsed != int(parsed):
        raise ValueError("expected a whole number")
    return int(parsed)


def boolean(value: str) -> bool:
    """true or false."""
    truths = {"true": True, "1": True, "false": False, "0": False}
    if value.strip().lower() not in truths:
        raise ValueError("expected true or false")
    return truths[value.strip().lower()]


def architecture(value: str) -> str:
    """The text of an architecture."""
    parse_spec(value)
    return value.strip()


def normalization(value: str) -> str:
    """The text of a normalisation."""
    parse_normalization(value)
    return value.strip()


def image_size(value: str) -> tuple[int, int]:
    """HxW, or one side of a square; a JSON list [H, W] too."""
    parts = value.lower().strip().removeprefix("[").removesuffix("]").replace("x", ",").split(",")
    try:
        sides = [int(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError("expected an image size such as 28 or 32x48 (height x width)")
    return sides[0], sides[-1]


def name_list(value: str) -> tuple[str, ...]:
    """A JSON list of strings."""
    try:
        parsed = parse_json(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed) or not parsed:
        raise ValueError("expected a JSON list of names")
    return tuple(parsed)
