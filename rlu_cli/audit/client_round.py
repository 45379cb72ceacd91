"""One client's round, opened and then recovered: alone, or with others where that costs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rlu_cli.audit.options import Update
from rlu_cli.audit.progress import Reporter
from rlu_cli.audit.training import TrainingRecord
from rlu_cli.core.methods import METHODS, Method
from rlu_cli.core.methods.rlu import searches
from rlu_cli.core.recover import recover_together
from rlu_cli.core.types import Note, Observation, Recovery
from rlu_cli.errors import RluError
from rlu_cli.files.shards import sha256_checkpoint

_TOGETHER, _BYTES = 16, 2**28
"""Clients that are recovered together at most, and bytes of the local models' statistics."""


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What is known of one client's round.

    observations : what it is recovered from by each of the methods asked for, in their order
    """

    path: Path
    training: TrainingRecord
    notes: tuple[Note, ...]
    update: Update
    observations: tuple[Observation, ...]


@dataclass(frozen=True, kw_only=True)
class ClientRound(_Round):
    """What was recovered of it, by each of the methods asked for, in their order."""

    sha256: str
    recoveries: tuple[Recovery, ...]


@dataclass(frozen=True, kw_only=True)
class OpenedRound(_Round):
    """Ready to be recovered.

    report : of the methods' progress
    """

    methods: tuple[Method, ...]
    report: Reporter

    @property
    def waits(self) -> bool:
        """Whether others should be recovered with it: by the posterior search, and nothing else."""
        return all(method is METHODS["rlu"] for method in self.methods) and searches(self.observations[0])

    @property
    def bytes(self) -> int:
        """What is kept of it in memory while it waits."""
        end = self.observations[0].end
        return 0 if end is None else end.moments.mean.nbytes + end.moments.factor.nbytes

    def recovered(self, recoveries: tuple[Recovery, ...]) -> ClientRound:
        """With its counts."""
        known = {part.name: getattr(self, part.name) for part in fields(_Round)}
        return ClientRound(**known, sha256=sha256_checkpoint(self.path), recoveries=recoveries)


def recovered(rounds: Iterable[OpenedRound]) -> Iterator[ClientRound]:
    """The clients' counts, in their order.

    Those whose methods share their work are recovered together, a few at a time, so that memory doesn't grow
    with their number. Where the next one can't be opened, those before it come first.
    """
    opened, waiting = iter(rounds), list[OpenedRound]()
    while True:
        try:
            one = next(opened, None)
        except Exception:
            yield from _together(waiting)
            raise
        if one is None or not one.waits:
            yield from _together(waiting)
            waiting = []
        if one is None:
            return
        waiting.append(one)
        full = len(waiting) == _TOGETHER or sum(each.bytes for each in waiting) >= _BYTES
        if full or not one.waits:
            yield from _together(waiting)
            waiting = []


def _together(opened: Sequence[OpenedRound]) -> Iterator[ClientRound]:
    """Counts of clients with the same methods."""
    if not opened:
        return
    first = opened[0]
    try:
        with first.report(f"simulating clients like {first.path.stem}") as update:
            found = [
                recover_together(
                    [replace(one.observations[index], progress=update) for one in opened], method=method.name
                )
                for index, method in enumerate(first.methods)
            ]
    except RluError:
        if len(opened) == 1:
            raise
        for one in opened:  # up to the one that can't be recovered
            yield from _together([one])
        return
    for one, *recoveries in zip(opened, *found, strict=True):
        yield one.recovered(tuple(recoveries))
