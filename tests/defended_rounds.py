"""Sample rounds whose update is defended before it is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cli_tools import AUX, QUICK, SAMPLES

from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.simulation.defences import Defence


def norm(name: str = "trained_m1") -> float:
    before, after = (
        read_checkpoint(SAMPLES / name / f"{part}.safetensors").tensors for part in ("global", "client_0")
    )
    return float(torch.stack([(after[name] - before[name]).square().sum() for name in before]).sum().sqrt())


def defended(
    folder: Path, defence: Defence, name: str = "trained_m1", *, delta: bool = False, **said: object
) -> list[Any]:
    """Flags of a sample round whose update is defended, in a file of weights or of the update alone."""
    paths = [SAMPLES / name / f"{part}.safetensors" for part in ("global", "client_0")]
    before, after = (read_checkpoint(path) for path in paths)
    shapes = {key: value.shape for key, value in before.tensors.items()}
    flat = [torch.cat([found.tensors[key].flatten() for key in shapes]) for found in (before, after)]
    sent = (0 if delta else flat[0]) + defence.apply(flat[1] - flat[0], torch.Generator().manual_seed(0))
    parts = torch.split(sent, [shape.numel() for shape in shapes.values()])
    tensors = {key: part.reshape(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}
    local = folder / "client_0.safetensors"
    metadata = {**after.metadata, **{f"fl.{key}": str(value) for key, value in said.items()}}
    save_safetensors(local, tensors, metadata)
    update = ["--update", "delta"] if delta else []
    return ["--global", paths[0], "--local", local, "--aux", AUX, *QUICK, *update]
