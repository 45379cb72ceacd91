"""Whether the reliability grade says what it should: expected against real iAcc, and iAcc by grade.

    python benchmarks/regimes.py --seeds 3 --output benchmarks/results/regimes_held_out.ndjson
    python benchmarks/reliability.py benchmarks/results/regimes_held_out.ndjson

Reads results of regimes.py and prints Markdown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import markdown, mean_sd
from scipy.stats import spearmanr

from rlu_cli.core.reliability import GRADES

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    texts = [path.read_text(encoding="utf-8") for path in parser.parse_args().results]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    print(expectations([row for row in rows if row["expected_iAcc"] is not None]))
    print(by_grade(rows))


def expectations(rows: list[Row]) -> str:
    """Regime by method: expected and real iAcc, their mean difference, and their rank correlation."""
    lines = []
    methods = list(dict.fromkeys(row["method"] for row in rows))
    regimes = [*dict.fromkeys(row["regime"] for row in rows), None]
    for regime in regimes:
        for method in methods:
            mine = [row for row in rows if row["method"] == method and regime in (row["regime"], None)]
            if not mine:
                continue
            real, expected = (np.array([row[key] for row in mine]) for key in ("iAcc", "expected_iAcc"))
            ranked = real.std() > 0 and expected.std() > 0
            lines.append(
                (
                    regime or "all",
                    method,
                    str(len(mine)),
                    mean_sd(real),
                    mean_sd(expected),
                    f"{np.mean(expected - real):+.3f}",
                    f"{spearmanr(expected, real).statistic:.2f}" if ranked else "",
                )
            )
    return markdown(
        ("model, training", "method", "clients", "iAcc", "expected iAcc", "difference", "rank correlation"),
        lines,
    )


def by_grade(rows: list[Row]) -> str:
    """Method by grade: how many clients, and their iAcc."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        for grade in GRADES:
            found = [row["iAcc"] for row in rows if (row["method"], row["grade"]) == (method, grade)]
            if found:
                lines.append((method, grade, str(len(found)), mean_sd(found), f"{min(found):.3f}"))
    return markdown(("method", "grade", "clients", "iAcc", "least"), lines)


if __name__ == "__main__":
    main()
