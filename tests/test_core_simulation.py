"""Partitions and local training with known labels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.types import LocalTraining
from rlu_cli.simulation.client import local_training, step_indices
from rlu_cli.simulation.partition import dirichlet_partition


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=200),
    st.integers(1, 12),
    st.floats(0.01, 100),
    st.integers(0, 1000),
)
def test_every_sample_goes_to_exactly_one_client(
    labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    shares = dirichlet_partition(np.array(labels), clients, alpha, seed=seed)
    assert len(shares) == clients
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    assert all(share.dtype == np.int64 and np.all(np.diff(share) > 0) for share in shares)


def test_classes_are_shared_out_in_dirichlet_proportions() -> None:
    """N_k^(j) = p_k^(j) N^(j), with p^(j) the draws of the seed's own generator."""
    labels = np.repeat(np.arange(4), [100, 50, 80, 7])
    shares = dirichlet_partition(labels, 5, 0.5, seed=3)
    rng = np.random.default_rng(3)
    for label in range(4):
        members = rng.permutation(np.flatnonzero(labels == label))
        expected = round_to_total(rng.dirichlet(np.full(5, 0.5)), len(members))
        assert [int(np.sum(labels[share] == label)) for share in shares] == expected.tolist()


def test_alpha_sets_the_skew() -> None:
    labels = np.repeat(np.arange(10), 200)

    def skew(alpha: float) -> float:
        counts = np.stack(
            [
                np.bincount(labels[s], minlength=10)
                for seed in range(5)
                for s in dirichlet_partition(labels, 10, alpha, seed=seed)
            ]
        )
        return float(np.std(counts))

    # The spread of a symmetric Dirichlet share of N^(j) is N^(j) √((K − 1)/(K² (Kα + 1))).
    for alpha in (0.1, 1.0, 100.0):
        expected = 200 * np.sqrt(9 / (100 * (10 * alpha + 1)))
        assert skew(alpha) == pytest.approx(expected, rel=0.2)


def test_partition_follows_the_seed() -> None:
    labels = np.repeat(np.arange(5), 40)
    first, again, other = (dirichlet_partition(labels, 4, 0.5, seed=seed) for seed in (1, 1, 2))
    assert [s.tolist() for s in first] == [s.tolist() for s in again]
    assert [s.tolist() for s in first] != [s.tolist() for s in other]


@pytest.mark.parametrize(("clients", "alpha"), [(0, 0.5), (3, 0.0), (3, -1.0), (3, float("nan"))])
def test_impossible_partitions_are_refused(clients: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        dirichlet_partition(np.arange(5), clients, alpha, seed=0)


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 40), st.integers(0, 1000))
def test_steps_see_full_batches_of_reshuffled_passes(size: int, steps: int, batch: int, seed: int) -> None:
    indices = 100 + 3 * np.arange(size)
    batches = list(step_indices(indices, steps, batch, rng=np.random.default_rng(seed)))
    assert [len(b) for b in batches] == [batch] * steps
    seen = np.concatenate(batches)
    for first in range(0, len(seen), size):  # each pass holds every sample once, the last one at most once
        one_pass = seen[first : first + size]
        assert len(set(one_pass.tolist())) == len(one_pass)
        assert set(one_pass.tolist()) <= set(indices.tolist())


def test_an_empty_client_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        next(step_indices(np.empty(0, dtype=np.int64), 1, 4, rng=np.random.default_rng(0)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(5, 2, 2, 2, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(6, 5, 0.1),
        LocalTraining(6, 5, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        LocalTraining(6, 5, 0.1, momentum=0.9, dampening=0.3),
    ],
    ids=["sgd", "nesterov and decay", "dampening"],
)
def test_local_training_is_a_plain_torch_loop(training: LocalTraining) -> None:
    ours, theirs = make_model(), make_model()
    local_training(ours, batches(6), training)
    optimizer = torch.optim.SGD(
        theirs.parameters(),
        lr=0.1,
        momentum=training.momentum,
        dampening=training.dampening,
        nesterov=training.nesterov,
        weight_decay=training.weight_decay,
    )
    for images, labels in batches(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(images), labels).backward()
        optimizer.step()
    for name, value in state(theirs).items():
        torch.testing.assert_close(state(ours)[name], value, rtol=0, atol=0)


def test_prox_constant_and_schedule_are_the_written_update() -> None:
    """θ ← θ − η_τ (∇L(θ) + λ (θ − θ_0) + k), spelt out."""
    rates = (0.1, 0.05, 0.02, 0.2)
    ours, theirs = make_model(), make_model()
    start = state(theirs)
    generator = torch.Generator().manual_seed(2)
    constant = {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in start.items()}
    local_training(ours, batches(4), LocalTraining(4, 5, rates, prox=0.7, scheme="feddyn"), constant=constant)
    for rate, (images, labels) in zip(rates, batches(4), strict=True):
        theirs.zero_grad()
        nn.functional.cross_entropy(theirs(images), labels).backward()
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                assert p.grad is not None
                p -= rate * (p.grad + 0.7 * (p - start[name]) + constant[name])
    for name, value in state(theirs).items():
        torch.testing.assert_close(state(ours)[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, start[name])


def test_training_mode_is_on() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    local_training(model, batches(2), LocalTraining(2, 5, 0.1))
    assert model.training
    assert int(model.state_dict()["1.num_batches_tracked"]) == 2


@pytest.mark.parametrize("given_steps", [2, 4])
def test_too_few_or_too_many_batches_are_an_error(given_steps: int) -> None:
    with pytest.raises(ValueError, match="zip"):
        local_training(make_model(), batches(given_steps), LocalTraining(3, 5, 0.1))
