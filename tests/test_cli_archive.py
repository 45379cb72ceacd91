"""`rlu evaluate --archive`: every client of a simulated archive, scored and summarised."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_tools import call, check_fields

SCORES = ("cAcc", "iAcc", "exact_counts", "total_variation")
QUICK = ("--samples", 500)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three Scaffold rounds of real training on digits, two of three clients in each; not to be changed."""
    root = tmp_path_factory.mktemp("scaffold") / "archive"
    flags: list[object] = ["--data", "digits", "--clients", 6, "--participation", 0.67, "--rounds", 3]
    flags += ["--aux-per-class", 20, "--test-size", 100, "--scheme", "scaffold"]
    call("simulate", *flags, "--lr", 0.1, "--batch-size", 16, "--steps", 10, "-o", root).document  # noqa: B018
    return root


@pytest.fixture(scope="module")
def document(archive: Path) -> dict[str, Any]:
    return call("evaluate", "--archive", archive, *QUICK, "--method", "rlu", "--method", "random").document


def test_fields(document: dict[str, Any], archive: Path) -> None:
    check_fields(document, {"schema_version": int, "command": str, "rlu_version": str, "archive": str})
    assert (document["command"], document["archive"]) == ("evaluate", str(archive))
    spread = {"mean": float, "sd": float}
    for entry in document["summary"]:
        check_fields(
            entry, {"round": int, "scheme": str, "model_accuracy": float, "method": str, "clients": int}
        )
        for name in SCORES:
            check_fields(entry[name], spread)
    for pair in document["pairs"]:
        check_fields(
            pair, {"round": int, "client": str, "scheme": str, "model_accuracy": float, "method": str}
        )
        check_fields(pair, {**dict.fromkeys(SCORES, float), "warnings": list})
        assert pair["scheme"] == "scaffold"


