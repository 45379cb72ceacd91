"""`rlu simulate`: what it prints, and that `rlu recover` needs no flags for what it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, QUICK, call, check_fields, metadata, tensors, write_safetensors

from rlu_cli.images.datasets import open_dataset
from rlu_cli.models import LeNet5

TINY = ("--data", "digits", "--clients", 3, "--rounds", 2, "--aux-per-class", 8, "--test-size", 40)
TRAINING = ("--lr", 0.05, "--batch-size", 16, "--steps", 2)
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.fc = nn.Linear(width, 10)

    def forward(self, images):
        return self.fc(self.body(images))
"""


def one_client(archive: Path, number: int = 2) -> tuple[dict[str, object], list[object]]:
    """A line of the truth, and the flags that name that client's round and nothing else."""
    lines = map(json.loads, (archive / "truth.ndjson").read_text(encoding="utf-8").splitlines())
    line = next(line for line in lines if line["round"] == number)
    folder = archive / f"round_{number:04d}"
    flags: list[object] = ["--global", folder / "global.safetensors"]
    return line, [*flags, "--local", folder / f"{line['client']}.safetensors", "--aux", archive / "aux"]


def test_what_it_prints_and_writes(tmp_path: Path) -> None:
    root = tmp_path / "archive"
    outcome = call("simulate", *TINY, *TRAINING, "-o", root, "--seed", 4)
    document = outcome.document
    kinds = {"schema_version": int, "command": str, "rlu_version": str, "archive": str, "device": str}
    check_fields(document, {**kinds, "seed": int, "final_accuracy": float, "rounds": list})
    assert (document["command"], document["seed"], document["archive"]) == ("simulate", 4, str(root))
    for number, entry in enumerate(document["rounds"], start=1):
        check_fields(entry, {"round": int, "accuracy": float, "clients": list})
        assert entry["round"] == number
        assert entry["clients"] == ["client_0000", "client_0001", "client_0002"]
    assert outcome.err == ""
    expected = ["aux", "final.safetensors", "partition.png", "round_0001", "round_0002", "simulation.json"]
    assert sorted(path.name for path in root.iterdir()) == [*expected, "truth.ndjson"]
    assert (root / "partition.png").read_bytes().startswith(b"\x89PNG")
    again = call("simulate", *TINY, *TRAINING, "-o", root, "--seed", 4)  # all there: nothing to do
    assert again.document == document


def test_the_documented_call_works(tmp_path: Path) -> None:
    # The README's, but for the number of rounds.
    flags = ["--lr", 0.05, "--batch-size", 32, "--steps", 10, "--scheme", "scaffold", "--rounds", 1]
    assert len(call("simulate", "--data", "digits", "-o", tmp_path / "a", *flags).document["rounds"]) == 1


@pytest.mark.parametrize(
    "how",
    [
        [],
        ["--momentum", 0.9, "--nesterov", "--weight-decay", 0.001],
        ["--lr-decay", 0.9, "--scheme", "fedprox", "--lambda", 1.0],
        ["--scheme", "fedprox", "--lambda", 0],
        ["--normalize", "mean=0.3;std=0.4", "--arch", "lenet5:activation=elu"],
    ],
    ids=lambda how: " ".join(map(str, how)),
)
def test_recover_needs_no_flags(tmp_path: Path, how: list[object]) -> None:
    call("simulate", *TINY, *TRAINING, "-o", tmp_path / "a", *how).document  # noqa: B018
    line, flags = one_client(tmp_path / "a")
    document = call("recover", *flags).document
    recovered, true = document["counts"], line["counts"]
    assert sum(map(min, recovered, true)) >= 0.9 * sum(true)  # type: ignore[call-overload, arg-type]
    assert document["total"] == line["total"]
    assert set(document["training"]["sources"].values()) <= {"local", "default"}
    assert document["warnings"] == []


@pytest.mark.parametrize("scheme", ["scaffold", "feddyn", "feddc"])
def test_recover_needs_the_archive_only_for_schemes_that_remember(tmp_path: Path, scheme: str) -> None:
    how = ["--scheme", scheme, *([] if scheme == "scaffold" else ["--lambda", 1.0])]
    call("simulate", *TINY, *TRAINING, "-o", tmp_path / "a", *how).document  # noqa: B018
    line, flags = one_client(tmp_path / "a")
    message = call("recover", *flags, *QUICK).refusal(4)
    assert "round 1" in message
    assert "--history" in message
    document = call("recover", *flags, "--history", tmp_path / "a").document
    assert sum(map(min, document["counts"], line["counts"])) >= 0.9 * line["total"]  # type: ignore[call-overload, operator]
    first, flags = one_client(tmp_path / "a", 1)
    assert call("recover", *flags, *QUICK).document["total"] == first["total"]


