"""OpenFL's model files (``init.pbuf``, ``last.pbuf``): protocol buffers of named float32 tensors.

OpenFL turns every tensor into bytes by a pipeline, and keeps what each stage needs to turn it back as
metadata. Only the pipeline that compresses nothing is read: one stage, whose metadata is the shape and whose
bytes are the float32 numbers in C order. The others lose what is looked for here.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlu_cli.errors import FileError, UsageError
from rlu_cli.files.text import names, one_line, size

if TYPE_CHECKING:
    import torch

_OPTIMIZER = "__opt_"
"""What the names of an optimizer's state begin with, which OpenFL stores among the weights."""
_LIMIT = 2**31 - 1
"""The largest message that protocol buffers allow."""

# The fields of openfl/protocols/base.proto, by number: (name, number, type, repeated, message).
_FIELDS = {
    "MetadataProto": (
        ("int_to_float", 1, "TYPE_BYTES", True, ""),  # a map: only whether it has entries matters
        ("int_list", 2, "TYPE_INT32", True, ""),
        ("bool_list", 3, "TYPE_BOOL", True, ""),
    ),
    "NamedTensor": (
        ("name", 1, "TYPE_STRING", False, ""),
        ("round_number", 2, "TYPE_INT32", False, ""),
        ("lossless", 3, "TYPE_BOOL", False, ""),
        ("transformer_metadata", 6, "TYPE_MESSAGE", True, "MetadataProto"),
        ("data_bytes", 7, "TYPE_BYTES", False, ""),
    ),
    "ModelProto": (("tensors", 1, "TYPE_MESSAGE", True, "NamedTensor"),),
}
_PACKAGE = "rlu.openfl"


@cache
def _model_proto() -> Any:
    """The message class of a whole model, from a description made here, so that no code is generated."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise UsageError(
            "protobuf isn't installed, so OpenFL's model files can't be read: pip install 'rlu-cli[openfl]'."
        ) from None
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="rlu_openfl.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, kind, repeated, other in fields:
            described.field.add(
                name=name,
                number=number,
                type=getattr(kinds, kind),
                label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL,
                type_name=f".{_PACKAGE}.{other}" if other else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.ModelProto"))


def _pipeline(stages: Any) -> str | None:
    """The name of the pipeline that the stages' metadata are those of, None for the one without losses."""
    if len(stages) == 1:
        return "EDEN" if stages[0].int_to_float else None
    if len(stages) == 2:
        return "k-means (KC) or random-shift"
    return "sparsifying (STC or SKC)" if len(stages) == 3 else f"{len(stages)}-stage"


def read_openfl(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """The tensors by name, float32; the round's number as metadata; and notes.

    Raises:
        FileError: Damaged, or written by a pipeline that compresses.
        UsageError: The protobuf package is missing.
    """
    import numpy as np
    import torch

    message = _model_proto()()
    length = path.stat().st_size
    if length > _LIMIT:
        raise FileError(f"{path}: expected an OpenFL model of at most 2 GiB, found {size(length)}.")
    try:
        message.ParseFromString(path.read_bytes())
    # upb and the pure Python parser raise different errors on damaged input, RecursionError among them.
    except Exception as error:
        raise FileError(
            f"{path}: damaged or cut short at {size(length)} ({one_line(error)}); copy or save it again."
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    dropped: list[str] = []
    for item in message.tensors:
        name = one_line(item.name, 80)
        if item.name.startswith(_OPTIMIZER):
            dropped.append(item.name)
            continue
        lossy = _pipeline(item.transformer_metadata)
        if lossy is not None:
            raise FileError(
                f"{path}: {name} was compressed by OpenFL's {lossy} pipeline, which loses what labels are "
                "read from; export the weights with 'fx model save', or use NoCompressionPipeline."
            )
        shape = tuple(item.transformer_metadata[0].int_list)
        if min(shape, default=0) < 0 or 4 * math.prod(shape) != len(item.data_bytes):
            raise FileError(
                f"{path}: expected {name} to be float32 of shape {shape}, found"
                f" {size(len(item.data_bytes))}; the file is damaged or of another version of OpenFL."
            )
        if item.name in tensors:
            raise FileError(f"{path}: two tensors are called {name}; save the file again.")
        tensors[item.name] = torch.from_numpy(np.frombuffer(item.data_bytes, "<f4").reshape(shape).copy())
    rounds = {item.round_number for item in message.tensors}
    metadata = {"openfl.round_number": str(rounds.pop())} if len(rounds) == 1 else {}
    notes = [f"dropped the optimizer's state: {names(dropped, 3)}"] if dropped else []
    return tensors, metadata, notes
