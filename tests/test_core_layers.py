"""The core stands alone, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlu_cli

PACKAGE = Path(rlu_cli.__file__).parent
CORE = sorted((PACKAGE / "core").rglob("*.py"))
FORBIDDEN = {
    *(f"rlu_cli.{part}" for part in ("audit", "cli", "files", "images", "models", "simulation")),
    *("PIL", "typer", "rich", "safetensors", "click"),
}


def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in the file, with each parent package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in names]
    return {".".join(p[: i + 1]) for p in parts for i in range(len(p))}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_core_imports_nothing_above_it(path: Path) -> None:
    assert not imported(path) & FORBIDDEN


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_core_neither_prints_nor_opens_files(path: Path) -> None:
    calls = [n.func for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    assert not {f.id for f in calls if isinstance(f, ast.Name)} & {"print", "open", "input"}
    assert not imported(path) & {"pathlib", "io", "os", "sys", "tempfile", "shutil"}


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return done.stdout


HEAVY = "sorted({'torch', 'scipy', 'PIL', 'safetensors', 'torchvision', 'timm'} & set(sys.modules))"


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    assert run_python(f"import sys, rlu_cli; print({HEAVY}, 'numpy' in sys.modules)") == "[] False\n"


def test_help_does_not_load_torch() -> None:
    code = (
        "import contextlib, io, runpy, sys\n"
        "sys.argv = ['rlu', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "    runpy.run_module('rlu_cli', run_name='__main__')\n"
        f"print('recover' in out.getvalue(), {HEAVY})"
    )
    assert run_python(code) == "True []\n"


def test_public_names_are_there() -> None:
    for name in rlu_cli.__all__:
        assert getattr(rlu_cli, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = rlu_cli.nonsense  # type: ignore[attr-defined]