def test_every_client_by_every_method_and_the_uniform_guess(document: dict[str, Any], archive: Path) -> None:
    lines = [json.loads(line) for line in (archive / "truth.ndjson").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3 * 4
    pairs = [(pair["round"], pair["client"], pair["method"]) for pair in document["pairs"]]
    methods = ("rlu", "random", "(uniform)")
    assert pairs == [(line["round"], line["client"], method) for line in lines for method in methods]
    summary = [(entry["round"], entry["method"]) for entry in document["summary"]]
    assert summary == [(number, method) for number in (1, 2, 3) for method in methods]
    accuracies = {line["round"]: line["accuracy"] for line in lines}
    assert all(entry["model_accuracy"] == accuracies[entry["round"]] for entry in document["summary"])


def test_the_summary_is_of_the_pairs(document: dict[str, Any]) -> None:
    for entry in document["summary"]:
        group = [
            p for p in document["pairs"] if (p["round"], p["method"]) == (entry["round"], entry["method"])
        ]
        assert entry["clients"] == len(group) == 4
        for name in SCORES:
            values = [pair[name] for pair in group]
            assert entry[name]["mean"] == pytest.approx(np.mean(values), abs=1e-12)
            assert entry[name]["sd"] == pytest.approx(np.std(values, ddof=1), abs=1e-12)
        grades = [pair["reliability"] and pair["reliability"]["grade"] for pair in group]
        if entry["method"] == "(uniform)":
            assert entry["grades"] is entry["expected_iAcc"] is None
            assert set(grades) == {None}
        else:
            assert entry["grades"] == {name: grades.count(name) for name in ("good", "fair", "poor")}


def test_the_uniform_guess(document: dict[str, Any], archive: Path) -> None:
    lines = map(json.loads, (archive / "truth.ndjson").read_text(encoding="utf-8").splitlines())
    guesses = [pair for pair in document["pairs"] if pair["method"] == "(uniform)"]
    for pair, line in zip(guesses, lines, strict=True):
        counts = np.array(line["counts"])
        assert counts.sum() == 160
        assert pair["iAcc"] == pytest.approx(np.minimum(counts, 16).sum() / 160)
        assert pair["exact_counts"] == pytest.approx(np.mean(counts == 16))
        assert pair["warnings"] == []


def test_the_scores_are_those_of_each_client_alone(
    document: dict[str, Any], archive: Path, tmp_path: Path
) -> None:
    line = json.loads((archive / "truth.ndjson").read_text(encoding="utf-8").splitlines()[-1])
    truth = tmp_path / "labels.json"
    truth.write_text(json.dumps({"counts": line["counts"]}), encoding="utf-8")
    folder = archive / "round_0003"
    flags = ["--global", folder / "global.safetensors", "--local", folder / f"{line['client']}.safetensors"]
    flags += ["--aux", archive / "aux", "--history", archive, "--truth", truth, "--method", "rlu", *QUICK]  # type: ignore[list-item]
    (alone,) = call("evaluate", *flags).document["results"]
    (pair,) = [
        p for p in document["pairs"] if (p["round"], p["client"], p["method"]) == (3, line["client"], "rlu")
    ]
    assert {name: alone[name] for name in SCORES} == {name: pair[name] for name in SCORES}


def test_told_the_right_scheme_the_last_round_is_recovered(document: dict[str, Any], archive: Path) -> None:
    # Measured over seeds: 0.94 to 1.00 told right, 0.59 to 0.63 told FedAvg.
    plain = call("evaluate", "--archive", archive, *QUICK, "--method", "rlu", "--scheme", "fedavg").document

    def score(scores: dict[str, Any], number: int) -> float:
        (entry,) = [e for e in scores["summary"] if (e["round"], e["method"]) == (number, "rlu")]
        return float(entry["iAcc"]["mean"])

    assert score(document, 1) == score(plain, 1)  # nothing is remembered yet
    assert score(document, 3) > 0.85
    assert score(document, 3) > score(plain, 3) + 0.15
    assert {pair["scheme"] for pair in plain["pairs"]} == {"fedavg"}


def test_the_table_is_for_people(archive: Path) -> None:
    quiet = call("evaluate", "--archive", archive, "--method", "random")
    assert quiet.err == ""
    shown = call("evaluate", "--archive", archive, "--method", "random", "-v")
    assert shown.out == quiet.out
    words = re.sub(r"\s+", " ", shown.err)
    assert all(word in words for word in ("cAcc", "iAcc", "random", "(uniform)", "±"))


def test_one_client_has_no_spread(archive: Path, tmp_path: Path) -> None:
    root = tmp_path / "a"
    shutil.copytree(archive, root)
    lines = (root / "truth.ndjson").read_text(encoding="utf-8").splitlines(keepends=True)
    (root / "truth.ndjson").write_text(lines[0], encoding="utf-8")
    outcome = call("evaluate", "--archive", root, "--method", "random", "-v")
    for entry in outcome.document["summary"]:
        assert entry["clients"] == 1
        assert all(entry[name]["sd"] is None for name in SCORES)


def test_other_auxiliary_images(archive: Path, tmp_path: Path) -> None:
    moved = tmp_path / "a"
    shutil.copytree(archive, moved)
    (moved / "aux").rename(tmp_path / "images")
    call("evaluate", "--archive", moved, *QUICK).refusal(3)
    first = [(moved / "truth.ndjson").read_text(encoding="utf-8").splitlines()[0]]
    (moved / "truth.ndjson").write_text(first[0], encoding="utf-8")
    scored = call(
        "evaluate", "--archive", moved, "--aux", tmp_path / "images", *QUICK, "-o", tmp_path / "s.json"
    )
    assert scored.out == ""
    assert len(json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["pairs"]) == 2


def test_what_is_missing_or_damaged(archive: Path, tmp_path: Path) -> None:
    assert "truth.ndjson" in call("evaluate", "--archive", tmp_path / "nothing").refusal(3)
    (tmp_path / "empty").mkdir()
    call("evaluate", "--archive", tmp_path / "empty").refusal(3)
    root = tmp_path / "a"
    shutil.copytree(archive, root)
    (root / "round_0002" / "global.safetensors").unlink()
    assert "global" in call("evaluate", "--archive", root, *QUICK).refusal(3)
    (root / "truth.ndjson").write_text('{"round": 1}\n', encoding="utf-8")
    assert "line 1 is damaged" in call("evaluate", "--archive", root).refusal(3)
    (root / "truth.ndjson").unlink()
    assert "truth.ndjson" in call("evaluate", "--archive", root).refusal(3)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"counts": [-1] * 10}, 3, "line 1"),
        ({"counts": [10**400] * 10}, 3, "line 1"),
        ({"counts": [2**52] * 10}, 3, "line 1"),
        ({"counts": [True] * 10}, 3, "line 1"),
        ({"counts": {"0": 1}}, 3, "line 1"),
        ({"counts": [1] * 9}, 4, "counts of 10 classes"),
        ({"counts": [0] * 10}, 4, "one sample at least"),
        ({"accuracy": float("inf")}, 3, "line 1"),
        ({"round": 1.5}, 3, "line 1"),
        ({"round": -1}, 3, "line 1"),
        ({"round": 99}, 4, "found 0"),
        ({"client": "*"}, 4, "found 0"),
        ({"client": "/etc/passwd"}, 4, "found 0"),
        ({"client": "\x1b[31m" + "x" * 5000}, 4, "found 0"),
        (b"\xff\xfe", 3, "UTF-8"),
        (b"[" * 100_000, 3, "line 1"),
        (b"7", 3, "line 1"),
    ],
)
def test_a_truth_that_was_altered(
    archive: Path, tmp_path: Path, change: dict[str, object] | bytes, code: int, words: str
) -> None:
    root = shutil.copytree(archive, tmp_path / "a")
    path = root / "truth.ndjson"
    if isinstance(change, dict):
        change = json.dumps({**json.loads(path.read_text().splitlines()[0]), **change}).encode()
    path.write_bytes(change)
    message = call("evaluate", "--archive", root, *QUICK, "--method", "random").refusal(code)
    assert words in message and len(message) < 400 + len(str(root)) and "\x1b" not in message


