"""A client's file against the global model's: what it holds, and whether the two belong together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlu_cli.audit.frozen import check_head_moved, without_frozen_bias
from rlu_cli.audit.network import check_same_network, read_head
from rlu_cli.audit.options import Update
from rlu_cli.audit.updates import add_update, check_kind, check_same_tensors, moved_tensors, stored_rounding
from rlu_cli.core.recover import head_update
from rlu_cli.core.types import Head, HeadUpdate, Note
from rlu_cli.files.checkpoint import Checkpoint
from rlu_cli.files.state_dict import layer_tensors
from rlu_cli.files.weight_norm import joined_name


@dataclass(frozen=True)
class LocalModel:
    """What one client sent back.

    stored : its file, tensors by name
    reference : the global model, likewise
    kind : what the file holds
    update : local − global of the output layer
    head : the global output layer that it is the update of
    rounding : norm of the storage error in the update, as `Observation` has it
    """

    stored: Checkpoint
    reference: Checkpoint
    kind: Update
    update: HeadUpdate
    head: Head
    rounding: float
    notes: tuple[Note, ...]

    def weights(self) -> Checkpoint:
        """The whole model after training."""
        return self.stored if self.kind == "weights" else add_update(self.stored, self.reference)


def open_local(stored: Checkpoint, reference: Checkpoint, kind: Update, head_name: str) -> LocalModel:
    """The update of the output layer in a client's file, of which no other numbers are read.

    Raises
    ------
    MismatchError
        The two aren't of one network, a number isn't finite, or the output layer did not move.
    """
    where = (reference.path, stored.path)
    if kind == "weights":
        check_same_network(reference.tensors, stored.tensors, where=where)
    else:
        check_same_tensors(stored, reference)
    own, base = _layer(stored, head_name), _layer(reference, head_name)
    notes = check_kind(kind, own.unjoined, base.unjoined)
    before, after = layer_head(reference, head_name), local_head(stored, reference, kind, head_name)
    check_head_moved(
        after,
        before,
        name=head_name,
        where=str(stored.path),
        others=lambda: moved_tensors(kind, stored.unjoined, reference.unjoined),
    )
    update, head, frozen = without_frozen_bias(head_update(after, before), before)
    name = layer_tensors(head_name)[0 if update.bias is None else 1]
    files = (own, base) if kind == "weights" else (own,)  # the global numbers in a sum cancel
    rounding = stored_rounding(*(file.tensors[name] for file in files))
    return LocalModel(stored, reference, kind, update, head, rounding, (*notes, *frozen))


def local_head(stored: Checkpoint, reference: Checkpoint, kind: Update, head_name: str) -> Head:
    """The output layer after training."""
    if kind == "weights":
        return layer_head(stored, head_name)
    return layer_head(add_update(_layer(stored, head_name), _layer(reference, head_name)), head_name)


def layer_head(checkpoint: Checkpoint, head_name: str) -> Head:
    """The output layer of a file whose tensors have names."""
    return read_head(checkpoint.tensors, head_name, where=str(checkpoint.path))


def _layer(checkpoint: Checkpoint, head_name: str) -> Checkpoint:
    """The tensors of one layer alone."""
    names = layer_tensors(head_name)
    return replace(
        checkpoint,
        tensors={name: t for name, t in checkpoint.tensors.items() if name in names},
        unjoined={
            name: t for name, t in checkpoint.unjoined.items() if name in names or joined_name(name) in names
        },
    )
