"""Sparsified and quantised updates are seen, and plain ones aren't."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlu_cli.core.coarse import check_coarse, coarsening_of
from rlu_cli.core.types import HeadUpdate
from rlu_cli.simulation.defences import Defence

N, L = 10, 84
RESOLUTION = 1e-8


def codes(defence: Defence, seed: int = 0, dead: int = 0) -> list[str]:
    """Of an update with heavy tails, stored as float32 weights are, with inputs that were never active."""
    rng = np.random.default_rng(seed)
    values = 1e-3 * rng.standard_t(3, size=N * (L + 1))
    values.reshape(N, L + 1)[:, :dead] = 0.0
    sent = defence.apply(torch.from_numpy(values), torch.Generator().manual_seed(seed)).numpy()
    sent = np.round(sent / RESOLUTION) * RESOLUTION
    table = sent.reshape(N, L + 1)
    return [
        note.code
        for note in check_coarse(
            coarsening_of(HeadUpdate(table[:, :-1], table[:, -1]), resolution=RESOLUTION)
        )
    ]


@pytest.mark.parametrize("dead", [0, 40])
@pytest.mark.parametrize("seed", range(5))
def test_plain_noisy_and_clipped_updates_are_not_warned_of(seed: int, dead: int) -> None:
    for defence in (Defence(), Defence(noise_std=1e-4), Defence(clip=0.01)):
        assert codes(defence, seed, 0 if defence.noise_std else dead) == []


def test_sparsified_and_quantised_updates_are_seen() -> None:
    assert codes(Defence(top_k=0.3)) == ["update-sparsified"]
    assert codes(Defence(top_k=0.9)) == ["update-sparsified"]
    for bits in (2, 4, 8):
        assert "update-quantised" in codes(Defence(quantize=bits))
    assert set(codes(Defence(top_k=0.3, quantize=4))) == {"update-sparsified", "update-quantised"}


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_a_weight_and_a_bias_may_have_grids_of_their_own(bits: int) -> None:
    """As where tensors are quantised one by one; their values lie between each other's."""
    rng = np.random.default_rng(bits)
    weight, bias = 1e-3 * rng.standard_t(3, size=(N, L)), 3e-4 * rng.normal(size=N)
    defence = Defence(quantize=bits)
    each = [
        defence.apply(torch.from_numpy(v.ravel().copy()), torch.Generator()).numpy().reshape(v.shape)
        for v in (weight, bias)
    ]
    found = coarsening_of(HeadUpdate(*each), resolution=RESOLUTION)
    assert found.quantised and found.even
    assert found.apart == 2**bits
    assert found.step == pytest.approx(np.ptp(weight) / (2**bits - 1))
    assert found.bias_step == pytest.approx(np.ptp(bias) / (2**bits - 1))
    left = found.of(HeadUpdate(weight, bias))
    np.testing.assert_allclose(left.weight, each[0], atol=1e-12)
    np.testing.assert_allclose(left.bias, each[1], atol=1e-12)


