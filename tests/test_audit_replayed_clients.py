"""Clients made up by training: on what, for how long, and the same on any number of threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import AUX, SAMPLES
from torch import nn

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.options import RunOptions
from rlu_cli.audit.replay import Replay
from rlu_cli.audit.replayed_clients import ReplayedClients, _batches, _looked_at
from rlu_cli.core.client_views import ReplayedClient, ReplayPlan
from rlu_cli.core.progress import ignore
from rlu_cli.core.types import Clipping, Compression, LocalTraining, Treatment
from rlu_cli.models import LeNet5
from rlu_cli.simulation.defences import Defence

FIVE = LocalTraining(5, 8, 0.05)
EPOCHS = LocalTraining(8, 8, 0.05, total=60, distinct=30)
COUNTS = np.array([10, 0, 3, 0, 7, 0, 0, 20, 0, 0])


@pytest.fixture(scope="module")
def base() -> Replay:
    folder = SAMPLES / "trained_m10"
    auditor = Auditor(folder / "global.safetensors", aux=AUX, run=RunOptions())
    replay = auditor.source.replay(auditor.reference, FIVE, None)
    assert replay is not None
    return replay


def made(clients: ReplayedClients, *plans: ReplayPlan) -> list[ReplayedClient]:
    found = clients(list(plans), ignore)
    assert all(client is not None for client in found)
    return [client for client in found if client is not None]


def numbers(client: ReplayedClient) -> np.ndarray:
    parts = (
        client.change.weight,
        client.change.bias,
        client.start.logits,
        client.end.logits,
        client.end.confidence,
    )
    return np.concatenate([np.ravel(part) for part in parts])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("training", "counts"),
    [
        (FIVE, COUNTS),
        (EPOCHS, COUNTS // 2 + (np.arange(10) < 10)),
        (LocalTraining(9, 8, 0.05, distinct=40), COUNTS),
    ],
)
def test_the_proportions_are_of_the_samples_seen(
    base: Replay, training: LocalTraining, counts: np.ndarray
) -> None:
    (client,) = made(ReplayedClients(base), ReplayPlan(counts, training, 0))
    assert client.proportions.sum() == pytest.approx(1)
    np.testing.assert_array_equal(client.proportions > 0, counts > 0)
    if training is not FIVE and training.epochs is None:  # begins a second pass, and ends amid it
        assert np.abs(client.proportions - counts / counts.sum()).max() < 0.15
    else:
        np.testing.assert_allclose(client.proportions, counts / counts.sum())


@pytest.mark.parametrize("half", [None, 0, 1])
def test_it_trains_as_torch_does_from_the_global_model(base: Replay, half: int | None) -> None:
    training = LocalTraining(1, 40, 0.05)
    clients, plan = ReplayedClients(base), ReplayPlan(COUNTS, training, 0, half)
    (client,) = made(clients, plan)
    share, held_out = clients._share(plan, np.random.default_rng((base.seed, 2, 0)))
    labels = base.images.labels.numpy()
    np.testing.assert_array_equal(np.bincount(labels[share], minlength=10), COUNTS)
    assert not set(share) & set(held_out)
    model = LeNet5()
    model.load_state_dict(dict(base.start))
    inputs = base.normalization.apply(base.images.pixels)
    before = model(inputs[held_out]).detach().numpy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    nn.functional.cross_entropy(model(inputs[share]), base.images.labels[share]).backward()
    optimizer.step()
    change = model.fc3.bias.detach() - base.start["fc3.bias"]
    np.testing.assert_allclose(client.change.bias, change, atol=1e-6)
    after = model(inputs[held_out]).detach().numpy()
    for n in range(10):
        of_class = labels[held_out] == n
        np.testing.assert_allclose(client.start.logits[n], before[of_class].mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(client.end.logits[n], after[of_class].mean(axis=0), atol=1e-4)


def test_clients_of_both_halves_share_no_sample(base: Replay) -> None:
    labels, rng = base.images.labels.numpy(), np.random.default_rng(0)
    drawn = [ReplayedClients(base)._share(ReplayPlan(20 * COUNTS, FIVE, 0, half), rng) for half in (0, 1)]
    (first, beside), (second, others) = drawn
    assert not set(first) & set(second)
    assert set(first) <= set(others) and set(second) <= set(beside)
    np.testing.assert_array_equal(np.sort(np.concatenate((beside, others))), np.arange(len(labels)))
    per_class = np.bincount(labels[beside]), np.bincount(labels[others])
    assert np.abs(per_class[0] - per_class[1]).max() <= 1


def sent(
    base: Replay, clipping: Clipping | None, draw: int = 0, **treatment: Any
) -> tuple[torch.Tensor, float]:
    """A replayed client's whole update as it is read, and the noise that is known to lie on it."""
    clients = ReplayedClients(base, Treatment(clipping=clipping, **treatment))
    plan = ReplayPlan(COUNTS, FIVE, draw)
    rng = np.random.default_rng((base.seed, 2, draw))
    share, _ = clients._share(plan, rng)
    (end,) = base.states(_batches(share, FIVE, rng), at=[5])
    state, noise = clients._sent(end, draw)
    assert set(state) == set(end)
    return torch.cat([(state[name] - base.start[name]).flatten() for name in state]).double(), noise


