"""Class folders: which sub-folder gets which output index, and what is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlu_cli.errors import FileError, MismatchError, UsageError
from rlu_cli.images import natural_key, scan_class_folder


def make(root: Path, *names: str, images: int = 1) -> Path:
    """Class folders with empty files that have image names (scanning never opens them)."""
    for name in names:
        (root / name).mkdir(parents=True)
        for index in range(images):
            (root / name / f"{index}.png").touch()
    return root


def test_string_order_is_the_default_as_in_torchvision(tmp_path: Path) -> None:
    folder = scan_class_folder(make(tmp_path, "b", "10", "2", "A", "a"))
    assert folder.names == ("10", "2", "A", "a", "b")
    assert folder.order == "string"
    assert [files[0].parent.name for files in folder.files] == list(folder.names)


def test_natural_order_is_timms(tmp_path: Path) -> None:
    folder = scan_class_folder(make(tmp_path, "b", "10", "2", "A", "a", "x10y", "x9y"), order="natural")
    assert folder.names == ("2", "10", "A", "a", "b", "x9y", "x10y")
    assert folder.order == "natural"


def test_natural_key_takes_digits_that_int_refuses() -> None:
    assert sorted(["x²", "x1", "x"], key=natural_key) == ["x", "x1", "x²"]


def test_class_names_decide_where_no_order_is_given(tmp_path: Path) -> None:
    make(tmp_path, "cat", "dog", "ant")
    names = ["dog", "ant", "cat"]
    by_name = scan_class_folder(tmp_path, class_names=names)
    assert by_name.names == ("dog", "ant", "cat")
    assert by_name.order == "class_names"
    explicit = scan_class_folder(tmp_path, class_names=names, order="string")
    assert explicit.names == ("ant", "cat", "dog")


def test_order_file_gives_the_index_by_line(tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_bytes("\ufeffdog\r\nälg\r\ncat\r\n\r\n".encode())
    folder = scan_class_folder(make(tmp_path / "aux", "cat", "dog", "älg"), order=str(order))
    assert folder.names == ("dog", "älg", "cat")
    assert folder.order == str(order)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (b"dog\n\ncat\n", FileError, "line 2 is empty"),
        (b"", FileError, "line 1 is empty"),
        (b"\xff\xfe\x00", FileError, "not UTF-8"),
        (b"dog\ndog\ncat\n", MismatchError, "more than once: 'dog'"),
        (b"dog\n", MismatchError, "not listed: 'cat'"),
    ],
)
def test_bad_order_files(tmp_path: Path, text: bytes, error: type[Exception], match: str) -> None:
    order = tmp_path / "order.txt"
    order.write_bytes(text)
    with pytest.raises(error, match=match):
        scan_class_folder(make(tmp_path / "aux", "cat", "dog"), order=str(order))


def test_unknown_order_word(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="string, natural, dataset or the path"):
        scan_class_folder(make(tmp_path, "a", "b"), order="alphabetic")


def test_class_names_must_match_exactly(tmp_path: Path) -> None:
    make(tmp_path, "Cat", *(f"u{index}" for index in range(7)))
    with pytest.raises(MismatchError) as caught:
        scan_class_folder(tmp_path, class_names=["cat", "dog"])
    message = str(caught.value)
    assert "without images: 'cat', 'dog'" in message
    assert "'Cat', 'u0', 'u1', 'u2', 'u3' and 3 more" in message
    assert "--class-order" in message


@pytest.mark.parametrize(
    ("names", "differs"),
    [
        (["0", "1", "2", "10"], True),
        (["0", "1", "2"], False),
        (["00", "01", "02", "10"], False),
        (["0", "1", "2", "10", "x"], False),
        (["class2", "class10"], False),
    ],
)
def test_numeric_order_differs(tmp_path: Path, names: list[str], differs: bool) -> None:
    make(tmp_path, *names)
    assert scan_class_folder(tmp_path).numeric_order_differs is differs
    assert scan_class_folder(tmp_path, order="natural").numeric_order_differs is differs


def test_hidden_and_foreign_things_are_left_out_with_a_note(tmp_path: Path) -> None:
    make(tmp_path, "a", "b", ".ipynb_checkpoints", "__MACOSX")
    make(tmp_path / "a", ".cache")
    for name in ("a/.DS_Store", "a/._0.png", "a/notes.txt", "a/boxes.csv", "loose.PNG", "readme.md"):
        (tmp_path / name).touch()
    folder = scan_class_folder(tmp_path)
    assert folder.names == ("a", "b")
    assert [[path.name for path in files] for files in folder.files] == [["0.png"], ["0.png"]]
    assert folder.skipped == (
        "file that is not an image × 2",
        "folder '.cache' (hidden or system)",
        "folder '.ipynb_checkpoints' (hidden or system)",
        "folder '__MACOSX' (hidden or system)",
        "image directly in the root, outside any class",
    )


def test_extensions_in_any_case_and_sub_folders(tmp_path: Path) -> None:
    names = ["a.JPG", "b.jpeg", "c.Png", "d.ppm", "e.bmp", "f.pgm", "g.tif", "h.TIFF", "i.webp", "j.gif"]
    (tmp_path / "k" / "images").mkdir(parents=True)
    for name in names:
        (tmp_path / "k" / "images" / name).touch()
    (tmp_path / "k" / "z.png").touch()
    (files,) = scan_class_folder(tmp_path).files
    assert [path.relative_to(tmp_path / "k").as_posix() for path in files] == [
        *(f"images/{name}" for name in names),
        "z.png",
    ]


def test_order_does_not_depend_on_creation(tmp_path: Path) -> None:
    paths = [f"{name}/{index}.png" for name in "abc" for index in range(12)]
    for root, order in ((tmp_path / "x", paths), (tmp_path / "y", paths[::-1])):
        for path in order:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
    first, second = scan_class_folder(tmp_path / "x"), scan_class_folder(tmp_path / "y")
    assert [[p.relative_to(first.root) for p in files] for files in first.files] == [
        [p.relative_to(second.root) for p in files] for files in second.files
    ]


def test_links(tmp_path: Path) -> None:
    """A linked class counts; loops end; links further down are noted, not followed."""
    root = make(tmp_path / "aux", "a", "b")
    make(tmp_path / "elsewhere", "c")
    (root / "c").symlink_to(tmp_path / "elsewhere" / "c", target_is_directory=True)
    (root / "up").symlink_to(root, target_is_directory=True)
    (root / "self").symlink_to(root / "self")
    (root / "a" / "loop").symlink_to(root / "a", target_is_directory=True)
    (root / "a" / "linked.png").symlink_to(root / "b" / "0.png")
    folder = scan_class_folder(root)
    assert folder.names == ("a", "b", "c")
    assert [len(files) for files in folder.files] == [2, 1, 1]
    assert "linked folder inside a class (not followed)" in folder.skipped
    assert "folder 'up' (a link to the folder it lies in)" in folder.skipped


def test_root_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such folder"):
        scan_class_folder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="not a folder"):
        scan_class_folder(tmp_path / "file")


def test_no_class_folders(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"one sub-folder of images per class .* found none"):
        scan_class_folder(tmp_path)
    (tmp_path / "0.png").touch()
    with pytest.raises(MismatchError, match="found 1 image directly in it"):
        scan_class_folder(tmp_path)


def test_empty_classes_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a")
    make(tmp_path, "b", "c", images=0)
    (tmp_path / "b" / "text.txt").touch()
    with pytest.raises(MismatchError, match=r"2 of the 3 classes .* have none: b \(index 1\), c \(index 2\)"):
        scan_class_folder(tmp_path)


def test_unreadable_class_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a", "b")
    scan = os.scandir

    def refuse(path: Path) -> object:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(FileError, match=r"can't list the folder .*b: Permission denied"):
        scan_class_folder(tmp_path)


def test_importing_the_package_stays_light() -> None:
    code = """
import sys, rlu_cli
before = set(sys.modules)
import rlu_cli.images
heavy = {"torch", "PIL", "numpy"} & (set(sys.modules) - before)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
