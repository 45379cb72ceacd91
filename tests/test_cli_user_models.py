"""``--arch path/to/file.py:factory``: networks of one's own, trained here with plain SGD on real digits."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, QUICK, SAMPLES, call, metadata, tensors, write_safetensors, write_torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rlu_cli.models import build_model, parse_spec

CODE = """
import torch
from torch import nn

from own_parts import Wiggle


class Net(nn.Module):
    '''A convolutional network whose output layer has an uncommon name, before other layers in order.'''

    def __init__(self, bias=True, classes=10):
        super().__init__()
        self.verdict = nn.Linear(64, classes, bias=bias)
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), Wiggle(), nn.MaxPool2d(2))
        self.middle = nn.Linear(8 * 16, 64)

    def forward(self, x):
        x = self.body(x).flatten(1)
        return self.verdict(torch.nn.functional.softplus(self.middle(x)))


class Convolutional(nn.Module):
    '''The logits are means over positions of a 1x1 convolution.'''

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), Wiggle(), nn.Conv2d(16, 48, 3), nn.ReLU())
        self.to_classes = nn.Conv2d(48, 10, 1)

    def forward(self, x):
        return self.to_classes(self.body(x)).mean((2, 3))


def without_bias():
    return Net(bias=False)


class LogNet(Net):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


class SoftNet(Net):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Dropping(Net):
    def __init__(self):
        super().__init__()
        self.verdict = nn.Sequential(nn.Dropout(0.5), self.verdict)
"""

PARTS = """
import torch
from torch import nn


class Wiggle(nn.Module):
    def forward(self, x):
        return x + 0.5 * torch.sin(x)
