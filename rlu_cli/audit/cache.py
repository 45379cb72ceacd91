"""Statistics of models already measured, kept in a folder under a key of all that they depend on.

An entry is a statistics file, named by the SHA-256 of its facts: what the model, the auxiliary data and the
settings are, by content and not by path. Anything that differs has another name. Files appear whole or not at
all, so several processes may share a folder, and any file may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlu_cli import __version__
from rlu_cli.audit.options import RunOptions
from rlu_cli.audit.statistics_file import StoredStatistics, read_statistics, write_statistics
from rlu_cli.core.types import ModelStatistics, Note
from rlu_cli.errors import FileError, RluError

_FORMAT = 5
"""To be raised when the same facts give other statistics, or entries look otherwise."""

_FACTS = "cache_facts"


class StatisticsCache:
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
        """The place of the statistics that follow from ``facts`` and the settings."""
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
    """Where one model's statistics are or will be."""

    cache: StatisticsCache
    path: Path
    facts: dict[str, Any]

    def read(self) -> ModelStatistics | None:
        """The statistics, or None where there are none or the entry is damaged, which is noted."""
        if not self.path.exists():
            return None
        try:
            stored = read_statistics(self.path)
            if stored.about.get(_FACTS) != self.facts:
                raise FileError(f"{self.path}: expected the facts that its name stands for, found others")
        except RluError as error:
            self.cache.notes.append(
                Note("cache-damaged", f"an entry of the cache is ignored and made again: {error}")
            )
            return None
        return stored.statistics

    def write(self, statistics: ModelStatistics, about: Mapping[str, Any]) -> None:
        """Keep the statistics; a cache that can't be written is noted, and no failure."""
        try:
            write_statistics(self.path, StoredStatistics(statistics, {**about, _FACTS: self.facts}))
        except FileError as error:
            self.cache.notes.append(Note("cache-not-written", f"the statistics are not kept: {error}"))
