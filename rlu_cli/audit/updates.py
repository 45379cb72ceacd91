"""Local files that hold the update itself, local − global, instead of the weights (``--update delta``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlu_cli.audit.annotations import Annotations
from rlu_cli.audit.frozen import adapter_hint
from rlu_cli.audit.options import Update
from rlu_cli.core.types import Note
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import Checkpoint
from rlu_cli.files.weight_norm import join_weight_norm

_COUNTER = "num_batches_tracked"
_BUFFERS = ("running_mean", "running_var", _COUNTER)
_FLOAT32 = torch.finfo(torch.float32).eps
_UNSURE = 0.125
"""Standard error of the share c (see `check_kind`) above which nothing is said."""


def update_kind(flag: Update | None, annotations: Annotations) -> Update:
    """What the local file holds: as the flag or ``fl.update`` says, else weights."""
    return annotations.get("update", flag, _kind) or "weights"


def _kind(value: str) -> Update:
    kinds: dict[str, Update] = {"weights": "weights", "delta": "delta"}
    if value.strip() not in kinds:
        raise ValueError("expected weights or delta")
    return kinds[value.strip()]


def check_same_tensors(local: Checkpoint, reference: Checkpoint) -> None:
    """Refuse a file of updates of other tensors than the global model's; BatchNorm's buffers may be missing.

    Raises
    ------
    MismatchError
    """
    base, change = reference.unjoined, local.unjoined
    absent = [name for name in base if name not in change and name.rpartition(".")[2] not in _BUFFERS]
    foreign = [
        name
        for name, tensor in change.items()
        if not name.endswith(_COUNTER) and (name not in base or tensor.shape != base[name].shape)
    ]
    if absent or foreign:
        raise MismatchError(
            f"expected {local.path} to hold the update of the tensors of {reference.path}, found "
            f"{len(absent)} missing and {len(foreign)} foreign or of another shape "
            f"({', '.join((absent + foreign)[:3])}): they are not of one round"
            + adapter_hint([*absent, *foreign])
        )


def add_update(local: Checkpoint, reference: Checkpoint) -> Checkpoint:
    """The local model whose file holds local − global: global + file, in float64.

    Differences are of the tensors as they are trained, so under weight norm those of magnitude and
    direction are added before the two are joined. What the file lacks stays as in the global model.
    """
    added = {name: _sum(tensor, local.unjoined.get(name)) for name, tensor in reference.unjoined.items()}
    return replace(local, tensors=join_weight_norm(added)[0], unjoined=added)


def enlarged(local: Checkpoint, reference: Checkpoint, factor: float) -> Checkpoint:
    """The local model that sent ``factor`` of its update: global + (local − global)/factor, in float64.

    What isn't trained (BatchNorm's statistics, integers) is left as it is.
    """
    whole = {
        name: base.double() + (tensor.double() - base.double()) / factor
        if (base := reference.unjoined.get(name)) is not None and is_trained(name, tensor)
        else tensor
        for name, tensor in local.unjoined.items()
    }
    return replace(local, tensors=join_weight_norm(whole)[0], unjoined=whole)


def is_trained(name: str, tensor: Tensor) -> bool:
    """Whether an optimiser moves it, as far as its name and type say."""
    return tensor.is_floating_point() and name.rpartition(".")[2] not in _BUFFERS


def _sum(tensor: Tensor, change: Tensor | None) -> Tensor:
    if change is None or change.shape != tensor.shape:
        return tensor
    if not tensor.is_floating_point():
        return tensor + change.to(tensor.dtype)
    return tensor.double() + change.double()


def moved_tensors(kind: Update, local: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors, of any layer, that training changed."""
    if kind == "delta":
        return [name for name, tensor in local.items() if bool(tensor.any())]
    return [
        name
        for name, tensor in reference.items()
        if name in local and not torch.equal(tensor.double(), local[name].double())
    ]


def check_kind(kind: Update, local: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[Note]:
    """A warning when a file's numbers contradict what it is said to hold.

        c = ⟨g, f⟩ / ⟨g, g⟩     over the numbers g of the global layer and f of the file's

    For weights f = g + Δ it is 1 + ⟨g, Δ⟩/‖g‖², for an update f = Δ it is ⟨g, Δ⟩/‖g‖². As
    |⟨g, Δ⟩| ≤ ‖g‖ ‖Δ‖, the threshold 1/2 tells them apart whenever training moved the layer by less than half
    its norm. Where it moved further, a Δ of random direction adds an error of ‖f − c g‖ / (‖g‖ √n), for n
    numbers: beyond 1/8, four standard errors from the threshold, nothing is said.
    """
    names = [name for name, tensor in reference.items() if name in local and tensor.is_floating_point()]
    if not names:
        return []
    g, f = (torch.cat([m[name].flatten().double() for name in names]) for m in (reference, local))
    squares = float(g @ g)
    if squares == 0.0 or g.shape != f.shape:
        return []
    share = float(g @ f) / squares
    unsure = float((f - share * g).norm()) / math.sqrt(squares * len(g))
    if unsure > _UNSURE:
        return []
    if kind == "weights" and share < 0.5:
        return [
            Note(
                "local-looks-like-delta",
                f"the local output layer holds {share:.2f} of the global one's numbers, where weights that "
                "began there hold about 1: if the file holds local − global, pass --update delta; else it is "
                "of another round or model",
            )
        ]
    if kind == "delta" and share > 0.5:
        return [
            Note(
                "delta-looks-like-weights",
                f"the local checkpoint is said to hold an update, but its output layer holds {share:.2f} of "
                "the global one's numbers, where an update holds about 0: if it holds weights, pass "
                "--update weights",
            )
        ]
    return []


def is_exact(tensor: Tensor) -> bool:
    """Whether numbers are stored as finely as training computes them, float32."""
    return tensor.is_floating_point() and torch.finfo(tensor.dtype).eps <= _FLOAT32


def stored_rounding(*stored: Tensor) -> float:
    """√(Σ ‖half a unit in the last place‖²) of tensors in a type coarser than float32; 0 for others.

    A unit in the last place of x is at most ε max(|x|, t), with the type's ε and smallest normal number t.
    """
    total = 0.0
    for tensor in stored:
        if tensor.is_floating_point() and not is_exact(tensor):
            about = torch.finfo(tensor.dtype)
            sizes = tensor.double().abs().clamp(min=about.smallest_normal)
            total += float((about.eps / 2 * sizes).square().sum())
    return math.sqrt(total)
