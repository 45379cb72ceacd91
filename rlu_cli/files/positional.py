"""Arrays without names (``arr_0``, ``arr_1``, …), matched to an architecture's state-dict order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlu_cli.errors import MismatchError

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"arr_(\d{1,9})\Z")
_COUNTER = "num_batches_tracked"


def is_positional(keys: Iterable[str]) -> bool:
    """Whether there are names and all of them are ``arr_N``."""
    listed = list(keys)
    return bool(listed) and all(_NAME.match(key) for key in listed)


def _in_order(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    numbered: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        match = _NAME.match(key)
        if match is None:
            raise MismatchError(f"expected arrays named arr_0, arr_1, …, found {key}.")
        numbered[int(match[1])] = tensor
    for index in range(len(numbered)):
        if index not in numbered:
            raise MismatchError(
                f"arr_{index} is missing among {len(numbered)} arrays; save all of them in one np.savez."
            )
    return [numbered[index] for index in range(len(numbered))]


def _counter(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """BatchNorm's step counter as the model has it: frameworks write the 0-d one as shape (0,) or (1,)."""
    import torch

    if shape == () and tensor.ndim == 1 and tensor.numel() <= 1:
        return tensor.reshape(()) if tensor.numel() else torch.zeros((), dtype=torch.int64)
    return tensor


def name_positional(
    tensors: Mapping[str, Tensor], names_and_shapes: Sequence[tuple[str, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Give the arrays the names of an architecture, in its order, checking each shape.

    Where the counts differ, BatchNorm's ``num_batches_tracked`` are left out, as Flower clients often do.

    Raises:
        MismatchError: The counts differ, or a shape does; the first such array is named.
    """
    ordered = _in_order(tensors)
    expected = list(names_and_shapes)
    if len(ordered) != len(expected):
        expected = [(name, shape) for name, shape in expected if not name.endswith(_COUNTER)]
    if len(ordered) != len(expected):
        total, without = len(names_and_shapes), len(expected)
        alternative = f" ({without} without {_COUNTER})" if without != total else ""
        raise MismatchError(
            f"the architecture has {total} tensors{alternative}, the file {len(ordered)} arrays;"
            " check --arch and its arguments."
        )
    named: dict[str, Tensor] = {}
    for index, (tensor, (name, shape)) in enumerate(zip(ordered, expected, strict=True)):
        fitted = _counter(tensor, shape) if name.endswith(_COUNTER) else tensor
        if tuple(fitted.shape) != tuple(shape):
            raise MismatchError(
                f"arr_{index} has shape {tuple(fitted.shape)}, but tensor {index} of the architecture,"
                f" {name}, has {tuple(shape)}; check --arch and its arguments, and that the arrays were"
                " saved in state_dict() order."
            )
        named[name] = fitted
    return named


def layers_by_position(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names for the arrays of linear layers and 1x1 convolutions, where no architecture gives any.

    A matrix ``arr_8`` followed by a vector of one number a row is the layer ``arr_8`` with ``arr_8.weight``
    and ``arr_8.bias``; a matrix alone has a weight only. Other arrays keep their names.
    """
    ordered = _in_order(tensors)
    named: dict[str, Tensor] = {}
    index = 0
    while index < len(ordered):
        tensor, layer = ordered[index], f"arr_{index}"
        if tensor.ndim < 2 or any(side != 1 for side in tensor.shape[2:]):
            named[layer] = tensor
        else:
            named[f"{layer}.weight"] = tensor
            if index + 1 < len(ordered) and ordered[index + 1].shape == tensor.shape[:1]:
                index += 1
                named[f"{layer}.bias"] = ordered[index]
        index += 1
    return named
