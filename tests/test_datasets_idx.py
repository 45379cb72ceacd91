"""IDX files and the sets that come installed: exact pixels, which labels belong to which images, damage."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from dataset_files import idx

from rlu_cli.errors import FileError, MismatchError, UsageError
from rlu_cli.images.datasets import (
    FASHION_MNIST_CLASSES,
    installed,
    load_digits,
    load_fashion_mnist,
    load_idx,
    open_dataset,
    read_idx,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)


def write(folder: Path, name: str, array: np.ndarray) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(idx(array)) if name.endswith(".gz") else idx(array))
    return path


@pytest.mark.parametrize("packed_labels", ["", ".gz"])
@pytest.mark.parametrize("name", ["-idx3-ubyte", "-idx3-ubyte.gz", ".idx3-ubyte"])
def test_pair(tmp_path: Path, name: str, packed_labels: str) -> None:
    path = write(tmp_path, f"train-images{name}", PIXELS)
    write(tmp_path, f"train-labels{name[0]}idx1-ubyte{packed_labels}", LABELS)
    for images in (load_idx(path), load_idx(tmp_path), open_dataset(str(path)), open_dataset(str(tmp_path))):
        np.testing.assert_array_equal(images.pixels.numpy(), PIXELS[:, None])
        assert images.labels.tolist() == LABELS.tolist()
        assert images.names == tuple("0123456789")


def test_splits(tmp_path: Path) -> None:
    test = write(tmp_path, "t10k-images-idx3-ubyte", PIXELS[:2])
    write(tmp_path, "t10k-labels-idx1-ubyte", LABELS[:2])
    with pytest.raises(FileError, match=r"train-images-idx3-ubyte or the same with \.gz, found neither"):
        open_dataset(str(tmp_path))
    train = write(tmp_path, "train-images-idx3-ubyte", PIXELS)
    write(tmp_path, "train-labels-idx1-ubyte", LABELS)
    assert len(open_dataset(str(tmp_path)).labels) == 6
    assert len(open_dataset(str(tmp_path), split="test").labels) == 2
    assert len(open_dataset(str(test), split="test").labels) == 2
    with pytest.raises(UsageError, match="nothing says that these are test images"):
        open_dataset(str(train), split="test")


def test_more_than_ten_classes(tmp_path: Path) -> None:
    path = write(tmp_path, "emnist-train-images-idx3-ubyte", PIXELS)
    write(tmp_path, "emnist-train-labels-idx1-ubyte", LABELS + 20)
    assert load_idx(path).names == tuple(str(n) for n in range(30))


def test_pairs_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path, "train-images-idx3-ubyte", PIXELS)
    with pytest.raises(FileError, match="expected its labels beside it, in train-labels-idx1-ubyte"):
        load_idx(path)
    labels = write(tmp_path, "train-labels-idx1-ubyte", LABELS[:4])
    with pytest.raises(MismatchError, match=r"found 6 images and labels of shape \(4,\)"):
        load_idx(path)
    with pytest.raises(FileError, match="pass the images file"):
        open_dataset(str(labels))
    write(tmp_path, "train-labels-idx1-ubyte", LABELS[:, None])
    with pytest.raises(FileError, match=r"expected labels, uint8 of shape \(M,\)"):
        load_idx(path)
    other = write(tmp_path, "pictures", PIXELS)
    with pytest.raises(FileError, match="can't tell which labels file"):
        open_dataset(str(other))
    empty = write(tmp_path, "train-images-idx3-ubyte", PIXELS[:0])
    write(tmp_path, "train-labels-idx1-ubyte", LABELS[:0])
    with pytest.raises(FileError, match="at least one image"):
        load_idx(empty)


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_truncated(tmp_path: Path, packed: str) -> None:
    path = write(tmp_path, f"train-images-idx3-ubyte{packed}", PIXELS)
    write(tmp_path, "train-labels-idx1-ubyte", LABELS)
    whole = path.read_bytes()
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError):
            load_idx(path)
        if length:
            with pytest.raises(FileError):
                open_dataset(str(path))
    path.write_bytes(gzip.compress(idx(PIXELS) + b"x") if packed else whole + b"x")
    with pytest.raises(FileError, match="expected 120 bytes of IDX data, found more"):
        load_idx(path)


def test_header_that_promises_too_much(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\0\0\x08\xff" + b"\xff" * 1020 + bytes(100))
    with pytest.raises(FileError, match="damaged IDX file"):
        read_idx(path)
    path.write_bytes(b"GIF89a")
    with pytest.raises(FileError, match="another kind of file"):
        read_idx(path)


@pytest.mark.skipif(not installed.FASHION_MNIST.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_fashion_mnist() -> None:
    images = open_dataset("fashion-mnist", split="test")
    assert images.pixels.shape == (10_000, 1, 28, 28)
    assert images.counts == (1000,) * 10
    assert images.names == FASHION_MNIST_CLASSES
    assert images.names[int(images.labels[0])] == "ankle-boot"
    assert 0.28 < images.pixels.double().mean().item() / 255 < 0.29


def test_fashion_mnist_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "FASHION_MNIST", tmp_path / "none")
    with pytest.raises(UsageError, match="apt-get install dataset-fashion-mnist"):
        load_fashion_mnist()


def test_digits() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    levels = datasets.load_digits().images
    images = open_dataset("digits")
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.names == tuple("0123456789")
    assert images.labels[:5].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(images.pixels.numpy()[:, 0], levels * 255 / 16, atol=0.5)
    assert images.pixels[levels[:, None] == 16].unique().tolist() == [255]
    with pytest.raises(UsageError, match="no test split"):
        open_dataset("digits", split="test")


def test_digits_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match="pip install scikit-learn"):
        load_digits()
