"""Work shared out to one thread a core, each computing by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def for_each(work: Callable[[T], None], items: Sequence[T], *, most: int | None = None) -> None:
    """``work(item)`` for all items, in any order, on as many threads as torch may use.

    Parameters
    ----------
    most : items at a time, where they take much memory; fewer than threads share them all

    torch's own threads split every operation and wait for each other after it, which on operations of a
    tenth of a millisecond costs more than it gives, and far more where the machine has other work. Here
    each thread does whole items with single-threaded operations: bits don't depend on the thread count, as
    long as ``most`` is no smaller.
    """
    threads = torch.get_num_threads()
    workers = min(threads, most or threads)
    if workers == 1 < threads:
        for item in items:
            work(item)
        return
    with one_thread():
        if min(workers, len(items)) <= 1:
            for item in items:
                work(item)
            return
        share = (threads // workers,)
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=share) as pool:
            for _ in pool.map(work, items):
                pass  # raises what the work raised


@contextmanager
def one_thread() -> Iterator[None]:
    """torch does not split operations in here, so their bits don't depend on the thread count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
