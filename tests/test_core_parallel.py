"""Work on several threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rlu_cli.core.parallel import for_each


@pytest.mark.parametrize(
    ("threads", "most", "at_once", "each"),
    [(4, None, 4, 1), (4, 9, 4, 1), (4, 2, 2, 2), (4, 1, 1, 4), (1, 3, 1, 1)],
)
def test_no_more_at_a_time_than_asked_for(
    torch_threads: None, threads: int, most: int | None, at_once: int, each: int
) -> None:
    """Fewer than threads share them."""
    torch.set_num_threads(threads)
    lock, running, largest, seen, done = threading.Lock(), 0, 0, set(), []

    def work(item: int) -> None:
        nonlocal running, largest
        with lock:
            running += 1
            largest = max(largest, running)
        seen.add(torch.get_num_threads())
        time.sleep(0.02)
        with lock:
            running -= 1
            done.append(item)

    for_each(work, range(12), most=most)
    assert sorted(done) == list(range(12))
    assert largest == at_once
    assert seen == {each}
    assert torch.get_num_threads() == threads


def test_an_error_is_raised() -> None:
    def work(item: int) -> None:
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        for_each(work, range(3), most=2)
