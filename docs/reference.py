"""Write every command's help into docs/cli.md and the capability table into docs/methods.md.

`--check` only says whether that is needed.

python docs/reference.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlu_cli.core.methods import METHODS
from rlu_cli.core.methods.table import capability_table

PAGE = Path(__file__).resolve().parent / "cli.md"
METHODS_PAGE = PAGE.with_name("methods.md")
MARK = "<!-- help -->\n"
COMMANDS = ("", "recover", "estimate-logits", "evaluate", "inspect", "simulate")


def rendered() -> str:
    """The page with the help texts of the installed rlu."""
    head = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    parts = [head, MARK]
    for command in COMMANDS:
        arguments = [sys.executable, "-m", "rlu_cli", *command.split(), "--help"]
        run = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
        text = "\n".join(line.rstrip() for line in run.stdout.strip().splitlines())
        parts.append(f"\n### rlu {command}".rstrip() + f"\n\n```text\n{text}\n```\n")
    return "".join(parts)


def with_capabilities() -> str:
    """The page on the methods, with what they declare."""
    text = METHODS_PAGE.read_text(encoding="utf-8")
    head, rest = text.split("<!-- capabilities -->\n")
    tail = rest.split("<!-- end -->\n")[1]
    return f"{head}<!-- capabilities -->\n{capability_table(METHODS)}<!-- end -->\n{tail}"


def main() -> None:
    for page, text in ((PAGE, rendered()), (METHODS_PAGE, with_capabilities())):
        if "--check" not in sys.argv:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            sys.exit(f"docs/{page.name}: run docs/reference.py")


if __name__ == "__main__":
    main()
