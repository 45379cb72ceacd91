"""CIFAR's archives and folders: exact pixels, both versions' labels, and pickles and tars made to harm."""

from __future__ import annotations

import os
import pickle
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_files import CIFAR10 as TEN
from dataset_files import dump2, python2, write_folder, write_tar

from rlu_cli.errors import FileError, MismatchError, RluError, UsageError
from rlu_cli.images.datasets import load_cifar, open_dataset, tar
from rlu_cli.images.datasets.plain_pickle import array_of, read_plain_pickle

HUNDRED = "cifar-100-python"
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def batch(seed: int, count: int, classes: int = 10) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "batch_label": f"batch {seed}",
        "labels": rng.integers(0, classes, count).tolist(),
        "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
        "filenames": [f"image_{n}.png" for n in range(count)],
    }


TRAIN = {f"data_batch_{n}": batch(n, n + 1) for n in range(1, 6)}
TEST = {"test_batch": batch(9, 4)}
META = {"num_cases_per_batch": 2, "label_names": NAMES, "num_vis": 3072}


def files10(dump: Any = dump2) -> dict[str, bytes]:
    content = {"batches.meta": META, **TRAIN, **TEST}
    return {f"{TEN}/{name}": dump(value) for name, value in content.items()}


def files100() -> dict[str, bytes]:
    files = {
        f"{HUNDRED}/meta": dump2(
            {
                "fine_label_names": [f"fine{n}" for n in range(100)],
                "coarse_label_names": [f"coarse{n}" for n in range(20)],
            }
        )
    }
    for split, seed in (("train", 1), ("test", 2)):
        content = batch(seed, 7, 100)
        content["fine_labels"] = content.pop("labels")
        content["coarse_labels"] = [label // 5 for label in content["fine_labels"]]
        files[f"{HUNDRED}/{split}"] = dump2(content)
    return files


def check_ten(images: Any, batches: dict[str, dict[str, Any]]) -> None:
    rows = np.concatenate([content["data"] for content in batches.values()])
    labels = [label for content in batches.values() for label in content["labels"]]
    assert images.names == tuple(NAMES)
    assert images.labels.tolist() == labels
    pixels = images.pixels.numpy()
    assert pixels.shape == (len(labels), 3, 32, 32) and pixels.dtype == np.uint8
    for channel, row, column in ((0, 0, 0), (0, 0, 1), (1, 5, 7), (2, 31, 31)):
        offset = 1024 * channel + 32 * row + column
        np.testing.assert_array_equal(pixels[:, channel, row, column], rows[:, offset])


def test_writer_is_what_python_2_wrote() -> None:
    again = pickle.loads(dump2(TRAIN["data_batch_1"]), encoding="latin1")
    np.testing.assert_array_equal(again.pop("data"), TRAIN["data_batch_1"]["data"])
    assert again == {key: value for key, value in TRAIN["data_batch_1"].items() if key != "data"}


@pytest.mark.parametrize("ending", [".tar.gz", ".tar"])
def test_archive(tmp_path: Path, ending: str) -> None:
    path = write_tar(tmp_path / f"cifar{ending}", {**files10(), f"{TEN}/readme.html": b"<html>"})
    check_ten(load_cifar(path), TRAIN)
    check_ten(open_dataset(str(path)), TRAIN)
    check_ten(load_cifar(path, split="test"), TEST)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_archive_packed_again_from_within(tmp_path: Path) -> None:
    files = {f"./{name}": data for name, data in files10().items()}
    check_ten(load_cifar(write_tar(tmp_path / "c.tar", files), split="test"), TEST)
    info = tarfile.TarInfo(f"{TEN}/test_batch")
    with pytest.raises(FileError, match="more than once"):
        load_cifar(write_tar(tmp_path / "twice.tar", files, [info]), split="test")


def test_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, files10())
    for path in (tmp_path, tmp_path / TEN):
        check_ten(load_cifar(path), TRAIN)
        check_ten(open_dataset(str(path), split="test"), TEST)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("keys", [str, str.encode])
def test_saved_again_by_python_3(tmp_path: Path, protocol: int, keys: Any) -> None:
    def dump(content: dict[str, Any]) -> bytes:
        return pickle.dumps({keys(key): value for key, value in content.items()}, protocol)

    check_ten(load_cifar(write_folder(tmp_path, files10(dump))), TRAIN)


def test_column_major_array() -> None:
    rows = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    read = array_of(read_plain_pickle(pickle.dumps(rows, 2), "x"))
    assert read is not None
    np.testing.assert_array_equal(read, rows)


