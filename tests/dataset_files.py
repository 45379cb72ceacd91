"""Official data-set files, written as their publishers wrote them."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

CIFAR10 = "cifar-10-batches-py"


def python2(value: object) -> bytes:
    """`value` as Python 2 pickled it by protocol 2, which is how the official files were written."""
    if isinstance(value, str | bytes):
        raw = value.encode("latin-1") if isinstance(value, str) else value
        return (b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw))) + raw
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(part) for pair in value.items() for part in pair) + b"u"
    assert isinstance(value, np.ndarray) and value.dtype == np.uint8
    made = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
    dtype = b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNN" + 2 * python2(-1) + b"K\x00tb"
    shape = b"(" + b"".join(python2(length) for length in value.shape) + b"t"
    return made + b"(K\x01" + shape + dtype + b"\x89" + python2(value.tobytes()) + b"tb"


def dump2(value: object) -> bytes:
    return b"\x80\x02" + python2(value) + b"."


def write_tar(path: Path, files: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in extra or []:
            archive.addfile(info, io.BytesIO(bytes(info.size)))
    return path


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def idx(array: np.ndarray, code: int = 8) -> bytes:
    sizes = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.tobytes()


def cifar10(
    images: np.ndarray, labels: Sequence[int], names: Sequence[str], *, split: str = "test"
) -> dict[str, bytes]:
    """The archive's files for images (M, 3, 32, 32), all in the last batch of a split."""
    rows = {"data": images.reshape(len(images), -1), "labels": [int(label) for label in labels]}
    none = {"data": rows["data"][:0], "labels": []}
    batches = ["test_batch"] if split == "test" else [f"data_batch_{n}" for n in range(1, 6)]
    files = {f"{CIFAR10}/{name}": dump2(none) for name in batches[:-1]}
    files[f"{CIFAR10}/{batches[-1]}"] = dump2(rows)
    return {f"{CIFAR10}/batches.meta": dump2({"label_names": list(names)}), **files}


def write_svhn(path: Path, images: np.ndarray, digits: Sequence[int]) -> Path:
    """Images (M, 3, 32, 32) and the digits they show; 0 is written as 10."""
    y = np.array([[digit or 10] for digit in digits], dtype=np.uint8)
    savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": y}, do_compression=True)
    return path


def write_idx_pair(folder: Path, stem: str, images: np.ndarray, labels: Sequence[int]) -> Path:
    """Grey images (M, H, W) and labels, as MNIST's files; `stem` is train or t10k."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx(np.array(labels, dtype=np.uint8)))
    return folder


def write_class_folders(root: Path, images: np.ndarray, labels: Sequence[int], names: Sequence[str]) -> Path:
    """Images (M, H, W) or (M, H, W, 3) as PNGs, in folders called `names`, numbered in their order."""
    for name in names:
        (root / name).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(root / names[label] / f"{number:05}.png")
    return root


def write_tiny_imagenet(
    root: Path, images: np.ndarray, labels: Sequence[int], wnids: Sequence[str], *, listed: Sequence[str]
) -> Path:
    """One image of each class in ``train/``, all in ``val/``; `listed` is the order of wnids.txt."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in listed))
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        name = f"val_{number}.JPEG"
        Image.fromarray(image).save(root / "val" / "images" / name, "JPEG", quality=98)
        lines.append(f"{name}\t{wnids[label]}\t0\t0\t62\t62\n")
        train = root / "train" / wnids[label] / "images" / f"{wnids[label]}_0.JPEG"
        if not train.exists():
            train.parent.mkdir(parents=True)
            Image.fromarray(image).save(train, "JPEG", quality=98)
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root
