"""Real files for the fuzz run to change: a round in every format, images and data sets of every kind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.models import LeNet5

SAMPLES = Path(__file__).resolve().parent.parent / "sample_data"
QUICK = ("--samples", "20")

State = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """One form of a round: its files, which of them are changed, and the commands that read them."""

    files: Mapping[str, bytes]
    victims: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Corpus:
    """Forms by name."""

    forms: Mapping[str, Form]


class Payload:
    """Touches the marker when unpickled by a loader that isn't safe."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def checkpoint_corpus(folder: Path, marker: Path) -> Corpus:
    """A sample round (LeNet-5, one step) in every format, and the other files read beside it."""
    aux = small_aux(folder / "aux")
    source = SAMPLES / "untrained_m1"
    read = {role: read_checkpoint(source / f"{name}.safetensors") for role, name in ROLES.items()}
    order = list(LeNet5().state_dict())  # positions mean something in some forms
    states = {role: {name: found.tensors[name] for name in order} for role, found in read.items()}
    about = {role: dict(checkpoint.metadata) for role, checkpoint in read.items()}
    training = json.dumps({**about["global"], **about["local"]}).encode()
    published = ("--global", str(source / "global.safetensors"))
    returned = ("--local", str(source / "client_0.safetensors"))
    recover = ("recover", "--global", "{}/g", "--local", "{}/k", "--aux", str(aux), *QUICK)
    commands = (
        recover,
        (*recover, "--method", "llg"),
        ("estimate-logits", "--global", "{}/g", "--aux", str(aux), *QUICK),
        ("inspect", "{}/g"),
        ("inspect", "{}/k"),
    )
    forms: dict[str, Form] = {}
    for name, write in WRITERS.items():
        files: dict[str, bytes] = {}
        for role, file in (("global", "g"), ("local", "k")):
            files |= write(folder / "scratch", file, states[role], about[role])
        victims = tuple(files)
        forms[name] = Form({**files, "round.json": training}, victims, commands)
    plain = forms["safetensors"].files
    forms["round.json"] = Form(
        {**_without_metadata(folder, states), "round.json": training}, ("round.json",), (recover,)
    )
    config = {
        "architecture": "lenet5",
        "num_classes": 10,
        "label_names": json.loads(about["global"]["fl.class_names"]),
    }
    forms["config.json"] = Form(
        {
            **_without_metadata(folder, states),
            "round.json": training,
            "config.json": json.dumps(config).encode(),
        },
        ("config.json",),
        (recover,),
    )
    forms["payload"] = Form({"g": _payload(marker), "k": plain["k"]}, ("g",), (recover, ("inspect", "{}/g")))
    forms["payload pickle"] = Form(
        {"g": pickle.dumps(Payload(marker), protocol=2), "k": plain["k"]},
        ("g",),
        (recover, ("inspect", "{}/g")),
    )
    forms["statistics"] = Form(
        {**plain, "s": _output(folder, "estimate-logits", *published, "--aux", str(aux), *QUICK)},
        ("s",),
        (("recover", *published, "--local", "{}/k", "--stats", "{}/s", *QUICK),),
    )
    forms["result"] = Form(
        {"r": _output(folder, "recover", *published, *returned, "--aux", str(aux), *QUICK)},
        ("r",),
        (("evaluate", "--result", "{}/r", "--truth", str(source / "truth.json")),),
    )
    known = json.loads((source / "truth.json").read_text())["clients"]["client_0"]["counts"]
    line = {"round": 1, "client": "client_0", "counts": known, "step_counts": [known], "accuracy": 0.1}
    forms["archive"] = Form(
        {
            "round_0001/global.safetensors": plain["g"],
            "round_0001/client_0.safetensors": plain["k"],
            "truth.ndjson": f"{json.dumps(line)}\n".encode(),
        },
        ("truth.ndjson",),
        (("evaluate", "--archive", "{}", "--aux", str(aux), *QUICK),),
    )
    earlier = {"round": 1, "global": "earlier", "local": "k"}
    forms["history"] = Form(
        {
            **plain,
            "earlier": (source / "client_1.safetensors").read_bytes(),
            "h": f"{json.dumps(earlier)}\n".encode(),
        },
        ("h", "earlier"),
        (
            (*recover, "--scheme", "feddyn", "--lambda", "0.1", "--history", "{}/h", "--round", "2"),
            (*recover, "--scheme", "scaffold", "--history", "{}/h", "--round", "2"),
        ),
    )
    forms["variates"] = Form(
        {**plain, "c": plain["k"]},
        ("c",),
        ((*recover, "--scheme", "scaffold", "--server-control", "{}/c", "--client-control", "{}/c"),),
    )
    forms["truth"] = Form(
        {**plain, "t": (source / "truth.json").read_bytes()},
        ("t",),
        (("evaluate", "--global", "{}/g", *returned, "--aux", str(aux), "--truth", "{}/t", *QUICK),),
    )
    forms["aux logits"] = Form(
        {**plain, "l.npz": _logits(states["global"])},
        ("l.npz",),
        (("recover", "--global", "{}/g", "--local", "{}/k", "--aux-logits", "{}/l.npz", *QUICK),),
    )
    return Corpus(forms)


