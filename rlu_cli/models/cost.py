"""How much work a network is."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def multiply_adds(model: nn.Module, image: Tensor) -> int:
    """Multiplications of one image's forward pass in convolutions and linear layers.

    Counted from the sizes of weights and outputs: a number of weights per output value.

    Parameters
    ----------
    image : shape (1, C, H, W)
    """
    total = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        assert isinstance(layer.weight, Tensor)
        total += output.numel() * layer.weight[0].numel()

    layers = [layer for layer in model.modules() if isinstance(layer, (nn.modules.conv._ConvNd, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.inference_mode():
            model(image)
    finally:
        for hook in hooks:
            hook.remove()
    return total
