"""Models from the user's own Python code."""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from rlu_cli.errors import FileError, UsageError
from rlu_cli.models import build_model, parse_spec

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(code: str, name: str = "net.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from torch import nn\n" + textwrap.dedent(code), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def _unchanged_import_state() -> object:
    path = list(sys.path)
    yield
    assert sys.path == path


def build(text: str) -> nn.Module:
    return build_model(parse_spec(text), allow_user_code=True)


def out_features(model: nn.Module) -> int:
    assert isinstance(model, nn.Linear)
    return model.out_features


def test_function(write: Write) -> None:
    path = write("def make(classes=3): return nn.Linear(2, classes)")
    assert out_features(build(f"{path}:make")) == 3
    assert out_features(build(f"{path}:make:classes=5")) == 5


def test_class_with_dataclass_and_nested_attribute(write: Write) -> None:
    path = write(
        """
        from dataclasses import dataclass

        @dataclass
        class Config:
            width: "int" = 4

        class Nets:
            class Net(nn.Linear):
                def __init__(self, classes=2):
                    super().__init__(Config().width, classes)
        """
    )
    assert out_features(build(f"{path}:Nets.Net:classes=9")) == 9


def test_instance_is_copied(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("net = nn.Linear(2, 3)", "rlu_instance_module.py")
    monkeypatch.chdir(tmp_path)
    one, two = build("rlu_instance_module:net"), build("rlu_instance_module:net")
    assert isinstance(one, nn.Linear) and isinstance(two, nn.Linear)
    assert torch.equal(one.weight, two.weight) and one.weight is not two.weight
    with pytest.raises(UsageError, match="takes no keyword arguments, got classes"):
        build("rlu_instance_module:net:classes=3")
    del sys.modules["rlu_instance_module"]


def test_package_module(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("def make(n): return nn.Linear(1, n)", "rlu_test_package/zoo.py")
    monkeypatch.chdir(tmp_path)
    assert out_features(build("rlu_test_package.zoo:make:n=6")) == 6
    for name in ("rlu_test_package", "rlu_test_package.zoo"):
        del sys.modules[name]


def test_siblings_of_two_files_with_the_same_names_stay_apart(write: Write) -> None:
    for folder, classes in (("a", 3), ("b", 4)):
        write(f"CLASSES = {classes}", f"{folder}/layers.py")
        write(f"WIDTH = {classes + 10}", f"{folder}/parts/sizes.py")
        write(
            """
            from layers import CLASSES
            def make():
                from parts.sizes import WIDTH  # imported late: the folder is still on the path
                return nn.Linear(WIDTH, CLASSES)
            """,
            f"{folder}/net.py",
        )
    root = write("", "unused.py").parent
    first, second = build(f"{root}/a/net.py:make"), build(f"{root}/b/net.py:make")
    assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    assert (first.in_features, first.out_features) == (13, 3)
    assert (second.in_features, second.out_features) == (14, 4)
    assert not {"layers", "parts", "parts.sizes", "net"} & sys.modules.keys()


def test_printing_stays_off_stdout(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        """
        print("at import")
        def make():
            print("at call")
            return nn.Linear(1, 1)
        """
    )
    build(f"{path}:make")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.split("\n")[:2] == ["at import", "at call"]


def test_printing_in_forward_passes_stays_off_stdout(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        """
        class Net(nn.Linear):
            def forward(self, x):
                print("shape", tuple(x.shape))
                return super().forward(x)
        """
    )
    model = build(f"{path}:Net:in_features=2,out_features=3")
    for each in (model, copy.deepcopy(model)):
        assert each(torch.ones(1, 2)).shape == (1, 3)
        with pytest.raises(RuntimeError):
            each(torch.ones(1, 5))
    sys.stdout.write("result\n")
    captured = capsys.readouterr()
    assert captured.out == "result\n"
    assert captured.err.split("\n")[:4] == ["shape (1, 2)", "shape (1, 5)"] * 2


def test_copies_in_threads_give_stdout_back(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """The first that begins takes it, the last that ends gives it back."""
    path = write(
        """
        import threading
        both = threading.Barrier(2)

        class Net(nn.Linear):
            def forward(self, x):
                if x.shape[0] == 1:  # begins first and ends last, or the other way round
                    both.wait(10)
                    print("within")
                    both.wait(10)
                else:
                    both.wait(10)
                    both.wait(10)
                return super().forward(x)

        def make(): return Net(2, 3)
        """
    )
    first = build(f"{path}:make")
    second = copy.deepcopy(first)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            passes = [pool.submit(net, torch.zeros(rows, 2)) for net, rows in ((first, 1), (second, 2))]
            for done in passes:
                done.result()
            sys.stdout.write("result\n")
    assert capsys.readouterr() == ("result\n" * 20, "within\n" * 20)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="doesn't exist"):
        build(f"{tmp_path}/absent.py:make")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(FileError, match="is a folder"):
        build(f"{tmp_path}/folder.py:make")


@pytest.mark.parametrize("module", ["rlu_no_such_module", "rlu_no_such.package", "torch.rlu_no_such"])
def test_missing_module(module: str) -> None:
    with pytest.raises(UsageError, match=f"Could not import module '{module}'"):
        build(f"{module}:make")


def test_failing_import_inside_a_module(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("import rlu_no_such_dependency", "rlu_broken_module.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        build("rlu_broken_module:make")
    message = str(caught.value)
    assert message.startswith("Importing module 'rlu_broken_module' failed: ModuleNotFoundError: ")
    assert "'rlu_no_such_dependency'" in message and f"({path}, line 2)" in message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import rlu_no_such_dependency", "ModuleNotFoundError: No module named 'rlu_no_such_dependency'"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*net\.py, line 2\)"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(2)", r"sys\.exit\(2\).*__main__"),
    ],
)
def test_exception_at_import(write: Write, code: str, message: str) -> None:
    path = write(code)
    with pytest.raises(UsageError, match=message) as caught:
        build(f"{path}:make")
    assert str(caught.value).startswith(f"Importing {path} failed: ")
    assert not [name for name in sys.modules if getattr(sys.modules[name], "__file__", None) == str(path)]


def test_exception_at_call_names_the_user_s_line(write: Write) -> None:
    path = write("def make():\n    return nn.Linear('two', 1)")
    with pytest.raises(UsageError) as caught:
        build(f"{path}:make")
    message = str(caught.value)
    assert message.startswith(f"Calling {path}:make failed: TypeError: ")
    assert message.endswith(f"({path}, line 3)")


def test_missing_attribute_lists_what_can_be_called(write: Write) -> None:
    path = write(
        """
        from pathlib import Path
        SIZE = 3
        def _hidden(): ...
        def make_small(): ...
        class Net(nn.Module): ...
        """
    )
    with pytest.raises(UsageError, match=r"has no 'make'\. .* can be called: Net, make_small\.$"):
        build(f"{path}:make")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("make = 3", "is of type int: expected a function or nn.Module"),
        ("def make(): return {'fc.weight': 1}", r"make returned dict: expected a torch\.nn\.Module"),
        ("def make(): return nn.Linear", "make returned type: expected"),
        (
            "def make(width, depth=1): return nn.Linear(width, 1)",
            "'width'.*accepts the keywords width, depth",
        ),
        ("def make(): return nn.Sequential(nn.LazyLinear(3))", r"shape from the first input \(0\.weight"),
        ("make = nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d())", r"shape from the first input \(1\."),
    ],
)
def test_wrong_factory(write: Write, code: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(f"{write(code)}:make")
