"""SVHN's .mat files: exact pixels, the two conventions for the digit 0, and other or damaged files."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from rlu_cli.errors import FileError, MismatchError, RluError, UsageError
from rlu_cli.images.datasets import load_svhn, open_dataset
from rlu_cli.images.datasets.mat5 import read_variables

X = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
Y = np.array([[10], [1], [2], [9], [10]], dtype=np.uint8)


def write(path: Path, compress: bool = False, **content: Any) -> Path:
    savemat(path, {"X": X, "y": Y, **content}, do_compression=compress)
    return path


@pytest.mark.parametrize("compress", [False, True])
def test_pixels_and_ten_as_zero(tmp_path: Path, compress: bool) -> None:
    path = write(tmp_path / "train_32x32.mat", compress)
    for images in (
        load_svhn(path),
        load_svhn(tmp_path),
        open_dataset(str(path)),
        open_dataset(str(tmp_path)),
    ):
        pixels = images.pixels.numpy()
        assert pixels.shape == (5, 3, 32, 32)
        for image, channel, row, column in ((0, 0, 0, 0), (4, 2, 31, 30), (2, 1, 3, 17)):
            assert pixels[image, channel, row, column] == X[row, column, channel, image]
        np.testing.assert_array_equal(pixels, X.transpose(3, 2, 0, 1))
        assert images.labels.tolist() == [0, 1, 2, 9, 0]
        assert images.names == tuple("0123456789")


def test_labels_lowered_by_one(tmp_path: Path) -> None:
    images = load_svhn(write(tmp_path / "a.mat"), zero_is_ten=False)
    assert images.labels.tolist() == [9, 0, 1, 8, 9]
    assert images.names == tuple("1234567890")
    digits = load_svhn(tmp_path / "a.mat")
    assert [images.names[n] for n in images.labels] == [digits.names[n] for n in digits.labels]


@pytest.mark.parametrize("y", [Y.T, Y.astype(float), Y.astype(np.int16)])
def test_other_label_types(tmp_path: Path, y: np.ndarray) -> None:
    assert load_svhn(write(tmp_path / "a.mat", y=y)).labels.tolist() == [0, 1, 2, 9, 0]


def test_splits(tmp_path: Path) -> None:
    train = write(tmp_path / "train_32x32.mat")
    test = write(tmp_path / "test_32x32.mat", X=X[..., :2], y=Y[:2])
    assert len(open_dataset(str(tmp_path), split="test").labels) == 2
    assert len(open_dataset(str(test), split="test").labels) == 2
    with pytest.raises(UsageError, match="nothing says that these are test images"):
        open_dataset(str(train), split="test")
    train.unlink()
    with pytest.raises(FileError, match=r"train_32x32\.mat: no such file"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": X.transpose(3, 0, 1, 2)}, r"found X of shape \(5, 32, 32, 3\) \(uint8\)"),
        ({"X": X.astype(float)}, r"found X of shape \(32, 32, 3, 5\) \(double\)"),
        ({"X": X[..., 0]}, r"found X of shape \(32, 32, 3\)"),
        ({"X": np.array([[{}]], dtype=object)}, "expected uint8 X"),
        ({"y": np.tile(Y, 2)}, r"found y of shape \(5, 2\)"),
        ({"y": np.zeros((0, 1), np.uint8)}, r"found y of shape \(0, 1\)"),
        ({"y": Y + 0.5}, r"labels 1 to 10 .*found 10\.5"),
        ({"y": np.array([[1], [2], [3], [4], [float("nan")]])}, "labels 1 to 10 .*found nan"),
        ({"y": Y + 1j}, r"holds no real numbers \(complex\)"),
        ({"y": Y - 1}, r"labels 1 to 10 .*found 0"),
        ({"y": Y + 1}, r"labels 1 to 10 .*found 11"),
        ({"y": np.array(["a", "b", "c", "d", "e"])}, "found y|no real numbers"),
    ],
)
def test_wrong_content(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        load_svhn(write(tmp_path / "a.mat", **content))


def test_other_variables(tmp_path: Path) -> None:
    path = tmp_path / "digitStruct.mat"
    savemat(path, {"digitStruct": np.zeros((3, 3))})
    with pytest.raises(FileError, match=r"expected the variables X and y .*found digitStruct"):
        open_dataset(str(path))


@pytest.mark.parametrize(
    "head",
    [b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(512) + b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n"],
)
def test_matlab_73_is_refused(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(head + bytes(2000))
    with pytest.raises(
        FileError, match=r"found MATLAB 7\.3 \(HDF5\); save it in MATLAB with the option '-v7'"
    ):
        open_dataset(str(path))


def test_not_a_mat_file(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(FileError, match="another kind of file"):
        open_dataset(str(path))


def test_counts_must_match(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"found 5 images and labels of shape \(4,\)"):
        load_svhn(write(tmp_path / "a.mat", y=Y[:4]))


@pytest.mark.parametrize("compress", [False, True])
def test_reads_what_scipy_reads(tmp_path: Path, compress: bool) -> None:
    rng = np.random.default_rng(0)
    types = ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
    content = {f"a_{name}": rng.integers(0, 100, (3, n + 1, 2)).astype(name) for n, name in enumerate(types)}
    content |= {"s": np.array([[7]], dtype=np.uint8), "a_very_long_name_of_a_variable": np.zeros((1, 0))}
    path = tmp_path / "a.mat"
    savemat(
        path, {**content, "text": "abc", "cell": np.array([1, "a"], dtype=object)}, do_compression=compress
    )
    arrays, names = read_variables(path, content, lambda variable: None)
    assert names == [*content, "text", "cell"]
    expected = loadmat(path)
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])


def test_big_endian(tmp_path: Path) -> None:
    values = np.arange(6, dtype=">i2").reshape(2, 3)
    parts = struct.pack(">6I", 6, 8, 10, 0, 5, 8) + struct.pack(">2i", 2, 3) + b"\0\1\0\1y\0\0\0"
    parts += struct.pack(">2I", 3, 12) + values.tobytes(order="F") + bytes(4)
    path = tmp_path / "a.mat"
    path.write_bytes(
        b"MATLAB 5.0 MAT-file".ljust(124) + b"\1\0MI" + struct.pack(">2I", 14, len(parts)) + parts
    )
    np.testing.assert_array_equal(read_variables(path, "y", lambda variable: None)[0]["y"], values)


def test_bombs_are_not_inflated(tmp_path: Path) -> None:
    """A variable that deflates well is passed over, and a wanted one is not read beyond its shape."""
    path = tmp_path / "a.mat"
    savemat(path, {"padding": np.zeros(20_000_000, np.uint8)}, do_compression=True)
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="found padding"):
            load_svhn(path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_changed_bytes(tmp_path: Path) -> None:
    """Such files crash other readers; here each is read or refused."""
    rng = random.Random(0)
    for compress, changes in ((False, 400), (True, 100)):
        path = write(tmp_path / "a.mat", compress)
        whole = path.read_bytes()
        second = 136 + int.from_bytes(whole[132:136], "little")
        for _ in range(changes):
            changed = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                changed[min(rng.choice([128, second]) + rng.randrange(64), len(whole) - 1)] = rng.randrange(
                    256
                )
            path.write_bytes(changed)
            try:
                load_svhn(path)
            except RluError:
                continue


def test_same_variable_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mat")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[128:])
    with pytest.raises(FileError, match="X is in it twice"):
        load_svhn(path)


@pytest.mark.parametrize("compress", [False, True])
def test_truncated(tmp_path: Path, compress: bool) -> None:
    path = write(tmp_path / "a.mat", compress)
    whole = path.read_bytes()
    for length in [*range(0, 400, 7), *range(400, len(whole) - 1, len(whole) // 20), len(whole) - 9]:
        path.write_bytes(whole[:length])
        with pytest.raises(FileError):
            load_svhn(path)
