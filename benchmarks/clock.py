"""Times that can be compared on a machine that has other work, and what the machine can do at best."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]

_MOST_CALLS = 2000
"""Products timed in a row: small ones on a GPU take microseconds to launch, however small they are."""


@dataclass(frozen=True)
class Clock:
    """Seconds of some work.

    device : on "cuda" the work is waited for
    kind : "wall", or "cpu" for the processor time of all threads: with one thread, and other processes on
        the machine, that is the time the work would take alone (but for the caches they share)
    """

    device: str = "cpu"
    kind: str = "wall"

    def seconds(self, work: Work) -> float:
        read = time.perf_counter if self.kind == "wall" else time.process_time
        self._wait()
        start = read()
        work()
        self._wait()
        return read() - start

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def interleaved(
        self, works: Sequence[Work], repeats: int, at_most: float = math.inf
    ) -> list[list[float]]:
        """Seconds of each work in turn, after one round that warms up.

        ``repeats`` times, or fewer, but at least once, where the rounds have taken ``at_most`` seconds; a
        first round that takes as long is the only one.
        """
        gc.collect()
        start = time.perf_counter()
        rounds: list[list[float]] = []
        while len(rounds) <= repeats:
            rounds.append([self.seconds(work) for work in works])
            if time.perf_counter() - start > at_most:
                break
        return [list(column) for column in zip(*(rounds[1:] or rounds), strict=True)]


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second, at the threads and the load of the measurement.

    products : floating-point operations of float32 matrix products
    exponentials : of float32
    bytes : read or written in copying
    upload : bytes from the host's memory to the device's; infinite where they are one
    """

    products: float
    exponentials: float
    bytes: float
    upload: float = math.inf

    def floor(
        self, *, products: float = 0.0, exponentials: float = 0.0, bytes_: float = 0.0, upload: float = 0.0
    ) -> float:
        """Seconds below which work with these counts can't go, one kind after the other."""
        on_device = products / self.products + exponentials / self.exponentials + bytes_ / self.bytes
        return on_device + upload / self.upload


class Probes:
    """Works whose times give the `Rates`, to be timed in turn with what they are the limit of.

    Products of a given shape, exponentials within the cache, copies out of it, uploads from ordinary memory.

    Parameters
    ----------
    shape : rows, inner size and columns of the products; by default what comes close to the best that the
        device does: 500 × 100 × 200 within a core's cache, or large squares on a GPU
    """

    def __init__(self, device: str, shape: tuple[int, int, int] | None = None) -> None:
        gpu = device.startswith("cuda")
        rows, inner, columns = shape or ((8192, 8192, 8192) if gpu else (500, 100, 200))
        A, B = torch.rand(rows, inner, device=device), torch.rand(inner, columns, device=device)
        product = torch.empty(rows, columns, device=device)
        few = torch.rand(2**22 if gpu else 2**16, device=device)
        many = torch.rand(2**28 if gpu else 2**24, device=device)
        powers, copy = torch.empty_like(few), torch.empty_like(many)
        amount = 2.0 * rows * inner * columns
        calls = min(_MOST_CALLS, max(1, round((1e12 if gpu else 2e9) / amount)))
        self.works: list[Work] = [
            lambda: [torch.mm(A, B, out=product) for _ in range(calls)],
            lambda: [torch.exp(few, out=powers) for _ in range(100)],
            lambda: [copy.copy_(many) for _ in range(2)],
        ]
        self._amounts = [calls * amount, 100 * len(few), 2 * 8.0 * len(many)]
        if gpu:
            host = torch.rand(2**24)
            self.works.append(lambda: host.to(device))
            self._amounts.append(4.0 * len(host))

    def rates(self, seconds: Sequence[float]) -> Rates:
        """From one round's times of the works."""
        return Rates(*(amount / s for amount, s in zip(self._amounts, seconds, strict=True)))


def median_and_range(values: Sequence[float], digits: int = 1) -> str:
    """``52.1 (50.3 to 55.0)``."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
