"""torch checkpoints, read with ``weights_only=True`` and never any other way.

Objects that often sit beside the weights (NumPy scalars, argparse's Namespace, paths) would block the
whole file. They are let through as an inert stand-in that drops its arguments, so neither NumPy's nor
anyone else's constructors run on bytes from the file.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlu_cli.errors import FileError
from rlu_cli.files.refusals import RESAVE
from rlu_cli.files.regular import utf8_name
from rlu_cli.files.text import names, one_line, size
from rlu_cli.files.zips import guarded_members

_MINIMUM_TORCH = (2, 6)
_BLOCKED = re.compile(r"(?:GLOBAL|Unsupported class|unrecognized function) ([\w.<>]+)")
_RESAVE_ARRAYS = (
    "turn NumPy arrays into tensors (torch.from_numpy) before torch.save, or write them with np.savez"
)
_OTHER_PICKLE_PROTOCOL = re.compile(r"Unsupported operand 1(?:4\d|5[01])\b")


class Inert:
    """What a harmless object in a checkpoint becomes: it holds nothing and does nothing."""

    def __new__(cls, *_args: object, **_keywords: object) -> Inert:
        """Drop the arguments."""
        return super().__new__(cls)

    def __init__(self, *_args: object, **_keywords: object) -> None:
        """Drop the arguments."""

    def __setstate__(self, _state: object) -> None:
        """Drop the state."""


def _dtype_class_names() -> list[str]:
    kinds = ("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
    return [f"numpy.dtypes.{kind}DType" for kind in (*kinds, "Float16", "Float32", "Float64", "Str", "Bytes")]


INERT_GLOBALS = (
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    *_dtype_class_names(),
    "argparse.Namespace",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)


def _check_version(path: Path, version: str) -> None:
    """Before 2.6, torch's ``weights_only=True`` could be made to run code (CVE-2025-32434)."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < _MINIMUM_TORCH:
        raise FileError(
            f"{path}: refused, since torch {version} can be made to run code by a .pt file even with"
            " weights_only=True (CVE-2025-32434); upgrade to torch 2.6 or later, or use safetensors."
        )


def _mappable(path: Path) -> bool:
    """Whether every entry is stored uncompressed, as torch.save does, so that pages can be mapped."""
    return all(info.compress_type == zipfile.ZIP_STORED for info in guarded_members(path))


def _blocking_globals(path: Path, message: str, *, is_zip: bool) -> list[str]:
    """Names of the classes and functions that the safe loader wouldn't build."""
    import torch

    found: set[str] = set()
    if is_zip:
        try:
            with utf8_name(path) as name:
                found |= set(torch.serialization.get_unsafe_globals_in_checkpoint(name))
        # The names only explain a refusal that already happened; a damaged pickle may fail in any way.
        except Exception:  # noqa: BLE001
            found = set()
    return sorted(found | (set(_BLOCKED.findall(message)) if not found else set()))


def _rewritten(path: Path, error: Exception, *, is_zip: bool) -> FileError:
    """torch's own message names classes but also advises unsafe loading, in bold; ours doesn't."""
    message = str(error)
    if type(error).__name__ == "UnpicklingError":
        blocked = _blocking_globals(path, message, is_zip=is_zip)
        if blocked:
            arrays = all(name.startswith("numpy.") for name in blocked)
            return FileError(
                f"{path}: expected tensors only, found {names(blocked)}, and loading such objects could run"
                f" code; {_RESAVE_ARRAYS if arrays else RESAVE}."
            )
        if _OTHER_PICKLE_PROTOCOL.search(message):
            return FileError(
                f"{path}: expected a checkpoint of pickle protocol 2, torch's default, found a later one;"
                f" {RESAVE}, without pickle_protocol."
            )
    detail = (
        message.split("WeightsUnpickler error:")[-1] if "Weights only load failed" in message else message
    )
    reason = one_line(detail) or type(error).__name__
    length = size(path.stat().st_size)
    return FileError(f"{path}: damaged or cut short at {length} ({reason}); copy or save the file again.")


def read_torch(path: Path, *, is_zip: bool) -> Any:
    """The object a torch checkpoint holds: tensors on the CPU, in containers of plain Python values.

    Raises:
        FileError: It holds other objects, is damaged, or would unpack to more than the guard allows.
    """
    import torch

    _check_version(path, torch.__version__)
    mmap = is_zip and _mappable(path)
    inert: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (Inert, name) for name in INERT_GLOBALS
    ]
    with torch.serialization.safe_globals(inert), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with utf8_name(path) as name:
                return torch.load(name, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:
            raise _rewritten(path, error, is_zip=is_zip) from error