"""

LR, BATCH = 0.02, 24
AUX_PER_CLASS = 60
NORMALIZE = "mean=0.3;std=0.37"
TRAINING = ["--lr", LR, "--batch-size", BATCH, "--normalize", NORMALIZE]


@dataclass(frozen=True)
class Digits:
    """8x8 digits: an aux folder of PNGs, and what is left for the clients."""

    code: Path
    aux: Path
    images: Tensor
    labels: Tensor


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    folder = tmp_path_factory.mktemp("digits")
    (folder / "own_net.py").write_text(CODE, encoding="utf-8")
    (folder / "own_parts.py").write_text(PARTS, encoding="utf-8")
    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    labels = data.target
    kept = np.zeros(len(labels), dtype=bool)
    for n in range(10):
        chosen = np.flatnonzero(labels == n)[:AUX_PER_CLASS]
        kept[chosen] = True
        (folder / "aux" / str(n)).mkdir(parents=True)
        for index in chosen:
            Image.fromarray(pixels[index]).save(folder / "aux" / str(n) / f"{index:04d}.png")
    images = (torch.from_numpy(pixels[~kept]).float()[:, None] / 255 - 0.3) / 0.37
    return Digits(folder / "own_net.py", folder / "aux", images, torch.from_numpy(labels[~kept]).long())


@pytest.fixture(autouse=True)
def _unchanged_imports() -> Iterator[None]:
    path = list(sys.path)
    yield
    assert sys.path == path
    assert "own_parts" not in sys.modules


def train_round(
    digits: Digits, factory: str, folder: Path, *, steps: int = 1
) -> tuple[list[object], list[int]]:
    """Save a fresh model and one trained on a skewed mix; the flags that name them, and the counts."""
    torch.manual_seed(11)
    model = build_model(parse_spec(f"{digits.code}:{factory}"), allow_user_code=True)
    reference = write_torch(folder / "g.pt", model.state_dict())
    weights = 0.05 + torch.tensor([0, 6, 0, 1, 3, 0, 0, 9, 2, 1.0])
    generator = torch.Generator().manual_seed(5)
    chosen = torch.multinomial(weights[digits.labels], steps * BATCH, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    for rows in chosen.split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.images[rows]), digits.labels[rows]).backward()
        optimizer.step()
    local = write_torch(folder / "k.pt", model.state_dict())
    counts = torch.bincount(digits.labels[chosen], minlength=10).tolist()
    flags = ["--global", reference, "--local", local, "--aux", digits.aux, *TRAINING, "--steps", steps]
    return [*flags, "--arch", f"{digits.code}:{factory}"], counts


@pytest.mark.parametrize(
    ("factory", "head", "embedding"),
    [("Net", "verdict", 64), ("without_bias", "verdict", 64), ("Convolutional", "to_classes", 48)],
)
def test_one_step_is_exact(digits: Digits, tmp_path: Path, factory: str, head: str, embedding: int) -> None:
    flags, counts = train_round(digits, factory, tmp_path)
    document = call("recover", *flags).document
    assert document["counts"] == counts
    assert document["model"]["head"] == head
    assert document["model"]["embedding_size"] == embedding
    assert document["model"]["image_size"] == [8, 8]
    assert document["model"]["arch"] == f"{digits.code}:{factory}"
    match = document["diagnostics"]["embedding_match"]
    assert match is None if factory == "without_bias" else match > 0.95
    assert document["warnings"] == []


@pytest.mark.parametrize("factory", ["Net", "without_bias"])
def test_several_steps_are_close(digits: Digits, tmp_path: Path, factory: str) -> None:
    flags, counts = train_round(digits, factory, tmp_path, steps=5)
    document = call("recover", *flags).document
    total = 5 * BATCH
    assert sum(document["counts"]) == document["total"] == total
    off = sum(abs(a - b) for a, b in zip(document["counts"], counts, strict=True)) / 2
    assert off <= 0.04 * total


@pytest.mark.parametrize("steps", [1, 5])
def test_log_softmax_changes_nothing(digits: Digits, tmp_path: Path, steps: int) -> None:
    found = []
    for factory in ("Net", "LogNet"):
        flags, _ = train_round(digits, factory, tmp_path, steps=steps)  # of equal weights
        found.append(call("recover", *flags, *QUICK).document)
        arguments = [*flags[:2], *flags[4:6], "--normalize", NORMALIZE, *flags[-2:]]
        stats = tmp_path / f"{factory}.safetensors"
        assert call("estimate-logits", *arguments, "-o", stats).code == 0
        if factory == "LogNet":
            assert (
                call("recover", *flags, *QUICK, "--head", "verdict").document["counts"] == found[1]["counts"]
            )
    plain, log = found
    assert log["model"]["head"] == "verdict"
    assert log["counts"] == plain["counts"]
    assert log["warnings"] == plain["warnings"]
    for name in ("estimate", "low", "high"):
        values = [[entry[name] for entry in document["classes"]] for document in found]
        np.testing.assert_allclose(values[1], values[0], atol=0.01)
    stored = [tensors(tmp_path / f"{factory}.safetensors") for factory in ("Net", "LogNet")]
    for name, value in stored[0].items():
        torch.testing.assert_close(stored[1][name], value, rtol=1e-4, atol=1e-4)


def test_simulated_rounds_of_a_network_that_ends_in_log_softmax(digits: Digits, tmp_path: Path) -> None:
    archive, size = tmp_path / "archive", ("--clients", 2, "--rounds", 2, "--aux-per-class", 10)
    made = call(
        "simulate", "--data", "digits", "--arch", f"{digits.code}:LogNet", "-o", archive, *size,
        "--batch-size", 16, "--steps", 1, "--lr", 0.02,
    )  # fmt: skip
    assert made.code == 0, made.err
    lines = call("evaluate", "--archive", archive, "--arch", f"{digits.code}:LogNet").document
    assert lines["summary"][0]["iAcc"]["mean"] == 1


def test_softmax_is_refused(digits: Digits, tmp_path: Path) -> None:
    flags, _ = train_round(digits, "SoftNet", tmp_path)
    assert "probabilities" in call("recover", *flags).refusal(4)


def test_dropout_as_the_client_had_it(digits: Digits, tmp_path: Path) -> None:
    """On unless told otherwise: without it right clients were `update-unexplained` and `update-misscaled`."""
    flags, counts = train_round(digits, "Dropping", tmp_path)
    found = {way: call("recover", *flags, *way, *QUICK).document for way in ((), ("--dropout", "off"))}
    for way, document in found.items():
        assert document["counts"] == counts
        assert document["model"]["dropout"] == (way[1] if way else "on")
    assert found[()]["warnings"] == []
    estimates = [[entry["estimate"] for entry in document["classes"]] for document in found.values()]
    assert estimates[0] != estimates[1]
    stats = tmp_path / "stats.safetensors"
    for way, said, expected in zip(found, ("on", "off"), estimates, strict=True):
        made = [*flags[:2], *flags[4:6], "--normalize", NORMALIZE, *flags[-2:], *way, *QUICK]
        assert call("estimate-logits", *made, "-o", stats).code == 0
        beside = [*flags[:4], "--stats", stats, *TRAINING, "--steps", 1, *QUICK]
        again = call("recover", *beside).document
        assert [entry["estimate"] for entry in again["classes"]] == expected
        assert again["model"]["dropout"] == said


def test_estimate_logits_then_recover(digits: Digits, tmp_path: Path) -> None:
    flags, counts = train_round(digits, "without_bias", tmp_path)
    stats = tmp_path / "stats.safetensors"
    arch = flags[-2:]
    summary = call(
        "estimate-logits", *flags[:2], "--aux", digits.aux, "--normalize", NORMALIZE, *arch, "-o", stats
    ).document
    assert summary["model"]["head"] == "verdict"
    document = call("recover", *flags[:4], "--stats", stats, *TRAINING, "--steps", 1).document
    assert document["counts"] == counts


def test_wrapped_names_and_keyword_arguments(digits: Digits, tmp_path: Path) -> None:
    flags, counts = train_round(digits, "Net", tmp_path)
    for name in ("g", "k"):
        state = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        wrapped = {f"module.{key}": tensor for key, tensor in state.items()}
        write_torch(tmp_path / f"{name}.pt", {"state_dict": wrapped, "round": 4})
    arch = f"{digits.code}:Net:classes=10,bias=true"
    document = call("recover", *flags[:-2], "--arch", arch).document
    assert document["counts"] == counts
    assert document["model"]["arch"] == f"{digits.code}:Net:bias=true,classes=10"


def test_another_network_does_not_fit(digits: Digits, tmp_path: Path) -> None:
    flags, _ = train_round(digits, "Net", tmp_path)
    message = call("recover", *flags[:-2], "--arch", f"{digits.code}:Convolutional").refusal(4)
    assert "to_classes" in message
    message = call("recover", *flags[:-2], "--arch", f"{digits.code}:Net:classes=9").refusal(4)
    assert "verdict" in message


def test_own_network_without_arch(digits: Digits, tmp_path: Path) -> None:
    flags, _ = train_round(digits, "Net", tmp_path)
    message = call("recover", *flags[:-2]).refusal(4)
    assert "--arch" in message
    assert "file.py:factory" in message


@pytest.mark.parametrize(
    ("arch", "word"),
    [
        ("{code}:Nothing", "Nothing"),
        ("{code}", "factory"),
        ("{folder}/absent.py:Net", "absent.py"),
        ("{code}:Net:width=3", "width"),
        ("no_such_package_of_mine:Net", "no_such_package_of_mine"),
    ],
)
def test_arch_that_cannot_be_built(digits: Digits, tmp_path: Path, arch: str, word: str) -> None:
    flags, _ = train_round(digits, "Net", tmp_path)
    spec = arch.format(code=digits.code, folder=tmp_path)
    outcome = call("recover", *flags[:-2], "--arch", spec)
    assert outcome.code in (2, 3)
    assert word in outcome.refusal(outcome.code)


def test_head_flag(digits: Digits, tmp_path: Path) -> None:
    flags, counts = train_round(digits, "Net", tmp_path)
    assert call("recover", *flags, "--head", "verdict.weight").document["counts"] == counts
    outcome = call("recover", *flags, "--head", "classifier")
    message = outcome.refusal(2)
    assert "classifier" in message
    assert "verdict" in message


@pytest.mark.parametrize("place", ["local", "global", "sidecar"])
@pytest.mark.parametrize("kind", ["file", "module"])
def test_code_named_by_a_file_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: str
) -> None:
    marker = tmp_path / "was-run"
    code = tmp_path / "payload_of_metadata.py"
    code.write_text(f"open({str(marker)!r}, 'w')\ndef make(): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    spec = f"{code}:make" if kind == "file" else "payload_of_metadata:make"
    folder = SAMPLES / "untrained_m1"
    about = {
        name: {k: v for k, v in metadata(folder / f"{name}.safetensors").items() if k != "fl.arch"}
        for name in ("global", "client_0")
    }
    if place == "sidecar":
        (tmp_path / "round.json").write_text(f'{{"arch": "{spec}"}}', encoding="utf-8")
    else:
        about["global" if place == "global" else "client_0"]["fl.arch"] = spec
    for name, values in about.items():
        path = tmp_path / f"{name}.safetensors"
        write_safetensors(path, tensors(folder / f"{name}.safetensors"), values)
    flags = ["--global", tmp_path / "global.safetensors", "--local", tmp_path / "client_0.safetensors"]
    message = call("recover", *flags, "--aux", AUX).refusal(3)
    assert "payload_of_metadata" in message
    assert "--arch" in message
    assert not marker.exists()
    assert "payload_of_metadata" not in sys.modules


SMALL = """
from torch import nn


