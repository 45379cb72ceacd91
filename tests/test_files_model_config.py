"""config.json beside a checkpoint: what is taken from it, and that it is never more than data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import AUX, QUICK, SAMPLES, call, metadata, tensors, write_torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlu_cli.errors import RluError
from rlu_cli.files.model_config import read_config
from rlu_cli.images import parse_normalization
from rlu_cli.models import build_model, parse_spec

TIMM = {
    "architecture": "resnet18",
    "num_classes": 3,
    "label_names": ["cat", "dog", "emu"],
    "model_args": {"drop_rate": 0.1, "act_layer": "silu", "img_size": [32, 40], "deep": True},
    "pretrained_cfg": {"mean": [0.5, 0.25, 0.1], "std": [1, 0.5, 0.2], "input_size": [3, 32, 40], "tag": "x"},
}
TRANSFORMERS = {
    "architectures": ["ResNetForImageClassification"],
    "id2label": {"1": "dog", "0": "cat", "10": "ten", **{str(n): f"n{n}" for n in range(2, 10)}},
    "num_labels": 11,
}

BY_GLS = (*QUICK, "--method", "gls")


def written(folder: Path, document: object) -> Path:
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder / "model.safetensors"


def test_timm(tmp_path: Path) -> None:
    found = read_config(written(tmp_path, TIMM))
    assert found.ignored == ()
    assert found.values == {
        "fl.arch": "timm:resnet18:act_layer=silu,deep=true,drop_rate=0.1,img_size=32x40,num_classes=3",
        "fl.class_names": '["cat", "dog", "emu"]',
        "fl.normalize": "mean=0.5,0.25,0.1;std=1,0.5,0.2",
        "fl.image_size": "32x40",
    }
    spec = parse_spec(found.values["fl.arch"])
    assert (spec.kind, spec.target) == ("timm", "resnet18")
    assert spec.kwargs["img_size"] == (32, 40)
    assert parse_normalization(found.values["fl.normalize"]).std == (1.0, 0.5, 0.2)


def test_input_channels_other_than_three_are_an_argument(tmp_path: Path) -> None:
    document = {"architecture": "resnet18.a1_in1k", "pretrained_cfg": {"input_size": [1, 28, 28]}}
    assert read_config(written(tmp_path, document)).values["fl.arch"] == "timm:resnet18.a1_in1k:in_chans=1"


def test_transformers_gives_class_names_alone(tmp_path: Path) -> None:
    found = read_config(written(tmp_path, TRANSFORMERS))
    names = ["cat", "dog", *(f"n{n}" for n in range(2, 10)), "ten"]
    assert {key: json.loads(value) for key, value in found.values.items()} == {"fl.class_names": names}


@pytest.mark.parametrize(
    "document",
    [{}, [], {"lr": 0.1, "clients": 10}, {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, {"label_names": []}],
)
def test_other_files_of_that_name_say_nothing(tmp_path: Path, document: object) -> None:
    found = read_config(written(tmp_path, document))
    assert (found.values, found.ignored) == ({}, ())


PLACES = ["os:system", "../x.py:make", "hf-hub:a/b", "local-dir:/x"]


@pytest.mark.parametrize("name", [*PLACES, "a b", "", 3, "x:num_classes=3", "resnet\n18"])
def test_architecture_is_never_code_or_another_place(tmp_path: Path, name: object) -> None:
    found = read_config(written(tmp_path, {"architecture": name}))
    assert found.values == {}
    assert "registry" in found.ignored[0] and "\n" not in found.ignored[0]


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ({"architecture": "vgg11", "model_args": {"layers": {"a": 1}}}, "layers"),
        ({"architecture": "vgg11", "model_args": {"act": "a,pretrained=true"}}, "act"),
        ({"architecture": "vgg11", "model_args": {"a,b": 1}}, "a,b"),
        ({"architecture": "vgg11", "model_args": {"n": 10**400}}, "model_args"),
        ({"architecture": "vgg11", "pretrained_cfg": {"input_size": [3, 10**9, 1]}}, "input_size"),
        ({"label_names": ["a", 3]}, "class names"),
        ({"id2label": {"0": "a", "2": "b"}}, "gaps"),
        ({"id2label": {"9" * 5000: "a"}}, "config.json"),
        ({"pretrained_cfg": {"mean": [0.5]}}, "mean and std"),
        ({"pretrained_cfg": {"mean": [0.5], "std": ["1"]}}, "mean and std"),
        ({"pretrained_cfg": {"mean": [0.5], "std": [0]}}, "above 0"),
        ({"pretrained_cfg": {"mean": [0.5], "std": [10**400]}}, "mean and std"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, document: object, what: str) -> None:
    found = read_config(written(tmp_path, document))
    assert found.values == {}
    assert any(what in reason for reason in found.ignored)


def test_damaged_file_is_noted_and_the_first_folder_counts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert read_config(tmp_path / "a" / "g", tmp_path / "b" / "k").path is None
    second = written(tmp_path / "b", TIMM)
    assert read_config(tmp_path / "a" / "g", second).path == tmp_path / "b" / "config.json"
    (tmp_path / "a" / "config.json").write_text("{// a comment\n}")
    found = read_config(tmp_path / "a" / "g", second)
    assert found.values == {} and "valid JSON" in found.ignored[0]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_KEYS = ["architecture", "model_args", "num_classes", "label_names", "id2label", "pretrained_cfg"]
_CFG = st.dictionaries(st.sampled_from(["mean", "std", "input_size", "architecture"]), _JSON, max_size=4)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(_KEYS), _JSON | _CFG, max_size=6))
def test_any_values(tmp_path: Path, document: dict[str, Any]) -> None:
    """Whatever it holds: only annotations that parse, and at most an architecture of timm's registry."""
    found = read_config(written(tmp_path, document))
    assert set(found.values) <= {"fl.arch", "fl.class_names", "fl.normalize", "fl.image_size"}
    if "fl.arch" in found.values:
        spec = parse_spec(found.values["fl.arch"])
        assert spec.kind == "timm" and not set(spec.target) & set("/\\:")
        with pytest.raises(RluError):  # not installed, or unknown: nothing is imported on the file's word
            build_model(spec, allow_user_code=False)
    if "fl.normalize" in found.values:
        parse_normalization(found.values["fl.normalize"])


