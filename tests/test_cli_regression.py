"""``--method regression`` as a user runs it: bounds, presence, the same bytes, and what it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_tools import AUX, QUICK, call, sample, truth, within_bounds

from rlu_cli.audit.statistics_file import StoredStatistics, read_statistics, write_statistics

REGRESSION = ("--method", "regression", *QUICK)


def test_bounds_and_presence() -> None:
    document = call("recover", *sample("trained_m1"), *REGRESSION).document
    assert within_bounds(document, truth("trained_m1")) >= 8
    assert document["counts"] == [row["count"] for row in document["classes"]]
    assert sum(document["counts"]) == document["total"]
    diagnostics = document["diagnostics"]
    assert 0 < diagnostics["regression_error"] < 1 and 0 < diagnostics["regression_strangeness"] < 1


def test_clients_get_the_same_together_and_alone() -> None:
    both = [*sample("trained_m1", 0), "--local", sample("trained_m1", 1)[3]]
    together = call("recover", *both, *REGRESSION).lines
    for k in (0, 1):
        alone = call("recover", *sample("trained_m1", k), *REGRESSION)
        assert alone.document["classes"] == together[k]["classes"]


def test_untrained_rounds_are_certain() -> None:
    document = call("recover", *sample("untrained_m1"), *REGRESSION).document
    assert document["counts"] == truth("untrained_m1")
    assert document["diagnostics"]["regression_error_gls"] < document["diagnostics"]["regression_error"]


def test_several_steps_are_left_to_gls() -> None:
    answers = []
    for method in ("regression", "gls"):
        document = call("recover", *sample("trained_m10"), "--method", method, *QUICK).document
        answers.append(document["classes"])
    assert answers[0] == answers[1]


def test_stored_statistics_are_enough(tmp_path: Path) -> None:
    stats = tmp_path / "stats.safetensors"
    files = sample("trained_m1", aux=None)
    assert call("estimate-logits", *files[:2], "--aux", AUX, "-o", stats, *QUICK).code == 0
    stored = call("recover", *files, "--stats", stats, *REGRESSION).document
    assert stored["classes"] == call("recover", *sample("trained_m1"), *REGRESSION).document["classes"]


@pytest.mark.parametrize("labels", ["none", "float", "beyond", "missing"])
def test_statistics_whose_samples_are_none(tmp_path: Path, labels: str) -> None:
    """With the right checksum: an older file asks for images, and labels that are none are damage."""
    stats = tmp_path / "stats.safetensors"
    files = sample("trained_m1", aux=None)
    assert call("estimate-logits", *files[:2], "--aux", AUX, "-o", stats, *QUICK).code == 0
    kept = read_statistics(stats)
    samples = kept.statistics.samples
    assert samples is not None
    wrong = {
        "float": samples.labels.astype(float),
        "beyond": np.where(samples.labels == 9, 10, samples.labels),
        "missing": np.where(samples.labels == 9, 8, samples.labels),
    }
    changed = None if labels == "none" else replace(samples, labels=wrong[labels])
    about = {name: value for name, value in kept.about.items() if name != "sha256"}
    stored = StoredStatistics(replace(kept.statistics, samples=changed), about)
    write_statistics(stats, stored)
    outcome = call("recover", *files, "--stats", stats, *REGRESSION)
    if labels == "none":
        assert "--aux" in outcome.refusal(2)
    else:
        assert "sample_labels" in outcome.refusal(3)
