"""Where values come from: flag, local metadata, global metadata, round.json; and what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from cli_tools import (
    AUX,
    PLAIN,
    QUICK,
    SAMPLES,
    bare_round,
    call,
    metadata,
    tensors,
    truth,
    write_safetensors,
    write_torch,
)

ROUND = SAMPLES / "untrained_m1"
NAMES = metadata(ROUND / "global.safetensors")["fl.class_names"]
NORMALIZE = "mean=0.286;std=0.353"
TRAINING = ["--lr", 0.01, "--batch-size", 32, "--steps", 1]
SAID = {"fl.lr": "0.01", "fl.batch_size": "32", "fl.steps": "1"}


def write_round(
    folder: Path, *, local: Mapping[str, str], reference: Mapping[str, str], sidecar: Mapping[str, object]
) -> list[object]:
    """The sample round with other annotations; the flags that name it."""
    write_safetensors(folder / "g.safetensors", tensors(ROUND / "global.safetensors"), reference)
    write_safetensors(folder / "k.safetensors", tensors(ROUND / "client_0.safetensors"), local)
    if sidecar:
        (folder / "round.json").write_text(json.dumps(dict(sidecar)), encoding="utf-8")
    return ["--global", folder / "g.safetensors", "--local", folder / "k.safetensors", "--aux", AUX]


def test_the_first_that_says_it_wins(tmp_path: Path) -> None:
    # lr: all four say one; each of the others is said by one place fewer.
    flags = write_round(
        tmp_path,
        local={"fl.lr": "0.02", "fl.batch_size": "32"},
        reference={"fl.lr": "0.03", "fl.batch_size": "99", "fl.steps": "1", "fl.class_names": NAMES},
        sidecar={"lr": 0.04, "fl.batch_size": 98, "steps": 97, "normalize": NORMALIZE, "momentum": 0},
    )
    training = call("recover", *flags, *QUICK, "--lr", 0.01).document["training"]
    assert (training["lr"], training["batch_size"], training["steps"]) == (0.01, 32, 1)
    assert training["sources"] == {
        "lr": "flag",
        "batch_size": "local",
        "steps": "global",
        "momentum": "sidecar",
        "scheme": "default",
        "optimizer": "default",
        "dampening": "default",
        "nesterov": "default",
        "weight_decay": "default",
        "noise_std": "default",
    }
    assert call("recover", *flags, *QUICK).document["training"]["lr"] == 0.02


@pytest.mark.parametrize("place", ["local", "global", "sidecar"])
def test_each_place_alone_is_enough(tmp_path: Path, place: str) -> None:
    said = {**SAID, "fl.class_names": NAMES, "fl.normalize": NORMALIZE, "fl.arch": "lenet5"}
    flags = write_round(
        tmp_path,
        local=said if place == "local" else {},
        reference=said if place == "global" else {},
        sidecar=said if place == "sidecar" else {},
    )
    document = call("recover", *flags).document
    assert document["counts"] == truth("untrained_m1")
    assert {document["training"]["sources"][name] for name in ("lr", "batch_size", "steps")} == {place}
    assert document["warnings"] == []


def test_bare_round_with_flags(tmp_path: Path) -> None:
    flags = bare_round(tmp_path)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(json.loads(NAMES)), encoding="utf-8")
    document = call("recover", *flags, *TRAINING, "--normalize", NORMALIZE, "--class-order", order).document
    assert document["counts"] == truth("untrained_m1")
    assert [warning["code"] for warning in document["warnings"]] == ["architecture-matched"]
    assert document["training"]["sources"]["lr"] == "flag"
    named = call(
        "recover", *flags, *TRAINING, "--normalize", NORMALIZE, "--class-order", order, "--arch", "lenet5"
    ).document
    assert named["warnings"] == []
    assert named["counts"] == document["counts"]


def test_bare_round_with_a_sidecar(tmp_path: Path) -> None:
    flags = bare_round(tmp_path)
    sidecar = {
        "lr": 0.01,
        "batch_size": 32,
        "steps": 1,
        "arch": "lenet5",
        "normalize": NORMALIZE,
        "class_names": json.loads(NAMES),  # a list, as JSON has them
        "image_size": [28, 28],
        "nesterov": False,
        "dataset_size": None,  # null: not said
    }
    (tmp_path / "round.json").write_text(json.dumps(sidecar), encoding="utf-8")
    document = call("recover", *flags).document
    assert document["counts"] == truth("untrained_m1")
    assert document["warnings"] == []
    assert document["training"]["sources"]["lr"] == "sidecar"
    assert document["training"]["dataset_size"] is None


def test_the_sidecar_is_the_local_checkpoints(tmp_path: Path) -> None:
    for name in ("server", "client"):
        (tmp_path / name).mkdir()
    reference = write_safetensors(
        tmp_path / "server" / "g.safetensors", tensors(ROUND / "global.safetensors")
    )
    local = write_safetensors(tmp_path / "client" / "k.safetensors", tensors(ROUND / "client_0.safetensors"))
    flags = ["recover", "--global", reference, "--local", local, "--aux", AUX, *QUICK]
    (tmp_path / "server" / "round.json").write_text(json.dumps(SAID), encoding="utf-8")
    call(*flags).refusal(4)
    (tmp_path / "client" / "round.json").write_text(json.dumps(SAID), encoding="utf-8")
    assert call(*flags).document["total"] == 32


def test_torch_checkpoints_may_carry_annotations(tmp_path: Path) -> None:
    flags = bare_round(tmp_path)
    state = tensors(ROUND / "client_0.safetensors")
    write_torch(tmp_path / "client_0.pt", {"model": state, "fl.lr": 0.01, "fl.batch_size": 32, "fl.steps": 1})
    training = call("recover", *flags, *QUICK).document["training"]
    assert (training["lr"], training["sources"]["lr"]) == (0.01, "local")


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    flags = bare_round(tmp_path)
    message = call("recover", *flags).refusal(4)
    for flag in ("--lr", "--batch-size", "--steps", "--epochs", "--dataset-size"):
        assert flag in message
    message = call("recover", *flags, "--lr", 0.01, "--scheme", "fedprox").refusal(4)
    assert "lr (--lr)" not in message
    for flag in ("--batch-size", "--steps", "--lambda"):
        assert flag in message


def test_missing_values_are_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("images are read only when the training values are there")

    monkeypatch.setattr("rlu_cli.images.collection.load_images", never)
    call("recover", *bare_round(tmp_path)).refusal(4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fl.lr": "fast"}, ("lr", "fast", "--lr")),
        ({"fl.lr": "nan"}, ("lr", "--lr")),
        ({"fl.batch_size": "3.5"}, ("batch_size", "3.5", "--batch-size")),
        ({"fl.steps": ""}, ("steps", "--steps")),
        ({"fl.nesterov": "maybe"}, ("nesterov", "maybe")),
    ],
)
def test_values_that_cannot_be_read(tmp_path: Path, values: dict[str, str], words: tuple[str, ...]) -> None:
    flags = write_round(tmp_path, local={**SAID, **values}, reference={}, sidecar={})
    message = call("recover", *flags).refusal(4)
    for word in (*words, "local checkpoint's metadata"):
        assert word in message


def test_values_out_of_range(tmp_path: Path) -> None:
    for values in ({"fl.batch_size": "0"}, {"fl.steps": "0"}, {"fl.lr": "-0.1"}, {"fl.momentum": "-1"}):
        flags = write_round(tmp_path, local={**SAID, **values}, reference={}, sidecar={})
        outcome = call("recover", *flags)
        assert outcome.code in (2, 4)
        outcome.refusal(outcome.code)


def test_a_wrong_value_is_repaired_by_its_flag(tmp_path: Path) -> None:
    flags = write_round(tmp_path, local={**SAID, "fl.lr": "fast"}, reference={}, sidecar={})
    assert call("recover", *flags, *QUICK, "--lr", 0.01).document["training"]["lr"] == 0.01


def test_wrong_values_in_every_place_are_repaired_by_their_flags(tmp_path: Path) -> None:
    """The first client's batch size was read again without the flag, to describe the auxiliary passes."""
    repairs: dict[str, object] = {
        **{"lr": 0.01, "batch-size": 32, "steps": 1, "momentum": 0, "dampening": 0, "weight-decay": 0},
        **{"scheme": "fedprox", "lambda": 0, "optimizer": "sgd", "noise-std": 0, "clip": 100},
        **{"update": "weights", "lr-decay": 1},
    }
    wrong = {f"fl.{name.replace('-', '_')}": "16 (micro 4)" for name in repairs} | {"fl.nesterov": "maybe"}
    flags = [part for name, value in repairs.items() for part in (f"--{name}", value)]
    for place in ("local", "reference", "sidecar"):
        folder = tmp_path / place
        folder.mkdir()
        said: dict[str, dict[str, str]] = {"local": {}, "reference": {}, "sidecar": {}, place: wrong}
        arguments = ["recover", *write_round(folder, **said), *PLAIN, *flags, "--no-nesterov"]
        training = call(*arguments).document["training"]
        assert (training["batch_size"], training["sources"]["batch_size"]) == (32, "flag")
    call(*arguments[:-1]).refusal(4)


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"lr": 0.1, "fl.lr": 0.2}', '{"lr": NaN}'])
def test_sidecars_that_are_none(tmp_path: Path, text: str) -> None:
    flags = write_round(tmp_path, local=SAID, reference={}, sidecar={})
    (tmp_path / "round.json").write_text(text, encoding="utf-8")
    assert "round.json" in call("recover", *flags).refusal(3)


