"""What people see, on stderr: progress, tables, warnings and errors. stdout is for data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlu_cli.audit.progress import Reporter, Update, silent
from rlu_cli.files.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_BAR, _BAR_BESIDE_BOUNDS = 24, 14
"""Characters of the longest bar: a terminal of 80 columns has room for all."""


class Terminal:
    """stderr, as far as the user wants to see anything there."""

    def __init__(self, *, quiet: bool, verbose: int) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.interactive = sys.stderr.isatty() and not quiet
        self._said: set[str] = set()

    @property
    def reporter(self) -> Reporter:
        """Progress bars, on a terminal only."""
        return _progress_bar if self.interactive else silent

    @property
    def shows_tables(self) -> bool:
        """Tables are for people: on a terminal, or when asked for with -v."""
        return self.interactive or (self.verbose > 0 and not self.quiet)

    def warn(self, warnings: Sequence[dict[str, str]], *, about: str | None = None) -> None:
        """One line a warning, each said once; ``about`` names what it is about, where that is not plain."""
        if self.quiet:
            return
        for warning in warnings:
            line = f"warning [{warning['code']}]: " + (f"{about}: " if about else "") + warning["message"]
            if line not in self._said:
                _say(line)
                self._said.add(line)

    def say(self, text: str) -> None:
        """One line of information."""
        if not self.quiet:
            _say(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table: two columns of text, then numbers, and text again under an empty heading."""
        if not self.shows_tables:
            return
        from rich.table import Table

        table = Table()
        for number, column in enumerate(columns):
            numeric = number > 1 and column != ""
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_escape(cell) for cell in row))
        console = _console()
        console.print(_escape(title), style="bold", soft_wrap=True)
        console.print(table)


def recovery_table(terminal: Terminal, document: dict[str, Any]) -> None:
    """The counts of one `recover` document with a bar each, and their bounds where the method has them."""
    classes = document["classes"]
    largest = max(1, *(entry["count"] for entry in classes))
    bounded = classes[0]["low"] is not None
    width = _BAR_BESIDE_BOUNDS if bounded else _BAR

    def bounds(entry: dict[str, Any]) -> list[str]:
        return [f"{entry['low']:.0f}–{entry['high']:.0f}", f"{entry['presence']:.0%}"] if bounded else []

    rows = [
        [
            str(entry["index"]),
            entry["name"],
            str(entry["count"]),
            f"{entry['estimate']:.1f}",
            *bounds(entry),
            "█" * round(width * entry["count"] / largest),
        ]
        for entry in classes
    ]
    training, diagnostics = document["training"], document["diagnostics"]
    match = diagnostics["embedding_match"]
    trust = document["reliability"]
    expected = trust["expected_iAcc"]
    title = (
        f"{document['inputs']['local']['path']}: {document['total']} samples, "
        f"{training['steps']} step{'s' if training['steps'] != 1 else ''} of {training['batch_size']}, "
        f"method {document['method']}; "
        f"model accuracy {diagnostics['aux_accuracy']:.0%}, embedding match "
        + ("unknown" if match is None else f"{match:.3f}")
        + f"; reliability {trust['grade']}"
        + ("" if expected is None else f", expected iAcc {expected:.2f}")
        + (f" ({', '.join(trust['reasons'])})" if trust["reasons"] else "")
    )
    if "sensitivity" in document:
        moved = [f"{e['value']} ×{e['factor']:.2f} {e['moved']:.0%}" for e in document["sensitivity"]]
        title += f"; labels moved if off: {', '.join(moved)}"
    columns = ("index", "class", "count", "estimate", *(("95 %", "present") if bounded else ()), "")
    terminal.table(title, columns, rows)


def evaluation_table(terminal: Terminal, document: dict[str, Any]) -> None:
    """The scores of one `evaluate` document, the uniform guess last."""
    entries = [*document["results"], {"method": "(uniform guess)", **document["baselines"]["uniform"]}]
    keys = ("cAcc", "iAcc", "exact_counts", "total_variation")
    rows = [[entry["method"], "", *(f"{entry[key]:.3f}" for key in keys)] for entry in entries]
    title = f"against a truth of {document['truth']['total']} samples"
    terminal.table(title, ("method", "", "cAcc", "iAcc", "exact counts", "total variation"), rows)


def archive_table(terminal: Terminal, document: dict[str, Any]) -> None:
    """Mean and spread by round and method."""

    def spread(entry: dict[str, Any], key: str) -> str:
        sd = entry[key]["sd"]
        return f"{entry[key]['mean']:.3f}" + ("" if sd is None else f"±{sd:.3f}")

    rows = [
        [
            str(entry["round"]),
            entry["method"],
            f"{entry['model_accuracy']:.1%}",
            str(entry["clients"]),
            *(spread(entry, key) for key in ("cAcc", "iAcc")),
            "" if entry["grades"] is None else "/".join(str(n) for n in entry["grades"].values()),
        ]
        for entry in document["summary"]
    ]
    columns = ("round", "method", "model", "n", "cAcc", "iAcc", "grades")
    terminal.table(
        f"{document['archive']}: mean ± standard deviation over n clients; grades good/fair/poor",
        columns,
        rows,
    )


def print_error(message: str) -> None:
    """One error, on stderr."""
    _say(f"error: {message}")


def _say(text: str) -> None:
    """One line on stderr that ends in a full stop."""
    line = printable(" ".join(text.split()))
    stop = "" if line.endswith((".", "!", "?")) else "."
    sys.stderr.write(f"rlu: {line}{stop}\n")


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def round_progress(terminal: Terminal, rounds: int) -> Iterator[Callable[[int, float], None]]:
    """A bar over the rounds of a simulation that shows the accuracy and the time left."""
    if not terminal.interactive:
        yield lambda number, accuracy: None
        return
    with _progress() as progress:
        task = progress.add_task("simulating", total=rounds)

        def advance(number: int, accuracy: float) -> None:
            progress.update(task, completed=number, description=f"round {number}, accuracy {accuracy:.1%}")

        yield advance


@contextmanager
def _progress_bar(description: str) -> Iterator[Update]:
    with _progress() as progress:
        task = progress.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield update


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=_console(), transient=True)
