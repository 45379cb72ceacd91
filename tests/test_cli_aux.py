"""Auxiliary images of every kind, as the command line takes them."""

from __future__ import annotations

import json
import shutil
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
    bare_round,
    call,
    metadata,
    sample,
    truth,
    write_safetensors,
)
from dataset_files import (
    CIFAR10,
    cifar10,
    write_class_folders,
    write_folder,
    write_idx_pair,
    write_svhn,
    write_tar,
    write_tiny_imagenet,
)
from PIL import Image

from rlu_cli.images import load_images, scan_class_folder
from rlu_cli.models import LeNet5

NAMES = json.loads(metadata(SAMPLES / "untrained_m1" / "global.safetensors")["fl.class_names"])
AUX_FIELDS = {"path", "images", "classes", "kind", "split", "per_class", "svhn_digit_zero", "exif", "bad"}


@pytest.fixture(scope="module")
def grey() -> tuple[np.ndarray, list[int]]:
    """The sample's auxiliary images (300, 28, 28), shuffled, and their output indices."""
    images = load_images(scan_class_folder(AUX, class_names=NAMES), channels=1, size=None)
    order = np.random.default_rng(0).permutation(len(images.labels))
    return images.pixels[order, 0].numpy(), images.labels[order].tolist()


@pytest.fixture(scope="module")
def colour(grey: tuple[np.ndarray, list[int]]) -> np.ndarray:
    """The same as (300, 32, 32, 3)."""
    return np.stack([np.asarray(Image.fromarray(image).convert("RGB").resize((32, 32))) for image in grey[0]])


def recover(aux: Path, *more: object, round_: str = "untrained_m1") -> Outcome:
    return call("recover", *sample(round_, aux=aux), *more)


