"""Reading the output layer alone: the same numbers, the shapes of all the rest, and no memory for it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import process
from safetensors.torch import save_file
from torch import Tensor

from rlu_cli.audit.network import check_finite, check_same_network, read_head
from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.checkpoint import read_checkpoint

State = dict[str, Tensor]


def is_head(name: str) -> bool:
    return name in {"fc.weight", "fc.bias"}


def _sharded(path: Path, state: State) -> None:
    for name, tensor in state.items():
        save_file({name: tensor}, path.parent / f"{name}.shard")
    path.write_text(json.dumps({"weight_map": {name: f"{name}.shard" for name in state}}))


def _npz(path: Path, state: State, save: Callable[..., None] = np.savez) -> None:
    with path.open("wb") as handle:
        save(handle, **{name: tensor.numpy() for name, tensor in state.items()})


WRITERS: dict[str, Callable[[Path, State], None]] = {
    "safetensors": lambda path, state: save_file(state, path),
    "sharded": _sharded,
    "torch": lambda path, state: torch.save({"state_dict": state, "epoch": 3}, path),
    "wrapped": lambda path, state: torch.save({f"_orig_mod.module.{k}": v for k, v in state.items()}, path),
    "legacy": lambda path, state: torch.save(state, path, _use_new_zipfile_serialization=False),
    "npz": _npz,
    "npz-compressed": lambda path, state: _npz(path, state, np.savez_compressed),
    "npz-wrapped": lambda path, state: _npz(path, {f"module.{k}": v for k, v in state.items()}),
}


@pytest.fixture
def state() -> State:
    torch.manual_seed(0)
    return {
        "conv.weight": torch.randn(2, 1, 3, 3),
        "bn.num_batches_tracked": torch.tensor(7),
        "half": torch.randn(4).half(),
        "fc.weight": torch.randn(3, 4),
        "fc.bias": torch.randn(3),
    }


@pytest.mark.parametrize("form", WRITERS)
def test_head_alone(tmp_path: Path, state: State, form: str) -> None:
    path = tmp_path / "checkpoint"
    WRITERS[form](path, state)
    whole, part = read_checkpoint(path), read_checkpoint(path, only=is_head)
    assert list(part.tensors) == list(whole.tensors)
    assert (part.notes, part.prefix, part.format) == (whole.notes, whole.prefix, whole.format)
    for name, tensor in part.tensors.items():
        assert (tensor.shape, tensor.dtype) == (state[name].shape, state[name].dtype), name
        assert tensor.is_meta != is_head(name)
    check_same_network(whole.tensors, part.tensors, where=("a", "b"))
    check_finite(part.tensors, where=part.path)
    assert np.array_equal(read_head(part.tensors, "fc", where="").weight, state["fc.weight"].double().numpy())


def test_only_what_is_read_is_checked(tmp_path: Path, state: State) -> None:
    state["conv.weight"][0] = torch.nan
    save_file(state, tmp_path / "a")
    check_finite(read_checkpoint(tmp_path / "a", only=is_head).tensors, where="file")
    with pytest.raises(MismatchError, match=r"conv\.weight"):
        check_finite(read_checkpoint(tmp_path / "a").tensors, where="file")
    state["fc.bias"][2] = torch.inf
    save_file(state, tmp_path / "a")
    with pytest.raises(MismatchError, match=r"fc\.bias"):
        check_finite(read_checkpoint(tmp_path / "a", only=is_head).tensors, where="file")


def test_not_a_number_is_found_in_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rlu_cli.audit.network._PART", 4)
    for place in range(10):
        tensor = torch.zeros(5, 2)
        tensor[place // 2, place % 2] = torch.nan
        torch.save({"w": tensor.T}, tmp_path / f"{place}.pt")
        with pytest.raises(MismatchError, match="NaN"):
            check_finite(read_checkpoint(tmp_path / f"{place}.pt").tensors, where="file")


def test_weight_norm_head_is_joined_from_its_parts(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4))
    for layer in net:
        torch.nn.utils.parametrizations.weight_norm(layer)
    for form in ("torch", "npz"):
        WRITERS[form](tmp_path / form, net.state_dict())
        part = read_checkpoint(tmp_path / form, only=lambda name: name.startswith("1."))
        assert set(part.tensors) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert part.tensors["0.weight"].is_meta
        assert part.tensors["0.weight"].shape == (5, 3)
        torch.testing.assert_close(part.tensors["1.weight"], net[1].weight.detach())


def test_key_and_part_together(tmp_path: Path, state: State) -> None:
    both = {f"server.{k}": v for k, v in state.items()} | {f"client.{k}": v + 1 for k, v in state.items()}
    _npz(tmp_path / "a.npz", both)
    part = read_checkpoint(tmp_path / "a.npz", key="client", only=is_head)
    assert torch.equal(part.tensors["fc.bias"], state["fc.bias"] + 1)
    assert part.tensors["conv.weight"].is_meta
    with pytest.raises(FileError, match="'worker'"):
        read_checkpoint(tmp_path / "a.npz", key="worker", only=is_head)


def test_archive_without_names_is_read_whole(tmp_path: Path, state: State) -> None:
    np.savez(tmp_path / "a.npz", *[tensor.numpy() for tensor in state.values()])
    assert not any(t.is_meta for t in read_checkpoint(tmp_path / "a.npz", only=is_head).tensors.values())


def test_entries_not_asked_for_are_not_unpacked(tmp_path: Path, state: State) -> None:
    state["conv.weight"] = torch.ones(100_000)
    _npz(tmp_path / "a.npz", state)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        data = bytearray((tmp_path / "a.npz").read_bytes())
        at = data.index(archive.read("conv.weight.npy")) + 300_000
    data[at] ^= 255
    (tmp_path / "a.npz").write_bytes(data)
    assert torch.equal(read_checkpoint(tmp_path / "a.npz", only=is_head).tensors["fc.bias"], state["fc.bias"])
    with pytest.raises(FileError, match=r"conv\.weight is damaged"):
        read_checkpoint(tmp_path / "a.npz")


MEASURE = """
import resource, sys
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.audit.network import check_finite, read_head
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def read(path):
    part = read_checkpoint(path, only=lambda name: name in {"fc.weight", "fc.bias"})
    check_finite(part.tensors, where=part.path)
    read_head(part.tensors, "fc", where=path)
read(sys.argv[1])
before = peak()
read(sys.argv[2])
print((peak() - before) // 1024)
"""


@pytest.mark.parametrize("form", ["safetensors", "torch", "npz"])
def test_peak_memory_is_that_of_the_head(tmp_path: Path, state: State, form: str) -> None:
    pytest.importorskip("resource")
    WRITERS[form](tmp_path / "small", state)
    WRITERS[form](tmp_path / "big", {**state, "conv.weight": torch.ones(160 * 2**20 // 4)})
    grown = process(tmp_path / "small", tmp_path / "big", python=MEASURE)
    assert grown.code == 0, grown.err
    assert int(grown.out) < 40, "MiB, for a file of 160"