def test_hundred(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "cifar-100-python.tar.gz", files100())
    expected = batch(1, 7, 100)
    images = open_dataset(str(path))
    assert images.labels.tolist() == expected["labels"]
    assert images.names[:2] == ("fine0", "fine1") and len(images.names) == 100
    np.testing.assert_array_equal(images.pixels.numpy().reshape(7, 3072), expected["data"])
    coarse = load_cifar(path, coarse=True)
    assert coarse.labels.tolist() == [label // 5 for label in expected["labels"]]
    assert coarse.names[-1] == "coarse19" and len(coarse.names) == 20
    assert load_cifar(path, split="test").labels.tolist() == batch(2, 7, 100)["labels"]


def test_wrong_requests(tmp_path: Path) -> None:
    write_folder(tmp_path, files10())
    with pytest.raises(UsageError, match="CIFAR-100 only, and this is CIFAR-10"):
        load_cifar(tmp_path, coarse=True)
    with pytest.raises(UsageError, match="train or test, got 'val'"):
        load_cifar(tmp_path, split="val")
    write_folder(tmp_path, files100())
    with pytest.raises(UsageError, match="both CIFAR-10 and CIFAR-100"):
        load_cifar(tmp_path)


def test_incomplete(tmp_path: Path) -> None:
    files = files10()
    del files[f"{TEN}/data_batch_4"]
    with pytest.raises(FileError, match=r"found no data_batch_4 in cifar-10-batches-py"):
        load_cifar(write_tar(tmp_path / "a.tar.gz", files))
    with pytest.raises(FileError, match=r"data_batch_4: can't be read"):
        load_cifar(write_folder(tmp_path / "folder", files))
    with pytest.raises(FileError, match="expected the python version"):
        load_cifar(write_tar(tmp_path / "b.tar.gz", {"cifar-10-batches-bin/data_batch_1.bin": b"x"}))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"data": np.zeros((4, 3071), np.uint8)},
            FileError,
            r"shape \(n, 3072\), found the shape \(4, 3071\)",
        ),
        ({"data": [1, 2]}, FileError, "found none"),
        ({"labels": [0, 1]}, FileError, "found 4 images and 2 labels"),
        ({"labels": "abcd"}, FileError, "list of whole numbers"),
        ({"labels": [0, 1, 2, 10]}, MismatchError, "labels 0 to 9.*found 10"),
        ({"labels": [0, 1, 2, -1]}, MismatchError, "found -1"),
    ],
)
def test_wrong_content(tmp_path: Path, change: dict[str, Any], error: type[RluError], message: str) -> None:
    files = files10()
    files[f"{TEN}/test_batch"] = dump2({**TEST["test_batch"], **change})
    with pytest.raises(error, match=message):
        load_cifar(write_folder(tmp_path, files), split="test")


class Payload:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("kind", ["system", "eval"])
def test_code_is_refused(tmp_path: Path, protocol: int, kind: str) -> None:
    marker = tmp_path / "marker"
    payload = (
        Payload(os.system, f"touch {marker}")
        if kind == "system"
        else Payload(eval, f"open({str(marker)!r},'w')")
    )
    files = files10()
    files[f"{TEN}/test_batch"] = pickle.dumps({"labels": [0], "data": payload}, protocol)
    for path in (write_folder(tmp_path / "folder", files), write_tar(tmp_path / "c.tar.gz", files)):
        with pytest.raises(FileError, match=rf"test_batch: refused, since reading it would use \w+\.{kind}"):
            open_dataset(str(path), split="test")
    assert not marker.exists()


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pickle.dumps(np.array([1, "a"], dtype=object), 2), id="object-array"),
        pytest.param(pickle.dumps(np.zeros(3), 2), id="float-array"),
        pytest.param(pickle.dumps(np.zeros(3, [("a", "u1")]), 2), id="record-array"),
        pytest.param(pickle.dumps(np.float64(1), 2), id="numpy-scalar"),
        pytest.param(pickle.dumps(np.zeros(3, np.uint8), 5), id="protocol-5"),
        pytest.param(pickle.dumps({1, 2}, 4), id="set"),
        pytest.param(pickle.dumps(bytearray(3), 5), id="bytearray"),
        pytest.param(b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".", id="huge-bytearray"),
        pytest.param(b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b".", id="huge-text"),
        pytest.param(b"(ios\nsystem\n.", id="inst"),
        pytest.param(b"Pwhatever\n.", id="persistent-id"),
        pytest.param(b"\x80\x02\x82\x01.", id="extension-registry"),
        pytest.param(b"c_codecs\nencode\n(X\x01\0\0\0aX\x03\0\0\0hext.", id="tuple-unfinished"),
        pytest.param(b"c_codecs\nencode\n(X\x01\0\0\0aX\x03\0\0\0hextR.", id="other-codec"),
        pytest.param(RECONSTRUCT + b"(cnumpy\ndtype\n(K\0tU\x01btR.", id="other-class"),
        pytest.param(RECONSTRUCT + b"}b.", id="state-of-a-function"),
        pytest.param(b"cnumpy\nndarray\n(K\x09tR.", id="call-of-ndarray"),
        pytest.param(b"U\x01a(tR.", id="call-of-text"),
        pytest.param(b"}(]K\x01u.", id="list-as-key"),
        pytest.param(b"}(K\x01u.", id="key-without-value"),
        pytest.param(b"u.", id="no-mark"),
        pytest.param(b"h\x05.", id="empty-memo"),
        pytest.param(b"K\x01K\x02.", id="two-values"),
        pytest.param(b".", id="no-value"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x02" + b"(" * 1000 + b".", id="marks-only"),
    ],
)
def test_other_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(FileError, match=r"^x: (refused, since|damaged pickle)"):
        read_plain_pickle(data, "x")


