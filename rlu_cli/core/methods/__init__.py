"""Recovery methods, one a file, behind one interface."""

from __future__ import annotations

from rlu_cli.core.methods.base import Method
from rlu_cli.core.methods.random import RANDOM
from rlu_cli.core.methods.rlu import RLU
from rlu_cli.errors import UsageError

METHODS: dict[str, Method] = {method.name: method for method in (RLU, RANDOM)}

AUTO = RLU.name
"""What ``auto`` stands for: the best method there is."""


def get_method(name: str) -> Method:
    """The method called ``name``; ``auto`` is the best one.

    Raises
    ------
    UsageError
        No such method.
    """
    method = METHODS.get(AUTO if name == "auto" else name)
    if method is None:
        raise UsageError(f"expected a method among auto, {', '.join(METHODS)}, found {name!r}")
    return method


__all__ = ["AUTO", "METHODS", "Method", "get_method"]
