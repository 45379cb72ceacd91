"""``rlu recover`` on the sample rounds: its JSON, its streams, its output file, steps and epochs."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType

import pytest
from cli_tools import PLAIN, QUICK, SAMPLES, call, check_fields, sample, strict_json, truth

from rlu_cli import __version__
from rlu_cli.files.hashing import sha256_file

SHA256 = 64


def test_document_of_the_plain_call() -> None:
    outcome = call("recover", *sample("untrained_m1"))
    document = outcome.document
    assert outcome.err == ""
    check_fields(
        document,
        {
            "schema_version": int,
            "command": str,
            "rlu_version": str,
            "method": str,
            "seed": int,
            "device": str,
            "inputs": dict,
            "model": dict,
            "training": dict,
            "total": int,
            "counts": list,
            "classes": list,
            "reliability": dict,
            "diagnostics": dict,
            "warnings": list,
        },
    )
    assert document["schema_version"] == 1
    assert document["command"] == "recover"
    assert document["rlu_version"] == __version__
    assert document["method"] == "gls"  # what auto stands for is said
    assert document["seed"] == 0
    for role, name in (("global", "global"), ("local", "client_0")):
        path = SAMPLES / "untrained_m1" / f"{name}.safetensors"
        kind = {"update": "weights"} if role == "local" else {}
        assert document["inputs"][role] == {"path": str(path), "sha256": sha256_file(path), **kind}
        assert len(document["inputs"][role]["sha256"]) == SHA256
    aux = document["inputs"]["aux"]
    assert (aux["path"], aux["images"], aux["classes"]) == (str(SAMPLES / "aux"), 300, 10)
    check_fields(document["model"], {"arch": str, "num_classes": int, "embedding_size": int, "head": str})
    assert document["model"]["arch"].startswith("lenet5:")
    assert (document["model"]["num_classes"], document["model"]["embedding_size"]) == (10, 84)
    assert document["model"]["head"] == "fc3"
    assert document["model"]["class_order"] == "class_names"


def test_training_values_and_their_sources() -> None:
    training = call("recover", *sample("untrained_m1")).document["training"]
    kinds = {
        "scheme": str,
        "optimizer": str,
        "lr": float,
        "batch_size": int,
        "steps": int,
        "momentum": float,
        "weight_decay": float,
        "nesterov": bool,
        "sources": dict,
    }
    check_fields(training, kinds)
    assert (training["lr"], training["batch_size"], training["steps"]) == (0.01, 32, 1)
    said = {"lr", "batch_size", "steps", "scheme", "optimizer"}
    assert {name for name, source in training["sources"].items() if source == "local"} == said
    assert training["sources"]["momentum"] == "default"
    assert set(training["sources"]) <= set(training)


def test_classes_counts_and_diagnostics() -> None:
    document = call("recover", *sample("trained_m1", 1), *QUICK).document
    assert len(document["classes"]) == len(document["counts"]) == 10
    for index, entry in enumerate(document["classes"]):
        kinds = {
            "index": int,
            "name": str,
            "count": int,
            "estimate": float,
            "low": (float, NoneType),
            "high": (float, NoneType),
        }
        check_fields(entry, kinds)
        assert entry["index"] == index
        assert entry["count"] == document["counts"][index] >= 0
        assert abs(entry["estimate"] - entry["count"]) <= 1
    assert sum(document["counts"]) == document["total"] == 32
    assert sum(entry["estimate"] for entry in document["classes"]) == pytest.approx(32)
    kinds = {"residual": float, "aux_accuracy": float, "embedding_match": float, "update_norm": float}
    check_fields(document["diagnostics"], kinds)
    assert 0.4 < document["diagnostics"]["aux_accuracy"] < 0.9
    assert document["diagnostics"]["embedding_match"] > 0.9
    for warning in document["warnings"]:
        check_fields(warning, {"code": str, "message": str})


@pytest.mark.parametrize("round_", ["untrained_m1", "untrained_m10"])
def test_untrained_rounds_are_exact(round_: str) -> None:
    clients = [0, 1, 2]
    local = [flag for client in clients for flag in sample(round_, client, aux=None)[2:]]
    documents = call("recover", *sample(round_)[:2], *local, "--aux", SAMPLES / "aux", *QUICK).lines
    assert [document["counts"] for document in documents] == [truth(round_, client) for client in clients]


@pytest.mark.parametrize("round_", ["trained_m1", "trained_m10"])
def test_trained_rounds_sum_to_the_total_and_beat_uniform(round_: str) -> None:
    document = call("recover", *sample(round_, 0), *QUICK).document
    counts, known = document["counts"], truth(round_, 0)
    total = sum(known)
    assert sum(counts) == document["total"] == total
    off = sum(abs(a - b) for a, b in zip(counts, known, strict=True))
    assert off < 0.5 * sum(abs(total / 10 - b) for b in known)


def test_reliability_follows_from_bounds_and_is_shown() -> None:
    outcome = call("recover", *sample("trained_m10"), *QUICK, "-v")
    document, trust = outcome.document, outcome.document["reliability"]
    width = sum(row["high"] - row["low"] for row in document["classes"])
    told = 1 - 0.10177 * width / document["total"]
    inside = 0.10177 * 2 * len(document["classes"]) / document["total"]  # whole numbers lie inside the bounds
    assert told - inside < trust["expected_iAcc"] <= told + 1e-4
    assert trust["grade"] == "fair"
    assert trust["reasons"] == ["bounds-wide"]
    shown = " ".join(outcome.err.split())
    assert f"reliability fair, expected iAcc {trust['expected_iAcc']:.2f} (bounds-wide)" in shown
    sure = call("recover", *sample("untrained_m1"), *QUICK).document["reliability"]
    assert sure == {"grade": "good", "expected_iAcc": 1.0, "reasons": []}


def test_several_locals_are_lines_in_the_order_given() -> None:
    order = [2, 0, 1, 0]
    local = [flag for client in order for flag in sample("untrained_m1", client, aux=None)[2:]]
    outcome = call("recover", *sample("untrained_m1")[:2], *local, "--aux", SAMPLES / "aux")
    assert outcome.out.count("\n") == len(order)
    assert [line["counts"] for line in outcome.lines] == [truth("untrained_m1", c) for c in order]
    paths = [line["inputs"]["local"]["path"] for line in outcome.lines]
    assert [Path(path).stem for path in paths] == [f"client_{client}" for client in order]
    assert outcome.out.splitlines()[1] == outcome.out.splitlines()[3]


def test_a_client_among_others_gets_the_answer_it_gets_alone() -> None:
    alone = call("recover", *sample("trained_m10", 1), *QUICK).document
    local = [flag for client in (0, 1) for flag in sample("trained_m10", client, aux=None)[2:]]
    lines = call("recover", *sample("trained_m10")[:2], *local, "--aux", SAMPLES / "aux", *QUICK).lines
    assert lines[1] == alone


def test_output_file_has_the_bytes_of_stdout(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    printed = call("recover", *sample("untrained_m1"), *QUICK)
    saved = call("recover", *sample("untrained_m1"), *QUICK, "-o", target)
    assert (saved.code, saved.out, saved.err) == (0, "", "")
    assert target.read_bytes() == printed.out.encode("utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_failed_run_leaves_the_old_output_file(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    target.write_text("old\n", encoding="utf-8")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((SAMPLES / "untrained_m1" / "client_1.safetensors").read_bytes()[:5000])
    before = target.stat()
    # The first client is recovered and its line written before the second turns out damaged.
    outcome = call("recover", *sample("untrained_m1"), "--local", damaged, *QUICK, "-o", target)
    outcome.refusal(3)
    assert target.read_text(encoding="utf-8") == "old\n"
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert {path.name for path in tmp_path.iterdir()} == {"found.json", "damaged.safetensors"}


def test_output_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    outcome = call("recover", *sample("untrained_m1"), *QUICK, "-o", tmp_path / "none" / "found.json")
    assert "can't be written" in outcome.refusal(3)


def test_a_table_only_when_asked_for() -> None:
    flags = ["recover", *sample("untrained_m1"), *QUICK]
    plain, verbose, quiet = call(*flags), call(*flags, "-v"), call(*flags, "-v", "-q")
    assert plain.err == quiet.err == ""
    assert plain.out == verbose.out == quiet.out
    for word in ("ankle-boot", "sandal", "32 samples", "estimate"):
        assert word in " ".join(verbose.err.split())
    assert "\x1b" not in verbose.err
    row = next(line for line in verbose.err.splitlines() if "sandal" in line)
    first = plain.document["classes"][5]
    assert f"{first['low']:.0f}–{first['high']:.0f}" in row
    assert f"{first['presence']:.0%}" in row
    pointwise = call(*flags, "-v", "--method", "rlu").err
    assert "present" in verbose.err
    assert "present" not in pointwise


def test_warnings_go_to_stderr_and_into_the_document() -> None:
    flags = ["recover", *sample("untrained_m1"), *QUICK, "--method", "gls", "--lr", "0.001"]
    outcome = call(*flags)
    assert outcome.codes == ["update-too-large", "update-misscaled", "update-unexplained"]
    assert outcome.err.startswith("rlu: warning [update-too-large]: ")
    assert outcome.err.count("\n") == 3
    assert call(*flags, "-q").err == ""
    assert call(*flags, "-q").out == outcome.out


def test_same_seed_same_bytes_and_another_seed_another_draw() -> None:
    flags = ["recover", *sample("trained_m10"), *QUICK, "--seed"]
    first, again, other = call(*flags, 7), call(*flags, 7), call(*flags, 8)
    assert first.out == again.out
    assert first.document["seed"] == 7
    assert [c["estimate"] for c in first.document["classes"]] != [
        c["estimate"] for c in other.document["classes"]
    ]


def test_method_random_sums_to_the_total() -> None:
    document = call("recover", *sample("untrained_m1"), "--method", "random").document
    assert document["method"] == "random"
    assert sum(document["counts"]) == 32


def test_search_iterations() -> None:
    document = call("recover", *sample("trained_m10"), *QUICK, "--search-iterations", 3).document
    assert sum(document["counts"]) == 320
    assert document["diagnostics"]["search_moves"] >= 0


# Steps, epochs and totals.


def test_epochs_with_dataset_size() -> None:
    # 32 samples in batches of 32: one epoch is the one step that the sample's metadata has as well.
    document = call("recover", *sample("untrained_m1"), *QUICK, "--epochs", 1, "--dataset-size", 32).document
    training = document["training"]
    assert (training["steps"], training["epochs"], training["dataset_size"]) == (1, 1, 32)
    assert training["sources"]["epochs"] == training["sources"]["dataset_size"] == "flag"
    assert training["sources"]["steps"] == "flag"  # not the metadata's, which the flag outranks
    assert document["total"] == 32


def test_epochs_round_up_to_steps_and_count_each_sample() -> None:
    flags = ["--epochs", 2, "--dataset-size", 150, "--batch-size", 32]
    document = call("recover", *sample("untrained_m10"), *QUICK, *flags).document
    assert document["training"]["steps"] == 2 * 5
    assert document["total"] == sum(document["counts"]) == 300


def test_steps_that_agree_with_epochs_are_accepted() -> None:
    flags = ["--epochs", 2, "--dataset-size", 160, "--steps", 10]
    assert call("recover", *sample("untrained_m10"), *QUICK, *flags).document["total"] == 320


def test_steps_of_a_loader_that_drops_the_last_batch() -> None:
    flags = ["--epochs", 2, "--dataset-size", 190, "--steps", 10]
    assert call("recover", *sample("untrained_m10"), *QUICK, *flags).document["total"] == 320


def test_contradictory_steps() -> None:
    flags = ["--epochs", 2, "--dataset-size", 150, "--steps", 7]
    message = call("recover", *sample("untrained_m10"), *flags).refusal(4)
    assert "10 steps" in message
    assert "found 7" in message
    assert "--steps" in message


def test_epochs_without_dataset_size_names_what_is_missing() -> None:
    message = call("recover", *sample("untrained_m10"), "--epochs", 2).refusal(4)
    assert "--dataset-size" in message


def test_one_rate_a_step() -> None:
    rates = ",".join(["0.01"] * 10)
    flags = ["recover", *sample("untrained_m10"), *PLAIN]
    listed = call(*flags, "--lr", rates).document
    single = call(*flags).document
    assert listed["training"]["lr"] == single["training"]["lr"] == 0.01
    assert {**listed, "training": None} == {**single, "training": None}
    for wrong in ("0.01,0.02", "0.01,0.01", ",".join(["0.01"] * 11)):  # equal ones were taken for one rate
        assert "one learning rate or 10" in call(*flags, "--lr", wrong).refusal(4)


@pytest.mark.parametrize("round_", ["untrained_m1", "untrained_m10"])
def test_document_is_stable_json(round_: str) -> None:
    text = call("recover", *sample(round_), *QUICK).out
    assert text.endswith("}\n")
    assert json.dumps(strict_json(text), ensure_ascii=False, indent=2) + "\n" == text


def test_warnings_of_several_clients_say_whose_and_common_ones_come_once() -> None:
    """A rate too small makes every client's |u_j| too large; what the model is warned of is common."""
    folder = SAMPLES / "untrained_m1"
    locals_ = [folder / f"client_{k}.safetensors" for k in range(2)]
    given = [argument for path in locals_ for argument in ("--local", path)]
    aux = ("--aux", SAMPLES / "aux", "--class-order", "string", "--lr", "0.0001")
    result = call("recover", "--global", folder / "global.safetensors", *given, *aux)
    assert result.code == 0
    large = [line for line in result.err.splitlines() if "update-too-large" in line]
    assert len(large) == 2
    assert all(str(path) in line for path, line in zip(locals_, large, strict=True))
    lines = result.err.splitlines()
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("method", ["auto", "llg", "random"])
def test_a_batch_beyond_any_memory(method: str) -> None:
    """Its samples were drawn one by one: a MemoryError, or hours."""
    found = call("recover", *sample("trained_m1"), *QUICK, "--batch-size", 10**11, "--method", method)
    assert sum(found.document["counts"]) == found.document["total"] == 10**11