def without_aux(document: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on how the same images are stored."""
    model = {key: value for key, value in document["model"].items() if key != "class_order"}
    return {**document, "inputs": {**document["inputs"], "aux": None}, "model": model}


def test_folder_in_the_json() -> None:
    document = recover(AUX, *QUICK).document
    assert document["inputs"]["aux"] == {
        "path": str(AUX),
        "images": 300,
        "classes": 10,
        "kind": "folders",
        "split": None,
        "per_class": None,
        "svhn_digit_zero": None,
        "exif": False,
        "bad": None,
    }


@pytest.mark.parametrize("per_class", [None, 7])
def test_same_images_same_answer(
    tmp_path: Path, grey: tuple[np.ndarray, list[int]], per_class: int | None
) -> None:
    """Arrays and files of the same images give the same bytes, sub-sampled or not."""
    images, labels = grey
    np.savez(tmp_path / "named.npz", images=images, labels=labels, class_names=np.array(NAMES))
    folder = write_class_folders(tmp_path / "folders", images, labels, NAMES)
    flags = [*QUICK] if per_class is None else [*QUICK, "--aux-per-class", per_class]
    first, second = (recover(aux, *flags).document for aux in (folder, tmp_path / "named.npz"))
    assert without_aux(first) == without_aux(second)
    about = second["inputs"]["aux"]
    assert set(about) == AUX_FIELDS
    assert (about["kind"], about["images"], about["per_class"]) == ("npz", 10 * (per_class or 30), per_class)
    assert second["model"]["class_order"] == "class_names"


def test_sub_sample_follows_the_seed() -> None:
    flags = [*QUICK, "--aux-per-class", 5]
    first, again, other = (recover(AUX, *flags, "--seed", seed).document for seed in (1, 1, 2))
    assert first == again
    estimates = [[entry["estimate"] for entry in document["classes"]] for document in (first, other)]
    assert estimates[0] != estimates[1]


def test_class_with_fewer_images_than_asked_gives_all(tmp_path: Path) -> None:
    aux = tmp_path / "aux"
    shutil.copytree(AUX, aux)
    for path in sorted((aux / "bag").iterdir())[3:]:
        path.unlink()
    assert recover(aux, *QUICK, "--aux-per-class", 5).document["inputs"]["aux"]["images"] == 48


def test_evaluate_and_estimate_logits_take_them_too(tmp_path: Path) -> None:
    flags = ["--aux-per-class", 4, *QUICK]
    document = call("estimate-logits", *sample("untrained_m1")[:2], "--aux", AUX, *flags).document
    assert document["inputs"]["aux"]["images"] == 40
    assert {entry["images"] for entry in document["classes"]} == {4}
    path = SAMPLES / "untrained_m1" / "truth.json"
    score = call("evaluate", *sample("untrained_m1"), "--truth", path, *flags).document["results"][0]
    assert score["counts"] == recover(AUX, *flags).document["counts"]


Writer = Callable[[Path, np.ndarray, np.ndarray, list[int]], Path]


def idx_folder(root: Path, grey: np.ndarray, colour: np.ndarray, labels: list[int]) -> Path:
    write_idx_pair(root, "train", np.zeros_like(grey), labels[::-1])
    return write_idx_pair(root, "t10k", grey, labels)


def cifar_archive(root: Path, grey: np.ndarray, colour: np.ndarray, labels: list[int]) -> Path:
    return write_tar(root / "cifar.tar.gz", cifar10(colour.transpose(0, 3, 1, 2), labels, NAMES))


def cifar_folder(root: Path, grey: np.ndarray, colour: np.ndarray, labels: list[int]) -> Path:
    """The official names are in another order than the checkpoint's; the names decide."""
    names = sorted(NAMES)
    files = cifar10(colour.transpose(0, 3, 1, 2), [names.index(NAMES[label]) for label in labels], names)
    return write_folder(root, files) / CIFAR10


def svhn(root: Path, grey: np.ndarray, colour: np.ndarray, labels: list[int]) -> Path:
    return write_svhn(root / "test_32x32.mat", colour.transpose(0, 3, 1, 2), labels)


def tiny_imagenet(root: Path, grey: np.ndarray, colour: np.ndarray, labels: list[int]) -> Path:
    large = np.stack([np.asarray(Image.fromarray(image).resize((64, 64))) for image in colour])
    return write_tiny_imagenet(root / "tiny", large, labels, NAMES, listed=NAMES)


@pytest.mark.parametrize(
    ("write", "kind", "split", "order"),
    [
        (idx_folder, "idx", "test", "dataset"),
        (cifar_archive, "cifar", "test", "class_names"),
        (cifar_folder, "cifar", "test", "class_names"),
        (svhn, "svhn", None, "dataset"),
        (tiny_imagenet, "tiny-imagenet", "test", "class_names"),
    ],
)
def test_official_files(
    tmp_path: Path,
    grey: tuple[np.ndarray, list[int]],
    colour: np.ndarray,
    write: Writer,
    kind: str,
    split: str | None,
    order: str,
) -> None:
    aux = write(tmp_path, grey[0], colour, grey[1])
    outcome = recover(aux, "--image-size", 28)
    document = outcome.document
    about = document["inputs"]["aux"]
    assert (about["path"], about["kind"], about["split"], about["images"]) == (str(aux), kind, split, 300)
    assert document["model"]["class_order"] == order
    assert [entry["name"] for entry in document["classes"]] == NAMES
    assert np.abs(np.array(document["counts"]) - truth("untrained_m1")).sum() <= 2
    assert ("images-resized" in outcome.codes) == (kind != "idx")


def test_split_is_what_was_asked(tmp_path: Path, grey: tuple[np.ndarray, list[int]]) -> None:
    root = idx_folder(tmp_path, *grey[:1], grey[0], grey[1])
    both = [recover(root, *QUICK, "--aux-split", split).document for split in ("train", "test")]
    assert [document["inputs"]["aux"]["split"] for document in both] == ["train", "test"]
    assert both[0]["classes"] != both[1]["classes"]
    assert both[1] == recover(root, *QUICK).document
    for path in root.glob("t10k*"):
        path.unlink()
    assert recover(root, *QUICK).document["inputs"]["aux"]["split"] == "train"
    assert "t10k-images" in recover(root, *QUICK, "--aux-split", "test").refusal(3)


def test_split_of_class_folders(tmp_path: Path) -> None:
    for name in ("train", "val"):
        shutil.copytree(AUX, tmp_path / name)
    shutil.rmtree(tmp_path / "train" / "bag")
    about = recover(tmp_path, *QUICK).document["inputs"]["aux"]
    assert (about["split"], about["path"]) == ("test", str(tmp_path / "val"))
    assert "bag" in recover(tmp_path, *QUICK, "--aux-split", "train").refusal(4)
    assert "nothing says that these are test images" in recover(AUX, "--aux-split", "test").refusal(2)


@pytest.fixture
def digits(tmp_path: Path) -> tuple[Path, Path]:
    """An untrained model of 32x32 colour images that says nothing of itself, and an SVHN file."""
    torch.manual_seed(0)
    state = LeNet5(in_channels=3, image_size=32).state_dict()
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 3)).tolist()
    images = np.random.default_rng(1).integers(0, 256, (30, 3, 32, 32), dtype=np.uint8)
    return write_safetensors(tmp_path / "g.safetensors", state), write_svhn(
        tmp_path / "train_32x32.mat", images, labels
    )


