"""``rlu estimate-logits``, and its statistics file in the other commands' ``--stats``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_tools import (
    AUX,
    QUICK,
    SAMPLES,
    Outcome,
    bare_round,
    call,
    check_fields,
    sample,
    tensors,
    truth,
    write_safetensors,
)

from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.hashing import sha256_file


def estimate(round_: str, output: Path | str, *more: object) -> Outcome:
    path = SAMPLES / round_ / "global.safetensors"
    return call("estimate-logits", "--global", path, "--aux", AUX, "-o", output, *more)


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Statistics files of sample rounds."""
    folder = tmp_path_factory.mktemp("stats")
    found = {}
    for round_ in ("untrained_m1", "trained_m10"):
        found[round_] = folder / f"{round_}.safetensors"
        assert estimate(round_, found[round_], *(QUICK if round_ == "trained_m10" else ())).code == 0
    return found


def test_summary(tmp_path: Path) -> None:
    output = tmp_path / "stats.safetensors"
    outcome = estimate("trained_m1", output)
    document = outcome.document
    assert outcome.err == ""
    kinds = {
        "schema_version": int,
        "command": str,
        "rlu_version": str,
        "seed": int,
        "device": str,
        "inputs": dict,
        "model": dict,
        "samples": int,
        "output": str,
        "aux_accuracy": float,
        "max_standard_error": float,
        "classes": list,
        "warnings": list,
    }
    check_fields(document, kinds)
    assert document["command"] == "estimate-logits"
    assert document["output"] == str(output)
    reference = SAMPLES / "trained_m1" / "global.safetensors"
    assert document["inputs"]["global"] == {"path": str(reference), "sha256": sha256_file(reference)}
    assert document["inputs"]["aux"]["images"] == 300
    assert document["model"]["head"] == "fc3"
    assert 0.4 < document["aux_accuracy"] < 0.9
    assert 0 < document["max_standard_error"] < 0.02
    for index, entry in enumerate(document["classes"]):
        kinds = {"index": int, "name": str, "images": int, "accuracy": float, "own_confidence": float}
        check_fields(entry, kinds)
        assert (entry["index"], entry["images"]) == (index, 30)
        assert 0 <= entry["accuracy"] <= 1
        assert 0 < entry["own_confidence"] < 1
    mean = sum(entry["accuracy"] for entry in document["classes"]) / 10
    assert mean == pytest.approx(document["aux_accuracy"])


def test_without_output_the_summary_alone() -> None:
    assert estimate("untrained_m1", "-", *QUICK).document["output"] is None


def test_table_on_stderr() -> None:
    outcome = estimate("untrained_m1", "-", *QUICK, "-v")
    assert "own confidence" in outcome.err
    assert outcome.document["command"] == "estimate-logits"


def test_file_holds_the_confidence(stats: dict[str, Path]) -> None:
    kept = read_checkpoint(stats["untrained_m1"])
    confidence = kept.tensors["confidence"]
    assert confidence.shape == (10, 10)
    assert confidence.sum(dim=1).tolist() == pytest.approx([1.0] * 10)


def test_same_bytes_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert estimate("trained_m1", first, *QUICK).code == estimate("trained_m1", second, *QUICK).code == 0
    assert first.read_bytes() == second.read_bytes()
    assert estimate("trained_m1", second, *QUICK, "--seed", 1).code == 0
    assert first.read_bytes() != second.read_bytes()


def test_a_failed_run_leaves_the_old_statistics(tmp_path: Path) -> None:
    output = tmp_path / "stats.safetensors"
    output.write_bytes(b"old")
    path = SAMPLES / "untrained_m1" / "global.safetensors"
    call("estimate-logits", "--global", path, "--aux", tmp_path / "none", "-o", output).refusal(3)
    assert output.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["stats.safetensors"]  # noqa: PTH208


def test_needs_aux(tmp_path: Path) -> None:
    path = SAMPLES / "untrained_m1" / "global.safetensors"
    assert "--aux" in call("estimate-logits", "--global", path).refusal(2)


# --stats


def test_one_step_needs_no_aux(stats: dict[str, Path]) -> None:
    measured = call("recover", *sample("untrained_m1")).document
    stored = call("recover", *sample("untrained_m1", aux=None), "--stats", stats["untrained_m1"]).document
    assert stored["counts"] == truth("untrained_m1")
    assert stored["classes"] == measured["classes"]
    assert stored["diagnostics"] == measured["diagnostics"]
    sources = stored["model"].pop("sources"), measured["model"].pop("sources")
    assert stored["model"] == measured["model"]
    assert (sources[0]["normalize"], sources[1]["normalize"]) == ("stats", "local")
    assert stored["inputs"]["aux"] == measured["inputs"]["aux"]
    assert stored["warnings"] == []


