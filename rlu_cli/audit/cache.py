"""Statistics of models and methods' fits to them, kept in a folder under a key of all that they depend on.

An entry is a statistics file or a file of a fit's numbers, named by the SHA-256 of its facts: what the model,
the auxiliary data and the settings are, by content and not by path. Anything that differs has another name.
Files appear whole or not at all, so several processes may share a folder, and any file may be deleted at any
time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlu_cli import __version__
from rlu_cli.audit.fit_file import read_fit, write_fit
from rlu_cli.audit.options import RunOptions
from rlu_cli.audit.statistics_file import StoredStatistics, read_statistics, write_statistics
from rlu_cli.core.fits import Arrays
from rlu_cli.core.types import ModelStatistics, Note
from rlu_cli.errors import FileError, RluError

_FORMAT = 16
"""To be raised when the same facts give other statistics or fits, or entries look otherwise."""

_FACTS = "cache_facts"

T = TypeVar("T")


class Cache:
    """A folder of entries, made where it is missing.

    Raises
    ------
    FileError
        There can be no such folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[Note] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"{folder}: expected a folder for --cache, found none, and it can't be made "
                f"({error.strerror}): pass another"
            ) from error

    def slot(self, facts: Mapping[str, Any], run: RunOptions) -> Slot:
        """The place of what follows from ``facts`` and the settings."""
        known = {
            **facts,
            "samples": run.samples,
            "seed": run.seed,
            "device": run.device.partition(":")[0],
            "versions": {"rlu": __version__, "format": _FORMAT, "torch": torch.__version__},
        }
        text = json.dumps(known, sort_keys=True, allow_nan=False)
        name = hashlib.sha256(text.encode("utf-8")).hexdigest()
        return Slot(self, self.folder / f"{name}.safetensors", json.loads(text))


@dataclass(frozen=True)
class Slot:
    """Where one model's statistics, or one fit, are or will be."""

    cache: Cache
    path: Path
    facts: dict[str, Any]

    def read(self) -> ModelStatistics | None:
        """The statistics, or None where there are none or the entry is damaged, which is noted."""
        return self._intact(self._statistics)

    def read_fit(self, unpack: Callable[[Arrays], T]) -> T | None:
        """The fit, likewise."""
        return self._intact(lambda: self._fit(unpack))

    def write(self, statistics: ModelStatistics, about: Mapping[str, Any]) -> None:
        """Keep the statistics; a cache that can't be written is noted, and no failure."""
        self._keep(
            lambda: write_statistics(self.path, StoredStatistics(statistics, {**about, _FACTS: self.facts}))
        )

    def write_fit(self, arrays: Arrays) -> None:
        """Keep a fit, likewise."""
        self._keep(lambda: write_fit(self.path, arrays, {_FACTS: self.facts}))

    def _statistics(self) -> ModelStatistics:
        stored = read_statistics(self.path)
        self._check(stored.about)
        return stored.statistics

    def _fit(self, unpack: Callable[[Arrays], T]) -> T:
        arrays, about = read_fit(self.path)
        self._check(about)
        try:
            return unpack(arrays)
        except (KeyError, ValueError) as error:
            raise FileError(f"{self.path}: expected the numbers of a fit, found others ({error})") from error

    def _check(self, about: Mapping[str, Any]) -> None:
        if about.get(_FACTS) != self.facts:
            raise FileError(f"{self.path}: expected the facts that its name stands for, found others")

    def _intact(self, read: Callable[[], T]) -> T | None:
        if not self.path.exists():
            return None
        try:
            return read()
        except RluError as error:
            self.cache.notes.append(
                Note("cache-damaged", f"an entry of the cache is ignored and made again: {error}")
            )
            return None

    def _keep(self, write: Callable[[], None]) -> None:
        try:
            write()
        except FileError as error:
            self.cache.notes.append(Note("cache-not-written", f"what was worked out is not kept: {error}"))


@dataclass(frozen=True)
class KeptFits:
    """`FitStore` in the cache.

    facts : of the global model that is fitted to; asked for when it is needed
    """

    cache: Cache
    facts: Callable[[], Mapping[str, Any]]
    run: RunOptions

    def read(self, facts: Mapping[str, Any], unpack: Callable[[Arrays], T]) -> T | None:
        """The fit, if it is kept and intact."""
        return self._slot(facts).read_fit(unpack)

    def write(self, facts: Mapping[str, Any], arrays: Arrays) -> None:
        """Keep a fit, if the folder can be written."""
        self._slot(facts).write_fit(arrays)

    def _slot(self, facts: Mapping[str, Any]) -> Slot:
        return self.cache.slot({**self.facts(), **facts}, self.run)
