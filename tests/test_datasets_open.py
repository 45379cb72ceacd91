"""Opening any data set by name or path: .npz and class folders, conversion, refusals, subsets of classes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataset_files import cifar10, write_folder, write_idx_pair, write_svhn
from PIL import Image

from rlu_cli.errors import FileError, MismatchError, RluError, UsageError
from rlu_cli.images import ImageSet, load_images, open_collection, scan_class_folder
from rlu_cli.images.datasets import load_npz, open_dataset, per_class_subset

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (70, 9, 7, 3), dtype=np.uint8)
GREY = RGB[..., 0]
LABELS = np.arange(70) % 3


def write(path: Path, **arrays: Any) -> str:
    np.savez(path, **{"images": RGB, "labels": LABELS, **arrays})
    return str(path)


def test_npz(tmp_path: Path) -> None:
    images = open_dataset(write(tmp_path / "a.npz"))
    np.testing.assert_array_equal(images.pixels.numpy(), RGB.transpose(0, 3, 1, 2))
    assert images.labels.tolist() == LABELS.tolist()
    assert images.names == ("0", "1", "2")
    named = open_dataset(write(tmp_path / "b.npz", images=GREY, class_names=np.array(["ä", "b", "c", "d"])))
    np.testing.assert_array_equal(named.pixels.numpy(), GREY[:, None])
    assert named.names == ("ä", "b", "c", "d") and named.counts[3] == 0
    one = load_npz(
        Path(write(tmp_path / "c.npz", images=GREY[..., None], class_names=np.array([b"x", b"y", b"z"])))
    )
    np.testing.assert_array_equal(one.pixels.numpy(), GREY[:, None])
    assert one.names == ("x", "y", "z")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_npz_of_floats(tmp_path: Path, dtype: type) -> None:
    images = open_dataset(write(tmp_path / "a.npz", images=(RGB / 255).astype(dtype)))
    np.testing.assert_array_equal(images.pixels.numpy(), RGB.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"images": RGB.transpose(0, 3, 1, 2)[:, :, :5]}, FileError, "put the channels last"),
        ({"images": RGB[0, 0]}, FileError, "expected images of shape"),
        ({"images": RGB.astype(np.int64)}, FileError, "found int64; save uint8"),
        ({"images": RGB.astype(float)}, FileError, "range 0 to 1, found 0 to 255"),
        ({"images": np.full((70, 2, 2), np.nan)}, FileError, "range 0 to 1, found nan"),
        ({"images": RGB[:0], "labels": LABELS[:0]}, FileError, "at least one image"),
        ({"images": RGB[:, :, :0]}, FileError, "at least one image"),
        ({"labels": LABELS[:9]}, MismatchError, r"70 images and labels of shape \(9,\)"),
        ({"labels": LABELS - 1}, MismatchError, "found -1"),
        ({"labels": LABELS / 2}, FileError, "whole numbers, found float64"),
        ({"labels": LABELS[:, None]}, FileError, r"found int64 of shape \(70, 1\)"),
        ({"labels": LABELS + 10**12}, FileError, "number them from 0"),
        ({"labels": LABELS.astype(np.uint64) + np.uint64(2**63)}, FileError, "number them from 0"),
        ({"class_names": np.array(["a", "b"])}, MismatchError, "labels 0 to 1, .*found 2"),
        ({"class_names": np.array([1, 2, 3])}, FileError, "expected text of shape"),
        ({"class_names": np.array([["a", "b", "c"]])}, FileError, "expected text of shape"),
        ({"class_names": np.array(["a", "b", None])}, FileError, "holds Python objects"),
        ({"images": RGB.astype(object)}, FileError, "holds Python objects"),
        ({"labels": LABELS.astype(str)}, FileError, "expected the arrays images and labels, found images"),
    ],
)
def test_wrong_npz(tmp_path: Path, arrays: dict[str, Any], error: type[RluError], message: str) -> None:
    with pytest.raises(error, match=message):
        open_dataset(write(tmp_path / "a.npz", **arrays))


def test_npz_payload_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'marker'}",)

    path = write(tmp_path / "a.npz", labels=np.array([Payload()], dtype=object))
    with pytest.raises(FileError, match="holds Python objects"):
        open_dataset(path)
    assert not (tmp_path / "marker").exists()


def test_truncated_npz(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.npz"))
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 9):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError):
            open_dataset(str(path))


def class_folder(root: Path, *, grey: bool, count: int = 5) -> Path:
    for index in range(3 * count):
        path = root / "cba"[index % 3] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(GREY[index] if grey else RGB[index]).save(path)
    return root


def test_class_folder(tmp_path: Path) -> None:
    grey = open_dataset(str(class_folder(tmp_path / "grey", grey=True)))
    assert grey.pixels.shape == (15, 1, 9, 7) and grey.names == ("a", "b", "c")
    np.testing.assert_array_equal(grey.pixels[:5].numpy(), GREY[2:15:3, None])
    root = class_folder(tmp_path / "rgb", grey=False)
    colour = open_dataset(str(root))
    np.testing.assert_array_equal(colour.pixels[10:].numpy(), RGB[0:15:3].transpose(0, 3, 1, 2))
    Image.fromarray(GREY[0]).save(root / "a" / "000.png")
    assert open_dataset(str(root)).pixels.shape == (16, 3, 9, 7)
    with pytest.raises(UsageError, match="nothing says that these are test images"):
        open_dataset(str(root), split="test")
    assert len(open_dataset(str(root.rename(tmp_path / "val")), split="test").labels) == 16


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_class_folders_by_split(tmp_path: Path, test_name: str) -> None:
    class_folder(tmp_path / "train", grey=True)
    with pytest.raises(FileError, match=r"class folders in test or testing .*found none"):
        open_dataset(str(tmp_path), split="test")
    class_folder(tmp_path / test_name, grey=True, count=2)
    assert open_dataset(str(tmp_path)).counts == (5, 5, 5)
    assert open_dataset(str(tmp_path), split="test").counts == (2, 2, 2)


@pytest.mark.parametrize(
    "names", [("Train", "Test"), ("training", "testing"), ("train", "test", "__MACOSX"), ("val", "test")]
)
def test_splits_are_never_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    """With a model of two classes, the two splits were its classes, without a word."""
    for name in names:
        class_folder(tmp_path / name, grey=True, count=2)
    found = open_collection(tmp_path)
    assert (found.names, found.split) == (("a", "b", "c"), "test")
    expected = "test" if "test" in names else names[1]
    assert found.root == tmp_path / expected


def test_classes_may_be_called_like_splits(tmp_path: Path) -> None:
    for n, name in enumerate(("test", "train")):
        (tmp_path / name).mkdir()
        Image.fromarray(GREY[n]).save(tmp_path / name / "0.png")
    assert open_collection(tmp_path).names == ("test", "train")


@pytest.mark.parametrize("size", [None, (9, 7), (4, 5), (20, 13)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stored", [1, 3])
def test_conversion_is_what_decoding_gives(
    tmp_path: Path, stored: int, channels: int, size: tuple[int, int] | None
) -> None:
    pixels = GREY if stored == 1 else RGB
    images = open_dataset(write(tmp_path / "a.npz", images=pixels), channels=channels, size=size)
    mode = "L" if channels == 1 else "RGB"
    for image, expected in zip(images.pixels.numpy(), pixels, strict=True):
        decoded = Image.fromarray(expected).convert(mode)
        if size is not None:
            decoded = decoded.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        reference = np.asarray(decoded).reshape(*(size or (9, 7)), channels).transpose(2, 0, 1)
        np.testing.assert_array_equal(image, reference)


def test_grey_formula_on_all_corners(tmp_path: Path) -> None:
    values = np.array([0, 1, 2, 127, 128, 254, 255], dtype=np.uint8)
    grid = np.stack(np.meshgrid(values, values, values, indexing="ij"), axis=-1).reshape(1, 7, 49, 3)
    images = open_dataset(write(tmp_path / "a.npz", images=grid, labels=[0]), channels=1)
    np.testing.assert_array_equal(
        images.pixels[0, 0].numpy(), np.asarray(Image.fromarray(grid[0]).convert("L"))
    )


def test_threads_and_progress_of_resizing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    told: list[tuple[int, int]] = []
    alone = open_dataset(
        path, size=(5, 5), workers=1, progress=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (70, 70)
    assert torch.equal(alone.pixels, open_dataset(path, size=(5, 5), workers=4).pixels)


def test_wrong_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    with pytest.raises(UsageError, match="split train or test, got 'dev'"):
        open_dataset(path, split="dev")
    with pytest.raises(MismatchError, match=r"1 \(grey\) or 3 \(RGB\) channels, got 4"):
        open_dataset(path, channels=4)
    with pytest.raises(UsageError, match="at least 1x1"):
        open_dataset(path, size=(0, 3))
    with pytest.raises(UsageError, match="test images"):
        open_dataset(path, split="test")
    assert len(open_dataset(write(tmp_path / "my_test.npz"), split="test").labels) == 70


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x1f\x8bnot gzip", b"\x80\x02}q\x00.", b"PK\x03\x04", bytes(1024), b"\x89PNG\r\n"],
)
def test_unknown_files_list_what_is_accepted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"expected digits, fashion-mnist, .*\.npz|expected a gzip file"):
        open_dataset(str(path))


@pytest.mark.parametrize("spec", ["", "mnist", "no/such/path", "x" * 5000])
def test_unknown_names_list_what_is_accepted(spec: str) -> None:
    with pytest.raises(FileError, match=r"no such file or folder; expected digits|pass digits"):
        open_dataset(spec)


def test_other_containers(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/0.png", b"")
    with pytest.raises(FileError, match="zip archive of another kind"):
        open_dataset(str(tmp_path / "a.zip"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="found no data set in this folder; expected digits"):
        open_dataset(str(tmp_path / "empty"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="device or pipe"):
        open_dataset(str(tmp_path / "pipe"))


def an_image_set(counts: list[int]) -> ImageSet:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    names = tuple("abcdefgh"[: len(counts)])
    return ImageSet(torch.zeros((len(labels), 1, 1, 1), dtype=torch.uint8), labels, names)


def test_per_class_subset() -> None:
    images = an_image_set([20, 8, 30])
    chosen = per_class_subset(images, 8, seed=1)
    assert chosen.dtype == np.int64 and len(set(chosen.tolist())) == 24
    assert images.labels[chosen].tolist() == [0] * 8 + [1] * 8 + [2] * 8
    for group in chosen.reshape(3, 8):
        assert sorted(group) == group.tolist()
    np.testing.assert_array_equal(chosen, per_class_subset(images, 8, seed=1))
    assert not np.array_equal(chosen, per_class_subset(images, 8, seed=2))
    with pytest.raises(MismatchError, match=r"at least 9 images of each class, but 1 of 3 .*'b \(8\)'"):
        per_class_subset(images, 9, seed=1)
    with pytest.raises(UsageError, match="at least 1 image per class"):
        per_class_subset(images, 0, seed=1)


def test_per_class_subset_is_the_draw_of_load_images(tmp_path: Path) -> None:
    root = class_folder(tmp_path, grey=True, count=9)
    whole = open_dataset(str(root))
    drawn = load_images(scan_class_folder(root), channels=1, size=None, per_class=4, seed=7)
    assert torch.equal(whole.pixels[per_class_subset(whole, 4, seed=7)], drawn.pixels)


def test_import_is_light() -> None:
    code = (
        "import sys, rlu_cli.images.datasets\n"
        "print([name for name in ('torch', 'scipy', 'PIL', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
def test_idx_files_below_the_root_that_torchvision_was_given(tmp_path: Path, place: str) -> None:
    write_idx_pair(tmp_path / place, "t10k", GREY, [number % 10 for number in range(70)])
    images = open_dataset(str(tmp_path), split="test")
    np.testing.assert_array_equal(images.pixels.numpy(), GREY[:, None])
    found = open_collection(tmp_path)
    assert (found.kind, found.root) == ("idx", tmp_path / place)


def test_one_of_several_downloads_is_not_chosen(tmp_path: Path) -> None:
    """CIFAR went before all others, unsaid."""
    images = RNG.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    write_idx_pair(tmp_path / "MNIST" / "raw", "t10k", GREY, LABELS.tolist())
    write_svhn(tmp_path / "test_32x32.mat", images, [1, 2, 0])
    with pytest.raises(UsageError, match=r"several data sets.*MNIST.raw, .*test_32x32\.mat"):
        open_dataset(str(tmp_path))
    write_folder(tmp_path, cifar10(images, [0, 1, 2], [str(n) for n in range(10)]))
    with pytest.raises(UsageError, match=r"cifar-10-batches-py, .*MNIST.raw, "):
        open_dataset(str(tmp_path))
    for each in ("MNIST/raw", "test_32x32.mat", "cifar-10-batches-py"):
        assert len(open_dataset(str(tmp_path / each), split="test").labels) in (3, 70)
