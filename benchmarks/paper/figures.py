"""The paper's figures: a drawing, and what is drawn as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import markdown, mean_sd
from benchmarks.paper.settings import DATASETS, Dataset, Plan
from benchmarks.paper.tables import by_round, network_label, training_accuracy
from benchmarks.rounds import Bench, Round, Rows, global_model
from rlu_cli.audit.archive_evaluation import UNIFORM
from rlu_cli.core.methods import METHODS
from rlu_cli.core.moments import model_statistics, softmax
from rlu_cli.images import parse_normalization
from rlu_cli.models import build_model, flatten_logits
from rlu_cli.simulation.data import FederatedData
from rlu_cli.simulation.run import complete_spec

Array = NDArray[np.float64]

AUX_SIZES = (5, 10, 50, 100)
HEATMAP_ALPHAS = (0.05, 0.5, 5.0)
SHOWN_LOGITS = ((1, 1), (5, 5), (9, 9), (1, 5), (1, 9), (5, 9))
"""(class n of the image, logit j) as in the paper's appendix."""

LOGIT_STAGES = (0, 100, 800)
"""Steps of central training."""

_BINS = 100
_LOGIT_SAMPLES = 5000


def progress(plan: Plan, bench: Bench, folder: Path) -> str:
    """iAcc of every method as the global model gets better; ten steps. The drawing has the seven best."""
    parts = []
    chosen = [
        DATASETS[name]
        for name in (("SVHN",) if "progress" in plan.scale.swapped else ("SVHN", "CIFAR-10", "CIFAR-100"))
    ]
    rounds = {
        dataset.name: [
            round_
            for steps in plan.scale.stages
            for round_ in plan.rounds(dataset, steps=10, lr=dataset.lr, pretraining=steps)
        ]
        for dataset in chosen
    }
    bench.measure(chain.from_iterable(rounds.values()))
    figure, axes = _figure(len(chosen))
    for dataset, axis in zip(chosen, axes, strict=True):
        rows = bench.measure(rounds[dataset.name])
        stages = by_round(rows, lambda round_: round_.pretraining.steps)
        accuracies = [training_accuracy(found) for _, found in stages]
        here = {row["method"] for row in rows}
        methods = [method for method in (*METHODS, UNIFORM) if method in here]
        lines = []
        for (steps, found), accuracy in zip(stages, accuracies, strict=True):
            scores = [mean_sd(row["iAcc"] for row in found if row["method"] == m) for m in methods]
            lines.append((str(int(steps)), f"{accuracy:.1%}", *scores))
        named = [m if m != UNIFORM else "uniform guess" for m in methods]
        parts.append(f"{network_label(plan, dataset, dataset.model)}; {_clients(rows)}:\n")
        parts.append(markdown(("training steps", "accuracy", *named), lines))
        places = range(len(stages))
        for method in ("rlu", "dimitrov", "llg+", "zlg+", "ilrg", "llbg", "ebi"):
            means = [np.mean([r["iAcc"] for r in found if r["method"] == method]) for _, found in stages]
            axis.plot(places, means, marker="o", label=method, linewidth=2.5 if method == "rlu" else 1.2)
        axis.plot(places, accuracies, "k--", marker=".", label="model accuracy")
        axis.set_xticks(places, [str(int(steps)) for steps, _ in stages])
        axis.set_xlabel("central training steps of the global model")
        axis.set_title(plan.label(dataset), fontsize=9)
        axis.set_ylim(0, 1.02)
    axes[0].set_ylabel("iAcc")
    axes[0].legend(fontsize=7)
    figure.savefig(folder / "progress.png", dpi=150, metadata={"Software": None})
    return "\n".join(parts)


def aux_size(plan: Plan, bench: Bench, folder: Path) -> str:
    """iAcc of rlu with 5, 10, 50 and 100 auxiliary images a class, on the same clients; ten steps."""
    names = ("SVHN", "CIFAR-100") if "progress" in plan.scale.swapped else tuple(DATASETS)
    stages = [(DATASETS[name], steps) for name in names for steps in (0, plan.scale.stages[-2])]
    rounds = {
        (dataset.name, steps): list(
            plan.rounds(
                dataset,
                steps=10,
                model=plan.model(dataset, "aux-size"),
                lr=dataset.lr,
                pretraining=steps,
                methods=("rlu",),
            )
        )
        for dataset, steps in stages
    }

    def of_size(size: int, plain: list[Round]) -> list[Round]:
        return [replace(r, audit_aux=size) for r in plain if size <= r.options.aux_per_class]

    bench.measure(r for plain in rounds.values() for size in AUX_SIZES for r in of_size(size, plain))
    lines, curves = [], {}
    for dataset, steps in stages:
        plain = rounds[dataset.name, steps]
        by_size = {
            size: [row for row in bench.measure(of_size(size, plain)) if row["method"] == "rlu"]
            for size in AUX_SIZES
            if of_size(size, plain)
        }
        accuracy = training_accuracy(by_size[AUX_SIZES[0]])
        stage = "untrained" if not steps else f"{accuracy:.0%} accurate"
        label = f"{network_label(plan, dataset, plan.model(dataset, 'aux-size'))}, {stage}"
        scores = [mean_sd(r["iAcc"] for r in by_size[size]) if size in by_size else "" for size in AUX_SIZES]
        lines.append((label, _clients(by_size[AUX_SIZES[0]]), *scores))
        curves[label] = {size: [r["iAcc"] for r in found] for size, found in by_size.items()}
    figure, (axis,) = _figure(1)
    for label, curve in curves.items():
        means = [np.mean(values) for values in curve.values()]
        errors = [np.std(values) / np.sqrt(len(values)) for values in curve.values()]
        axis.errorbar(list(curve), means, errors, marker="o", capsize=3, label=label)
    axis.set_xscale("log")
    axis.set_xticks(AUX_SIZES, [str(size) for size in AUX_SIZES])
    axis.set_xlabel("auxiliary images a class")
    axis.set_ylabel("iAcc of rlu (bars: standard error)")
    axis.legend(fontsize=6)
    figure.savefig(folder / "aux_size.png", dpi=150, metadata={"Software": None})
    return markdown(("model", "clients", *(str(size) for size in AUX_SIZES)), lines)


def logits(plan: Plan, bench: Bench, folder: Path) -> str:
    """Assumption 3.1: how the logits of each class are distributed, and what its failure costs.

    D is the Kolmogorov-Smirnov distance of one logit of one class from the Gaussian of the same mean and
    variance; the last column is the total variation between the erroneous confidence of the Gaussian and
    the mean softmax itself, averaged over classes. One model of seed 0, whose every pair of class and logit
    counts.
    """
    chosen = [
        DATASETS[name] for name in (("SVHN",) if "progress" in plan.scale.swapped else ("SVHN", "CIFAR-10"))
    ]
    lines = []
    for dataset in chosen:
        figure, grid = _grid(len(LOGIT_STAGES), len(SHOWN_LOGITS))
        for stage, row in zip(LOGIT_STAGES, grid, strict=True):
            round_ = next(plan.rounds(dataset, steps=1, pretraining=stage))
            found, labels, accuracy = _all_logits(bench, round_)
            for (n, j), axis in zip(SHOWN_LOGITS, row, strict=True):
                values = found[labels == n, j]
                axis.hist(values, bins=_BINS, color="tab:blue")
                axis.set_title(f"n={n}, j={j}, μ={values.mean():.2f}", fontsize=7)
                axis.tick_params(labelsize=5)
            row[0].set_ylabel(f"accuracy {accuracy:.0%}", fontsize=7)
            lines.append((plan.label(dataset), f"{accuracy:.0%}", *_normality(found, labels)))
        figure.savefig(folder / f"logits_{_slug(dataset)}.png", dpi=150, metadata={"Software": None})
    columns = (
        "data",
        "accuracy",
        "D, median",
        "D, 95 %",
        "skewness",
        "excess kurtosis",
        "S: Gaussian − actual",
    )
    return markdown(columns, lines)


def partitions(plan: Plan, bench: Bench, folder: Path) -> str:
    """Who holds how much of which class, at three α.

    One partition each, of seed 0; mean ± standard deviation over its clients.
    """
    lines = []
    for name in ("CIFAR-10", "CIFAR-100"):
        dataset = DATASETS[name]
        figure, axes = _figure(len(HEATMAP_ALPHAS))
        for alpha, axis in zip(HEATMAP_ALPHAS, axes, strict=True):
            round_ = next(plan.rounds(dataset, steps=1, alpha=alpha))
            table = _federated(bench, round_).partition_table()  # (K, N)
            axis.imshow(table.T, cmap="Blues", aspect="auto", interpolation="nearest")
            axis.set_title(f"α = {alpha}", fontsize=9)
            axis.set_xlabel("client")
            share = table.max(axis=1) / np.maximum(table.sum(axis=1), 1)
            held = (table >= 0.01 * table.sum(axis=0)).sum(axis=1)
            lines.append((plan.label(dataset), str(alpha), mean_sd(held), mean_sd(share)))
        axes[0].set_ylabel("class")
        figure.suptitle(plan.label(dataset), fontsize=9)
        figure.savefig(folder / f"partitions_{_slug(dataset)}.png", dpi=150, metadata={"Software": None})
    columns = ("data", "α", "classes a client holds 1 % or more of", "share of its largest class")
    return markdown(columns, lines)


FIGURES: dict[str, Callable[[Plan, Bench, Path], str]] = {
    "progress": progress,
    "aux-size": aux_size,
    "logits": logits,
    "partitions": partitions,
}


def _federated(bench: Bench, round_: Round) -> FederatedData:
    normalization = parse_normalization(round_.normalize)
    images = bench.images(round_.data)
    return FederatedData(images, normalization, round_.options, seed=round_.seed, device=torch.device("cpu"))


def _all_logits(bench: Bench, round_: Round) -> tuple[Array, NDArray[np.int64], float]:
    """Logits (M, N) and labels (M,) of images that the model may have been trained on, and its accuracy.

    BatchNorm layers use batch statistics, as in training.
    """
    data = _federated(bench, round_)
    rng = np.random.default_rng(round_.seed)
    pool = np.concatenate(data.shares)
    rows = rng.permutation(pool)[:_LOGIT_SAMPLES]
    with torch.random.fork_rng():
        torch.manual_seed(round_.seed)
        model = build_model(complete_spec(round_.arch, data), allow_user_code=False)
    start = global_model(round_, bench.images, bench.device)
    if start is not None:
        model.load_state_dict(dict(start))
    model.train()
    with torch.inference_mode():
        parts = [
            flatten_logits(model(data.batch(part)[0])) for part in np.array_split(rows, len(rows) // 250)
        ]
    found = torch.cat(parts).double().numpy()
    labels = data.labels[rows]
    return found, labels, float(np.mean(found.argmax(axis=1) == labels))


def _normality(found: Array, labels: NDArray[np.int64]) -> tuple[str, ...]:
    from scipy import stats

    N = found.shape[1]
    distances, skews, kurtoses = [], [], []
    for n in range(N):
        own = found[labels == n]
        z = (own - own.mean(axis=0)) / own.std(axis=0, ddof=1)
        distances += [stats.kstest(z[:, j], "norm").statistic for j in range(N)]
        skews += list(np.abs(stats.skew(own)))
        kurtoses += list(stats.kurtosis(own))
    gaussian = model_statistics(found, np.ones((len(found), 1)), labels, N).confidence
    actual = np.stack([softmax(found[labels == n]).mean(axis=0) for n in range(N)])
    apart = 0.5 * np.abs(gaussian - actual).sum(axis=1).mean()
    return (
        f"{np.median(distances):.3f}",
        f"{np.quantile(distances, 0.95):.3f}",
        f"{np.median(skews):.2f}",
        f"{np.median(kurtoses):.2f}",
        f"{apart:.4f}",
    )


def _figure(panels: int) -> tuple[Any, Sequence[Any]]:
    """A drawing that needs no display, and its panels side by side."""
    figure, grid = _grid(1, panels, width=5.0, height=3.6)
    return figure, grid[0]


def _grid(rows: int, columns: int, *, width: float = 2.0, height: float = 1.6) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _clients(rows: Rows) -> str:
    found = {(row["round"].seed, row["client"]) for row in rows}
    return f"{len(found)} clients of {len({seed for seed, _ in found})} seeds"


def _slug(dataset: Dataset) -> str:
    return dataset.name.lower().replace("-", "")