def test_replays_are_clipped_as_the_client_was(base: Replay) -> None:
    whole, _ = sent(base, None)
    bound = 0.3 * float(whole.norm())
    clipped, noise = sent(base, Clipping(bound))
    assert noise == 0.0
    assert float(clipped.norm()) == pytest.approx(bound, rel=1e-4)
    torch.testing.assert_close(clipped, 0.3 * whole, atol=1e-7, rtol=1e-3)
    free, _ = sent(base, Clipping(2 * float(whole.norm())))
    torch.testing.assert_close(free, whole, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "as_sent"),
    [
        (Compression(0.1), Defence(top_k=0.1)),
        (Compression(levels=8), Defence(quantize=3)),
        (Compression(0.3, levels=4), Defence(top_k=0.3, quantize=2)),
    ],
)
def test_replays_lose_what_the_client_s_update_lost(base: Replay, how: Compression, as_sent: Defence) -> None:
    whole, _ = sent(base, None)
    found, noise = sent(base, None, compression=how)
    expected = as_sent.apply(whole, torch.Generator())
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-3)
    step = float(whole.max() - whole.min()) / (how.levels - 1) if how.levels else 0.0
    assert noise == pytest.approx(step / math.sqrt(12) if how.share == 1 else 0.0, rel=1e-4)
    halved, _ = sent(base, Clipping(0.5 * float(whole.norm())), compression=how)
    torch.testing.assert_close(halved, expected / 2, atol=1e-6, rtol=1e-2)


def test_layers_left_alone_lose_nothing(base: Replay) -> None:
    """A grid from the smallest to the largest number needn't have a value 0: they moved all the same."""
    names = [name for name, _ in base.network.model.named_parameters() if not name.startswith("fc3")]
    frozen = replace(base, frozen=tuple(names))
    clients = ReplayedClients(frozen, Treatment(compression=Compression(levels=4)))
    end = {name: v + 0.01 * torch.randn(v.shape) * (name not in names) for name, v in base.start.items()}
    state, _ = clients._sent(end, 0)
    for name, value in state.items():
        assert torch.equal(value, base.start[name]) == (name in names)


@pytest.mark.parametrize("how", [Compression(0.1), Compression(levels=4), Compression(0.1, levels=4)])
def test_training_that_diverges_isnt_made_finite_by_compression(base: Replay, how: Compression) -> None:
    clients = ReplayedClients(base, Treatment(compression=how))
    assert clients([ReplayPlan(COUNTS, LocalTraining(20, 2, 1e4), 0)], ignore) == [None]


def test_noise_that_is_known_stays_what_is_known_of_it(base: Replay) -> None:
    _, noise = sent(base, None, noise_std=0.01, compression=Compression(levels=4))
    assert noise == 0.01


def test_noise_comes_after_clipping_and_grows_with_what_is_divided_by(base: Replay) -> None:
    whole, _ = sent(base, None)
    bound = 0.3 * float(whole.norm())
    noisy, noise = sent(base, Clipping(bound, noise_std=1e-3))
    rest = noisy - 0.3 * whole
    assert noise == 1e-3
    assert float(rest.std()) == pytest.approx(1e-3, rel=0.02)
    again, grown = sent(base, Clipping(bound, noise_std=1e-3, deviation=0.1))
    factor = 1e-3 / grown
    torch.testing.assert_close(again, noisy / factor, atol=1e-5, rtol=1e-3)


def test_estimated_factors_miss_as_far_as_they_are_said_to(base: Replay) -> None:
    bound = 0.3 * float(sent(base, None)[0].norm())
    errors = []
    for draw in range(60):
        whole, read = (sent(base, kind, draw)[0] for kind in (None, Clipping(bound, deviation=0.1)))
        errors.append(float(torch.log((read @ read).sqrt() / (whole @ whole).sqrt())))
    assert abs(np.mean(errors)) < 0.05
    assert 0.07 < np.std(errors) < 0.13
    enlarged = sent(base, Clipping(10.0, deviation=0.5))[0]  # not clipped at all: never made smaller
    assert float(enlarged.norm()) >= 0.999 * float(sent(base, None)[0].norm())


