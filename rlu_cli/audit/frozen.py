"""Layers that training left alone, and the adapters that were trained in place of an output layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from rlu_cli.core.types import Head, HeadUpdate, Note
from rlu_cli.errors import MismatchError
from rlu_cli.files.text import names as listed

_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
ADVICE = (
    "merge the adapters into the weights of both models (merge_and_unload() in peft; their scale is not "
    "among the tensors) and save both state dicts"
)


def adapter_layers(names: Iterable[str]) -> list[str]:
    """The layers that have LoRA adapters, by the tensor names of a checkpoint."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part in _ADAPTERS:
                found[".".join(parts[:at])] = None
                break
    return list(found)


def adapter_hint(names: Iterable[str]) -> str:
    """A sentence on LoRA adapters among these tensors, empty where there are none."""
    layers = adapter_layers(names)
    return f". Among them are LoRA adapters (of {listed(layers, 3)}): {ADVICE}" if layers else ""


def check_head_moved(
    after: Head, before: Head, *, name: str, where: str, others: Callable[[], Sequence[str]]
) -> None:
    """Refuse an output layer that stands still while other layers moved, and say what did.

    Parameters
    ----------
    after, before : the local and the global output layer, called ``name``
    where : the local file
    others : finds the names of all tensors that moved

    Raises
    ------
    MismatchError
        The head did not move, and other tensors did.
    """
    if not np.array_equal(after.weight, before.weight) or (
        after.bias is not None and before.bias is not None and not np.array_equal(after.bias, before.bias)
    ):
        return
    moved = others()
    if moved:
        layers = adapter_layers(moved)
        adapters = f"LoRA adapters were trained (of {listed(layers, 3)}): {ADVICE}"
        raise MismatchError(
            f"expected a local output layer that training has moved, found {name} of {where} as in the "
            f"global model, while {len(moved)} other tensors moved ({listed(moved, 3)}): "
            + (adapters if layers else "its head was frozen, and such an update holds no counts")
        )


def frozen_parameters(
    names: Iterable[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Those that are the same in both models, where others moved as training moves them: nearly all over.

    None of a sparsified or coarsely quantised update, whose zeros say nothing of training.
    """
    still, moved, numbers = [], 0, 0
    for name in names:
        if name not in before or name not in after or before[name].shape != after[name].shape:
            continue
        other = int((before[name].cpu().double() != after[name].cpu().double()).sum())
        if other:
            moved, numbers = moved + other, numbers + before[name].numel()
        else:
            still.append(name)
    return tuple(sorted(still)) if 2 * moved > numbers else ()


def without_frozen_bias(update: HeadUpdate, head: Head) -> tuple[HeadUpdate, Head, list[Note]]:
    """The head without its bias, where training moved W but left b alone; and a note on that."""
    if update.bias is None or np.any(update.bias) or not np.any(update.weight):
        return update, head, []
    note = Note(
        "head-bias-frozen",
        "the output layer's bias did not move though its weights did: it is left out, as for a head that has "
        "none",
    )
    return HeadUpdate(update.weight, None), Head(head.weight, None), [note]
