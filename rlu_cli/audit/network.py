"""From a checkpoint's tensors to the network that its client trained, and its output layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rlu_cli.audit.frozen import adapter_hint
from rlu_cli.core.types import Head
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import Checkpoint
from rlu_cli.files.positional import name_positional
from rlu_cli.files.state_dict import layer_tensors, strip_prefixes
from rlu_cli.files.weight_norm import joined_name
from rlu_cli.models import (
    ModelSpec,
    build_model,
    check_weights,
    find_head,
    load_weights,
    match_builtin,
    parse_spec,
)
from rlu_cli.models.head import Head as HeadLayer
from rlu_cli.models.spec import IMAGE_SIZES

_PART = 2**20
"""Numbers checked at a time."""

_MOST_PIXELS = 2**21
"""Larger inputs would need gigabytes for the first layer alone."""


@dataclass(frozen=True)
class Network:
    """A built model with the global weights in it.

    spec : what was built, in full
    layer : where its output layer is
    matched : whether the architecture was recognised by its tensors, not given
    """

    model: nn.Module
    spec: ModelSpec
    layer: HeadLayer
    channels: int
    image_size: tuple[int, int]
    matched: bool
    prefix: str
    """What all names of the model begin with that checkpoints have stripped (``module.``)."""

    def black(self, device: str) -> Tensor:
        """One image that fits, shape (1, C, H, W): for what hangs on shapes alone."""
        return torch.zeros(1, self.channels, *self.image_size, device=device)

    def load(self, checkpoint: Checkpoint) -> None:
        """Put another checkpoint's weights into the model."""
        load_weights(self.model, self.named(checkpoint), where=str(checkpoint.path))

    def named(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """The checkpoint's tensors under the model's own names."""
        return named_tensors(checkpoint, self.model)


def choose_spec(
    arch: str | None, tensors: Mapping[str, Tensor], image_size: tuple[int, int] | None
) -> tuple[ModelSpec, bool]:
    """The architecture to build, and whether it was recognised by its tensors alone.

    A built-in named without all of its keyword arguments is completed from the tensor shapes.

    Raises
    ------
    MismatchError
        Nothing names an architecture and no built-in has these tensors.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if arch is None:
        matched = match_builtin(shapes, image_size=image_size)
        if matched is None:
            raise MismatchError(
                "missing model: no architecture is given and the checkpoint's tensors are not those of a "
                "built-in one. Pass --arch: a built-in name, torchvision:NAME, timm:NAME or "
                "path/to/file.py:factory"
            )
        return matched, True
    spec = parse_spec(arch)
    if spec.kind == "builtin":
        activation = spec.kwargs.get("activation", "relu")
        matched = match_builtin(shapes, image_size=image_size, activation=str(activation))
        if matched is not None and matched.name == spec.name:
            return ModelSpec(spec.name, {**matched.kwargs, **spec.kwargs}), False
    return spec, False


def build_network(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    allow_user_code: bool,
    image_size: tuple[int, int] | None,
    native_size: tuple[int, int],
    head: str | None = None,
    matched: bool = False,
    device: str = "cpu",
) -> Network:
    """Build the model, load the global weights and find the output layer.

    The image size is the one asked for, else the one the architecture was built for, else the images'
    own.
    """
    try:
        if spec.kind == "builtin":  # a shape that a file's metadata make up must not fill the memory
            with torch.device("meta"):
                sketch = build_model(spec, allow_user_code=False)
            check_weights(sketch, named_tensors(checkpoint, sketch), where=str(checkpoint.path))
        model = build_model(spec, allow_user_code=allow_user_code)
        load_weights(model, named_tensors(checkpoint, model), where=str(checkpoint.path))
    except MismatchError as error:
        hint = adapter_hint(checkpoint.tensors)
        raise MismatchError(f"{str(error).rstrip('.')}{hint}") if hint else error from None
    size = image_size or _declared_size(spec, model) or native_size
    if size[0] * size[1] > _MOST_PIXELS:
        raise MismatchError(
            f"expected images of at most {_MOST_PIXELS} pixels, as networks take them, found "
            f"{size[0]}x{size[1]} (height x width): pass --image-size with what the client trained on"
        )
    if spec.kind == "builtin":  # others may flatten with view(), which this layout would break
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.requires_grad_(False)
    model.eval().to(device)
    channels = input_channels(model, size)
    noise = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
    layer = find_head(model, noise.to(device), override=head)
    return Network(model, spec, layer, channels, size, matched, strip_prefixes(model.state_dict())[1])


def named_tensors(checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Tensor]:
    """The tensors under the model's names.

    Positional ones (.npz) get the names of the model's state dict, in its order. Prefixes that wrappers
    leave (``module.``) are stripped from every checkpoint; a model that has one itself gets it back. A model
    under weight norm gets magnitudes and directions as the file has them.
    """
    state = model.state_dict()
    if checkpoint.positional:
        expected = [(name, tuple(tensor.shape)) for name, tensor in state.items()]
        return name_positional(checkpoint.tensors, expected)
    own = strip_prefixes(state)[1]
    normed = any(joined_name(name) is not None for name in state)
    tensors = checkpoint.unjoined if normed else checkpoint.tensors
    return {own + name: tensor for name, tensor in tensors.items()} if own else tensors


def read_head(tensors: Mapping[str, Tensor], name: str, *, where: str) -> Head:
    """W (N, L) and b (N,) of the output layer called ``name``, in float64.

    Raises
    ------
    MismatchError
        No such layer, or not one of the right shape, or numbers that aren't finite.
    """
    names = weight_name, bias_name = layer_tensors(name)
    weight, bias = (tensors.get(part) for part in names)
    if weight is None:
        raise MismatchError(
            f"expected the output layer {weight_name} in {where}, found no such tensor: the two checkpoints "
            "are of different networks, or --head names another layer"
        )
    if weight.ndim not in (2, 4) or any(side != 1 for side in weight.shape[2:]):
        raise MismatchError(
            f"expected {weight_name} in {where} to be a matrix or a 1x1 convolution, "
            f"found the shape {tuple(weight.shape)}: name the output layer with --head"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise MismatchError(
            f"expected {bias_name} in {where} to have a number for each row of {weight_name}, "
            f"{tuple(weight.shape)}, found the shape {tuple(bias.shape)}: save it flat"
        )
    layer = {name: tensors[name] for name in names if name in tensors}
    for part, tensor in layer.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise MismatchError(
                f"expected floating-point numbers in {part} of {where}, found {kind}: quantised weights lack "
                "their scale here, so save them dequantised"
            )
    check_finite(layer, where=where)
    matrix = weight.detach().cpu().double().flatten(1).numpy()
    return Head(np.array(matrix), None if bias is None else np.array(bias.detach().cpu().double().numpy()))


def check_same_network(
    reference: Mapping[str, Tensor], local: Mapping[str, Tensor], *, where: tuple[object, object]
) -> None:
    """Refuse two checkpoints whose tensors differ in name or shape.

    where : paths of the global and the local one, for the message

    Raises
    ------
    MismatchError
    """
    own = {name: tuple(t.shape) for name, t in reference.items() if not _is_counter(name)}
    other = {name: tuple(t.shape) for name, t in local.items() if not _is_counter(name)}
    differing = [
        f"{name} is {own.get(name, 'absent')} in the global and {other.get(name, 'absent')} in the local one"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]
    if differing:
        raise MismatchError(
            f"expected the tensors of {where[1]} to have the names and shapes of {where[0]}, found "
            f"{len(differing)} that differ ({'; '.join(differing[:3])}): they are not of one round"
            + adapter_hint(own.keys() ^ other.keys())
        )


def check_finite(tensors: Mapping[str, Tensor], *, where: object) -> None:
    """Refuse weights that hold NaN or infinity; ``where`` is their file, for the message.

    Raises
    ------
    MismatchError
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise MismatchError(
                f"expected finite weights in {where}, found NaN or infinity in {name}: training "
                "diverged or the file is damaged; use the checkpoint of another round"
            )


def _is_finite(tensor: Tensor) -> bool:
    """In parts, so that the check itself takes no memory of the tensor's size."""
    flat = tensor.flatten()
    parts = (flat[at : at + _PART] for at in range(0, len(flat), _PART))
    if tensor.element_size() == 1:  # torch has no such check for float8
        parts = (part.float() for part in parts)
    return all(bool(torch.isfinite(part).all()) for part in parts)


def input_channels(model: nn.Module, size: tuple[int, int]) -> int:
    """How many channels the model reads: its own word, its first convolution's, or its first matrix's."""
    declared = getattr(model, "in_channels", None)
    if isinstance(declared, int):
        return declared
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return int(module.in_channels)
        if isinstance(module, nn.Linear):
            return 3 if module.in_features == 3 * size[0] * size[1] else 1
    return 3


def _declared_size(spec: ModelSpec, model: nn.Module) -> tuple[int, int] | None:
    """The image size that a built-in of fixed size was built for."""
    if spec.kind == "builtin" and spec.target == "lenet5":
        return model.image_size  # type: ignore[return-value]
    asked = next((spec.kwargs[name] for name in IMAGE_SIZES if name in spec.kwargs), None)
    if isinstance(asked, int):
        return asked, asked
    return asked if isinstance(asked, tuple) else None


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")
