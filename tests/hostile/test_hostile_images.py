"""Images, folders and data sets made to harm: refused by name, in little memory and time; nothing runs."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import resource
import shutil
import signal
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, QUICK, SAMPLES, Outcome, call, metadata, sample, tensors, write_safetensors
from dataset_files import CIFAR10, cifar10, idx, write_folder, write_tar
from PIL import Image

from rlu_cli.audit.network import build_network
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.models import ModelSpec, ResNet32

MEMORY = 300
"""Megabytes that one call may add; the images at their largest are 80 MB each."""


@pytest.fixture(autouse=True)
def _no_hang_and_no_flood() -> Iterator[None]:
    """Half a minute a test, and not much more memory than before."""

    def late(*_: object) -> None:
        raise AssertionError("it hangs")

    before, handler = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEMORY


@pytest.fixture
def aux(tmp_path: Path) -> Path:
    """The sample's images, to be spoilt."""
    shutil.copytree(AUX, tmp_path / "aux")
    return tmp_path / "aux"


def recover(aux: Path, *more: object) -> Outcome:
    return call("recover", *sample("untrained_m1", aux=aux), *QUICK, *more)


# Single images.


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, rows: int | None = None, extra: bytes = b"") -> bytes:
    """A grey PNG of zeros; `rows` of its rows are really there."""
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(bytes(width + 1)) for _ in range(height if rows is None else rows))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", body + packer.flush()) + chunk(b"IEND", b"")


def ppm(width: int, height: int) -> bytes:
    return f"P6 {width} {height} 255\n".encode() + bytes(64)


def bmp(width: int, height: int) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 64, 0, 0, 54) + info + bytes(64)


def gif(width: int, height: int) -> bytes:
    image = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00;"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + image


BOMBS = {
    "png of 3.6 gigapixels": png(60_000, 60_000, rows=2),
    "png of 90 megapixels": png(9_500, 9_500, rows=2),
    "ppm": ppm(1_000_000, 1_000_000),
    "bmp": bmp(60_000, 60_000),
    "gif": gif(65_535, 65_535),
    "text of 100 MB": png(28, 28, extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000), 9))),
    "profile of 100 MB": png(28, 28, extra=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(100_000_000), 9))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(aux: Path, name: str) -> None:
    (aux / "bag" / "00.png").write_bytes(BOMBS[name])
    for flags in ([], ["--image-size", "28"], ["--image-size", "28", "--skip-bad"]):
        outcome = recover(aux, *flags)
        if "--skip-bad" in flags:
            assert outcome.code == 0, outcome.err
        else:
            assert str(aux / "bag" / "00.png") in outcome.refusal(3)


def test_libtiff_says_nothing_by_itself(aux: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It prints to stderr's descriptor, past Python, what it makes of damaged files."""
    path = aux / "bag" / "00.png"
    for codec in ("tiff_adobe_deflate", "tiff_lzw", "jpeg"):
        Image.open(aux / "bag" / "01.png").save(path, "TIFF", compression=codec)
        data = path.read_bytes()
        damaged = bytearray(data)
        damaged[8:40] = bytes(range(32))  # where the compressed pixels lie
        path.write_bytes(damaged)
        outcome = recover(aux, "--image-size", "28", "--skip-bad")
        assert (outcome.code, outcome.codes) == (0, ["aux-bad-images"])
        assert capfd.readouterr() == ("", "")
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"


def test_large_images_are_decoded_one_at_a_time(aux: Path) -> None:
    """Eight threads, each with two copies of an image of 25 MB, would take too much."""
    large = png(5_000, 5_000)
    for path in sorted(aux.rglob("00.png"))[:8]:
        path.write_bytes(large)
    assert recover(aux, "--image-size", "28").code == 0


def test_network_is_not_run_on_a_photograph(tmp_path: Path) -> None:
    """No size is asked for, the network takes any, and the first image is huge: its own size is no input."""
    path = write_safetensors(tmp_path / "g.safetensors", ResNet32().state_dict())
    with pytest.raises(MismatchError, match="--image-size"):
        build_network(
            ModelSpec("resnet32"),
            read_checkpoint(path),
            allow_user_code=False,
            image_size=None,
            native_size=(9_000, 9_000),
        )


# What checkpoints claim.


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fl.arch", "lenet5:num_classes=1000000000"),
        ("fl.arch", "vgg16:num_classes=999999999,image_size=4096x4096"),
        ("fl.arch", "lenet5:image_size=99999x99999"),
        ("fl.arch", "lenet5:depth=3"),
        ("fl.arch", "os:system"),
        ("fl.arch", "lenet9"),
        ("fl.image_size", "100000x100000"),
        ("fl.image_size", "1x1"),
        ("fl.normalize", "mean=1e308;std=1e-308"),
        ("fl.steps", "1000000000000"),
        ("fl.steps", "1e308"),
        ("fl.batch_size", "1e300"),
        ("fl.lr", "-1"),
        ("fl.lr", "1e-320"),
        ("fl.lr", ",".join(f"0.{n + 1}" for n in range(100_000))),
        ("fl.momentum", "1"),
        ("fl.weight_decay", "1e300"),
        ("fl.scheme", "\x1b[31mred"),
        ("fl.class_names", "[" * 100_000),
        ("fl.class_names", '["' + "a" * 1_000_000 + '"]'),
    ],
)
def test_annotations_that_ask_for_too_much(tmp_path: Path, key: str, value: str) -> None:
    path = SAMPLES / "untrained_m1" / "client_0.safetensors"
    local = write_safetensors(tmp_path / "k.safetensors", tensors(path), {**metadata(path), key: value})
    outcome = call("recover", *sample("untrained_m1")[:2], "--local", local, "--aux", AUX, *QUICK)
    message = outcome.refusal(outcome.code)
    assert outcome.code in (3, 4)
    assert len(message) < 700 and "\x1b" not in message


