"""Which method ``auto`` is, where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, QUICK, SAMPLES, call, sample, tensors, truth, within_bounds, write_safetensors
from torch import nn

from rlu_cli.core.error_model import ResidualModel, foreseen_error
from rlu_cli.core.methods import best_method
from rlu_cli.core.residuals import ResidualMoments
from rlu_cli.core.types import LocalTraining
from rlu_cli.models import LeNet5, activation_bytes, multiply_adds

ONE, TEN, LONG = (LocalTraining(steps, 32, 0.01, distinct=32) for steps in (1, 10, 21))
ADAM = LocalTraining(10, 32, 0.01, optimizer="adam")


def residuals_like(spread: float, counts: tuple[int, ...]) -> ResidualMoments:
    """Of samples that the model gets right but for noise of this size."""
    N = len(counts)
    mean = np.eye(N) - 0.9 * np.eye(N) - 0.1 / N
    factor = spread * (np.eye(N) - 1 / N)
    return ResidualMoments(mean, np.broadcast_to(factor, (N, N, N)).copy(), np.array(counts))


SURE, UNSURE = 1e-6, 0.05


@pytest.mark.parametrize(
    ("training", "has_bias", "counts", "spread", "has_samples", "can_replay", "expected"),
    [
        (ONE, True, (10,) * 10, SURE, True, False, "gls"),
        (ONE, True, (10,) * 10, UNSURE, True, False, "regression"),
        (ONE, True, (10,) * 10, UNSURE, False, False, "gls"),
        (ONE, True, (5, 15) * 5, UNSURE, True, False, "gls"),
        (ONE, True, (10,) * 20, UNSURE, True, False, "regression"),
        (ONE, True, (10,) * 21, UNSURE, True, False, "gls"),
        (LocalTraining(1, 2001, 0.01), True, (10,) * 10, UNSURE, True, False, "gls"),
        (TEN, True, (10,) * 10, SURE, True, True, "replay"),
        (TEN, True, (10,) * 10, UNSURE, True, True, "replay"),
        (TEN, True, (9, 11) * 5, UNSURE, True, True, "gls"),
        (TEN, True, (10,) * 100, UNSURE, True, True, "replay"),
        (TEN, True, (10,) * 101, UNSURE, True, True, "gls"),
        (LONG, True, (10,) * 10, UNSURE, True, True, "replay"),
        (LONG, True, (10,) * 101, UNSURE, True, True, "rlu"),
        (LONG, True, (10,) * 10, SURE, True, True, "replay"),
        (LONG, True, (10,) * 101, SURE, True, True, "gls"),
        (LONG, True, (10,) * 10, SURE, True, False, "rlu"),
        (TEN, True, (10,) * 10, UNSURE, True, False, "rlu"),
        (ONE, False, (10,) * 10, UNSURE, True, False, "rlu"),
        (ONE, True, None, UNSURE, True, False, "rlu"),
        (ONE, True, (10,) * 9 + (9,), UNSURE, True, False, "rlu"),
        (ONE, True, (10,) * 200, UNSURE, True, False, "gls"),
        (ONE, True, (10,) * 201, UNSURE, True, False, "rlu"),
        (TEN, True, (10,) * 10, SURE, True, None, "gls"),
        (TEN, True, (10,) * 10, UNSURE, True, None, "gls"),
        (LONG, True, (10,) * 10, UNSURE, True, None, "rlu"),
        (ADAM, True, (10,) * 10, UNSURE, True, True, "replay"),
        (replace(ADAM, steps=1), True, (10,) * 10, SURE, True, True, "replay"),
        (ADAM, True, (9, 11) * 5, UNSURE, True, True, "surrogate"),
        (ADAM, True, (10,) * 101, UNSURE, True, True, "surrogate"),
        (ADAM, True, (10,) * 10, UNSURE, True, None, "surrogate"),
        (ADAM, False, None, UNSURE, False, False, "surrogate"),
    ],
)
def test_the_best_that_has_what_it_needs(
    training: LocalTraining,
    has_bias: bool,
    counts: tuple[int, ...] | None,
    spread: float,
    has_samples: bool,
    can_replay: bool | None,
    expected: str,
) -> None:
    """``can_replay`` None: for `gls` alone."""
    found = best_method(
        training,
        has_bias=has_bias,
        residuals=None if counts is None else residuals_like(spread, counts),
        has_samples=has_samples,
        can_replay=can_replay is not False,
        can_make_clients=can_replay is True,
    )
    assert found.name == expected


@pytest.mark.parametrize(
    ("training", "spread", "changed", "expected"),
    [
        (TEN, SURE, {"alone": True}, "gls"),
        (TEN, UNSURE, {"alone": True}, "replay"),
        (LONG, UNSURE, {"alone": True}, "replay"),
        (LONG, SURE, {"alone": True}, "replay"),
        (ONE, SURE, {"scaled": True}, "regression"),
        (ONE, UNSURE, {"scaled": True}, "regression"),
        (TEN, SURE, {"scaled": True}, "replay"),
    ],
)
def test_clients_made_up_for_one_alone_or_clipped(
    training: LocalTraining, spread: float, changed: dict[str, bool], expected: str
) -> None:
    found = best_method(
        training,
        has_bias=True,
        residuals=residuals_like(spread, (10,) * 10),
        has_samples=True,
        can_replay=True,
        can_make_clients=True,
        **changed,
    )
    assert found.name == expected


@pytest.mark.parametrize("spread", [0.003, 0.01])
def test_the_foreseen_error_is_that_of_many_updates(spread: float) -> None:
    training = LocalTraining(1, 200, 0.01)
    model = ResidualModel([(1.0, residuals_like(spread, (50,) * 4))], training)
    z = np.full(4, 0.25)
    rng = np.random.default_rng(0)
    noise = np.linalg.cholesky(model.covariance(z)) @ rng.standard_normal((3, 4000))
    M = np.vstack((model.mean, np.ones(4)))
    off = np.linalg.solve(M, np.vstack((noise, np.zeros(4000))))  # N equations determine z
    assert foreseen_error(model) == pytest.approx(np.abs(off).sum(axis=0).mean() / 2, rel=0.03)


def test_one_step_of_a_trained_model_is_for_disaggregation(tmp_path: Path) -> None:
    """And for regression where only statistics are known."""
    flags = ["recover", *sample("trained_m1"), *QUICK]
    by_default = call(*flags).document
    assert by_default["method"] == "disaggregation"
    assert by_default["classes"] == call(*flags, "--method", "disaggregation").document["classes"]
    by_regression = call(*flags, "--method", "regression").document
    stats = tmp_path / "stats.safetensors"
    files = sample("trained_m1", aux=None)
    assert call("estimate-logits", *files[:2], "--aux", AUX, "-o", stats, *QUICK).code == 0
    stored = call("recover", *files, "--stats", stats, *QUICK).document
    assert stored["method"] == "regression"
    assert stored["classes"] == by_regression["classes"]


def test_few_images_are_enough_for_disaggregation() -> None:
    document = call("recover", *sample("trained_m1"), *QUICK, "--aux-per-class", "9").document
    assert document["method"] == "disaggregation"
    assert within_bounds(document, truth("trained_m1")) >= 8


def test_few_images_and_searches_are_for_rlu() -> None:
    flags = ["recover", *sample("untrained_m1"), *QUICK]
    assert call(*flags).document["method"] == "gls"
    several = call("recover", *sample("untrained_m10"), *QUICK, "--aux-per-class", "9").document
    assert several["method"] == "rlu"
    assert call(*flags, "--search-iterations", "1").document["method"] == "rlu"


def test_replays_that_take_too_long_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["recover", *sample("trained_m10"), *QUICK]
    assert call(*flags).document["method"] == "replay"
    monkeypatch.setattr("rlu_cli.audit.observer._REPLAY_COST", 1e8)
    assert call(*flags).document["method"] == "replay"
    monkeypatch.setattr("rlu_cli.audit.observer._SHARED_REPLAY_COST", 1e8)
    assert call(*flags).document["method"] == "rlu"


def unbiased(tmp_path: Path, round_: Path) -> list[object]:
    """Flags for a sample round whose output layer has no bias."""
    files = []
    for flag, name in (("--global", "global"), ("--local", "client_0")):
        state = tensors(round_ / f"{name}.safetensors")
        del state["fc3.bias"]
        files += [flag, write_safetensors(tmp_path / f"{name}.safetensors", state)]
    code = tmp_path / "net.py"
    code.write_text(
        "from rlu_cli.models import LeNet5\n\ndef net():\n    model = LeNet5()\n"
        "    model.fc3.bias = None\n    return model\n"
    )
    training = ["--lr", "0.01", "--batch-size", "32", "--steps", "1", "--normalize", "mean=0.286;std=0.353"]
    return [*files, "--arch", f"{code}:net", *training, *QUICK]


def test_a_head_without_bias_is_read_along_the_unit_direction(tmp_path: Path) -> None:
    """Its counts are those of the whole head, and have bounds; with noise `rlu` reads the mean embedding."""
    flags = unbiased(tmp_path, SAMPLES / "untrained_m1")
    found = call("recover", *flags, "--aux", AUX).document
    assert found["method"] == "gls"
    assert found["counts"] == truth("untrained_m1")
    assert all(row["low"] <= row["count"] <= row["high"] for row in found["classes"])
    noisy = [*flags, "--aux", AUX, "--noise-std", "1e-4"]
    assert call("recover", *noisy).document["method"] == "rlu"
    assert "whose update has noise" in call("recover", *noisy, "--method", "gls").refusal(4)


def test_statistics_and_the_cache_know_the_unit_direction(tmp_path: Path) -> None:
    flags = unbiased(tmp_path, SAMPLES / "trained_m1")
    flags += ["--method", "regression"]
    plain = call("recover", *flags, "--aux", AUX).document
    for _ in range(2):
        cached = call("recover", *flags, "--aux", AUX, "--cache", tmp_path / "cache").document
        assert cached == plain
    stats = tmp_path / "stats.safetensors"
    made = [*flags[:2], *flags[4:6], "--normalize", "mean=0.286;std=0.353", "--aux", AUX, *QUICK]
    assert call("estimate-logits", *made, "-o", stats).code == 0
    stored = call("recover", *flags[:4], *flags[6:], "--stats", stats).document
    assert stored["classes"] == plain["classes"]


def test_work_is_counted_from_shapes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    assert multiply_adds(model, torch.zeros(1, 3, 8, 8)) == 8 * 8 * 8 * 3 * 25 + 5120
    grouped = nn.Conv2d(4, 4, 3, groups=4)
    assert multiply_adds(grouped, torch.zeros(1, 4, 5, 5)) == 4 * 9 * 9
    assert activation_bytes(model, torch.zeros(1, 3, 8, 8)) == 4 * (512 + 512 + 512 + 10)
    lenet = multiply_adds(LeNet5(), torch.zeros(1, 1, 28, 28))
    assert lenet == 28 * 28 * 6 * 25 + 10 * 10 * 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10
