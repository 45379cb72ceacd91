"""Work shared out to one thread a core, each computing by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def for_each(work: Callable[[T], None], items: Sequence[T]) -> None:
    """``work(item)`` for all items, in any order, on as many threads as torch may use.

    torch's own threads split every operation and wait for each other after it, which on operations of a
    tenth of a millisecond costs more than it gives, and far more where the machine has other work. Here
    each thread does whole items with single-threaded operations: bits don't depend on the thread count.
    """
    threads = torch.get_num_threads()
    with one_thread():
        if min(threads, len(items)) <= 1:
            for item in items:
                work(item)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
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
