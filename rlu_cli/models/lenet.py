"""LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998).

In the form that is common today and that the RLU paper trains: 2x2 max pooling instead of trainable
subsampling, full connections between the two convolutions, a linear output layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlu_cli.errors import UsageError
from rlu_cli.models.activations import make_activation
from rlu_cli.models.arguments import as_count, as_size

KERNEL = 5
CONV_CHANNELS = (6, 16)
NATIVE_SIDE = 32
"""LeCun's network reads 32x32 pixels; smaller digits are zero padded towards it."""


def default_padding(image_size: tuple[int, int]) -> int:
    """Zero padding of the first convolution: 2 below LeCun's 32 pixels, else none."""
    return 2 if min(image_size) < NATIVE_SIDE else 0


def feature_map(image_size: tuple[int, int], padding: int) -> tuple[int, int]:
    """Height and width after both convolutions and poolings; not positive when the image is too small."""
    height, width = (((side + 2 * padding - KERNEL + 1) // 2 - KERNEL + 1) // 2 for side in image_size)
    return height, width


class LeNet5(nn.Module):
    """Maps images (B, C, H, W) to logits (B, N); the embedding before ``fc3`` is (B, 84).

    ``padding`` is the first convolution's; None means 2 for images below 32 pixels and 0 otherwise, so
    both 28x28 and 32x32 images give the classical 16x5x5 = 400 features.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        activation: str = "relu",
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = as_count("num_classes", num_classes)
        self.in_channels = as_count("in_channels", in_channels)
        self.image_size = as_size(image_size)
        pad = default_padding(self.image_size) if padding is None else as_count("padding", padding, minimum=0)
        height, width = feature_map(self.image_size, pad)
        if height < 1 or width < 1:
            raise UsageError(
                f"lenet5 can't read images of {self.image_size[0]}x{self.image_size[1]} pixels with padding "
                f"{pad}: its two convolutions need at least {16 - 2 * pad} pixels a side."
            )
        self.conv1 = nn.Conv2d(self.in_channels, CONV_CHANNELS[0], KERNEL, padding=pad)
        self.conv2 = nn.Conv2d(*CONV_CHANNELS, KERNEL)
        self.fc1 = nn.Linear(CONV_CHANNELS[1] * height * width, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, self.num_classes)
        self.pool = nn.MaxPool2d(2)
        self.activation = make_activation(activation)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.pool(self.activation(self.conv1(images)))  # (B, 6, ., .)
        maps = self.pool(self.activation(self.conv2(maps)))  # (B, 16, h, w)
        hidden = self.activation(self.fc1(torch.flatten(maps, 1)))  # (B, 120)
        embedding = self.activation(self.fc2(hidden))  # (B, 84)
        logits: Tensor = self.fc3(embedding)  # (B, N)
        return logits
