"""Atomic and reproducible writing, hashes, metadata, truth files and small helpers."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.atomic import atomic_write, write_bytes, write_text
from rlu_cli.files.hashing import sha256_file
from rlu_cli.files.metadata import MODEL_KEYS, TRAINING_KEYS, first_of, read_sidecar
from rlu_cli.files.safetensors_io import read_safetensors, save_safetensors
from rlu_cli.files.state_dict import float_difference, strip_prefixes
from rlu_cli.files.text import names, one_line, size
from rlu_cli.files.truth import read_truth

# --- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_failed_write_leaves_the_old_file(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old\n")
    with pytest.raises(failure), atomic_write(path) as handle:
        handle.write(b"half")
        raise failure
    assert path.read_bytes() == b"old\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_mode_follows_umask_and_old_file(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_bytes(tmp_path / "new", b"1")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    write_bytes(tmp_path / "new", b"2")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604


def test_link_is_followed_and_device_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    write_bytes("/dev/null", b"x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_long_names_in_any_script(tmp_path: Path) -> None:
    """Names are limited in bytes, and the temporary one is longer by a few."""
    for name in ("x" * 250 + ".json", "字" * 82 + ".json", "😀" * 62):
        write_bytes(tmp_path / name, b"x")
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


@pytest.mark.skipif(os.name != "posix", reason="pipes with names")
def test_pipes_are_written_to() -> None:
    """/dev/fd/N, as the shell's >(…) gives it and /dev/stdout too, resolves to a name that nothing has."""
    there, here = os.pipe()
    write_bytes(f"/dev/fd/{here}", b"through")
    os.close(here)
    with os.fdopen(there, "rb") as reader:
        assert reader.read() == b"through"
    if Path("/dev/full").exists():
        with pytest.raises(FileError, match="/dev/full: can't be written"):
            write_bytes("/dev/full", b"x")