@pytest.mark.parametrize(
    ("flag", "names"), [(None, "0123456789"), ("first", "0123456789"), ("last", "1234567890")]
)
def test_svhn_digit_zero(digits: tuple[Path, Path], flag: str | None, names: str) -> None:
    more = [] if flag is None else ["--svhn-digit-zero", flag]
    document = call("estimate-logits", "--global", digits[0], "--aux", digits[1], *QUICK, *more).document
    assert "".join(entry["name"] for entry in document["classes"]) == names
    assert document["model"]["class_order"] == "dataset"
    assert document["inputs"]["aux"]["svhn_digit_zero"] == (flag or "first")


def test_svhn_digit_zero_of_other_data() -> None:
    assert "SVHN" in recover(AUX, "--svhn-digit-zero", "last").refusal(2)


def test_class_order_of_a_data_set(
    tmp_path: Path, colour: np.ndarray, grey: tuple[np.ndarray, list[int]]
) -> None:
    """Without the checkpoint's names the label numbers count; every order can be asked for."""
    labels = [sorted(NAMES).index(NAMES[label]) for label in grey[1]]
    aux = write_tar(tmp_path / "c.tar", cifar10(colour.transpose(0, 3, 1, 2), labels, sorted(NAMES)))
    flags = [*bare_round(tmp_path)[:4], "--aux", aux, *QUICK]
    flags += ["--lr", 0.01, "--batch-size", 32, "--steps", 1, "--normalize", "mean=0.286;std=0.353"]
    assert call("recover", *flags).document["model"]["class_order"] == "dataset"
    order = tmp_path / "order.txt"
    order.write_text("".join(f"{name}\n" for name in NAMES))
    expected = {
        "string": sorted(NAMES),
        "natural": sorted(NAMES),
        "dataset": sorted(NAMES),
        str(order): NAMES,
    }
    for choice, names in expected.items():
        document = call("recover", *flags, "--class-order", choice).document
        assert [entry["name"] for entry in document["classes"]] == names
        assert document["model"]["class_order"] == choice
    assert "label numbers" in recover(AUX, "--class-order", "dataset").refusal(2)


def test_names_that_are_not_the_data_sets(
    tmp_path: Path, colour: np.ndarray, grey: tuple[np.ndarray, list[int]]
) -> None:
    names = ["T-Shirt", *NAMES[1:]]
    aux = write_tar(tmp_path / "c.tar", cifar10(colour.transpose(0, 3, 1, 2), grey[1], names))
    message = recover(aux, *QUICK).refusal(4)
    for words in ("'t-shirt'", "'T-Shirt'", "--class-order", "dataset"):
        assert words in message
    outcome = recover(aux, *QUICK, "--image-size", 28, "--class-order", "dataset")
    assert outcome.document["counts"] and "class-names-disagree" not in outcome.codes


def test_order_against_the_checkpoints_names(tmp_path: Path) -> None:
    outcome = recover(AUX, *QUICK, "--class-order", "string")
    assert "class-names-disagree" in outcome.codes
    assert recover(AUX, *QUICK, "--class-order", "string", "--strict").code == 5
    order = tmp_path / "order.txt"
    order.write_text("".join(f"{name}\n" for name in NAMES))
    assert "class-names-disagree" not in recover(AUX, *QUICK, "--class-order", order).codes


def test_classes_of_one_name(tmp_path: Path, grey: tuple[np.ndarray, list[int]]) -> None:
    names = np.array([*NAMES[:9], NAMES[0]])
    np.savez(tmp_path / "a.npz", images=grey[0], labels=grey[1], class_names=names)
    message = recover(tmp_path / "a.npz", *QUICK).refusal(4)
    assert "'t-shirt'" in message and "--class-order dataset" in message
    assert recover(tmp_path / "a.npz", *QUICK, "--class-order", "dataset").code == 0


def test_class_without_images_keeps_its_index(tmp_path: Path, grey: tuple[np.ndarray, list[int]]) -> None:
    images, labels = grey
    kept = [n for n, label in enumerate(labels) if label != 4]
    np.savez(tmp_path / "a.npz", images=images[kept], labels=[labels[n] for n in kept])
    message = recover(tmp_path / "a.npz", *QUICK).refusal(4)
    assert "4 (index 4)" in message and "add images" in message


