"""OpenFL's model files: raw tensors are read, compressed ones refused by the pipeline's name."""

from __future__ import annotations

import builtins
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openfl_files import Stage, field, named_tensor, raw_tensor, write_openfl

from rlu_cli.errors import FileError, RluError, UsageError
from rlu_cli.files import openfl
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.sniff import FileKind, sniff

WEIGHTS = {
    "fc.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "fc.bias": np.array([0.5, -1.0, 2.0], dtype=np.float32),
    "bn.num_batches_tracked": np.array(7),
    "empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.fixture(autouse=True)
def _protobuf() -> None:
    pytest.importorskip("google.protobuf")


def refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    return str(caught.value)


def test_raw_tensors(tmp_path: Path) -> None:
    found = read_checkpoint(write_openfl(tmp_path / "last.bin", WEIGHTS))
    assert found.format == "openfl"
    assert list(found.tensors) == list(WEIGHTS)
    for name, array in WEIGHTS.items():
        assert found.tensors[name].dtype == torch.float32
        assert np.array_equal(found.tensors[name].numpy(), array.astype(np.float32)), name
        assert found.tensors[name].shape == array.shape
    assert found.metadata == {"openfl.round_number": "3"}
    assert "optimizer" in found.notes[0] and "__opt_group_0_0_lr" in found.notes[0]


def test_the_description_is_that_of_openfl(tmp_path: Path) -> None:
    """What the library writes from the same description reads back; unknown fields are skipped."""
    message = openfl._model_proto()()
    item = message.tensors.add(
        name="w", round_number=2, lossless=True, data_bytes=np.ones(2, "<f4").tobytes()
    )
    item.transformer_metadata.add(int_list=[2])
    (tmp_path / "a").write_bytes(message.SerializeToString() + field(15, b"new"))
    assert torch.equal(read_checkpoint(tmp_path / "a").tensors["w"], torch.ones(2))


LOSSY: dict[str, list[Stage]] = {
    "EDEN": [({0: 1.5, 1: 12.0, 2: 9.0}, (3, 4))],
    "k-means": [({0: -0.1, 1: 0.1}, (3, 4)), ({}, ())],
    "STC": [({}, (3, 4)), ({0: 0.0, 1: 0.2}, ()), ({}, ())],
    "4-stage": [({}, (3, 4))] * 4,
    "0-stage": [],
}


@pytest.mark.parametrize("pipeline", LOSSY)
def test_lossy_pipelines_are_named(tmp_path: Path, pipeline: str) -> None:
    data = raw_tensor("fc.bias", WEIGHTS["fc.bias"]) + named_tensor(
        "fc.weight", b"\x1f\x8b..", LOSSY[pipeline]
    )
    (tmp_path / "a.pbuf").write_bytes(data)
    message = refused(tmp_path / "a.pbuf")
    assert pipeline in message and "fc.weight" in message and "fx model save" in message


@pytest.mark.parametrize("shape", [(3, 5), (-3, -4), (2**31 - 1, 2**31 - 1), ()])
def test_shape_that_does_not_fit_the_bytes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    numbers = [number % 2**64 for number in shape]  # negative numbers are written as 64-bit ones
    (tmp_path / "a").write_bytes(named_tensor("w", bytes(48), [({}, numbers)]))
    assert "float32 of shape" in refused(tmp_path / "a")


def test_one_name_twice(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(raw_tensor("w", np.ones(2)) * 2)
    assert "two tensors" in refused(tmp_path / "a")


def test_rounds_that_differ_are_not_stated(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(raw_tensor("w", np.ones(2)) + raw_tensor("v", np.ones(2), round_number=4))
    assert read_checkpoint(tmp_path / "a").metadata == {}


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_openfl(tmp_path / "a.pbuf", WEIGHTS)
    real = builtins.__import__

    def absent(name: str, *more: Any, **keywords: Any) -> Any:
        if name.startswith("google"):
            raise ImportError(name)
        return real(name, *more, **keywords)

    openfl._model_proto.cache_clear()
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UsageError, match=r"rlu-cli\[openfl\]"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\n\n\n\n\n\n\n\nplain text that begins with empty lines\n", FileKind.UNKNOWN),
        (b"\n", FileKind.UNKNOWN),
        (b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\n", FileKind.UNKNOWN),
        (b"\n\x20\n\x03\x01\x02\x03" + bytes(40), FileKind.UNKNOWN),
        (b"\n\x20\n\x03fc\xff" + bytes(40), FileKind.UNKNOWN),
        (b"\n\x20\n\x03fc.\x10\x03" + bytes(40), FileKind.OPENFL),
    ],
)
def test_told_from_other_files(tmp_path: Path, data: bytes, kind: FileKind) -> None:
    (tmp_path / "a").write_bytes(data)
    assert sniff(tmp_path / "a") is kind


def test_cut_or_changed_files(tmp_path: Path) -> None:
    data = write_openfl(tmp_path / "a", WEIGHTS).read_bytes()
    chance = random.Random(0)
    read = 0
    for at in range(0, 400):
        changed = bytearray(data[: chance.randrange(8, len(data))] if at % 2 else data)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        (tmp_path / "b").write_bytes(changed)
        try:
            read += bool(read_checkpoint(tmp_path / "b").tensors)
        except RluError as error:
            assert "\n" not in str(error) and "\x1b" not in str(error)
    assert 0 < read < 400
