"""Tiny-ImageNet's tree: both class orders, and the flat validation set by its list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.images import ImageSet, decode_image, load_images
from rlu_cli.images.datasets import load_tiny_imagenet, open_dataset, scan_tiny_imagenet

WNIDS = ["n02", "n10", "n01"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes with 3 training and 2 validation images each; one image is grey, as some are."""
    rng = np.random.default_rng(0)

    def save(path: Path, grey: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (64, 64) if grey else (64, 64, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path, "JPEG")

    (tmp_path / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (tmp_path / "words.txt").write_text("n01\tfish\n")
    lines = []
    for number, wnid in enumerate(WNIDS):
        for n in range(3):
            save(tmp_path / "train" / wnid / "images" / f"{wnid}_{n}.JPEG", grey=(number, n) == (0, 1))
        (tmp_path / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
    for n in range(6):
        save(tmp_path / "val" / "images" / f"val_{n}.JPEG")
        lines.append(f"val_{n}.JPEG\t{WNIDS[n % 3]}\t0\t32\t44\t62\n")
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    save(tmp_path / "test" / "images" / "test_0.JPEG")
    return tmp_path


def scanned(root: Path, split: str, wnids: bool) -> ImageSet:
    order = str(root / "wnids.txt") if wnids else None
    folder = scan_tiny_imagenet(root, split=split, order=order)
    assert folder.order == (order or "string")
    return load_images(folder, channels=3, size=None)


@pytest.mark.parametrize(("wnids", "names"), [(False, ("n01", "n02", "n10")), (True, ("n02", "n10", "n01"))])
def test_train(root: Path, wnids: bool, names: tuple[str, ...]) -> None:
    images = scanned(root, "train", wnids)
    assert images.names == names
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    files = [root / "train" / name / "images" / f"{name}_{n}.JPEG" for name in names for n in range(3)]
    for pixels, path in zip(images.pixels.numpy(), files, strict=True):
        np.testing.assert_array_equal(pixels, decode_image(path, channels=3, size=None).transpose(2, 0, 1))
    if not wnids:
        assert torch.equal(load_tiny_imagenet(root).pixels, images.pixels)


@pytest.mark.parametrize(("wnids", "order"), [(False, [2, 5, 0, 3, 1, 4]), (True, [0, 3, 1, 4, 2, 5])])
def test_validation(root: Path, wnids: bool, order: list[int]) -> None:
    images = scanned(root, "test", wnids)
    assert images.labels.tolist() == [0, 0, 1, 1, 2, 2]
    for n, pixels in zip(order, images.pixels.numpy(), strict=True):
        decoded = decode_image(root / "val" / "images" / f"val_{n}.JPEG", channels=3, size=None)
        np.testing.assert_array_equal(pixels, decoded.transpose(2, 0, 1))


def test_validation_in_the_order_of_its_list(root: Path) -> None:
    images = load_tiny_imagenet(root, split="test", workers=3)
    assert images.labels.tolist() == [1, 2, 0, 1, 2, 0]
    for n, pixels in enumerate(images.pixels.numpy()):
        decoded = decode_image(root / "val" / "images" / f"val_{n}.JPEG", channels=3, size=None)
        np.testing.assert_array_equal(pixels, decoded.transpose(2, 0, 1))


def test_class_without_validation_images(root: Path) -> None:
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\n")
    with pytest.raises(MismatchError, match=r"have none: n01 \(index 0\), n10 \(index 2\)"):
        scan_tiny_imagenet(root, split="test")


def test_validation_sorted_into_folders(root: Path) -> None:
    flat = load_tiny_imagenet(root, split="test")
    for n in range(6):
        folder = root / "val" / WNIDS[n % 3]
        folder.mkdir(exist_ok=True)
        (root / "val" / "images" / f"val_{n}.JPEG").rename(folder / f"val_{n}.JPEG")
    (root / "val" / "images").rmdir()
    (root / "val" / "val_annotations.txt").unlink()
    images = load_tiny_imagenet(root, split="test")
    assert images.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(images.pixels, flat.pixels[flat.labels.argsort(stable=True)])


def test_opened_by_content(root: Path) -> None:
    told: list[tuple[int, int]] = []
    images = open_dataset(str(root), progress=lambda done, total: told.append((done, total)))
    assert torch.equal(images.pixels, load_tiny_imagenet(root).pixels)
    assert told == [(9, 9)]
    small = open_dataset(str(root), split="test", channels=1, size=(8, 10))
    assert small.pixels.shape == (6, 1, 8, 10)
    expected = decode_image(root / "val" / "images" / "val_0.JPEG", channels=1, size=(8, 10))
    np.testing.assert_array_equal(small.pixels[0].numpy(), expected.transpose(2, 0, 1))


def test_classes_must_match(root: Path) -> None:
    (root / "wnids.txt").write_text("n01\nn02\nn03\n")
    with pytest.raises(MismatchError, match=r"no folder for 'n03' and folders of other names \('n10'\)"):
        load_tiny_imagenet(root)
    with pytest.raises(MismatchError, match=r"line 2 names the class 'n10'"):
        load_tiny_imagenet(root, split="test")
    for text in ("", "n01\nn01\n"):
        (root / "wnids.txt").write_text(text)
        with pytest.raises(FileError, match="one class id a line, each once"):
            load_tiny_imagenet(root)


@pytest.mark.parametrize("name", ["../../secret.JPEG", "/etc/passwd", "..", "a\\b", "", "a\0b"])
def test_list_can_not_leave_its_folder(root: Path, name: str) -> None:
    (root / "val" / "val_annotations.txt").write_text(f"{name}\tn01\t0\t0\t9\t9\n")
    with pytest.raises(FileError, match="expected a file name and a class id, tab-separated, in line 1"):
        load_tiny_imagenet(root, split="test")


@pytest.mark.parametrize("content", [b"", b"\n", b"val_0.JPEG n01", b"\xff\xfe\0", b"val_0.JPEG\tn01\n\n\nx"])
def test_damaged_list(root: Path, content: bytes) -> None:
    (root / "val" / "val_annotations.txt").write_bytes(content)
    with pytest.raises(FileError, match=r"val_annotations\.txt"):
        load_tiny_imagenet(root, split="test")


def test_damaged_and_missing_images_are_named(root: Path) -> None:
    (root / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(FileError, match=r"val_3\.JPEG"):
        load_tiny_imagenet(root, split="test")
    path = root / "train" / "n10" / "images" / "n10_1.JPEG"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(FileError, match=r"n10_1\.JPEG"):
        load_tiny_imagenet(root)
