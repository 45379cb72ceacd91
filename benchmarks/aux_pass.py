"""Peak memory and time of the passes over many auxiliary images: a ResNet-50 of 200 classes.

    python benchmarks/aux_pass.py                       (20,000 images: about four minutes on one core)
    python benchmarks/aux_pass.py --per-class 2 6 100

Makes class folders of 64x64 JPEG files (noise, blurred: only their number and size matter), a global model
and one client's with random weights, and runs `rlu recover` with two local steps in a process of its own:
decoding, a pass of each model under batch statistics, Monte Carlo with 10,000 samples a class. The peak is
the process's own, torch and all (on Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import PEAK, machine, write_ndjson
from PIL import Image

from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.models import ResNet50

RESULTS = Path(__file__).parent / "results" / "aux_pass.ndjson"
CLASSES, SIDE = 200, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-class", type=int, nargs="+", default=[100])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batch-norm", default="batch")
    arguments = parser.parse_args()
    rows = []
    for per_class in arguments.per_class:
        rows.append(measure(per_class, arguments.batch_size, arguments.batch_norm))
        print(f"{machine()}\n{rows[-1]}", flush=True)
    write_ndjson(RESULTS, rows)


def measure(per_class: int, batch_size: int, batch_norm: str) -> dict[str, object]:
    """Seconds and peak memory of one call."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_images(root / "aux", per_class)
        flags = make_round(root, batch_size)
        flags += ["--aux", root / "aux", "--batch-norm", batch_norm]
        command = [sys.executable, "-c", PEAK, "recover", *flags]
        start = time.perf_counter()
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        spent = time.perf_counter() - start
    return {
        "images": json.loads(done.stdout)["inputs"]["aux"]["images"],
        "batch_size": batch_size,
        "batch_norm": batch_norm,
        "seconds": spent,
        "peak_mb": int(done.stderr.split()[-1]) / 1024,
    }


def make_images(root: Path, per_class: int) -> None:
    """Blurred noise, of the size on disk that photographs have."""
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        folder = root / f"{label:03d}"
        folder.mkdir(parents=True)
        for number in range(per_class):
            small = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            image = Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            image.save(folder / f"{number:03d}.jpg", quality=90)


def make_round(root: Path, batch_size: int) -> list[object]:
    """A global model, and a client's whose output layer has moved."""
    torch.manual_seed(0)
    state = ResNet50(num_classes=CLASSES, image_size=SIDE).state_dict()
    about = {"fl.arch": f"resnet50:num_classes={CLASSES},image_size={SIDE}", "fl.normalize": "half"}
    save_safetensors(root / "global.safetensors", state, about)
    step = torch.randn(CLASSES)
    moved = {**state, "fc.bias": state["fc.bias"] + 1e-4 * (step - step.mean())}
    moved["fc.weight"] = state["fc.weight"] + 1e-5 * torch.randn_like(state["fc.weight"])
    training = {"fl.lr": "0.01", "fl.batch_size": str(batch_size), "fl.steps": "2"}
    save_safetensors(root / "client.safetensors", moved, training)
    return ["--global", root / "global.safetensors", "--local", root / "client.safetensors"]


if __name__ == "__main__":
    main()
