"""Single samples of a batch told apart: against torch's own gradients, whose samples are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlu_cli.core import disaggregation
from rlu_cli.core.dense_layers import DenseLayer, DenseTail, LayerInputs, factorise, separable
from rlu_cli.core.disaggregation import Disaggregated, _may_repeat, disaggregate
from rlu_cli.core.types import FloatArray, Head, HeadUpdate

N, INPUTS, WIDTHS = 6, 80, (70, 60)


@dataclass(frozen=True)
class World:
    """A rectified network on rectified inputs, trained a little, and a batch of one client.

    rounded : whether weights are stored as float32, as checkpoints are
    classes : of the network
    single : whether the client computes in float32 too, at a rate of 1: rounding of its own gradients is
        more than that of the weights
    """

    seed: int
    size: int = 12
    layers: int = 2
    activation: type[nn.Module] = nn.ReLU
    rounded: bool = True
    classes: int = N
    single: bool = False

    def inputs(self, labels: Tensor, seed: int) -> Tensor:
        drawn = torch.Generator().manual_seed(1000 * self.seed + seed)
        centres = torch.randn(
            self.classes, INPUTS, generator=torch.Generator().manual_seed(self.seed)
        ).double()
        noise = torch.randn(len(labels), INPUTS, generator=drawn).double()
        return (centres[labels] + 0.8 * noise).clamp(min=0)

    def network(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        sides = (INPUTS, *WIDTHS[: self.layers])
        parts: list[nn.Module] = []
        for before, after in pairwise(sides):
            parts += [nn.Linear(before, after), self.activation()]
        model = nn.Sequential(*parts, nn.Linear(sides[-1], self.classes)).double()
        labels = torch.arange(self.classes).repeat(20)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(self.inputs(labels, 1)), labels).backward()
            optimiser.step()
        return model.float().double() if self.rounded else model

    def batch(self) -> tuple[Tensor, Tensor]:
        labels = torch.randint(
            0, self.classes, (self.size,), generator=torch.Generator().manual_seed(self.seed + 7)
        )
        return self.inputs(labels, 2), labels

    def case(self, *, factor: float = 1.0, noise: float = 0.0) -> tuple[DenseTail, list[Head], Head]:
        """The layers, their gradients off a local model of one step at rate 0.01, and the head."""
        model = self.network()
        x, labels = self.batch()
        model.zero_grad()
        if self.single:
            model, x = model.float(), x.float()
        nn.functional.cross_entropy(model(x), labels).backward()
        rate = 1.0 if self.single else 0.01
        drawn = torch.Generator().manual_seed(self.seed)
        moved: list[Head] = []
        linear = [layer for layer in model if isinstance(layer, nn.Linear)]
        for layer in linear:
            changes = []
            for value in (layer.weight, layer.bias):
                assert value.grad is not None
                after = value.detach() - rate * factor * value.grad
                after = after + noise * torch.randn(after.shape, generator=drawn).double()
                after = after.float().double() if self.rounded else after
                changes.append((value.detach().double() - after) / rate)
            moved.append(Head(changes[0].numpy(), changes[1].numpy()))
        model = model.double()
        linear = [layer for layer in model if isinstance(layer, nn.Linear)]
        heads = [Head(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in linear]
        labels = torch.arange(self.classes).repeat(20)
        state, aux = self.inputs(labels, 3), []
        for layer in linear[:-1]:
            aux.append(state)
            state = layer(state).clamp(min=0).detach()
        layers = tuple(
            DenseLayer(head, HeadUpdate(-0.01 * change.weight, change.bias), LayerInputs(seen))
            for head, change, seen in zip(heads[:-1], moved[:-1], aux, strict=True)
        )
        return DenseTail(layers, len(layers)), moved[:-1], heads[-1]


def found_in(
    world: World, *, scale_known: bool = True, factor: float = 1.0, noise: float = 0.0
) -> Disaggregated:
    found = disaggregate(*world.case(factor=factor, noise=noise), world.size, scale_known=scale_known)
    assert found is not None
    return found


def residuals(world: World) -> FloatArray:
    """onehot − s of the batch's samples."""
    x, labels = world.batch()
    r = nn.functional.one_hot(labels, world.classes).double() - world.network()(x).softmax(dim=1)
    return np.asarray(r.detach().numpy())


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_samples_are_found_with_their_labels_and_residuals(seed: int, layers: int) -> None:
    world = World(seed, layers=layers)
    found = found_in(world)
    assert found.rank == world.size
    assert len(found.labels) >= world.size - 1
    truth = residuals(world)
    _, labels = world.batch()
    for label, r in zip(found.labels, found.residuals, strict=True):
        nearest = int(np.abs(truth - r).sum(axis=1).argmin())
        assert label == labels[nearest]
        assert np.abs(truth[nearest] - r).max() < 0.02
    assert not Counter(found.labels.tolist()) - Counter(labels.tolist())
    assert found.scale == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_two_classes_are_told_apart_by_the_share_of_the_update(seed: int) -> None:
    """Residuals (1, −1) and (−1, 1) have one negative entry each: all found were of the first class."""
    world = World(seed, classes=2)
    found = found_in(world)
    _, labels = world.batch()
    assert len(found.labels) >= world.size - 1
    assert not Counter(found.labels.tolist()) - Counter(labels.tolist())
    assert set(found.labels.tolist()) == set(labels.tolist()) == {0, 1}


