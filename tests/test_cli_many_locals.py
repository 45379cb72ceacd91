"""Many clients in one call: each as if it were alone, and the global model's work done once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import AUX, QUICK, SAMPLES, call, metadata, sample, tensors, write_safetensors

ROUND = SAMPLES / "untrained_m1"
NORMED = """
import torch
from torch import nn

def small():
    body = [nn.Conv2d(1, 4, 5, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(256, 10))
"""


def recover(reference: Path, locals_: list[Path], *more: object) -> list[dict[str, Any]]:
    given = [flag for path in locals_ for flag in ("--local", path)]
    outcome = call("recover", "--global", reference, *given, "--aux", AUX, *more)
    return outcome.lines if len(locals_) > 1 else [outcome.document]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the expensive things are done."""
    done: Counter[str] = Counter()

    def count(home: str, name: str) -> None:
        module = __import__(home, fromlist=[name])
        original: Callable[..., Any] = getattr(module, name)

        def counting(*args: object, **kwargs: object) -> Any:
            done[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    for name in ("scan_auxiliary", "load_auxiliary", "build_network", "probe"):
        count("rlu_cli.audit.image_source", name)
    count("rlu_cli.audit.source", "model_statistics")
    return done


def test_one_step_needs_one_pass_for_all(counted: Counter[str]) -> None:
    paths = [ROUND / f"client_{client}.safetensors" for client in (0, 1, 2, 0)]
    recover(ROUND / "global.safetensors", paths, *QUICK)
    assert set(counted.values()) == {1}
    assert len(counted) == 5


def test_several_steps_need_one_more_pass_each(counted: Counter[str]) -> None:
    folder = SAMPLES / "trained_m10"
    recover(folder / "global.safetensors", [folder / f"client_{c}.safetensors" for c in (0, 1, 2)], *QUICK)
    assert (counted.pop("probe"), counted.pop("model_statistics")) == (4, 4)
    assert set(counted.values()) == {1}


@pytest.fixture
def normed(tmp_path: Path) -> tuple[Path, list[Path], list[object]]:
    """A round of a network with BatchNorm whose clients train with different batch sizes."""
    code = tmp_path / "model.py"
    code.write_text(NORMED, encoding="utf-8")
    torch.manual_seed(0)
    state = {
        "0.weight": 0.3 * torch.randn(4, 1, 5, 5),
        "0.bias": torch.zeros(4),
        "1.weight": torch.ones(4),
        "1.bias": torch.zeros(4),
        "1.running_mean": torch.zeros(4),
        "1.running_var": torch.ones(4),
        "1.num_batches_tracked": torch.tensor(1),
        "4.weight": 0.1 * torch.randn(10, 256),
        "4.bias": torch.zeros(10),
    }
    reference = write_safetensors(
        tmp_path / "global.safetensors", state, metadata(ROUND / "global.safetensors")
    )
    locals_ = []
    for client, batch in enumerate((4, 64, 16)):
        update = torch.randn(10)
        moved = {**state, "4.bias": 1e-3 * (update - update.mean()), "4.weight": state["4.weight"] + 1e-4}
        about = {"fl.lr": "0.01", "fl.batch_size": str(batch), "fl.steps": "2"}
        locals_.append(write_safetensors(tmp_path / f"client_{client}.safetensors", moved, about))
    return reference, locals_, ["--arch", f"{code}:small", "--method", "rlu", *QUICK]


def test_the_order_of_the_clients_changes_nothing(normed: tuple[Path, list[Path], list[object]]) -> None:
    reference, locals_, flags = normed
    alone = [recover(reference, [path], *flags)[0] for path in locals_]
    assert recover(reference, locals_, *flags) == alone
    assert recover(reference, locals_[::-1], *flags) == alone[::-1]
    estimates = [[entry["estimate"] for entry in document["classes"]] for document in alone]
    flags += ["--batch-norm", "running"]
    stored = [[entry["estimate"] for entry in d["classes"]] for d in recover(reference, locals_, *flags)]
    assert estimates != stored  # the batch size has something to change here


def test_one_pass_of_the_global_model_for_each_batch_size_that_matters(
    normed: tuple[Path, list[Path], list[object]], counted: Counter[str]
) -> None:
    reference, locals_, flags = normed
    recover(reference, [*locals_, locals_[0]], *flags)
    assert counted.pop("probe") == 3 + 4
    counted.clear()
    recover(reference, [*locals_, locals_[0]], *flags, "--batch-norm", "running")
    assert counted.pop("probe") == 1 + 4


@pytest.mark.parametrize("first", [0, 1])
def test_clients_that_describe_different_inputs_are_refused_in_any_order(tmp_path: Path, first: int) -> None:
    state = tensors(ROUND / "client_0.safetensors")
    about = metadata(ROUND / "client_0.safetensors")
    reference = write_safetensors(tmp_path / "g.safetensors", tensors(ROUND / "global.safetensors"))
    silent = {key: value for key, value in about.items() if key != "fl.normalize"}
    paths = [
        write_safetensors(tmp_path / "says.safetensors", state, about),
        write_safetensors(tmp_path / "silent.safetensors", state, silent),
    ]
    given = [flag for path in (paths[first], paths[1 - first]) for flag in ("--local", path)]
    outcome = call("recover", "--global", reference, *given, "--aux", AUX, *QUICK)
    assert outcome.code == 4
    assert "agree on fl.normalize" in outcome.err
    assert outcome.out.count("\n") == 1  # the first one's result stands
    agreed = call("recover", "--global", reference, *given, "--aux", AUX, *QUICK, "--normalize", "half")
    assert len(agreed.lines) == 2  # the flag outranks both


def test_of_a_local_model_that_is_not_run_the_output_layer_alone_is_read(tmp_path: Path) -> None:
    for round_, code in (("untrained_m1", 0), ("untrained_m10", 4)):
        source = SAMPLES / round_ / "client_0.safetensors"
        state = tensors(source)
        state["conv1.weight"][0] = float("nan")
        path = write_safetensors(tmp_path / f"{round_}.safetensors", state, metadata(source))
        outcome = call("recover", *sample(round_)[:2], "--local", path, "--aux", AUX, *QUICK)
        assert outcome.code == code, outcome.err
    assert "conv1.weight" in outcome.err


def test_a_layer_of_another_shape_is_seen_though_not_read(tmp_path: Path) -> None:
    source = ROUND / "client_0.safetensors"
    state = tensors(source) | {"conv1.weight": torch.zeros(6, 1, 3, 3)}
    path = write_safetensors(tmp_path / "k.safetensors", state, metadata(source))
    message = call("recover", *sample("untrained_m1")[:2], "--local", path, "--aux", AUX).refusal(4)
    assert "conv1.weight" in message