def test_one_step_never_builds_the_model_nor_reads_images(
    stats: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a stored statistics file is enough")

    monkeypatch.setattr("rlu_cli.audit.image_source.build_network", never)
    monkeypatch.setattr("rlu_cli.audit.image_source.scan_auxiliary", never)
    flags = sample("untrained_m1", 2)
    assert call("recover", *flags, "--stats", stats["untrained_m1"]).document["counts"] == truth(
        "untrained_m1", 2
    )


def test_several_steps_need_aux_too(stats: dict[str, Path]) -> None:
    flags = ["recover", *sample("trained_m10", aux=None), "--stats", stats["trained_m10"], *QUICK]
    assert "--aux" in call(*flags).refusal(2)
    stored = call(*flags, "--aux", AUX).document
    measured = call("recover", *sample("trained_m10"), *QUICK).document
    assert stored["classes"] == measured["classes"]


def test_statistics_serve_every_client(stats: dict[str, Path]) -> None:
    local = [flag for client in (1, 2) for flag in sample("untrained_m1", client, aux=None)[2:]]
    lines = call(
        "recover", *sample("untrained_m1", aux=None)[:2], *local, "--stats", stats["untrained_m1"]
    ).lines
    assert [line["counts"] for line in lines] == [truth("untrained_m1", client) for client in (1, 2)]


def test_evaluate_takes_statistics(stats: dict[str, Path]) -> None:
    known = SAMPLES / "untrained_m1" / "truth.json"
    flags = [*sample("untrained_m1", aux=None), "--stats", stats["untrained_m1"], "--truth", known]
    assert call("evaluate", *flags).document["results"][0]["exact_counts"] == 1.0


def test_bare_round_with_statistics(tmp_path: Path) -> None:
    flags = bare_round(tmp_path)
    output = tmp_path / "stats.safetensors"
    normalize = ["--normalize", "mean=0.286;std=0.353", "--class-order", tmp_path / "order.txt"]
    names = json.loads(
        read_checkpoint(SAMPLES / "untrained_m1" / "global.safetensors").metadata["fl.class_names"]
    )
    (tmp_path / "order.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    assert call("estimate-logits", *flags[:2], "--aux", AUX, *normalize, "-o", output).code == 0
    training = ["--lr", 0.01, "--batch-size", 32, "--steps", 1]
    document = call("recover", *flags[:4], "--stats", output, *training).document
    assert document["counts"] == truth("untrained_m1")
    assert [entry["name"] for entry in document["classes"]] == names


def test_statistics_of_another_global_model(stats: dict[str, Path]) -> None:
    message = call("recover", *sample("untrained_m1", aux=None), "--stats", stats["trained_m10"]).refusal(4)
    assert "another global model" in message
    assert "estimate-logits" in message


def test_a_checkpoint_is_no_statistics_file() -> None:
    checkpoint = SAMPLES / "untrained_m1" / "global.safetensors"
    message = call("recover", *sample("untrained_m1", aux=None), "--stats", checkpoint).refusal(3)
    assert "estimate-logits" in message


@pytest.mark.parametrize("fault", ["missing tensor", "wrong shape", "NaN", "no JSON"])
def test_damaged_statistics(stats: dict[str, Path], tmp_path: Path, fault: str) -> None:
    kept = tensors(stats["untrained_m1"])
    about = dict(read_checkpoint(stats["untrained_m1"]).metadata)
    if fault == "missing tensor":
        del kept["accuracy"]
    elif fault == "wrong shape":
        kept["confidence"] = kept["confidence"][:, :9].contiguous()
    elif fault == "NaN":
        kept["confidence"][3, 4] = float("nan")
    else:
        about["rlu.statistics"] = about["rlu.statistics"][:-1]
    damaged = write_safetensors(tmp_path / "stats.safetensors", kept, about)
    call("recover", *sample("untrained_m1", aux=None), "--stats", damaged).refusal(3)


def test_statistics_file_that_lacks_a_value(stats: dict[str, Path], tmp_path: Path) -> None:
    kept = read_checkpoint(stats["untrained_m1"])
    about = json.loads(kept.metadata["rlu.statistics"])
    for key in ("head", "class_names", "aux"):
        less = {name: value for name, value in about.items() if name != key}
        damaged = write_safetensors(
            tmp_path / "stats.safetensors", kept.tensors, {"rlu.statistics": json.dumps(less)}
        )
        call("recover", *sample("untrained_m1", aux=None), "--stats", damaged).refusal(3)
