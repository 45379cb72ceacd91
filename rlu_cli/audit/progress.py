"""How long work reports that it is getting on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rlu_cli.core.progress import Progress, ignore

Update = Progress

Reporter = Callable[[str], AbstractContextManager[Update]]
"""Given a description, a context that yields an `Update`."""


def silent(description: str) -> AbstractContextManager[Update]:
    """A reporter that says nothing."""
    return nullcontext(ignore)
