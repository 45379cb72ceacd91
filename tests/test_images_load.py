"""Loading a class folder into one tensor: content, order, sub-samples, threads and interrupts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlu_cli.errors import FileError, MismatchError, UsageError
from rlu_cli.images import ClassFolder, load, load_images, native_size, scan_class_folder

COUNTS = {"ant": 40, "bee": 25, "cow": 35}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ClassFolder:
    """100 images of 4x3, each of one colour that tells its class and number."""
    root = tmp_path_factory.mktemp("aux")
    for label, (name, count) in enumerate(COUNTS.items()):
        (root / name).mkdir()
        for index in range(count):
            Image.new("RGB", (3, 4), (label, index, 200)).save(root / name / f"{index:03}.png")
    return scan_class_folder(root)


def test_content_and_order(folder: ClassFolder) -> None:
    images = load_images(folder, channels=3, size=None)
    assert images.pixels.dtype == torch.uint8
    assert images.pixels.shape == (100, 3, 4, 3)
    assert images.labels.dtype == torch.int64
    assert images.names == ("ant", "bee", "cow")
    assert images.counts == (40, 25, 35)
    expected = [(label, index, 200) for label, count in enumerate(COUNTS.values()) for index in range(count)]
    assert torch.equal(images.pixels[:, :, 0, 0], torch.tensor(expected, dtype=torch.uint8))
    assert torch.equal(images.labels, torch.tensor([label for label, _, _ in expected]))


def test_threads_do_not_change_the_result(folder: ClassFolder) -> None:
    alone = load_images(folder, channels=3, size=(5, 6), workers=1)
    for workers in (0, 2, 7):
        other = load_images(folder, channels=3, size=(5, 6), workers=workers)
        assert torch.equal(alone.pixels, other.pixels)
        assert torch.equal(alone.labels, other.labels)


def test_grey_and_size(folder: ClassFolder) -> None:
    assert native_size(folder) == (4, 3)
    assert load_images(folder, channels=1, size=(2, 7)).pixels.shape == (100, 1, 2, 7)


def test_layout_is_channels_first(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    images = load_images(scan_class_folder(tmp_path), channels=3, size=None)
    np.testing.assert_array_equal(images.pixels[0].numpy(), pixels.transpose(2, 0, 1))


def test_sub_sample(folder: ClassFolder) -> None:
    first = load_images(folder, channels=3, size=None, per_class=30, seed=3)
    assert first.counts == (30, 25, 30)
    again = load_images(folder, channels=3, size=None, per_class=30, seed=3, workers=3)
    assert torch.equal(first.pixels, again.pixels)
    numbers = first.pixels[first.labels == 0][:, 1, 0, 0].tolist()
    assert numbers == sorted(set(numbers))
    assert numbers != list(range(30))
    other = load_images(folder, channels=3, size=None, per_class=30, seed=4)
    assert not torch.equal(first.pixels, other.pixels)


def test_sub_sample_does_not_depend_on_class_order(folder: ClassFolder) -> None:
    swapped = ClassFolder(folder.root, folder.names[::-1], folder.files[::-1], (), "string")
    first = load_images(folder, channels=3, size=None, per_class=10)
    second = load_images(swapped, channels=3, size=None, per_class=10)
    assert torch.equal(first.pixels[first.labels == 0], second.pixels[second.labels == 2])


@pytest.mark.parametrize("workers", [1, 4])
def test_mixed_sizes_need_a_size(tmp_path: Path, workers: int) -> None:
    for name, size in (("a", (3, 4)), ("b", (5, 4))):
        (tmp_path / name).mkdir()
        for index in range(30):
            Image.new("RGB", size).save(tmp_path / name / f"{index:02}.png")
    folder = scan_class_folder(tmp_path)
    with pytest.raises(MismatchError, match=r"00.png is 4x3 and .*b.00.png is 4x5 .*--image-size"):
        load_images(folder, channels=3, size=None, workers=workers)
    assert load_images(folder, channels=3, size=(4, 4), workers=workers).counts == (30, 30)


@pytest.mark.parametrize("workers", [1, 4])
def test_first_damaged_file_is_named(tmp_path: Path, workers: int) -> None:
    (tmp_path / "a").mkdir()
    for index in range(80):
        path = tmp_path / "a" / f"{index:02}.bmp"
        Image.new("RGB", (8, 8)).save(path)
        if index in (21, 22, 70):
            path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FileError, match=r"21\.bmp"):
        load_images(scan_class_folder(tmp_path), channels=3, size=None, workers=workers)


def test_bad_requests(folder: ClassFolder) -> None:
    with pytest.raises(UsageError, match="at least 1 image"):
        load_images(folder, channels=3, size=None, per_class=0)
    with pytest.raises(UsageError, match="at least 1x1"):
        load_images(folder, channels=3, size=(0, 4))
    with pytest.raises(MismatchError, match="takes 4 input channels"):
        load_images(folder, channels=4, size=None)


def test_more_memory_than_there_is(folder: ClassFolder) -> None:
    with pytest.raises(UsageError, match=r"GB, more than there is"):
        load_images(folder, channels=3, size=(2**28, 2**28))


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_is_told_in_order_in_this_thread(folder: ClassFolder, workers: int) -> None:
    told: list[tuple[int, int]] = []
    threads: set[threading.Thread] = set()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.current_thread())

    load_images(folder, channels=3, size=None, workers=workers, progress=progress)
    assert told == [*((done, 100) for done in range(load.CHUNK, 100, load.CHUNK)), (100, 100)]
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupt_drops_what_has_not_started(
    folder: ClassFolder, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Path] = []
    whole = load.decode_pixels

    def slow(path: Path, **options: object) -> object:
        decoded.append(path)
        time.sleep(0.005)
        return whole(path, **options)  # type: ignore[arg-type]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "decode_pixels", slow)
    with pytest.raises(KeyboardInterrupt):
        load_images(folder, channels=3, size=None, workers=workers, progress=interrupt)
    assert load.CHUNK <= len(decoded) <= (1 if workers == 1 else 5) * load.CHUNK < 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rlu-decode")]
