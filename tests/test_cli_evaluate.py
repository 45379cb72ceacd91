"""``rlu evaluate``: both forms, every form of truth, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_tools import PLAIN, QUICK, SAMPLES, call, check_fields, sample, truth

NAMES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle-boot",
)
KNOWN = SAMPLES / "untrained_m1" / "truth.json"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved result of recover."""
    path = tmp_path_factory.mktemp("result") / "recovered.json"
    assert call("recover", *sample("untrained_m1"), "-o", path).code == 0
    return path


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def labels(counts: list[int]) -> list[int]:
    return [n for n, count in enumerate(counts) for _ in range(count)]


def test_round_form() -> None:
    outcome = call("evaluate", *sample("untrained_m1"), "--truth", KNOWN)
    document = outcome.document
    assert outcome.err == ""
    kinds = {"schema_version": int, "command": str, "truth": dict, "results": list, "baselines": dict}
    check_fields(document, kinds)
    assert document["command"] == "evaluate"
    assert document["truth"] == {"counts": truth("untrained_m1"), "total": 32}
    (entry,) = document["results"]
    scores = {"cAcc": float, "iAcc": float, "exact_counts": float, "total_variation": float}
    check_fields(entry, {"method": str, "counts": list, **scores, "per_class": list, "warnings": list})
    assert entry["counts"] == truth("untrained_m1")
    assert (entry["cAcc"], entry["iAcc"], entry["exact_counts"]) == (1.0, 1.0, 1.0)
    assert entry["total_variation"] == 0.0
    check_fields(document["baselines"]["uniform"], scores)
    assert document["baselines"]["uniform"]["iAcc"] < 1


def test_per_class() -> None:
    known_counts = ["--truth", SAMPLES / "trained_m1" / "truth.json"]
    document = call("evaluate", *sample("trained_m1", 2), *known_counts, *QUICK)
    (entry,) = document.document["results"]
    known = truth("trained_m1", 2)
    for n, row in enumerate(entry["per_class"]):
        check_fields(row, {"index": int, "name": str, "count": int, "truth": int, "error": int})
        assert (row["index"], row["name"], row["truth"]) == (n, NAMES[n], known[n])
        assert row["count"] == entry["counts"][n]
        assert row["error"] == row["count"] - row["truth"]
    moved = sum(abs(row["error"]) for row in entry["per_class"]) / 2
    assert entry["iAcc"] == pytest.approx(1 - moved / 32)
    assert entry["total_variation"] == pytest.approx(moved / 32)
    assert entry["exact_counts"] == pytest.approx(sum(r["error"] == 0 for r in entry["per_class"]) / 10)


def test_several_methods_in_the_order_given() -> None:
    flags = ["--method", "random", "--method", "gls", "--method", "auto"]
    document = call("evaluate", *sample("untrained_m1"), "--truth", KNOWN, *flags).document
    assert [entry["method"] for entry in document["results"]] == ["random", "gls", "gls"]
    assert document["results"][0]["iAcc"] < 1
    assert document["results"][1] == document["results"][2]


def test_result_form_agrees_with_the_round_form(result: Path) -> None:
    saved = call("evaluate", "--result", result, "--truth", KNOWN).document
    assert saved == call("evaluate", *sample("untrained_m1"), "--truth", KNOWN).document


def test_table_and_output_file(result: Path, tmp_path: Path) -> None:
    flags = ["evaluate", "--result", result, "--truth", KNOWN]
    printed = call(*flags, "-v")
    assert "(uniform guess)" in printed.err
    assert call(*flags, "-o", tmp_path / "scores.json").out == ""
    assert (tmp_path / "scores.json").read_bytes() == printed.out.encode("utf-8")


COUNTS = truth("untrained_m1")


@pytest.mark.parametrize(
    "document",
    [
        {"counts": COUNTS},
        {"labels": labels(COUNTS)},
        {"labels": [NAMES[n] for n in reversed(labels(COUNTS))]},
        {"steps": [labels(COUNTS)[:20], labels(COUNTS)[20:]]},
        {"counts": {NAMES[n]: count for n, count in enumerate(COUNTS) if count}},
        {"counts": {str(n): count for n, count in enumerate(COUNTS)}},
        {"clients": {"client_0": {"labels": labels(COUNTS)}, "client_1": {"counts": [1] * 10}}},
        {"counts": COUNTS, "labels": labels(COUNTS)},
    ],
    ids=["counts", "labels", "names", "steps", "by-name", "by-index", "per-client", "two-forms"],
)
def test_forms_of_truth(result: Path, tmp_path: Path, document: Any) -> None:
    scored = call("evaluate", "--result", result, "--truth", write(tmp_path / "t.json", document)).document
    assert scored["truth"] == {"counts": COUNTS, "total": 32}
    assert scored["results"][0]["exact_counts"] == 1.0


