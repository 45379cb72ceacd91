"""Ctrl-C, by a real signal to a real process, in each of the long parts of a call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, metadata, process, sample, write_safetensors
from PIL import Image

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")

ANNOUNCED = """
import importlib, signal, sys
from rlu_cli.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored

home, name = sys.argv.pop(1).split(":")
module = importlib.import_module(home)
real = getattr(module, name)

def announced(*args, **kwargs):
    setattr(module, name, real)
    print("here", flush=True)
    return real(*args, **kwargs)

setattr(module, name, announced)
main()
"""
"""The command line, but for one line on stdout when a function is first called."""

SLOW = """
from torch import nn

def slow():
    body = [nn.Conv2d(1, 64, 3, padding=1)]
    for _ in range(12):
        body += [nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
"""
LIMIT = 2.5
"""Seconds of computing from the signal to the end, of which the end of the interpreter takes a part. Seconds
on the clock would tell more of what else the machine does."""


def large_images(folder: Path) -> list[object]:
    """Some 40 s of decoding."""
    aux = folder / "aux"
    pixels = np.random.default_rng(0).integers(0, 256, (4500, 4500), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png", compress_level=1)
    for name in sorted(path.name for path in AUX.iterdir()):
        (aux / name).mkdir(parents=True)
        for number in range(20):
            os.link(folder / "image.png", aux / name / f"{number}.png")
    return [*sample("untrained_m1", aux=aux)]


def slow_network(folder: Path) -> list[object]:
    """Some 10 s of a pass."""
    (folder / "net.py").write_text(SLOW, encoding="utf-8")
    torch.manual_seed(0)
    space: dict[str, Callable[[], torch.nn.Module]] = {}
    exec(SLOW, space)
    state = space["slow"]().state_dict()
    source = Path(str(sample("untrained_m1")[1]))
    for name in ("global", "client"):
        moved = {**state, "27.bias": state["27.bias"] + (name == "client") * 1e-3 * (torch.arange(10) - 4.5)}
        about = metadata(source) | {"fl.lr": "0.01", "fl.batch_size": "32", "fl.steps": "1"}
        write_safetensors(folder / f"{name}.safetensors", moved, about)
    files: list[object] = ["--global", folder / "global.safetensors", "--local"]
    return [*files, folder / "client.safetensors", "--aux", AUX, "--arch", f"{folder / 'net.py'}:slow"]


def many_samples(folder: Path) -> list[object]:
    """Minutes of Monte Carlo."""
    return [*sample("untrained_m1"), "--samples", 50_000_000]


def computed(pid: int) -> float:
    """Seconds that a process has computed so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except FileNotFoundError:
        pytest.skip("no /proc here")
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


PARTS = {
    "decoding": ("rlu_cli.images.load:decode_pixels", large_images),
    "pass": ("rlu_cli.audit.probe:_forward", slow_network),
    "monte carlo": ("rlu_cli.core.moments:monte_carlo_confidence", many_samples),
}


@pytest.mark.parametrize("part", PARTS)
def test_130_at_once_and_nothing_half_written(tmp_path: Path, part: str) -> None:
    function, prepare = PARTS[part]
    output = tmp_path / "out"
    output.mkdir()
    (output / "old.json").write_text("old", encoding="utf-8")
    flags = [*prepare(tmp_path), "-o", output / "old.json", "--cache", output / "cache"]
    command = [sys.executable, "-c", ANNOUNCED, function, "recover", *map(str, flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            assert running.stdout.readline() == b"here\n", running.stderr.read()
            time.sleep(0.3)
            before = computed(running.pid)
            running.send_signal(signal.SIGINT)
            _, status, usage = os.wait4(running.pid, 0)
            running.returncode = code = os.waitstatus_to_exitcode(status)
            assert (code, running.stdout.read(), running.stderr.read()) == (130, b"", b"")
        finally:
            running.kill()
    assert usage.ru_utime + usage.ru_stime - before < LIMIT
    assert sorted(path.name for path in output.rglob("*")) == ["cache", "old.json"]
    assert (output / "old.json").read_text(encoding="utf-8") == "old"
    shutil.rmtree(tmp_path)  # some hundred megabytes, which pytest would keep


WRAPPED = """
import os, signal, sys, time
import safetensors

real = safetensors.safe_open

class Wrapping:
    def __init__(self, *arguments, **more):
        self.file = real(*arguments, **more)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *failure):
        return self.file.__exit__(*failure)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def get_tensor(self, name):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            raise safetensors.SafetensorError("Error: KeyboardInterrupt") from None

signal.signal(signal.SIGINT, signal.default_int_handler)
safetensors.safe_open = Wrapping
from rlu_cli.__main__ import main
main()
"""
"""The command line, where reading a tensor is interrupted and safetensors makes an error of its own of it."""


@pytest.mark.parametrize("more", [(), ("-vv",)])
def test_an_interrupt_that_a_library_wraps_is_no_damaged_file(more: tuple[str, ...]) -> None:
    outcome = process("inspect", sample("untrained_m1")[1], *more, python=WRAPPED)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")