def test_without_rounding_all_are_found_exactly() -> None:
    world = World(0, rounded=False)
    found = found_in(world)
    assert sorted(found.labels.tolist()) == sorted(world.batch()[1].tolist())
    order = [int(np.abs(residuals(world) - r).sum(axis=1).argmin()) for r in found.residuals]
    assert sorted(order) == list(range(world.size))
    assert np.allclose(found.residuals, residuals(world)[order], atol=1e-6)


@pytest.mark.parametrize("factor", [0.05, 0.3, 4.0])
def test_the_size_of_an_update_is_read_off_its_samples(factor: float) -> None:
    world = World(1)
    found = found_in(world, factor=factor, scale_known=False)
    assert found.scale == pytest.approx(factor, rel=0.01)
    assert not Counter(found.labels.tolist()) - Counter(world.batch()[1].tolist())
    assert abs(np.log(found.scale / factor)) < 6 * found.deviation + 1e-4


@pytest.mark.parametrize("noise", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("seed", range(3))
def test_noise_hides_samples_and_invents_none(noise: float, seed: int) -> None:
    world = World(seed)
    found = disaggregate(*world.case(noise=noise), world.size)
    if found is not None:
        assert not Counter(found.labels.tolist()) - Counter(world.batch()[1].tolist())
    if noise == 1e-3:
        assert found is None or len(found.labels) <= 2


@pytest.mark.parametrize("size", [1, 2, 12])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ELU, nn.GELU])
def test_gradients_of_another_activation_have_no_such_samples(activation: type[nn.Module], size: int) -> None:
    world = World(2, size=size, activation=activation, single=size < 3)
    found = disaggregate(*world.case(), world.size)
    assert found is None or not len(found.labels)


@pytest.mark.parametrize("size", [1, 2, 3, 12])
@pytest.mark.parametrize("seed", range(4))
def test_float32_of_large_gradients_hides_no_samples(seed: int, size: int) -> None:
    """Its relative error is more than the noise below the singular values: of one sample none was found."""
    world = World(seed, size=size, single=True)
    found = found_in(world)
    assert sorted(found.labels.tolist()) == sorted(world.batch()[1].tolist())
    assert found.scale == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_more_than_float32_makes_samples_unlike(seed: int) -> None:
    """δ of a sample that is off by 10⁻⁵ of its size, as of coarser arithmetic."""
    world = World(seed, size=1, single=True)
    tail, gradients, head = world.case()
    rng = np.random.default_rng(seed)
    off = 1 + 1e-5 * rng.standard_normal(len(gradients[0].weight))
    bias = gradients[0].bias
    assert bias is not None
    changed = [Head(off[:, None] * gradients[0].weight, off * bias), *gradients[1:]]
    found = disaggregate(tail, changed, head, 1)
    assert found is None or not len(found.labels)