def test_epochs(tmp_path: Path) -> None:
    root = tmp_path / "a"
    flags = ["--lr", 0.05, "--batch-size", 64, "--epochs", 1, "--rounds", 1]
    call("simulate", *TINY, *flags, "-o", root).document  # noqa: B018
    line, flags = one_client(root, 1)
    said = metadata(root / "round_0001" / f"{line['client']}.safetensors")
    assert int(said["fl.dataset_size"]) == line["total"]
    document = call("recover", *flags, *QUICK).document
    assert document["total"] == line["total"]
    assert document["training"]["steps"] == len(line["step_counts"])  # type: ignore[arg-type]


def test_a_folder_of_class_folders(tmp_path: Path) -> None:
    flags = ["--clients", 2, "--rounds", 1, "--aux-per-class", 3, "--test-size", 10, *TRAINING]
    call("simulate", "--data", AUX, "-o", tmp_path / "a", *flags).document  # noqa: B018
    names = json.loads(metadata(tmp_path / "a" / "round_0001" / "global.safetensors")["fl.class_names"])
    assert sorted(names) == sorted(path.name for path in AUX.iterdir() if path.is_dir())
    assert sorted(path.name for path in (tmp_path / "a" / "aux").iterdir()) == sorted(names)
    line, client = one_client(tmp_path / "a", 1)
    assert call("recover", *client, *QUICK).document["total"] == line["total"]


def test_a_folder_that_lost_images(tmp_path: Path) -> None:
    data = shutil.copytree(AUX, tmp_path / "data")
    flags = ["--clients", 2, "--aux-per-class", 3, "--test-size", 10, *TRAINING, "-o", tmp_path / "a"]
    call("simulate", "--data", data, *flags, "--rounds", 1).document  # noqa: B018
    gone = sorted(path for path in data.rglob("*") if path.is_file())[0]
    gone.rename(tmp_path / gone.name)
    message = call("simulate", "--data", data, *flags, "--rounds", 2).refusal(4)
    assert f"other images, labels or class names in {data}" in message
    assert not (tmp_path / "a" / "round_0002").exists()
    (tmp_path / gone.name).rename(gone)
    assert len(call("simulate", "--data", data, *flags, "--rounds", 2).document["rounds"]) == 2


def test_batch_norm(tmp_path: Path) -> None:
    flags = ["--arch", "resnet32", "--rounds", 1, "--lr", 0.05, "--batch-size", 16, "--steps", 1]
    call("simulate", *TINY, *flags, "-o", tmp_path / "a").document  # noqa: B018
    line, client = one_client(tmp_path / "a", 1)
    document = call("recover", *client, *QUICK).document
    assert document["model"]["arch"].startswith("resnet32")
    assert document["total"] == line["total"]


def test_batch_norm_of_a_single_image(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))\n",
        encoding="utf-8",
    )
    flags = ["--arch", f"{tmp_path / 'net.py'}:net", "--lr", 0.05, "--batch-size", 1]
    message = call("simulate", *TINY, *flags, "--epochs", 1, "-o", tmp_path / "a").refusal(4)
    assert "a single image" in message
    assert "--batch-size" in message


def test_a_model_with_nothing_to_train(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET + "\ndef net():\n    return Net().requires_grad_(False)\n")
    flags = [*TINY, *TRAINING, "-o", tmp_path / "a", "--arch", f"{tmp_path / 'net.py'}:net"]
    assert "all of them frozen" in call("simulate", *flags).refusal(4)


def test_training_that_diverges(tmp_path: Path) -> None:
    """Models of NaN were written, with accuracies of such."""
    flags = [*TINY, *TRAINING, "--lr", 1e20, "--steps", 5, "-o", tmp_path / "a"]
    assert "NaN or infinity in client_" in call("simulate", *flags).refusal(4)
    assert not list((tmp_path / "a").glob("round_*/client_*"))


