"""``recover --lr auto`` on the sample rounds, all of which were trained at 0.01."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from cli_tools import AUX, QUICK, SAMPLES, call, sample, truth
from defended_rounds import defended, norm
from safetensors.torch import load_file, save_file

from rlu_cli.simulation.defences import Defence


@pytest.mark.parametrize(("round_", "error"), [("untrained_m1", 0.02), ("untrained_m10", 0.03)])
def test_untrained_rounds_are_exact_without_it(round_: str, error: float) -> None:
    outcome = call("recover", *sample(round_), *QUICK, "--method", "rlu", "--lr", "auto")
    document = outcome.document
    assert document["training"]["lr"] == pytest.approx(0.01, rel=error)
    assert document["training"]["sources"]["lr"] == "estimated"
    assert [warning["code"] for warning in document["warnings"]] == ["lr-estimated"]
    wrong = sum(abs(a - b) for a, b in zip(document["counts"], truth(round_), strict=True)) / 2
    assert wrong <= 0.02 * document["total"]
    assert "rlu: warning [lr-estimated]: nobody said the learning rate" in outcome.err


def test_a_trained_model_of_several_steps_is_told_by_replays() -> None:
    document = call("recover", *sample("trained_m10"), *QUICK, "--method", "rlu", "--lr", "auto").document
    assert 0.003 < document["training"]["lr"] < 0.03


@pytest.mark.parametrize(("steps", "error"), [(1, 0.05), (3, 0.15)])
def test_adams_rate_is_told_by_replays(tmp_path: Path, steps: int, error: float) -> None:
    """As one of SGD, which its likelihood took it for, it came out hundreds of times too large."""
    archive = tmp_path / "a"
    made = ["--data", "digits", "--normalize", "half", "--clients", 2, "--alpha", 1, "--aux-per-class", 20]
    trained = ["--optimizer", "adam", "--lr", 0.001, "--batch-size", 32, "--steps", steps, "--seed", 3]
    assert call("simulate", "-o", archive, *made, *trained).code == 0
    files = [archive / "round_0001" / f"{name}.safetensors" for name in ("global", "client_0000")]
    flags = ["--global", files[0], "--local", files[1], *QUICK, "--method", "surrogate", "--lr", "auto"]
    document = call("recover", *flags, "--aux", archive / "aux").document
    rate = document["training"]["lr"]
    assert rate == pytest.approx(0.001, rel=error)
    assert document["training"]["sources"]["lr"] == "estimated"
    told = call("recover", *flags[:-1], repr(rate), "--aux", archive / "aux").document
    assert document["classes"] == told["classes"]  # they were those of a rate of 1


@pytest.mark.parametrize("pull", [2, 5])
def test_a_proximal_pull_is_none_of_a_rate_of_one(tmp_path: Path, pull: float) -> None:
    """At which each step turned the model round: a fault of ours, or noise that nobody had added."""
    archive = tmp_path / "a"
    made = ["--data", "digits", "--normalize", "half", "--clients", 2, "--alpha", 1, "--aux-per-class", 20]
    trained = ["--scheme", "fedprox", "--lambda", pull, "--lr", 0.01, "--batch-size", 32, "--steps", 10]
    assert call("simulate", "-o", archive, *made, *trained, "--seed", 3).code == 0
    files = [archive / "round_0001" / f"{name}.safetensors" for name in ("global", "client_0000")]
    flags = ["--global", files[0], "--local", files[1], *QUICK, "--method", "rlu", "--lr", "auto"]
    outcome = call("recover", *flags, "--aux", archive / "aux")
    assert outcome.document["training"]["lr"] == pytest.approx(0.01, rel=0.1)
    assert outcome.codes == ["lr-estimated"]


def test_counts_are_those_of_the_rate_found() -> None:
    flags = ("recover", *sample("trained_m1"), *QUICK, "--method", "gls")
    found = call(*flags, "--lr", "auto").document
    told = call(*flags, "--lr", repr(found["training"]["lr"])).document
    assert found["classes"] == told["classes"]
    assert told["training"]["sources"]["lr"] == "flag"


def test_a_clipped_update_tells_the_rate_times_its_factor(tmp_path: Path) -> None:
    """It was said to be the rate, and the counts to be too even."""
    bound = 0.5 * norm("untrained_m1")
    flags = [*defended(tmp_path, Defence(clip=bound), name="untrained_m1"), "--clip", bound]
    outcome = call("recover", *flags, "--method", "rlu", "--lr", "auto")
    notes = {note["code"]: note["message"] for note in outcome.document["warnings"]}
    assert "which is part of the learning rate found" in notes["update-clipped"]
    assert "it times the unknown factor of the clipping is 0.005" in notes["lr-estimated"]
    assert outcome.document["counts"] == truth("untrained_m1")


def test_a_decay_is_kept() -> None:
    flags = ("--method", "rlu", "--lr", "auto", "--lr-decay", 0.9)
    rates = call("recover", *sample("untrained_m10"), *QUICK, *flags).document["training"]["lr"]
    assert [b / a for a, b in pairwise(rates)] == pytest.approx([0.9] * 9)
    assert sum(rates) == pytest.approx(0.1, rel=0.1)  # as far as ten steps at 0.01


def test_where_nobody_says_the_rate_the_flag_is_named(tmp_path: Path) -> None:
    for name in ("global", "client_0"):
        source = SAMPLES / "untrained_m1" / f"{name}.safetensors"
        save_file(load_file(source), tmp_path / source.name)  # without its metadata
    files = ("--global", tmp_path / "global.safetensors", "--local", tmp_path / "client_0.safetensors")
    flags = ("--batch-size", 32, "--steps", 1, "--arch", "lenet5")
    assert "--lr; auto estimates it" in call("recover", *files, "--aux", AUX, *flags).refusal(4)


def test_schemes_that_remember_need_the_rate() -> None:
    message = call("recover", *sample("untrained_m1"), "--lr", "auto", "--scheme", "scaffold").refusal(2)
    assert "scaffold" in message
    assert "--lr auto" in message


def test_a_simulation_needs_the_rate(tmp_path: Path) -> None:
    flags = ("--data", "digits", "-o", tmp_path / "archive", "--batch-size", 8, "--steps", 1)
    assert "'auto'" in call("simulate", *flags, "--lr", "auto").refusal(2)
    assert not (tmp_path / "archive").exists()
