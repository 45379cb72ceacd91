"""``--method gls`` as a user runs it: bounds, presence, and what it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli_tools import AUX, QUICK, call, sample, truth, within_bounds

from rlu_cli.audit.statistics_file import read_statistics, write_statistics

GLS = ("--method", "gls", *QUICK)


def test_bounds_and_presence() -> None:
    document = call("recover", *sample("trained_m10"), *GLS).document
    counts = truth("trained_m10")
    assert within_bounds(document, counts) >= 8
    present = [row["presence"] for row in document["classes"]]
    assert min(p for p, count in zip(present, counts, strict=True) if count > 20) > 0.95
    assert document["diagnostics"]["replays"] == 3


def test_other_methods_have_no_bounds() -> None:
    for row in call("recover", *sample("trained_m1"), "--method", "llg", *QUICK).document["classes"]:
        assert row["low"] is row["high"] is row["presence"] is None


def test_same_call_same_bytes() -> None:
    arguments = ("recover", *sample("trained_m10"), *GLS)
    assert call(*arguments).out == call(*arguments).out


def test_untrained_rounds_are_certain() -> None:
    document = call("recover", *sample("untrained_m1"), *GLS).document
    counts = truth("untrained_m1")
    assert document["counts"] == counts
    for side in ("low", "high"):
        assert [row[side] for row in document["classes"]] == counts


def test_stored_statistics_are_enough_for_one_step(tmp_path: Path) -> None:
    files = sample("untrained_m1", aux=None)
    stats = tmp_path / "stats.safetensors"
    assert call("estimate-logits", *files[:2], "--aux", AUX, "-o", stats, *QUICK).code == 0
    measured = call("recover", *files, "--aux", AUX, *GLS).document
    assert measured["counts"] == truth("untrained_m1")
    stored = call("recover", *files, "--stats", stats, "--method", "gls").document
    assert stored["classes"] == measured["classes"]


def test_older_statistics_are_not(tmp_path: Path) -> None:
    files = sample("untrained_m1", aux=None)
    stats = tmp_path / "stats.safetensors"
    assert call("estimate-logits", *files[:2], "--aux", AUX, "-o", stats, *QUICK).code == 0
    found = read_statistics(stats)
    write_statistics(stats, replace(found, statistics=replace(found.statistics, residuals=None)))
    assert call("recover", *files, "--stats", stats).document["method"] == "rlu"
    assert "--aux" in call("recover", *files, "--stats", stats, "--method", "gls").refusal(2)
    both = call("recover", *files, "--stats", stats, "--aux", AUX, *GLS).document
    fewer = ("--aux-per-class", 20)  # other samples than those of the statistics: they were mixed, unsaid
    assert "--stats" in call("recover", *files, "--stats", stats, "--aux", AUX, *fewer, *GLS).refusal(4)
    assert both["counts"] == truth("untrained_m1")


def test_images_are_not_hashed_where_nothing_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("all pixels were hashed")

    monkeypatch.setattr("rlu_cli.audit.image_source.sha256_tensors", never)
    assert call("recover", *sample("untrained_m10"), *GLS).code == 0
