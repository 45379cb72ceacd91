"""Draw docs/demo.svg, the picture in the README, from what `make demo` really prints.

python docs/picture.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
SAMPLE = "sample_data/trained_m10"
COMMAND = (
    f"rlu recover -v --global {SAMPLE}/global.safetensors --local {SAMPLE}/client_0.safetensors "
    "--aux sample_data/aux"
)


def main() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "rlu_cli", *COMMAND.split()[1:]],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "COLUMNS": "100"},
    )
    document = json.loads(run.stdout)
    brief = {key: document[key] for key in ("schema_version", "command", "method", "total", "counts")}
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(Text(f"$ {COMMAND}\n", style="bold"))
    console.print(Text(run.stderr))
    console.print(Text(json.dumps(brief)[:-1] + ", …}"))
    console.save_svg(str(HERE / "demo.svg"), title="rlu", unique_id="rlu-demo")


if __name__ == "__main__":
    main()