def test_wrong_number_of_classes(tmp_path: Path, grey: tuple[np.ndarray, list[int]]) -> None:
    np.savez(tmp_path / "a.npz", images=grey[0], labels=[min(label, 8) for label in grey[1]])
    message = recover(tmp_path / "a.npz", *QUICK).refusal(4)
    assert "expected 10 classes" in message and "found 9" in message


def test_tiny_imagenets_flat_validation_set(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    shutil.copy(AUX / "bag" / "00.png", tmp_path / "images" / "val_0.JPEG")
    (tmp_path / "val_annotations.txt").touch()
    assert "wnids.txt" in recover(tmp_path, *QUICK, "--class-order", "string").refusal(4)


# Damaged images and EXIF.


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The sample's images, five of them cut short."""
    aux = tmp_path / "aux"
    shutil.copytree(AUX, aux)
    for name in ("bag/00.png", "bag/07.png", "coat/03.png", "shirt/29.png", "shirt/28.png"):
        (aux / name).write_bytes((aux / name).read_bytes()[:150])
    return aux


def test_damaged_image_stops_and_is_named(damaged: Path) -> None:
    assert f"can't use the image {damaged / 'coat' / '03.png'}" in recover(damaged).refusal(3)


def test_damaged_images_are_skipped_and_counted(damaged: Path) -> None:
    outcome = recover(damaged, *QUICK, "--skip-bad")
    about = outcome.document["inputs"]["aux"]
    assert (about["images"], about["bad"]) == (295, 5)
    (warning,) = [w for w in outcome.document["warnings"] if w["code"] == "aux-bad-images"]
    for words in ("5 of 300", "coat/03.png", "shirt/28.png", "shirt/29.png", "and 2 more"):
        assert words in warning["message"]
    for path in damaged.rglob("*.png"):
        if path.stat().st_size == 150:
            path.unlink()
    clean = recover(damaged, *QUICK, "--skip-bad")
    assert clean.document["inputs"]["aux"]["bad"] == 0 and "aux-bad-images" not in clean.codes
    assert clean.document["classes"] == outcome.document["classes"]


def test_class_of_damaged_images_only(damaged: Path) -> None:
    for path in (damaged / "bag").iterdir():
        path.write_bytes(b"")
    message = recover(damaged, "--skip-bad").refusal(3)
    assert "'bag'" in message and "the file is empty" in message


def test_exif_turns_images_when_asked(tmp_path: Path) -> None:
    """Turned images with the orientation that turns them back are the sample's own."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for path in AUX.rglob("*.png"):
        turned = tmp_path / path.relative_to(AUX)
        turned.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.transpose(Image.Transpose.ROTATE_90).save(turned, exif=exif)
    plain, asked, raw = (
        recover(aux, *QUICK, *flags).document
        for aux, flags in ((AUX, []), (tmp_path, ["--exif"]), (tmp_path, []))
    )
    assert asked["classes"] == plain["classes"] != raw["classes"]
    assert asked["inputs"]["aux"]["exif"] is True


def test_statistics_file_says_how_the_images_were_read(damaged: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats.safetensors"
    flags = ["--skip-bad", "--exif", "--aux-per-class", 20, *QUICK]
    path = sample("untrained_m1")[1]
    made = call("estimate-logits", "--global", path, "--aux", damaged, "-o", stats, *flags).document
    used = call("recover", *sample("untrained_m1", aux=None), "--stats", stats, *QUICK).document
    assert used["inputs"]["aux"] == made["inputs"]["aux"]
    assert (made["inputs"]["aux"]["exif"], made["inputs"]["aux"]["per_class"]) == (True, 20)


@pytest.mark.parametrize(
    "flags", [["--aux-per-class", "0"], ["--aux-split", "dev"], ["--svhn-digit-zero", "10"]]
)
def test_bad_values(flags: list[str]) -> None:
    assert flags[0] in recover(AUX, *flags).refusal(2)


def test_paths_are_plain(tmp_path: Path) -> None:
    """An unknown file is refused with what would be taken."""
    (tmp_path / "x").write_bytes(b"hello")
    message = recover(tmp_path / "x").refusal(3)
    assert "CIFAR" in message and ".npz" in message
    (tmp_path / "empty").mkdir()
    assert "found no data set" in recover(tmp_path / "empty").refusal(3)
