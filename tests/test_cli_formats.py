"""One round, stored as every supported kind of file: the same counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, PLAIN, QUICK, SAMPLES, Outcome, State, call, metadata, sample, tensors
from safetensors.torch import save_file

from rlu_cli.models import build_model, parse_spec

Writer = Callable[[Path, State], Path]

ROUND, CLIENT = "trained_m1", 1
VALUES = metadata(SAMPLES / ROUND / f"client_{CLIENT}.safetensors")


def _file(save: Callable[[State, Path], object], suffix: str) -> Writer:
    def write(stem: Path, state: State) -> Path:
        path = stem.with_suffix(suffix)
        save(state, path)
        return path

    return write


def _sharded(stem: Path, state: State) -> Path:
    index = {}
    for number, (name, tensor) in enumerate(state.items()):
        shard = f"{stem.name}-{number % 3}.safetensors"
        index.setdefault(shard, {})[name] = tensor
    for shard, part in index.items():
        save_file(part, stem.parent / shard)
    path = stem.parent / f"{stem.name}.safetensors.index.json"
    weight_map = {name: shard for shard, part in index.items() for name in part}
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def _numpy(state: State) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in state.values()]


FORMS: dict[str, Writer] = {
    "safetensors": _file(save_file, ".safetensors"),
    "sharded": _sharded,
    "torch": _file(torch.save, ".pt"),
    "torch-legacy": _file(lambda s, p: torch.save(s, p, _use_new_zipfile_serialization=False), ".pth"),
    "wrapped": _file(lambda s, p: torch.save({f"_orig_mod.module.{k}": v for k, v in s.items()}, p), ".pt"),
    "nested": _file(lambda s, p: torch.save({"model": {"state_dict": s}, "epoch": 3}, p), ".ckpt"),
    "npz": _file(lambda s, p: np.savez(p, *_numpy(s)), ".npz"),
    "npz-names": _file(lambda s, p: np.savez_compressed(p, **{k: v.numpy() for k, v in s.items()}), ".npz"),
    "list": _file(lambda s, p: torch.save(list(s.values()), p), ".bin"),
    "float64": _file(lambda s, p: save_file({k: v.double() for k, v in s.items()}, p), ".safetensors"),
}


def given(values: dict[str, str]) -> list[str]:
    """The training values as flags, for files that can't carry them."""
    return ["--lr", values["fl.lr"], "--batch-size", values["fl.batch_size"], "--steps", values["fl.steps"]]


@pytest.fixture(scope="module")
def models() -> tuple[State, State]:
    """Global and local weights, in the order of the network's state dict, which files without names need."""
    order = build_model(parse_spec(VALUES["fl.arch"]), allow_user_code=False).state_dict()
    files = (tensors(SAMPLES / ROUND / f"{name}.safetensors") for name in ("global", f"client_{CLIENT}"))
    before, after = ({name: state[name] for name in order} for state in files)
    return before, after


@pytest.fixture(scope="module")
def counts() -> list[int]:
    return call("recover", *sample(ROUND, CLIENT), *PLAIN).document["counts"]


def recover(reference: Path, local: Path, *flags: object) -> Outcome:
    files = ["--global", reference, "--local", local, "--aux", AUX, "--arch", VALUES["fl.arch"]]
    names = reference.with_name("classes.txt")
    names.write_text("\n".join(json.loads(VALUES["fl.class_names"])))
    about = [*given(VALUES), "--normalize", VALUES["fl.normalize"], "--class-order", names]
    return call("recover", *files, *about, *PLAIN, *flags)


@pytest.mark.parametrize("form", FORMS)
def test_same_counts(tmp_path: Path, models: tuple[State, State], counts: list[int], form: str) -> None:
    paths = [FORMS[form](tmp_path / name, state) for name, state in zip(("g", "k"), models, strict=True)]
    found = recover(*paths)
    assert found.document["counts"] == counts
    assert found.document["inputs"]["local"]["update"] == "weights"
    assert "update-near-precision" not in found.codes


@pytest.mark.parametrize("form", FORMS)
def test_same_counts_from_the_update(
    tmp_path: Path, models: tuple[State, State], counts: list[int], form: str
) -> None:
    before, after = models
    reference = FORMS["safetensors"](tmp_path / "g", before)
    local = FORMS[form](tmp_path / "k", {name: after[name] - tensor for name, tensor in before.items()})
    found = recover(reference, local, "--update", "delta")
    assert (found.document["counts"], found.codes) == (counts, recover(*_plain(tmp_path, models)).codes)
    assert found.document["inputs"]["local"]["update"] == "delta"