ROLES = {"global": "global", "local": "client_0"}


def small_aux(root: Path) -> Path:
    """Two of the sample's auxiliary images of each class."""
    if not root.exists():
        for folder in sorted((SAMPLES / "aux").iterdir()):
            (root / folder.name).mkdir(parents=True)
            for path in sorted(folder.iterdir())[:2]:
                shutil.copy(path, root / folder.name / path.name)
    return root


# --- checkpoints -------------------------------------------------------------------------------------

Write = Callable[[Path, str, State, dict[str, str]], dict[str, bytes]]


def _saved(folder: Path, name: str, save: Callable[[Path], Any]) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    save(path)
    data = path.read_bytes()
    path.unlink()
    return {name: data}


def _torch(content: Callable[[State], object], **options: Any) -> Write:
    def write(folder: Path, name: str, state: State, about: dict[str, str]) -> dict[str, bytes]:
        return _saved(folder, name, lambda path: torch.save(content(state), path, **options))

    return write


def _safetensors(change: Callable[[State], State]) -> Write:
    def write(folder: Path, name: str, state: State, about: dict[str, str]) -> dict[str, bytes]:
        return _saved(folder, name, lambda path: save_safetensors(path, change(state), about))

    return write


def _npz(named: bool) -> Write:
    def write(folder: Path, name: str, state: State, about: dict[str, str]) -> dict[str, bytes]:
        buffer = io.BytesIO()
        arrays = {key: tensor.numpy() for key, tensor in state.items()}
        if named:
            np.savez_compressed(buffer, **arrays)
        else:
            np.savez(buffer, *arrays.values())
        return {name: buffer.getvalue()}

    return write


def _sharded(folder: Path, name: str, state: State, about: dict[str, str]) -> dict[str, bytes]:
    """An index and two shards."""
    names = sorted(state)
    files: dict[str, bytes] = {}
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        shard = f"{name}-{number}.safetensors"
        files |= _saved(
            folder,
            shard,
            lambda path, part=part: save_safetensors(path, {key: state[key] for key in part}, {}),
        )
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1, **about}, "weight_map": weight_map}
    return {**files, name: json.dumps(index).encode()}


def _wrapped(state: State) -> State:
    return {f"_orig_mod.module.{key}": tensor for key, tensor in state.items()}


WRITERS: dict[str, Write] = {
    "safetensors": _safetensors(dict),
    "bfloat16": _safetensors(lambda state: {key: tensor.bfloat16() for key, tensor in state.items()}),
    "sharded": _sharded,
    "torch zip": _torch(dict),
    "torch legacy": _torch(dict, _use_new_zipfile_serialization=False),
    "wrapped": _torch(_wrapped),
    "NVFlare": _torch(
        lambda state: {
            "model": state,
            "train_conf": {"train": {"lr": 0.1}},
            "meta_props": {"acc": np.float64(0.5)},
        }
    ),
    "npz by position": _npz(named=False),
    "npz by name": _npz(named=True),
}
"""How a round's two checkpoints are stored."""


