"""What a client may do to its update before it sends it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Defence:
    """Clipping, noise, sparsification and quantisation of the whole update, in that order.

    clip : largest L2 norm of the update (DP-FedAvg, McMahan et al. 2018), None for no bound
    noise_std : standard deviation of the Gaussian noise added to each parameter's update
    top_k : share of the parameters, those that moved most, whose update is sent at all
    quantize : bits of uniform quantisation between the smallest and the largest value sent
    """

    clip: float | None = None
    noise_std: float = 0.0
    top_k: float = 1.0
    quantize: int | None = None

    @property
    def active(self) -> bool:
        """Whether anything is done to the update at all."""
        return self.clip is not None or self.noise_std > 0 or self.top_k < 1 or self.quantize is not None

    def apply(self, update: Tensor, generator: torch.Generator) -> Tensor:
        """The update as it is sent, shape (P,) as given; noise is drawn from ``generator`` (CPU)."""
        if self.clip is not None:
            update = update * min(1.0, self.clip / max(float(update.norm()), 1e-12))
        if self.noise_std > 0:
            noise = torch.randn(update.shape, generator=generator, dtype=update.dtype)
            update = update + self.noise_std * noise.to(update.device)
        if self.top_k < 1:
            keep = max(1, round(self.top_k * update.numel()))
            kept = update.abs().topk(keep).indices
            return torch.zeros_like(update).index_copy_(0, kept, self._quantized(update[kept]))
        return self._quantized(update)

    def _quantized(self, values: Tensor) -> Tensor:
        if self.quantize is None:
            return values
        low, high = values.min(), values.max()
        step = (high - low) / (2**self.quantize - 1)
        return low + ((values - low) / step).round() * step if float(step) > 0 else values
