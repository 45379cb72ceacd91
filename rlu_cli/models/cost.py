"""How much work a network is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def multiply_adds(model: nn.Module, image: Tensor) -> int:
    """Multiplications of one image's forward pass in convolutions and linear layers.

    Counted from the sizes of weights and outputs: a number of weights per output value.

    Parameters
    ----------
    image : shape (1, C, H, W)
    """

    def count(layer: nn.Module, output: Tensor) -> int:
        assert isinstance(layer.weight, Tensor)
        return output.numel() * layer.weight[0].numel()

    layers = [layer for layer in model.modules() if isinstance(layer, (nn.modules.conv._ConvNd, nn.Linear))]
    return _summed(model, image, layers, count)


def activation_bytes(model: nn.Module, image: Tensor) -> int:
    """What one image's training step keeps for the way back: the outputs of all layers without parts.

    Parameters
    ----------
    image : shape (1, C, H, W)
    """

    def count(layer: nn.Module, output: object) -> int:
        return output.numel() * output.element_size() if isinstance(output, Tensor) else 0

    layers = [layer for layer in model.modules() if not any(True for _ in layer.children())]
    return _summed(model, image, layers, count)


def _summed(
    model: nn.Module, image: Tensor, layers: Sequence[nn.Module], count: Callable[[nn.Module, Any], int]
) -> int:
    """``count(layer, output)`` of these layers in one forward pass."""
    total = 0

    def add(layer: nn.Module, inputs: object, output: object) -> None:
        nonlocal total
        total += count(layer, output)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(add).remove)
        with torch.inference_mode():
            model(image)
    return total
