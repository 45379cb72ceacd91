"""Replayed training against a literal loop by torch's own optimiser."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from methods_cases import known_round, untrained
from sklearn.datasets import load_digits
from torch import nn

from rlu_cli.audit.frozen import frozen_parameters
from rlu_cli.audit.network import Network
from rlu_cli.audit.replay import Replay, ReplayedUpdates, replay_nodes, with_training
from rlu_cli.core.residuals import residual_moments, residuals
from rlu_cli.core.schemes import impulse_response
from rlu_cli.core.types import LocalTraining
from rlu_cli.images import ImageSet, parse_normalization
from rlu_cli.models import find_head, parse_spec
from rlu_cli.simulation.vectors import snapshot

MIX = np.array([0.3, 0.0, 0.2, 0.1, 0.0, 0.05, 0.15, 0.0, 0.1, 0.1])

State = dict[str, torch.Tensor]


def network() -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    model.requires_grad_(False).eval()
    layer = find_head(model, torch.zeros(2, 1, 8, 8))
    return Network(model, parse_spec("lenet5"), layer, 1, (8, 8), matched=False, prefix="")


def digits(per_class: int = 12) -> ImageSet:
    x, y = load_digits(return_X_y=True)
    rows = np.concatenate([np.flatnonzero(y == n)[:per_class] for n in range(10)])
    pixels = torch.from_numpy((x[rows] * 15).reshape(-1, 1, 8, 8)).to(torch.uint8)
    return ImageSet(pixels, torch.from_numpy(y[rows]).long(), tuple(map(str, range(10))))


def replay(training: LocalTraining, end: State | None = None) -> Replay:
    net = network()
    start = snapshot(net.model)
    return Replay(
        net,
        digits(),
        parse_normalization("none"),
        start,
        end or start,
        training,
        "batch",
        "off",
        None,
        3,
        "cpu",
    )


def literal(found: Replay, training: LocalTraining) -> tuple[State, list[State]]:
    """The end and the states before each step of plain torch training on the replay's own batches."""
    model = network().model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=training.momentum)
    states = []
    for rows in found._batches(MIX):
        states.append(snapshot(model))
        optimizer.zero_grad()
        images = found.images.pixels[rows].float() / 255
        nn.functional.cross_entropy(model(images), found.images.labels[rows]).backward()
        optimizer.step()
    return snapshot(model), states


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_that_trained_on_the_same_batches_is_followed_exactly(momentum: float) -> None:
    training = LocalTraining(6, 10, 0.2, momentum=momentum)
    end, states = literal(replay(training), training)
    found = replay(training, end)(MIX)
    assert found is not None
    rho = impulse_response(training)
    model, images = network().model, digits()
    total = np.zeros((120, 10))
    for state, weight in zip(states, rho, strict=True):
        model.load_state_dict(state)
        with torch.no_grad():
            logits = model(images.pixels.float() / 255).numpy()
        total += weight * residuals(logits, images.labels.numpy())
    expected = residual_moments(total / rho.sum(), images.labels.numpy())
    np.testing.assert_allclose(found.mean, expected.mean, atol=2e-6)
    np.testing.assert_allclose(found.covariance(), expected.covariance(), atol=2e-6)


def test_distances_are_those_of_a_literal_training() -> None:
    training = LocalTraining(6, 10, 0.2)
    end, states = literal(replay(training), training)
    length = sum(float(((end[name] - states[0][name]) ** 2).sum()) for name in end) ** 0.5
    found = replay(training, end)
    assert found.travelled() == pytest.approx(length, rel=1e-5)
    assert found.distance(MIX) == pytest.approx(length, rel=1e-5)
    assert found.distance(MIX, draw=1) != pytest.approx(length, rel=1e-5)
    assert not np.isfinite(replay(LocalTraining(30, 10, 1e20)).distance(MIX))


def test_noise_is_no_part_of_the_distance() -> None:
    """A closed form: squares add up, and what noise leaves unknown is its own standard deviation."""
    training = LocalTraining(6, 10, 0.2)
    end, _ = literal(replay(training), training)
    length, _ = known(replay(training, end).travelled_without_noise(0.0))
    sigma, squares, deviations = 0.03, [], []
    for seed in range(40):
        drawn = torch.Generator().manual_seed(seed)
        noisy = {
            name: value + sigma * torch.randn(value.shape, generator=drawn) for name, value in end.items()
        }
        assert replay(training, noisy).travelled() > 1.1 * length
        own, deviation = known(replay(training, noisy).travelled_without_noise(sigma))
        squares.append((own / length) ** 2)
        deviations.append(2 * deviation * squares[-1])  # of the square
    assert abs(np.mean(squares) - 1) < 3 * np.std(squares) / 40**0.5
    assert np.std(squares) == pytest.approx(np.mean(deviations), rel=0.4)
    assert replay(training, end).travelled_without_noise(1.0) is None


def known(found: tuple[float, float] | None) -> tuple[float, float]:
    assert found is not None
    return found


