"""A flag that would change nothing is an error: nobody should believe that it did something."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
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
    sample,
    tensors,
    write_safetensors,
)

from rlu_cli.audit.options import AuxOptions, HistoryOptions, ModelOptions, TrainingOptions
from rlu_cli.cli.options import given

NAMES = json.loads(metadata(SAMPLES / "untrained_m1" / "global.safetensors")["fl.class_names"])
NORMALIZE = "mean=0.286;std=0.353"
TRAINING = ["--lr", 0.01, "--batch-size", 32]


def test_given_names_flags_as_they_are_spelt() -> None:
    training = TrainingOptions(lambda_=0.1, nesterov=False, lr_decay=0.5)
    assert given(ModelOptions(), training, AuxOptions(aux_per_class=3), HistoryOptions()) == [
        "--lr-decay",
        "--lambda",
        "--nesterov",
        "--aux-per-class",
    ]
    every = ModelOptions(**{field.name: "batch" for field in fields(ModelOptions)})  # type: ignore[arg-type]
    assert set(given(every)) == {
        "--key",
        "--arch",
        "--head",
        "--normalize",
        "--image-size",
        "--batch-norm",
        "--dropout",
        "--class-order",
    }


# evaluate


@pytest.fixture
def result(tmp_path: Path) -> list[object]:
    path = tmp_path / "recovered.json"
    path.write_text(call("recover", *sample("untrained_m1"), *QUICK).out)
    return ["evaluate", "--result", path, "--truth", SAMPLES / "untrained_m1" / "truth.json"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--lr", 0.1],
        ["--arch", "lenet5"],
        ["--scheme", "fedavg"],
        ["--aux-per-class", 3],
        ["--seed", 4],
        ["--samples", 100],
        ["--round", 2],
        ["--no-nesterov"],
        ["--method", "rlu"],
        ["--aux", AUX],
    ],
)
def test_result_is_complete(result: list[object], flags: list[object]) -> None:
    message = call(*result, *flags).refusal(2)
    assert "--result" in message and str(flags[0]).replace("--no-", "--") in message


def test_all_ignored_flags_are_named_at_once(result: list[object]) -> None:
    message = call(*result, "--lr", 0.1, "--momentum", 0.9, "--head", "fc3").refusal(2)
    assert all(flag in message for flag in ("--lr", "--momentum", "--head"))
    assert call(*result).code == 0


def test_archive_has_its_history(tmp_path: Path) -> None:
    for flags in (["--history", tmp_path], ["--round", 3], ["--participation", 0.5]):
        assert str(flags[0]) in call("evaluate", "--archive", tmp_path, *flags).refusal(2)


# Training values


@pytest.mark.parametrize("flags", [["--steps", 1, "--dataset-size", 100], ["--steps", 1, "--epochs", 2]])
def test_half_of_epochs_and_size(tmp_path: Path, flags: list[object]) -> None:
    message = call("recover", *bare_round(tmp_path), *TRAINING, *flags).refusal(2)
    assert "--epochs" in message and "--dataset-size" in message


def test_size_beside_steps_that_a_file_says(tmp_path: Path) -> None:
    assert "--epochs" in call("recover", *sample("untrained_m1"), "--dataset-size", 100).refusal(2)
    about = {**metadata(SAMPLES / "untrained_m1" / "client_0.safetensors"), "fl.dataset_size": "100"}
    state = tensors(SAMPLES / "untrained_m1" / "client_0.safetensors")
    local = write_safetensors(tmp_path / "k.safetensors", state, about)  # an annotation is no request
    assert call("recover", *sample("untrained_m1")[:2], "--local", local, "--aux", AUX, *QUICK).code == 0


ABSENT = "/absent/rounds"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lambda", 5], ("--lambda", "fedprox", "found fedavg")),
        (["--scheme", "scaffold", "--lambda", 5], ("--lambda", "found scaffold")),
        (["--dampening", 0.5], ("--dampening", "--momentum")),
        (["--momentum", 0, "--dampening", 0.5], ("--dampening", "--momentum")),
        (["--server-control", ABSENT], ("--server-control", "scaffold")),
        (["--client-control", ABSENT], ("--client-control", "scaffold")),
        (["--scheme", "feddyn", "--lambda", 1, "--server-control", ABSENT], ("--server-control", "feddyn")),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_training_flags_that_no_client_takes(flags: list[object], words: tuple[str, ...]) -> None:
    known = ["--truth", SAMPLES / "untrained_m1" / "truth.json"]
    for command in (["recover"], ["evaluate", *known]):
        message = call(*command, *sample("untrained_m1"), *PLAIN, *flags).refusal(2)
        assert all(word in message for word in words)


@pytest.mark.parametrize(
    "flags",
    [
        ["--lambda", 0],
        ["--momentum", 0, "--dampening", 0],
        ["--momentum", 0.9, "--dampening", 0.5],
        ["--history", SAMPLES, "--round", 3, "--participation", 0.5],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_training_flags_that_are_true(flags: list[object]) -> None:
    assert call("recover", *sample("untrained_m1"), *PLAIN, *flags).code == 0


def annotated(folder: Path, name: str, **said: str) -> Path:
    """A client of a sample round whose file says more of its training."""
    file = SAMPLES / "untrained_m1" / "client_0.safetensors"
    about = {**metadata(file), **{f"fl.{key.rstrip('_')}": value for key, value in said.items()}}
    return write_safetensors(folder / f"{name}.safetensors", tensors(file), about)


def test_training_values_in_a_file_are_no_request(tmp_path: Path) -> None:
    local = annotated(tmp_path, "k", lambda_="5", dampening="0.5", round="3", participation="0.5")
    flags = [*sample("untrained_m1")[:2], "--local", local, "--aux", AUX, *PLAIN]
    assert call("recover", *flags).code == 0
    assert "--lambda" in call("recover", *flags, "--lambda", 5).refusal(2)


@pytest.mark.parametrize("damped", [False, True])
def test_flags_are_for_the_clients_that_take_them(tmp_path: Path, damped: bool) -> None:
    """Files of one call may say different schemes, and a flag is of use to some."""
    more = {"momentum": "0.9"} if damped else {"scheme": "fedprox", "lambda_": "1.0"}
    flags = ["--dampening", 0.5] if damped else ["--lambda", 5]
    plain, taking = annotated(tmp_path, "plain"), annotated(tmp_path, "taking", **more)
    common = ["recover", *sample("untrained_m1")[:2], "--aux", AUX, *PLAIN, *flags, "--local"]
    lines = call(*common, plain, "--local", taking).lines
    assert [line["training"]["lambda"] for line in lines] == ([None, None] if damped else [None, 5.0])
    assert lines[1]["training"]["dampening"] == (0.5 if damped else 0.0)
    assert str(flags[0]) in call(*common, plain, "--local", plain).refusal(2)


def test_flags_are_for_the_rounds_of_an_archive_that_take_them(tmp_path: Path) -> None:
    known = json.loads((SAMPLES / "untrained_m1" / "truth.json").read_text())["clients"]["client_0"]["counts"]
    lines = []
    for number, said in ((1, {}), (2, {"scheme": "fedprox", "lambda_": "1.0"})):
        folder = tmp_path / f"round_{number:04d}"
        folder.mkdir()
        shutil.copy(SAMPLES / "untrained_m1" / "global.safetensors", folder)
        annotated(folder, "client_0000", **said)
        line = {"round": number, "client": "client_0000", "counts": known, "step_counts": [known]}
        lines.append(json.dumps({**line, "accuracy": 0.1}) + "\n")
    flags = ["evaluate", "--archive", tmp_path, "--aux", AUX, *QUICK, "--method", "random", "--lambda", 5]
    (tmp_path / "truth.ndjson").write_text("".join(lines))
    schemes = [pair["scheme"] for pair in call(*flags).document["pairs"]]
    assert schemes == ["fedavg", "fedavg", "fedprox", "fedprox"]
    assert "--lambda" in call(*flags, "--scheme", "scaffold").refusal(2)
    (tmp_path / "truth.ndjson").write_text(lines[0])
    assert "--lambda" in call(*flags).refusal(2)


# Auxiliary options


def test_aux_flags_without_aux(tmp_path: Path) -> None:
    stats = tmp_path / "s.safetensors"
    path = sample("untrained_m1")[1]
    assert call("estimate-logits", "--global", path, "--aux", AUX, "-o", stats, *QUICK).code == 0
    flags = [*sample("untrained_m1", aux=None), "--stats", stats, *QUICK]
    assert "--aux" in call("recover", *flags, "--aux-per-class", 3).refusal(2)
    assert call("recover", *flags).code == 0


# Statistics


@pytest.fixture
def bare(tmp_path: Path) -> tuple[list[object], Path]:
    """Ten steps on a trained model that says nothing of itself, and its statistics."""
    flags = bare_round(tmp_path, "trained_m10")
    stats = tmp_path / "s.safetensors"
    made = ["--arch", "lenet5", "--normalize", NORMALIZE, "--class-order", order_file(tmp_path)]
    assert call("estimate-logits", *flags[:2], "--aux", AUX, *made, *QUICK, "-o", stats).code == 0
    return [*flags, *TRAINING, "--steps", 10, *QUICK], stats


def order_file(folder: Path) -> Path:
    path = folder / "order.txt"
    path.write_text("".join(f"{name}\n" for name in NAMES))
    return path


def test_local_model_is_fed_as_the_global_one_was(tmp_path: Path, bare: tuple[list[object], Path]) -> None:
    """Nothing said again: normalisation, order and architecture are the statistics'."""
    flags, stats = bare
    order = order_file(tmp_path)
    plain = call("recover", *flags, "--normalize", NORMALIZE, "--class-order", order).document
    outcome = call("recover", *flags, "--stats", stats)
    assert outcome.document["classes"] == plain["classes"]
    assert "normalize-assumed" not in outcome.codes
    fed, said = outcome.document["model"], plain["model"]
    assert fed.pop("sources")["normalize"] == "stats"
    assert said.pop("sources")["normalize"] == "flag"
    assert fed == said


