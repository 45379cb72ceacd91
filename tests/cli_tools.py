"""What the tests of the command line share: the sample rounds, a call in this process, a real process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlu_cli.cli.app import run
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors

SAMPLES = Path(__file__).resolve().parent.parent / "sample_data"
AUX = SAMPLES / "aux"
QUICK = ("--samples", "200")
"""For tests that don't look at the counts closely."""

PLAIN = (*QUICK, "--method", "rlu")
"""For tests of what is read, and not of how it is solved."""

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Exit code and both streams of one call."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object that a successful call printed."""
        assert self.code == 0, self.err
        return strict_json(self.out)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON objects, one a line, that a successful call printed."""
        assert self.code == 0, self.err
        return [strict_json(line) for line in self.out.splitlines()]

    @property
    def codes(self) -> list[str]:
        """The codes of the document's warnings."""
        return [warning["code"] for warning in self.document["warnings"]]

    def refusal(self, code: int) -> str:
        """The message of a call that must have failed: one line on stderr, nothing on stdout."""
        assert (self.code, self.out) == (code, ""), (self.code, self.out[:200], self.err)
        assert re.fullmatch(r"rlu: error: \S[^\n]*[.?!]\n", self.err), self.err
        assert "Traceback" not in self.err
        return self.err


def call(*arguments: object) -> Outcome:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def process(*arguments: object, python: str | None = None, **environment: str) -> Outcome:
    """Run the command line, or other Python code with these arguments, in a process of its own."""
    start = [sys.executable, "-m", "rlu_cli"] if python is None else [sys.executable, "-c", python]
    done = subprocess.run(
        [*start, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def sample(round_: str, client: int = 0, *, aux: Path | None = AUX) -> list[object]:
    """The flags that name one client of a sample round."""
    folder = SAMPLES / round_
    flags: list[object] = ["--global", folder / "global.safetensors"]
    flags += ["--local", folder / f"client_{client}.safetensors"]
    return flags if aux is None else [*flags, "--aux", aux]


def truth(round_: str, client: int = 0) -> list[int]:
    """What a client of a sample round trained on."""
    document = json.loads((SAMPLES / round_ / "truth.json").read_text(encoding="utf-8"))
    return document["clients"][f"client_{client}"]["counts"]


def within_bounds(document: Mapping[str, Any], counts: list[int]) -> int:
    """How many of the true counts lie within the bounds of a `recover` document, which must be in order."""
    inside = 0
    for row, count in zip(document["classes"], counts, strict=True):
        assert isinstance(row["low"], int) and isinstance(row["high"], int)
        assert 0 <= row["low"] <= row["count"] <= row["high"] <= document["total"]
        assert 0.0 <= row["presence"] <= 1.0
        inside += row["low"] <= count <= row["high"]
    return inside


def tensors(path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors, to be changed and saved again."""
    return {name: tensor.clone() for name, tensor in read_checkpoint(path).tensors.items()}


def metadata(path: Path) -> dict[str, str]:
    """A checkpoint's annotations."""
    return dict(read_checkpoint(path).metadata)


def write_safetensors(path: Path, state: State, about: Mapping[str, str] | None = None) -> Path:
    """Save tensors with annotations."""
    save_safetensors(path, dict(state), dict(about or {}))
    return path


def write_torch(path: Path, state: object) -> Path:
    """Save with torch, which has no annotations."""
    torch.save(state, path)
    return path


def bare_round(folder: Path, round_: str = "untrained_m1", client: int = 0) -> list[object]:
    """A sample round saved again as .pt files that say nothing of themselves; the flags that name it."""
    for name in ("global", f"client_{client}"):
        write_torch(folder / f"{name}.pt", tensors(SAMPLES / round_ / f"{name}.safetensors"))
    return ["--global", folder / "global.pt", "--local", folder / f"client_{client}.pt", "--aux", AUX]


def strict_json(text: str) -> Any:
    """JSON without NaN, infinity or a key given twice."""

    def constant(token: str) -> float:
        raise AssertionError(f"{token} in JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    return json.loads(text, parse_constant=constant, object_pairs_hook=unique)


def is_kind(value: object, kind: object) -> bool:
    """Whether a JSON value is of a kind: a type, a tuple of types, or `float` for any real number."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, tuple((int, float) if k is float else k for k in kinds))  # type: ignore[arg-type]


def check_fields(document: Mapping[str, Any], expected: Mapping[str, object]) -> None:
    """Every expected field is there, of the expected kind; more fields are allowed."""
    for name, kind in expected.items():
        assert name in document, f"{name} is missing"
        assert is_kind(document[name], kind), f"{name} is {document[name]!r}"
