"""The default for several steps of a trained model, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli_tools import QUICK, call, sample, truth


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
