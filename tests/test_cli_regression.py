"""``--method regression`` as a user runs it: bounds, presence, the same bytes, and what it needs."""

from __future__ import annotations

from pathlib import Path

from cli_tools import AUX, QUICK, call, sample, truth, within_bounds

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


def test_stored_statistics_are_not_enough(tmp_path: Path) -> None:
    files = sample("untrained_m1", aux=None)
    stats = tmp_path / "stats.safetensors"
    assert call("estimate-logits", *files[:2], "--aux", AUX, "-o", stats, *QUICK).code == 0
    assert "--aux" in call("recover", *files, "--stats", stats, "--method", "regression").refusal(2)
