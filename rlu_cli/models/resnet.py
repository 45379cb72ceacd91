"""Residual networks (He et al., "Deep residual learning for image recognition", CVPR 2016).

ResNet32 is the CIFAR form of section 4.2 with parameter-free shortcuts (option A) and the names of
akamaster/pytorch_resnet_cifar10; ResNet50 is the ImageNet form with torchvision's names and shapes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from rlu_cli.errors import UsageError
from rlu_cli.models.activations import make_activation
from rlu_cli.models.arguments import as_count, as_size

STEMS = ("imagenet", "small")


class ResNet32(nn.Module):
    """Maps images (B, C, H, W) to logits (B, N); the embedding before ``linear`` is (B, 64).

    Works at any image size (the last map is averaged); ``image_size`` is a hint for the caller only.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.num_classes = as_count("num_classes", num_classes)
        self.in_channels = as_count("in_channels", in_channels)
        self.image_size = as_size(image_size)
        self.conv1 = _conv3x3(self.in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _basic_layer(16, 16, 1, activation)
        self.layer2 = _basic_layer(16, 32, 2, activation)
        self.layer3 = _basic_layer(32, 64, 2, activation)
        self.linear = nn.Linear(64, self.num_classes)
        self.activation = make_activation(activation)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.activation(self.bn1(self.conv1(images)))  # (B, 16, H, W)
        maps = self.layer3(self.layer2(self.layer1(maps)))  # (B, 64, H/4, W/4)
        logits: Tensor = self.linear(maps.mean(dim=(2, 3)))  # (B, N)
        return logits


class ResNet50(nn.Module):
    """Maps images (B, C, H, W) to logits (B, N); the embedding before ``fc`` is (B, 2048).

    ``stem="imagenet"`` is torchvision's: a 7x7 convolution of stride 2, then a 3x3 max pooling of stride 2.
    ``stem="small"`` is a 3x3 convolution of stride 1 and no pooling, for images of 32 or 64 pixels.
    Works at any image size; ``image_size`` is a hint for the caller only.
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 224,
        activation: str = "relu",
        stem: str = "imagenet",
    ) -> None:
        super().__init__()
        self.num_classes = as_count("num_classes", num_classes)
        self.in_channels = as_count("in_channels", in_channels)
        self.image_size = as_size(image_size)
        if stem not in STEMS:
            raise UsageError(f"Unknown stem {stem!r} of resnet50: choose one of {', '.join(STEMS)}.")
        self.maxpool: nn.Module
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(self.in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        else:
            self.conv1 = _conv3x3(self.in_channels, 64)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(64)
        self.activation = make_activation(activation)
        self.layer1 = _bottleneck_layer(64, 64, 3, 1, activation)
        self.layer2 = _bottleneck_layer(256, 128, 4, 2, activation)
        self.layer3 = _bottleneck_layer(512, 256, 6, 2, activation)
        self.layer4 = _bottleneck_layer(1024, 512, 3, 2, activation)
        self.fc = nn.Linear(512 * Bottleneck.expansion, self.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        maps = self.maxpool(self.activation(self.bn1(self.conv1(images))))  # (B, 64, ., .)
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))  # (B, 2048, h, w)
        logits: Tensor = self.fc(maps.mean(dim=(2, 3)))  # (B, N)
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (B, in, H, W) to (B, out, H/stride, W/stride)."""

    def __init__(self, in_planes: int, planes: int, stride: int, activation: str) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_planes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.activation = make_activation(activation)
        self.stride = stride
        self.padding = (planes - in_planes) // 2

    def forward(self, maps: Tensor) -> Tensor:
        residual = self.activation(self.bn1(self.conv1(maps)))
        residual = self.bn2(self.conv2(residual))
        shortcut = maps[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))  # option A
        out: Tensor = self.activation(residual + shortcut)
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut: (B, in, H, W) to (B, 4·planes, H/stride, W/stride).

    The 3x3 convolution has the stride, as in torchvision ("ResNet v1.5").
    """

    expansion = 4

    def __init__(self, in_planes: int, planes: int, stride: int, activation: str) -> None:
        super().__init__()
        out_planes = planes * self.expansion
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv3x3(planes, planes, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, out_planes, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_planes)
        self.activation = make_activation(activation)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_planes != out_planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_planes),
            )

    def forward(self, maps: Tensor) -> Tensor:
        residual = self.activation(self.bn1(self.conv1(maps)))
        residual = self.activation(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        shortcut = maps if self.downsample is None else self.downsample(maps)
        out: Tensor = self.activation(residual + shortcut)
        return out


def _conv3x3(in_planes: int, planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)


def _basic_layer(in_planes: int, planes: int, stride: int, activation: str) -> nn.Sequential:
    """Five basic blocks: 2·5·3 + 2 = 32 layers in all."""
    first = BasicBlock(in_planes, planes, stride, activation)
    return nn.Sequential(first, *(BasicBlock(planes, planes, 1, activation) for _ in range(4)))


def _bottleneck_layer(
    in_planes: int, planes: int, blocks: int, stride: int, activation: str
) -> nn.Sequential:
    first = Bottleneck(in_planes, planes, stride, activation)
    width = planes * Bottleneck.expansion
    return nn.Sequential(first, *(Bottleneck(width, planes, 1, activation) for _ in range(blocks - 1)))
