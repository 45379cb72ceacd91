"""What memory layout, batch size and half precision do to a forward pass of the built-in networks.

    python benchmarks/forward.py            (some 10 minutes on one core)

Seconds of computing on one thread, relative to the plain layout in batches of 16: medians of 3, in turn. The
deviation is the largest of the logits, in units of the largest logit. `rlu` uses channels-last for the
built-in networks, and on a CPU the batch size in the last column; autocast it doesn't use.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import machine, markdown
from torch import Tensor, nn

from rlu_cli.audit.probe import batch_for_memory
from rlu_cli.models import VGG16, LeNet5, ResNet32, ResNet50

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], int]] = {
    "LeNet-5, 28x28": (LeNet5, (1, 28, 28), 1024),
    "ResNet-32, 32x32": (ResNet32, (3, 32, 32), 64),
    "VGG-16, 32x32": (lambda: VGG16(image_size=32), (3, 32, 32), 64),
    "ResNet-50, 64x64": (lambda: ResNet50(num_classes=200, image_size=64), (3, 64, 64), 64),
    "ResNet-50 with a small stem, 64x64": (
        lambda: ResNet50(num_classes=200, image_size=64, stem="small"),
        (3, 64, 64),
        16,
    ),
}
SIZES = (4, 16, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--autocast", action="store_true", help="bfloat16 too: very slow on CPUs without it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = [
        "network",
        *(f"plain, {size}" for size in SIZES),
        *(f"channels-last, {size}" for size in SIZES),
    ]
    columns += [*(["bfloat16, 16"] if arguments.autocast else []), "deviation", "rlu's batch"]
    rows = []
    for name, (make, shape, count) in NETWORKS.items():
        rows.append(measure(name, make, torch.randn(count, *shape), arguments.repeats, arguments.autocast))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    print(f"\n{machine()}, 1 thread\n\n{markdown(columns, rows)}")


@torch.inference_mode()
def measure(
    name: str, make: Callable[[], nn.Module], images: Tensor, repeats: int, autocast: bool
) -> list[str]:
    """A row of the table."""
    torch.manual_seed(0)
    plain = make().eval()
    last = make().eval()
    last.load_state_dict(plain.state_dict())
    last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    variants: dict[str, Callable[[], object]] = {}
    for kind, model in (("plain", plain), ("last", last)):
        for size in SIZES:
            if size <= len(images):
                variants[f"{kind} {size}"] = lambda model=model, size=size: forward(model, images, size)
    if autocast:
        variants["half"] = lambda: forward(last, images, 16, autocast=True)
    spent: dict[str, list[float]] = {key: [] for key in variants}
    for _ in range(repeats):
        for key, run in variants.items():
            start = time.process_time()
            run()
            spent[key].append(time.process_time() - start)
    base = statistics.median(spent["plain 16"])
    keys = [f"{kind} {size}" for kind in ("plain", "last") for size in SIZES] + ["half"] * autocast
    times = [f"{statistics.median(spent[key]) / base:.2f}" if key in spent else "" for key in keys]
    few = images[:8]
    expected = plain(few)
    deviation = float((last(few) - expected).abs().max() / expected.abs().max())
    return [name, *times, f"{deviation:.0e}", str(batch_for_memory(plain, images[:1]))]


def forward(model: nn.Module, images: Tensor, size: int, *, autocast: bool = False) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for batch in torch.split(images, size):
            model(batch)


if __name__ == "__main__":
    main()
