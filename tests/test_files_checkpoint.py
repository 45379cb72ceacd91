"""The same tensors come back from every supported format, and everything else is refused with advice."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.positional import name_positional
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.files.sniff import FileKind, sniff


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(8, 6), torch.nn.Linear(6, 3)
    )


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model().state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
        assert not found[name].requires_grad
        assert type(found[name]) is torch.Tensor


def save_sharded(folder: Path, weights: dict[str, torch.Tensor], suffix: str = "safetensors") -> Path:
    weight_map = {}
    for number, name in enumerate(weights):
        weight_map[name] = f"model-{number % 2 + 1:05d}-of-00002.{suffix}"
    for shard in sorted(set(weight_map.values())):
        part = {name: weights[name] for name in weights if weight_map[name] == shard}
        if suffix == "bin":
            torch.save(part, folder / shard)
        else:
            save_file(part, folder / shard, {"fl.lr": "0.1"})
    index = folder / f"model.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 12}, "weight_map": weight_map}))
    return index


# --- the formats -------------------------------------------------------------------------------------


def test_safetensors(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "odd.name"
    save_safetensors(path, weights, {"fl.lr": "0.1"})
    found = read_checkpoint(path)
    assert_same(found.tensors, weights)
    assert (found.format, found.metadata, found.notes) == ("safetensors", {"fl.lr": "0.1"}, ())
    save_safetensors(path, weights)
    assert read_checkpoint(path).metadata == {}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded(tmp_path: Path, weights: dict[str, torch.Tensor], suffix: str) -> None:
    found = read_checkpoint(save_sharded(tmp_path, weights, suffix))
    assert_same(found.tensors, weights)
    assert found.metadata["total_size"] == "12"
    if suffix == "safetensors":
        assert found.metadata["fl.lr"] == "0.1"


@pytest.mark.parametrize("zipped", [True, False])
def test_torch(tmp_path: Path, weights: dict[str, torch.Tensor], zipped: bool) -> None:
    path = tmp_path / "global_model_round_3"
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    assert sniff(path) is (FileKind.TORCH_ZIP if zipped else FileKind.TORCH_LEGACY)
    found = read_checkpoint(path)
    assert_same(found.tensors, weights)
    assert found.format == ("torch-zip" if zipped else "torch-legacy")


def test_rezipped_with_compression(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, tmp_path / "w.pt")
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as old,
        zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert_same(read_checkpoint(tmp_path / "z.pt").tensors, weights)


def test_environment_cannot_turn_off_safe_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(model(), tmp_path / "m.pt")
    with pytest.raises(FileError, match=r"torch\.nn"):
        read_checkpoint(tmp_path / "m.pt")


def test_bfloat16_and_parameters(tmp_path: Path) -> None:
    weights = {"w": torch.randn(3, 2).to(torch.bfloat16), "s": torch.tensor(2.0, dtype=torch.float16)}
    save_safetensors(tmp_path / "a", weights)
    torch.save({k: torch.nn.Parameter(v) for k, v in weights.items()}, tmp_path / "b")
    for name in "ab":
        assert_same(read_checkpoint(tmp_path / name).tensors, weights)


def test_npz_with_more_than_ten_arrays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(i + 2, i + 3) for i in range(6)], torch.nn.BatchNorm1d(8))
    weights = net.state_dict()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in weights.items()]
    np.savez(tmp_path / "m.npz", *[tensor.numpy() for tensor in weights.values()])
    found = read_checkpoint(tmp_path / "m.npz")
    assert found.positional
    assert list(found.tensors)[9:12] == ["arr_9", "arr_10", "arr_11"]
    assert_same(name_positional(found.tensors, shapes), weights)

    kept = {k: v for k, v in weights.items() if not k.endswith("num_batches_tracked")}
    np.savez(tmp_path / "k.npz", *[tensor.numpy() for tensor in kept.values()])
    assert_same(name_positional(read_checkpoint(tmp_path / "k.npz").tensors, shapes), kept)

    with pytest.raises(MismatchError, match=r"arr_0 has shape .*0\.weight"):
        name_positional(found.tensors, [(n, s[::-1]) for n, s in shapes])
    with pytest.raises(MismatchError, match="17 arrays"):
        name_positional(found.tensors, shapes[:-3])
    gap = dict(found.tensors)
    del gap["arr_3"]
    with pytest.raises(MismatchError, match="arr_3 is missing"):
        name_positional(gap, shapes)


@pytest.mark.parametrize("shape", [(0,), (1,), ()])
def test_batchnorm_counter_that_lost_its_shape(shape: tuple[int, ...]) -> None:
    counter = torch.zeros(shape, dtype=torch.int64)
    named = name_positional({"arr_0": counter}, [("bn.num_batches_tracked", ())])
    assert named["bn.num_batches_tracked"].shape == ()


def test_npz_with_names_and_odd_types(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "m.npz",
        **{"module.fc.weight": np.arange(6, dtype=">f4").reshape(2, 3), "module.n": np.array(3)},
        **{"module.t": np.array("text"), "module.f": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
    )
    found = read_checkpoint(tmp_path / "m.npz")
    assert not found.positional
    assert found.prefix == "module."
    assert torch.equal(found.tensors["fc.weight"], torch.arange(6, dtype=torch.float32).reshape(2, 3))
    assert torch.equal(found.tensors["f"], torch.arange(6, dtype=torch.float64).reshape(2, 3))
    assert found.tensors["n"].shape == ()
    assert "module.t" in found.notes[0]


def test_tied_tensors(tmp_path: Path) -> None:
    metadata = {"head.weight": "embed.weight", "format": "pt", "fl.head": "embed.weight", "other": "absent"}
    save_safetensors(tmp_path / "t", {"embed.weight": torch.ones(2, 2)}, metadata)
    found = read_checkpoint(tmp_path / "t")
    assert set(found.tensors) == {"embed.weight", "head.weight"}
    assert "tied" in found.notes[0]


# --- what sits around the weights --------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict", "net", "params", "weights"])
def test_nested(tmp_path: Path, weights: dict[str, torch.Tensor], wrapper: str) -> None:
    content = {
        wrapper: weights,
        "epoch": 3,
        "acc": np.float64(0.5),
        "n": np.int64(3),
        "args": argparse.Namespace(lr=0.1),
        "step": torch.tensor(3),
        "out": Path("x"),
    }
    torch.save(content, tmp_path / "n.pt")
    found = read_checkpoint(tmp_path / "n.pt")
    assert_same(found.tensors, weights)
    assert found.notes == (f"read from {wrapper!r}",)


def test_several_wrappers_and_averaged_weights(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    other = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    torch.save({"net": other, "model": {"state_dict": weights}, "state_dict_ema": other}, tmp_path / "n.pt")
    found = read_checkpoint(tmp_path / "n.pt")
    assert_same(found.tensors, weights)
    assert any("'model.state_dict'" in note for note in found.notes)
    assert any("not read" in note and "net" in note for note in found.notes)
    assert any("averaged" in note and "state_dict_ema" in note for note in found.notes)
    for key, expected in [("state_dict_ema", other), ("model.state_dict", weights)]:
        assert_same(read_checkpoint(tmp_path / "n.pt", key=key).tensors, expected)
    with pytest.raises(FileError, match=r"'nope'.*model\.state_dict"):
        read_checkpoint(tmp_path / "n.pt", key="nope")


def test_key_in_a_flat_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    both = {f"client.{k}": v for k, v in weights.items()} | {f"server.{k}": v + 1 for k, v in weights.items()}
    save_safetensors(tmp_path / "b", both)
    assert_same(read_checkpoint(tmp_path / "b", key="client").tensors, weights)


def test_annotations_in_a_torch_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(
        {"state_dict": weights, "fl.lr": 0.1, "fl.nesterov": True, "fl.arch": "lenet5"}, tmp_path / "a.pt"
    )
    assert read_checkpoint(tmp_path / "a.pt").metadata == {
        "fl.lr": "0.1",
        "fl.nesterov": "true",
        "fl.arch": "lenet5",
    }


def test_annotations_in_a_numpy_archive(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    np.savez(tmp_path / "a.npz", **{n: t.numpy() for n, t in weights.items()}, **{"fl.lr": np.float64(0.1)})
    found = read_checkpoint(tmp_path / "a.npz")
    assert found.metadata == {"fl.lr": "0.1"}
    assert_same(found.tensors, weights)


def test_annotations_of_other_types_in_a_torch_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """What would be lost changes counts: it is read, or refused by name. Weights may be called fl.… too."""
    about = {"fl.momentum": torch.tensor(0.5), "fl.class_names": ("b", "a"), "fl.image_size": (28, 28)}
    torch.save({**weights, **about, "fl.weight": torch.ones(2, 3), "fl.other": {"a": 1}}, tmp_path / "a.pt")
    found = read_checkpoint(tmp_path / "a.pt")
    assert found.metadata == {
        "fl.momentum": "0.5",
        "fl.class_names": '["b", "a"]',
        "fl.image_size": "[28, 28]",
    }
    assert_same(found.tensors, {**weights, "fl.weight": torch.ones(2, 3)})
    nested: list[Any] = ["a"]
    for _ in range(60):
        nested = [nested, nested]
    for value in (np.float64(0.9), {"a": 1}, nested, torch.zeros(2)):
        torch.save({"state_dict": weights, "fl.momentum": value}, tmp_path / "b.pt")
        with pytest.raises(FileError, match=r"in fl\.momentum, found other objects"):
            read_checkpoint(tmp_path / "b.pt")


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "_module.", "_fsdp_wrapped_module.", "model.", "_orig_mod.module.model."],
)
def test_prefixes(tmp_path: Path, weights: dict[str, torch.Tensor], prefix: str) -> None:
    torch.save({prefix + name: tensor for name, tensor in weights.items()}, tmp_path / "p.pt")
    found = read_checkpoint(tmp_path / "p.pt")
    assert_same(found.tensors, weights)
    assert found.prefix == prefix


def test_averaged_model(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(torch.optim.swa_utils.AveragedModel(model()).state_dict(), tmp_path / "a.pt")
    found = read_checkpoint(tmp_path / "a.pt")
    assert_same(found.tensors, weights)
    assert "n_averaged" in found.notes[0]


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_norm(tmp_path: Path, dim: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4, dtype=dtype))
    torch.nn.utils.parametrizations.weight_norm(net[0], dim=dim)
    with torch.no_grad():
        net[0].parametrizations.weight.original0.mul_(2.0)
    new = net.state_dict()
    old = {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): tensor
        for name, tensor in new.items()
    }
    for weights in (new, old):
        torch.save(weights, tmp_path / "w.pt")
        found = read_checkpoint(tmp_path / "w.pt")
        assert set(found.tensors) == {"0.weight", "0.bias"}
        torch.testing.assert_close(found.tensors["0.weight"], net[0].weight.detach())
        assert "0.weight" in found.notes[0]
        assert set(found.unjoined) == set(weights)


def test_list_of_tensors(tmp_path: Path) -> None:
    torch.save([torch.ones(2), torch.zeros(3)], tmp_path / "l.pt")
    found = read_checkpoint(tmp_path / "l.pt")
    assert found.positional
    assert [tuple(t.shape) for t in found.tensors.values()] == [(2,), (3,)]


# --- refusals ----------------------------------------------------------------------------------------


def write_refused(folder: Path) -> dict[str, tuple[Path, FileKind, str]]:
    net = torch.nn.Linear(2, 2)
    cases: dict[str, tuple[Path, FileKind, str]] = {}

    def add(name: str, kind: FileKind, message: str, data: bytes | None = None) -> Path:
        path = folder / name
        if data is not None:
            path.write_bytes(data)
        cases[name] = (path, kind, message)
        return path

    torch.save(net, add("module.pt", FileKind.TORCH_ZIP, r"torch\.nn.*torch\.save\(model\.state_dict\(\)"))
    torch.save(
        net,
        add("module_old.pt", FileKind.TORCH_LEGACY, r"torch\.nn.*torch\.save\(model\.state_dict\(\)"),
        _use_new_zipfile_serialization=False,
    )
    torch.save({"epoch": 3, "loss": [1.0]}, add("no_tensors.pt", FileKind.TORCH_ZIP, "epoch, loss"))
    torch.save({}, add("no_keys.pt", FileKind.TORCH_ZIP, "empty dictionary"))
    torch.save(torch.ones(2), add("tensor.pt", FileKind.TORCH_ZIP, "dictionary of tensors, found Tensor"))
    torch.save(
        {"model_ema": {"w": torch.ones(1)}},
        add("ema.pt", FileKind.TORCH_ZIP, "model_ema.* with --key"),
    )
    torch.save({"w": torch.eye(2).to_sparse()}, add("sparse.pt", FileKind.TORCH_ZIP, "save it dense"))
    torch.save({"w": torch.ones(2, device="meta")}, add("meta.pt", FileKind.TORCH_ZIP, "has no data"))
    torch.save({"w": torch.ones(1).expand(10**6, 10**6)}, add("view.pt", FileKind.TORCH_ZIP, "claim to be"))
    torch.save({"w": torch.ones(1)}, add("p4.pt", FileKind.TORCH_ZIP, "pickle protocol"), pickle_protocol=4)
    add("plain.pt", FileKind.PICKLE, "could run code", pickle.dumps({"w": np.ones(2)}))
    add(
        "lfs.safetensors",
        FileKind.GIT_LFS_POINTER,
        "git lfs pull",
        b"version https://git-lfs.github.com/spec/v1\n",
    )
    add("page.pt", FileKind.HTML, "download the file again", b"\n<!DOCTYPE html><html>404</html>")
    add("s3.pt", FileKind.HTML, "download the file again", b"<?xml version='1.0'?><Error/>")
    add("empty.pt", FileKind.EMPTY, "empty file of 0 bytes", b"")
    add("x.gguf", FileKind.GGUF, "quantised", b"GGUF\x03\0\0\0")
    add("x.h5", FileKind.HDF5, "np.savez", b"\x89HDF\r\n\x1a\n")
    add("x.pt.gz", FileKind.GZIP, "gunzip", b"\x1f\x8b\x08")
    add("fobs.pt", FileKind.FOBS, "nvflare", b"\x82\xad__fobs_type__\x01")
    add("config.json", FileKind.JSON, "weight_map", b'{"a": 1}')
    add("noise.pt", FileKind.UNKNOWN, "first bytes are 01 02", b"\1\2\3")
    add("x.pbuf", FileKind.UNKNOWN, "fx model save", b"\1\2\3")
    add("cut.npz", FileKind.ZIP_DAMAGED, "end of the file", b"PK\x03\x04" + b"\0" * 50)
    add("short.safetensors", FileKind.SAFETENSORS, "cut short", b"\xff\0\0\0\0\0\0\0{}")
    np.save(add("one.npy", FileKind.NPY, "np.savez"), np.ones(2))
    np.savez(
        add("objects.npz", FileKind.NPZ, "entry arr_0 holds Python objects"), np.array([{}], dtype=object)
    )
    np.savez(add("text.npz", FileKind.NPZ, "no tensors"), np.array(["a"]))
    np.savez(add("bf16.npz", FileKind.NPZ, "float32"), np.zeros(2, dtype="V2"))
    with zipfile.ZipFile(add("other.zip", FileKind.ZIP, "unzip it first"), "w") as archive:
        archive.writestr("model.pt", b"")
    with zipfile.ZipFile(add("script.pt", FileKind.TORCHSCRIPT, "state_dict"), "w") as archive:
        archive.writestr("m/data.pkl", b"")
        archive.writestr("m/constants.pkl", b"")
        archive.writestr("m/code/__torch__.py", b"")
    with zipfile.ZipFile(add("program.pt2", FileKind.TORCH_EXPORT, "state_dict"), "w") as archive:
        archive.writestr("m/archive_format", b"pt2")
        archive.writestr("m/data/sample_inputs/data.pkl", b"")
    unzipped = add("unzipped.pt", FileKind.DIRECTORY, "zip the folder again")
    (unzipped / "archive").mkdir(parents=True)
    (unzipped / "archive" / "data.pkl").write_bytes(b"")
    hub = add("hub", FileKind.DIRECTORY, r"such as model\.safetensors")
    hub.mkdir()
    (hub / "model.safetensors").write_bytes(b"")
    return cases


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, FileKind, str]]:
    return write_refused(tmp_path_factory.mktemp("refused"))


def test_every_refusal_names_the_file_and_what_to_do(refused: dict[str, tuple[Path, FileKind, str]]) -> None:
    for name, (path, kind, message) in refused.items():
        assert sniff(path) is kind, name
        with pytest.raises(FileError, match=message) as caught:
            read_checkpoint(path)
        text = str(caught.value)
        assert text.startswith(str(path)), text
        assert "\n" not in text and "\x1b" not in text and "weights_only=False" not in text, text
        assert len(text) < 450 + len(str(path)), text


def test_missing_and_special_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        read_checkpoint(tmp_path / "absent.pt")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(FileError, match="device or pipe"):
        read_checkpoint(fifo)


@pytest.mark.parametrize(
    "shard", ["../m.safetensors", "/etc/passwd", "a\\b", "C:x", "..", "", {"a": 1}, 3, None]
)
def test_index_that_leaves_its_folder(tmp_path: Path, shard: Any) -> None:
    index = tmp_path / "i.json"
    index.write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(FileError, match="plain file names"):
        read_checkpoint(index)


def test_index_faults(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    index = save_sharded(tmp_path, weights)
    document = json.loads(index.read_text())
    document["weight_map"]["extra.weight"] = document["weight_map"]["0.bias"]
    index.write_text(json.dumps(document))
    with pytest.raises(FileError, match=r"extra\.weight"):
        read_checkpoint(index)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileError, match=r"1 of 2 shards are missing.*model-00002-of-00002"):
        read_checkpoint(index)
    index.write_text(index.read_text()[:-5])
    with pytest.raises(FileError, match="valid JSON"):
        read_checkpoint(index)
    index.write_text('{"weight_map": []}')
    with pytest.raises(FileError, match="weight_map"):
        read_checkpoint(index)


def test_old_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    torch.save(weights, tmp_path / "w.pt")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu121")
    with pytest.raises(FileError, match="CVE-2025-32434"):
        read_checkpoint(tmp_path / "w.pt")


def test_importing_the_package_leaves_torch_alone() -> None:
    modules = (
        "atomic checkpoint hashing json_io metadata npz_io positional refusals safetensors_io shards sniff"
    )
    names = [*modules.split(), "state_dict", "text", "torch_io", "truth", "weight_norm", "zips"]
    code = f"import sys\nfor n in {names}: __import__('rlu_cli.files.' + n)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="names without an encoding")
@pytest.mark.parametrize("legacy", [False, True])
def test_paths_that_are_not_utf8(tmp_path: Path, weights: dict[str, torch.Tensor], legacy: bool) -> None:
    """The libraries take none, which was called damage."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no such names here")
    save_file(weights, tmp_path / "a", {"fl.lr": "0.1"})
    torch.save(weights, tmp_path / "b", _use_new_zipfile_serialization=not legacy)
    for name in ("a", "b"):
        (tmp_path / name).rename(folder / name)
        assert_same(read_checkpoint(folder / name).tensors, weights)
    torch.save({"w": weights, "e": FileKind.NPZ}, tmp_path / "c", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "c").rename(folder / "c")
    with pytest.raises(FileError, match=r"found rlu_cli\.files\.sniff\.FileKind"):
        read_checkpoint(folder / "c")
