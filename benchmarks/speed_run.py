"""Cases of benchmarks/speed.py, run one by one within a time, printed and written as they come."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import write_ndjson

Row = dict[str, Any]
Case = tuple[Row, Callable[[], Row]]
"""What identifies a case, its sizes, and the work that measures it."""

Column = tuple[str, Callable[[Row], str]]


class Runner:
    """Runs cases so that neither one that fails nor one that takes too long loses the others.

    Parameters
    ----------
    output : NDJSON, written anew after each case
    budget : seconds in all, after which the remaining cases are left out
    case_limit : seconds after which a case is broken off
    """

    def __init__(self, output: Path, *, budget: float = math.inf, case_limit: float = math.inf) -> None:
        self.output = output
        self.case_limit = case_limit
        self.deadline = time.monotonic() + budget
        self.rows: list[Row] = []

    def keep_other_sections(self, sections: Sequence[str]) -> None:
        """What an earlier run wrote of sections that this one doesn't measure."""
        if self.output.exists():
            rows = [json.loads(line) for line in self.output.read_text(encoding="utf-8").splitlines()]
            self.rows += [row for row in rows if row["section"] not in (*sections, "machine")]

    def add(self, row: Row) -> None:
        self.rows.append({key: _finite(value) for key, value in row.items()})
        write_ndjson(self.output, self.rows)

    def section(self, name: str, cases: Sequence[Case], columns: Sequence[Column]) -> None:
        """Measures cases and prints them as a Markdown table, row by row."""
        print_line([title for title, _ in columns])
        print_line(["---"] * len(columns))
        for sizes, work in cases:
            row = {"section": name, **sizes, **self.attempt(work)}
            self.add(row)
            print_line(cells(row, columns))
        print(flush=True)

    def attempt(self, work: Callable[[], Row]) -> Row:
        """What the work measures, or ``error``, or ``skipped`` where there is no time left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return {"skipped": "no time left"}
        try:
            with time_limit(min(self.case_limit, left)):
                return work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cases are worth having
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return {
                "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            }


def _finite(value: Any) -> Any:
    """JSON knows neither infinity nor NaN: null for them."""
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread when the seconds are over, at its next Python instruction."""

    def over(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    if math.isinf(seconds):
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """A row's cells; where values are missing, the first such cell says why."""
    why = "skipped: " + row["skipped"] if "skipped" in row else row.get("error", "")
    shown = []
    for _, show in columns:
        try:
            shown.append(show(row))
        except KeyError:
            shown.append(why)
            why = ""
    return shown


def print_line(line: Sequence[str]) -> None:
    print("| " + " | ".join(line) + " |", flush=True)
