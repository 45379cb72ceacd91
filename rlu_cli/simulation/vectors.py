"""A model's parameters as one vector, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Layout:
    """Names, shapes and places of a model's parameters in one flat vector.

    Buffers (BatchNorm statistics) are no part of it: no scheme pulls or corrects them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The parameters among ``tensors``, one after the other, float32."""
        return torch.cat([tensors[name].detach().reshape(-1).float() for name in self.shapes])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of ``vector`` by parameter name."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = torch.split(vector, sizes)
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
