"""Training under schemes that remember, replayed: the whole network's constant gradient from the archive."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import call, within_bounds

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.options import (
    HistoryOptions,
    RunOptions,
    SimulationOptions,
    StepOptions,
    TrainingOptions,
)
from rlu_cli.audit.replayed_clients import ReplayedClients
from rlu_cli.core.client_views import ReplayPlan
from rlu_cli.core.progress import ignore
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.images.datasets import open_dataset
from rlu_cli.simulation.archive import read_truth_lines
from rlu_cli.simulation.client import local_training
from rlu_cli.simulation.run import Simulator
from rlu_cli.simulation.settings import Simulation

SCHEMES = {"scaffold": {}, "feddyn": {"lambda_": 0.3}, "feddc": {"lambda_": 0.3}}


@pytest.fixture(scope="module", params=SCHEMES)
def federation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    """Three rounds of LeNet-5 on digits; every client takes part in two thirds of them."""
    root = tmp_path_factory.mktemp(request.param) / "archive"
    training = StepOptions(lr="0.05", batch_size=16, steps=4, scheme=request.param, **SCHEMES[request.param])
    options = SimulationOptions(rounds=3, clients=3, aux_per_class=20, participation=0.67)
    made = Simulator(
        Simulation("digits", "lenet5", "half", 0, training, options), open_dataset("digits"), root
    )
    for _ in made.run():
        pass
    return made


def test_the_client_trains_again_as_it_did(federation: Simulator) -> None:
    """With its own batches and the constant gradient from the files alone, to its very model."""
    root = federation.root
    folder = root / "round_0003"
    local = sorted(folder.glob("client_*.safetensors"))[0]
    auditor = Auditor(folder / "global.safetensors", [local], aux=root / "aux", run=RunOptions(samples=50))
    found = auditor.recover(local, TrainingOptions(), ["auto"], HistoryOptions(history=[root]))
    path = found.observations[0].residuals
    assert path is not None and path.replay is not None
    constant = path.replay.constant
    training, batches = federation._plan(3, int(local.stem.rpartition("_")[2]))
    model = federation.model
    model.load_state_dict(dict(read_checkpoint(folder / "global.safetensors").tensors))
    local_training(model, (federation.data.batch(rows) for rows in batches), training, constant=constant)
    expected = read_checkpoint(local).tensors
    for name, value in model.state_dict().items():
        moved = (expected[name] - auditor.reference.tensors[name]).abs().max()
        np.testing.assert_allclose(value, expected[name], atol=1e-3 * float(moved))
    (recovery,) = found.recoveries
    assert recovery.method == "gls"
    assert recovery.diagnostics["replays"] == 3
    assert recovery.low is not None
    assert max(float(k.abs().max()) for k in constant.values()) > 0


@pytest.mark.parametrize("federation", ["scaffold"], indirect=True)
def test_variates_of_the_head_alone_leave_gls_without_replays(federation: Simulator, tmp_path: Path) -> None:
    root = federation.root
    folder = root / "round_0003"
    local = sorted(folder.glob("client_*.safetensors"))[0]
    head = {
        name: torch.zeros_like(value)
        for name, value in read_checkpoint(local).tensors.items()
        if name.startswith("fc3.")
    }
    variates = tmp_path / "zero.pt"
    torch.save(head, variates)
    document = call(
        "recover", "--global", folder / "global.safetensors", "--local", local, "--aux", root / "aux",
        "--server-control", variates, "--client-control", variates, "--samples", 50,
    ).document  # fmt: skip
    assert document["method"] == "gls"
    assert document["diagnostics"]["replays"] == 0


@pytest.mark.parametrize("federation", ["scaffold"], indirect=True)
def test_replayed_clients_train_with_the_gradients_of_one(federation: Simulator) -> None:
    """Every number of the head moves by what the scheme adds, and clients of others don't share them."""
    root = federation.root
    folder = root / "round_0003"
    local = sorted(folder.glob("client_*.safetensors"))[0]
    auditor = Auditor(folder / "global.safetensors", [local], aux=root / "aux", run=RunOptions(samples=50))
    found = auditor.recover(local, TrainingOptions(), ["replay"], HistoryOptions(history=[root]))
    made = found.observations[0].replayed_clients
    assert isinstance(made, ReplayedClients) and made.own is not None
    constant = made.base.constant
    assert constant is not None
    none = {name: torch.zeros_like(value) for name, value in constant.items()}
    without = replace(made, base=replace(made.base, constant=none))
    assert without.own is None
    training = found.training.training
    first = replace(training, steps=1, total=None)
    plan = ReplayPlan(np.full(10, 2), first, 0)
    (mine,), (plain,) = (clients([plan], ignore) for clients in (made, without))
    assert mine is not None and plain is not None
    head = constant["fc3.bias"].double().numpy()
    np.testing.assert_allclose(mine.change.bias - plain.change.bias, -0.05 * head, atol=1e-6)
    (recovery,) = found.recoveries
    assert recovery.method == "replay" and recovery.low is not None
    assert recovery.diagnostics["replays"] >= 20
    assert "replay-not-fitted" not in {note.code for note in recovery.warnings}


def test_whole_epochs_of_a_scheme_are_replayed_by_default(tmp_path: Path) -> None:
    training = StepOptions(lr="0.05", batch_size=16, epochs=2, scheme="scaffold")
    options = SimulationOptions(rounds=2, clients=3, aux_per_class=20)
    made = Simulator(
        Simulation("digits", "lenet5", "half", 0, training, options), open_dataset("digits"), tmp_path / "a"
    )
    for _ in made.run():
        pass
    folder = made.root / "round_0002"
    local = sorted(folder.glob("client_*.safetensors"))[0]
    command = ["recover", "--global", folder / "global.safetensors", "--local", local]
    flags = ["--aux", made.root / "aux", "--history", made.root, "--samples", 50]
    document = call(*command, *flags).document
    assert document["method"] == "replay"
    assert document["reliability"]["expected_iAcc"] is not None
    counts = next(line.counts for line in read_truth_lines(made.root) if line.client == local.stem)
    assert within_bounds(document, list(counts)) >= 8


def test_an_earlier_model_that_holds_no_numbers_counts_as_the_head_alone(
    federation: Simulator, tmp_path: Path
) -> None:
    """NaN beside the output layer made every replay diverge, and the rate was said to be at fault."""
    root = shutil.copytree(federation.root, tmp_path / "a")
    folder = root / "round_0003"
    local = sorted(folder.glob("client_*.safetensors"))[0]
    for path in sorted(root.glob(f"round_000[12]/{local.name}")):
        stored = read_checkpoint(path)
        broken = {**stored.tensors, "conv1.weight": torch.full((6, 1, 5, 5), float("nan"))}
        save_safetensors(path, broken, stored.metadata)
    flags = ["--global", folder / "global.safetensors", "--local", local, "--aux", root / "aux"]
    found = call("recover", *flags, "--history", root, "--samples", 50).document
    assert found["method"] == "gls"
