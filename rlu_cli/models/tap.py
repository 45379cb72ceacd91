"""The embedding that a model's output layer reads, captured during forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from torch import Tensor, nn

from rlu_cli.errors import MismatchError


@dataclass(frozen=True)
class Head:
    """The output layer: ``name`` is its module path, the prefix of its tensors (``fc`` of ``fc.weight``).

    shifted : whether the network's outputs are the layer's plus a number for each row, as log-softmax's are.
    """

    name: str
    num_classes: int
    embedding_size: int
    has_bias: bool
    shifted: bool = False


class HeadTap:
    """Captures the embedding, and the layer's own outputs, in the forward passes within a ``with`` block.

    ::

        with HeadTap(model, head) as tap:
            logits = flatten_logits(model(images))  # (B, N)
            embedding = tap.embedding               # (B, L), logits = embedding @ W.T + b
            own = tap.logits                        # (B, N), the same; the logits where the head is shifted

    Both are copies and part of the autograd graph, if there is one.
    """

    def __init__(self, model: nn.Module, head: Head) -> None:
        self._module = model.get_submodule(head.name)
        self._embedding: Tensor | None = None
        self._logits: Tensor | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> HeadTap:
        handle = self._module.register_forward_hook(self._capture, with_kwargs=True)
        self._hooks.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    @property
    def embedding(self) -> Tensor:
        """The embedding (B, L) of the latest forward pass."""
        if self._embedding is None:
            raise RuntimeError("no forward pass has called the output layer yet")
        return self._embedding

    @property
    def logits(self) -> Tensor:
        """The layer's own outputs (B, N) of the latest forward pass."""
        if self._logits is None:
            raise RuntimeError("no forward pass has called the output layer yet")
        return self._logits

    def _capture(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> None:
        self._embedding = mean_over_positions(module, args[0] if args else kwargs["input"])
        self._logits = mean_over_positions(module, output)


def flatten_logits(output: object) -> Tensor:
    """The logits (B, N) in what a model returned.

    Takes a tensor (B, N) or (B, N, 1, 1), or a mapping or object with ``logits``, or a tuple that
    begins with the logits, as models with auxiliary classifiers return.
    """
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise MismatchError(
            f"The model returned {type(output).__name__} where logits were expected: a tensor "
            "(batch, classes), or one under the name `logits` or first in a tuple."
        )
    if output.dim() < 2 or any(side != 1 for side in output.shape[2:]):
        raise MismatchError(
            f"The model returned a tensor of shape {tuple(output.shape)}: expected logits (batch, classes). "
            "rlu audits image classifiers only."
        )
    return output.flatten(1)


def is_linear(module: nn.Module) -> bool:
    """Whether the layer is linear in each position's channels: ``nn.Linear`` or a 1x1 convolution."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1
    return isinstance(module, nn.Linear)


def mean_over_positions(module: nn.Module, x: Tensor) -> Tensor:
    """What the layer reads or makes, averaged over positions: (B, L) from (B, L, H, W) or (B, …, L)."""
    if isinstance(module, nn.Conv2d):
        return x.mean(dim=(-2, -1))
    return x.flatten(1, -2).mean(1) if x.dim() > 2 else x.clone()


def linear_weights(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """W (N, L) and b (N,) or None, of a module that ``is_linear``."""
    assert isinstance(module, (nn.Linear, nn.Conv2d))
    return module.weight.flatten(1), module.bias  # (N, L), (N,)
