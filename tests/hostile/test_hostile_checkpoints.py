"""Files made to harm: no code from them ever runs, and nothing but our own errors comes out."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlu_cli.errors import FileError, RluError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.files.sniff import FileKind, sniff

WEIGHTS = {"fc.weight": torch.arange(12.0).reshape(3, 4), "fc.bias": torch.arange(3.0), "n": torch.tensor(3)}


class Payload:
    """Touches a file when unpickled by a loader that isn't safe."""

    def __init__(self, marker: Path, function: Callable[..., Any] = os.system) -> None:
        self.marker, self.function = marker, function

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        if self.function is eval:
            return eval, (f"__import__('pathlib').Path({str(self.marker)!r}).touch()",)
        return self.function, (f"touch '{self.marker}'",)


def refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text and "\x1b" not in text and len(text) < 450 + len(str(path)), text
    return text


@pytest.mark.parametrize("function", [os.system, os.popen, eval])
@pytest.mark.parametrize("form", ["pickle", "pickle0", "zip", "legacy", "zip-beside-weights", "npz", "npy"])
def test_payload_never_runs(tmp_path: Path, form: str, function: Callable[..., Any]) -> None:
    marker, path = tmp_path / "marker", tmp_path / "model.pt"
    payload = Payload(marker, function)
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps(payload, protocol=0 if form.endswith("0") else None))
    elif form.startswith("np"):
        save = np.savez if form == "npz" else np.save
        with path.open("wb") as handle:
            save(handle, np.array([payload], dtype=object), allow_pickle=True)
    else:
        content = {"state_dict": WEIGHTS, "extra": payload} if "beside" in form else payload
        torch.save(content, path, _use_new_zipfile_serialization=form != "legacy")
    refused(path)
    assert not marker.exists()
    if form == "pickle":  # the payload itself works, so the test means something
        result = pickle.loads(path.read_bytes())
        if hasattr(result, "close"):
            result.close()
        assert marker.exists()


def test_shard_payload_never_runs(tmp_path: Path) -> None:
    torch.save({"w": Payload(tmp_path / "marker")}, tmp_path / "a.bin")
    (tmp_path / "i.json").write_text('{"weight_map": {"w": "a.bin"}}')
    refused(tmp_path / "i.json")
    assert not (tmp_path / "marker").exists()


def _zip_with_pickle(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", data)
        archive.writestr("m/version", b"3\n")
        archive.writestr("m/byteorder", b"little")


def test_allowed_names_build_nothing(tmp_path: Path) -> None:
    """numpy.dtype's own state setter isn't memory-safe: here it never runs, whatever its state says."""
    state = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffM\xe7\x03t"
    for module, name in [("numpy", "dtype"), ("numpy._core.multiarray", "scalar"), ("argparse", "Namespace")]:
        data = f"\x80\x02c{module}\n{name}\n(U\x02O8tR".encode("latin-1") + state + b"b."
        _zip_with_pickle(tmp_path / "d.pt", data)
        assert "found Inert" in refused(tmp_path / "d.pt")


def test_dictionary_that_holds_itself(tmp_path: Path) -> None:
    # d = {}; d["model"] = d; d["net"] = d
    _zip_with_pickle(
        tmp_path / "c.pt", b"\x80\x02}q\x00(X\x05\x00\x00\x00modelh\x00X\x03\x00\x00\x00neth\x00u."
    )
    assert "no tensors" in refused(tmp_path / "c.pt")


def test_dictionaries_that_hold_one_another(tmp_path: Path) -> None:
    """A thousand ways into each of them: the paths to name would never end."""
    loop: dict[str, Any] = {}
    loop.update({f"key{n}": loop for n in range(1000)})
    torch.save({"state_dict": WEIGHTS, "more": {"deep": dict(WEIGHTS)}, "loop": loop}, tmp_path / "model.pt")
    found = read_checkpoint(tmp_path / "model.pt")
    assert set(found.tensors) == set(WEIGHTS)
    torch.save({"loop": loop, "more": {"deep": dict(WEIGHTS)}}, tmp_path / "lost.pt")
    assert "tensors lie under more.deep" in refused(tmp_path / "lost.pt")


@pytest.mark.parametrize("as_torch", [False, True])
def test_zip_bomb(tmp_path: Path, as_torch: bool) -> None:
    path = tmp_path / "bomb.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (400 * 2**20,)}
    )
    names = ["m/data.pkl", "m/version", "m/data/0"] if as_torch else ["arr_0.npy"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in names:
            archive.writestr(name, header.getvalue() + b"\0" * 1000)
    # What the directory claims is what counts, so that nothing needs to be unpacked to see it.
    data = bytearray(path.read_bytes())
    position = data.rindex(b"PK\x01\x02")
    data[position + 24 : position + 28] = struct.pack("<I", 2**31)
    path.write_bytes(data)
    assert "zip bomb" in refused(path)


def test_npy_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    for shape in [(2**31,), (2**62, 2**62), (10**30,), (-1,)]:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("arr_0.npy", header.getvalue() + b"\0" * 64)
        assert "arr_0 is damaged" in refused(tmp_path / "a.npz")


def test_npz_with_one_name_twice(tmp_path: Path) -> None:
    one = io.BytesIO()
    np.save(one, np.ones(2))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("w.npy", one.getvalue())
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("w.npy", one.getvalue())
    assert "two entries" in refused(tmp_path / "a.npz")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 99_999_999, 3, 0])