def test_the_same_seed_finds_the_same() -> None:
    first, again = found_in(World(3)), found_in(World(3))
    assert first.labels.tolist() == again.labels.tolist()
    assert np.array_equal(first.residuals, again.residuals)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15), st.sampled_from([0.0, 1e-9, 1e-6, 1e-3]))
def test_the_rank_and_noise_of_a_gradient(seed: int, rank: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.normal(size=(40, rank)) @ rng.normal(size=(rank, 50)) + noise * rng.normal(size=(40, 50))
    found = factorise(Head(whole[:, :-1].copy(), whole[:, -1].copy()), 20)
    assert found.rank == rank
    if noise:
        assert found.noise == pytest.approx(noise, rel=0.15)
    assert np.allclose(
        found.gradient @ found.inverse @ found.gradient, found.gradient, atol=100 * noise + 1e-9
    )


def test_rows_and_columns_of_zeros_are_left_out() -> None:
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 50))
    whole[[2, 7]] = 0.0
    whole[:, 11] = 0.0
    found = factorise(Head(whole[:, :-1].copy(), whole[:, -1].copy()), 20)
    assert found.gradient.shape == (38, 49)
    assert 2 not in found.rows and 7 not in found.rows and 11 not in found.columns


def test_no_more_ranks_than_samples() -> None:
    rng = np.random.default_rng(1)
    whole = rng.normal(size=(40, 15)) @ rng.normal(size=(15, 50))
    assert factorise(Head(whole[:, :-1].copy(), whole[:, -1].copy()), 12).rank == 12


def layer(outputs: int, inputs: int, zeros: float, seed: int = 0) -> DenseLayer:
    """Whose inputs are 0 so often."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((50, inputs)) < zeros, 0.0, rng.random((50, inputs)) + 0.1)
    head = Head(np.zeros((outputs, inputs)), np.zeros(outputs))
    return DenseLayer(head, HeadUpdate(head.weight + 1.0, head.bias), LayerInputs(torch.from_numpy(x)))


@pytest.mark.parametrize(
    ("layers", "total", "expected"),
    [
        ((layer(120, 400, 0.17), layer(84, 120, 0.4)), 32, (2, 2)),
        ((layer(120, 400, 0.17), layer(84, 120, 0.4)), 64, (2, 2)),
        ((layer(120, 400, 0.17), layer(84, 120, 0.4)), 65, None),  # zeros too few for the first alone
        ((layer(512, 3136, 0.3),), 64, (1, 1)),
        ((layer(512, 3136, 0.3),), 101, None),
        ((layer(120, 400, 0.0), layer(84, 120, 0.5)), 32, (2, 2)),  # what links them is enough
        ((layer(84, 400, 0.0),), 32, None),
        ((layer(120, 400, 0.5), layer(40, 120, 0.5)), 32, (2, 1)),  # the second is too small
        ((layer(41, 400, 0.5),), 32, None),
    ],
)
def test_how_many_samples_layers_can_hold(
    layers: tuple[DenseLayer, ...], total: int, expected: tuple[int, int] | None
) -> None:
    """Of the layers given: how many are left, the last of them always, and how many are searched."""
    found = separable(DenseTail(layers), total, 10)
    assert (None if found is None else (len(found.layers), found.searched)) == expected
    if found is not None:
        assert found.layers[-1] is layers[-1]


def test_frozen_layers_hold_none() -> None:
    first, second = layer(120, 400, 0.5), layer(84, 120, 0.5)
    still = HeadUpdate(0.0 * first.update.weight, first.update.bias)
    found = separable(DenseTail((replace(first, update=still), second)), 32, 10)
    assert found is not None and found.layers == (second,) and found.searched == 1
    assert separable(DenseTail((replace(first, update=still),)), 32, 10) is None


def test_floors_are_the_least_inputs() -> None:
    x = torch.tensor([[-1.0, 2.0], [-1.0, 3.0], [0.5, 2.5]])
    assert LayerInputs(x).floors.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("floor", [0.0, -1.0])
def test_inputs_that_are_never_there_and_floors_below_zero(floor: float) -> None:
    """Pixels: black is the floor, and an input that is 0 for every sample moves no weight."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(INPUTS, 60), nn.ReLU(), nn.Linear(60, N)).double()
    drawn = torch.Generator().manual_seed(6)
    labels = torch.arange(N).repeat(20)

    def pixels(count: int) -> Tensor:
        x = torch.randn(count, INPUTS, generator=drawn).double().clamp(min=floor)
        x[:, :7] = 0.0
        return x

    x, y = pixels(12), labels[torch.randint(0, 120, (12,), generator=drawn)]
    nn.functional.cross_entropy(model(x), y).backward()
    first, last = model[0], model[2]
    gradient = Head(first.weight.grad.numpy(), first.bias.grad.numpy())  # type: ignore[union-attr, operator]
    head = Head(first.weight.detach().numpy(), first.bias.detach().numpy())  # type: ignore[operator]
    tail = DenseTail(
        (DenseLayer(head, HeadUpdate(gradient.weight, gradient.bias), LayerInputs(pixels(120))),), 1
    )
    out = Head(last.weight.detach().numpy(), last.bias.detach().numpy())  # type: ignore[operator]
    found = disaggregate(tail, [gradient], out, 12)
    assert found is not None and len(found.labels) >= 11
    assert not Counter(found.labels.tolist()) - Counter(y.tolist())