def net(classes=10):
    middle = nn.Linear(784, 8)
    return nn.Sequential(nn.Flatten(), middle, nn.ReLU(), nn.Linear(8, classes, bias=False))


def one():
    return net(1)
"""


def small_round(folder: Path, name: str, *, dead: bool) -> list[object]:
    """Flags of a model whose output layer has no bias, and a client that moved it at random."""
    code = folder / "small.py"
    code.write_text(SMALL, encoding="utf-8")
    torch.manual_seed(0)
    model = build_model(parse_spec(f"{code}:{name}"), allow_user_code=True)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    if dead:
        state["1.weight"], state["1.bias"] = torch.zeros(8, 784), torch.full((8,), -1.0)
    moved = {**state, "3.weight": state["3.weight"] + 1e-3 * torch.randn_like(state["3.weight"])}
    files = [
        write_safetensors(folder / "g.safetensors", state),
        write_safetensors(folder / "k.safetensors", moved),
    ]
    return ["--global", files[0], "--local", files[1], "--arch", f"{code}:{name}", "--normalize", "none"]


def test_a_last_layer_that_is_dead_says_nothing_but_is_no_fault(tmp_path: Path) -> None:
    """All embeddings are 0, so that no direction of theirs stands for the missing bias."""
    flags = small_round(tmp_path, "net", dead=True)
    stats = tmp_path / "stats.safetensors"
    about = [*flags[:2], *flags[4:], "--aux", AUX, *QUICK]
    logits = call("estimate-logits", *about, "-o", stats).document
    np.testing.assert_allclose([row["own_confidence"] for row in logits["classes"]], 0.1)
    training = ["--lr", 0.1, "--batch-size", 16, "--steps", 1]
    for source in (["--aux", AUX, *QUICK], ["--stats", stats]):
        where = flags if source[0] == "--aux" else flags[:4]
        document = call("recover", *where, *source, *training).document
        assert sum(document["counts"]) == 16
        assert document["reliability"]["grade"] == "poor"
        refused = call("recover", *where, *source, *training, "--method", "gls").refusal(4)
        assert "expected an output layer with a bias" in refused
    unknown = ["--lr", "auto", *training[2:], "--aux", AUX, *QUICK]
    assert "say --lr RATE" in call("recover", *flags, *unknown).refusal(4)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_model_of_one_class_is_refused(tmp_path: Path, steps: int) -> None:
    flags = small_round(tmp_path, "one", dead=False)
    training = ["--lr", 0.1, "--batch-size", 16, "--steps", steps]
    shutil.copytree(AUX / "bag", tmp_path / "aux" / "bag")
    message = call("recover", *flags, "--aux", tmp_path / "aux", *QUICK, *training).refusal(4)
    assert "at least two classes, found 1" in message
