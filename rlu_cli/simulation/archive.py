"""The archive that a simulation writes: rounds of annotated checkpoints, and the truth."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.atomic import write_text
from rlu_cli.files.json_io import parse_json, read_json
from rlu_cli.files.regular import exists, read_bounded
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.files.truth import TRUTH_LIMIT, whole_number
from rlu_cli.simulation.settings import Simulation

TRUTH = "truth.ndjson"
SETTINGS = "simulation.json"
AUX = "aux"
DIGEST = "data_sha256"
"""Under which the settings hold `data_digest`; archives of earlier versions lack it."""


def round_folder(root: Path, number: int) -> Path:
    """``round_0001``."""
    return root / f"round_{number:04d}"


def client_name(index: int) -> str:
    """``client_0007``."""
    return f"client_{index:04d}"


def save_model(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """One annotated checkpoint; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_safetensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, dict(about))


@dataclass(frozen=True)
class TruthLine:
    """What one client trained on in one round.

    counts : samples of each class
    step_counts : the same by step
    accuracy : the round's global model, on held-out images
    """

    round: int
    client: str
    counts: list[int]
    step_counts: list[list[int]]
    accuracy: float

    def document(self) -> dict[str, Any]:
        """As it stands in truth.ndjson."""
        return {
            "round": self.round,
            "client": self.client,
            "total": sum(self.counts),
            "counts": self.counts,
            "step_counts": self.step_counts,
            "accuracy": self.accuracy,
        }


def write_truth(root: Path, lines: list[TruthLine]) -> None:
    """Replace truth.ndjson."""
    write_text(root / TRUTH, "".join(json.dumps(line.document()) + "\n" for line in lines))


def read_truth_lines(root: Path) -> list[TruthLine]:
    """The truth of an archive; empty where there is none yet.

    Raises
    ------
    FileError
        A damaged line.
    """
    path = root / TRUTH
    if not exists(path):
        return []
    try:
        texts = read_bounded(path, TRUTH_LIMIT).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise FileError(f"{path}: can't be read ({reason}); restore the file") from error
    lines = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            entry = parse_json(text)
            lines.append(
                TruthLine(
                    _whole(entry["round"]),
                    str(entry["client"]),
                    _counts(entry["counts"]),
                    [_counts(step) for step in entry["step_counts"]],
                    _finite(entry["accuracy"]),
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise FileError(
                f"{path}: line {number} is damaged; restore the file or simulate again into another folder"
            ) from error
    return lines


def _whole(value: object) -> int:
    number = whole_number(value)
    if number is None:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return number


def _counts(values: list[object]) -> list[int]:
    counts = [_whole(value) for value in values]
    _whole(sum(counts))  # not too large either
    return counts


def _finite(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def claim(root: Path, simulation: Simulation, digest: str) -> None:
    """Make the folder this simulation's own, or check that it already is.

    Parameters
    ----------
    digest : of the images, labels and class names that are there now

    Raises
    ------
    MismatchError
        The folder holds an archive of another simulation or of other data, or other files.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / SETTINGS
    now: dict[str, Any] = json.loads(json.dumps(simulation.document()))
    if not path.exists():
        if any(root.iterdir()):
            raise MismatchError(
                f"expected {root} to be empty or an archive of the same simulation, found other files: "
                "choose another folder"
            )
        write_text(path, json.dumps({**now, DIGEST: digest}, indent=2, sort_keys=True) + "\n")
        return
    before = read_json(path, limit=2**20)
    known = before.pop(DIGEST, digest) if isinstance(before, dict) else digest
    if before != now:
        old, new = _flat(before), _flat(now)
        differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        raise MismatchError(
            f"expected {root} to be empty or an archive of the same simulation, found one with other values "
            f"of {', '.join(map(_flag, differing))}: choose another folder, or the same values"
        )
    if known != digest:
        raise MismatchError(
            f"expected the data that the archive in {root} was begun with, found other images, labels or "
            f"class names in {simulation.data}, which would be shared out otherwise: restore them, or choose "
            "another folder"
        )


def _flag(name: str) -> str:
    """The option that sets a value: ``--lambda`` for ``lambda_``."""
    return "--" + name.rstrip("_").replace("_", "-")


def _flat(document: object) -> dict[str, Any]:
    """A nested document's values by innermost key."""
    flat: dict[str, Any] = {}
    for key, value in document.items() if isinstance(document, dict) else ():
        flat.update(_flat(value) if isinstance(value, dict) else {key: value})
    return flat
