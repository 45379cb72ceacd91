"""The text that names an architecture: ``--arch`` on the command line, ``fl.arch`` in a file's metadata.

::

    lenet5                                       built in
    vgg16:activation=elu,num_classes=100         built in, with keyword arguments
    torchvision:NAME[:key=value,…]               torchvision.models, when installed
    timm:NAME[:key=value,…]                      timm, when installed
    package.module:factory[:key=value,…]         the user's own code (``--arch`` only)
    path/to/file.py:factory[:key=value,…]        the user's own code (``--arch`` only)

Parsing imports nothing and knows nothing about the disk, so it is safe on text of any origin.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from rlu_cli.errors import UsageError

Kind = Literal["builtin", "torchvision", "timm", "module", "file"]

BUILTIN_NAMES = ("lenet5", "vgg16", "resnet32", "resnet50")

IMAGE_SIZES = ("image_size", "img_size")
"""Keyword arguments that take a height and width, ``28x32``: ours and timm's."""

_NAME = r"[A-Za-z_]\w*"
_LIBRARY = re.compile(r"(?P<kind>torchvision|timm):(?P<target>[\w./-]+)")
_FILE = re.compile(rf"(?P<target>.+?\.py):(?P<factory>{_NAME}(?:\.{_NAME})*)", re.DOTALL)
_MODULE = re.compile(rf"(?P<target>{_NAME}(?:\.{_NAME})*):(?P<factory>{_NAME}(?:\.{_NAME})*)")
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SIZE = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")


@dataclass(frozen=True)
class ModelSpec:
    """A parsed architecture text. ``parse_spec(str(spec)) == spec`` for every spec that was parsed.

    Attributes:
        name: everything before the keyword arguments, e.g. ``timm:resnet18`` or ``models.py:make``.
        kwargs: the keyword arguments for the factory.
        kind: who builds it.
        target: the architecture's name, the module's dotted name or the file's path.
        factory: what to call in the module or file; None for the other kinds.
    """

    name: str
    kwargs: dict[str, object] = field(default_factory=dict, hash=False)
    kind: Kind = field(init=False, compare=False, repr=False)
    target: str = field(init=False, compare=False, repr=False)
    factory: str | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        kind, target, factory = _split_name(self.name)
        object.__setattr__(self, "kwargs", dict(self.kwargs))
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "factory", factory)

    def __str__(self) -> str:
        """The canonical text: keys sorted, ``true``/``false``, ``28x28`` for sizes."""
        pairs = ",".join(f"{key}={_value_text(self.kwargs[key])}" for key in sorted(self.kwargs))
        return f"{self.name}:{pairs}" if pairs else self.name


def parse_spec(text: str) -> ModelSpec:
    """Read an architecture text; a malformed one is a UsageError that shows the right form."""
    text = text.strip()
    name, arguments = _split_arguments(text)
    _split_name(name)  # a wrong name is the first thing to say
    return ModelSpec(name, _parse_arguments(arguments, text) if arguments is not None else {})


def _split_arguments(text: str) -> tuple[str, str | None]:
    """Cut the text behind its name; the arguments are None when there is no colon for them."""
    for pattern in (_LIBRARY, _FILE, _MODULE):
        match = pattern.match(text)
        if match is None:
            continue
        if pattern is _MODULE and match["target"].lower() in (*BUILTIN_NAMES, "torchvision", "timm"):
            continue
        rest = text[match.end() :]
        if rest == "":
            return text, None
        if rest.startswith(":"):
            return match.group(), rest[1:]
    name, colon, arguments = text.partition(":")
    return (name.lower() if _WORD.fullmatch(name) else name), arguments if colon else None


def _split_name(name: str) -> tuple[Kind, str, str | None]:
    if match := _LIBRARY.fullmatch(name):
        return ("torchvision" if match["kind"] == "torchvision" else "timm"), match["target"], None
    if match := _FILE.fullmatch(name):
        return "file", match["target"], match["factory"]
    if (match := _MODULE.fullmatch(name)) and match["target"] not in ("torchvision", "timm"):
        return "module", match["target"], match["factory"]
    if name in ("torchvision", "timm"):
        raise UsageError(f"{name} needs the name of one of its models, e.g. {name}:resnet18.")
    if _WORD.fullmatch(name):
        return "builtin", name, None
    if name.endswith(".py"):
        raise UsageError(f"{name!r} names no factory: write {name}:factory, e.g. {name}:make_model.")
    raise UsageError(
        f"{name!r} names no architecture: expected a built-in name ({', '.join(BUILTIN_NAMES)}), "
        "torchvision:NAME, timm:NAME, package.module:factory or path/to/file.py:factory, "
        "e.g. vgg16:activation=elu,num_classes=100."
    )


def _parse_arguments(arguments: str, text: str) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    for pair in arguments.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value or not key.isidentifier():
            raise UsageError(
                f"Can't read {pair!r} in {text!r}: expected key=value pairs separated by commas, "
                "e.g. vgg16:activation=elu,num_classes=100."
            )
        if key in kwargs:
            raise UsageError(f"{key} is given twice in {text!r}: keep one of them.")
        kwargs[key] = _parse_value(key, value)
    return kwargs


def _parse_value(key: str, value: str) -> object:
    if key in IMAGE_SIZES and (size := _SIZE.fullmatch(value)):
        return int(size[1]), int(size[2])
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _INTEGER.fullmatch(value):
        return int(value)
    if _FLOAT.fullmatch(value) and math.isfinite(number := float(value)):
        return number
    return value


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "x".join(str(part) for part in value)
    return str(value)
