"""What one more client costs in `rlu recover --local a --local b …`, in time and in memory.

    OMP_NUM_THREADS=1 python benchmarks/many_locals.py          (some 3 minutes)

The processor time of one more client is that of a call with many clients less that of a call with one, over
the difference. Beside it, in the same process and in turn: what one would write by hand. For one step that
loads both files with safetensors, subtracts all tensors and solves with SciPy's nnls; it neither hashes nor
checks anything. For several steps it is a forward pass over the same images and the same Monte Carlo. Peak
memory is that of a process of its own for each number of clients (on Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from common import PEAK, machine, markdown, write_ndjson
from PIL import Image
from safetensors.torch import load_file
from scipy.optimize import nnls
from torch import Tensor

from rlu_cli.audit.statistics_file import read_statistics
from rlu_cli.cli.app import run
from rlu_cli.core.confidence import coefficient_matrix, monte_carlo_confidence
from rlu_cli.core.moments import logit_moments
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.images import load_images, parse_normalization, scan_class_folder
from rlu_cli.models import LeNet5, ResNet50

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "sample_data"
RESULTS = Path(__file__).parent / "results" / "many_locals.ndjson"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (lenet_one_step, resnet_one_step, lenet_ten_steps):
            rows.append(case(Path(folder), arguments.clients, arguments.repeats))
        peaks = memory(Path(folder))
    write_ndjson(RESULTS, [*rows, *peaks])
    print(f"\n{machine()}, {torch.get_num_threads()} thread(s)\n")
    columns = ("round", "one more client, ms", "by hand, ms", "ratio")
    print(
        markdown(
            columns,
            [
                (
                    str(row["round"]),
                    f"{row['rlu_ms']:.1f}",
                    f"{row['by_hand_ms']:.1f}",
                    f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})",
                )
                for row in rows
            ],
        )
    )
    print(
        markdown(("clients", "peak memory, MB"), [(str(p["clients"]), f"{p['peak_mb']:.0f}") for p in peaks])
    )


def lenet_one_step(folder: Path, clients: int, repeats: int) -> dict[str, object]:
    """A LeNet-5 on 10 classes, m = 1."""
    reference = SAMPLES / "untrained_m1" / "global.safetensors"
    locals_ = [clone(SAMPLES / "untrained_m1" / "client_0.safetensors", folder, n) for n in range(clients)]
    stats = statistics_file(folder / "lenet.safetensors", ["--global", reference, "--aux", SAMPLES / "aux"])
    flags = ["--global", reference, "--stats", stats]
    return compare("LeNet-5, 10 classes, m = 1", flags, locals_, by_hand(reference, stats, "fc3"), repeats)


def resnet_one_step(folder: Path, clients: int, repeats: int) -> dict[str, object]:
    """A ResNet-50 on 100 classes, m = 1: files of 95 MB, few enough for any disk."""
    torch.manual_seed(0)
    state = ResNet50(num_classes=100, image_size=32).state_dict()
    about = {"fl.arch": "resnet50:num_classes=100,image_size=32", "fl.normalize": "half"}
    reference = folder / "resnet.safetensors"
    save_safetensors(reference, state, about)
    first = folder / "resnet_client.safetensors"
    moved = {
        **state,
        "fc.bias": state["fc.bias"] + 1e-3 * centred(100),
        "fc.weight": state["fc.weight"] * 1.001,
    }
    save_safetensors(first, moved, {"fl.lr": "0.01", "fl.batch_size": "64", "fl.steps": "1"})
    locals_ = [clone(first, folder, n) for n in range(min(clients, 8))]
    aux = folder / "aux"
    rng = np.random.default_rng(0)
    for name in range(100):
        (aux / f"{name:03d}").mkdir(parents=True)
        for number in range(2):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(aux / f"{name:03d}" / f"{number}.png")
    flags = ["--global", reference, "--aux", aux, "--samples", "1000"]
    stats = statistics_file(folder / "resnet_stats.safetensors", flags)
    flags = ["--global", reference, "--stats", stats]
    return compare("ResNet-50, 100 classes, m = 1", flags, locals_, by_hand(reference, stats, "fc"), repeats)


def lenet_ten_steps(folder: Path, clients: int, repeats: int) -> dict[str, object]:
    """A LeNet-5 on 10 classes, m = 10: a pass over 300 images and a Monte Carlo for each client."""
    source = SAMPLES / "trained_m10"
    reference = source / "global.safetensors"
    locals_ = [clone(source / "client_0.safetensors", folder, n) for n in range(min(clients, 20))]
    flags = ["--global", reference, "--aux", SAMPLES / "aux"]
    images = load_images(scan_class_folder(SAMPLES / "aux"), channels=1, size=None)
    normalization = parse_normalization("mean=0.286;std=0.353")
    labels = images.labels.numpy()
    model = LeNet5().eval()

    def one(path: Path) -> None:
        model.load_state_dict(load_file(path))
        with torch.inference_mode():
            logits = model(normalization.apply(images.pixels)).double().numpy()
        monte_carlo_confidence(logit_moments(logits, labels, 10))

    return compare("LeNet-5, 10 classes, m = 10", flags, locals_, one, repeats)


def memory(folder: Path) -> list[dict[str, object]]:
    """Peak memory of whole processes."""
    sample = SAMPLES / "untrained_m1"
    start = ["recover", "--global", sample / "global.safetensors", "--aux", SAMPLES / "aux"]
    found: list[dict[str, object]] = []
    for clients in (1, 10, 100, 1000):
        locals_ = [clone(sample / "client_0.safetensors", folder, n % 100) for n in range(clients)]
        command = [sys.executable, "-c", PEAK, *start, *flags_of(locals_)]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        assert done.stdout.count("\n") >= clients
        found.append({"clients": clients, "peak_mb": int(done.stderr.split()[-1]) / 1024})
    return found


def compare(
    name: str, flags: Sequence[object], locals_: Sequence[Path], one: Callable[[Path], None], repeats: int
) -> dict[str, object]:
    """One more client by rlu and by hand, in turn; medians and the range of their ratio."""
    rlu, hand = [], []
    for _ in range(repeats + 1):  # the first warms up
        more = len(locals_) - 1
        rlu.append((recover(flags, locals_) - recover(flags, locals_[:1])) / more)
        start = time.process_time()
        for path in locals_:
            one(path)
        hand.append((time.process_time() - start) / len(locals_))
    ratios = [a / b for a, b in zip(rlu[1:], hand[1:], strict=True)]
    return {
        "round": name,
        "clients": len(locals_),
        "rlu_ms": 1e3 * statistics.median(rlu[1:]),
        "by_hand_ms": 1e3 * statistics.median(hand[1:]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def recover(flags: Sequence[object], locals_: Sequence[Path]) -> float:
    """Processor seconds of a call in this process."""
    printed = io.StringIO()
    start = time.process_time()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = run([str(word) for word in ("recover", *flags, "--method", "rlu", *flags_of(locals_))])
    spent = time.process_time() - start
    assert code == 0
    return spent


def by_hand(reference: Path, stats: Path, head: str) -> Callable[[Path], None]:
    """Load, subtract, solve: nothing is hashed, checked or printed."""
    A = coefficient_matrix(read_statistics(stats).statistics.confidence)
    before = load_file(reference)

    def one(path: Path) -> None:
        update = {name: tensor - before[name] for name, tensor in load_file(path).items()}
        u = update[f"{head}.bias"].double().numpy() / 0.01
        stacked = np.vstack((A, np.ones(len(A))))
        nnls(stacked, np.append(u, 1.0))

    return one


def statistics_file(path: Path, flags: Sequence[object]) -> Path:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert run([str(word) for word in ("estimate-logits", *flags, "-o", path)]) == 0
    return path


def clone(source: Path, folder: Path, number: int) -> Path:
    """A file of its own for each client: of a sample round, a mix of two clients' weights.

    Of others, with another bias.
    """
    path = folder / f"{source.parent.name}_{source.stem}_{number}.safetensors"
    if not path.exists():
        read = read_checkpoint(source)
        tensors: dict[str, Tensor] = dict(read.tensors)
        other = source.with_name("client_1.safetensors")
        if other.exists():
            share = (1 + number % 100) / 200
            tensors = {
                name: torch.lerp(tensors[name], value, share)
                for name, value in read_checkpoint(other).tensors.items()
            }
        else:
            noise = torch.randn(len(tensors["fc.bias"]), generator=torch.Generator().manual_seed(number))
            tensors["fc.bias"] = tensors["fc.bias"] + 1e-4 * (noise - noise.mean())
        save_safetensors(path, tensors, dict(read.metadata))
    return path


def centred(count: int) -> Tensor:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return noise - noise.mean()


def flags_of(locals_: Sequence[Path]) -> list[object]:
    return [word for path in locals_ for word in ("--local", path)]


if __name__ == "__main__":
    main()
