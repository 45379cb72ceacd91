"""How long work reports that it is getting on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Update = Callable[[int, int], None]
"""Called with (done, total)."""

Reporter = Callable[[str], AbstractContextManager[Update]]
"""Given a description, a context that yields an `Update`."""


def _ignore(done: int, total: int) -> None:
    pass


def silent(description: str) -> AbstractContextManager[Update]:
    """A reporter that says nothing."""
    return nullcontext(_ignore)
