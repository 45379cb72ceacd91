"""The paper's rounds on official files: small ones in the same formats, and files that aren't them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dataset_files import cifar10, write_folder, write_svhn, write_tiny_imagenet

from benchmarks.data import images
from benchmarks.paper.__main__ import main
from benchmarks.paper.official import check_official
from benchmarks.paper.settings import DATASETS, SCALES, Plan, Size
from benchmarks.rounds import Bench, Results
from rlu_cli.errors import FileError, UsageError

pytest.importorskip("matplotlib")

PER_CLASS = 30


def drawn(classes: int, per_class: int) -> tuple[np.ndarray, list[int]]:
    """Noise of another brightness for each class, (M, 3, 32, 32)."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    noise = rng.integers(0, 80, (len(labels), 3, 32, 32))
    return (noise + (170 * labels / classes).astype(int)[:, None, None, None]).astype(
        np.uint8
    ), labels.tolist()


@pytest.fixture
def svhn(tmp_path: Path) -> Path:
    pixels, labels = drawn(10, PER_CLASS)
    return write_svhn(tmp_path / "train_32x32.mat", pixels, labels)


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    pixels, labels = drawn(10, PER_CLASS)
    files = cifar10(pixels, labels, [f"class {n}" for n in range(10)], split="train")
    return write_folder(tmp_path / "cifar", files)


@pytest.mark.parametrize("name", ["SVHN", "CIFAR-10"])
def test_a_round_is_played_on_official_files(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dataset = DATASETS[name]
    path = request.getfixturevalue({"SVHN": "svhn", "CIFAR-10": "cifar"}[name])
    check_official(dataset, str(path))
    few = replace(SCALES["quick"], sizes={name: Size(1, 1, 5)}, lenet={name: Size(1, 1, 5)})
    plan = Plan(few, {name: str(path)})
    assert plan.label(dataset) == name
    (round_,) = plan.rounds(dataset, steps=1, model="lenet5", methods=("rlu",))
    assert round_.normalize == dataset.normalize
    rows = Bench(Results(tmp_path / "r.ndjson"), images, device="cpu").measure([round_])
    assert [row["method"] for row in rows] == ["rlu", "(uniform)"]
    assert rows[0]["iAcc"] > 0.9


def test_tiny_imagenet_is_told_by_its_layout(tmp_path: Path) -> None:
    wnids = [f"n{n:08}" for n in range(200)]
    pixels = np.full((200, 64, 64, 3), 100, dtype=np.uint8)
    root = write_tiny_imagenet(tmp_path / "tiny-imagenet-200", pixels, range(200), wnids, listed=wnids)
    check_official(DATASETS["Tiny-ImageNet"], str(root))
    with pytest.raises(UsageError, match="expected the official files of SVHN"):
        check_official(DATASETS["SVHN"], str(root))


def test_other_files_are_never_called_official(
    svhn: Path, cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "noise.npz", images=drawn(10, 3)[0].transpose(0, 2, 3, 1), labels=drawn(10, 3)[1])
    for path, name in ((svhn, "CIFAR-10"), (cifar, "CIFAR-100"), (tmp_path / "noise.npz", "CIFAR-10")):
        with pytest.raises(UsageError, match=f"tables would call them {name}"):
            check_official(DATASETS[name], str(path))
    with pytest.raises(FileError):
        check_official(DATASETS["SVHN"], str(tmp_path / "missing"))
    with pytest.raises(SystemExit, match="2"):
        main(["table5", "--data", f"CIFAR-100={cifar}"])
    assert "cifar with 10" in capsys.readouterr().err
