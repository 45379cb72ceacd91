"""Files as federated-learning frameworks leave them on disk, each written the way its framework does.

``WRITERS`` has one for each row of the table in docs/formats.md, by framework and file. A writer puts
``state``, or something that can't be read, into a folder and returns the path that a user would give.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from openfl_files import named_tensor, write_openfl
from safetensors.torch import save_file
from torch import Tensor, nn

State = dict[str, Tensor]
Writer = Callable[[Path, State], Path]

WRITERS: dict[tuple[str, str], Writer] = {}
CHANGED: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {}
"""What a framework's own format does to the numbers."""


def writes(framework: str, file: str) -> Callable[[Writer], Writer]:
    def register(writer: Writer) -> Writer:
        assert (framework, file) not in WRITERS
        WRITERS[framework, file] = writer
        return writer

    return register


class Net(nn.Module):
    """A network whose class a whole-module file would need."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def _saved(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def _bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- Flower ------------------------------------------------------------------------------------------


@writes("Flower", "model_3.pt")
def flower_state(folder: Path, state: State) -> Path:
    return _saved(folder / "model_3.pt", OrderedDict(state))


@writes("Flower", "round-3-weights.npz")
def flower_arrays(folder: Path, state: State) -> Path:
    np.savez(folder / "round-3-weights.npz", *[tensor.numpy() for tensor in state.values()])
    return folder / "round-3-weights.npz"


@writes("Flower", "results.npz")
def flower_objects(folder: Path, state: State) -> Path:
    np.savez(folder / "results.npz", np.array([{"loss": 0.1}, (3, 0.9)], dtype=object))
    return folder / "results.npz"


@writes("Flower", "client_3.pth")
def flower_module(folder: Path, state: State) -> Path:
    return _saved(folder / "client_3.pth", Net())


# --- NVFlare -----------------------------------------------------------------------------------------


@writes("NVFlare", "FL_global_model.pt")
def nvflare_global(folder: Path, state: State) -> Path:
    content = OrderedDict(
        model=OrderedDict(state),
        meta_props={"validation_metric": np.float64(0.5), "rounds": np.int64(3)},
        train_conf={"train": {"model": "Net"}},
    )
    return _saved(folder / "FL_global_model.pt", content)


@writes("NVFlare", "local_model.pt")
def nvflare_local(folder: Path, state: State) -> Path:
    return _saved(folder / "app_site-1" / "local_model.pt", {"model_weights": state, "epoch": 3})


@writes("NVFlare", "diff.pt")
def nvflare_diff(folder: Path, state: State) -> Path:
    return _saved(folder / "diff.pt", state)


@writes("NVFlare", "numpy_params.pt")
def nvflare_numpy(folder: Path, state: State) -> Path:
    return _saved(folder / "numpy_params.pt", {name: tensor.numpy() for name, tensor in state.items()})


@writes("NVFlare", "SRV_FL_global_model.pt")
def nvflare_fobs(folder: Path, state: State) -> Path:
    return _bytes(folder / "SRV_FL_global_model.pt", b"\x82\xad__fobs_type__\xd9\x20ModelLearnable")


@writes("NVFlare", "server.npy")
def nvflare_array(folder: Path, state: State) -> Path:
    np.save(folder / "server.npy", state["fc.weight"].numpy())
    return folder / "server.npy"


# --- OpenFL ------------------------------------------------------------------------------------------


@writes("OpenFL", "last.pbuf")
def openfl_raw(folder: Path, state: State) -> Path:
    return write_openfl(folder / "last.pbuf", {name: tensor.numpy() for name, tensor in state.items()})


CHANGED["OpenFL", "last.pbuf"] = lambda tensor: tensor.float()


@writes("OpenFL", "best.pbuf")
def openfl_lossy(folder: Path, state: State) -> Path:
    data = named_tensor("fc.weight", b"\x1f\x8b\x08", [({0: 0.1, 1: 0.2}, (3, 4)), ({}, ())])
    return _bytes(folder / "best.pbuf", data)


@writes("OpenFL", "exported.pt")
def openfl_exported(folder: Path, state: State) -> Path:
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(3, 4)}}, "param_groups": [{"lr": 0.1}]}
    return _saved(folder / "exported.pt", {"model_state_dict": state, "optimizer_state_dict": optimizer})


# --- APPFL -------------------------------------------------------------------------------------------


@writes("APPFL", "model_Round_3.pt")
def appfl_global(folder: Path, state: State) -> Path:
    return _saved(folder / "model_Round_3.pt", state)


@writes("APPFL", "client_1/model_Round_3.pt")
def appfl_client(folder: Path, state: State) -> Path:
    return _saved(folder / "client_1" / "model_Round_3.pt", state)


@writes("APPFL", "model_Round_3_1.pt")
def appfl_module(folder: Path, state: State) -> Path:
    return _saved(folder / "model_Round_3_1.pt", Net())


@writes("APPFL", "compressed.pkl")
def appfl_pickle(folder: Path, state: State) -> Path:
    return _bytes(folder / "compressed.pkl", pickle.dumps({n: t.numpy().tobytes() for n, t in state.items()}))


# --- FedML, FATE, FL4Health --------------------------------------------------------------------------


@writes("FedML", "S3 object")
def fedml_pickle(folder: Path, state: State) -> Path:
    return _bytes(folder / "object", pickle.dumps(state))


@writes("FedML", "global_model.pt")
def fedml_mnn(folder: Path, state: State) -> Path:
    """MNN's FlatBuffers: the root's offset, the list of its fields' places, the root that points there."""
    fields = struct.pack("<HHHH", 8, 12, 4, 8)
    root = struct.pack("<iII", 8, 8, 4)
    return _bytes(folder / "global_model.pt", struct.pack("<II", 16, 0) + fields + root + bytes(16))


