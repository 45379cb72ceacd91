"""The tables and figures of the RLU paper, measured again.

    python -m benchmarks.paper all --quick                      (under 10 minutes on 2 cores)
    python -m benchmarks.paper table2 --scale cpu               (LeNet-5 in full, the others with few clients)
    python -m benchmarks.paper table3 table4 --scale few        (the paper's networks, one seed, without gls)
    python -m benchmarks.paper all --scale full --device cuda \\
        --data SVHN=svhn/ --data CIFAR-10=cifar-10-python.tar.gz \\
        --data CIFAR-100=cifar-100-python.tar.gz --data Tiny-ImageNet=tiny-imagenet-200/

Without a path, a data set that is installed or drawn stands in for the paper's, and every table says so.
Writes a Markdown file for each table and figure, the figures as PNG, and every client's scores as NDJSON; a
run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import machine
from benchmarks.data import images
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.official import check_official
from benchmarks.paper.settings import DATASETS, SCALES, Plan
from benchmarks.paper.tables import TABLES
from benchmarks.rounds import Bench, Results
from rlu_cli.errors import RluError

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("all", *TABLES, *FIGURES))
    parser.add_argument("--scale", choices=SCALES, default="full", help="how many seeds, clients and images")
    parser.add_argument("--quick", action="store_const", const="quick", dest="scale")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="official files")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--jobs", type=int, default=1, help="simulations at a time; 0: tabulate what there is"
    )
    parser.add_argument("--output", type=Path, help="folder; benchmarks/results/paper-SCALE by default")
    chosen = parser.parse_args(arguments)
    paths = {}
    for text in chosen.data:
        name, _, path = text.partition("=")
        if name not in DATASETS or not path:
            parser.error(f"--data: expected NAME=PATH with NAME among {', '.join(DATASETS)}, found {text!r}")
        try:
            check_official(DATASETS[name], path)
        except RluError as error:
            parser.error(f"--data: {error}")
        paths[name] = path
    run(
        [*TABLES, *FIGURES] if "all" in chosen.what else chosen.what,
        Plan(SCALES[chosen.scale], paths),
        folder=chosen.output or RESULTS / f"paper-{chosen.scale}",
        device=chosen.device,
        jobs=chosen.jobs,
    )


def run(names: Sequence[str], plan: Plan, *, folder: Path, device: str = "auto", jobs: int = 1) -> None:
    """Measure what is missing and write the named tables and figures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    given = [f"--data {dataset}={path}" for dataset, path in plan.paths.items()]
    for name in names:
        bench = Bench(Results(folder / f"{name}.ndjson"), images, device=device, jobs=jobs, log=_say)
        maker = TABLES.get(name)
        text = maker(plan, bench) if maker else FIGURES[name](plan, bench, folder)
        doc = inspect.cleandoc((maker or FIGURES[name]).__doc__ or "")
        command = " ".join(["python -m benchmarks.paper", name, "--scale", plan.scale.name, *given])
        where = "; ".join(bench.results.machines) or machine()
        header = f"# {name}\n\n{doc}\n\n`{command}`; {where}.\n\n"
        unfinished = folder / f".{name}.md"
        unfinished.write_text(header + text, encoding="utf-8")
        unfinished.rename(folder / f"{name}.md")
        _say(f"wrote {folder / name}.md")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") is None:
        torch.set_num_threads(os.cpu_count() or 1)
    main()