def test_the_way_is_drawn_to_the_clients_own_model() -> None:
    """A client that did not move at all: two nodes of two steps, the second half way back."""
    training = LocalTraining(2, 10, 0.2)
    found = replay(training)
    end, states = literal(found, training)
    start, images = states[0], digits()
    half = {name: states[1][name] + 0.5 * (start[name] - end[name]) for name in start}
    model = network().model
    values = []
    for state in (start, half):
        model.load_state_dict(state)
        with torch.no_grad():
            values.append(residuals(model(images.pixels.float() / 255).numpy(), images.labels.numpy()))
    moments = found(MIX)
    assert moments is not None
    expected = residual_moments((values[0] + values[1]) / 2, images.labels.numpy())
    np.testing.assert_allclose(moments.mean, expected.mean, atol=2e-6)


def test_batches_hold_the_mix_and_deal_each_class_out_before_repeating() -> None:
    found = replay(LocalTraining(5, 40, 0.1))
    batches = found._batches(MIX)
    assert [len(rows) for rows in batches] == [40] * 5
    rows = np.concatenate(batches)
    labels = found.images.labels.numpy()
    np.testing.assert_array_equal(np.bincount(labels[rows], minlength=10), np.rint(200 * MIX))
    uses = np.bincount(rows, minlength=120)
    for n in range(10):
        own = uses[labels == n]
        assert own.max() - own.min() <= 1


@pytest.mark.parametrize("steps", [1, 3, 10, 11, 47, 160, 785])
def test_nodes_share_out_all_steps(steps: int) -> None:
    training = LocalTraining(steps, 8, 0.01, momentum=0.5)
    nodes, weights = replay_nodes(training)
    assert sum(weights) == pytest.approx(impulse_response(training).sum())
    assert nodes == sorted(set(nodes)) and nodes[0] >= 0 and nodes[-1] < steps
    if steps <= 10:
        assert nodes == list(range(steps))
    else:
        assert len(nodes) <= 10


def test_diverging_training_gives_nothing() -> None:
    assert replay(LocalTraining(30, 10, 1e20))(MIX) is None


def test_the_same_seed_gives_the_same_bytes_and_no_global_randomness() -> None:
    found = replay(LocalTraining(4, 10, 0.2))
    torch.manual_seed(1)
    first = found(MIX)
    state = torch.random.get_rng_state()
    second = found(MIX)
    assert first is not None and second is not None
    assert first.mean.tobytes() == second.mean.tobytes()
    assert torch.equal(state, torch.random.get_rng_state())


def test_layers_that_the_client_left_alone_are_left_alone() -> None:
    training = LocalTraining(4, 10, 0.2)
    plain = replay(training)
    head = replace(plain, frozen=("1.bias", "1.weight"))
    (end,) = head.states(head._batches(MIX), at=[4])
    still = {name for name, value in end.items() if torch.equal(value, head.start[name])}
    assert still == {"1.bias", "1.weight"}
    (moved,) = plain.states(plain._batches(MIX), at=[4])
    assert not any(torch.equal(value, plain.start[name]) for name, value in moved.items())


def test_what_a_client_left_alone_is_told_from_the_models() -> None:
    start, generator = snapshot(network().model), torch.Generator().manual_seed(0)
    moved = {name: v + 0.01 * torch.randn(v.shape, generator=generator) for name, v in start.items()}
    assert frozen_parameters(start, start, moved) == ()
    body = {**moved, "1.weight": start["1.weight"].clone(), "1.bias": start["1.bias"].double()}
    assert frozen_parameters(start, start, body) == ("1.bias", "1.weight")
    assert frozen_parameters(["3.weight"], start, {}) == frozen_parameters(start, start, start) == ()
    few = {
        name: torch.where(torch.rand(v.shape, generator=generator) < 0.1, v, start[name])
        for name, v in moved.items()
    }
    few["3.bias"] = start["3.bias"]  # of a sparsified update nothing may be left of a small layer
    assert frozen_parameters(start, start, few) == ()


def test_another_training_is_that_of_every_replay() -> None:
    """Of updates, of the way, and of the client as it is read when its update has another size."""
    base, other = replay(LocalTraining(4, 8, 0.2)), LocalTraining(4, 8, 0.1)
    plain = known_round(np.ones(10, dtype=int), untrained(10, 16))
    assert plain.residuals is not None
    path = replace(plain.residuals, replay=base)
    seen = replace(plain, residuals=path, replayed_update=ReplayedUpdates(base))
    smaller = replace(seen, scaled=True, noise_std=0.08)
    rescaled = replace(seen, rescaled=lambda factor, deviation: smaller)
    again = with_training(rescaled, other)
    assert again.rescaled is not None
    for found in (with_training(seen, other), again, again.rescaled(0.5, 0.08)):
        assert found.training == other
        assert found.residuals is not None and found.residuals.replay is not None
        assert found.residuals.replay.training == other  # type: ignore[attr-defined]
        assert found.replayed_update is not None
        change = found.replayed_update(MIX, 0)
        expected = replace(base, training=other).update(MIX, 0)
        assert change is not None and expected is not None
        np.testing.assert_array_equal(change.weight, expected.weight)
    assert again.rescaled(0.5, 0.08).noise_std == 0.08