@pytest.mark.parametrize(
    ("document", "code", "words"),
    [
        ({"counts": [32, *[0] * 8]}, 4, ("10 counts", "9")),
        ({"counts": [33, *[0] * 9]}, 4, ("32", "33", "--batch-size")),
        ({"counts": [0] * 10}, 4, ("at least one sample",)),
        ({"counts": [-1, 33, *[0] * 8]}, 4, ("-1",)),
        ({"labels": [10] * 32}, 4, ("0 to 9", "10")),
        ({"labels": ["tshirt"] * 32}, 4, ("tshirt", "t-shirt")),
        ({"clients": {"client_7": {"counts": COUNTS}}}, 4, ("client_0", "client_7")),
        ({"count": COUNTS}, 3, ("counts", "labels", "steps")),
        ([COUNTS], 3, ("counts",)),
        ({"counts": COUNTS, "labels": [0] * 32}, 4, ("agree",)),
    ],
)
def test_wrong_truths(result: Path, tmp_path: Path, document: Any, code: int, words: tuple[str, ...]) -> None:
    known = write(tmp_path / "t.json", document)
    message = call("evaluate", "--result", result, "--truth", known).refusal(code)
    for word in (*words, "t.json"):
        assert word in message


def test_a_line_of_the_truth_of_an_archive(result: Path, tmp_path: Path) -> None:
    """Another client's line was scored as this one's."""
    known, forms = tmp_path / "t.json", (["--result", result], [*sample("untrained_m1"), *PLAIN])
    line = {"round": 1, "client": "client_2", "total": 32, "counts": COUNTS}
    for form in forms:
        for said in ("client_0", "client_0.safetensors", None, 3):
            write(known, {**line, "client": said})
            assert call("evaluate", *form, "--truth", known).document["truth"]["counts"] == COUNTS
        for said in ("client_2", "client_00", "", "\x1b[31m" + "x" * 5000):
            message = call("evaluate", *form, "--truth", write(known, {**line, "client": said})).refusal(4)
            assert "'client_0'" in message and "t.json" in message
            assert len(message) < 400 + len(str(known)) and "\x1b" not in message
    write(known, {"clients": {"client_0": {**line, "client": "client_2"}}})
    assert "'client_2'" in call("evaluate", "--result", result, "--truth", known).refusal(4)
    write(known, {"clients": {"client_0": {**line, "client": "client_0"}}, "client": "all of them"})
    assert call("evaluate", "--result", result, "--truth", known).code == 0


def test_truth_that_is_no_json(result: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{counts: 1}", encoding="utf-8")
    call("evaluate", "--result", result, "--truth", tmp_path / "t.json").refusal(3)
    call("evaluate", "--result", result, "--truth", tmp_path / "none.json").refusal(3)


def test_truth_of_another_client_has_another_total() -> None:
    known = SAMPLES / "untrained_m10" / "truth.json"
    message = call("evaluate", *sample("untrained_m1"), *QUICK, "--truth", known).refusal(4)
    assert "320" in message


def test_results_that_are_none(result: Path, tmp_path: Path) -> None:
    document = json.loads(result.read_text(encoding="utf-8"))
    for change in (
        {"command": "evaluate"},
        {"counts": "no"},
        {"counts": document["counts"][:9]},
        {"counts": []},
        {"counts": [], "classes": []},
        {"counts": [2**70] * 10},
        {"counts": [1.5] * 10},
        {"counts": [-1] * 10},
        {"warnings": ["text"]},
        {"warnings": [{"code": "a"}]},
        {"classes": None},
        {"inputs": {}},
    ):
        other = write(tmp_path / "r.json", {**document, **change})
        message = call("evaluate", "--result", other, "--truth", KNOWN).refusal(3)
        assert "rlu recover" in message
    endless = tmp_path / "endless.json"
    endless.write_text(json.dumps({**document, "counts": [0] * 10}).replace("[0,", "[1e999,"))
    for other in (KNOWN, write(tmp_path / "list.json", [document]), endless):
        call("evaluate", "--result", other, "--truth", KNOWN).refusal(3)


def test_both_forms_at_once(result: Path) -> None:
    message = call("evaluate", "--result", result, *sample("untrained_m1"), "--truth", KNOWN).refusal(2)
    assert "--result" in message
    message = call("evaluate", "--result", result, "--method", "rlu", "--truth", KNOWN).refusal(2)
    assert "--method" in message


def test_neither_form() -> None:
    message = call("evaluate", "--truth", KNOWN).refusal(2)
    assert "--result" in message
    assert "--local" in message
    call("evaluate", *sample("untrained_m1")[:2], "--truth", KNOWN).refusal(2)


def test_truth_is_required() -> None:
    assert "--truth" in call("evaluate", *sample("untrained_m1")).refusal(2)


def test_warnings_are_told(tmp_path: Path) -> None:
    outcome = call("evaluate", *sample("untrained_m1"), *QUICK, "--lr", 0.001, "--truth", KNOWN)
    (entry,) = outcome.document["results"]
    codes = ["update-too-large", "update-unexplained", "update-misscaled"]
    assert [warning["code"] for warning in entry["warnings"]] == codes
    assert "update-too-large" in outcome.err
