"""What a file is, told from its content and never from its suffix. Only headers are read."""

from __future__ import annotations

import re
import struct
import zipfile
from enum import Enum
from pathlib import Path

from rlu_cli.errors import FileError
from rlu_cli.files.regular import is_folder
from rlu_cli.files.text import one_line

_HEAD_BYTES = 64 * 1024
_TORCH_LEGACY_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19."
_MARKUP = re.compile(rb"\s*(<!doctype|<html|<head|<body|<\?xml|<!--)", re.IGNORECASE)
_PICKLE_OPCODES = b"\x95(}]).cXU\x8c\x8a\x8bKMJN\x88\x89GC\x8eB"


class FileKind(Enum):
    """The kinds of file an archive of rounds may hold; the value is how a message names it."""

    SAFETENSORS = "safetensors file"
    SAFETENSORS_INDEX = "index of a sharded checkpoint"
    TORCH_ZIP = "torch checkpoint"
    TORCH_LEGACY = "torch checkpoint of the old format"
    TORCHSCRIPT = "TorchScript archive"
    TORCH_EXPORT = "torch.export archive (.pt2)"
    NPZ = "NumPy archive (.npz)"
    OPENFL = "OpenFL model (.pbuf)"
    NPY = "single NumPy array (.npy)"
    PICKLE = "plain pickle"
    GIT_LFS_POINTER = "Git LFS pointer"
    HTML = "web page"
    JSON = "JSON file"
    GGUF = "GGUF model"
    HDF5 = "HDF5 (Keras) model"
    FOBS = "NVFlare FOBS file"
    FLATBUFFER = "FlatBuffers file, such as an MNN model"
    GZIP = "gzip file"
    ZIP = "zip archive of another kind"
    ZIP_DAMAGED = "damaged zip archive"
    EMPTY = "empty file"
    DIRECTORY = "folder"
    UNKNOWN = "file of unknown kind"


_MAGIC = (
    (b"version https://git-lfs", FileKind.GIT_LFS_POINTER),
    (b"GGUF", FileKind.GGUF),
    (b"\x89HDF\r\n\x1a\n", FileKind.HDF5),
    (b"\x93NUMPY", FileKind.NPY),
    (b"\x1f\x8b", FileKind.GZIP),
)


def read_head(path: Path, count: int = _HEAD_BYTES) -> bytes:
    """The first ``count`` bytes of a regular file."""
    try:
        if not path.exists():
            raise FileError(f"{path}: no such file; check the path.")
        if not path.is_file():
            raise FileError(
                f"{path}: expected a regular file, found a device or pipe; save it to a file first."
            )
        with path.open("rb") as handle:
            return handle.read(count)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(
            f"{path}: can't be read ({one_line(reason)}); check the path and permissions."
        ) from error


def _is_safetensors(head: bytes) -> bool:
    """An 8-byte length, then a JSON object. Eight printable bytes are text, not a length."""
    if len(head) < 9 or head[8:9] != b"{":
        return False
    return not all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:8])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A protocol-buffer number and where it ends; IndexError past the end."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            return value, at


def _is_openfl(head: bytes) -> bool:
    """A ``ModelProto``: it begins with a tensor, and that with its name, each as field 1 of known length."""
    try:
        if head[0] != 0x0A:
            return False
        whole, at = _varint(head, 1)
        if head[at] != 0x0A:
            return False
        length, start = _varint(head, at + 1)
        name = head[start : start + length].decode("utf-8")
    except (IndexError, UnicodeDecodeError):
        return False
    return 0 < length < min(whole, 1024) and len(name) > 0 and name.isprintable()


def _is_flatbuffer(head: bytes) -> bool:
    """An offset to a table, whose own offset leads to a list of its fields. MNN has no other mark."""
    if len(head) < 16:
        return False
    (root,) = struct.unpack_from("<I", head)
    if root % 2 or not 4 <= root <= len(head) - 4:
        return False
    (back,) = struct.unpack_from("<i", head, root)
    table = root - back
    if table % 2 or not 4 <= table <= len(head) - 4:
        return False
    fields, extent = struct.unpack_from("<HH", head, table)
    if fields % 2 or not 4 < fields <= min(512, len(head) - table) or not 4 < extent <= 4096:
        return False
    offsets = struct.unpack_from(f"<{fields // 2 - 2}H", head, table + 4)
    return any(offsets) and all(offset == 0 or 4 <= offset < extent for offset in offsets)


def _zip_kind(path: Path) -> FileKind:
    """Which zip-based format, from the archive's directory alone."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if not name.endswith("/")]
    # A hostile directory makes zipfile raise many kinds of error, struct.error and KeyError among them.
    except Exception:  # noqa: BLE001
        return FileKind.ZIP_DAMAGED
    inner = {name.split("/", 1)[-1] for name in members} | set(members)
    if "archive_format" in inner or "serialized_exported_program.json" in inner:
        return FileKind.TORCH_EXPORT
    if "data.pkl" in inner:
        script = "constants.pkl" in inner or any(name.startswith("code/") for name in inner)
        return FileKind.TORCHSCRIPT if script else FileKind.TORCH_ZIP
    if members and all(name.endswith(".npy") for name in members):
        return FileKind.NPZ
    return FileKind.ZIP


def sniff(path: Path | str) -> FileKind:
    """The kind of ``path``, by content.

    Raises:
        FileError: It doesn't exist, can't be opened, or isn't a regular file or folder.
    """
    path = Path(path)
    if is_folder(path):
        return FileKind.DIRECTORY
    head = read_head(path)
    if not head:
        return FileKind.EMPTY
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_kind(path)
    if _TORCH_LEGACY_MAGIC in head[:32]:
        return FileKind.TORCH_LEGACY
    if _is_safetensors(head):
        return FileKind.SAFETENSORS
    if head[0] == 0x80 and len(head) > 2 and head[1] <= 5 and head[2] in _PICKLE_OPCODES:
        return FileKind.PICKLE
    if b"__fobs_" in head:
        return FileKind.FOBS
    if _MARKUP.match(head):
        return FileKind.HTML
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{") and b'"weight_map"' in text:
        return FileKind.SAFETENSORS_INDEX
    if text.startswith((b"{", b"[")):
        return FileKind.JSON
    if _is_openfl(head):
        return FileKind.OPENFL
    return FileKind.FLATBUFFER if _is_flatbuffer(head) else FileKind.UNKNOWN
