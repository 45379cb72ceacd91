"""``--aux-logits``: logits written as docs/logits.md shows give what the images give, or a clear refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import (
    AUX,
    QUICK,
    SAMPLES,
    Outcome,
    call,
    metadata,
    sample,
    tensors,
    truth,
    write_safetensors,
    write_torch,
)
from numpy.typing import NDArray
from PIL import Image

from rlu_cli.audit.logits_file import read_logits
from rlu_cli.core.types import FloatArray, IntArray
from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.hashing import sha256_file
from rlu_cli.files.positional import layers_by_position
from rlu_cli.models import LeNet5

NAMES = sorted(path.name for path in AUX.iterdir())
PAGE = Path(__file__).resolve().parent.parent / "docs" / "logits.md"
Arrays = dict[str, NDArray[Any]]


def documented() -> Callable[..., None]:
    """The function that the page tells people to use."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    return space["save_logits"]


def saved(path: Path, checkpoint: Path, names: list[str] | None = None) -> Path:
    """As a user does it: their own network, their own way to read images."""
    order = names or class_names(checkpoint)
    model = LeNet5()
    model.load_state_dict(tensors(checkpoint))
    batches = []
    for index, name in enumerate(order):
        files = sorted((AUX / name).iterdir())
        pixels = np.stack([np.asarray(Image.open(file).convert("L")) for file in files])
        images = (torch.from_numpy(pixels)[:, None] / 255 - 0.286) / 0.353
        batches.append((images, torch.full((len(files),), index)))
    documented()(path, model, model.fc3, batches)
    return path


def class_names(checkpoint: Path) -> list[str]:
    return list(json.loads(metadata(checkpoint)["fl.class_names"]))


def arrays_of(path: Path) -> Arrays:
    with np.load(path) as archive:
        return dict(archive)


