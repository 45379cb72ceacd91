"""Ctrl-C, remembered: native code that calls Python may make an error of its own of KeyboardInterrupt."""

from __future__ import annotations

import signal
from types import FrameType

_heard = False


def listen() -> None:
    """From now on Ctrl-C is remembered; it raises KeyboardInterrupt as before. Ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def raise_if_heard() -> None:
    """To be called where an error may be an interrupt that was wrapped.

    Raises
    ------
    KeyboardInterrupt
        There was one.
    """
    if _heard:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    signal.default_int_handler(number, frame)
