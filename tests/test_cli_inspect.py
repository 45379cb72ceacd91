"""``rlu inspect``: any kind of checkpoint, what is found in it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import SAMPLES, call, check_fields, tensors, write_torch
from torch import nn

from rlu_cli.files.hashing import sha256_file

GLOBAL = SAMPLES / "untrained_m1" / "global.safetensors"
CLIENT = SAMPLES / "untrained_m1" / "client_0.safetensors"
PARAMETERS = 61_706


def test_safetensors() -> None:
    outcome = call("inspect", CLIENT)
    document = outcome.document
    assert outcome.err == ""
    kinds = {
        "schema_version": int,
        "command": str,
        "path": str,
        "sha256": str,
        "bytes": int,
        "format": str,
        "tensors": list,
        "parameters": int,
        "arch": str,
        "head": dict,
        "metadata": dict,
        "notes": list,
    }
    check_fields(document, kinds)
    assert document["command"] == "inspect"
    assert document["path"] == str(CLIENT)
    assert (document["sha256"], document["bytes"]) == (sha256_file(CLIENT), CLIENT.stat().st_size)
    assert document["format"] == "safetensors"
    assert document["parameters"] == PARAMETERS
    assert document["arch"].startswith("lenet5:")
    assert document["head"] == {"name": "fc3", "num_classes": 10, "embedding_size": 84, "bias": True}
    assert document["metadata"]["fl.lr"] == "0.01"
    assert {"name": "fc3.weight", "dtype": "float32", "shape": [10, 84]} in document["tensors"]


@pytest.mark.parametrize("legacy", [False, True])
def test_torch(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "weights.pt"
    torch.save(tensors(GLOBAL), path, _use_new_zipfile_serialization=not legacy)
    document = call("inspect", path).document
    assert document["format"] == ("torch-legacy" if legacy else "torch-zip")
    assert document["arch"] == call("inspect", GLOBAL).document["arch"]
    assert document["metadata"] == {}


def test_wrapped_torch(tmp_path: Path) -> None:
    state = {f"module._orig_mod.{name}": tensor for name, tensor in tensors(GLOBAL).items()}
    wrapped = {"epoch": 3, "model_state_dict": state, "optimizer": {"lr": 0.1}, "fl.lr": 0.5}
    document = call("inspect", write_torch(tmp_path / "weights.bin", wrapped)).document
    assert document["head"]["name"] == "fc3"
    assert document["arch"].startswith("lenet5:")
    assert document["parameters"] == PARAMETERS
    assert document["metadata"] == {"fl.lr": "0.5"}
    assert "module." in " ".join(document["notes"])


def test_npz_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", **{name: t.numpy() for name, t in tensors(GLOBAL).items()})
    document = call("inspect", tmp_path / "weights.npz").document
    assert (document["format"], document["head"]["name"]) == ("npz", "fc3")


def test_npz_by_position(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", *[tensor.numpy() for tensor in tensors(GLOBAL).values()])
    document = call("inspect", tmp_path / "weights.npz").document
    assert (document["format"], document["parameters"]) == ("npz", PARAMETERS)
    assert document["arch"] is None


def test_the_suffix_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(GLOBAL.read_bytes())
    assert call("inspect", path).document["format"] == "safetensors"


def test_several_are_lines_in_the_order_given(tmp_path: Path) -> None:
    paths = [CLIENT, write_torch(tmp_path / "g.pt", tensors(GLOBAL)), GLOBAL]
    outcome = call("inspect", *paths)
    assert [line["path"] for line in outcome.lines] == [str(path) for path in paths]
    saved = call("inspect", *paths, "-o", tmp_path / "found.ndjson")
    assert saved.out == ""
    assert (tmp_path / "found.ndjson").read_bytes() == outcome.out.encode("utf-8")


def test_table() -> None:
    outcome = call("inspect", GLOBAL, "-v")
    assert "fc3.weight" in outcome.err
    assert "\x1b" not in outcome.err
    assert outcome.out == call("inspect", GLOBAL).out


def test_unknown_architecture(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Conv2d(1, 4, 3))
    model.add_module("score", nn.Linear(16, 5, bias=False))
    document = call("inspect", write_torch(tmp_path / "own.pt", model.state_dict())).document
    assert document["arch"] is None
    assert document["head"] == {"name": "score", "num_classes": 5, "embedding_size": 16, "bias": False}
    assert document["head_candidates"] == ["score"]


def test_no_output_layer(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "own.pt", {"running_mean": torch.zeros(3)})
    document = call("inspect", path).document
    assert document["head"] is None
    assert document["head_candidates"] == []
    assert "unknown" in call("inspect", path, "-v").err


def test_a_whole_model_is_refused_with_advice(tmp_path: Path) -> None:
    message = call("inspect", write_torch(tmp_path / "model.pt", nn.Linear(2, 2))).refusal(3)
    assert "state_dict" in message


def test_missing_and_empty_files(tmp_path: Path) -> None:
    assert "no such file" in call("inspect", tmp_path / "none.pt").refusal(3)
    (tmp_path / "empty.pt").touch()
    call("inspect", tmp_path / "empty.pt").refusal(3)
    call("inspect", tmp_path).refusal(3)
