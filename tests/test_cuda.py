"""The commands on a CUDA device: the same counts as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlu_cli.audit.devices import choose_device
from rlu_cli.core.methods import METHODS
from tests.cli_tools import AUX, SAMPLES, call, sample, tensors

ROUNDS = ("untrained_m1", "untrained_m10", "trained_m1", "trained_m10")


def test_convolutions_on_cuda_keep_all_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    backends = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = True
        assert choose_device("cpu") == "cpu"
        assert all(backend.allow_tf32 for backend in backends)
        assert choose_device("auto") == "cuda"
        assert not any(backend.allow_tf32 for backend in backends)
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


@pytest.mark.cuda
@pytest.mark.parametrize("round_", ROUNDS)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "random"])
def test_recover_counts_the_same(round_: str, method: str) -> None:
    cpu, cuda = on_both(*sample(round_), "--method", method)
    assert (cpu["device"], cuda["device"]) == ("cpu", "cuda")
    assert cuda["counts"] == cpu["counts"]
    estimates = [[row["estimate"] for row in document["classes"]] for document in (cpu, cuda)]
    assert estimates[1] == pytest.approx(estimates[0], abs=0.01)


@pytest.mark.cuda
def test_posterior_search_counts_the_same() -> None:
    cpu, cuda = on_both(*sample("trained_m10"), "--search-iterations", "5")
    assert cuda["counts"] == cpu["counts"]


@pytest.mark.cuda
def test_statistics_of_one_device_serve_the_other(tmp_path: Path) -> None:
    start = ["--global", SAMPLES / "trained_m1" / "global.safetensors", "--aux", AUX]
    found = []
    for written, read in (("cpu", "cuda"), ("cuda", "cpu")):
        stats = tmp_path / f"{written}.safetensors"
        assert call("estimate-logits", *start, "--device", written, "-o", stats).code == 0
        flags = [*sample("trained_m1", 1, aux=None), "--stats", stats, "--device", read]
        found.append(call("recover", *flags).document["counts"])
    assert found[0] == found[1]


@pytest.mark.cuda
def test_simulations_train_alike(tmp_path: Path) -> None:
    final = []
    for device in ("cpu", "cuda"):
        root = tmp_path / device
        flags = ["--data", "digits", "--rounds", "2", "--clients", "3", "--steps", "3", "--batch-size", "16"]
        outcome = call("simulate", *flags, "--lr", "0.05", "--device", device, "-o", root)
        assert outcome.code == 0, outcome.err
        final.append(tensors(root / "final.safetensors"))
    for name, tensor in final[0].items():
        np.testing.assert_allclose(final[1][name].numpy(), tensor.numpy(), rtol=0, atol=1e-5)


def on_both(*arguments: object) -> list[dict[str, Any]]:
    """What `rlu recover` finds on the CPU and on the CUDA device."""
    return [call("recover", *arguments, "--device", device).document for device in ("cpu", "cuda")]