@pytest.mark.parametrize("precision", [np.float32, np.float16])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_classes_that_a_sure_model_rules_out_are_no_sign(batch: int, precision: type) -> None:
    """Their rows are below any rounding: 0, while others have any size."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        logits = 3 * rng.normal(size=(batch, N)) - 40 * (rng.random(N) < 0.5)
        labels = rng.choice(np.flatnonzero(logits[0] > -20), batch)
        s = np.exp(logits - logits.max(axis=1, keepdims=True))
        r = np.eye(N)[labels] - s / s.sum(axis=1, keepdims=True)
        embeddings = np.maximum(rng.normal(size=(batch, L)), 0)
        before = (0.1 * rng.normal(size=(N, L + 1))).astype(precision)
        moved = 0.01 * np.column_stack((r.T @ embeddings, r.sum(axis=0))) / batch
        after = (before.astype(np.float64) + moved).astype(precision)
        change = after.astype(np.float64) - before
        update = HeadUpdate(change[:, :-1], change[:, -1])
        resolution = float(np.finfo(precision).eps) * float(np.abs(before).max())
        assert not coarsening_of(update, resolution=resolution).any


def test_signs_are_seen() -> None:
    rng = np.random.default_rng(0)
    signs = 2e-4 * np.sign(rng.normal(size=(N, L + 1)))
    found = coarsening_of(HeadUpdate(signs[:, :-1], signs[:, -1]), resolution=RESOLUTION)
    assert found.quantised and found.signs and not found.apart
    other = found.of(HeadUpdate(rng.normal(size=(N, L)), None))
    np.testing.assert_allclose(np.abs(other.weight), 2e-4)
    each = HeadUpdate(signs[:, :-1], 2.7 * signs[:, -1])
    found = coarsening_of(each, resolution=RESOLUTION)
    assert found.signs and found.apart == 2
    for size in (1.5, 4.0, 1.02, 25.0):  # the four values lie on a grid too, but by chance
        each = HeadUpdate(signs[:, :-1], size * signs[:, -1])
        found = coarsening_of(each, resolution=RESOLUTION)
        assert found.signs and found.apart == 2 and found.reach == 2
        assert found.bias_step == pytest.approx(2 * size * 2e-4)
    for seed in range(5):  # one bit between the smallest and the largest number are no signs
        drawn = np.random.default_rng(seed).standard_t(3, size=N * (L + 1))
        bit = Defence(quantize=1).apply(torch.from_numpy(drawn), torch.Generator()).numpy()
        found = coarsening_of(HeadUpdate(bit.reshape(N, L + 1), None), resolution=RESOLUTION)
        assert found.quantised and not found.signs
    shifted = coarsening_of(HeadUpdate(signs[:, :-1] + 1e-4, None), resolution=RESOLUTION)
    assert shifted.quantised and not shifted.signs


def test_values_of_a_codebook_are_no_grid() -> None:
    """Few, but at any distance: such updates are noisy, and not made coarser by steps."""
    rng = np.random.default_rng(0)
    book = np.cumsum(rng.uniform(1e-4, 3e-4, size=12))
    values = rng.choice(book, size=(N, L + 1))
    found = coarsening_of(HeadUpdate(values[:, :-1], values[:, -1]), resolution=RESOLUTION)
    assert found.quantised and not found.even
    grid = coarsening_of(HeadUpdate(np.round(values, 4)[:, :-1], None), resolution=RESOLUTION)
    assert grid.quantised and grid.even and not grid.apart
    assert grid.step == pytest.approx(1e-4)


def test_zeros_that_rounding_makes_are_no_sign() -> None:
    values = np.random.default_rng(0).normal(size=(N, L))
    coarse = np.round(values * 20) / 20  # stored in steps of 0.05: zeros and few values, all by rounding
    assert not coarsening_of(HeadUpdate(coarse, None), resolution=0.05).any
    assert coarsening_of(HeadUpdate(coarse, None), resolution=1e-9).any
    assert not coarsening_of(HeadUpdate(np.zeros((2, 2)), np.ones(2)), resolution=1e-9).any


def test_values_that_lie_close_without_a_gap_are_no_grid() -> None:
    """As those of bfloat16 do, whose rounding is wider than they lie apart: all were taken for one value."""
    values = np.random.default_rng(0).uniform(-0.01, 0.01, size=(N, L))
    assert not coarsening_of(HeadUpdate(values, None), resolution=0.002).any


@pytest.mark.parametrize("defence", [Defence(top_k=0.3), Defence(quantize=5), Defence(top_k=0.5, quantize=4)])
def test_what_was_made_coarser_stays_as_it_is(defence: Defence) -> None:
    """The grid and the least number that are found are those of the update itself."""
    drawn = torch.Generator().manual_seed(0)
    plain = torch.randn(N * L, dtype=torch.float64, generator=drawn)
    sent = defence.apply(plain, drawn).numpy().reshape(N, L)
    found = coarsening_of(HeadUpdate(sent, None), resolution=1e-12)
    np.testing.assert_allclose(found.of(HeadUpdate(sent, None)).weight, sent, atol=1e-12)
    lost = np.linalg.norm(sent - plain.numpy().reshape(N, L)) / np.linalg.norm(sent)
    assert 0.5 * lost < found.error < 2.5 * lost
    other = HeadUpdate(torch.randn(N, L, dtype=torch.float64, generator=drawn).numpy(), np.ones(N))
    left = found.of(other)
    assert found.sparsified == (np.count_nonzero(left.weight == 0) > 0.02 * N * L)
    if found.quantised:
        assert len(np.unique(np.round(left.weight, 9))) < 40
        assert np.abs(left.weight - other.weight)[left.weight != 0].max() <= found.step / 2 + 1e-12
    else:
        kept = left.weight != 0
        np.testing.assert_array_equal(left.weight[kept], other.weight[kept])
