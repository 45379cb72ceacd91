"""Checks of the keyword arguments that every built-in architecture takes.

The values may come from a file's metadata, so a wrong type is a user's error here and never a traceback.
"""

from __future__ import annotations

from rlu_cli.errors import UsageError


def as_count(name: str, value: object, *, minimum: int = 1) -> int:
    """``value`` as an integer of at least ``minimum``; ``name`` is the keyword for the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name} must be a whole number of at least {minimum}, got {value!r}.")
    return value


def as_size(value: object, *, minimum: int = 1) -> tuple[int, int]:
    """An image size as (height, width) in pixels; a single integer means a square."""
    parts = value if isinstance(value, (tuple, list)) else (value, value)
    if len(parts) != 2:
        raise UsageError(f"image_size must be a side or HEIGHTxWIDTH in pixels, got {value!r}.")
    height, width = (as_count("image_size", part, minimum=minimum) for part in parts)
    return height, width
