"""How class folders map to outputs, as the command line says it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_tools import (
    AUX,
    QUICK,
    SAMPLES,
    bare_round,
    call,
    metadata,
    sample,
    tensors,
    truth,
    write_safetensors,
)

NAMES = json.loads(metadata(SAMPLES / "untrained_m1" / "global.safetensors")["fl.class_names"])
TRAINING = ["--lr", 0.01, "--batch-size", 32, "--steps", 1, "--normalize", "mean=0.286;std=0.353"]


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """The aux images in folders 1 to 10, by output index from 1."""
    root = tmp_path / "numbered"
    for index, name in enumerate(NAMES):
        shutil.copytree(AUX / name, root / str(index + 1))
    return root


def test_names_outrank_string_order() -> None:
    document = call("recover", *sample("untrained_m1"), *QUICK).document
    assert [entry["name"] for entry in document["classes"]] == NAMES != sorted(NAMES)
    assert document["model"]["class_order"] == "class_names"


def test_string_order_without_names(tmp_path: Path) -> None:
    document = call("recover", *bare_round(tmp_path), *TRAINING, *QUICK).document
    assert [entry["name"] for entry in document["classes"]] == sorted(NAMES)
    assert document["model"]["class_order"] == "string"


def test_numbers_are_ambiguous(tmp_path: Path, numbered: Path) -> None:
    flags = [*bare_round(tmp_path)[:4], "--aux", numbered, *TRAINING]
    outcome = call("recover", *flags, *QUICK)
    assert "class-order-ambiguous" in outcome.codes
    assert "--class-order natural" in outcome.err
    assert [entry["name"] for entry in outcome.document["classes"]][:3] == ["1", "10", "2"]


def test_natural_order(tmp_path: Path, numbered: Path) -> None:
    flags = [*bare_round(tmp_path)[:4], "--aux", numbered, *TRAINING, "--class-order"]
    document = call("recover", *flags, "natural").document
    assert [entry["name"] for entry in document["classes"]] == [str(n) for n in range(1, 11)]
    assert document["counts"] == truth("untrained_m1")
    assert "class-order-ambiguous" not in [warning["code"] for warning in document["warnings"]]
    chosen = call("recover", *flags, "string", *QUICK)
    assert "class-order-ambiguous" not in chosen.codes


def test_order_file(tmp_path: Path, numbered: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("".join(f"{n}\n" for n in range(1, 11)), encoding="utf-8")
    flags = [*bare_round(tmp_path)[:4], "--aux", numbered, *TRAINING, "--class-order", order]
    document = call("recover", *flags).document
    assert document["counts"] == truth("untrained_m1")
    assert document["model"]["class_order"] == str(order)


def test_a_flag_outranks_names() -> None:
    document = call("recover", *sample("untrained_m1"), *QUICK, "--class-order", "string").document
    assert document["model"]["class_order"] == "string"
    assert [entry["name"] for entry in document["classes"]] == sorted(NAMES)


def test_names_that_are_no_folders(tmp_path: Path) -> None:
    path = SAMPLES / "untrained_m1" / "client_0.safetensors"
    about = {**metadata(path), "fl.class_names": json.dumps(["T-Shirt", *NAMES[1:]])}
    local = write_safetensors(tmp_path / "k.safetensors", tensors(path), about)
    flags = [*sample("untrained_m1")[:2], "--local", local, "--aux", AUX]
    message = call("recover", *flags).refusal(4)
    for word in ("'T-Shirt'", "'t-shirt'", "--class-order"):
        assert word in message


def test_names_that_are_no_list(tmp_path: Path) -> None:
    path = SAMPLES / "untrained_m1" / "client_0.safetensors"
    about = {**metadata(path), "fl.class_names": "t-shirt,trouser"}
    local = write_safetensors(tmp_path / "k.safetensors", tensors(path), about)
    flags = [*sample("untrained_m1")[:2], "--local", local, "--aux", AUX]
    assert "JSON list" in call("recover", *flags).refusal(4)


@pytest.mark.parametrize(
    ("text", "code"),
    [("\n".join(NAMES[:9]), 4), ("\n".join([*NAMES, NAMES[0]]), 4), (f"{NAMES[0]}\n\n{NAMES[1]}\n", 3)],
    ids=["one missing", "one twice", "an empty line"],
)
def test_wrong_order_files(tmp_path: Path, text: str, code: int) -> None:
    order = tmp_path / "order.txt"
    order.write_text(text, encoding="utf-8")
    message = call("recover", *sample("untrained_m1"), "--class-order", order).refusal(code)
    assert str(order) in message


def test_order_that_is_no_file() -> None:
    message = call("recover", *sample("untrained_m1"), "--class-order", "naturally").refusal(2)
    for word in ("naturally", "string", "natural", "file"):
        assert word in message