def test_unwritable(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file or directory"):
        write_bytes(tmp_path / "absent" / "f", b"")
    with pytest.raises(FileError, match="found a folder"):
        write_bytes(tmp_path, b"")
    with pytest.raises(FileError, match="No space left"), atomic_write(tmp_path / "f"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


def test_sha256(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()
    with pytest.raises(FileError, match="can't be read"):
        sha256_file(tmp_path / "absent")


_WRITER = """
import sys, torch
from rlu_cli.files.safetensors_io import save_safetensors
torch.manual_seed(0)
types = [torch.float32, torch.bfloat16, torch.float64]
tensors = {f"l{i}.é": torch.randn(i, 3).to(t) for i, t in enumerate(types)}
save_safetensors(sys.argv[1], tensors, {f"fl.k{i}": str(i) for i in range(20)})
"""


def test_same_bytes_from_every_process(tmp_path: Path) -> None:
    for seed in "012":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", _WRITER, str(tmp_path / seed)], check=True, env=env)
    written = {(tmp_path / seed).read_bytes() for seed in "012"}
    assert len(written) == 1
    data = written.pop()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert next(iter(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))) == "__metadata__"
    tensors, metadata = read_safetensors(tmp_path / "0")
    assert metadata == {f"fl.k{i}": str(i) for i in range(20)}
    torch.manual_seed(0)
    assert torch.equal(tensors["l0.é"], torch.randn(0, 3))
    assert torch.equal(tensors["l1.é"], torch.randn(1, 3).to(torch.bfloat16))


def test_views_and_shared_tensors_are_saved(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    save_safetensors(
        tmp_path / "v", {"a": base, "b": base, "t": base.T, "s": base[0, 0], "p": base.requires_grad_()}
    )
    loaded = load_file(tmp_path / "v")
    assert torch.equal(loaded["t"], base.detach().T)
    assert loaded["s"].shape == ()
    save_safetensors(tmp_path / "none", {})
    assert read_safetensors(tmp_path / "none") == ({}, {})


# --- metadata ----------------------------------------------------------------------------------------


def test_sidecar(tmp_path: Path) -> None:
    local = tmp_path / "k.pt"
    assert read_sidecar(local) == {}
    values = {
        "lr": 0.1,
        "fl.steps": 10,
        "nesterov": True,
        "class_names": ["a", "é"],
        "arch": "lenet5",
        "round": None,
    }
    (tmp_path / "round.json").write_text(json.dumps(values))
    assert read_sidecar(local) == {
        "fl.lr": "0.1",
        "fl.steps": "10",
        "fl.nesterov": "true",
        "fl.class_names": '["a", "é"]',
        "fl.arch": "lenet5",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "valid JSON"),
        ("[1]", "JSON object"),
        ('{"lr": 1, "fl.lr": 2}', "given twice"),
        ('{"lr": 1, "lr": 2}', "appears twice"),
        ('{"lr": NaN}', "NaN"),
        ('{"lr": ' + "[" * 100_000, "valid JSON"),
        ('{"lr": "' + "x" * 1_000_001 + '"}', "at most"),
        ("\xff", "valid JSON"),
    ],
)
def test_bad_sidecar(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "round.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match=message):
        read_sidecar(tmp_path / "k.pt")


def test_first_of_goes_flag_local_global_sidecar() -> None:
    local, global_, sidecar = (
        {"fl.lr": "1"},
        {"fl.lr": "2", "fl.steps": "3"},
        {"fl.epochs": "4", "fl.steps": "5"},
    )
    assert first_of("lr", 0.5, local, global_, sidecar) == (0.5, "flag")
    assert first_of("lr", None, local, global_, sidecar) == ("1", "local")
    assert first_of("fl.steps", None, local, global_, sidecar) == ("3", "global")
    assert first_of("epochs", None, local, global_, sidecar) == ("4", "sidecar")
    assert first_of("scheme", None, local, global_, sidecar) == (None, None)
    assert first_of("lr", 0.0, local, global_, sidecar) == (0.0, "flag")
    assert "fl.lambda" in TRAINING_KEYS and "fl.class_names" in MODEL_KEYS


# --- truth -------------------------------------------------------------------------------------------

CLASSES = ["cat", "dog", "emu"]


@pytest.mark.parametrize(
    "document",
    [
        {"counts": [2, 0, 1]},
        {"counts": [2.0, 0, 1]},
        {"counts": {"cat": 2, "emu": 1}},
        {"counts": {"0": 2, "2": 1}},
        {"labels": [0, 2, 0]},
        {"labels": ["cat", "emu", 0]},
        {"steps": [[0, 2], [0]]},
        {"steps": [["cat"], [], [0, "emu"]]},
        {"counts": [2, 0, 1], "labels": [2, 0, 0], "note": "both agree"},
    ],
)
def test_truth_forms(tmp_path: Path, document: Any) -> None:
    (tmp_path / "t.json").write_text(json.dumps(document))
    counts = read_truth(tmp_path / "t.json", num_classes=3, class_names=CLASSES)
    assert counts.dtype == np.int64
    assert counts.tolist() == [2, 0, 1]


def test_numeric_names_are_names_first(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"counts": {"10": 1, "2": 5}}')
    assert read_truth(tmp_path / "t.json", num_classes=2, class_names=["2", "10"]).tolist() == [5, 1]
    with pytest.raises(MismatchError, match="unknown class '10'"):
        read_truth(tmp_path / "t.json", num_classes=2, class_names=["2", "3"])


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ({"counts": [1, 2]}, MismatchError, "expected 3 counts"),
        ({"counts": [1, 2, -1]}, MismatchError, "at least 0"),
        ({"counts": [1, 2, True]}, MismatchError, "True"),
        ({"counts": [1, 2, 0.5]}, MismatchError, "0.5"),
        ({"counts": [1, 2, 10**400]}, MismatchError, "whole numbers"),
        ({"counts": [0, 0, 0]}, MismatchError, "at least one"),
        ({"counts": {"cow": 1}}, MismatchError, "expected one of cat, dog, emu"),
        ({"labels": [0, 3]}, MismatchError, "from 0 to 2"),
        ({"labels": [None]}, MismatchError, "None"),
        ({"labels": ["9"]}, MismatchError, "from 0 to 2"),
        ({"labels": [0], "counts": [0, 1, 0]}, MismatchError, "don't agree"),
        ({"labels": 3}, FileError, "list of labels"),
        ({"counts": 3}, FileError, "list or an object"),
        ({"steps": {}}, FileError, "list of lists"),
        ({"steps": [1]}, FileError, "step 1"),
        ({"clients": {}}, MismatchError, "expected the truth of the client"),
        ({"clients": {"client_1": {"counts": [1, 2, 3]}}}, MismatchError, "found client_1"),
        ([1, 2, 3], FileError, "none of these keys"),
        ({}, FileError, "none of these keys"),
    ],
)
def test_bad_truth(tmp_path: Path, document: Any, error: type[Exception], message: str) -> None:
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(error, match=message):
        read_truth(tmp_path / "t.json", num_classes=3, class_names=CLASSES)


