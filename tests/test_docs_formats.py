"""The table of frameworks and files in docs/formats.md is what happens, row by row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from framework_files import CHANGED, WRITERS, State

from rlu_cli.errors import FileError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.positional import name_positional

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")


def rows() -> dict[tuple[str, str], str]:
    """Framework and file (the first words in backticks), and the result."""
    table = PAGE.split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    found: dict[tuple[str, str], str] = {}
    for line in table.splitlines():
        framework, file, result = (cell.strip() for cell in line.strip("|").split(" | "))
        match = re.search(r"`([^`]+)`", file)
        assert match, line
        assert (framework, match[1]) not in found, line
        found[framework, match[1]] = result
    return found


@pytest.fixture
def state() -> State:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).state_dict()
    return {**net, "fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}


def test_every_row_has_a_writer_and_every_writer_a_row() -> None:
    assert set(rows()) == set(WRITERS)


@pytest.mark.parametrize("key", WRITERS, ids=lambda key: f"{key[0]}: {key[1]}")
def test_row(tmp_path: Path, state: State, key: tuple[str, str]) -> None:
    result = rows()[key]
    if key == ("OpenFL", "last.pbuf") or key == ("OpenFL", "best.pbuf"):
        pytest.importorskip("google.protobuf")
    path = WRITERS[key](tmp_path, state)
    if result.startswith("works"):
        found = dict(read_checkpoint(path).tensors)
        if "--arch" in result:
            found = name_positional(found, [(name, tuple(t.shape)) for name, t in state.items()])
        change = CHANGED.get(key, lambda tensor: tensor)
        assert set(found) == set(state)
        for name, tensor in state.items():
            assert torch.equal(found[name], change(tensor)), name
        if averaged := re.search(r"`--key (\w+)`", result):
            assert not read_checkpoint(path, key=averaged[1]).tensors["fc.weight"].any()
    else:
        match = re.fullmatch(r"refused: `([^`]+)`", result)
        assert match, result
        with pytest.raises(FileError) as caught:
            read_checkpoint(path)
        assert match[1] in str(caught.value)
        assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)