# --- on the command line -----------------------------------------------------------------------------


def bare(folder: Path) -> list[object]:
    """A sample round whose files say how it was trained, but nothing of the network's inputs."""
    for name in ("global", "client_0"):
        path = SAMPLES / "trained_m1" / f"{name}.safetensors"
        keep = ("fl.lr", "fl.batch_size", "fl.steps")
        about = {key: value for key, value in metadata(path).items() if key in keep}
        write_torch(folder / f"{name}.pt", {"state_dict": tensors(path), **about})
    return ["--global", folder / "global.pt", "--local", folder / "client_0.pt", "--aux", AUX, *BY_GLS]


def described() -> dict[str, Any]:
    about = metadata(SAMPLES / "trained_m1" / "global.safetensors")
    mean, std = (part.partition("=")[2] for part in about["fl.normalize"].split(";"))
    return {
        "label_names": json.loads(about["fl.class_names"]),
        "pretrained_cfg": {"mean": [float(mean)], "std": [float(std)], "input_size": [1, 28, 28]},
    }


def test_recovery_takes_names_and_inputs_from_it(tmp_path: Path) -> None:
    flags = bare(tmp_path)
    written(tmp_path, described())
    path = SAMPLES / "trained_m1" / "client_0.safetensors"
    full = ["--global", path.with_name("global.safetensors"), "--local", path, "--aux", AUX, *BY_GLS]
    whole, found = call("recover", *full).document, call("recover", *flags).document
    assert found["counts"] == whole["counts"]
    assert found["classes"] == whole["classes"]
    assert found["model"]["sources"] == dict.fromkeys(("normalize", "image_size", "class_names"), "config")
    assert whole["model"]["sources"]["normalize"] in ("local", "global")
    flagged = call("recover", *flags, "--normalize", "none").document
    assert flagged["model"]["sources"]["normalize"] == "flag"
    assert flagged["model"]["normalize"] != found["model"]["normalize"]
    (tmp_path / "round.json").write_text('{"normalize": "half"}')
    assert call("recover", *flags).document["model"]["sources"]["normalize"] == "sidecar"


def test_statistics_made_with_it_are_named_as_the_source(tmp_path: Path) -> None:
    flags = bare(tmp_path)
    written(tmp_path, described())
    stats = tmp_path / "stats.safetensors"
    made = call("estimate-logits", *flags[:2], "--aux", AUX, *QUICK, "-o", stats).document
    assert made["model"]["sources"]["normalize"] == "config"
    (tmp_path / "config.json").unlink()
    found = call("recover", *flags[:4], "--stats", stats, *QUICK).document
    assert found["model"]["sources"]["normalize"] == "stats"


def test_architecture_that_is_not_installed(tmp_path: Path) -> None:
    flags = bare(tmp_path)
    written(tmp_path, {**described(), "architecture": "a_name_that_timm_lacks"})
    found = call("recover", *flags)  # not only timm writes such files, and the tensors are a built-in's
    assert {"architecture-matched", "config-ignored"} <= set(found.codes)
    assert found.document["model"]["arch"].startswith("lenet5:")
    assert "arch" not in found.document["model"]["sources"]
    assert call("recover", *flags, "--arch", "lenet5").document["model"]["sources"]["arch"] == "flag"


def test_architecture_that_is_not_installed_of_tensors_that_no_built_in_has(tmp_path: Path) -> None:
    flags = bare(tmp_path)
    for name in ("global", "client_0"):
        stored = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        state = {f"x{key}": tensor for key, tensor in stored.pop("state_dict").items()}
        write_torch(tmp_path / f"{name}.pt", {"state_dict": state, **stored})
    written(tmp_path, {**described(), "architecture": "a_name_that_timm_lacks"})
    refusal = call("recover", *flags)
    assert refusal.code in (2, 4)  # without timm, and with it
    message = refusal.refusal(refusal.code)
    assert "timm" in message and "config.json" in message and "--arch" in message


def test_what_is_left_out_is_a_warning(tmp_path: Path) -> None:
    flags = bare(tmp_path)
    written(tmp_path, {**described(), "architecture": "os:system"})
    found = call("recover", *flags)
    assert "config-ignored" in found.codes
    assert found.document["model"]["arch"].startswith("lenet5:")
