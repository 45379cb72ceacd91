"""Rendered glyphs: a colour image data set of 62, 100 or 200 classes that any Debian machine can make.

    python -m benchmarks.glyphs --classes 62 --per-class 200 --size 32 -o glyphs62.npz
    python -m benchmarks.glyphs --classes 200 --size 64 -o glyphs200/     (one folder a class)
    python -m benchmarks.glyphs --fonts                                   (what is needed, what is installed)

Each image is one character in a random font, size, place, rotation and colour on a random background, with
noise. An image depends on the seed, the side, its character and its number only, so the classes of the
smaller sets are in the larger ones image by image. The same bytes come from the same fonts and the same
Pillow and FreeType. A stand-in for CIFAR-100 and Tiny-ImageNet where those can't be had: as many classes, as
large images, but an easier task.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

from rlu_cli.images import ImageSet

LATIN = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
GREEK = "ΓΔΘΛΞΠΣΦΨΩαβγδεζηθλμξπρστφχψω"
CYRILLIC = "БДЖИЛУЦЧШ"
MORE_CYRILLIC = "ЩЪЫЬЭЮЯЄЙЉ"
HEBREW = "אבגדהוזחטיכלמנסעפצקרשת"
ARMENIAN = "".join(chr(c) for c in range(0x531, 0x557) if c not in (0x54D, 0x54F, 0x555))  # like U, S, O
GEORGIAN = "".join(map(chr, range(0x10D0, 0x10F1)))

CLASSES = {
    62: LATIN,
    100: LATIN + GREEK + CYRILLIC,
    200: LATIN + GREEK + CYRILLIC + MORE_CYRILLIC + HEBREW + ARMENIAN + GEORGIAN,
}
"""The characters of each data set; class indices are in code point order."""

FONT_ROOT = Path("/usr/share/fonts")

_BASIC = (
    *(f"DejaVu{kind}.ttf" for kind in ("Sans", "Sans-Bold", "Serif", "Serif-Bold", "SansMono")),
    *(f"Free{kind}.ttf" for kind in ("Sans", "SansBold", "Serif", "SerifBold")),
)
_EUROPEAN = (
    *_BASIC,
    "DejaVuSansMono-Bold.ttf",
    *(f"Free{kind}.ttf" for kind in ("SansOblique", "SerifItalic", "Mono", "MonoBold")),
    *(f"Liberation{kind}-{cut}.ttf" for kind in ("Sans", "Serif", "Mono") for cut in ("Regular", "Bold")),
    *("LiberationSans-Italic.ttf", "LiberationSerif-Italic.ttf"),
    *(f"Noto{kind}-{cut}.ttf" for kind in ("Sans", "Serif") for cut in ("Regular", "Bold", "Italic")),
)


def _noto(script: str) -> tuple[str, ...]:
    return tuple(f"Noto{kind}{script}-{cut}.ttf" for kind in ("Sans", "Serif") for cut in ("Regular", "Bold"))


FONTS: Mapping[str, Sequence[str]] = {
    LATIN + GREEK + CYRILLIC + MORE_CYRILLIC: _EUROPEAN,
    HEBREW: (
        *("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
        *(f"Free{kind}.ttf" for kind in ("Sans", "SansBold", "Serif", "SerifBold", "Mono")),
        *("LiberationSans-Regular.ttf", "LiberationSerif-Regular.ttf"),
        *_noto("Hebrew"),
    ),
    ARMENIAN: (*_BASIC, *_noto("Armenian")),
    GEORGIAN: (*_BASIC, *_noto("Georgian")),
}
"""Font files by the characters that are drawn with them."""

PACKAGES = {
    "DejaVu": "fonts-dejavu-core",
    "Free": "fonts-freefont-ttf",
    "Liberation": "fonts-liberation2",
    "Noto": "fonts-noto-core",
}
"""Debian packages by how their fonts' names begin."""

_FEWEST_LEVELS_APART = 60
"""Least difference in brightness between a character and its background, of 255."""

_OVERSAMPLING = 2


class MissingFontsError(Exception):
    """Fonts that the data set is drawn with are not installed."""


def glyph_images(
    classes: int,
    *,
    per_class: int = 200,
    size: int = 32,
    seed: int = 0,
    fonts: Mapping[str, Sequence[Path]] | None = None,
) -> ImageSet:
    """The data set, class by class, class indices and names in code point order.

    Parameters
    ----------
    classes : 62, 100 or 200
    per_class : images of each class
    size : side in pixels
    fonts : font files by the characters drawn with them, instead of the packages' own

    Raises
    ------
    MissingFontsError
        Which package to install.
    """
    characters = sorted(CLASSES[classes])
    faces = installed_fonts() if fonts is None else fonts
    by_character = {c: files for members, files in faces.items() for c in members}
    pixels = torch.empty((classes * per_class, 3, size, size), dtype=torch.uint8)
    view = pixels.numpy()
    row = 0
    for character in characters:
        files = by_character[character]
        for number in range(per_class):
            rng = np.random.default_rng((seed, size, ord(character), number))
            view[row] = render(character, files[rng.integers(len(files))], size, rng).transpose(2, 0, 1)
            row += 1
    labels = torch.arange(classes).repeat_interleave(per_class)
    return ImageSet(pixels, labels, tuple(class_name(character) for character in characters))


