"""Only what is looked at is read: the output layer of a large file costs the memory of an output layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_tools import process
from safetensors.torch import save_file
from torch import Tensor

from rlu_cli.audit.network import check_finite
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import read_checkpoint

State = dict[str, Tensor]


def _sharded(path: Path, state: State) -> None:
    for name, tensor in state.items():
        save_file({name: tensor}, path.parent / f"{path.name}-{name}")
    path.write_text(json.dumps({"weight_map": {name: f"{path.name}-{name}" for name in state}}))


WRITERS: dict[str, Callable[[Path, State], None]] = {
    "safetensors": lambda path, state: save_file(state, path),
    "sharded": _sharded,
    "torch": lambda path, state: torch.save({"state_dict": state, "epoch": 3}, path),
    "wrapped": lambda path, state: torch.save({f"_orig_mod.module.{k}": v for k, v in state.items()}, path),
}

MEASURE = """
import resource, sys
from rlu_cli.audit.network import check_finite, read_head
from rlu_cli.files.checkpoint import read_checkpoint
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def read(path):
    found = read_checkpoint(path)
    check_finite({"fc.bias": found.tensors["fc.bias"]}, where=path)
    read_head(found.tensors, "fc", where=path)
read(sys.argv[1])
before = peak()
read(sys.argv[2])
print((peak() - before) // 1024)
"""


@pytest.mark.parametrize("form", WRITERS)
def test_peak_memory_is_that_of_the_head(tmp_path: Path, form: str) -> None:
    pytest.importorskip("resource")
    head = {"fc.weight": torch.ones(3, 4), "fc.bias": torch.ones(3)}
    WRITERS[form](tmp_path / "small", head)
    WRITERS[form](tmp_path / "big", {**head, "conv.weight": torch.ones(160 * 2**20 // 4)})
    grown = process(tmp_path / "small", tmp_path / "big", python=MEASURE)
    assert grown.code == 0, grown.err
    assert int(grown.out) < 40, "MiB, for a file of 160"


def test_not_a_number_is_found_in_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rlu_cli.audit.network._PART", 4)
    for place in range(10):
        tensor = torch.zeros(5, 2)
        tensor[place // 2, place % 2] = torch.nan
        torch.save({"w": tensor.T}, tmp_path / f"{place}.pt")
        with pytest.raises(MismatchError, match="NaN"):
            check_finite(read_checkpoint(tmp_path / f"{place}.pt").tensors, where="file")
