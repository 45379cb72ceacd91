"""Recover every client of an archive whose truth is known, and summarise by round."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rlu_cli.audit.annotations import Annotations
from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.history import GLOBAL_STEM
from rlu_cli.audit.ignored_flags import refuse_ignored
from rlu_cli.audit.options import AuxOptions, HistoryOptions, ModelOptions, RunOptions, TrainingOptions
from rlu_cli.audit.progress import Reporter, silent
from rlu_cli.audit.report import client_reliability, envelope
from rlu_cli.core.metrics import Scores, score_bounds, score_counts, uniform_counts
from rlu_cli.core.reliability import GRADES, Reliability
from rlu_cli.core.types import IntArray
from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.checkpoint import is_checkpoint, read_checkpoint
from rlu_cli.files.metadata import read_sidecar
from rlu_cli.files.regular import is_folder
from rlu_cli.files.text import one_line
from rlu_cli.simulation.archive import AUX, TRUTH, TruthLine, read_truth_lines, round_folder

UNIFORM = "(uniform)"
"""How the uniform guess is called among the methods."""


@dataclass(frozen=True)
class ScoredPair:
    """The scores of one method on one client's round; the uniform guess has no reliability.

    bounds : what the method's error bars are worth, where it has any
    """

    round: int
    client: str
    scheme: str
    accuracy: float
    method: str
    scores: Scores
    warnings: tuple[str, ...]
    reliability: Reliability | None
    bounds: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """All scores by name."""
        return {**self.scores.document(), **self.bounds}


def evaluate_archive(
    root: Path,
    methods: Sequence[str],
    *,
    aux: Path | None = None,
    aux_options: AuxOptions | None = None,
    model: ModelOptions | None = None,
    training: TrainingOptions | None = None,
    run: RunOptions | None = None,
    rounds: Collection[int] | None = None,
    reporter: Reporter = silent,
) -> Iterator[ScoredPair]:
    """Score each method, and the uniform guess, on every (round, client) in truth.ndjson.

    The global model's passes are made once a round; schemes that remember get the archive as history.

    Parameters
    ----------
    aux : auxiliary images; by default the archive's own
    aux_options : which of them are read, and how
    rounds : which rounds to score, all by default
    training : values that outrank the archive's annotations (the ablation that shows why schemes matter)

    Raises
    ------
    FileError, MismatchError, UsageError
    """
    lines = read_truth_lines(root)
    if not lines:
        raise FileError(
            f"{root}: expected an archive with its truth ({TRUTH}), as `rlu simulate` writes it, found none"
        )
    if rounds is not None:
        lines = [line for line in lines if line.round in rounds]
    key = None if model is None else model.key
    training = training or TrainingOptions()
    refuse_ignored(training, HistoryOptions(), (_written(root, line, key) for line in lines))
    history = HistoryOptions(history=[root])
    with reporter("recovering") as update:
        done = 0
        for number, group in groupby(lines, key=lambda line: line.round):
            members = list(group)
            auditor = Auditor(
                _only_file(round_folder(root, number), GLOBAL_STEM),
                [_client_file(root, members[0])],
                aux=aux or root / AUX,
                aux_options=aux_options,
                model=model,
                run=run,
            )
            locals_ = (_client_file(root, line) for line in members)
            found_each = auditor.recover_each(locals_, training, methods, history)
            for line, client in zip(members, found_each, strict=True):
                truth = _truth(root, line, len(auditor.names))
                scheme = client.training.training.scheme
                for found in client.recoveries:
                    codes = tuple(note.code for note in (*client.notes, *found.warnings))
                    yield ScoredPair(
                        number,
                        line.client,
                        scheme,
                        line.accuracy,
                        found.method,
                        score_counts(found.counts, truth),
                        codes,
                        client_reliability(auditor, client, found),
                        score_bounds(found, truth),
                    )
                guess = score_counts(uniform_counts(len(truth), int(truth.sum())), truth)
                yield ScoredPair(number, line.client, scheme, line.accuracy, UNIFORM, guess, (), None)
                done += 1
                update(done, len(lines))


def archive_document(root: Path, pairs: Sequence[ScoredPair]) -> dict[str, Any]:
    """What `evaluate --archive` prints: a mean and spread per round and method, and every pair."""
    order = {method: place for place, method in enumerate(dict.fromkeys(p.method for p in pairs))}
    ordered = sorted(pairs, key=lambda p: (p.round, order[p.method]))
    return {
        **envelope("evaluate"),
        "archive": str(root),
        "summary": [
            _summary(list(group)) for _, group in groupby(ordered, key=lambda p: (p.round, p.method))
        ],
        "pairs": [
            {
                "round": p.round,
                "client": p.client,
                "scheme": p.scheme,
                "model_accuracy": p.accuracy,
                "method": p.method,
                **p.numbers(),
                "warnings": list(p.warnings),
                "reliability": None if p.reliability is None else p.reliability.document(),
            }
            for p in pairs
        ],
    }


def _summary(pairs: Sequence[ScoredPair]) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    for pair in pairs:
        for name, value in pair.numbers().items():
            columns.setdefault(name, []).append(value)
    first = pairs[0]
    graded = [pair.reliability for pair in pairs if pair.reliability is not None]
    expected = [found.expected_i_acc for found in graded if found.expected_i_acc is not None]
    return {
        "round": first.round,
        "scheme": first.scheme,
        "model_accuracy": first.accuracy,
        "method": first.method,
        "clients": len(pairs),
        **{
            name: {
                "mean": float(np.mean(values)),
                "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            }
            for name, values in columns.items()
        },
        "grades": {name: sum(found.grade == name for found in graded) for name in GRADES} if graded else None,
        "expected_iAcc": float(np.mean(expected)) if expected else None,
    }


def _truth(root: Path, line: TruthLine, num_classes: int) -> IntArray:
    """The client's true counts.

    Raises
    ------
    MismatchError
        They are of other classes than the model's, or of no sample.
    """
    if len(line.counts) != num_classes or sum(line.counts) == 0:
        raise MismatchError(
            f"{root / TRUTH}: expected counts of {num_classes} classes and of one sample at least for "
            f"{one_line(line.client, 60)} in round {line.round}, found {len(line.counts)} classes and "
            f"{sum(line.counts)} samples: restore the file"
        )
    return np.array(line.counts, dtype=np.int64)


def _written(root: Path, line: TruthLine, key: str | None) -> Annotations:
    """What the archive says of a client's round."""
    path = _client_file(root, line)
    reference = _only_file(round_folder(root, line.round), GLOBAL_STEM)
    local, sent = (read_checkpoint(file, key=key, key_optional=True) for file in (path, reference))
    return Annotations(local.metadata, sent.metadata, read_sidecar(path))


def _client_file(root: Path, line: TruthLine) -> Path:
    return _only_file(round_folder(root, line.round), line.client)


def _only_file(folder: Path, stem: str) -> Path:
    """The one checkpoint in ``folder`` of that name, whatever its suffix."""
    files = folder.iterdir() if is_folder(folder) else ()
    found = sorted(path for path in files if path.name.startswith(f"{stem}.") and path.suffix != ".json")
    if len(found) > 1:  # a checksum or a note may lie beside it
        found = [path for path in found if is_checkpoint(path)]
    if len(found) != 1:
        raise MismatchError(
            f"expected one checkpoint {one_line(stem, 60)}.* in {folder}, found {len(found)}: restore the "
            "archive"
        )
    return found[0]