def _without_metadata(folder: Path, states: Mapping[str, State]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for role, name in (("global", "g"), ("local", "k")):
        files |= _saved(
            folder / "scratch", name, lambda path, role=role: save_safetensors(path, states[role], {})
        )
    return files


def _payload(marker: Path) -> bytes:
    """A torch checkpoint that would run code beside its weights."""
    buffer = io.BytesIO()
    torch.save({"state_dict": {"w": torch.ones(2)}, "extra": Payload(marker)}, buffer)
    return buffer.getvalue()


def _output(folder: Path, *arguments: str) -> bytes:
    """What a command of ours writes."""
    from rlu_cli.cli.app import run

    path = folder / "output"
    with contextlib.redirect_stdout(io.StringIO()):
        code = run([*arguments, "-o", str(path), "-q"])
    assert code == 0
    return path.read_bytes()


def _logits(state: State) -> bytes:
    """Embeddings and what the output layer makes of them."""
    embeddings = torch.randn(40, 84, generator=torch.Generator().manual_seed(0))
    logits = embeddings @ state["fc3.weight"].T + state["fc3.bias"]
    buffer = io.BytesIO()
    labels = np.repeat(np.arange(10), 4)
    np.savez(buffer, logits=logits.numpy(), embeddings=embeddings.numpy(), labels=labels)
    return buffer.getvalue()


# --- images and data sets ----------------------------------------------------------------------------

IMAGE_FORMS: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG"},
    "jpeg": {"format": "JPEG", "mode": "RGB"},
    "cmyk jpeg": {"format": "JPEG", "mode": "CMYK"},
    "progressive jpeg": {"format": "JPEG", "mode": "RGB", "progressive": True},
    "rgba png": {"format": "PNG", "mode": "RGBA"},
    "palette png": {"format": "PNG", "mode": "P", "transparency": 3},
    "1-bit png": {"format": "PNG", "mode": "1"},
    "16-bit png": {"format": "PNG", "mode": "I;16"},
    "gif": {"format": "GIF", "mode": "P"},
    "animated gif": {"format": "GIF", "mode": "P", "save_all": True},
    "bmp": {"format": "BMP", "mode": "RGB"},
    "tiff": {"format": "TIFF", "mode": "RGB"},
    "lzw tiff": {"format": "TIFF", "mode": "RGB", "compression": "tiff_lzw"},
    "deflate tiff": {"format": "TIFF", "mode": "L", "compression": "tiff_adobe_deflate"},
    "jpeg tiff": {"format": "TIFF", "mode": "RGB", "compression": "jpeg"},
    "webp": {"format": "WEBP", "mode": "RGB"},
    "lossless webp": {"format": "WEBP", "mode": "RGBA", "lossless": True},
    "ppm": {"format": "PPM", "mode": "RGB"},
    "pgm": {"format": "PPM", "mode": "L"},
}
"""How an image is stored: Pillow's format, mode and options."""


