"""Which device computes."""

from __future__ import annotations

import torch

from rlu_cli.errors import UsageError


def choose_device(name: str) -> str:
    """``auto`` becomes the best device there is; any other name is checked.

    CUDA devices are set to compute in full float32: PyTorch's default, TF32 in convolutions, keeps three
    digits, and counts would depend on the device.

    Raises
    ------
    UsageError
        No such device here.
    """
    chosen = _existing(name)
    if chosen.startswith("cuda"):
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    return chosen


def _existing(name: str) -> str:
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return name
    if kind == "mps" and not index and torch.backends.mps.is_available():
        return name
    if kind == "cuda" and (not index or index.isdecimal()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) < count:
            return name
        raise UsageError(
            f"--device {name}: expected one of {count} CUDA devices, found no such one; use auto or cpu"
        )
    raise UsageError(f"--device {name}: expected auto, cpu, cuda, cuda:N or mps, each where it exists here")