@pytest.mark.parametrize(
    "shape", [b"K\x05K\x02", b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff", b"U\x01a", b"\x88K\x02"]
)
def test_array_shape_must_fit(shape: bytes) -> None:
    good = dump2(np.zeros((1, 2), np.uint8))
    before = python2(1) + python2(2)
    assert good.count(before) == 1
    with pytest.raises(FileError, match="damaged pickle"):
        read_plain_pickle(good.replace(before, shape), "x")


def test_depth_and_sharing_are_harmless() -> None:
    deep = b")" + b"\x85" * 20_000
    assert isinstance(read_plain_pickle(deep + b".", "x"), tuple)
    with pytest.raises(FileError, match="damaged pickle"):
        read_plain_pickle(b"}" + deep + b"K\x01s.", "x")
    read_plain_pickle(b"]r\xff\xff\xff\xff.", "x")  # a memo index for which a table would take 32 GiB


def test_truncated_and_changed_pickles() -> None:
    whole = dump2(batch(0, 1))
    for length in [*range(0, 300), *range(300, len(whole), 97)]:
        with pytest.raises(FileError):
            read_plain_pickle(whole[:length], "x")
    rng = random.Random(0)
    for _ in range(1000):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(400 if rng.random() < 0.5 else len(changed))] = rng.randrange(256)
        try:
            read_plain_pickle(bytes(changed), "x")
        except FileError:
            continue


def test_escaping_members_touch_nothing(tmp_path: Path) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    outside = tmp_path / "outside"
    names = ["../escaped", str(outside), f"{TEN}/../../escaped", f"../{TEN}/test_batch"]
    extra = [tarfile.TarInfo(name) for name in names]
    for info in extra:
        info.size = 10
    path = write_tar(inside / "cifar.tar.gz", files10(), extra)
    check_ten(load_cifar(path, split="test"), TEST)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "a",
        "a/b",
        "a/b/cifar.tar.gz",
    ]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_members_must_be_plain_files(tmp_path: Path, kind: bytes) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(dump2(TEST["test_batch"]))
    files = files10()
    del files[f"{TEN}/test_batch"]
    info = tarfile.TarInfo(f"{TEN}/test_batch")
    info.type, info.linkname = kind, str(secret)
    with pytest.raises(FileError, match="not a plain file"):
        load_cifar(write_tar(tmp_path / "c.tar.gz", files, [info]), split="test")


def test_member_twice(tmp_path: Path) -> None:
    info = tarfile.TarInfo(f"{TEN}/test_batch")
    info.size = 3
    with pytest.raises(FileError, match="more than once"):
        load_cifar(write_tar(tmp_path / "c.tar.gz", files10(), [info]), split="test")


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = tarfile.TarInfo("padding")
    bomb.size = 25_000_000
    path = write_tar(tmp_path / "c.tar.gz", files10(), [bomb])
    load_cifar(path)
    monkeypatch.setattr(tar, "ARCHIVE_LIMIT", 20_000_000)
    with pytest.raises(FileError, match=r"refused, since it unpacks to more than 19\.1 MiB"):
        load_cifar(path)
    monkeypatch.setattr(tar, "MEMBER_LIMIT", 1000)
    with pytest.raises(FileError, match="more than the 1000 bytes that is read"):
        load_cifar(path)


def test_huge_long_name_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 30_000_000
    path = write_tar(tmp_path / "c.tar.gz", {}, [info])
    monkeypatch.setattr(tar, "ARCHIVE_LIMIT", 5_000_000)
    with pytest.raises(FileError, match="refused, since it unpacks to more"):
        load_cifar(path)


@pytest.mark.parametrize("ending", [".tar.gz", ".tar"])
def test_truncated_archives(tmp_path: Path, ending: str) -> None:
    path = write_tar(tmp_path / f"c{ending}", files10())
    whole = path.read_bytes()
    # The last 10 KiB of a tar are zeros that nothing needs, but a gzip file needs its checksum.
    last = len(whole) - 10_240 if ending == ".tar" else len(whole) - 1
    for length in [0, 1, 100, 511, 513, 5000, *range(10_000, last, len(whole) // 7), last]:
        path.write_bytes(whole[:length])
        with pytest.raises(FileError):
            load_cifar(path)
        if ending == ".tar.gz":
            with pytest.raises(FileError):
                open_dataset(str(path))
