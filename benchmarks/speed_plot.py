"""How the times of benchmarks/speed.py grow, drawn as small log-log panels with fitted exponents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TITLES = {
    "N": "confidence, N classes\n(K = 20, M = 1,000)",
    "M": "confidence, M samples\n(N = 50, K = 50)",
    "m": "search, m steps\n(N = 20, M = 1,000, T = 10)",
    "clients": "search, clients side by side\n(N = 20, m = 10, M = 1,000, T = 10)",
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
    from matplotlib import pyplot

    growth = {row["against"]: row for row in rows if row["section"] == "growth" and "sizes" in row}
    figure, panels = pyplot.subplots(1, len(TITLES), figsize=(12, 3), layout="constrained")
    for panel, (name, title) in zip(panels, TITLES.items(), strict=True):
        if name not in growth:
            continue
        row = growth[name]
        sizes, seconds = np.array(row["sizes"], dtype=float), np.array(row["seconds"])
        panel.loglog(sizes, seconds, "o", markersize=4)
        half = len(sizes) // 2
        fit = seconds[-1] * (sizes / sizes[-1]) ** row["exponent"]
        panel.loglog(sizes[half:], fit[half:], linewidth=1, label=f"∝ {name}^{row['exponent']:.2f}")
        panel.set(title=title, xlabel=name)
        panel.title.set_fontsize(9)
        panel.legend(fontsize=8)
    panels[0].set_ylabel("seconds")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
