"""How long computations say how far they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


def ignore(done: int, total: int) -> None:
    """Nobody listens."""
