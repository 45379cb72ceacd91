"""What all tests share: options, marks that skip, and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples on every run and machine: a failure in CI is a failure here.
settings.register_profile("rlu", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run tests marked slow too (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; run with --run-slow"))
    on_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if on_cuda:
        import torch

        if not torch.cuda.is_available():
            for item in on_cuda:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The arrays here are small: more threads only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Puts the thread count back, for tests that change it."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
