"""Which method ``auto`` is, where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, QUICK, SAMPLES, call, sample, tensors, write_safetensors
from torch import nn

from rlu_cli.core.methods import best_method
from rlu_cli.core.types import LocalTraining
from rlu_cli.models import LeNet5, multiply_adds

ONE, TEN = LocalTraining(1, 32, 0.01), LocalTraining(10, 32, 0.01)
ADAM = LocalTraining(10, 32, 0.01, optimizer="adam")


@pytest.mark.parametrize(
    ("training", "has_bias", "counts", "can_replay", "expected"),
    [
        (ONE, True, (10,) * 10, False, "gls"),
        (ONE, True, (5, 15) * 5, False, "gls"),
        (TEN, True, (10,) * 10, True, "gls"),
        (TEN, True, (10,) * 10, False, "rlu"),
        (ONE, False, (10,) * 10, False, "rlu"),
        (ONE, True, None, False, "rlu"),
        (ONE, True, (10,) * 9 + (9,), False, "rlu"),
        (ONE, True, (10,) * 200, False, "gls"),
        (ONE, True, (10,) * 201, False, "rlu"),
        (ADAM, True, (10,) * 10, True, "surrogate"),
        (ADAM, False, None, False, "surrogate"),
    ],
)
def test_gls_where_it_has_what_it_needs(
    training: LocalTraining, has_bias: bool, counts: tuple[int, ...] | None, can_replay: bool, expected: str
) -> None:
    known = None if counts is None else np.array(counts)
    found = best_method(training, has_bias=has_bias, counts=known, can_replay=can_replay)
    assert found.name == expected


def test_few_images_and_searches_are_for_rlu() -> None:
    flags = ["recover", *sample("untrained_m1"), *QUICK]
    assert call(*flags).document["method"] == "gls"
    assert call(*flags, "--aux-per-class", "9").document["method"] == "rlu"
    assert call(*flags, "--search-iterations", "1").document["method"] == "rlu"


def test_replays_that_take_too_long_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["recover", *sample("trained_m10"), *QUICK]
    assert call(*flags).document["method"] == "gls"
    monkeypatch.setattr("rlu_cli.audit.auditor._REPLAY_COST", 1e9)
    assert call(*flags).document["method"] == "rlu"


def test_a_head_without_bias_is_for_rlu(tmp_path: Path) -> None:
    round_ = SAMPLES / "untrained_m1"
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
    flags = ["recover", *files, "--aux", AUX, "--arch", f"{code}:net", *training, *QUICK]
    assert call(*flags).document["method"] == "rlu"


def test_work_is_counted_from_shapes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    assert multiply_adds(model, torch.zeros(1, 3, 8, 8)) == 8 * 8 * 8 * 3 * 25 + 5120
    grouped = nn.Conv2d(4, 4, 3, groups=4)
    assert multiply_adds(grouped, torch.zeros(1, 4, 5, 5)) == 4 * 9 * 9
    lenet = multiply_adds(LeNet5(), torch.zeros(1, 1, 28, 28))
    assert lenet == 28 * 28 * 6 * 25 + 10 * 10 * 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10