def test_unknown_optimisers_are_refused(tmp_path: Path) -> None:
    flags = write_round(tmp_path, local={**SAID, "fl.optimizer": "rmsprop"}, reference={}, sidecar={})
    message = call("recover", *flags).refusal(4)
    assert "rmsprop" in message
    assert "adam" in message


def test_clients_of_different_networks_in_one_call(tmp_path: Path) -> None:
    said = {**SAID, "fl.arch": "lenet5", "fl.normalize": NORMALIZE}
    flags = write_round(tmp_path, local=said, reference={}, sidecar={})
    other = write_safetensors(
        tmp_path / "other.safetensors",
        tensors(ROUND / "client_1.safetensors"),
        {**said, "fl.normalize": "half"},
    )
    outcome = call("recover", *flags, "--local", other, *QUICK, "-o", tmp_path / "found.ndjson")
    assert "fl.normalize" in outcome.refusal(4)


def test_each_client_has_its_own_training_values(tmp_path: Path) -> None:
    flags = write_round(tmp_path, local=SAID, reference={}, sidecar={})
    other = write_safetensors(
        tmp_path / "other.safetensors",
        tensors(SAMPLES / "untrained_m10" / "client_1.safetensors"),
        {**SAID, "fl.steps": "10"},
    )
    lines = call("recover", *flags, "--local", other, *QUICK).lines
    assert [line["training"]["steps"] for line in lines] == [1, 10]
    assert [line["total"] for line in lines] == [32, 320]


