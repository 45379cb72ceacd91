"""Small networks of the kinds that users bring: BatchNorm, GroupNorm, dropout, heads of several forms.

rlu recover --arch benchmarks/networks.py:small_cnn:norm=group,head=conv,bias=false …
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GlobalMean(nn.Module):
    """The mean over positions: (B, C, H, W) to (B, C)."""

    def forward(self, maps: Tensor) -> Tensor:
        return torch.mean(maps, dim=(2, 3))


def small_cnn(
    *,
    num_classes: int = 62,
    norm: str = "batch",
    head: str = "linear",
    bias: bool = True,
    dropout: float = 0.0,
    width: int = 24,
) -> nn.Module:
    """Three strided convolutions with BatchNorm, GroupNorm or nothing, average pooling, an output layer.

    head : ``linear``, or ``conv``: a 1x1 convolution before the pooling
    dropout : probability, before the output layer
    """
    layers: list[nn.Module] = []
    channels = 3
    for factor in (1, 2, 4):
        layers += [nn.Conv2d(channels, factor * width, 3, stride=2, padding=1, bias=norm == "none")]
        channels = factor * width
        layers += _norm(norm, channels)
        layers.append(nn.ReLU())
    if dropout:
        layers.append(nn.Dropout(dropout))
    if head == "conv":
        layers += [nn.Conv2d(channels, num_classes, 1, bias=bias), GlobalMean()]
    else:
        layers += [GlobalMean(), nn.Linear(channels, num_classes, bias=bias)]
    return nn.Sequential(*layers)


def mlp(*, num_classes: int = 10, inputs: int = 64, width: int = 100, depth: int = 2) -> nn.Module:
    """``depth`` hidden layers of ``width`` on the pixels, with ReLU."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, num_classes))


def small_vgg(*, num_classes: int = 10, width: int = 32, norm: str = "batch") -> nn.Module:
    """Eight convolutions in pairs, each pair halved by max pooling, as in VGG; for 32x32 pixels."""
    layers: list[nn.Module] = []
    channels = 3
    for factor in (1, 2, 4, 4):
        for _ in range(2):
            layers.append(nn.Conv2d(channels, factor * width, 3, padding=1))
            channels = factor * width
            layers += [*_norm(norm, channels), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 4, num_classes))


def _norm(kind: str, channels: int) -> list[nn.Module]:
    if kind == "batch":
        return [nn.BatchNorm2d(channels)]
    return [nn.GroupNorm(8, channels)] if kind == "group" else []


def fedavg_cnn(*, num_classes: int = 10, channels: int = 1, size: int = 28) -> nn.Module:
    """McMahan et al.'s (2017) network for MNIST: two 5x5 convolutions of 32 and 64 channels, 512 units."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (size // 4) ** 2, 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )
