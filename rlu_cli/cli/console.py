"""What people see, on stderr: progress, tables, warnings and errors. stdout is for data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlu_cli.audit.progress import Reporter, Update, silent

if TYPE_CHECKING:
    from rich.console import Console


class Terminal:
    """stderr, as far as the user wants to see anything there."""

    def __init__(self, *, quiet: bool, verbose: int) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.interactive = sys.stderr.isatty() and not quiet

    @property
    def reporter(self) -> Reporter:
        """Progress bars, on a terminal only."""
        return _progress_bar if self.interactive else silent

    @property
    def shows_tables(self) -> bool:
        """Tables are for people: on a terminal, or when asked for with -v."""
        return self.interactive or (self.verbose > 0 and not self.quiet)

    def warn(self, warnings: Sequence[dict[str, str]]) -> None:
        """One line a warning."""
        if self.quiet:
            return
        for warning in warnings:
            _say(f"warning [{warning['code']}]: {warning['message']}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table: two columns of text, then numbers, and text again under an empty heading."""
        if not self.shows_tables:
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            numeric = number > 1 and column != ""
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_escape(cell) for cell in row))
        _console().print(table)


def recovery_table(terminal: Terminal, document: dict[str, Any]) -> None:
    """The counts of one `recover` document, with a bar each."""
    classes = document["classes"]
    largest = max(1, *(entry["count"] for entry in classes))
    rows = [
        [
            str(entry["index"]),
            entry["name"],
            str(entry["count"]),
            f"{entry['estimate']:.1f}",
            "█" * round(24 * entry["count"] / largest),
        ]
        for entry in classes
    ]
    training, diagnostics = document["training"], document["diagnostics"]
    match = diagnostics["embedding_match"]
    title = (
        f"{document['inputs']['local']['path']}: {document['total']} samples, "
        f"{training['steps']} step{'s' if training['steps'] != 1 else ''} of {training['batch_size']}, "
        f"method {document['method']}; "
        f"model accuracy {diagnostics['aux_accuracy']:.0%}, embedding match "
        + ("unknown" if match is None else f"{match:.3f}")
    )
    terminal.table(title, ("index", "class", "count", "estimate", ""), rows)


def evaluation_table(terminal: Terminal, document: dict[str, Any]) -> None:
    """The scores of one `evaluate` document, the uniform guess last."""
    entries = [*document["results"], {"method": "(uniform guess)", **document["baselines"]["uniform"]}]
    keys = ("cAcc", "iAcc", "exact_counts", "total_variation")
    rows = [[entry["method"], "", *(f"{entry[key]:.3f}" for key in keys)] for entry in entries]
    title = f"against a truth of {document['truth']['total']} samples"
    terminal.table(title, ("method", "", "cAcc", "iAcc", "exact counts", "total variation"), rows)


def print_error(message: str) -> None:
    """One error, on stderr."""
    _say(f"error: {message}")


def _say(text: str) -> None:
    """One line on stderr that ends in a full stop."""
    line = " ".join(text.split())
    stop = "" if line.endswith((".", "!", "?")) else "."
    sys.stderr.write(f"rlu: {line}{stop}\n")


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def _progress_bar(description: str) -> Iterator[Update]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(), transient=True) as progress:
        task = progress.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield update
