"""safetensors: reading with one-line errors, writing atomically and with the same bytes every time."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlu_cli.errors import FileError
from rlu_cli.files.atomic import atomic_write
from rlu_cli.files.regular import utf8_name
from rlu_cli.files.text import one_line, size
from rlu_cli.interrupts import raise_if_heard

if TYPE_CHECKING:
    from torch import Tensor

HEADER_LIMIT = 100_000_000
_ALIGNMENT = 8


def _check_header(path: Path) -> None:
    """The header's length against the file's, for a clearer message than the library's."""
    try:
        with path.open("rb") as handle:
            prefix = handle.read(8)
        length = path.stat().st_size
    except OSError as error:
        raise FileError(f"{path}: can't be read ({one_line(error.strerror)}); check the path.") from error
    if len(prefix) < 8:
        raise FileError(
            f"{path}: expected a safetensors file, found only {size(length)}; copy or download it again."
        )
    (header,) = struct.unpack("<Q", prefix)
    if header > HEADER_LIMIT:
        raise FileError(
            f"{path}: its safetensors header claims {size(header)}, more than the format's 100 MB; the file"
            f" is damaged or of another kind ({size(length)}); copy or download it again."
        )
    if 8 + header > length:
        raise FileError(
            f"{path}: cut short at {size(length)}, within its safetensors header; copy or download it again."
        )


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors on the CPU, and the metadata (empty where the file has none).

    Raises:
        FileError: Damaged, cut short, or of a type that torch lacks.
    """
    _check_header(path)
    import safetensors

    try:
        with utf8_name(path) as name, safetensors.safe_open(name, framework="pt", device="cpu") as archive:
            metadata = archive.metadata()
            tensors = {key: archive.get_tensor(key) for key in archive.keys()}  # noqa: SIM118
    except Exception as error:
        raise_if_heard()
        reason = one_line(error).removeprefix("Error while deserializing header: ")
        raise FileError(
            f"{path}: damaged or cut short at {size(path.stat().st_size)} ({reason});"
            " copy or download it again."
        ) from error
    return tensors, dict(metadata) if metadata else {}


def resolve_aliases(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> list[str]:
    """Add back tied tensors, saved once and named ``{dropped: kept}`` in the metadata; returns notes."""
    pairs = [
        (dropped, kept)
        for dropped, kept in sorted(metadata.items())
        if kept in tensors
        and dropped not in tensors
        and not dropped.startswith("fl.")
        and dropped != "format"
    ]
    for dropped, kept in pairs:
        tensors[dropped] = tensors[kept]
    return [f"tied tensor {one_line(dropped, 80)} is {one_line(kept, 80)}" for dropped, kept in pairs]


def _canonical_header(header: bytes) -> bytes:
    """The header with metadata keys sorted and tensors in the order of their data, padded to 8 bytes."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", None)
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1]["data_offsets"], item[0])))
    if metadata:
        ordered = {"__metadata__": dict(sorted(metadata.items())), **ordered}
    text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return text + b" " * (-len(text) % _ALIGNMENT)


def save_safetensors(
    path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically; the same input gives the same bytes in every process.

    The library writes ``__metadata__`` in random order, so its header is written anew.

    Raises:
        FileError: The file can't be written.
    """
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data = memoryview(save(plain, dict(metadata) if metadata else None))
    (length,) = struct.unpack("<Q", data[:8])
    header = _canonical_header(bytes(data[8 : 8 + length]))
    with atomic_write(path) as handle:
        handle.write(struct.pack("<Q", len(header)))
        handle.write(header)
        handle.write(data[8 + length :])