@pytest.mark.parametrize(
    ("said", "flags", "code"),
    [
        ({"fl.momentum": "1.5"}, ("--lr", 0.02), 4),
        ({"fl.dataset_size": "-5"}, (), 4),
        ({"fl.dataset_size": "0"}, ("--lr", 0.01), 4),
        ({"fl.epochs": "0", "fl.dataset_size": "5"}, (), 4),
        ({"fl.steps": "0", "fl.epochs": "1", "fl.dataset_size": "5"}, (), 4),
        ({"fl.momentum": "1.5"}, ("--steps", 2), 4),
        ({"fl.lr": "1e40"}, ("--momentum", 0.5), 4),
        ({"fl.scheme": "fedprox", "fl.lambda": "1000"}, ("--lr", 0.01), 4),  # too large together
        ({"fl.momentum": "1.5"}, ("--momentum", 1.5), 2),
        ({"fl.momentum": "0.5"}, ("--lr", 1e40), 2),
        ({"fl.lr": "0.01"}, ("--nesterov",), 2),
    ],
)
def test_who_is_out_of_range_decides_the_exit_code(
    tmp_path: Path, said: dict[str, str], flags: tuple[object, ...], code: int
) -> None:
    annotated = {"fl.lr": "0.01", "fl.batch_size": "32", "fl.steps": "1", **said}
    local = write_safetensors(tmp_path / "k.safetensors", tensors(ROUND / "client_0.safetensors"), annotated)
    call(
        "recover", "--global", ROUND / "global.safetensors", "--local", local, "--aux", AUX, *QUICK, *flags
    ).refusal(code)
