"""NumPy archives: arrays only, never objects, and never more bytes than the guard allows."""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlu_cli.errors import FileError
from rlu_cli.files.text import names, one_line
from rlu_cli.files.zips import guarded_members

if TYPE_CHECKING:
    import numpy as np
    import torch

_NUMBERED = re.compile(r"arr_(\d{1,9})\Z")


def _entry_order(name: str) -> tuple[int, int]:
    """``arr_2`` before ``arr_10``; other names keep the archive's order, after the numbered ones."""
    match = _NUMBERED.match(name)
    return (0, int(match[1])) if match else (1, 0)


def _to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor of the array's own bytes, or None where it isn't numeric. Keeps 0-d arrays 0-d."""
    import numpy as np
    import torch

    if array.dtype.kind not in "biufc":
        return None
    if array.dtype.kind in "fc" and array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
        array = array.astype(np.float64 if array.dtype.kind == "f" else np.complex128)
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(native)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    import numpy as np

    with archive.open(info) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array: np.ndarray[Any, Any] = np.lib.format.read_array(handle, allow_pickle=False)
        # zipfile checks the CRC only when it meets the end of the entry.
        if handle.read(1):
            raise ValueError("bytes left over after the array")
    return array


def read_npz(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Every numeric array of the archive by name, ``arr_N`` names in numerical order, and notes.

    Raises:
        FileError: Damaged, a zip bomb, two entries of one name, or an entry of Python objects.
    """
    by_name: dict[str, zipfile.ZipInfo] = {}
    for info in guarded_members(path):
        name = info.filename.removesuffix(".npy")
        if name in by_name:
            raise FileError(
                f"{path}: two entries are called {one_line(name)}; save it again with distinct names."
            )
        by_name[name] = info

    tensors: dict[str, torch.Tensor] = {}
    skipped: list[str] = []
    entry = ""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in sorted(by_name, key=_entry_order):
                array = _read_member(archive, by_name[entry])
                if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
                    raise FileError(
                        f"{path}: entry {one_line(entry)} has a 2-byte type that NumPy can't name"
                        " (bfloat16, most likely); save it as float32."
                    )
                tensor = _to_tensor(array)
                if tensor is None:
                    skipped.append(entry)
                else:
                    tensors[entry] = tensor
    except FileError:
        raise
    except Exception as error:
        where = one_line(entry)
        if "allow_pickle" in str(error):
            raise FileError(
                f"{path}: entry {where} holds Python objects, and unpickling them could run code; save plain"
                " arrays only, one np.savez argument per tensor (a list of unequal arrays becomes an object)."
            ) from error
        raise FileError(
            f"{path}: entry {where} is damaged ({one_line(error)}); copy or save the file again."
        ) from error
    notes = [f"ignored entries that aren't numeric: {names(skipped)}"] if skipped else []
    return tensors, notes
