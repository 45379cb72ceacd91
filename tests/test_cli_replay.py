"""The default for several steps of a trained model, from the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from cli_tools import AUX, QUICK, SAMPLES, call, metadata, sample, tensors, truth, write_safetensors

from rlu_cli.audit.auditor import Auditor
from rlu_cli.core.types import LocalTraining


def test_counts_and_bounds_of_a_trained_round() -> None:
    flags = sample("trained_m10")
    both = call("recover", *flags[:4], *sample("trained_m10", 1)[2:4], *flags[4:]).lines
    assert len(both) == 2
    for client, document in enumerate(both):
        check_counts_and_bounds(document, truth("trained_m10", client))


def check_counts_and_bounds(document: dict[str, Any], known: list[int]) -> None:
    """Within a quarter of the labels, eight of ten bounds right."""
    rows = document["classes"]
    assert document["method"] == "replay"
    assert sum(row["count"] for row in rows) == document["total"] == sum(known)
    off = sum(abs(row["count"] - count) for row, count in zip(rows, known, strict=True)) / 2
    assert off < 0.25 * sum(known)
    held = [row["low"] <= count <= row["high"] for row, count in zip(rows, known, strict=True)]
    assert sum(held) >= 8
    for row in rows:
        assert 0 <= row["low"] <= row["count"] <= row["high"] <= document["total"]
        assert 0 <= row["presence"] <= 1
    assert document["diagnostics"]["replay_error"] > 0
    assert document["diagnostics"]["replays"] in range(40, 221)


def test_the_answer_is_the_same_again_and_in_company() -> None:
    flags = ["recover", *sample("trained_m10", 1), *QUICK]
    alone = call(*flags).document["classes"]
    assert call(*flags).document["classes"] == alone
    local = [flag for client in (0, 1) for flag in sample("trained_m10", client, aux=None)[2:]]
    lines = call("recover", *sample("trained_m10")[:2], *local, *sample("trained_m10")[4:], *QUICK).lines
    assert lines[1]["classes"] == alone
    assert call(*flags, "--seed", "1").document["classes"] != alone


def test_one_step_and_few_images_are_answered_by_gls() -> None:
    one = call("recover", *sample("untrained_m1"), *QUICK, "--method", "replay").document
    assert "replay-not-fitted" in [note["code"] for note in one["warnings"]]
    few = call(
        "recover", *sample("trained_m10"), *QUICK, "--method", "replay", "--aux-per-class", "9"
    ).document
    assert "replay-not-fitted" in [note["code"] for note in few["warnings"]]


HUGE = ("--batch-size", 10**11)


def test_training_that_no_memory_holds_is_not_replayed() -> None:
    """It was drawn nevertheless: 830 GiB of rows."""
    flags = ["recover", *sample("trained_m10"), *QUICK, *HUGE, "--method"]
    found = call(*flags, "replay")
    assert "replay-not-fitted" in found.codes
    plain = call(*flags, "gls").document
    assert found.document["counts"] == plain["counts"]
    assert sum(plain["counts"]) == 10**12
    assert plain["diagnostics"]["replays"] == 0
    message = call(*flags, "replay", "--optimizer", "adam", "--lr", 0.001).refusal(4)
    assert "can't be replayed" in message


def test_a_client_that_can_be_replayed_before_one_that_cannot(tmp_path: Path) -> None:
    """They share what makes up clients."""
    small = SAMPLES / "trained_m10" / "client_0.safetensors"
    about = {**metadata(small), "fl.batch_size": str(10**11)}
    huge = write_safetensors(tmp_path / "huge.safetensors", tensors(small), about)
    flags = ["--global", small.with_name("global.safetensors"), "--local", small, "--local", huge]
    lines = call("recover", *flags, "--aux", AUX, *QUICK, "--method", "replay").lines
    codes = [[warning["code"] for warning in line["warnings"]] for line in lines]
    assert ["replay-not-fitted" in found for found in codes] == [False, True]


def test_what_fits_is_told_by_the_outputs_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SAMPLES / "trained_m10"
    source = Auditor(folder / "global.safetensors", aux=AUX).source
    steps = LocalTraining(2, 10_000, 0.1)
    # LeNet-5's image has 784 numbers; its layers' outputs, activations and pools have more.
    for most, fits in ((2**40, True), (4 * 784 * 10_000, False), (2**27, False), (2**32, True)):
        monkeypatch.setattr("rlu_cli.audit.image_source.total_bytes", lambda *_, most=most: most)
        assert math.isfinite(source.replay_cost(steps)) == fits
        assert (source.replay(source.reference, steps, None) is not None) == fits
    monkeypatch.setattr("rlu_cli.audit.image_source.total_bytes", lambda *_: 1)
    assert not math.isfinite(source.replay_cost(LocalTraining(2, 8, 0.1)))


def test_training_that_cannot_be_replayed_is_refused() -> None:
    message = call("recover", *sample("trained_m10"), *QUICK, "--method", "replay", "--lr", "1e6").refusal(4)
    assert "diverge" in message


def test_clients_whose_labels_are_as_the_model_guesses_have_their_size(tmp_path: Path) -> None:
    """Little is left of their gradients but chance: 10 of 10 exact clients were taken for misscaled."""
    root = tmp_path / "archive"
    flags = ["--data", "digits", "--clients", 10, "--rounds", 1, "--alpha", 100_000, "--aux-per-class", 40]
    call("simulate", *flags, "--lr", 0.05, "--batch-size", 32, "--steps", 10, "--seed", 4, "-o", root)
    pairs = call("evaluate", "--archive", root).document["pairs"]
    found = [pair for pair in pairs if pair["method"] == "replay"]
    assert len(found) == 10
    assert not [pair for pair in found if "update-misscaled" in pair["warnings"]]
    assert min(pair["iAcc"] for pair in found) > 0.95


NORMED_BODY = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))
"""