def test_a_truth_that_an_editor_saved(archive: Path, tmp_path: Path) -> None:
    root = shutil.copytree(archive, tmp_path / "a")
    path = root / "truth.ndjson"
    path.write_text(path.read_text(encoding="utf-8") + "\n\n", encoding="utf-8-sig")
    flags = [*QUICK, "--method", "random"]
    pairs = call("evaluate", "--archive", root, *flags).document["pairs"]
    assert pairs == call("evaluate", "--archive", archive, *flags).document["pairs"]


@pytest.mark.parametrize("flag", ["--truth", "--stats", "--history", "--result", "--local"])
def test_flags_that_an_archive_has_no_use_for(archive: Path, flag: str) -> None:
    message = call("evaluate", "--archive", archive, flag, archive / "truth.ndjson").refusal(2)
    assert flag in message or flag == "--local"


def test_a_scheme_that_needs_no_memory_needs_no_first_round(archive: Path, tmp_path: Path) -> None:
    # The server's variates are archived: without round 1, the clients that took part in it are wrong or
    # warned about, and nothing is refused.
    root = tmp_path / "a"
    shutil.copytree(archive, root)
    lines = (root / "truth.ndjson").read_text(encoding="utf-8").splitlines(keepends=True)
    (root / "truth.ndjson").write_text("".join(lines[8:]), encoding="utf-8")
    shutil.rmtree(root / "round_0001")
    pairs = call("evaluate", "--archive", root, *QUICK, "--method", "rlu").document["pairs"]
    assert all("history-gap" in pair["warnings"] for pair in pairs if pair["method"] == "rlu")


def test_checksums_beside_checkpoints_are_passed_over(archive: Path, tmp_path: Path) -> None:
    root = shutil.copytree(archive, tmp_path / "a")
    for path in sorted(root.glob("round_*/*.safetensors")):
        path.with_name(f"{path.name}.sha256").write_text("abc", encoding="utf-8")
    pairs = call("evaluate", "--archive", root, *QUICK, "--method", "random").document["pairs"]
    assert pairs == call("evaluate", "--archive", archive, *QUICK, "--method", "random").document["pairs"]