@pytest.mark.parametrize(
    ("flag", "same", "other"),
    [
        ("--arch", "lenet5:activation=relu", "lenet5:activation=tanh"),
        ("--arch", "lenet5", "vgg16"),
        ("--head", "fc3", "fc2"),
        ("--normalize", "std=0.353;mean=0.286", "imagenet"),
        ("--image-size", "28", "32"),
        ("--batch-norm", "batch", "running"),
        ("--dropout", "off", "on"),
        ("--class-order", None, "string"),
    ],
)
def test_flags_beside_statistics(
    tmp_path: Path, bare: tuple[list[object], Path], flag: str, same: str | None, other: str
) -> None:
    flags, stats = bare
    message = call("recover", *flags, "--stats", stats, flag, other).refusal(2)
    assert flag in message and str(stats) in message and other in message
    agreed = same or order_file(tmp_path)
    assert call("recover", *flags, "--stats", stats, flag, agreed).code == 0


def test_order_that_overruled_the_names_stays(tmp_path: Path) -> None:
    """Statistics in string order, against the checkpoint's names: the local model gets that order too."""
    stats = tmp_path / "s.safetensors"
    flags = [*sample("trained_m10"), *QUICK]
    made = ["--aux", AUX, "--class-order", "string", *QUICK, "-o", stats]
    assert call("estimate-logits", *flags[:2], *made).code == 0
    plain = call("recover", *flags, "--class-order", "string").document
    assert call("recover", *flags, "--stats", stats).document["classes"] == plain["classes"]


def test_users_own_code_is_not_taken_from_statistics(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("from rlu_cli.models import LeNet5\ndef make():\n    return LeNet5()\n")
    stats = tmp_path / "s.safetensors"
    flags = [*sample("trained_m10"), *QUICK]
    arch = ["--arch", f"{code}:make"]
    made = ["--aux", AUX, *arch, *QUICK, "-o", stats]
    assert call("estimate-logits", *flags[:2], *made).code == 0
    marker = tmp_path / "marker"
    code.write_text(f"open({str(marker)!r}, 'w').close()\n" + code.read_text())
    assert call("recover", *flags, "--stats", stats).code == 0  # the annotation's lenet5, not the code
    assert not marker.exists()
    assert call("recover", *flags, "--stats", stats, *arch).code == 0
    assert marker.exists()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