def test_truth_without_names_and_with_wrong_names(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"labels": ["cat"]}')
    with pytest.raises(MismatchError, match="no class names are known"):
        read_truth(tmp_path / "t.json", num_classes=3, class_names=None)
    with pytest.raises(MismatchError, match="distinct class names"):
        read_truth(tmp_path / "t.json", num_classes=3, class_names=["a", "b"])
    (tmp_path / "t.json").write_text('{"counts": [1e999, 0, 0]}')
    with pytest.raises((FileError, MismatchError)):
        read_truth(tmp_path / "t.json", num_classes=3, class_names=None)


# --- helpers -----------------------------------------------------------------------------------------

PREFIX = st.sampled_from(["module.", "_orig_mod.", "_module.", "_fsdp_wrapped_module.", "model."])


@settings(deadline=None, max_examples=60)
@given(st.lists(PREFIX, max_size=4))
def test_prefixes_are_stripped_in_any_order(prefixes: list[str]) -> None:
    prefix = "".join(prefixes)
    tensors = {f"{prefix}{name}": torch.ones(1) for name in ("fc.weight", "conv.bias")}
    found, stripped = strip_prefixes(tensors)
    assert (set(found), stripped) == ({"fc.weight", "conv.bias"}, prefix)


def test_prefix_that_not_all_have_stays() -> None:
    genuine = {"module.weight": torch.ones(1), "fc.weight": torch.ones(1)}
    assert strip_prefixes(genuine) == (genuine, "")
    assert list(strip_prefixes({"model.": torch.ones(1)})[0]) == ["model."]
    assert strip_prefixes({}) == ({}, "")
    alone = {"n_averaged": torch.ones(1)}
    assert strip_prefixes(alone) == (alone, "")


def test_difference_is_taken_in_double_precision() -> None:
    local, global_ = (
        torch.tensor([1.0078125], dtype=torch.bfloat16),
        torch.tensor([1e-3], dtype=torch.float32),
    )
    difference = float_difference(local, global_)
    assert difference.dtype == torch.float64
    assert difference.item() == 1.0078125 - float(np.float32(1e-3))
    with pytest.raises(MismatchError, match=r"\(1,\)"):
        float_difference(local, torch.ones(2))


def test_text_for_messages() -> None:
    assert one_line("\n \x1b[1mbold\x1b[0m\x07 text\nmore") == "bold? text"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"
    assert one_line(EOFError()) == "EOFError"
    assert names(range(9), 3) == "0, 1, 2 and 6 more"
    assert [size(n) for n in (0, 1023, 1536, 5 * 2**30)] == ["0 bytes", "1023 bytes", "1.5 KiB", "5.0 GiB"]
