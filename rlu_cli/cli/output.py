"""Where data goes: stdout, or a file that appears whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlu_cli.errors import FileError

Write = Callable[[str], None]


@contextmanager
def open_output(target: str) -> Iterator[Write]:
    """A function that writes text to ``target``; ``-`` is stdout.

    Text for stdout goes out at once, so that a pipeline sees each line when it is ready; a file is
    written beside its place and renamed when the block ends well.
    """
    if target == "-":

        def write(text: str) -> None:
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise FileError(
                    f"stdout can't be written ({error.strerror}); check where it goes and free space there"
                ) from error

        yield write
        return
    from rlu_cli.files.atomic import atomic_write

    with atomic_write(Path(target)) as handle:

        def write_file(text: str) -> None:
            handle.write(text.encode("utf-8"))

        yield write_file
