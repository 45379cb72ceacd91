"""One image file to uint8 pixels, as torchvision's loader would give them to a training client.

Two differences are deliberate: 16-bit images are scaled to 8 bits, where Pillow would clip nearly all of
them to white, and whatever Pillow only warns about in a dangerous file is an error.
EXIF orientation is applied only when asked: training pipelines don't apply it.
"""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.regular import open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The decoders a file may reach, whatever its name says: none that starts another program (EPS)."""

_MANY_PIXELS = 2**22
"""Images of more pixels are decoded one at a time: in eight threads they would fill the memory."""

_ALONE = Lock()
"""Held by an image that is decoded while no other is that needs it."""

_STDERR = 2

_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
"""Values of EXIF's orientation that exchange height and width."""

# What Pillow's decoders raise on damaged files, besides its own errors (which are OSErrors).
DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
)


@contextmanager
def strict_pillow() -> Iterator[None]:
    """Make decompression bombs errors and keep Pillow's other warnings quiet, for the whole process.

    Enter it in one thread, around all workers: warning filters are global to the process.
    Another library may have told Pillow to accept truncated files; that is undone meanwhile.
    """
    from PIL import Image, ImageFile, TiffImagePlugin, WebPImagePlugin  # noqa: F401  (registers both)

    truncated = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\b")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = truncated


def to_mode(image: Image.Image, channels: int) -> Image.Image:
    """The first frame of `image` as 8-bit grey (1 channel) or RGB (3 channels).

    Alpha is dropped, not blended; 16-bit values lose their low byte. Raises ValueError for float or 32-bit
    pixels, whose scale nobody knows.
    """
    if channels not in (1, 3):
        raise MismatchError(
            f"the model takes {channels} input channels, but images can be read as 1 (grey) or 3 (RGB) only: "
            "compute the logits elsewhere and pass --aux-logits"
        )
    if image.tell() != 0:
        image.seek(0)
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _sixteen_to_eight(image)
    elif image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is not known")
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:
        return image.convert(mode)
    image.load()
    return image


def decode_image(
    path: Path, *, channels: int, size: tuple[int, int] | None, exif: bool = False
) -> npt.NDArray[np.uint8]:
    """Decode `path` to uint8 (H, W, C); `size` is (H, W), None keeps the image's own.

    `exif` turns the image as its EXIF orientation says. Raises FileError, naming the file, for anything
    that can't be decoded completely.
    """
    with strict_pillow():
        return decode_pixels(path, channels=channels, size=size, exif=exif)


def decode_pixels(
    path: Path, *, channels: int, size: tuple[int, int] | None, exif: bool = False
) -> npt.NDArray[np.uint8]:
    """:func:`decode_image` for worker threads: the caller has entered :func:`strict_pillow`."""
    import numpy as np
    from PIL import Image, ImageOps

    with _opened(path) as opened, _care(opened):
        image = ImageOps.exif_transpose(opened) if exif else opened
        converted = to_mode(image, channels)
        if size is not None and converted.size != (size[1], size[0]):
            # Pillow's bilinear filter antialiases whenever it shrinks; torchvision's Resize calls the same.
            converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pixels: npt.NDArray[np.uint8] = np.asarray(converted, dtype=np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


@contextmanager
def _care(image: Image.Image) -> Iterator[None]:
    """Decode large images alone, and TIFF's too, with stderr closed: libtiff prints there by itself."""
    if image.width * image.height <= _MANY_PIXELS and image.format != "TIFF":
        yield
        return
    with _ALONE, _silence() if image.format == "TIFF" else nullcontext():
        yield


@contextmanager
def _silence() -> Iterator[None]:
    """Send what libraries write to stderr's descriptor nowhere."""
    try:
        kept = os.dup(_STDERR)
    except OSError:  # closed already
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


def stored_size(path: Path, *, exif: bool = False) -> tuple[int, int]:
    """(H, W) of an image as stored, or as its EXIF orientation turns it, from its header."""
    with strict_pillow(), _opened(path) as image:
        height, width = image.height, image.width
        sideways = exif and image.getexif().get(_ORIENTATION) in _SIDEWAYS
        return (width, height) if sideways else (height, width)


def stored_channels(path: Path) -> int:
    """1 where an image is stored as grey levels, 3 otherwise, from its header."""
    with strict_pillow(), _opened(path) as image:
        return 1 if image.mode in ("1", "L", "LA", "La", "I", "F") or image.mode.startswith("I;16") else 3


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image; turn every failure inside the block into a FileError that names the file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with open_regular(path) as stream, Image.open(stream, formats=FORMATS) as image:
            if 0 in image.size:
                raise ValueError("it has no pixels")
            yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise FileError(
            f"can't use the image {path}: it unpacks to more than {Image.MAX_IMAGE_PIXELS} pixels, as a "
            "decompression bomb does; shrink it or remove it"
        ) from None
    except UnidentifiedImageError:
        raise FileError(f"can't use the image {path}: {_unknown_kind(path)}; replace or remove it") from None
    except DAMAGE as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        reason = " ".join(reason.split()) or type(error).__name__
        raise FileError(f"can't use the image {path}: {reason}; replace or remove it") from error


def _unknown_kind(path: Path) -> str:
    """Why no decoder took the file."""
    with open_regular(path) as stream:
        head = stream.read(64)
    if not head:
        return "the file is empty"
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-LFS pointer, not the image (run `git lfs pull`)"
    return f"its content is not a readable {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image"


def _sixteen_to_eight(image: Image.Image) -> Image.Image:
    """16-bit grey to 8-bit by dropping the low byte, but where nothing is in the high one.

    Images of 8 bits are often stored in 16; they would be black, and training pipelines see them as they are.
    """
    import numpy as np
    from PIL import Image

    values = np.array(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError("its pixels are integers outside the 16-bit range, whose scale is not known")
    if values.max() > 0xFF:
        values >>= 8
    return Image.fromarray(values.astype(np.uint8))
