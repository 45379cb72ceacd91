"""Simulated rounds with known labels, recovered as `rlu evaluate --archive` does, and kept as NDJSON.

A `Round` says all that shapes one federation round and how its clients are recovered. `measure` plays it into
a temporary archive and scores every client; `Results` keeps one line a round, so a run that was stopped goes
on with the rounds that are missing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import machine
from benchmarks.data import CACHE
from rlu_cli.audit.archive_evaluation import UNIFORM, evaluate_archive
from rlu_cli.audit.options import AuxOptions, ModelOptions, RunOptions, SimulationOptions, StepOptions
from rlu_cli.core.types import LocalTraining
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.images import ImageSet, parse_normalization
from rlu_cli.models import build_model
from rlu_cli.simulation.archive import save_model
from rlu_cli.simulation.client import local_training, step_indices
from rlu_cli.simulation.data import FederatedData
from rlu_cli.simulation.run import Simulator, complete_spec
from rlu_cli.simulation.settings import Simulation
from rlu_cli.simulation.vectors import snapshot

State = Mapping[str, Tensor]
Images = Callable[[str], ImageSet]
Rows = list[dict[str, Any]]
UNNAMED = "a machine that was not noted"
"""Of the first results, before it was."""

Played = tuple["Round", Rows, float]
"""A round, its scores, and the seconds it took."""


@dataclass(frozen=True)
class Pretraining:
    """How the global model came to be: central SGD on all that the clients hold, none for a fresh model.

    steps : of ``batch_size`` images, at rate ``lr`` with momentum 0.9
    """

    steps: int = 0
    batch_size: int = 64
    lr: float = 0.05


@dataclass(frozen=True)
class Round:
    """One round of a federation, and how its clients are recovered.

    data : name of the images, with what shapes them
    batch_norm : as on the command line
    dropout : likewise
    audit_aux : images of each class that the auditor has, where it isn't all that are set aside
    """

    data: str
    arch: str
    normalize: str
    seed: int
    training: StepOptions
    options: SimulationOptions
    pretraining: Pretraining = field(default_factory=Pretraining)
    batch_norm: Literal["batch", "running"] | None = None
    dropout: Literal["on", "off"] | None = None
    audit_aux: int | None = None
    methods: tuple[str, ...] = ("rlu",)

    def simulated(self) -> Round:
        """The round without how it is recovered."""
        return replace(self, batch_norm=None, dropout=None, audit_aux=None, methods=())

    def document(self) -> dict[str, Any]:
        """All values, without those that say nothing."""
        return _without_none(asdict(self))


class Results:
    """An NDJSON file of measured rounds: ``{"round": {…}, "machine": …, "seconds": …, "results": [{…}, …]}``.

    machines : where they were measured
    A result is one method on one client. A round may have several lines, of different methods.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machines: list[str] = []
        self._found: dict[str, dict[str, Rows]] = {}
        if path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except ValueError:  # a run that was killed while it wrote
                    continue
                self._keep(line["round"], line["results"], line.get("machine", UNNAMED))

    def missing(self, round_: Round) -> tuple[str, ...]:
        """The round's methods that were not measured."""
        found = self._found.get(_key(round_.document()), {})
        return tuple(method for method in round_.methods if method not in found)

    def rows(self, round_: Round) -> Rows:
        """What was measured of the round's methods and of the uniform guess, method by method."""
        found = self._found.get(_key(round_.document()), {})
        return [row for method in (*round_.methods, UNIFORM) for row in found.get(method, [])]

    def add(self, round_: Round, rows: Rows, seconds: float) -> None:
        """Append a round."""
        document, where = round_.document(), machine()
        self._keep(document, rows, where)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes().endswith(b"\n")
        about = {"round": document, "machine": where, "seconds": round(seconds, 1)}
        line = json.dumps({**about, "results": rows}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(("" if whole else "\n") + line + "\n")

    def _keep(self, document: Mapping[str, Any], rows: Rows, where: str) -> None:
        if where not in self.machines:
            self.machines.append(where)
        found = self._found.setdefault(_key(document), {})
        for method in {row["method"] for row in rows}:
            found[method] = [row for row in rows if row["method"] == method]


class Bench:
    """Measures rounds, each once; trains each global model once.

    images : called with a round's ``data`` name
    jobs : simulations at a time, each in a process of its own; none: what is not there is not measured
    """

    def __init__(
        self, results: Results, images: Images, *, device: str = "auto", jobs: int = 1, log: Any = None
    ) -> None:
        self.results, self.images, self.device, self.jobs = results, images, device, jobs
        self.log = log or (lambda text: None)

    def measure(self, rounds: Iterable[Round]) -> Rows:
        """The scores of all clients of all rounds, old and new, each row with its round.

        Rounds that differ only in how they are recovered share one simulation.
        """
        wanted = list(rounds)
        missing: dict[Round, list[Round]] = {}
        for round_ in wanted:
            if self.jobs and (methods := self.results.missing(round_)):
                missing.setdefault(round_.simulated(), []).append(replace(round_, methods=methods))
        for played in self._all_played(list(missing.values())):
            for round_, rows, seconds in played:
                self.results.add(round_, rows, seconds)
                self.log(f"{seconds:6.0f} s  {summary(round_, rows)}")
        return [{**row, "round": round_} for round_ in wanted for row in self.results.rows(round_)]

    def _all_played(self, groups: Sequence[Sequence[Round]]) -> Iterator[list[Played]]:
        """The rounds played, in the order in which they are ready."""
        if self.jobs == 1 or len(groups) <= 1:
            for rounds in groups:
                yield play(rounds, self.images, self.device)
            return
        context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
        with ProcessPoolExecutor(min(self.jobs, len(groups)), mp_context=context) as pool:
            ready = [pool.submit(play, rounds, self.images, self.device) for rounds in groups]
            for future in as_completed(ready):
                yield future.result()


def play(rounds: Sequence[Round], images: Images, device: str) -> list[Played]:
    """Simulate once, and recover as each of ``rounds`` says."""
    first = rounds[0]
    simulation = Simulation(
        first.data, first.arch, first.normalize, first.seed, first.training, first.options
    )
    played = []
    with tempfile.TemporaryDirectory(prefix="rlu-benchmark-") as folder:
        root = Path(folder) / "archive"
        started = perf_counter()
        simulator = Simulator(
            simulation,
            images(first.data),
            root,
            start=global_model(first, images, device),
            allow_user_code=True,
            device=device,
        )
        for _ in simulator.run():
            pass
        for round_ in rounds:
            rows = _recover(round_, root, device)
            played.append((round_, rows, perf_counter() - started))
            started = perf_counter()
    return played


def global_model(round_: Round, images: Images, device: str) -> State | None:
    """The global model's weights, None for a fresh one. Trained once, and kept between runs."""
    if not round_.pretraining.steps:
        return None
    options = round_.options
    values = (round_.data, round_.arch, round_.normalize, round_.seed, options, round_.pretraining)
    path = CACHE / "models" / f"{hashlib.sha256(repr(values).encode()).hexdigest()[:24]}.safetensors"
    if not path.exists():
        save_model(path, pretrained(round_, images(round_.data), device), {})
    return read_checkpoint(path).tensors


def _recover(round_: Round, root: Path, device: str) -> Rows:
    arch = round_.arch if ".py:" in round_.arch else None
    pairs = evaluate_archive(
        root,
        round_.methods,
        aux_options=AuxOptions(aux_per_class=round_.audit_aux),
        model=ModelOptions(arch=arch, batch_norm=round_.batch_norm, dropout=round_.dropout),
        run=RunOptions(device=device),
        rounds=[round_.options.rounds],
    )
    return [
        {
            "client": pair.client,
            "method": pair.method,
            "model_accuracy": pair.accuracy,
            **pair.numbers(),
            "warnings": list(pair.warnings),
        }
        for pair in pairs
    ]


def pretrained(round_: Round, images: ImageSet, device: str = "cpu") -> State:
    """A global model trained centrally on what the clients of this round hold, never on auxiliary images."""
    place = torch.device(
        "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    )
    normalization = parse_normalization(round_.normalize)
    data = FederatedData(images, normalization, round_.options, seed=round_.seed, device=place)
    with torch.random.fork_rng():
        torch.manual_seed(round_.seed)
        model = build_model(complete_spec(round_.arch, data), allow_user_code=True).to(place)
        plan = round_.pretraining
        rng = np.random.default_rng(round_.seed)
        rows = step_indices(np.concatenate(data.shares), plan.steps, plan.batch_size, rng=rng)
        training = LocalTraining(plan.steps, plan.batch_size, plan.lr, momentum=0.9)
        local_training(model, (data.batch(batch) for batch in rows), training)
    return snapshot(model)


def summary(round_: Round, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line on a round: what it was, and the mean iAcc of its methods."""
    t = round_.training
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["method"], []).append(row["iAcc"])
    means = ", ".join(f"{method} {np.mean(values):.3f}" for method, values in scores.items())
    what = f"{round_.data} {round_.arch} m={t.steps} B={t.batch_size} seed {round_.seed}"
    how = round_.batch_norm or "default"
    return f"{what} {how} at {rows[0]['model_accuracy']:.0%}: {means}"


def _key(document: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in document.items() if name != "methods"}, sort_keys=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value