def normed_client(folder: Path, *training: object) -> list[object]:
    """Flags of a client of a network that has BatchNorm over single values."""
    (folder / "net.py").write_text(NORMED_BODY, encoding="utf-8")
    arch, root = ("--arch", f"{folder / 'net.py'}:net"), folder / "archive"
    made = ["--data", "digits", "--clients", 8, "--participation", 0.125, "--alpha", 5, "--aux-per-class", 20]
    assert call("simulate", *made, "--lr", 0.02, "--seed", 1, *training, *arch, "-o", root).code == 0
    (local,) = (root / "round_0001").glob("client_*.safetensors")
    reference = local.with_name("global.safetensors")
    return ["--global", reference, "--local", local, "--aux", root / "aux", *arch]


def test_batch_norm_of_single_values_in_replays(tmp_path: Path) -> None:
    """Of made-up clients some end their epochs with one image: the default ended as a fault of ours."""
    flags = normed_client(tmp_path, "--batch-size", 8, "--epochs", 1)
    document = call("recover", *flags, "--samples", 2000).document
    assert document["method"] == "replay"
    assert document["reliability"]["grade"] == "good"
    for method in ("replay", "gls"):
        single = ("--method", method, "--batch-size", 1, "--steps", 4)
        assert "a single image" in call("recover", *flags, *QUICK, *single).refusal(4)


def test_what_no_client_can_have_trained_with_is_left_out_of_the_sensitivity(tmp_path: Path) -> None:
    flags = normed_client(tmp_path, "--batch-size", 2, "--steps", 3)
    document = call("recover", *flags, *QUICK, "--method", "gls", "--sensitivity").document
    used = [(entry["value"], entry["used"]) for entry in document["sensitivity"]]
    assert ("batch_size", 3) in used and ("batch_size", 1) not in used


FROZEN_BODY = """
import torch
from torch import nn

def net():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 24),
        nn.ReLU(), nn.Linear(24, 10),
    )
    for layer in model[:5]:
        layer.requires_grad_(False)
    return model
"""


def test_clients_that_trained_the_head_alone_are_replayed_so(tmp_path: Path) -> None:
    """Replays trained all layers: graded good, 0.84 of the labels were found and 65 % of the bounds held."""
    (tmp_path / "frozen.py").write_text(FROZEN_BODY, encoding="utf-8")
    arch, archive = f"{tmp_path}/frozen.py:net", tmp_path / "archive"
    how = ["--clients", 6, "--participation", 0.5, "--rounds", 1, "--aux-per-class", 30, "--seed", 4]
    training = ["--lr", 0.1, "--batch-size", 16, "--steps", 30]
    assert call("simulate", "--data", "digits", "--arch", arch, "-o", archive, *how, *training).code == 0
    scores = call("evaluate", "--archive", archive, "--arch", arch, *QUICK).document["pairs"]
    found = [score for score in scores if score["method"] == "replay"]
    assert len(found) == 3
    for score in found:
        assert score["iAcc"] > 0.97
        assert score["bounds_hold"] >= 0.9
        assert score["bounds_width"] < 0.05