@writes("FedML", "model.pt")
def fedml_script(folder: Path, state: State) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is on its way out
        torch.jit.save(torch.jit.script(Net()), str(folder / "model.pt"))
    return folder / "model.pt"


@writes("FATE", "pytorch_model.bin")
def fate_weights(folder: Path, state: State) -> Path:
    return _saved(folder / "pytorch_model.bin", state)


@writes("FATE", "checkpoint-100")
def fate_folder(folder: Path, state: State) -> Path:
    return _saved(folder / "checkpoint-100" / "pytorch_model.bin", state).parent


@writes("FL4Health", "server_best_model.pkl")
def fl4health_module(folder: Path, state: State) -> Path:
    return _saved(folder / "server_best_model.pkl", Net())


# --- Hugging Face ------------------------------------------------------------------------------------


@writes("Hugging Face", "model.safetensors")
def hf_weights(folder: Path, state: State) -> Path:
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


@writes("Hugging Face", "model.safetensors.index.json")
def hf_sharded(folder: Path, state: State) -> Path:
    shards = {name: f"model-{at % 2 + 1:05d}-of-00002.safetensors" for at, name in enumerate(state)}
    for shard in set(shards.values()):
        save_file({n: t for n, t in state.items() if shards[n] == shard}, folder / shard, {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}))
    return path


@writes("Hugging Face", "index without its shards")
def hf_incomplete(folder: Path, state: State) -> Path:
    path = hf_sharded(folder, state)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return path


# --- PyTorch scripts ---------------------------------------------------------------------------------


@writes("PyTorch", "ckpt.pth")
def pytorch_cifar(folder: Path, state: State) -> Path:
    return _saved(folder / "ckpt.pth", {"net": state, "acc": 91.5, "epoch": 3})


@writes("PyTorch", "last.pth.tar")
def timm_script(folder: Path, state: State) -> Path:
    averaged = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return _saved(folder / "last.pth.tar", {"epoch": 3, "state_dict": state, "state_dict_ema": averaged})


@writes("PyTorch", "wrapped.pt")
def wrapped(folder: Path, state: State) -> Path:
    return _saved(folder / "wrapped.pt", {f"_orig_mod.module.{name}": t for name, t in state.items()})


@writes("PyTorch", "opacus.pt")
def opacus(folder: Path, state: State) -> Path:
    return _saved(folder / "opacus.pt", {f"_module.{name}": tensor for name, tensor in state.items()})


@writes("PyTorch", "old.pth")
def legacy(folder: Path, state: State) -> Path:
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    return folder / "old.pth"


@writes("PyTorch", "module.pt")
def module(folder: Path, state: State) -> Path:
    return _saved(folder / "module.pt", Net())


@writes("PyTorch", "exported.pt2")
def exported(folder: Path, state: State) -> Path:
    with zipfile.ZipFile(folder / "exported.pt2", "w") as archive:
        archive.writestr("exported/archive_format", "pt2")
        archive.writestr("exported/data/weights/weight_0", b"")
    return folder / "exported.pt2"


@writes("PyTorch", "unpacked.pt")
def unpacked(folder: Path, state: State) -> Path:
    _saved(folder / "packed", state)
    with zipfile.ZipFile(folder / "packed") as archive:
        archive.extractall(folder / "extracted")
    shutil.move(next((folder / "extracted").iterdir()), folder / "unpacked.pt")
    return folder / "unpacked.pt"


# --- anything ----------------------------------------------------------------------------------------


def _cut(folder: Path, name: str, source: Path) -> Path:
    return _bytes(folder / name, source.read_bytes()[:-200])


@writes("any", "truncated.pt")
def truncated(folder: Path, state: State) -> Path:
    return _cut(folder, "truncated.pt", _saved(folder / "whole", state))


@writes("any", "truncated.safetensors")
def truncated_safetensors(folder: Path, state: State) -> Path:
    return _cut(folder, "truncated.safetensors", hf_weights(folder, state))


@writes("any", "empty file")
def empty(folder: Path, state: State) -> Path:
    return _bytes(folder / "empty.pt", b"")


@writes("any", "Git LFS pointer")
def lfs(folder: Path, state: State) -> Path:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    return _bytes(folder / "model.safetensors", text.encode())


@writes("any", "web page")
def page(folder: Path, state: State) -> Path:
    return _bytes(folder / "model.pt", b"<!DOCTYPE html><html><body>404 Not Found</body></html>")


@writes("any", "GGUF")
def gguf(folder: Path, state: State) -> Path:
    return _bytes(folder / "model.gguf", b"GGUF\x03\0\0\0" + bytes(64))


@writes("any", "Keras .h5")
def keras(folder: Path, state: State) -> Path:
    return _bytes(folder / "model.h5", b"\x89HDF\r\n\x1a\n" + bytes(64))


@writes("any", "model.pt.gz")
def gzipped(folder: Path, state: State) -> Path:
    import gzip

    content = io.BytesIO()
    torch.save(state, content)
    return _bytes(folder / "model.pt.gz", gzip.compress(content.getvalue()))
