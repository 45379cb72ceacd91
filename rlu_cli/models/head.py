"""Find the output layer of a model.

All label recovery from a round rests on one relation: logits = W·e + b, with W (N, L) and b (N,) the weights
of the output layer (the *head*) and e (L,) the embedding of an image. So the head is found by that relation
and not by its name: it is the last linear layer called whose weights reproduce the logits. A 1x1 convolution
whose output is averaged over positions (or whose input was) is such a layer as well, since the mean commutes
with it: e is then the mean of its input over positions. Log-softmax after the layer only adds a number to a
row, which neither softmax nor cross-entropy sees, so the layer's own outputs are the logits then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.models.tap import Head, HeadTap, flatten_logits, is_linear, linear_weights, mean_over_positions

__all__ = ["Head", "HeadTap", "find_head", "flatten_logits"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Largest deviation, in units of the largest logit; float32 leaves room for TF32 convolutions."""
_COARSE_TOLERANCE = 3e-2


def find_head(model: nn.Module, example: Tensor | None = None, *, override: str | None = None) -> Head:
    """Find the output layer with one forward pass in eval mode; the model is left as it was.

    ``example`` is a batch of images (B, C, H, W) as the model reads them; without one, two random images of
    the model's ``in_channels`` and ``image_size`` are used. ``override`` is the layer's name (``--head``):
    it must be a linear layer or 1x1 convolution with an output per class, and isn't checked further.
    """
    candidates = {name: module for name, module in model.named_modules() if is_linear(module)}
    if override is not None:
        override = override.removesuffix(".weight").removesuffix(".bias").removesuffix(".")
        if override not in candidates:
            names = ", ".join(sorted(candidates)) or "none"
            raise UsageError(
                f"--head {override}: the model has no such linear layer or 1x1 convolution. It has: {names}."
            )
    images = _random_images(model) if example is None else example
    logits, embeddings = _observe(model, candidates, images)
    if override is not None:
        return _checked_override(override, candidates[override], embeddings, logits)
    for name in reversed(embeddings):
        if _reproduces(candidates[name], embeddings[name], logits):
            return _describe(name, candidates[name])
    for name in reversed(embeddings):
        if _reproduces(candidates[name], embeddings[name], logits, shifted=True):
            return _describe(name, candidates[name], shifted=True)
    last = next(reversed(embeddings), None)
    fitting = [name for name in embeddings if linear_weights(candidates[name])[0].shape[0] == logits.shape[1]]
    raise MismatchError(
        "No output layer found: the model's last layer must be linear or a 1x1 convolution whose outputs are "
        f"the logits. {_last_called(last)}{_softmax_hint(logits)} {_advice(fitting, logits.shape[1])}"
    )


def _observe(
    model: nn.Module, candidates: Mapping[str, nn.Module], images: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits (B, N), and the embedding (B, L) of every candidate called, in the order of their last call."""
    embeddings: dict[str, Tensor] = {}
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack, torch.inference_mode():
        for name, module in candidates.items():

            def capture(
                module: nn.Module,
                args: tuple[Tensor, ...],
                kwargs: dict[str, Tensor],
                output: object,
                name: str = name,
            ) -> None:
                embeddings.pop(name, None)
                embeddings[name] = mean_over_positions(module, args[0] if args else kwargs["input"])

            stack.callback(module.register_forward_hook(capture, with_kwargs=True).remove)
        try:
            model.eval()
            output = model(images)
        except Exception as error:
            raise MismatchError(
                f"The model can't read images of shape {tuple(images.shape[1:])} (channels, height, width): "
                f"{type(error).__name__}: {error}. Give the size it was trained on with --image-size."
            ) from error
        finally:
            for module, mode in modes.items():
                module.training = mode
        return flatten_logits(output), embeddings


def _reproduces(module: nn.Module, embedding: Tensor, logits: Tensor, *, shifted: bool = False) -> bool:
    """Whether logits (B, N) = embedding (B, L) · Wᵀ + b, to rounding; ``shifted``: plus a number a row."""
    weight, bias = linear_weights(module)
    if (*embedding.shape[:-1], weight.shape[0]) != tuple(logits.shape):
        return False
    with torch.inference_mode():
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        expected, found = embedding.to(dtype) @ weight.to(dtype).T, logits.to(dtype)
        if bias is not None:
            expected = expected + bias.to(dtype)
        rounding = 0.0
        if shifted:
            if weight.shape[0] == 1 or _are_probabilities(found):  # small logits' are nearly shifted
                return False
            rounding = float(torch.finfo(logits.dtype).eps * found.abs().max())  # of what the shift hides
            expected, found = (rows - rows.mean(dim=1, keepdim=True) for rows in (expected, found))
        deviation, scale = (expected - found).abs().max(), found.abs().max()
        return bool(deviation <= _TOLERANCE.get(logits.dtype, _COARSE_TOLERANCE) * scale + rounding)


def _describe(name: str, module: nn.Module, *, shifted: bool = False) -> Head:
    weight, bias = linear_weights(module)
    return Head(name, weight.shape[0], weight.shape[1], bias is not None, shifted)


def _checked_override(name: str, module: nn.Module, embeddings: Mapping[str, Tensor], logits: Tensor) -> Head:
    head = _describe(name, module)
    if name not in embeddings:
        raise MismatchError(
            f"--head {name}: the forward pass never calls this layer, so it isn't the output."
        )
    if head.num_classes != logits.shape[1]:
        raise MismatchError(
            f"--head {name}: the layer has {head.num_classes} outputs, the model returns {logits.shape[1]}."
        )
    if _reproduces(module, embeddings[name], logits):
        return head
    return replace(head, shifted=_reproduces(module, embeddings[name], logits, shifted=True))


def _last_called(name: str | None) -> str:
    if name is None:
        return "The forward pass calls no such layer."
    return f"The last such layer called is {name!r}, and the logits aren't its outputs."


def _advice(fitting: Sequence[str], classes: int) -> str:
    """What --head could name: the layers called that have an output for each class."""
    if not fitting:
        return f"No such layer has {classes} outputs, as the model has."
    some = ", ".join(fitting[:5]) + ("…" if len(fitting) > 5 else "")
    return f"Name the layer with --head if it is nonetheless one of those with {classes} outputs: {some}."


def _softmax_hint(logits: Tensor) -> str:
    """A word on the usual cause: the model ends in softmax."""
    if not _are_probabilities(logits.float()):
        return ""
    return " The outputs look like probabilities: let the model return what goes into the softmax."


def _are_probabilities(values: Tensor) -> bool:
    return bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() <= 1e-3).all())


def _random_images(model: nn.Module) -> Tensor:
    """Two images of Gaussian noise (2, C, H, W), always the same ones."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = getattr(model, "in_channels", 3 if first is None else first.in_channels)
    size = getattr(model, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)  # torchvision's ViT has an int
    parameter = next(model.parameters(), torch.empty(0))
    noise = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(0))
    return noise.to(device=parameter.device, dtype=parameter.dtype)
