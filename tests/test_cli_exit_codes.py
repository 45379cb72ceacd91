"""What each exit code stands for, one test or more for each, and the message that comes with it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from cli_tools import (
    AUX,
    PLAIN,
    QUICK,
    SAMPLES,
    call,
    metadata,
    sample,
    tensors,
    write_safetensors,
    write_torch,
)
from torch import nn

ROUND = SAMPLES / "untrained_m1"
GLOBAL, CLIENT = ROUND / "global.safetensors", ROUND / "client_0.safetensors"


def changed(path: Path, source: Path, **tensors_: torch.Tensor) -> Path:
    """A copy of a sample checkpoint with other tensors; dots in names are written as two underscores."""
    state = tensors(source)
    for name, tensor in tensors_.items():
        state[name.replace("__", ".")] = tensor
    return write_safetensors(path, state, metadata(source))


def flags_with(*, reference: Path = GLOBAL, local: Path = CLIENT, aux: Path = AUX) -> list[object]:
    return ["--global", reference, "--local", local, "--aux", aux]


# 0


def test_0_done() -> None:
    assert call("recover", *sample("untrained_m1"), *QUICK).code == 0
    for arguments in (["--version"], ["-h"], ["--help"], ["recover", "--help"], ["recover", "--version"]):
        outcome = call(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert "rlu" in outcome.out


# 1


@pytest.fixture
def _fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the matrix\nbroke")

    monkeypatch.setattr("rlu_cli.audit.client_round.recover_together", fail)


@pytest.mark.usefixtures("_fault")
def test_1_our_fault() -> None:
    message = call("recover", *sample("untrained_m1"), *QUICK).refusal(1)
    for words in ("fault of rlu", "RuntimeError: the matrix broke", "-vv"):
        assert words in message


@pytest.mark.usefixtures("_fault")
@pytest.mark.parametrize("flags", [["-vv"], ["-v", "-v"], ["-v", "--verbose"], ["-vvv"]])
def test_1_traceback_on_request(flags: list[str]) -> None:
    outcome = call("recover", *sample("untrained_m1"), *QUICK, *flags)
    assert (outcome.code, outcome.out) == (1, "")
    assert "Traceback (most recent call last)" in outcome.err
    assert "test_cli_exit_codes.py" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("rlu: error: this is a fault of rlu")


@pytest.mark.usefixtures("_fault")
def test_1_no_traceback_for_one_v() -> None:
    call("recover", *sample("untrained_m1"), *QUICK, "-v").refusal(1)


def test_traceback_of_a_foreseen_error_too() -> None:
    outcome = call("recover", *flags_with(local=CLIENT.with_name("none")), "-vv")
    assert outcome.code == 3
    assert "Traceback" in outcome.err


# 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bogus"], ("--bogus", "rlu recover --help")),
        (["--method", "psychic"], ("psychic", "rlu", "random")),
        (["--device", "tpu"], ("tpu", "cpu", "cuda")),
        (["--device", "cuda:99"], ("cuda:99", "cpu")),
        (["--lr", "-1"], ("-1", "--lr")),
        (["--lr", "0"], ("0", "--lr")),
        (["--batch-size", "0"], ("--batch-size", "1")),
        (["--steps", "many"], ("--steps", "integer")),
        (["--scheme", "fedsgd2"], ("fedsgd2", "fedprox", "--scheme")),
        (["--optimizer", "rmsprop"], ("rmsprop", "adam")),
        (["--batch-norm", "none"], ("--batch-norm", "running")),
        (["--seed", "-1"], ("--seed",)),
        (["--seed", str(2**64)], ("--seed",)),
        (["--normalize", "imagnet"], ("imagnet", "imagenet")),
        (["--arch", "lenet6"], ("lenet6", "lenet5")),
        (["--arch", "lenet5:depth=3"], ("depth",)),
        (["--momentum", "-0.1"], ("momentum",)),
        (["--lr", "fast"], ("--lr", "fast")),
        (["spare"], ("spare",)),
    ],
)
def test_2_usage(flags: list[str], words: tuple[str, ...]) -> None:
    message = call("recover", *sample("untrained_m1"), *QUICK, *flags).refusal(2)
    for word in words:
        assert word in message


@pytest.mark.parametrize("value", ["wide", "0", "28x28x3"])
def test_image_sizes_that_are_none(value: str) -> None:
    outcome = call("recover", *sample("untrained_m1"), "--image-size", value)
    message = outcome.refusal(outcome.code)
    assert outcome.code in (2, 4)
    assert "--image-size" in message


def test_2_dampening_out_of_range() -> None:
    flags = ["--steps", 2, "--momentum", 0.5, "--dampening", 2.5]
    assert "--dampening" in call("recover", *sample("untrained_m1"), *QUICK, *flags).refusal(2)


def test_2_rate_that_is_no_number() -> None:
    outcome = call("recover", *sample("untrained_m1"), "--lr", "fast")
    assert outcome.code in (2, 4)
    assert "--lr" in outcome.refusal(outcome.code)


def test_2_what_is_missing_on_the_command_line() -> None:
    assert "--local" in call("recover", "--global", GLOBAL).refusal(2)
    assert "--global" in call("recover", "--local", CLIENT).refusal(2)
    assert "--aux" in call("recover", *sample("untrained_m1", aux=None)).refusal(2)


def test_2_unknown_commands() -> None:
    assert "rlu --help" in call("recuver").refusal(2)
    assert "'recover'" in call("recove").refusal(2)


@pytest.mark.parametrize("command", ["", "recover", "evaluate", "estimate-logits", "inspect"])
def test_2_nothing_at_all_shows_the_help(command: str) -> None:
    outcome = call(*command.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == call(*command.split(), "--help").out


# 3


def test_3_missing_file(tmp_path: Path) -> None:
    for flags in (flags_with(reference=tmp_path / "g.pt"), flags_with(local=tmp_path / "g.pt")):
        message = call("recover", *flags).refusal(3)
        assert "no such file" in message
        assert "g.pt" in message
    message = call("recover", *flags_with(aux=tmp_path / "aux")).refusal(3)
    assert "no such file or folder" in message


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"<!doctype html><html>", b'{"a": 1}', b"version https://git-lfs.github.com\n"]
)
def test_3_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "k.safetensors"
    path.write_bytes(content)
    message = call("recover", *flags_with(local=path)).refusal(3)
    assert "k.safetensors" in message


@pytest.mark.parametrize("share", [0.00003, 0.001, 0.02, 0.5, 0.999])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_3_truncated(tmp_path: Path, share: float, suffix: str) -> None:
    path = tmp_path / f"k{suffix}"
    if suffix == ".pt":
        write_torch(path, tensors(CLIENT))
    else:
        shutil.copy(CLIENT, path)
    data = path.read_bytes()
    path.write_bytes(data[: max(1, int(share * len(data)))])
    call("recover", *flags_with(local=path)).refusal(3)
    call("recover", *flags_with(reference=path)).refusal(3)
    call("inspect", path).refusal(3)


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_3_pickles_are_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"fc.weight": Payload(marker)}))
    zipped = write_torch(tmp_path / "zipped.pt", {**tensors(CLIENT), "extra": Payload(marker)})
    model = write_torch(tmp_path / "model.pt", nn.Linear(2, 2))
    for path in (plain, zipped, model):
        message = call("recover", *flags_with(local=path)).refusal(3)
        assert "state_dict" in message
        call("inspect", path).refusal(3)
    assert not marker.exists()


def test_3_damaged_image(tmp_path: Path) -> None:
    aux = tmp_path / "aux"
    shutil.copytree(AUX, aux)
    victim = aux / "bag" / "07.png"
    victim.write_bytes(victim.read_bytes()[:200])
    message = call("recover", *flags_with(aux=aux)).refusal(3)
    assert str(victim) in message


def test_3_output_that_cannot_be_written(tmp_path: Path) -> None:
    call("recover", *sample("untrained_m1"), *QUICK, "-o", tmp_path).refusal(3)


def test_errors_are_told_even_when_quiet(tmp_path: Path) -> None:
    assert "no such file" in call("recover", *flags_with(local=tmp_path / "k.pt"), "-q").refusal(3)


# 4


def test_4_shapes_differ(tmp_path: Path) -> None:
    local = changed(tmp_path / "k.safetensors", CLIENT, fc3__weight=torch.zeros(11, 84))
    message = call("recover", *flags_with(local=local)).refusal(4)
    for word in ("fc3.weight", "(10, 84)", "(11, 84)"):
        assert word in message


def test_4_names_differ(tmp_path: Path) -> None:
    local = changed(tmp_path / "k.safetensors", CLIENT, extra__weight=torch.zeros(2, 2))
    message = call("recover", *flags_with(local=local)).refusal(4)
    assert "extra.weight" in message
    assert "absent" in message


def test_4_a_class_too_few(tmp_path: Path) -> None:
    aux = tmp_path / "aux"
    shutil.copytree(AUX, aux)
    shutil.rmtree(aux / "bag")
    message = call("recover", *flags_with(aux=aux)).refusal(4)
    assert "'bag'" in message
    message = call("recover", *flags_with(aux=aux), "--class-order", "string").refusal(4)
    assert "10 class folders" in message
    assert "found 9" in message


def test_4_a_class_without_images(tmp_path: Path) -> None:
    aux = tmp_path / "aux"
    shutil.copytree(AUX, aux)
    for path in (aux / "bag").iterdir():
        path.unlink()
    assert "bag" in call("recover", *flags_with(aux=aux)).refusal(4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("reference", "fc3__bias"),
        ("reference", "conv1__weight"),
        ("local", "fc3__bias"),
        ("local", "fc3__weight"),
    ],
)
def test_4_weights_that_are_no_numbers(tmp_path: Path, name: str, value: float, role: str) -> None:
    source = GLOBAL if role == "reference" else CLIENT
    tensor = tensors(source)[name.replace("__", ".")]
    tensor.flatten()[3] = value
    path = changed(tmp_path / "bad.safetensors", source, **{name: tensor})
    message = call("recover", *flags_with(**{role: path})).refusal(4)
    assert name.replace("__", ".") in message
    assert "bad.safetensors" in message


def test_4_weights_that_diverged(tmp_path: Path) -> None:
    """Numbers, but none that training at that rate makes."""
    before, after = tensors(GLOBAL), tensors(CLIENT)
    huge = {name: before[name] + 1e20 * (after[name] - before[name]) for name in before}
    local = write_safetensors(tmp_path / "k.safetensors", huge, metadata(CLIENT))
    assert "training diverged" in call("recover", *flags_with(local=local), *QUICK).refusal(4)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--lr", 1e-20], 4, "correct --lr"),
        (["--noise-std", 1e20], 4, "--noise-std"),
        (["--optimizer", "adam", "--lr", 1e-30], 4, "correct --lr"),
        (["--noise-std", 1e200], 2, "correct --noise-std"),
        (["--clip", 1e200], 2, "correct --clip"),
        (["--optimizer", "adam", "--lr", 0.001, "--eps", 1e200], 2, "correct --eps"),
        (["--optimizer", "adamw", "--lr", 0.001, "--weight-decay", 1e5], 2, "weight decay"),
    ],
)
def test_values_out_of_all_proportion(flags: list[object], code: int, says: str) -> None:
    assert says in call("recover", *sample("untrained_m1"), *QUICK, *flags).refusal(code)


def test_4_no_update() -> None:
    message = call("recover", *flags_with(reference=CLIENT)).refusal(4)
    assert "identical" in message


def test_4_missing_rate(tmp_path: Path) -> None:
    about = {key: value for key, value in metadata(CLIENT).items() if key != "fl.lr"}
    local = write_safetensors(tmp_path / "k.safetensors", tensors(CLIENT), about)
    message = call("recover", *flags_with(local=local)).refusal(4)
    assert "--lr" in message
    assert "--steps" not in message


def test_4_architecture_that_does_not_fit() -> None:
    message = call("recover", *sample("untrained_m1"), "--arch", "vgg16").refusal(4)
    assert "--arch" in message


# 5


@pytest.mark.parametrize("several", [False, True])
def test_5_unreliable_only_when_strict(several: bool) -> None:
    flags = ["recover", *sample("untrained_m1"), *PLAIN, "--lr", 0.0005 if several else 0.001]
    if several:
        flags += sample("untrained_m1", 1)[2:4]
    lax, strict = call(*flags), call(*flags, "--strict")
    assert (lax.code, strict.code) == (0, 5)
    assert lax.out == strict.out != ""
    assert lax.err.count("rlu: warning [update-too-large]") == (2 if several else 1)
    message = strict.err.splitlines()[-1]
    assert message.startswith("rlu: error: ")
    assert "update-too-large" in message
    assert "--strict" in message


def test_5_is_written_to_the_output_file_too(tmp_path: Path) -> None:
    flags = ["recover", *sample("untrained_m1"), *PLAIN, "--lr", 0.001, "--strict"]
    assert call(*flags, "-o", tmp_path / "found.json").code == 5
    assert (tmp_path / "found.json").read_text(encoding="utf-8") == call(*flags).out


def test_strict_passes_what_is_sound() -> None:
    assert call("recover", *sample("untrained_m1"), *QUICK, "--strict").code == 0


# 130


def test_130_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlu_cli.audit.image_source.probe", interrupt)
    target = tmp_path / "found.json"
    target.write_text("old", encoding="utf-8")
    outcome = call("recover", *sample("untrained_m1"), "-o", target)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")
    assert target.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