def _plain(folder: Path, models: tuple[State, State]) -> list[Path]:
    return [FORMS["torch"](folder / name, state) for name, state in zip(("p", "q"), models, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_with_a_warning(
    tmp_path: Path, models: tuple[State, State], counts: list[int], dtype: torch.dtype
) -> None:
    """bf16 keeps 8 bits: what is left of an update this small is mostly rounding, and the JSON says so."""
    halves = [{name: tensor.to(dtype) for name, tensor in state.items()} for state in models]
    for form in ("safetensors", "torch"):
        found = recover(*(FORMS[form](tmp_path / n, s) for n, s in zip(("g", "k"), halves, strict=True)))
        assert "update-near-precision" in found.codes
        rounding = found.document["diagnostics"]["update_rounding"]
        total = found.document["total"]
        assert (
            sum(abs(a - b) for a, b in zip(found.document["counts"], counts, strict=True)) <= rounding * total
        )
        measured = _error(halves, models)
        assert measured <= rounding < 20 * measured


def _error(halves: list[State], models: tuple[State, State]) -> float:
    """The share of the bias update that rounding to half precision changed."""
    name = "fc3.bias"
    exact = models[1][name].double() - models[0][name].double()
    return float((halves[1][name].double() - halves[0][name].double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_updates_lose_nothing_that_matters(
    tmp_path: Path, models: tuple[State, State], counts: list[int], dtype: torch.dtype
) -> None:
    before, after = models
    reference = FORMS["safetensors"](tmp_path / "g", before)
    local = FORMS["torch"](tmp_path / "k", {n: (after[n] - t).to(dtype) for n, t in before.items()})
    found = recover(reference, local, "--update", "delta")
    assert found.document["counts"] == counts
    assert "update-near-precision" not in found.codes
    assert found.document["diagnostics"]["update_rounding"] == pytest.approx(
        torch.finfo(dtype).eps / 2, rel=0.05
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_numbers(tmp_path: Path, models: tuple[State, State], dtype: torch.dtype) -> None:
    """torch converts float8 and little more: what is checked is what the numbers are in float32."""
    g, k = (
        FORMS["safetensors"](tmp_path / n, {name: tensor.to(dtype) for name, tensor in state.items()})
        for n, state in zip(("g", "k"), models, strict=True)
    )
    assert "update-near-precision" in recover(g, k).codes
    broken = {name: tensor.to(dtype) for name, tensor in models[1].items()}
    broken["fc3.bias"] = torch.full((10,), float("nan")).to(dtype)
    assert "NaN" in recover(g, FORMS["safetensors"](tmp_path / "n", broken)).refusal(4)


def test_the_index_of_shards_does_not_stand_for_their_weights(
    tmp_path: Path, models: tuple[State, State]
) -> None:
    """It is the same in every round, so statistics of another round's model were taken for this one's."""
    indices = []
    for name, state in zip(("one", "two"), models, strict=True):
        (tmp_path / name).mkdir()
        indices.append(FORMS["sharded"](tmp_path / name / "model", state))
    assert indices[0].read_bytes() == indices[1].read_bytes()
    stats = tmp_path / "s.safetensors"
    about = ["--aux", AUX, "--arch", VALUES["fl.arch"], *QUICK, "-o", stats]
    made = call("estimate-logits", "--global", indices[0], *about).document
    found = [call("inspect", path).document["sha256"] for path in indices]
    assert found[0] == made["inputs"]["global"]["sha256"] != found[1]
    shards = sorted(indices[0].parent.glob("*.safetensors"))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (indices[0], *shards)]
    assert found[0] == hashlib.sha256("\n".join(digests).encode()).hexdigest()
    message = recover(indices[1], indices[0], "--stats", stats).refusal(4)
    assert "those of another global model" in message


@pytest.mark.parametrize("name", ["fc3.weight", "conv1.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_weights_of_other_numbers_are_refused(
    tmp_path: Path, models: tuple[State, State], dtype: torch.dtype, name: str
) -> None:
    """Quantised weights without their scale gave counts, and complex ones lost a half."""
    g, k = (
        FORMS["safetensors"](tmp_path / stem, {**state, name: (100 * state[name]).to(dtype)})
        for stem, state in zip(("g", "k"), models, strict=True)
    )
    message = recover(g, k).refusal(4)
    assert "floating-point numbers" in message
    assert f"{name} {str(dtype).removeprefix('torch.')}" in message


def test_an_output_layer_of_other_numbers_is_refused(tmp_path: Path, models: tuple[State, State]) -> None:
    """The local one alone, which is not loaded where one step needs its output layer only."""
    reference = FORMS["safetensors"](tmp_path / "g", models[0])
    state = {**models[1], "fc3.weight": models[1]["fc3.weight"].to(torch.int32)}
    message = recover(reference, FORMS["safetensors"](tmp_path / "k", state)).refusal(4)
    assert "floating-point numbers in fc3.weight" in message and "int32" in message
