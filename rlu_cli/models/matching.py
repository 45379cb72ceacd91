"""Tell a built-in architecture from a checkpoint's tensor names and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rlu_cli.errors import UsageError
from rlu_cli.models.activations import make_activation
from rlu_cli.models.lenet import CONV_CHANNELS, default_padding, feature_map
from rlu_cli.models.registry import build_model
from rlu_cli.models.spec import ModelSpec
from rlu_cli.models.vgg import SMALLEST_SIDE

Shapes = Mapping[str, tuple[int, ...]]
Size = tuple[int, int]


def match_builtin(
    shapes: Shapes, *, image_size: Size | None = None, activation: str = "relu"
) -> ModelSpec | None:
    """The built-in architecture with exactly these tensors, or None.

    What the shapes tell is inferred: input channels, classes, batch norm, the stem, LeNet's image size and
    padding. What they can't tell is taken from the caller: the activation, and the image size of networks
    that work at any. The spec returned states all of it. A guess is verified by building it without
    memory (on the meta device) and comparing every name and shape; ``num_batches_tracked`` doesn't count.
    """
    make_activation(activation)  # a wrong name is the caller's error, not a failed match
    wanted = comparable_shapes(shapes)
    guesses = (
        _guess_lenet5(wanted, image_size),
        _guess_vgg16(wanted, image_size),
        _guess_resnet32(wanted, image_size),
        _guess_resnet50(wanted, image_size),
    )
    for spec in guesses:
        if spec is None:
            continue
        explicit = ModelSpec(spec.name, {**spec.kwargs, "activation": activation})
        if _has_shapes(explicit, wanted):
            return explicit
    return None


def comparable_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes that identify an architecture: all but batch norm's counters, which old files lack."""
    return {
        name: tuple(shape)
        for name, shape in shapes.items()
        if name.rpartition(".")[2] != "num_batches_tracked"
    }


def _has_shapes(spec: ModelSpec, wanted: Shapes) -> bool:
    try:
        with torch.device("meta"):
            model = build_model(spec, allow_user_code=False)
    except UsageError:  # an impossible guess, such as no classes
        return False
    return wanted == comparable_shapes({name: tuple(t.shape) for name, t in model.state_dict().items()})


def _guess(
    name: str, size: Size, first: tuple[int, ...], last: tuple[int, ...], **kwargs: object
) -> ModelSpec:
    """``first`` and ``last`` are the weight shapes (out, in, k, k) and (N, L) of those layers."""
    side = size[0] if size[0] == size[1] else size
    return ModelSpec(name, {"num_classes": last[0], "in_channels": first[1], "image_size": side, **kwargs})


def _ends(shapes: Shapes, first: str, last: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of the first convolution's and the last linear layer's weight, if there are such."""
    ends = shapes.get(f"{first}.weight", ()), shapes.get(f"{last}.weight", ())
    return ends if (len(ends[0]), len(ends[1])) == (4, 2) else None


def _guess_lenet5(shapes: Shapes, hint: Size | None) -> ModelSpec | None:
    ends = _ends(shapes, "conv1", "fc3")
    features = shapes.get("fc1.weight", ())
    if ends is None or len(features) != 2:
        return None
    geometry = _lenet_geometry(features[1], channels=ends[0][1], hint=hint)
    if geometry is None:
        return None
    size, padding = geometry
    return _guess("lenet5", size, *ends, padding=padding)


def _lenet_geometry(features: int, *, channels: int, hint: Size | None) -> tuple[Size, int] | None:
    """Image size and first padding that give this many features; None when no image does.

    Four neighbouring sizes give the same map, and padding 2 gives the same as four pixels more. So without
    a fitting hint the usual image sizes win: 28 (digits) and 32 (CIFAR, SVHN); where both fit (400 features),
    one input channel means 28. Otherwise it is the smallest size, with the padding that is default there.
    """
    if hint is not None:
        for padding in (default_padding(hint), 2, 0):
            height, width = feature_map(hint, padding)
            if min(height, width) > 0 and CONV_CHANNELS[1] * height * width == features:
                return hint, padding
    map_side = math.isqrt(features // CONV_CHANNELS[1])
    if map_side < 1 or CONV_CHANNELS[1] * map_side**2 != features:
        return None
    usual = (28, 32) if channels == 1 else (32, 28)
    padded, plain = 4 * map_side + 8, 4 * map_side + 12  # the smallest sides with padding 2 and 0
    for side in (*usual, padded, plain):
        for padding in (0, 2):
            is_usual = side in usual or padding == default_padding((side, side))
            if is_usual and feature_map((side, side), padding) == (map_side, map_side):
                return (side, side), padding
    return None


def _guess_vgg16(shapes: Shapes, hint: Size | None) -> ModelSpec | None:
    ends = _ends(shapes, "features.0", "classifier")
    if ends is None:
        return None
    size = hint if hint is not None and min(hint) >= SMALLEST_SIDE else (SMALLEST_SIDE, SMALLEST_SIDE)
    return _guess("vgg16", size, *ends, batch_norm="features.1.running_mean" in shapes)


def _guess_resnet32(shapes: Shapes, hint: Size | None) -> ModelSpec | None:
    ends = _ends(shapes, "conv1", "linear")
    return None if ends is None else _guess("resnet32", hint or (32, 32), *ends)


def _guess_resnet50(shapes: Shapes, hint: Size | None) -> ModelSpec | None:
    ends = _ends(shapes, "conv1", "fc")
    if ends is None:
        return None
    stem, size = ("imagenet", (224, 224)) if ends[0][2] == 7 else ("small", (32, 32))
    return _guess("resnet50", hint or size, *ends, stem=stem)