def image_corpus(folder: Path, marker: Path) -> Corpus:
    """One image of a class folder in every form, and data sets in their official files."""
    source = SAMPLES / "untrained_m1"
    aux = small_aux(folder / "aux")
    round_ = ("--global", str(source / "global.safetensors"), "--local", str(source / "client_0.safetensors"))
    recover = ("recover", *round_, *QUICK, "--method", "rlu", "--aux")
    rest = {str(path.relative_to(aux)): path.read_bytes() for path in sorted(aux.rglob("*.png"))}
    victim = next(name for name in rest if name.startswith("bag"))
    commands = (
        (*recover, "{}", "--image-size", "28"),
        (*recover, "{}", "--image-size", "28", "--exif"),
        (*recover, "{}", "--skip-bad"),
        (*recover, "{}", "--skip-bad", "--exif", "--aux-per-class", "1", "--image-size", "28"),
        (*recover, "{}"),
        ("estimate-logits", *round_[:2], *QUICK, "--aux", "{}", "--skip-bad", "--image-size", "28"),
    )
    with Image.open(aux / victim) as image:
        grey = image.convert("L")
    forms = {
        name: Form({**rest, victim: encode(grey, **options)}, (victim,), commands)
        for name, options in IMAGE_FORMS.items()
    }
    arrays = np.stack([np.asarray(Image.open(io.BytesIO(data)).convert("L")) for data in rest.values()])
    classes = sorted({name.split("/")[0] for name in rest})
    labels = [classes.index(name.split("/")[0]) for name in rest]
    for name, (files, path) in _datasets(folder / "scratch", arrays, labels, classes, marker).items():
        order = "string" if name == "tiny-imagenet" else "dataset"
        command = (*recover, "{}" + path, "--image-size", "28", "--class-order", order)
        forms[name] = Form(files, tuple(files), (command, (*command, "--aux-per-class", "1")))
    listed = "".join(f"{name}\n" for name in classes).encode()
    forms["class order"] = Form(
        {**{f"aux/{name}": data for name, data in rest.items()}, "order": listed},
        ("order",),
        ((*recover, "{}/aux", "--class-order", "{}/order"),),
    )
    return Corpus(forms)


def encode(
    image: Image.Image, *, format: str, mode: str = "L", save_all: bool = False, **options: Any
) -> bytes:
    """The image's bytes in a form, with an EXIF orientation where the format has room for one."""
    if mode == "I;16":
        converted = Image.fromarray((np.asarray(image).astype(np.uint16) << 8) | 7)
    else:
        converted = image.convert(mode)
    if save_all:
        options |= {"save_all": True, "append_images": [converted.copy(), converted.copy()]}
    if format in ("PNG", "JPEG", "WEBP", "TIFF"):
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    buffer = io.BytesIO()
    converted.save(buffer, format, **options)
    return buffer.getvalue()


def _datasets(
    folder: Path, grey: np.ndarray, labels: list[int], classes: list[str], marker: Path
) -> dict[str, tuple[dict[str, bytes], str]]:
    """Files of each data set, and the path to give, relative to the folder they lie in."""
    sys.path.insert(0, str(SAMPLES.parent / "tests"))
    from dataset_files import CIFAR10, cifar10, write_idx_pair, write_svhn, write_tar, write_tiny_imagenet

    large = np.stack([np.asarray(Image.fromarray(image).convert("RGB").resize((32, 32))) for image in grey])
    planes = large.transpose(0, 3, 1, 2)
    files = cifar10(planes, labels, classes)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, images=grey, labels=np.array(labels), class_names=np.array(classes))
    harmful = {**files, f"{CIFAR10}/test_batch": pickle.dumps(Payload(marker), protocol=2)}
    folder.mkdir(parents=True, exist_ok=True)
    tiny = np.stack([np.asarray(Image.fromarray(image).resize((64, 64))) for image in large])
    return {
        "cifar tar": ({"a.tar": write_tar(folder / "a.tar", files).read_bytes()}, "/a.tar"),
        "cifar tar.gz": ({"a.tar.gz": write_tar(folder / "a.tar.gz", files).read_bytes()}, "/a.tar.gz"),
        "cifar folder": (dict(files), ""),
        "cifar payload": (harmful, ""),
        "svhn": ({"a.mat": write_svhn(folder / "a.mat", planes, labels).read_bytes()}, "/a.mat"),
        "idx": (_folder(write_idx_pair(folder / "idx", "t10k", grey, labels)), ""),
        "npz": ({"a.npz": buffer.getvalue()}, "/a.npz"),
        "tiny-imagenet": (
            _folder(write_tiny_imagenet(folder / "tiny", tiny, labels, classes, listed=classes)),
            "",
        ),
    }


def _folder(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }
