"""The partition heat map of the paper's appendix (needs the extra ``rlu[plot]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlu_cli.core.types import IntArray
from rlu_cli.files.atomic import atomic_write


def plot_partition(table: IntArray, names: Sequence[str], path: Path) -> bool:
    """Draw who holds how many samples of which class; False where matplotlib is not installed.

    Parameters
    ----------
    table : shape (K, N), samples by client and class
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    clients, classes = table.shape
    figure = Figure(figsize=(2 + 0.45 * min(clients, 60), 1.5 + 0.3 * min(classes, 60)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shades = axes.imshow(table.T, cmap="Blues", aspect="auto")
    axes.set_xlabel("client")
    axes.set_xticks(range(0, clients, max(1, clients // 20)))
    if classes <= 40:
        axes.set_yticks(range(classes), names, parse_math=False)
    else:
        axes.set_ylabel("class")
    figure.colorbar(shades, label="samples")
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png", dpi=150, metadata={"Software": None})
    return True
