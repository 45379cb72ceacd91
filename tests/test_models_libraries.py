"""torchvision's and timm's own models, for real: built, recovered from, and described by config.json.

Slow, and only where they are installed; torchvision needs the torch build that it was made for. An
environment of its own does: ``python -m venv X; X/bin/pip install -e '.[dev,timm,torchvision]'``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import AUX, call
from real_rounds import TRAINING, make_round, wrong

pytestmark = pytest.mark.slow

COMMON = ["--aux", AUX, "--normalize", "none", "--class-order", "string", "--samples", 2000]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 28), ("vgg11_bn", 32), ("mobilenet_v3_small", 32), ("densenet121", 32)]
)
def test_torchvision(tmp_path: Path, name: str, size: int) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    keywords = {"dropout": 0.0} if name in ("vgg11_bn", "mobilenet_v3_small") else {}
    model = models.get_model(name, weights=None, num_classes=10, **keywords)
    reference, local, true = make_round(tmp_path, model, channels=3, size=size)
    spec = ",".join(["num_classes=10", *(f"{key}={value}" for key, value in keywords.items())])
    flags = ["--global", reference, "--local", local, "--arch", f"torchvision:{name}:{spec}"]
    found = call("recover", *flags, "--image-size", size, *TRAINING, *COMMON)
    assert wrong(found.document["counts"], true) <= 2, (found.document["counts"], true, found.codes)


@pytest.mark.filterwarnings("ignore")
def test_a_network_that_rectifies_its_logits_is_refused(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.save(models.squeezenet1_1(num_classes=10).state_dict(), tmp_path / "g.pt")
    flags = ["--global", tmp_path / "g.pt", "--local", tmp_path / "g.pt", "--image-size", 64]
    flags += ["--arch", "torchvision:squeezenet1_1:num_classes=10", *TRAINING, *COMMON]
    assert "one of those with 10 outputs: classifier.1" in call("recover", *flags).refusal(4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "keywords", "size"),
    [
        ("resnet18", {}, 28),
        ("resnet10t", {"in_chans": 1}, 28),
        ("vit_tiny_patch16_224", {"img_size": 32}, 32),
        ("convnext_atto", {}, 64),
    ],
)
def test_timm_described_by_config_json(
    tmp_path: Path, name: str, keywords: dict[str, Any], size: int
) -> None:
    timm = pytest.importorskip("timm")
    from timm.models._hub import save_config_for_hf

    torch.manual_seed(0)
    cfg = {"input_size": (keywords.get("in_chans", 3), size, size), "mean": (0.0,), "std": (1.0,)}
    model = timm.create_model(name, num_classes=10, pretrained_cfg_overlay=cfg, **keywords)
    reference, local, true = make_round(tmp_path, model, channels=keywords.get("in_chans", 3), size=size)
    names = sorted(folder.name for folder in AUX.iterdir())
    save_config_for_hf(model, tmp_path / "config.json", {"label_names": names}, keywords or None)
    found = call(
        "recover", "--global", reference, "--local", local, "--aux", AUX, *TRAINING, "--samples", 2000
    )
    document = found.document
    assert document["model"]["arch"].startswith(f"timm:{name}:")
    assert document["model"]["sources"] == dict.fromkeys(document["model"]["sources"], "config")
    assert set(document["model"]["sources"]) == {"arch", "normalize", "image_size", "class_names"}
    assert [entry["name"] for entry in document["classes"]] == names
    assert wrong(document["counts"], true) <= 2, (document["counts"], true, found.codes)


@pytest.mark.filterwarnings("ignore")
def test_timm_refuses_what_is_not_in_its_registry(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.save(timm.create_model("resnet18", num_classes=10).state_dict(), tmp_path / "g.pt")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18_of_mine", "num_classes": 10}))
    flags = ["--global", tmp_path / "g.pt", "--local", tmp_path / "g.pt", "--aux", AUX, *TRAINING]
    assert "resnet18_of_mine" in call("recover", *flags).refusal(4)
