"""How the times of benchmarks/speed.py grow, drawn as small log-log panels with fitted exponents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TITLES = {
    "N": "confidence, N classes\nK = 20, M = 1,000",
    "M": "confidence, M samples\nN = 50, K = 50",
    "m": "search, m steps\nN = 20, M = 1,000, T = 10",
    "clients": "search, clients side by side\nN = 20, m = 10, M = 1,000, T = 10",
}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """p of seconds ∝ size^p, by least squares of the logarithms over the larger half of the sizes."""
    half = len(sizes) // 2
    slope, _ = np.polyfit(np.log(sizes[half:]), np.log(seconds[half:]), 1)
    return float(slope)


def plot(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """One panel a quantity; the line is the fit to the larger half."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rlu"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    growth = {row["against"]: row for row in rows if row["section"] == "growth" and "sizes" in row}
    figure, panels = pyplot.subplots(1, len(TITLES), figsize=(13, 3), layout="constrained")
    for panel, (name, title) in zip(panels, TITLES.items(), strict=True):
        if name not in growth:
            continue
        row = growth[name]
        sizes, seconds = np.array(row["sizes"], dtype=float), np.array(row["seconds"])
        panel.loglog(sizes, seconds, "o", markersize=4)
        half = len(sizes) // 2
        shape = sizes[half:] ** row["exponent"]
        level = np.exp(np.mean(np.log(seconds[half:] / shape)))
        panel.loglog(sizes[half:], level * shape, linewidth=1, label=f"∝ {name}^{row['exponent']:.2f}")
        panel.set(title=title, xlabel=name)
        panel.set_xticks(sizes[:: 2 if len(sizes) > 6 else 1])
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_formatter(NullFormatter())
        panel.tick_params(labelsize=8)
        panel.title.set_fontsize(9)
        panel.legend(fontsize=8)
    panels[0].set_ylabel("seconds")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