def test_users_own_architecture(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    arch = f"{tmp_path / 'net.py'}:Net:width=12"
    call("simulate", *TINY, *TRAINING, "-o", tmp_path / "a", "--arch", arch).document  # noqa: B018
    line, flags = one_client(tmp_path / "a")
    assert tensors(tmp_path / "a" / "final.safetensors")["fc.weight"].shape == (10, 12)
    assert "--arch" in call("recover", *flags, *QUICK).refusal(3)  # a file may not choose code to run
    document = call("recover", *flags, "--arch", arch).document
    assert sum(map(min, document["counts"], line["counts"])) >= 0.9 * line["total"]  # type: ignore[call-overload, operator]


def test_init(tmp_path: Path) -> None:
    torch.manual_seed(7)
    start = LeNet5(image_size=8, padding=4).state_dict()
    file = write_safetensors(tmp_path / "start.safetensors", start)
    flags = [*TINY, *TRAINING, "-o", tmp_path / "a", "--init"]
    call("simulate", *flags, file).document  # noqa: B018
    first = tensors(tmp_path / "a" / "round_0001" / "global.safetensors")
    assert all(torch.equal(first[name], start[name]) for name in start)
    call("simulate", *flags, file).document  # noqa: B018
    other = write_safetensors(tmp_path / "other.safetensors", LeNet5(image_size=8, padding=4).state_dict())
    assert "other values of --init:" in call("simulate", *flags, other).refusal(4)
    assert "--init:" in call("simulate", *flags[:-1]).refusal(4)
    wrong = write_safetensors(tmp_path / "wrong.safetensors", LeNet5().state_dict())
    refused = [*TINY, *TRAINING, "-o", tmp_path / "b", "--init"]
    assert "initial checkpoint" in call("simulate", *refused, wrong).refusal(4)
    call("simulate", *refused, tmp_path / "absent.safetensors").refusal(3)
    assert not (tmp_path / "b").exists()
    np.savez(tmp_path / "start.npz", *(tensor.numpy() for tensor in start.values()))  # without names
    call("simulate", *refused, tmp_path / "start.npz").document  # noqa: B018
    first = tensors(tmp_path / "b" / "round_0001" / "global.safetensors")
    assert all(torch.equal(first[name], start[name]) for name in start)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--batch-size", 16], 4, "lr (--lr); steps"),
        ([*TRAINING, "--scheme", "feddyn"], 4, "--lambda"),
        ([*TRAINING, "--scheme", "fedprox"], 4, "--lambda"),
        ([*TRAINING, "--epochs", 1], 2, "--steps or --epochs"),
        ([*TRAINING, "--optimizer", "rmsprop"], 2, "sgd"),
        ([*TRAINING, "--participation", 1.5], 2, "--participation"),
        ([*TRAINING, "--momentum", 0.5, "--dampening", 2.5], 2, "--dampening"),
        ([*TRAINING, "--dampening", 0.5], 2, "--momentum"),
        ([*TRAINING, "--lambda", 5], 2, "found fedavg"),
        ([*TRAINING, "--scheme", "scaffold", "--lambda", 5], 2, "found scaffold"),
        ([*TRAINING, "--alpha", 0], 2, "--alpha"),
        ([*TRAINING, "--rounds", 0], 2, "--rounds"),
        ([*TRAINING, "--seed", 2**64], 2, "--seed"),
        ([*TRAINING, "--noise-std", -1], 2, "--noise-std"),
        ([*TRAINING, "--noise-std", "inf"], 2, "--noise-std"),
        ([*TRAINING, "--clip", "inf"], 2, "--clip"),
        ([*TRAINING, "--alpha", "inf"], 2, "--alpha"),
        ([*TRAINING, "--alpha", "1e308"], 2, "--alpha"),
        ([*TRAINING, "--arch", "lenet5:num_classes=9"], 4, "10 classes"),
        ([*TRAINING, "--arch", "lenet5:image_size=64"], 4, "can't read images of shape (1, 8, 8)"),
        ([*TRAINING, "--test-size", 1797], 4, "--test-size"),
        ([*TRAINING, "--normalize", "imagenet"], None, "channel"),
        ([*TRAINING, "--arch", "lenet9"], 2, "lenet9"),
        ([*TRAINING, "--data", "mnits"], None, "mnits"),
        ([*TRAINING, "--averaging", "median"], 2, "averaging"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_refusals(tmp_path: Path, flags: list[object], code: int | None, says: str) -> None:
    outcome = call("simulate", *TINY, "-o", tmp_path / "a", *flags)
    assert outcome.code in ((2, 3, 4) if code is None else (code,))
    assert says in outcome.refusal(outcome.code)
    assert not (tmp_path / "a").exists()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"")
    call("simulate", *TINY, *TRAINING, "-o", tmp_path).refusal(4)
    root = tmp_path / "a"
    call("simulate", *TINY, *TRAINING, "-o", root, "--rounds", 1).document  # noqa: B018
    message = call("simulate", *TINY, *TRAINING, "-o", root, "--lr", 0.1, "--seed", 3).refusal(4)
    assert "--lr, --seed" in message
    call("simulate", *TINY, *TRAINING, "-o", root, "--rounds", 2).document  # noqa: B018


def test_class_names_that_look_like_formulas(tmp_path: Path) -> None:
    """The plot took what stands between dollars for mathematics, and its fault was the simulation's end."""
    digits = open_dataset("digits")
    names = ["$a_{$", *"bcdefghij"]
    pixels = digits.pixels.permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "d.npz", images=pixels, labels=digits.labels.numpy(), class_names=np.array(names))
    flags = [*TINY, *TRAINING, "-o", tmp_path / "a", "--rounds", 1, "--data", tmp_path / "d.npz"]
    assert len(call("simulate", *flags).document["rounds"]) == 1
    assert (tmp_path / "a" / "partition.png").exists()


def test_version() -> None:
    assert call("simulate", "--version").out == call("--version").out
