"""The surrogate method: exact where training is linear in the mix, and real Adam by torch's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import QUICK, call, sample, strict_json
from core_cases import scripted_observation
from torch import nn

from rlu_cli.core.client_views import Replays
from rlu_cli.core.methods.surrogate import fit_near
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.schemes import check_training
from rlu_cli.core.types import FloatArray, Head, HeadUpdate, LocalTraining
from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.simulation.client import local_training

N, L = 6, 8
ADAM = LocalTraining(4, 16, 0.01, optimizer="adam")
UNLIKE = "update-unlike-replays"


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_local_training_is_torchs_adam(name: str, decay: float) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(6, 1, 3, 3, generator=generator).double(), torch.arange(6) % (2 + step % 2))
        for step in range(5)
    ]
    rates = (0.1, 0.1, 0.05, 0.05, 0.01)
    optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](
        models[0].parameters(), betas=(0.8, 0.95), eps=1e-3, weight_decay=decay
    )
    for rate, (images, labels) in zip(rates, batches, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(models[0](images), labels).backward()
        optimizer.step()
    training = LocalTraining(5, 6, rates, optimizer=name, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=decay)
    local_training(models[1], batches, training)
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def curved(z: FloatArray, draw: int = 0, *, noise: float = 0.0) -> Head:
    """An update that is no linear function of the mix."""
    rng = np.random.default_rng(5)
    change = np.tanh(rng.normal(size=(N * (L + 1), N)) @ z) + noise * np.random.default_rng(draw).normal()
    table = 0.04 * change.reshape(N, L + 1)
    return Head(table[:, :-1], table[:, -1])


@pytest.mark.parametrize("seed", range(4))
def test_curved_training_is_turned_round(seed: int) -> None:
    observation, _ = scripted_observation(ADAM, classes=N, size=L)
    counts = np.random.default_rng(seed).multinomial(64, np.random.default_rng(seed).dirichlet(np.ones(N)))
    sent = curved(counts / 64)
    assert sent.bias is not None
    observation = replace(observation, update=HeadUpdate(sent.weight, sent.bias), replayed_update=curved)
    found = recover_labels(observation)
    assert found.method == "surrogate"
    assert np.abs(found.counts - counts).sum() <= 4
    assert found.low is None
    assert found.counts.tolist() == recover_labels(observation).counts.tolist()


def test_a_linear_model_is_solved_exactly() -> None:
    rng = np.random.default_rng(0)
    Z, J, z = rng.dirichlet(np.ones(N), 200), rng.normal(size=(20, N)), rng.dirichlet(np.ones(N))
    replayed = Replays(Z, Z @ J.T + 1e-6 * rng.normal(size=(200, 20)), np.zeros((200, 2)))
    found = fit_near(replayed, J @ z, np.full(N, 1 / N), width=0.5, noise=np.zeros(20))
    np.testing.assert_allclose(found.z, z, atol=2e-3)


def test_training_that_diverges_or_cannot_be_replayed_is_refused() -> None:
    observation, _ = scripted_observation(ADAM, classes=N, size=L)
    with pytest.raises(MismatchError, match="can be replayed"):
        recover_labels(replace(observation, replayed_update=None))
    with pytest.raises(MismatchError, match="diverge"):
        recover_labels(replace(observation, replayed_update=lambda z, draw: None))
    with pytest.raises(UsageError, match="surrogate or auto"):
        recover_labels(observation, method="rlu")


@pytest.mark.parametrize(
    "wrong",
    [{"momentum": 0.9}, {"scheme": "scaffold"}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": 0.0}],
)
def test_values_that_adam_does_not_have(wrong: dict[str, object]) -> None:
    check_training(ADAM)
    with pytest.raises(UsageError):
        check_training(replace(ADAM, **wrong))  # type: ignore[arg-type]


def test_simulated_adam_clients_are_recovered(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    steps = ("--lr", 0.003, "--batch-size", 32, "--steps", 5, "--optimizer", "adam", "--beta2", 0.99)
    made = call(
        "simulate", "--data", "digits", "-o", archive, "--clients", 2, "--rounds", 1,
        "--aux-per-class", 40, *steps,
    )  # fmt: skip
    assert made.code == 0, made.err
    methods = ("--method", "auto", "--method", "surrogate")
    document = call("evaluate", "--archive", archive, *methods, *QUICK).document
    found = {row["method"]: row for row in document["summary"]}
    assert {"replay", "surrogate"} <= set(found)
    assert found["replay"]["bounds_hold"]["mean"] >= 0.8
    assert "bounds_hold" not in found["surrogate"]
    round_ = archive / "round_0001"
    local = round_ / "client_0000.safetensors"
    files = ("--global", round_ / "global.safetensors", "--local", local, "--aux", archive / "aux")
    assert "surrogate" in call("recover", *files, "--method", "gls").refusal(2)
    result = call("recover", *files, *QUICK)
    training = result.document["training"]
    assert (training["optimizer"], training["beta1"], training["beta2"]) == ("adam", 0.9, 0.99)
    assert UNLIKE not in result.codes
    for method in ("replay", "surrogate"):
        wrong = call("recover", *files, *QUICK, "--method", method, "--lr", 0.03, "--strict")
        assert wrong.code == 5
        found = strict_json(wrong.out)
        assert UNLIKE in {warning["code"] for warning in found["warnings"]}
        assert all(row["low"] is None and row["presence"] is None for row in found["classes"])


@pytest.mark.parametrize("method", ["replay", "surrogate"])
def test_an_update_of_sgd_is_none_of_adam(method: str) -> None:
    told = ("--optimizer", "adam", "--lr", 0.001, "--method", method)
    found = call("recover", *sample("untrained_m10"), *QUICK, *told)
    assert UNLIKE in found.codes
    assert found.document["reliability"]["grade"] == "poor"


def test_adams_flags_need_adam() -> None:
    assert "--beta1" in call("recover", *sample("trained_m1"), "--beta1", 0.9).refusal(2)