def class_name(character: str) -> str:
    """``u0041-latin-capital-letter-a``: safe as a folder name anywhere, and sorts by code point."""
    return f"u{ord(character):04x}-{unicodedata.name(character).lower().replace(' ', '-')}"


def render(character: str, font: Path, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One image (size, size, 3), uint8."""
    mask = draw_mask(character, font, size, rng)[:, :, None]  # (size, size, 1), 0..1
    ground = _background(size, rng)
    ink = rng.uniform(0, 255, 3)
    while abs(ink.mean() - ground.mean()) < _FEWEST_LEVELS_APART:
        ink = rng.uniform(0, 255, 3)
    noise = rng.normal(0.0, rng.uniform(2.0, 14.0), (size, size, 3))
    picture = (1 - mask) * ground + mask * ink + noise
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def draw_mask(character: str, font: Path, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """How much ink each pixel gets, (size, size) in 0..1: drawn larger, rotated, then reduced."""
    side = size * _OVERSAMPLING
    face = _face(font, round(side * rng.uniform(0.55, 0.85)))
    left, top, right, bottom = face.getbbox(character)
    slack = max(0.0, (side - max(right - left, bottom - top)) / 2)
    x, y = side / 2 + rng.uniform(-0.7, 0.7, 2) * slack
    canvas = Image.new("L", (side, side))
    place = (x - (left + right) / 2, y - (top + bottom) / 2)
    ImageDraw.Draw(canvas).text(place, character, fill=255, font=face)
    turned = canvas.rotate(rng.uniform(-18, 18), Image.Resampling.BILINEAR, center=(x, y))
    return np.asarray(turned.reduce(_OVERSAMPLING), dtype=np.float64) / 255


def _background(size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Flat, a gradient between two colours, or a coarse texture: (size, size, 3)."""
    first = rng.uniform(0, 255, 3)
    kind = rng.integers(3)
    if kind == 0:
        return np.broadcast_to(first, (size, size, 3))
    if kind == 1:
        angle = rng.uniform(0, 2 * np.pi)
        across = np.linspace(-1, 1, size)
        ramp = np.cos(angle) * across[:, None] + np.sin(angle) * across[None, :]
        return first + 40 * ramp[:, :, None] * rng.uniform(-1, 1, 3)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5), dtype=np.uint8))
    texture = np.asarray(coarse.resize((size, size), Image.Resampling.BILINEAR), dtype=np.float64) / 127.5 - 1
    return first + 40 * texture[:, :, None] * rng.uniform(-1, 1, 3)


@lru_cache(maxsize=1024)
def _face(font: Path, height: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font, height, layout_engine=ImageFont.Layout.BASIC)


def installed_fonts(root: Path = FONT_ROOT) -> dict[str, list[Path]]:
    """The files of ``FONTS`` below ``root``, wherever there.

    Raises
    ------
    MissingFontsError
    """
    found = {path.name: path for path in sorted(root.rglob("*.ttf"))}
    missing = {name for names in FONTS.values() for name in names} - found.keys()
    if missing:
        packages = sorted({package(name) for name in missing})
        raise MissingFontsError(
            f"expected {len(missing)} more fonts in {root} (such as {min(missing)}): "
            f"apt-get install {' '.join(packages)}"
        )
    return {members: [found[name] for name in names] for members, names in FONTS.items()}


def package(font: str) -> str:
    """The Debian package of a font file."""
    return next(name for start, name in PACKAGES.items() if font.startswith(start))


def font_versions() -> str:
    """What drew the images: ``fonts-dejavu-core 2.37-6, …, Pillow 12.0, FreeType 2.13``."""
    command = ["dpkg-query", "-W", "-f=${Package} ${Version}, ", *PACKAGES.values()]
    try:
        packages = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:  # not Debian
        packages = "fonts of unknown version, "
    return f"{packages}Pillow {Image.__version__}, FreeType {features.version('freetype2')}"


def write_folder(images: ImageSet, root: Path) -> None:
    """One folder of PNGs a class."""
    labels = images.labels.numpy()
    for label, name in enumerate(images.names):
        (root / name).mkdir(parents=True)
        for number, row in enumerate(np.flatnonzero(labels == label)):
            picture = images.pixels[int(row)].permute(1, 2, 0).numpy()
            Image.fromarray(picture).save(root / name / f"{number:04d}.png")


def write_npz(images: ImageSet, path: Path) -> None:
    """The arrays images (M, H, W, 3), labels (M,) and class_names (N,)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        images=images.pixels.permute(0, 2, 3, 1).numpy(),
        labels=images.labels.numpy(),
        class_names=np.array(images.names),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, choices=sorted(CLASSES), default=62)
    parser.add_argument("--per-class", type=int, default=200)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fonts", action="store_true", help="list the fonts with their packages")
    parser.add_argument("-o", "--output", type=Path, help="an .npz file, or a new folder")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.fonts:
            for name in sorted({name for names in FONTS.values() for name in names}):
                print(f"{package(name)}\t{name}")
            installed_fonts()
        elif chosen.output is None:
            parser.error("pass --output, or --fonts for a list")
        else:
            images = glyph_images(
                chosen.classes, per_class=chosen.per_class, size=chosen.size, seed=chosen.seed
            )
            write = write_npz if chosen.output.suffix == ".npz" else write_folder
            write(images, chosen.output)
        print(font_versions(), file=sys.stderr)
    except (MissingFontsError, FileExistsError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
