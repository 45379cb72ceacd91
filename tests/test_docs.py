"""The documentation cannot drift: help texts, warning codes, exit codes, links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
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


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "RESULTS.md")


def without_code_blocks(text: str) -> str:
    """A page as prose: what stands between fences is neither a heading nor a link."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """GitHub's names of a page's headings: letters, digits, `-` and `_`; the second of a name ends in -1."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", without_code_blocks(text), flags=re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """Links of a page whose file isn't there, or has no heading of that name."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code_blocks(page.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        if not file.exists() or (
            "#" in link and (file.suffix != ".md" or anchor not in anchors(file.read_text(encoding="utf-8")))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []
    assert "shared/" not in page.read_text(encoding="utf-8")


def test_anchors_are_those_of_github() -> None:
    text = (
        "# An *unknown* rate (`--lr auto`)\n\n## Measured\n\n```sh\n# no heading\n```\n\n"
        "#### Table 3, α = 5\n\n## Measured\n\n## [What](cli.md#output) files_are\n"
    )
    assert anchors(text) == {
        "an-unknown-rate---lr-auto",
        "measured",
        "measured-1",
        "table-3-α--5",
        "what-files_are",
    }


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Other\n\n## Here\n", encoding="utf-8")
    page.write_text(
        "# Page\n\n[a](other.md#here) [b](#page) [c](https://example.org/#x) [d](other.md)\n"
        "[e](other.md#gone) [f](#gone) [g](gone.md) [h](gone.md#here) [i](other.md#)\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["other.md#gone", "#gone", "gone.md", "gone.md#here", "other.md#"]
