"""Reading a checkpoint of any supported kind into one flat dictionary of plain CPU tensors.

Data stay on disk until they are used: safetensors files and torch's zip files are memory-mapped, so a tensor
that nobody looks at costs no memory. Legacy torch files and NumPy archives are read whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlu_cli.errors import FileError
from rlu_cli.files.metadata import KEYS, PREFIX, normalise
from rlu_cli.files.npz_io import read_npz
from rlu_cli.files.openfl import read_openfl
from rlu_cli.files.positional import is_positional
from rlu_cli.files.refusals import describe_refusal
from rlu_cli.files.safetensors_io import read_safetensors, resolve_aliases
from rlu_cli.files.shards import read_sharded
from rlu_cli.files.sniff import FileKind, sniff
from rlu_cli.files.state_dict import has_key, is_flat, join_weight_norm, strip_prefixes, unwrap
from rlu_cli.files.text import names, one_line, size
from rlu_cli.files.torch_io import read_torch
from rlu_cli.files.zips import memory_limit

if TYPE_CHECKING:
    from torch import Tensor

_FORMATS = {
    FileKind.SAFETENSORS: "safetensors",
    FileKind.SAFETENSORS_INDEX: "sharded",
    FileKind.TORCH_ZIP: "torch-zip",
    FileKind.TORCH_LEGACY: "torch-legacy",
    FileKind.NPZ: "npz",
    FileKind.OPENFL: "openfl",
}


@dataclass(frozen=True)
class Checkpoint:
    """One model's tensors, as read from a file."""

    path: Path
    format: str
    """``safetensors``, ``sharded``, ``torch-zip``, ``torch-legacy``, ``npz`` or ``openfl``."""
    tensors: dict[str, Tensor]
    """On the CPU, detached, by name, in the file's order."""
    metadata: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was unwrapped, stripped, joined or ignored."""
    prefix: str = ""
    """What was stripped from the front of every name."""
    key: str | None = None
    """The key asked for, where the file has it."""
    unjoined: dict[str, Tensor] = field(default_factory=dict)
    """``tensors`` before weight norm was joined: what a file that holds an update is added to."""

    @property
    def positional(self) -> bool:
        """Whether the tensors have no names but ``arr_0``, ``arr_1``, … (see ``name_positional``)."""
        return is_positional(self.tensors)


def _raw(path: Path, kind: FileKind) -> tuple[Any, dict[str, str], list[str]]:
    """What the file holds, before any unwrapping, with its metadata and notes."""
    if kind is FileKind.SAFETENSORS or kind is FileKind.SAFETENSORS_INDEX:
        read = read_safetensors if kind is FileKind.SAFETENSORS else read_sharded
        tensors, metadata = read(path)
        return tensors, metadata, resolve_aliases(tensors, metadata)
    if kind is FileKind.NPZ:
        arrays, notes = read_npz(path)
        return arrays, {}, notes
    if kind is FileKind.OPENFL:
        return read_openfl(path)
    return read_torch(path, is_zip=kind is FileKind.TORCH_ZIP), {}, []


def _annotations(path: Path, obj: object) -> dict[str, str]:
    """``fl.*`` entries at the top of a checkpoint that has no other place for them, as metadata.

    One that is read and no plain value is refused: left out, a momentum or an order of classes would silently
    be another one.
    """
    if not isinstance(obj, Mapping):
        return {}
    found = {k: _value(k, v) for k, v in obj.items() if isinstance(k, str) and k.startswith(PREFIX)}
    plain = {key: value for key, value in found.items() if _is_plain(value)}
    wrong = sorted(KEYS & (found.keys() - plain.keys()))
    if wrong:
        raise FileError(
            f"{path}: expected text, numbers or lists of them in {names(wrong)}, found other objects, of"
            " which the safe loader keeps nothing; save a NumPy number as float(value), an array as a list."
        )
    try:
        return normalise(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: its {PREFIX}* entries aren't plain values ({one_line(error)}).") from error


def _value(key: str, value: object) -> object:
    """A number out of a tensor that holds one, where the key can't be a weight's; a list for a tuple."""
    import torch

    if key in KEYS and isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: object) -> bool:
    """Text, a number, nothing, or a list of such; lists of lists could hold one another without end."""
    simple = (str, int, float, type(None))
    return isinstance(value, simple) or (
        isinstance(value, list) and all(isinstance(item, simple) for item in value)
    )


def _plain(path: Path, name: str, tensor: Tensor) -> Tensor:
    """A detached, dense tensor that has its data; a view far larger than its data is refused."""
    import torch

    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided or tensor.is_nested:
        raise FileError(f"{path}: {name} is a sparse or nested tensor; save it dense.")
    if tensor.device.type != "cpu":
        raise FileError(
            f"{path}: {name} has no data (device {tensor.device.type}); save it from a loaded model."
        )
    return tensor


def _plain_tensors(path: Path, found: Mapping[Any, Any]) -> tuple[dict[str, Tensor], list[str]]:
    import torch

    tensors: dict[str, Tensor] = {}
    ignored: list[str] = []
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and isinstance(key, str) and key and key not in KEYS:
            tensors[key] = _plain(path, one_line(key, 80), value)
        elif not (isinstance(key, str) and key.startswith(PREFIX)):
            ignored.append(str(key))
    if not tensors:
        raise FileError(
            f"expected a dictionary of tensors, found the keys {names(found, 12)} and no named tensors."
        )
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    stored = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}.values()
    )
    if total > memory_limit(stored):
        raise FileError(
            f"{path}: refused, since {size(stored)} of data claim to be {size(total)} of tensors."
        )
    return tensors, [f"ignored entries that aren't tensors: {names(ignored)}"] if ignored else []


def is_checkpoint(path: Path) -> bool:
    """Whether a file is of a kind that can be read, by its content.

    Raises:
        FileError: It can't be opened.
    """
    return sniff(path) in _FORMATS


def read_checkpoint(
    path: Path | str,
    *,
    key: str | None = None,
    key_optional: bool = False,
) -> Checkpoint:
    """Read a checkpoint, whatever its suffix says, without ever running code from it.

    Args:
        path: A safetensors file, index of a sharded checkpoint, torch checkpoint, NumPy archive or OpenFL
            model.
        key: Where in a nested checkpoint the weights lie, such as ``state_dict_ema`` or ``server.model``.
        key_optional: Whether a file of tensors alone, with nothing nested, may lack the key.

    Raises:
        FileError: Missing, damaged, of another kind, unsafe, or without tensors.
        UsageError: Of a kind whose optional package isn't installed.
    """
    path = Path(path)
    kind = sniff(path)
    if kind not in _FORMATS:
        raise FileError(describe_refusal(kind, path))
    try:
        obj, metadata, notes = _raw(path, kind)
        metadata = {**_annotations(path, obj), **metadata}
        if key is not None and key_optional and not has_key(obj, key) and is_flat(obj):
            key = None
        found, unwrapped = unwrap(obj, key)
        tensors, ignored = _plain_tensors(path, found)
    except FileError as error:
        message = str(error)
        raise FileError(message if message.startswith(str(path)) else f"{path}: {message}") from error
    notes += unwrapped + ignored
    if is_positional(tensors):
        return Checkpoint(path, _FORMATS[kind], tensors, metadata, tuple(notes), key=key, unjoined=tensors)
    before = len(tensors)
    tensors, prefix = strip_prefixes(tensors)
    if prefix:
        dropped = ", dropped n_averaged" if len(tensors) < before else ""
        notes.append(f"stripped the prefix {prefix!r}{dropped}")
    joined, joins = join_weight_norm(tensors)
    return Checkpoint(path, _FORMATS[kind], joined, metadata, (*notes, *joins), prefix, key, tensors)
