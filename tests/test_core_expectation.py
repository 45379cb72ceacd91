"""Expected softmax by shifted exponentials, against a softmax per draw in double precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import moments_of
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.core import expectation as module
from rlu_cli.core.draws import paired_normals
from rlu_cli.core.expectation import SoftmaxExpectation
from rlu_cli.core.types import FloatArray, LogitMoments

SAMPLES = 500


def softmax(q: FloatArray) -> FloatArray:
    e = np.exp(q - q.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def literal(
    moments: LogitMoments, shifts: FloatArray, *, samples: int = SAMPLES, seed: int = 0
) -> FloatArray:
    """Every class of every client, draw by draw."""
    draws = paired_normals((samples + 1) // 2, moments.factor.shape[1], seed).double().numpy()
    x = draws.reshape(-1, draws.shape[2]) @ moments.factor  # (N, draws, N)
    middle = (moments.mean + shifts)[:, :, None]
    return np.asarray(0.5 * (softmax(middle + x) + softmax(middle - x)).mean(axis=2))


def case(classes: int, rank: int, *, seed: int = 0, spread: float = 1.0) -> LogitMoments:
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=(classes, classes)) + np.eye(classes)
    return moments_of(mean, spread * rng.normal(size=(classes, rank, classes)) / np.sqrt(rank))


def compare(moments: LogitMoments, shifts: FloatArray, *, keep: int = 0, atol: float = 1e-6) -> FloatArray:
    active = np.ones(shifts.shape[:2], dtype=bool)
    found = SoftmaxExpectation(moments, samples=SAMPLES, seed=0, keep=keep).at(shifts, active)
    np.testing.assert_allclose(found, literal(moments, shifts), rtol=0, atol=atol)
    return found


@given(
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0.0, 30.0),
    st.floats(0.0, 200.0),
    st.sampled_from([0, 10**9]),
    st.integers(0, 10_000),
)
def test_any_spread_and_any_shift(
    classes: int, rank: int, clients: int, spread: float, reach: float, keep: int, seed: int
) -> None:
    shifts = reach * np.random.default_rng(seed).normal(size=(clients, classes, classes))
    # float32 logits of ±q know softmax to about q·6e-8.
    compare(
        case(classes, rank, seed=seed, spread=spread), shifts, keep=keep, atol=5e-6 + 2e-7 * (spread + reach)
    )


@pytest.mark.parametrize("spread", [4.9, 5.1])
def test_no_jump_where_tame_ends(spread: float) -> None:
    """Just below and just above the limit of exp(x), at the same moments but for the limit."""
    moments = case(6, 40, seed=1, spread=1.0)
    largest = np.sqrt(
        np.square(moments.factor - moments.factor.mean(axis=2, keepdims=True)).sum(axis=1).max()
    )
    scaled = replace(moments, factor=moments.factor * spread / largest)
    expectation = SoftmaxExpectation(scaled, samples=SAMPLES, seed=0)
    assert all(bundle.tame for bundle in expectation.bundles) == (spread < module._TAME)
    compare(scaled, np.zeros((1, 6, 6)))
    compare(scaled, 30 * np.random.default_rng(0).normal(size=(1, 6, 6)), atol=1e-5)


@pytest.mark.parametrize("keep", [0, 10**9])
def test_wild_classes_with_near_and_far_shifts_in_one_call(keep: int) -> None:
    shifts = np.zeros((3, 3, 3))
    shifts[1, :, 0], shifts[2, :, 0] = 20.0, 400.0
    compare(case(3, 4, seed=2, spread=25.0), shifts, keep=keep, atol=5e-5)


def test_logits_that_float32_can_only_just_tell_apart() -> None:
    moments = replace(case(4, 3, seed=3), mean=1e4 * np.eye(4))
    np.testing.assert_allclose(
        SoftmaxExpectation(moments, samples=SAMPLES, seed=0).unmoved()[0], np.eye(4), atol=1e-7
    )


def test_what_is_common_to_all_logits_does_not_matter() -> None:
    moments = case(5, 3, seed=4)
    rng = np.random.default_rng(0)
    loud = replace(
        moments,
        mean=moments.mean + 1e3 * rng.normal(size=(5, 1)),
        factor=moments.factor + 100 * rng.normal(size=(5, 3, 1)),
    )
    expectation = SoftmaxExpectation(loud, samples=SAMPLES, seed=0)
    assert all(bundle.tame for bundle in expectation.bundles)
    quiet = SoftmaxExpectation(moments, samples=SAMPLES, seed=0).unmoved()
    np.testing.assert_allclose(expectation.unmoved()[0], quiet[0], atol=1e-6)


def test_classes_of_one_factor_share_their_exponentials() -> None:
    moments = case(6, 4, seed=5)
    factor = moments.factor.copy()
    factor[[1, 4]] = factor[0]
    factor[[3, 5]] = factor[2]
    factor[3, 1, 0] += 1e-3  # the first rows may agree, and the rest not
    factor[5, 0] += 1e-3  # the same for all logits: softmax doesn't see it
    shared = replace(moments, factor=factor)
    expectation = SoftmaxExpectation(shared, samples=SAMPLES, seed=0)
    assert [bundle.families for bundle in expectation.bundles] == [[[0, 1, 4], [2, 5], [3]]]
    rng = np.random.default_rng(6)
    shifts, active = rng.normal(size=(3, 6, 6)), rng.random((3, 6)) < 0.5
    found = expectation.at(shifts, active)
    np.testing.assert_allclose(found[active], literal(shared, shifts)[active], atol=1e-6)
    assert not found[~active].any()
    mean, error = expectation.unmoved()
    np.testing.assert_allclose(mean, literal(shared, np.zeros((1, 6, 6)))[0], atol=1e-6)
    alone = replace(moments, factor=factor * (1 + 1e-9 * np.arange(6)[:, None, None]))
    apart = SoftmaxExpectation(alone, samples=SAMPLES, seed=0)
    np.testing.assert_allclose(error, apart.unmoved()[1], rtol=1e-3, atol=1e-7)


def test_a_class_of_few_samples_takes_few_numbers() -> None:
    moments = case(4, 6, seed=7)
    factor = moments.factor.copy()
    factor[1, 2:] = 0
    factor[2] = 0
    few = replace(moments, factor=factor)
    expectation = SoftmaxExpectation(few, samples=SAMPLES, seed=0)
    assert [bundle.families for bundle in expectation.bundles] == [[[1]], [[0], [3]]]
    assert [bundle.factor.shape for bundle in expectation.bundles] == [(1, 2, 4), (2, 6, 4)]
    assert expectation.fixed == [2]
    compare(few, np.random.default_rng(0).normal(size=(2, 4, 4)))
    mean, error = expectation.unmoved()
    np.testing.assert_allclose(mean[2], softmax(few.mean[2]), rtol=1e-12)
    assert not error[2].any()
    assert np.all(error[[0, 1, 3]] > 0)


def test_classes_of_unlike_ranks_and_spreads_are_computed_apart_and_right() -> None:
    """K_n of 1 to 40 samples, one class wild, two alike."""
    moments = case(9, 40, seed=10)
    factor = moments.factor.copy()
    for n, rank in enumerate((40, 36, 31, 29, 20, 3, 3, 1, 0)):
        factor[n, rank:] = 0
    factor[6] = factor[5]
    factor[3] *= 20
    mixed = replace(moments, factor=factor)
    expectation = SoftmaxExpectation(mixed, samples=SAMPLES, seed=0)
    found = [bundle.families for bundle in expectation.bundles]
    assert found == [[[3]], [[7]], [[5, 6]], [[4]], [[2], [1], [0]]]
    rng = np.random.default_rng(11)
    shifts, active = rng.normal(size=(4, 9, 9)), rng.random((4, 9)) < 0.4
    found_at = expectation.at(shifts, active)
    np.testing.assert_allclose(found_at[active], literal(mixed, shifts)[active], atol=1e-5)
    assert not found_at[~active].any()
    np.testing.assert_allclose(expectation.unmoved()[0], literal(mixed, np.zeros((1, 9, 9)))[0], atol=1e-5)


@pytest.mark.parametrize("block", [1, 100, 5000, 10**7])
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_block_size_does_not_matter(monkeypatch: pytest.MonkeyPatch, block: int, spread: float) -> None:
    moments, shifts = case(5, 7, seed=8, spread=spread), np.ones((2, 5, 5))
    expected = SoftmaxExpectation(moments, samples=SAMPLES, seed=0)
    monkeypatch.setattr(module, "_CPU_BLOCK", block)
    found = SoftmaxExpectation(moments, samples=SAMPLES, seed=0)
    active = np.ones((2, 5), dtype=bool)
    np.testing.assert_allclose(found.at(shifts, active), expected.at(shifts, active), rtol=0, atol=1e-6)
    for a, b in zip(found.unmoved(), expected.unmoved(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_kept_or_made_again_the_bytes_are_the_same(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    monkeypatch.setattr(module, "_CPU_BLOCK", 4 * 5 * 250)  # a class a bundle
    moments = case(5, 7, seed=9, spread=spread)
    per_class = 4 * 500 // 2 * 5 * (1 if spread == 1.0 else 2)
    all_kept, two_kept, none_kept = (
        SoftmaxExpectation(moments, samples=SAMPLES, seed=0, keep=keep) for keep in (10**9, 2 * per_class, 0)
    )
    assert [bundle.keeps for bundle in two_kept.bundles] == [True, True, False, False, False]
    rng = np.random.default_rng(1)
    active = np.ones((2, 5), dtype=bool)
    for _ in range(3):
        shifts = rng.normal(size=(2, 5, 5))
        found = [e.at(shifts, active).tobytes() for e in (all_kept, two_kept, none_kept)]
        assert found[0] == found[1] == found[2]
    assert all(bundle.kept for bundle in all_kept.bundles)
    assert not any(bundle.kept for bundle in none_kept.bundles)


@pytest.mark.cuda
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_cuda_agrees_with_cpu(spread: float) -> None:
    moments = case(20, 10, seed=6, spread=spread)
    shifts, active = np.random.default_rng(0).normal(size=(3, 20, 20)), np.ones((3, 20), dtype=bool)
    on_cpu, on_cuda = (
        SoftmaxExpectation(moments, samples=5000, seed=0, device=device, keep=2**20)
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(on_cuda.at(shifts, active), on_cpu.at(shifts, active), rtol=0, atol=1e-5)
    np.testing.assert_allclose(on_cuda.unmoved()[0], on_cpu.unmoved()[0], rtol=0, atol=1e-5)
