"""Write every command's help into docs/cli.md; `--check` only says whether that is needed.

python docs/reference.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "cli.md"
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


def main() -> None:
    text = rendered()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else "docs/cli.md: run docs/reference.py")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