def write(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def estimates(document: dict[str, Any]) -> list[float]:
    return [entry["estimate"] for entry in document["classes"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Logits of the sample rounds' models."""
    folder = tmp_path_factory.mktemp("logits")
    return {
        f"{round_}/{name}": saved(folder / f"{round_}_{name}.npz", SAMPLES / round_ / f"{name}.safetensors")
        for round_, name in [
            ("untrained_m1", "global"),
            ("trained_m10", "global"),
            ("trained_m10", "client_0"),
            ("trained_m10", "client_1"),
        ]
    }


def recover(files: dict[str, Path], round_: str = "untrained_m1", *more: object) -> Outcome:
    return call("recover", *sample(round_, aux=None), "--aux-logits", files[f"{round_}/global"], *more)


# What it gives


def test_one_step(files: dict[str, Path]) -> None:
    document = recover(files).document
    images = call("recover", *sample("untrained_m1")).document
    assert document["counts"] == images["counts"] == truth("untrained_m1")
    assert estimates(document) == pytest.approx(estimates(images), abs=1e-4)
    told, expected = document["diagnostics"], images["diagnostics"]
    assert told.pop("motion") is expected.pop("motion") is None  # one step needs no local model
    assert told == pytest.approx(expected, rel=1e-3, abs=1e-6)
    path = files["untrained_m1/global"]
    assert document["inputs"]["aux"] == {
        "path": str(path),
        "images": 300,
        "classes": 10,
        "kind": "logits",
        "sha256": sha256_file(path),
        "embeddings": True,
    }
    model = document["model"]
    assert (model["arch"], model["head"], model["num_classes"], model["embedding_size"]) == (
        None,
        "fc3",
        10,
        84,
    )
    assert document["warnings"] == []
    assert [entry["name"] for entry in document["classes"]] == class_names(
        SAMPLES / "untrained_m1" / "global.safetensors"
    )


def test_several_steps_with_a_file_for_each_local_model(files: dict[str, Path]) -> None:
    local = [flag for client in (0, 1) for flag in sample("trained_m10", client, aux=None)[2:]]
    given = [flag for client in (0, 1) for flag in ("--local-logits", files[f"trained_m10/client_{client}"])]
    lines = recover(files, "trained_m10", *local[2:], *given).lines
    for client, line in enumerate(lines):
        images = call("recover", *sample("trained_m10", client), "--method", "rlu").document
        assert estimates(line) == pytest.approx(estimates(images), abs=1e-3)
        assert line["counts"] == images["counts"]
    swapped = recover(files, "trained_m10", *local[2:], *given[2:], *given[:2])
    assert swapped.code == 4
    assert "another model" in swapped.err


def test_several_steps_with_all_in_one_file(files: dict[str, Path], tmp_path: Path) -> None:
    both = arrays_of(files["trained_m10/global"])
    both |= {f"local_{name}": array for name, array in arrays_of(files["trained_m10/client_0"]).items()}
    del both["local_labels"]
    one = write(tmp_path / "both.npz", **both)
    flags = [*sample("trained_m10", aux=None), "--aux-logits", one]
    apart = recover(files, "trained_m10", "--local-logits", files["trained_m10/client_0"]).document
    assert call("recover", *flags).document["classes"] == apart["classes"]
    two = call("recover", *flags, *sample("trained_m10", 1, aux=None)[2:])
    assert two.code == 2
    assert "--local-logits" in two.err
    evaluated = call("evaluate", *flags, "--truth", SAMPLES / "trained_m10" / "truth.json").document
    assert evaluated["results"][0]["counts"] == apart["counts"]


def test_several_steps_without_the_local_logits(files: dict[str, Path]) -> None:
    assert "--local-logits" in recover(files, "trained_m10").refusal(4)
    looks_at_the_global_model_only = recover(files, "trained_m10", "--method", "llg+")
    assert looks_at_the_global_model_only.code == 0


def test_logits_alone(files: dict[str, Path], tmp_path: Path) -> None:
    known = arrays_of(files["untrained_m1/global"])
    del known["embeddings"]
    bare = {"untrained_m1/global": write(tmp_path / "bare.npz", **known)}
    document = recover(bare).document
    assert document["counts"] == truth("untrained_m1")
    assert document["diagnostics"]["embedding_match"] is None
    assert document["inputs"]["aux"]["embeddings"] is False
    assert estimates(document) == estimates(recover(files).document)
    message = recover(bare, "untrained_m1", "--method", "llg+").refusal(4)
    assert "embeddings" in message
    assert "llg+" in message
    assert recover(bare, "untrained_m1", "-v").err.count("unknown") == 1  # the table lives with it


def unbiased(size: float) -> tuple[FloatArray, FloatArray, FloatArray, IntArray]:
    """A head without bias before and after an update of this size, and embeddings with labels."""
    rng = np.random.default_rng(0)
    W = 0.1 * rng.normal(size=(10, 20))
    labels = np.repeat(np.arange(10), 30)
    embeddings = np.abs(rng.normal(size=(300, 20))) + 0.2
    update = rng.normal(size=10)
    moved = W + size * np.outer(update - update.mean(), embeddings.mean(axis=0))
    return W, moved, embeddings, labels


def test_a_head_without_bias(files: dict[str, Path], tmp_path: Path) -> None:
    W, moved, embeddings, labels = unbiased(1e-3)
    for name, weight in (("g", W), ("k", moved)):
        write_safetensors(tmp_path / f"{name}.safetensors", {"top.weight": torch.from_numpy(weight)})
    flags = ["--global", tmp_path / "g.safetensors", "--local", tmp_path / "k.safetensors", *QUICK]
    flags += ["--lr", 0.01, "--batch-size", 32, "--steps", 1, "--aux-logits"]
    known = write(tmp_path / "known.npz", logits=embeddings @ W.T, labels=labels, embeddings=embeddings)
    assert call("recover", *flags, known).document["model"]["head"] == "top"
    bare = write(tmp_path / "bare.npz", logits=embeddings @ W.T, labels=labels)
    assert "without a bias needs" in call("recover", *flags, bare).refusal(4)


def test_without_bias_a_local_models_cache_entry_is_not_the_global_ones(tmp_path: Path) -> None:
    """It lacks the direction that stands for the bias: as the next round's global model it changed counts."""
    W, moved, embeddings, labels = unbiased(1e-2)
    models, known = [], []
    for name, weight in (("g", W), ("k", moved)):
        model = tmp_path / f"{name}.safetensors"
        models.append(write_safetensors(model, {"top.weight": torch.from_numpy(weight)}))
        logits = embeddings @ weight.T
        known.append(write(tmp_path / f"{name}.npz", logits=logits, labels=labels, embeddings=embeddings))
    rounds = [
        [
            "--global",
            models[k],
            "--aux-logits",
            known[k],
            "--local",
            models[1 - k],
            "--local-logits",
            known[1 - k],
        ]
        for k in (0, 1)
    ]
    flags = [*QUICK, "--lr", 0.01, "--batch-size", 32, "--steps", 2, "--method", "rlu"]
    alone = [call("recover", *flags, *round_).document for round_ in rounds]
    for _ in range(2):
        cached = [call("recover", *flags, "--cache", tmp_path / "cache", *round_) for round_ in rounds]
        assert [outcome.document for outcome in cached] == alone
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_arrays_without_names_and_no_architecture(files: dict[str, Path], tmp_path: Path) -> None:
    for name in ("global", "client_0"):
        state = tensors(SAMPLES / "untrained_m1" / f"{name}.safetensors")
        np.savez(tmp_path / f"{name}.npz", *[state[key].numpy() for key in LeNet5().state_dict()])
    flags = ["--global", tmp_path / "global.npz", "--local", tmp_path / "client_0.npz"]
    flags += ["--aux-logits", files["untrained_m1/global"], "--lr", 0.01, "--batch-size", 32, "--steps", 1]
    document = call("recover", *flags).document
    assert document["counts"] == truth("untrained_m1")
    assert document["model"]["head"] == "arr_8"
    assert [entry["name"] for entry in document["classes"]] == [str(n) for n in range(10)]


def test_layers_by_position() -> None:
    shapes = [(6, 1, 5, 5), (6,), (84, 120), (10, 84, 1, 1), (10,), (10, 10), (3,)]
    named = layers_by_position({f"arr_{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {
        "arr_0": (6, 1, 5, 5),
        "arr_1": (6,),
        "arr_2.weight": (84, 120),
        "arr_3.weight": (10, 84, 1, 1),
        "arr_3.bias": (10,),
        "arr_5.weight": (10, 10),
        "arr_6": (3,),
    }


def test_statistics_and_cache(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = SAMPLES / "untrained_m1" / "global.safetensors"
    flags = ["--global", reference, "--aux-logits", files["untrained_m1/global"], *QUICK]
    flags += ["--cache", tmp_path / "cache"]
    summary = call("estimate-logits", *flags, "-o", tmp_path / "stats.safetensors").document
    assert summary["inputs"]["aux"]["kind"] == "logits"

    def never(*_: object, **__: object) -> None:
        raise AssertionError("this is in the cache")

    monkeypatch.setattr("rlu_cli.audit.source.model_statistics", never)
    kept = recover(files, "untrained_m1", "--cache", tmp_path / "cache", *QUICK).document
    stored = call("recover", *sample("untrained_m1", aux=None), "--stats", tmp_path / "stats.safetensors")
    assert kept["classes"] == stored.document["classes"]


def test_statistics_without_embeddings(files: dict[str, Path], tmp_path: Path) -> None:
    known = arrays_of(files["untrained_m1/global"])
    del known["embeddings"]
    reference = SAMPLES / "untrained_m1" / "global.safetensors"
    bare, stats = write(tmp_path / "bare.npz", **known), tmp_path / "stats.safetensors"
    assert call("estimate-logits", "--global", reference, "--aux-logits", bare, "-o", stats).code == 0
    flags = [*sample("untrained_m1", aux=None), "--stats", stats]
    document = call("recover", *flags).document
    assert document["counts"] == truth("untrained_m1")
    assert document["diagnostics"]["embedding_match"] is None
    assert "embeddings" in call("recover", *flags, "--method", "zlg+").refusal(4)


# The output layer


def with_layers(folder: Path, **more: torch.Tensor) -> list[object]:
    """The sample round with more layers in both checkpoints."""
    for name in ("global", "client_0"):
        source = SAMPLES / "untrained_m1" / f"{name}.safetensors"
        state = tensors(source) | {key.replace("__", "."): tensor for key, tensor in more.items()}
        write_safetensors(folder / f"{name}.safetensors", state, metadata(source))
    return ["--global", folder / "global.safetensors", "--local", folder / "client_0.safetensors"]


def test_several_layers_that_fit_are_told_apart_by_the_embeddings(
    files: dict[str, Path], tmp_path: Path
) -> None:
    flags = with_layers(tmp_path, aux_head__weight=torch.ones(10, 84), zz__weight=torch.ones(10, 30))
    known = call("recover", *flags, "--aux-logits", files["untrained_m1/global"]).document
    assert known["model"]["head"] == "fc3"
    arrays = arrays_of(files["untrained_m1/global"])
    del arrays["embeddings"]
    bare = write(tmp_path / "bare.npz", **arrays)
    message = call("recover", *flags, "--aux-logits", bare).refusal(4)
    for word in ("fc3", "aux_head", "zz", "--head"):
        assert word in message
    named = call("recover", *flags, "--aux-logits", bare, "--head", "fc3.weight").document
    assert named["counts"] == truth("untrained_m1")


@pytest.mark.parametrize(
    ("head", "words"),
    [("none", "no such layer"), ("fc1", r"one of shape \(120, 400\)"), ("aux_head", "another model")],
)
def test_a_head_that_is_named_wrongly(files: dict[str, Path], tmp_path: Path, head: str, words: str) -> None:
    flags = with_layers(tmp_path, aux_head__weight=torch.ones(10, 84))
    flags += ["--aux-logits", files["untrained_m1/global"], "--head", head]
    assert re.search(words, call("recover", *flags).refusal(4))


def test_another_models_logits_are_refused(files: dict[str, Path]) -> None:
    wrong = {"untrained_m1/global": files["trained_m10/global"]}
    assert "another model" in recover(wrong).refusal(4)


# Files that are not what they should be


def _probabilities(arrays: Arrays) -> Arrays:
    powers = np.exp(arrays["logits"])
    return {**arrays, "logits": powers / powers.sum(axis=1, keepdims=True)}


def _log_probabilities(arrays: Arrays) -> Arrays:
    return {**arrays, "logits": np.log(_probabilities(arrays)["logits"])}


def _with(name: str, change: Callable[[NDArray[Any]], object]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, name: change(arrays[name])}  # type: ignore[dict-item]


def _without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {key: array for key, array in arrays.items() if key != name}


def _nan(array: NDArray[Any]) -> NDArray[Any]:
    array = array.copy()
    array[7, 3] = np.nan
    return array


DAMAGE: dict[str, tuple[int, str, Callable[[Arrays], Arrays]]] = {
    "no logits": (3, "an array called logits, found labels, embeddings", _without("logits")),
    "no labels": (3, "an array called labels", _without("labels")),
    "objects": (3, "Python objects", _with("labels", lambda a: a.astype(object))),
    "text labels": (3, "an array called labels", _with("labels", lambda a: a.astype(str))),
    "float labels": (4, "whole numbers", _with("labels", lambda a: a.astype(np.float32))),
    "labels from 1": (4, "from 0 to 9, found 1 to 10", _with("labels", lambda a: a + 1)),
    "negative labels": (4, "from 0 to 9", _with("labels", lambda a: a - 1)),
    "fewer labels": (4, "rows, one for each label", _with("labels", lambda a: a[:-1])),
    "labels of one shape more": (4, "whole numbers of shape", _with("labels", lambda a: a[:, None])),
    "a class without samples": (
        4,
        "none of class index 3",
        _with("labels", lambda a: np.where(a == 3, 4, a)),
    ),
    "integer logits": (4, "floating-point", _with("logits", lambda a: a.astype(np.int64))),
    "flat logits": (4, "of shape", _with("logits", lambda a: a.reshape(-1))),
    "no rows": (4, "of shape", _with("logits", lambda a: a[:0])),
    "NaN": (4, "finite numbers", _with("logits", _nan)),
    "NaN embeddings": (4, "finite numbers", _with("embeddings", _nan)),
    "fewer embeddings": (4, "as the logits have", _with("embeddings", lambda a: a[1:])),
    "embeddings of another layer": (4, r"\(10, 80\)", _with("embeddings", lambda a: a[:, :80])),
    "fewer classes": (4, "columns", lambda a: {**a, "logits": a["logits"][:, :9], "labels": a["labels"] % 9}),
    "probabilities": (4, "probabilities", _probabilities),
    "log-probabilities": (4, "softmax", _log_probabilities),
    "embeddings in another order": (4, "another model", _with("embeddings", lambda a: a[::-1])),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_file_that_is_wrong_is_refused_by_name(files: dict[str, Path], tmp_path: Path, case: str) -> None:
    code, words, change = DAMAGE[case]
    path = tmp_path / "bad.npz"
    np.savez(path, **change(arrays_of(files["untrained_m1/global"])))  # type: ignore[arg-type]
    message = recover({"untrained_m1/global": path}).refusal(code)
    assert re.search(words, message), message
    if case != "a class without samples":
        assert "bad.npz" in message


def test_half_precision_is_near_enough(files: dict[str, Path], tmp_path: Path) -> None:
    arrays = arrays_of(files["untrained_m1/global"])
    half = {name: a.astype(np.float16) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    path = write(tmp_path / "half.npz", **half)
    assert recover({"untrained_m1/global": path}).document["counts"] == truth("untrained_m1")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "logits.pt", {"logits": torch.zeros(3, 2)})
    for bad in (path, SAMPLES / "untrained_m1" / "global.safetensors", AUX):
        assert ".npz" in recover({"untrained_m1/global": bad}).refusal(3)
    whole = write(tmp_path / "logits.npz", logits=np.zeros((30, 10)))
    whole.write_bytes(whole.read_bytes()[:-40])
    assert "damaged" in recover({"untrained_m1/global": whole}).refusal(3)
    assert "no such file" in recover({"untrained_m1/global": tmp_path / "none.npz"}).refusal(3)


def test_local_logits_that_do_not_fit(files: dict[str, Path], tmp_path: Path) -> None:
    known = arrays_of(files["trained_m10/client_0"])
    cases = {
        "columns": {**known, "logits": known["logits"][:, :9]},
        "rows, one for each label": {"logits": known["logits"][:-1]},
        "embedding values": {**known, "embeddings": known["embeddings"][:, :80]},
    }
    for words, arrays in cases.items():
        path = write(tmp_path / "local.npz", **arrays)
        message = recover(files, "trained_m10", "--local-logits", path).refusal(4)
        assert words in message
        assert "local.npz" in message


@pytest.mark.parametrize(
    "flags",
    [
        ["--aux", AUX],
        ["--stats", "stats.safetensors"],
        ["--arch", "lenet5"],
        ["--normalize", "half"],
        ["--image-size", "28"],
        ["--batch-norm", "running"],
        ["--dropout", "on"],
        ["--class-order", "string"],
        ["--skip-bad"],
        ["--local-logits", "a.npz", "--local-logits", "b.npz"],
    ],
)
def test_flags_that_say_something_else_are_refused(files: dict[str, Path], flags: list[object]) -> None:
    word = "--aux" if flags == ["--skip-bad"] else str(flags[0])
    assert word in recover(files, "untrained_m1", *flags).refusal(2)


def test_local_logits_alone_are_refused(files: dict[str, Path]) -> None:
    path = files["untrained_m1/global"]
    assert "--aux-logits" in call("recover", *sample("untrained_m1"), "--local-logits", path).refusal(2)


def test_class_names_of_another_number(files: dict[str, Path], tmp_path: Path) -> None:
    source = SAMPLES / "untrained_m1" / "global.safetensors"
    about = metadata(source) | {"fl.class_names": '["a", "b"]'}
    path = write_safetensors(tmp_path / "g.safetensors", tensors(source), about)
    flags = ["--global", path, "--aux-logits", files["untrained_m1/global"]]
    assert "2 columns" in call("estimate-logits", *flags).refusal(4)


@pytest.mark.parametrize(("form", "value"), [("--result", "r.json"), ("--archive", "folder")])
def test_evaluate_refuses_it_where_it_would_change_nothing(
    files: dict[str, Path], form: str, value: str
) -> None:
    flags = ["evaluate", form, value, "--aux-logits", files["untrained_m1/global"]]
    flags += ["--truth", "t.json"] if form == "--result" else []
    assert "--aux-logits" in call(*flags).refusal(2)


def test_damaged_bytes_are_refused_or_harmless(files: dict[str, Path], tmp_path: Path) -> None:
    whole = files["untrained_m1/global"].read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.npz"
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 4):
            data[place] = rng.integers(256)
        del data[len(data) - int(rng.integers(0, 3)) * 50 :]
        path.write_bytes(data)
        try:
            read_logits(path).activations()
        except (FileError, MismatchError) as error:
            refused += 1
            assert "damaged.npz" in str(error)
    assert refused > 100


@pytest.mark.parametrize("shape", [(10, 1), (1, 10), (2, 5)])
def test_a_bias_of_another_shape_is_refused(
    files: dict[str, Path], tmp_path: Path, shape: tuple[int, int]
) -> None:
    """As some frameworks write it; with --head it was no fault of the file."""
    flags: list[object] = []
    for flag, name in (("--global", "global"), ("--local", "client_0")):
        path = SAMPLES / "untrained_m1" / f"{name}.safetensors"
        state = {**tensors(path), "fc3.bias": tensors(path)["fc3.bias"].reshape(shape)}
        flags += [flag, write_safetensors(tmp_path / path.name, state, metadata(path))]
    logits = files["untrained_m1/global"]
    message = call("recover", *flags, "--aux-logits", logits, "--head", "fc3", *QUICK).refusal(4)
    assert f"found the shape {shape}" in message


def test_a_linear_layer_saved_alone(files: dict[str, Path], tmp_path: Path) -> None:
    """A linear probe's state dict has no layer names: weight and bias."""
    flags: list[object] = []
    for flag, name in (("--global", "global"), ("--local", "client_0")):
        path = SAMPLES / "untrained_m1" / f"{name}.safetensors"
        state = {part: tensors(path)[f"fc3.{part}"] for part in ("weight", "bias")}
        flags += [flag, write_safetensors(tmp_path / path.name, state, metadata(path))]
    logits = files["untrained_m1/global"]
    document = call("recover", *flags, "--aux-logits", logits).document
    assert document["counts"] == truth("untrained_m1")
    assert document["model"]["head"] == ""
    stats = tmp_path / "s.safetensors"
    made = call("estimate-logits", *flags[:2], "--aux-logits", logits, *QUICK, "-o", stats)
    assert made.document["model"]["head"] == ""
    assert call("recover", *flags, "--stats", stats, "--method", "rlu").document["total"] == 32
    shown = call("inspect", flags[1]).document
    head = {"name": "", "num_classes": 10, "embedding_size": 84, "bias": True}
    assert (shown["head"], shown["head_candidates"]) == (head, [""])
