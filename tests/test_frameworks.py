"""Real frameworks write, `rlu` reads: a Flower simulation, and what NVFlare, OpenFL and APPFL save.

Slow, and only where they are installed: in this environment, or in folders that ``RLU_FRAMEWORKS`` lists as
``PYTHONPATH`` would, since their requirements disagree with each other's. To make such a folder:
``pip install --target DIR 'flwr[simulation]'``. Each framework runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_tools import AUX, call
from real_rounds import TRAINING, wrong

from rlu_cli.errors import FileError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.models import build_model, parse_spec

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parent
FOLDERS = [folder for folder in os.environ.get("RLU_FRAMEWORKS", "").split(os.pathsep) if folder]
ARCH = "lenet5:activation=relu,image_size=28,in_channels=1,num_classes=10"


def run_script(name: str, framework: str, *arguments: object) -> None:
    """Run one of tests/frameworks in a process that finds the framework, or skip."""
    there = [folder for folder in FOLDERS if (Path(folder) / framework).is_dir()]
    if not there and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; RLU_FRAMEWORKS can name its folder")
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *FOLDERS])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(TESTS / "frameworks" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet, "PYTHONPATH": path},
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], Path]:
    """A state dict on disk, the same in memory, and a folder for what a framework makes of it."""
    torch.manual_seed(0)
    state = build_model(parse_spec(ARCH), allow_user_code=False).state_dict()
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "out").mkdir()
    return tmp_path / "state.pt", state, tmp_path / "out"


def assert_same(path: Path, state: dict[str, torch.Tensor]) -> None:
    found = read_checkpoint(path).tensors
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


def refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    return str(caught.value)


def test_flower_simulation(tmp_path: Path) -> None:
    """Both clients of both rounds, from torch files and from arrays without names."""
    run_script("flower_simulation.py", "flwr", tmp_path)
    flags = ["--aux", AUX, "--arch", ARCH, "--normalize", "none", "--class-order", "string", *TRAINING]
    for round_ in (1, 2):
        for client in (0, 1):
            stem = f"client_{client}_round_{round_}"
            true = json.loads((tmp_path / f"{stem}.json").read_text())["counts"]
            counts = []
            for suffix in (".pt", ".npz"):
                pair = [
                    "--global",
                    tmp_path / f"model_{round_ - 1}{suffix}",
                    "--local",
                    tmp_path / f"{stem}{suffix}",
                ]
                counts.append(call("recover", *pair, *flags).document["counts"])
            assert counts[0] == counts[1]
            assert wrong(counts[0], true) <= 2, (counts[0], true)


def test_nvflare(saved: tuple[Path, dict[str, torch.Tensor], Path]) -> None:
    source, state, out = saved
    run_script("nvflare_files.py", "nvflare", source, out)
    assert_same(out / "FL_global_model.pt", state)
    assert_same(out / "diff.pt", {name: torch.full_like(tensor, 0.5) for name, tensor in state.items()})
    for name in ("SRV_FL_global_model.pt", "diff.pt.metadata"):
        assert "NVFlare FOBS file" in refused(out / name)


def test_openfl(saved: tuple[Path, dict[str, torch.Tensor], Path]) -> None:
    pytest.importorskip("google.protobuf")
    source, state, out = saved
    run_script("openfl_models.py", "openfl", source, out)
    assert_same(out / "raw.pbuf", state)
    names = {"kc": "k-means (KC)", "skc": "STC or SKC", "stc": "STC or SKC", "eden": "EDEN"}
    for path in sorted(out.glob("*.pbuf")):
        if path.stem != "raw":
            assert names[path.stem] in refused(path)
    assert (out / "stc.pbuf").exists() and (out / "eden.pbuf").exists()


def test_appfl(saved: tuple[Path, dict[str, torch.Tensor], Path]) -> None:
    source, state, out = saved
    run_script("appfl_models.py", "appfl", source, out)
    assert_same(out / "model_Round_3.pt", state)
    assert_same(out / "client_1" / "model_Round_3.pt", state)
    assert "re-save the weights alone" in refused(out / "whole_Round_3.pt")