# Folders.


def test_pipes_and_devices_among_images(aux: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(aux / "bag" / "pipe.png")  # no regular file: left out
    assert recover(aux).code == 0
    for target in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/stdin")):
        (aux / "bag" / "00.png").unlink()
        (aux / "bag" / "00.png").symlink_to(target)
        assert "bag/00.png" in recover(aux).refusal(3)
    assert "bag/00.png" in recover(aux, "--skip-bad").err


@pytest.mark.parametrize("flag", ["--aux", "--class-order"])
def test_pipes_and_devices_as_inputs(tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        flags = [*sample("untrained_m1", aux=None), *QUICK]
        more = [flag, path] if flag == "--aux" else ["--aux", AUX, flag, path]
        assert str(path) in call("recover", *flags, *more).refusal(3)


def test_loops_of_links(aux: Path) -> None:
    (aux / "up").symlink_to(aux, target_is_directory=True)
    (aux / "bag" / "loop").symlink_to(aux / "bag", target_is_directory=True)
    (aux / "self").symlink_to(aux / "self")
    (aux / "bag" / "self.png").symlink_to(aux / "bag" / "self.png")
    assert "bag/self.png" in recover(aux).refusal(3)
    (aux / "bag" / "self.png").unlink()
    outcome = recover(aux)
    assert outcome.document["inputs"]["aux"]["images"] == 300
    assert "aux-skipped" in outcome.codes


def test_names_that_command_the_terminal(aux: Path) -> None:
    """Escape codes in folder and file names reach neither stderr nor, unescaped, the JSON."""
    (aux / "bag").rename(aux / "\x1b[31mbag\r\n")
    outcome = recover(aux, "--class-order", "string", "-v")
    assert outcome.code == 0 and "\x1b" not in outcome.out
    assert "\x1b" not in outcome.err.replace("\x1b[1m", "").replace("\x1b[0m", "")
    (aux / "\x1b[31mbag\r\n" / "\x1b[32m.png").write_bytes(b"")
    message = recover(aux, "--class-order", "string").refusal(3)
    assert "\x1b" not in message and "?[32m.png" in message


def test_names_that_are_no_utf_8(aux: Path) -> None:
    (aux / "bag").rename(aux / os.fsdecode(b"bag\xff"))
    outcome = recover(aux, "--class-order", "string")
    names = [entry["name"] for entry in outcome.document["classes"]]
    assert os.fsdecode(b"bag\xff") in names
    outcome.out.encode("utf-8")


# Data sets.


def write_cifar(root: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> dict[str, bytes]:
    names = [path.name for path in sorted(AUX.iterdir())]
    return change(cifar10(np.zeros((10, 3, 32, 32), dtype=np.uint8), list(range(10)), names))


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("member", ["test_batch", "batches.meta"])
@pytest.mark.parametrize("form", ["folder", "tar", "tar.gz"])
def test_cifar_payload_never_runs(tmp_path: Path, form: str, member: str) -> None:
    marker = tmp_path / "marker"
    harm = {f"{CIFAR10}/{member}": pickle.dumps(Payload(marker), protocol=2)}
    files = write_cifar(tmp_path, lambda files: files | harm)
    root = tmp_path / "data"
    root.mkdir()
    path = write_folder(root, files) if form == "folder" else write_tar(root / f"a.{form}", files)
    assert "could run code" in recover(path, "--class-order", "dataset").refusal(3)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../escape", "/tmp/rlu-escape", f"{CIFAR10}/../../escape"])
def test_tar_leaves_nothing_on_disk(tmp_path: Path, name: str) -> None:
    files = write_cifar(tmp_path, lambda files: {**files, name: b"x"})
    path = write_tar(tmp_path / "a.tar", files)
    assert recover(path, "--class-order", "dataset", "--image-size", "28").code == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tar"]
    assert not Path("/tmp/rlu-escape").exists()


def test_tar_of_links(tmp_path: Path) -> None:
    """The wanted member is a link to a file outside."""
    path = tmp_path / "a.tar"
    files = write_cifar(tmp_path, dict)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            if name.endswith("test_batch"):
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(info)
            else:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    assert "not a plain file" in recover(path).refusal(3)


def test_tar_bombs(tmp_path: Path) -> None:
    """One huge member, or very many: both stop early."""
    huge = tarfile.TarInfo(f"{CIFAR10}/test_batch")
    huge.size = 2**33
    block = huge.tobuf(tarfile.GNU_FORMAT)
    with gzip.open(tmp_path / "a.tar.gz", "wb", compresslevel=1) as stream:
        stream.write(block)
        for _ in range(300):
            stream.write(bytes(2**20))
    assert "cifar" in recover(tmp_path / "a.tar.gz").refusal(3).lower()
    with gzip.open(tmp_path / "b.tar.gz", "wb", compresslevel=1) as stream:
        for number in range(20_000):
            stream.write(tarfile.TarInfo(f"{number}").tobuf())
    assert "more than 1000 members" in recover(tmp_path / "b.tar.gz").refusal(3)


def test_idx_bomb(tmp_path: Path) -> None:
    """A gigabyte of zeros in a megabyte, as the header says, and a header that says more than there is."""
    with gzip.open(tmp_path / "t10k-images-idx3-ubyte.gz", "wb", compresslevel=9) as stream:
        stream.write(b"\0\0\x08\x03" + struct.pack(">III", 2**20, 32, 32))
        for _ in range(1024):
            stream.write(bytes(2**20))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(2**20, dtype=np.uint8)))
    assert "damaged IDX file" in recover(tmp_path).refusal(3)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(
        b"\0\0\x08\x03" + struct.pack(">III", 2**31, 2**31, 2**31) + bytes(99)
    )
    assert "damaged IDX file" in recover(tmp_path).refusal(3)


def test_mat_bomb(tmp_path: Path) -> None:
    """Two hundred thousand images of zeros, 600 MB, in one megabyte."""
    count = 200_000
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    flags = struct.pack("<IIII", 6, 8, 9, 0)
    sizes = struct.pack("<II4i", 5, 16, 32, 32, 3, count)
    name = struct.pack("<HH4s", 1, 1, b"X")
    start = flags + sizes + name + struct.pack("<II", 2, 3072 * count)
    packer = zlib.compressobj(9)
    body = [packer.compress(struct.pack("<II", 14, len(start) + 3072 * count) + start)]
    body += [packer.compress(bytes(2**20)) for _ in range(3072 * count // 2**20 + 1)]
    data = b"".join((*body, packer.flush()))
    (tmp_path / "test_32x32.mat").write_bytes(header + struct.pack("<II", 15, len(data)) + data)
    assert "expected uint8 X of shape" in recover(tmp_path / "test_32x32.mat").refusal(3)


def test_npz_of_objects(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    labels = np.array([Payload(marker)] * 3, dtype=object)
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 4), dtype=np.uint8), labels=labels)
    assert "holds Python objects" in recover(tmp_path / "a.npz").refusal(3)
    assert not marker.exists()


def test_image_that_is_a_pickle(aux: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)
    for data in (pickle.dumps(Payload(marker)), buffer.getvalue()):
        (aux / "bag" / "00.png").write_bytes(data)
        assert "bag/00.png" in recover(aux).refusal(3)
    assert not marker.exists()


def test_the_limit_leaves_room_for_photographs(tmp_path: Path) -> None:
    """A 24-megapixel image is no bomb."""
    Image.new("L", (6_000, 4_000)).save(tmp_path / "a.png")
    names = [path.name for path in sorted(AUX.iterdir())]
    for name in names:
        (tmp_path / "aux" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "a.png", tmp_path / "aux" / name / "0.png")
    assert recover(tmp_path / "aux", "--image-size", "28", "--class-order", "string").code == 0
