"""Decoding: every pixel mode and container to exact pixels, and every kind of damage to a FileError."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.images import decode_image, to_mode

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (6, 5), dtype=np.uint8)


def luma(rgb: np.ndarray) -> np.ndarray:
    """Pillow's integer ITU-R 601 grey, by hand."""
    r, g, b = (rgb[..., index].astype(np.int64) for index in range(3))
    return ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16).astype(np.uint8)


def save(path: Path, image: Image.Image, **options: Any) -> Path:
    image.save(path, **options)
    return path


def check(path: Path, rgb: np.ndarray, grey: np.ndarray) -> None:
    found = decode_image(path, channels=3, size=None)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, rgb)
    np.testing.assert_array_equal(decode_image(path, channels=1, size=None), grey[:, :, None])


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tif", "a.webp"])
def test_rgb_in_lossless_containers(tmp_path: Path, name: str) -> None:
    options = {"lossless": True} if name.endswith("webp") else {}
    check(save(tmp_path / name, Image.fromarray(RGB), **options), RGB, luma(RGB))


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.pgm", "a.tiff", "a.gif"])
def test_grey(tmp_path: Path, name: str) -> None:
    check(save(tmp_path / name, Image.fromarray(GREY)), np.dstack([GREY] * 3), GREY)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.webp"])
def test_alpha_is_dropped_not_blended(tmp_path: Path, name: str) -> None:
    rgba = np.dstack([RGB, RNG.integers(0, 256, (6, 5), dtype=np.uint8)])
    rgba[0, 0] = (255, 0, 0, 0)
    rgb = rgba[..., :3]
    options = {"lossless": True, "exact": True} if name.endswith("webp") else {}
    check(save(tmp_path / name, Image.fromarray(rgba), **options), rgb, luma(rgb))


def test_grey_with_alpha(tmp_path: Path) -> None:
    image = Image.fromarray(np.dstack([GREY, 255 - GREY]))
    assert image.mode == "LA"
    check(save(tmp_path / "a.png", image), np.dstack([GREY] * 3), GREY)


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 128, 255])])
def test_palette_with_and_without_transparency(tmp_path: Path, transparency: int | bytes | None) -> None:
    colours = np.array([[255, 0, 0], [0, 200, 10], [7, 8, 9]], dtype=np.uint8)
    indices = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(colours.tobytes())
    assert image.mode == "P"
    options = {} if transparency is None else {"transparency": transparency}
    rgb = colours[indices]
    check(save(tmp_path / "a.png", image, **options), rgb, luma(rgb))


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.bmp"])
def test_one_bit(tmp_path: Path, name: str) -> None:
    bits = GREY > 127
    image = Image.fromarray(bits)
    assert image.mode == "1"
    grey = np.where(bits, 255, 0).astype(np.uint8)
    check(save(tmp_path / name, image), np.dstack([grey] * 3), grey)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    """Uniform blocks survive JPEG: cyan ink 255 leaves no red."""
    image = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    path = save(tmp_path / "a.jpg", image, quality=100, subsampling=0)
    with Image.open(path) as stored:
        assert stored.mode == "CMYK"
    found = decode_image(path, channels=3, size=None)
    np.testing.assert_array_equal(found, np.broadcast_to([0, 255, 255], (16, 16, 3)))


def test_ycbcr_tiff(tmp_path: Path) -> None:
    image = Image.fromarray(RGB).convert("YCbCr")
    path = save(tmp_path / "a.tif", image)
    np.testing.assert_array_equal(decode_image(path, channels=3, size=None), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("name", ["a.png", "a.tif", "big-endian.tif", "a.pgm"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    path = tmp_path / name
    if name == "a.pgm":
        path.write_bytes(b"P5\n8 8\n65535\n" + ramp.astype(">u2").tobytes())
    elif name == "big-endian.tif":
        save(path, Image.frombytes("I;16B", (8, 8), ramp.astype(">u2").tobytes()))
    else:
        save(path, Image.fromarray(ramp))
    grey = (ramp >> 8).astype(np.uint8)
    check(path, np.dstack([grey] * 3), grey)


@pytest.mark.parametrize(("suffix", "dtype"), [("png", np.uint16), ("tif", np.uint16), ("tif", np.int32)])
def test_eight_bits_stored_in_more_are_left_as_they_are(tmp_path: Path, suffix: str, dtype: type) -> None:
    """They came out black; torchvision's loader keeps them."""
    levels = np.arange(256).reshape(16, 16)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(levels.astype(dtype)).save(path)
    np.testing.assert_array_equal(decode_image(path, channels=1, size=None)[..., 0], levels)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (np.full((2, 2), 0.5, dtype=np.float32), "floating-point"),
        (np.full((2, 2), 65536, dtype=np.int32), "outside the 16-bit range"),
        (np.full((2, 2), -1, dtype=np.int32), "outside the 16-bit range"),
    ],
)
def test_pixels_of_unknown_scale_are_refused(tmp_path: Path, values: np.ndarray, match: str) -> None:
    path = save(tmp_path / "a.tif", Image.fromarray(values))
    with pytest.raises(FileError, match=match):
        decode_image(path, channels=1, size=None)


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tif"])
def test_first_frame_of_many(tmp_path: Path, name: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("#ff0000", "#00ff00", "#0000ff")]
    options = {"lossless": True} if name.endswith("webp") else {}
    path = save(tmp_path / name, frames[0], save_all=True, append_images=frames[1:], **options)
    red = np.broadcast_to(np.array([255, 0, 0], dtype=np.uint8), (4, 4, 3))
    check(path, red, luma(red))
    with Image.open(path) as image:
        image.seek(2)
        np.testing.assert_array_equal(np.asarray(to_mode(image, 3)), red)


def test_exif_orientation_is_not_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "a.png", Image.fromarray(RGB), exif=exif)
    np.testing.assert_array_equal(decode_image(path, channels=3, size=None), RGB)


