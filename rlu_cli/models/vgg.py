"""VGG16 (Simonyan and Zisserman, "Very deep convolutional networks…", ICLR 2015), in its CIFAR form.

The thirteen convolutions of configuration D, then one linear layer on 512 features in place of the three
wide ones, as CIFAR code bases have it. Parameter names are those of kuangliu/pytorch-cifar.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlu_cli.errors import UsageError
from rlu_cli.models.activations import make_activation
from rlu_cli.models.arguments import as_count, as_size

CONFIGURATION_D = (2, 64), (2, 128), (3, 256), (3, 512), (3, 512)
"""(number of convolutions, their channels) of each stage; a 2x2 max pooling ends every stage."""

SMALLEST_SIDE = 2 ** len(CONFIGURATION_D)


class VGG16(nn.Module):
    """Maps images (B, C, H, W) to logits (B, N); the embedding before ``classifier`` is (B, 512).

    Global average pooling ends ``features``: it changes nothing at 32x32, where the map is 1x1 already,
    and lets larger images through with the same parameters. ``image_size`` is a hint for the caller only.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        activation: str = "relu",
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = as_count("num_classes", num_classes)
        self.in_channels = as_count("in_channels", in_channels)
        self.image_size = as_size(image_size, minimum=SMALLEST_SIDE)
        if not isinstance(batch_norm, bool):
            raise UsageError(f"batch_norm must be true or false, got {batch_norm!r}.")
        self.features = _features(self.in_channels, activation, batch_norm)
        self.classifier = nn.Linear(CONFIGURATION_D[-1][1], self.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        embedding = torch.flatten(self.features(images), 1)  # (B, 512)
        logits: Tensor = self.classifier(embedding)  # (B, N)
        return logits


def _features(in_channels: int, activation: str, batch_norm: bool) -> nn.Sequential:
    """The convolutional part: (B, C, H, W) to (B, 512, 1, 1)."""
    layers: list[nn.Module] = []
    for convolutions, channels in CONFIGURATION_D:
        for _ in range(convolutions):
            layers.append(nn.Conv2d(in_channels, channels, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(make_activation(activation))
            in_channels = channels
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    layers.append(nn.AdaptiveAvgPool2d((1, 1)))
    return nn.Sequential(*layers)