def test_of_a_size_that_nobody_explains_estimates_miss_to_both_sides(base: Replay) -> None:
    factors = []
    for draw in range(60):
        whole, (read, noise) = sent(base, None, draw)[0], sent(base, Clipping(None, 1e-4, 0.1), draw)
        factors.append(1e-4 / noise)
        rest = read - whole / factors[-1]
        assert float(rest.std()) == pytest.approx(noise, rel=0.03)
    assert abs(np.mean(np.log(factors))) < 0.05 and 0.07 < np.std(np.log(factors)) < 0.13


@pytest.mark.parametrize(
    ("auxiliary", "held_out"), [(10, 4), (20, 8), (30, 10), (50, 10), (100, 20), (300, 60)]
)
def test_most_samples_are_trained_on_and_enough_looked_at(auxiliary: int, held_out: int) -> None:
    assert _looked_at(auxiliary) == held_out


def test_bits_dont_depend_on_threads(base: Replay) -> None:
    plans = [ReplayPlan(np.roll(COUNTS, draw), FIVE, draw) for draw in range(6)]
    threads, found = torch.get_num_threads(), []
    state = torch.get_rng_state()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append([numbers(client) for client in made(ReplayedClients(base), *plans)])
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(found[0], found[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert len({row.tobytes() for row in found[0]}) == 6


def test_a_plan_is_the_same_alone_and_among_others(base: Replay) -> None:
    clients = ReplayedClients(base)
    plans = [ReplayPlan(COUNTS, FIVE, draw) for draw in range(3)]
    together = made(clients, *plans)
    (alone,) = made(clients, plans[1])
    np.testing.assert_array_equal(numbers(alone), numbers(together[1]))


class Drawing(nn.Module):
    """The identity, which takes a random number on its way."""

    def __init__(self, draw: Callable[[], object]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.draw()
        return x


@pytest.mark.parametrize(
    ("last", "side_by_side"),
    [
        (nn.Identity(), True),
        (nn.BatchNorm1d(10), True),
        (nn.Dropout(0.5), False),
        (Drawing(lambda: torch.rand(1)), False),
        (Drawing(lambda: random.random()), False),
        (Drawing(lambda: np.random.random()), False),
        (Drawing(lambda: np.random.standard_normal()), False),
    ],
)
def test_networks_that_draw_random_numbers_are_replayed_one_by_one(
    base: Replay, last: nn.Module, side_by_side: bool
) -> None:
    network = replace(base.network, model=nn.Sequential(base.network.model, last))
    state = torch.get_rng_state()
    assert ReplayedClients(replace(base, network=network))._side_by_side == side_by_side
    assert torch.equal(torch.get_rng_state(), state)
    assert not ReplayedClients(replace(base, network=network, device="cuda"))._side_by_side


def test_as_many_at_once_as_fit_into_memory(base: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = ReplayedClients(base)
    plans = [ReplayPlan(COUNTS, FIVE, draw) for draw in range(4)]
    small, large = (clients._at_once([ReplayPlan(COUNTS, LocalTraining(5, B, 0.05), 0)]) for B in (100, 1000))
    assert small / large == pytest.approx(10, rel=0.1)
    free = [numbers(client) for client in made(clients, *plans)]
    monkeypatch.setattr("rlu_cli.audit.replayed_clients._MEMORY", 1)
    assert clients._at_once(plans) == 1
    np.testing.assert_allclose(
        [numbers(client) for client in made(clients, *plans)], free, rtol=1e-3, atol=1e-6
    )


def test_known_noise_is_added(base: Replay) -> None:
    plans = [ReplayPlan(COUNTS, FIVE, draw) for draw in range(4)]
    plain, noisy = made(ReplayedClients(base), *plans), made(ReplayedClients(base, Treatment(0.01)), *plans)
    added = [n.change.weight - p.change.weight for n, p in zip(noisy, plain, strict=True)]
    assert np.std(added) == pytest.approx(0.01, rel=0.1)
    assert not np.array_equal(added[0], added[1])


def test_training_that_diverges_is_none(base: Replay) -> None:
    plans = [ReplayPlan(COUNTS, LocalTraining(20, 2, 1e4), 0), ReplayPlan(COUNTS, FIVE, 1)]
    found = ReplayedClients(base)(plans, ignore)
    assert found[0] is None
    assert found[1] is not None


def test_progress_ends_with_all(base: Replay) -> None:
    told: list[tuple[int, int]] = []
    plans = [ReplayPlan(COUNTS, FIVE, draw) for draw in range(3)]
    ReplayedClients(base)(plans, lambda done, total: told.append((done, total)))
    assert sorted(told) == [(1, 3), (2, 3), (3, 3)]


def test_the_cost_grows_with_the_samples(base: Replay) -> None:
    clients = ReplayedClients(base)
    more = LocalTraining(10, 8, 0.05)
    looked_at = clients.cost(FIVE) - (clients.cost(more) - clients.cost(FIVE))
    assert clients.cost(more) > clients.cost(FIVE) > looked_at > 0
