"""The documentation cannot drift: help texts, warning codes, exit codes, links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlu_cli.core.reliability import UNRELIABLE
from rlu_cli.errors import ExitCode

ROOT = Path(__file__).resolve().parent.parent
CLI_PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def warning_codes() -> set[str]:
    """The first argument of every Note(...) in the package."""
    codes = set()
    for path in (ROOT / "rlu_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Note"
            if named and node.args and isinstance(node.args[0], ast.Constant):
                codes.add(str(node.args[0].value))
    return codes


def test_every_warning_is_documented_and_no_other() -> None:
    table = CLI_PAGE.split("## Warnings")[1].split("## Commands")[0]
    documented = dict(re.findall(r"^\| `([a-z-]+)`( \*)? \|", table, flags=re.MULTILINE))
    assert set(documented) == warning_codes()
    assert {code for code, star in documented.items() if star} == set(UNRELIABLE)


def test_every_exit_code_is_documented() -> None:
    table = CLI_PAGE.split("## Exit codes")[1].split("## Warnings")[0]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode} - {int(ExitCode.PARTIAL)}


def test_help_texts_are_current() -> None:
    check = subprocess.run([sys.executable, str(ROOT / "docs" / "reference.py"), "--check"], check=False)
    assert check.returncode == 0


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
    assert "shared/" not in text