def test_content_counts_not_the_extension(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", Image.fromarray(RGB), format="PNG")
    np.testing.assert_array_equal(decode_image(path, channels=3, size=None), RGB)


def test_resize_is_antialiased_bilinear(tmp_path: Path) -> None:
    image = Image.fromarray(RNG.integers(0, 256, (32, 20, 3), dtype=np.uint8))
    path = save(tmp_path / "a.png", image)
    found = decode_image(path, channels=3, size=(8, 10))
    assert found.shape == (8, 10, 3)
    np.testing.assert_array_equal(found, np.asarray(image.resize((10, 8), Image.Resampling.BILINEAR)))
    stripes = np.tile(np.array([0, 255], dtype=np.uint8), (8, 8))  # without antialiasing: all 0 or all 255
    path = save(tmp_path / "b.png", Image.fromarray(stripes))
    inner = decode_image(path, channels=1, size=(4, 4))[:, 1:-1]
    assert abs(inner.astype(int) - 128).max() < 16
    np.testing.assert_array_equal(decode_image(path, channels=1, size=(8, 16))[..., 0], stripes)


@pytest.mark.parametrize("channels", [0, 2, 4])
def test_only_grey_and_rgb(tmp_path: Path, channels: int) -> None:
    path = save(tmp_path / "a.png", Image.fromarray(RGB))
    with pytest.raises(MismatchError, match=f"takes {channels} input channels"):
        decode_image(path, channels=channels, size=None)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.gif", "a.webp", "a.tif", "lzw.tif", "a.ppm"])
def test_truncation_anywhere_is_an_error_or_harmless(tmp_path: Path, name: str) -> None:
    """Cut at any point, a file gives all of its pixels or a FileError that names it: never grey filler."""
    pixels = RNG.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    options = {"compression": "tiff_lzw"} if name == "lzw.tif" else {}
    path = save(tmp_path / name, Image.fromarray(pixels), **options)
    whole, data = decode_image(path, channels=3, size=None), path.read_bytes()
    failures = 0
    for length in sorted({*range(0, 64), *range(64, len(data), 37), *range(len(data) - 16, len(data))}):
        path.write_bytes(data[:length])
        try:
            found = decode_image(path, channels=3, size=None)
        except FileError as error:
            failures += 1
            assert name in str(error) and "\n" not in str(error)
            assert "\x00" not in str(error)
        else:
            assert length > len(data) * 0.9, (length, len(data))
            np.testing.assert_array_equal(found, whole)
    assert failures > 60


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.gif", "a.webp", "a.tif", "a.bmp", "a.ppm"])
def test_flipped_bytes_never_escape_as_another_error(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, Image.fromarray(RGB))
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    rng = np.random.default_rng(1)
    for _ in range(200):
        broken = data.copy()
        where = rng.integers(0, min(len(data), 200), 3)
        broken[where] = rng.integers(0, 256, 3)
        path.write_bytes(broken.tobytes())
        try:
            decode_image(path, channels=3, size=(6, 5))
        except FileError as error:
            assert name in str(error)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "not a readable BMP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "not a readable BMP"),
    ],
)
def test_files_that_are_no_images(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(FileError, match=match) as caught:
        decode_image(path, channels=3, size=None)
    assert str(path) in str(caught.value)


def test_missing_file_and_broken_link(tmp_path: Path) -> None:
    (tmp_path / "b.png").symlink_to(tmp_path / "nowhere.png")
    for name in ("a.png", "b.png"):
        with pytest.raises(FileError, match=rf"{name}: No such file"):
            decode_image(tmp_path / name, channels=3, size=None)


@pytest.mark.parametrize("limit", [20, 10])
def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Pillow only warns up to twice the limit; both are refused, whatever the filters outside say."""
    path = save(tmp_path / "a.png", Image.fromarray(RGB))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FileError, match="decompression bomb"):
            decode_image(path, channels=3, size=None)


def test_truncated_files_stay_refused_if_another_library_allowed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    buffer = io.BytesIO()
    Image.fromarray(RGB).save(buffer, "BMP")
    path = tmp_path / "a.bmp"
    path.write_bytes(buffer.getvalue()[:-30])
    with pytest.raises(FileError, match="truncated"):
        decode_image(path, channels=3, size=None)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
