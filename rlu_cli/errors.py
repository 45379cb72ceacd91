"""Errors that a user can act on, and the exit code of each kind.

Every message is one short paragraph that says what was expected, what was found and what to do.
The library raises these; only the command line turns them into text and an exit code.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the exit status of ``rlu`` means."""

    OK = 0
    BUG = 1
    """A fault of ours: an exception that nothing foresaw."""
    USAGE = 2
    """The command line makes no sense."""
    FILE = 3
    """A file is unreadable, or refused because reading it could run code."""
    MISMATCH = 4
    """Inputs disagree: shapes, class counts, missing training values."""
    UNRELIABLE = 5
    """Solved, but a check says not to trust it (``--strict`` only)."""
    PARTIAL = 6
    """A batch finished with some of its pairs failed."""
    INTERRUPTED = 130


class RluError(Exception):
    """Base of all errors that a user can act on."""

    exit_code: ExitCode = ExitCode.BUG


class UsageError(RluError):
    """The request makes no sense as it stands: a bad option value or combination."""

    exit_code = ExitCode.USAGE


class NotInstalledError(UsageError):
    """The request needs a package that is an extra of ours."""


class FileError(RluError):
    """A file is missing, damaged, of a kind we don't read, or unsafe to read."""

    exit_code = ExitCode.FILE


class MismatchError(RluError):
    """Inputs that are readable one by one but don't belong together, or miss a needed value."""

    exit_code = ExitCode.MISMATCH


class UnreliableError(RluError):
    """An answer exists but fails a check, and the user asked for ``--strict``."""

    exit_code = ExitCode.UNRELIABLE
