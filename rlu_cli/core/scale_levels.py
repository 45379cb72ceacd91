"""How nearly the factor of a scaled update is known, in a few levels, so that clients share replays."""

from __future__ import annotations

SCALE_LEVELS = (0.0125, 0.035, 0.08, 0.16, 0.32, 0.64, 1.28)
"""Standard deviations of the logarithm of an estimated factor that replays' own estimates are given."""


def scale_level(deviation: float) -> float:
    """The least level that a standard deviation doesn't exceed; the last one for any vaguer factor."""
    return next((level for level in SCALE_LEVELS if deviation <= level), SCALE_LEVELS[-1])
