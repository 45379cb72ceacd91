"""Rounds of real training, on the sample images, by networks of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cli_tools import AUX
from PIL import Image
from torch import Tensor, nn

LR, BATCH = 0.05, 32
TRAINING = ["--lr", LR, "--batch-size", BATCH, "--steps", 1]


def sample_images(channels: int, size: int) -> tuple[Tensor, Tensor]:
    """The sample images of all classes, pixels from 0 to 1 (M, C, H, W), and their labels in string order."""
    pixels, labels = [], []
    for label, folder in enumerate(sorted(AUX.iterdir())):
        for path in sorted(folder.iterdir()):
            grey = Image.open(path).convert("L").resize((size, size), Image.Resampling.BILINEAR)
            pixels.append(np.asarray(grey, dtype=np.float32) / 255)
            labels.append(label)
    images = torch.from_numpy(np.array(pixels))[:, None].repeat(1, channels, 1, 1)
    return images, torch.tensor(labels)


def batch(seed: int) -> Tensor:
    """Which images a client's batch holds: few classes, unevenly."""
    chance = np.random.default_rng(seed)
    shares = chance.dirichlet(np.full(10, 0.4))
    classes = chance.choice(10, BATCH, p=shares)
    return torch.from_numpy(classes * 30 + chance.integers(0, 30, BATCH))


def train_one_step(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """One step of SGD in training mode."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def make_round(
    folder: Path,
    model: nn.Module,
    *,
    channels: int,
    size: int,
    save: Callable[[nn.Module, Path], object] = lambda model, path: torch.save(model.state_dict(), path),
) -> tuple[Path, Path, list[int]]:
    """Train a client for one step; the paths of both checkpoints, and how many of each class it saw."""
    images, labels = sample_images(channels, size)
    chosen = batch(0)
    paths = folder / "global.pt", folder / "local.pt"
    save(model, paths[0])
    train_one_step(model, images[chosen], labels[chosen])
    save(model, paths[1])
    return *paths, torch.bincount(labels[chosen], minlength=10).tolist()


def wrong(counts: list[int], true: list[int]) -> int:
    """How many samples are counted for another class."""
    return sum(abs(a - b) for a, b in zip(counts, true, strict=True)) // 2
