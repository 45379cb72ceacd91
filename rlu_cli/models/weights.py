"""Put a checkpoint's tensors into a model, all of them or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rlu_cli.errors import MismatchError

_SHOWN = 5


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Copy ``tensors`` into ``model``, cast to its dtypes and device; ``where`` names the file in errors.

    Names and shapes must be the model's own, with two exceptions for real files: batch norm's
    ``num_batches_tracked`` may be missing (PyTorch before 0.4.1) or of shape (1,) (tools that have no 0-d
    arrays), and of tied parameters one name is enough (safetensors keeps only one). When anything doesn't fit
    the model is left as it was.
    """
    check_weights(model, tensors, where=where)
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(_reshaped(name, tensor))


def check_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Refuse tensors that don't fit the model, as `load_weights`; the model may be without memory (meta).

    Raises
    ------
    MismatchError
    """
    own = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    given = {name: _reshaped(name, tensor) for name, tensor in tensors.items()}
    loaded = {id(own[name]) for name in given if name in own}
    missing = [
        name for name, t in own.items() if name not in given and id(t) not in loaded and not _is_counter(name)
    ]
    unexpected = [name for name in given if name not in own]
    reshaped = [
        f"{name} {tuple(tensor.shape)} in the file, {tuple(own[name].shape)} in the model"
        for name, tensor in given.items()
        if name in own and tensor.shape != own[name].shape
    ]
    retyped = [
        f"{name} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in given.items()
        if name in own and own[name].is_floating_point() and not tensor.is_floating_point()
    ]
    if retyped and not (missing or unexpected or reshaped):
        raise MismatchError(
            f"expected floating-point numbers in {where}, where the model has them, found "
            f"{_group('of other types', retyped, ', ')}: quantised weights lack their scale here, so save "
            "them dequantised"
        )
    if missing or unexpected or reshaped:
        groups = [
            _group("missing", missing, ", "),
            _group("unexpected", unexpected, ", "),
            _group("of another shape", reshaped, "; "),
        ]
        raise MismatchError(
            f"The tensors of {where} don't fit the model: {'; '.join(filter(None, groups))}. Give the "
            "architecture and the arguments that it was trained with, e.g. --arch vgg16:num_classes=100, and "
            "the image size (--image-size), which some shapes follow from."
        )


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == "num_batches_tracked"


def _reshaped(name: str, tensor: Tensor) -> Tensor:
    return tensor.reshape(()) if _is_counter(name) and tensor.numel() == 1 else tensor


def _group(what: str, names: Iterable[str], separator: str) -> str:
    """``"7 missing (a, b, c, d, e, …)"``, or nothing for no names."""
    ordered = sorted(names)
    if not ordered:
        return ""
    more = [] if len(ordered) <= _SHOWN else ["…"]
    return f"{len(ordered)} {what} ({separator.join(ordered[:_SHOWN] + more)})"