@dataclass(frozen=True)
class Repeated(World):
    """A batch of few different samples, the i-th of them ``times[i]`` times."""

    times: tuple[int, ...] = (1,)

    def batch(self) -> tuple[Tensor, Tensor]:
        number = len(self.times)
        labels = torch.randint(0, N, (number,), generator=torch.Generator().manual_seed(self.seed + 7))
        often = torch.tensor(self.times)
        return self.inputs(labels, 2).repeat_interleave(often, dim=0), labels.repeat_interleave(often)


@pytest.mark.parametrize(
    "times", [(32,), (16, 16), (20, 7, 5), (1, 2, 3, 2, 4), (4, 4, 4, 4), (1, 1, 1, 1, 2)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_samples_that_are_repeated_count_as_often(times: tuple[int, ...], seed: int) -> None:
    world = Repeated(seed, size=sum(times), times=times)
    found = found_in(world)
    assert found.rank == len(times)
    assert sorted(found.labels.tolist()) == sorted(world.batch()[1].tolist())
    assert found.times.sum() == sum(k * k for k in times)
    assert found.scale == pytest.approx(1.0, abs=0.01)
    assert np.abs(found.residuals.sum(axis=0) - residuals(world).sum(axis=0)).max() < 0.05


def test_copies_are_copies_though_not_all_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of twice the size would have the rank of its whole batch, and this one has half of it."""
    monkeypatch.setattr(disaggregation, "_SWEEPS", 1)
    monkeypatch.setattr(disaggregation, "_FEWEST_STARTS", 8)
    monkeypatch.setattr(disaggregation, "_STARTS", 8)
    world = Repeated(0, size=24, times=(2,) * 12)
    found = found_in(world)
    assert found.rank == 12
    assert 2 * disaggregation.AGREEING <= len(found.labels) < 24
    assert set(found.times.tolist()) == {2}
    assert found.scale == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_an_update_a_whole_number_of_times_too_large_has_no_repeated_samples(factor: float) -> None:
    world = World(1)
    found = found_in(world, factor=factor)
    assert found.scale == pytest.approx(factor, rel=0.01)
    assert not Counter(found.labels.tolist()) - Counter(world.batch()[1].tolist())


@pytest.mark.parametrize(
    ("seen", "rank", "total", "repeated"),
    [
        ([32.0], 1, 32, True),
        ([1.0, 2.0, 2.0, 1.0], 4, 6, True),
        ([1.0] * 47 + [1.97], 55, 64, False),  # chance
        ([1.0] * 12, 12, 32, False),
        ([3.0] * 20, 20, 32, False),  # 60 samples
        ([1.4, 1.4, 1.3, 2.0], 4, 32, False),
        ([2.0, 2.0], 32, 32, False),  # no room
    ],
)
def test_when_samples_may_be_repeated(seen: list[float], rank: int, total: int, repeated: bool) -> None:
    assert _may_repeat(1 / torch.tensor(seen), rank, total - rank) == repeated
