"""Memory, free and in all, from what Linux writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlu_cli.audit import memory


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test writes what Linux would."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    2000 kB\n", None, None, 2_048_000),
        ("MemAvailable: 2000 kB\n", "max", "5", 2_048_000),
        ("MemAvailable: 2000 kB\n", "1000000", "400000", 600_000),
        ("MemAvailable: 2000 kB\n", "1000000", "1400000", 0),
        ("MemTotal: 9 kB\n", "5000", "1000", 4000),
        ("MemAvailable: lots\n", None, None, 4 * 2**30),
        (None, None, None, 4 * 2**30),
    ],
)
def test_the_least_of_what_is_known_counts(
    written: Path, meminfo: str | None, limit: str | None, used: str | None, expected: int
) -> None:
    for name, text in (("meminfo", meminfo), ("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (written / name).write_text(text, encoding="ascii")
    assert memory.free_bytes() == expected
    assert memory.bytes_to_keep() == min(expected // 8, 2**32)


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable: 2 kB\n", None, 9216),
        ("MemTotal: 9 kB\n", "max", 9216),
        ("MemTotal: 9 kB\n", "1000", 1000),
        (None, None, 256 * 2**30),
    ],
)
def test_what_there_is_in_all(written: Path, meminfo: str | None, limit: str | None, expected: int) -> None:
    for name, text in (("meminfo", meminfo), ("memory.max", limit)):
        if text is not None:
            (written / name).write_text(text, encoding="ascii")
    assert memory.total_bytes() == expected


def test_this_machine_has_some() -> None:
    assert 2**20 < memory.free_bytes() <= memory.total_bytes() < 2**50


@pytest.mark.cuda
def test_a_gpu_says_its_own() -> None:
    assert 0 < memory.free_bytes("cuda") <= memory.total_bytes("cuda")
    assert memory.total_bytes("cuda") <= torch.cuda.get_device_properties(0).total_memory
