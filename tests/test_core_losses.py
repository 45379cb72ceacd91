"""What compression takes: as a client's own did, drawn for made-up ones, and seen by what is learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_cases import scripted_observation
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlu_cli.core.coarse import coarsening
from rlu_cli.core.losses import Losses, LossKind, LossRange, loss_range, losses
from rlu_cli.core.synthetic_clients import ClientSimulator, FeatureNoise
from rlu_cli.core.types import Activations, Head, HeadUpdate, LocalTraining, Observation
from rlu_cli.simulation.defences import Defence

N, L = 6, 12
TRAINING = LocalTraining(1, 32, 0.05)


def sent(defence: Defence, seed: int = 0) -> Observation:
    """An observation whose update was defended."""
    observation, _ = scripted_observation(TRAINING, classes=N, size=L, seed=seed)
    update = observation.update
    assert update.bias is not None
    whole = np.column_stack((update.weight, update.bias))
    flat = defence.apply(torch.from_numpy(whole.ravel().copy()), torch.Generator().manual_seed(seed))
    left = flat.numpy().reshape(N, L + 1)
    return replace(observation, update=HeadUpdate(left[:, :-1], left[:, -1]))


@settings(max_examples=25, deadline=None)
@given(
    defence=st.sampled_from(
        (Defence(top_k=0.5), Defence(quantize=3), Defence(top_k=0.3, quantize=2), Defence(quantize=6))
    ),
    seed=st.integers(0, 50),
)
def test_a_client_s_own_losses_leave_its_update_as_it_is(defence: Defence, seed: int) -> None:
    """And of another one what `Coarsening` leaves of it."""
    observation = sent(defence, seed)
    found, coarse = losses(observation), coarsening(observation)
    assume(found is not None and not coarse.signs)
    assert found is not None
    scale = TRAINING.lr
    assert isinstance(scale, float)
    own = torch.from_numpy(observation.update.weight / scale)[None].float()
    near = 1e-5 * float(own.abs().max()) + 0.02 * float(found.step)  # a level beside 0 is as good as 0
    torch.testing.assert_close(found.of(own), own, rtol=1e-4, atol=near)
    if found.least.any() and found.step.any():
        return  # the threshold comes before rounding for made-up clients, and is seen after it
    other = np.random.default_rng(seed).normal(size=(N, L)) * np.abs(observation.update.weight).max()
    left = found.of(torch.from_numpy(other / scale)[None].float())[0]
    expected = coarse.of(HeadUpdate(other, None)).weight / scale
    near = np.isclose(
        left.numpy(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max() + 0.02 * float(found.step)
    )
    assert near.mean() > 0.97  # but for halves of a step that float32 rounds the other way


def test_a_bias_of_its_own_grid() -> None:
    found = Losses(torch.zeros(1), torch.tensor([0.5]), torch.tensor([0.25]), LossKind(apart=3))
    bias = torch.tensor([[0.0, 0.4, 0.6, 1.1, 2.0]])
    torch.testing.assert_close(found.of_bias(bias), torch.tensor([[0.0, 0.0, 1.0, 1.0, 2.0]]))
    torch.testing.assert_close(found.of(bias), torch.tensor([[0.125, 0.625, 0.625, 1.125, 2.125]]))
    sparse = Losses(torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([0.25]), LossKind(apart=3))
    torch.testing.assert_close(sparse.of_bias(bias), torch.tensor([[0.0, 0.0, 0.6, 1.3, 2.0]]))
    one = Losses(torch.zeros(1), torch.tensor([0.5]), torch.tensor([0.25]))
    torch.testing.assert_close(one.of_bias(bias), one.of(bias))
    even = torch.full((1, 4), 0.3)
    torch.testing.assert_close(found.of_bias(even), even)


def test_signs() -> None:
    """Of the largest share, with the size that is seen, or of a bias alone its own mean size."""
    none, one, half = torch.zeros(1), torch.tensor([0.5]), torch.tensor([0.5])
    values = torch.tensor([[0.1, -0.2, 0.3, -1.0]])
    every = Losses(none, one, half, LossKind(signs=1.0))
    torch.testing.assert_close(every.of(values), 0.25 * values.sign())
    torch.testing.assert_close(every.of_bias(values), every.of(values))
    some = Losses(none, one, half, LossKind(apart=2, signs=0.5))
    torch.testing.assert_close(some.of(values), torch.tensor([[0.0, 0.0, 0.25, -0.25]]))
    torch.testing.assert_close(some.of_bias(values), torch.tensor([[0.0, 0.0, 0.65, -0.65]]))
    drawn = LossRange((0.0, 0.0), (0.1, 1.6), LossKind(signs=1.0)).draw(20, np.random.default_rng(0))
    assert bool((drawn.phase == 0.5).all())


def test_plain_updates_and_those_of_schemes_have_none() -> None:
    assert losses(sent(Defence())) is None
    coarse = sent(Defence(quantize=3))
    assert losses(coarse) is not None
    pulled = replace(TRAINING, prox=0.1)  # of one step from the global model FedProx's pull is 0
    assert losses(replace(coarse, training=pulled)) is not None
    assert losses(replace(coarse, training=replace(pulled, steps=2))) is None
    assert losses(replace(coarse, training=replace(TRAINING, weight_decay=0.1))) is None
    assert losses(replace(coarse, constant_gradient=Head(np.zeros((N, L)), np.zeros(N)))) is None


def test_clients_of_like_losses_share_a_range() -> None:
    def ranges(least: float, step: float) -> LossRange:
        return loss_range(Losses(*(torch.tensor([value]) for value in (least, step, 0.3))))

    assert ranges(0.02, 0.0) == ranges(0.05, 0.0)
    found = ranges(0.02, 0.3)
    for ends, value in ((found.least, 0.02), (found.step, 0.3)):
        assert ends[0] <= value < ends[1] == pytest.approx(16 * ends[0])
    assert ranges(0.0, 0.3).least == (0.0, 0.0)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_grid_that_spans_the_client_s_own_numbers(bits: int) -> None:
    """Made-up updates are rounded as a client that quantises its update by itself does it."""
    levels, rng = 2**bits, np.random.default_rng(bits)
    bias, weight = rng.normal(size=(20, N)), 0.3 * rng.normal(size=(20, N, L))
    drawn = LossRange((0.0, 0.0), (0.0, 0.0), LossKind(levels=levels)).draw(20, rng)
    own = [torch.from_numpy(part.astype(np.float32)) for part in (bias, weight)]
    lost = drawn.spanning(torch.cat((own[0], own[1].flatten(1)), dim=1))
    found = torch.cat((lost.of_bias(own[0])[:, :, None], lost.of(own[1])), dim=2).numpy()
    for left, b, w in zip(found, bias, weight, strict=True):
        flat = torch.from_numpy(np.column_stack((b, w)).ravel())
        literal = Defence(quantize=bits).apply(flat, torch.Generator()).numpy().reshape(N, L + 1)
        near = np.isclose(left, literal, atol=1e-5)
        assert near.mean() > 0.97  # but for halves of a step that float32 rounds the other way
        assert len(np.unique(np.round(left, 4))) <= levels
    ranges = LossRange((0.0, 0.0), (0.0, 0.0), LossKind(levels=levels))
    assert ranges.rounded and lost.features().shape == (20, ranges.width)
    ends = np.concatenate((bias, weight.reshape(20, -1)), axis=1)
    np.testing.assert_allclose(ranges.steps(lost.features()), np.ptp(ends, axis=1) / (levels - 1), rtol=1e-5)


def test_a_weight_s_own_grid_and_sparse_ones() -> None:
    bias, weight = torch.tensor([[5.0, -5.0]]), torch.tensor([[[0.1, 1.0], [0.4, 2.0]]])
    drawn = LossRange((0.3, 4.8), (0.0, 0.0), LossKind(levels=3)).draw(1, np.random.default_rng(0))
    sparse = replace(drawn, least=torch.tensor([0.3]))
    lost = sparse.spanning(torch.cat((bias, weight.flatten(1)), dim=1))
    torch.testing.assert_close(lost.step, torch.tensor([5.0]))
    torch.testing.assert_close(lost.of(weight), torch.tensor([[[0.0, 0.0], [0.0, 0.0]]]))
    apart = replace(sparse, kind=LossKind(apart=3, levels=3)).spanning(weight.flatten(1))
    torch.testing.assert_close(apart.step, torch.tensor([0.8]))  # of what is sent, 0.4 to 2.0
    torch.testing.assert_close(apart.of(weight), torch.tensor([[[0.0, 1.2], [0.4, 2.0]]]))
    torch.testing.assert_close(apart.of_bias(bias), bias)
    none = replace(sparse, least=torch.tensor([9.0])).spanning(weight.flatten(1))
    assert bool(torch.isfinite(none.features()).all()) and not none.of(weight).any()


def test_steps_of_the_bias_s_own_grid_are_those_of_what_was_sent() -> None:
    bias = torch.tensor([[0.9, 0.7, 0.1, -0.05], [-0.3, 0.8, 0.6, 0.0]])
    sparse = Losses(torch.full((2,), 0.5), torch.ones(2), torch.zeros(2), LossKind(apart=4, levels=4))
    ranges = LossRange((0.1, 1.6), (0.0, 0.0), sparse.kind)
    found = ranges.bias_steps(sparse.of_bias(bias).numpy(), sparse.features())
    np.testing.assert_allclose(found, [0.2 / 3, 0.2 / 3], rtol=1e-5)
    one = replace(ranges, kind=LossKind(levels=4))
    np.testing.assert_allclose(one.bias_steps(bias.numpy(), sparse.features()), 1.0)


def test_a_head_without_bias_spans_its_weight_alone() -> None:
    samples, head = auxiliary(np.random.default_rng(0))
    small = replace(samples, embeddings=0.01 * samples.embeddings)  # the bias's numbers would be the ends
    ranges = LossRange((0.0, 0.0), (0.0, 0.0), LossKind(levels=4))
    kwargs = {"seed": 1, "lossy": ranges, "weight": head.weight}
    steps = {
        has_bias: ranges.steps(
            ClientSimulator(small, np.zeros(N), 16, has_bias=has_bias, **kwargs).draw(100).features
        )
        for has_bias in (True, False)
    }
    assert np.median(steps[False]) < 0.1 * np.median(steps[True])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100))
def test_the_smallest_size_of_a_client_s_own_is_as_it_was_sent(seed: int) -> None:
    observation = sent(Defence(top_k=0.5, quantize=4), seed)
    found, coarse = losses(observation), coarsening(observation)
    assume(found is not None and bool(found.least.any()))
    assert found is not None
    assert float(found.smallest) == pytest.approx(coarse.least / 0.05, rel=1e-5)


def test_a_grid_is_the_client_s_own_where_the_output_layer_has_both_its_ends() -> None:
    coarse = sent(Defence(quantize=3))
    for levels, spans in ((8, 8), (0, 0), (16, 0)):  # of a grid of 16 the ends lie in other layers
        found = losses(replace(coarse, levels=levels))
        assert found is not None and found.kind.levels == spans
        assert loss_range(found).rounded
        shared = loss_range(replace(found, step=100 * found.step))
        assert (shared == loss_range(found)) == (spans > 0)  # no step is told then


@pytest.mark.parametrize(("least", "step"), [(True, False), (False, True), (True, True)])
def test_what_is_drawn_is_seen(least: bool, step: bool) -> None:
    none = (0.0, 0.0)
    ranges = LossRange((0.01, 0.16) if least else none, (0.1, 1.6) if step else none)
    drawn = ranges.draw(5000, np.random.default_rng(0))
    seen = drawn.features()
    assert seen.shape == (5000, ranges.width)
    logs = seen[:, : ranges.logarithms].numpy()
    seen_as_drawn = [ends for ends in (ranges.least, ranges.step) if ends[1]]
    if least and step:  # what is sent of the smallest is rounded
        logs, seen_as_drawn = logs[:, 1:], [ranges.step]
    for ends, column in zip(seen_as_drawn, logs.T, strict=True):
        assert column.min() >= np.log(ends[0]) - 1e-4 and column.max() <= np.log(ends[1]) + 1e-4
        assert column.mean() == pytest.approx(np.log(ends).mean(), abs=0.05)
    if step:
        np.testing.assert_allclose((seen[:, -2:] ** 2).sum(dim=1), 1.0, atol=1e-5)


def test_the_smallest_size_is_as_it_looks_after_rounding() -> None:
    drawn = LossRange((0.01, 1.6), (0.1, 1.6)).draw(40, np.random.default_rng(0))
    values = torch.linspace(-8, 8, 200_001).expand(40, -1)
    left = drawn.of(values).abs()
    smallest = torch.where(left > 1e-3 * drawn.step[:, None], left, torch.inf).amin(dim=1)
    torch.testing.assert_close(drawn.smallest, smallest, rtol=1e-3, atol=1e-3)


def test_zeros_of_the_grid_are_no_sparsification() -> None:
    """Symmetric grids have a value 0: then no number is too small to be sent."""
    observation, _ = scripted_observation(TRAINING, classes=N, size=L)
    update = observation.update
    assert update.bias is not None
    step = 0.1 * float(np.abs(update.weight).max())
    rounded = HeadUpdate(np.rint(update.weight / step) * step, np.rint(update.bias / step) * step)
    coarse = replace(observation, update=rounded)
    assert coarsening(coarse).sparsified
    found = losses(coarse)
    assert found is not None and not found.least.any()
    assert found.step == pytest.approx(step / 0.05, rel=1e-3)


def test_all_clients_send_a_number() -> None:
    """The real one did; of a hundredth of the values half of those made up sent none of their biases."""
    samples, head = auxiliary(np.random.default_rng(0))
    assert head.bias is not None
    ranges = LossRange((0.2, 3.2), (0.0, 0.0))
    made = ClientSimulator(samples, head.bias, 16, seed=1, lossy=ranges, weight=head.weight).draw(500)
    assert bool((made.features[:, :N] != 0).any(dim=1).all())


def test_groups_are_smaller_where_their_embeddings_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, head = auxiliary(np.random.default_rng(0))
    assert head.bias is not None
    kwargs = {"seed": 1, "lossy": LossRange((0.02, 0.32), (0.0, 0.0)), "weight": head.weight}
    monkeypatch.setattr("rlu_cli.core.synthetic_clients._AT_ONCE", 16 * (N + L) * 7)
    simulator = ClientSimulator(samples, head.bias, 16, **kwargs)
    made = simulator.draw(50)
    assert simulator._groups == 8
    assert bool((made.counts.sum(axis=1) == 16).all())
    assert bool(torch.isfinite(made.features).all())


def auxiliary(rng: np.random.Generator) -> tuple[Activations, Head]:
    embeddings = np.abs(rng.normal(size=(20 * N, L)))
    head = Head(rng.normal(size=(N, L)), rng.normal(size=N))
    logits = embeddings @ head.weight.T + head.bias
    return Activations(logits, embeddings, np.repeat(np.arange(N), 20)), head


def test_losses_of_nothing_change_nothing() -> None:
    samples, head = auxiliary(np.random.default_rng(0))
    assert head.bias is not None
    plain = ClientSimulator(samples, head.bias, 16, seed=1).draw(600)
    nothing = LossRange((1e-30, 1.6e-29), (1e-6, 1.6e-5))
    made = ClientSimulator(samples, head.bias, 16, seed=1, lossy=nothing, weight=head.weight).draw(600)
    np.testing.assert_array_equal(made.counts, plain.counts)
    torch.testing.assert_close(made.features[:, : N + N * N], plain.features, rtol=1e-3, atol=1e-3)


def test_made_up_updates_lose_what_they_are_said_to() -> None:
    """Bias updates are seen as they are: no size below the least, and all on the grid."""
    samples, head = auxiliary(np.random.default_rng(0))
    assert head.bias is not None
    ranges = LossRange((0.02, 0.04), (0.01, 0.02))
    made = ClientSimulator(samples, head.bias, 16, seed=1, lossy=ranges, weight=head.weight).draw(500)
    bias, seen = made.features[:, :N].numpy(), made.features[:, N + N * N :].numpy()
    least, step = np.exp(seen[:, :1]), np.exp(seen[:, 1:2])
    phase = np.arctan2(seen[:, 3:], seen[:, 2:3]) / (2 * np.pi)
    there = bias != 0
    assert 0.2 < there.mean() < 0.95
    assert np.all((np.abs(bias) >= least - step / 2 - 1e-5)[there])
    places = bias / step - phase
    assert np.abs(places - np.round(places))[there].max() < 1e-2


@pytest.mark.parametrize("std", [0.0, 0.3])
def test_noise_comes_before_losses_unless_rounding_makes_it(std: float) -> None:
    samples, head = auxiliary(np.random.default_rng(0))
    assert head.bias is not None
    noise = FeatureNoise(std, head.weight, np.full(L, 1 / L))
    nothing = LossRange((1e-30, 1.6e-29), (0.0, 0.0))
    kwargs = {"seed": 1, "lossy": nothing, "weight": head.weight}
    made = ClientSimulator(samples, head.bias, 16, noise=noise, **kwargs).draw(2000).features
    assert made.shape == (2000, N + N * (N + 1) + 1)
    np.testing.assert_allclose(made[:, :N].sum(dim=1), 0.0, atol=1e-5)
    plain = ClientSimulator(samples, head.bias, 16, **kwargs).draw(2000).features
    spread = float((made[:, :N] - plain[:, :N]).std())
    assert spread == pytest.approx(std * np.sqrt(1 - 1 / N), abs=0.02)