def test_safetensors_header_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", length) + b'{"w":{}}' + b" " * 64)
    refused(tmp_path / "a")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "X99", "shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_safetensors_entry_that_lies(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    assert "damaged" in refused(tmp_path / "a")


def test_terminal_codes_in_names_are_not_shown(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "a", {"\x1b[31mred\x07\n": torch.ones(1)})
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": {"\x1b[31mx\n": "a"}}))
    refused(tmp_path / "i.json")
    torch.save({"\x1b[31mx\n": 1}, tmp_path / "k.pt")
    refused(tmp_path / "k.pt")


def test_flatbuffer_whose_list_of_fields_passes_the_end(tmp_path: Path) -> None:
    data = bytearray(200)
    struct.pack_into("<I", data, 0, 16)
    struct.pack_into("<i", data, 16, 16 - 190)
    struct.pack_into("<HH", data, 190, 100, 16)
    (tmp_path / "a").write_bytes(data)
    assert sniff(tmp_path / "a") is FileKind.UNKNOWN


def test_any_bytes_are_told_apart_without_a_fault(tmp_path: Path) -> None:
    """Small numbers look like the offsets and lengths that protocol buffers and FlatBuffers begin with."""
    chance = random.Random(0)
    path = tmp_path / "a"
    for number in range(4000):
        length = chance.choice([1, 9, 20, 200, 700])
        small = [0, 0, 0, 1, 2, 4, 8, 10, 16, chance.randrange(256)]
        path.write_bytes(
            chance.randbytes(length) if number % 4 == 0 else bytes(chance.choices(small, k=length))
        )
        assert sniff(path) in FileKind


# --- damage ------------------------------------------------------------------------------------------


def _forms(folder: Path) -> dict[str, bytes]:
    save_safetensors(folder / "safetensors", WEIGHTS, {"fl.lr": "0.1", "tied": "fc.bias"})
    torch.save({"state_dict": WEIGHTS, "epoch": 3}, folder / "zip")
    torch.save(WEIGHTS, folder / "legacy", _use_new_zipfile_serialization=False)
    np.savez(folder / "npz", **{name: tensor.numpy() for name, tensor in WEIGHTS.items()})
    (folder / "npz.npz").rename(folder / "npz")
    (folder / "index").write_text(json.dumps({"metadata": {}, "weight_map": {"fc.bias": "safetensors"}}))
    return {name: (folder / name).read_bytes() for name in FORMS}


FORMS = ("safetensors", "zip", "legacy", "npz", "index")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return _forms(tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("twentieth", range(20))
@pytest.mark.parametrize("form", FORMS)
def test_cut_short(tmp_path: Path, forms: dict[str, bytes], form: str, twentieth: int) -> None:
    data = forms[form]
    path = tmp_path / "cut.pt"
    path.write_bytes(data[: len(data) * twentieth // 20])
    refused(path)


def _mutate(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(changed))
        if chance.random() < 0.5:  # headers, pickles and zip directories are where it hurts
            at = chance.choice([at % min(len(changed), 600), len(changed) - 1 - at % min(len(changed), 900)])
        action = chance.randrange(4)
        if action == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif action == 1:
            changed[at] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        elif action == 2:
            del changed[at : at + chance.randrange(1, 5)]
        else:
            changed[at:at] = chance.randbytes(chance.randrange(1, 5))
    return bytes(changed)


@pytest.mark.parametrize("form", FORMS)
def test_changed_bytes(tmp_path: Path, forms: dict[str, bytes], form: str) -> None:
    save_safetensors(tmp_path / "safetensors", WEIGHTS)
    chance = random.Random(FORMS.index(form) + int(os.environ.get("RLU_FUZZ_SEED", "0")))
    path = tmp_path / "changed.pt"
    read = 0
    for _ in range(int(os.environ.get("RLU_FUZZ_COUNT", "150"))):
        data = _mutate(forms[form], chance)
        path.unlink(missing_ok=True)  # a mapped file is never overwritten in place
        path.write_bytes(data)
        try:
            found = read_checkpoint(path)
        except RluError as error:
            assert "\n" not in str(error) and "\x1b" not in str(error)
        else:
            assert found.tensors
            assert all(torch.isfinite(t.double()).numel() == t.numel() for t in found.tensors.values())
            read += 1
    assert read, "some changes only touch the data, so something must still be readable"
