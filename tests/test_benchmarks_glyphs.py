"""The rendered-glyph data set: deterministic, nested, and really drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.glyphs import (
    CLASSES,
    FONTS,
    MissingFontsError,
    class_name,
    draw_mask,
    glyph_images,
    installed_fonts,
    main,
    package,
    render,
    write_folder,
    write_npz,
)
from rlu_cli.images.datasets import open_dataset

matplotlib = pytest.importorskip("matplotlib")

Faces = Mapping[str, Sequence[Path]]


@pytest.fixture(scope="module")
def faces() -> Faces:
    """Fonts that come with matplotlib and have every character."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return {members: [folder / "DejaVuSans.ttf", folder / "DejaVuSans-Bold.ttf"] for members in FONTS}


def test_same_seed_same_images_and_the_larger_sets_hold_the_smaller(faces: Faces) -> None:
    small = glyph_images(62, per_class=2, size=16, fonts=faces)
    assert torch.equal(small.pixels, glyph_images(62, per_class=2, size=16, fonts=faces).pixels)
    other = glyph_images(62, per_class=2, size=16, seed=1, fonts=faces)
    assert not torch.equal(small.pixels, other.pixels)
    longer = glyph_images(100, per_class=3, size=16, fonts=faces)
    for label, name in enumerate(small.names):
        theirs = longer.pixels[longer.labels == longer.names.index(name)]
        assert torch.equal(theirs[:2], small.pixels[small.labels == label])


@pytest.mark.parametrize("classes", CLASSES)
def test_as_many_classes_as_promised_in_folder_order(classes: int) -> None:
    names = [class_name(character) for character in sorted(CLASSES[classes])]
    assert len(set(names)) == classes
    assert names == sorted(names)
    assert all(name.isascii() and len(name) < 80 for name in names)


def test_characters_are_drawn_and_not_boxes_for_missing_ones(faces: Faces) -> None:
    drawn = {
        character: draw_mask(character, paths[0], 24, np.random.default_rng(0))
        for members, paths in faces.items()
        for character in members
    }
    assert all(mask.max() > 0.9 and mask.mean() < 0.5 for mask in drawn.values())
    assert len({mask.tobytes() for mask in drawn.values()}) == len(drawn) == 200


def test_character_and_ground_differ_in_brightness(faces: Faces) -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        state = rng.bit_generator.state
        mask = draw_mask("M", faces[next(iter(faces))][0], 32, rng)
        rng.bit_generator.state = state
        picture = render("M", faces[next(iter(faces))][0], 32, rng).mean(axis=2)
        assert abs(picture[mask > 0.95].mean() - picture[mask == 0].mean()) > 25


def test_npz_and_folder_read_back_the_same(tmp_path: Path, faces: Faces) -> None:
    images = glyph_images(62, per_class=1, size=16, fonts=faces)
    write_npz(images, tmp_path / "glyphs.npz")
    write_folder(images, tmp_path / "glyphs")
    for source in (tmp_path / "glyphs.npz", tmp_path / "glyphs"):
        read = open_dataset(str(source))
        assert read.names == images.names
        assert torch.equal(read.pixels, images.pixels)
        assert torch.equal(read.labels, images.labels)


def test_missing_fonts_name_their_packages(tmp_path: Path) -> None:
    with pytest.raises(MissingFontsError, match=r"apt-get install fonts-dejavu-core .*fonts-noto-core"):
        installed_fonts(tmp_path)
    assert {package(name) for names in FONTS.values() for name in names} == {
        "fonts-dejavu-core",
        "fonts-freefont-ttf",
        "fonts-liberation2",
        "fonts-noto-core",
    }


def test_installed_fonts_have_their_characters() -> None:
    fonts = pytest.importorskip("fontTools.ttLib")
    try:
        found = installed_fonts()
    except MissingFontsError as error:
        pytest.skip(str(error))
    for members, paths in found.items():
        for path in paths:
            with fonts.TTFont(path, lazy=True) as font:
                lacking = {c for c in members if ord(c) not in font.getBestCmap()}
            assert not lacking, path


def test_command_line_needs_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--classes", "62"])
    assert "--output" in capsys.readouterr().err


def test_noise_differs_between_images_of_a_class(faces: Faces) -> None:
    images = glyph_images(62, per_class=2, size=16, fonts=faces).pixels.numpy().reshape(62, 2, -1)
    assert all(np.any(first != second) for first, second in images)
