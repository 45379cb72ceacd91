"""The learning rate from the update, and from how far replays get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods_cases import cross_entropy_gradient, known_round

from rlu_cli.core.checks import check_damaged_size
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.learning_rate import estimate_learning_rate, rate_by_distance
from rlu_cli.core.noise import column_noise
from rlu_cli.core.rate_likelihood import LearningRate, scaled
from rlu_cli.core.recover import head_update
from rlu_cli.core.trained import is_trained
from rlu_cli.core.types import Activations, FloatArray, Head, IntArray, LocalTraining, Observation
from rlu_cli.core.update_size import damaged_size_error, is_likeliest, size_error
from rlu_cli.errors import MismatchError
from rlu_cli.simulation.defences import Defence

N, L = 5, 6
COUNTS = np.array([9, 4, 0, 14, 5])
TRUE = COUNTS / COUNTS.sum()


def a_round(
    *,
    bias: bool = True,
    counts: IntArray = COUNTS,
    embedding_size: int = L,
    means: tuple[float, float] = (0.2, 1.5),
    **training: Any,
) -> tuple[Observation, Activations]:
    """One step at rate 0.3 with every class's embeddings about a mean of its own; and auxiliary samples."""
    rng = np.random.default_rng(3)
    head = Head(0.1 * rng.normal(size=(N, embedding_size)), 0.1 * rng.normal(size=N) if bias else None)
    centres = rng.uniform(*means, size=(N, embedding_size))

    def draw(labels: IntArray) -> FloatArray:
        return np.asarray(centres[labels] * rng.uniform(0.9, 1.1, size=(len(labels), embedding_size)))

    labels, aux = np.repeat(np.arange(N), counts), np.repeat(np.arange(N), 40)
    told = LocalTraining(1, len(labels), 0.3, **training)
    gradient = cross_entropy_gradient(head, draw(labels), labels)
    pull = 1 - 0.3 * told.weight_decay
    after = None if head.bias is None else pull * head.bias - 0.3 * np.asarray(gradient.bias)
    local = Head(pull * head.weight - 0.3 * gradient.weight, after)
    embeddings = draw(aux)
    logits = embeddings @ head.weight.T + (0.0 if head.bias is None else head.bias)
    start = known_round(counts, head).start
    observation = Observation(head_update(local, head), head, told, start)
    return observation, Activations(logits, embeddings, aux)


def test_two_classes_tell_no_rate() -> None:
    """Two numbers for the labels and the rate: half of the intervals held, and bounds of a wrong rate."""
    head, counts = Head(np.eye(2, 4), np.zeros(2)), np.array([9, 4])
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(2), 40)
    embeddings = rng.uniform(size=(80, 4))
    with pytest.raises(MismatchError, match="3 to 200 classes"):
        estimate_learning_rate(
            known_round(counts, head), Activations(embeddings @ head.weight.T, embeddings, labels), None
        )


def told_as(observation: Observation, rate: float | tuple[float, ...]) -> Observation:
    return replace(observation, training=replace(observation.training, lr=rate))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("unit", [1.0, 1e-4])
def test_one_step_is_found_whatever_the_unit(unit: float, bias: bool) -> None:
    observation, samples = a_round(bias=bias)
    found = estimate_learning_rate(told_as(observation, unit), samples, None)
    assert unit * found.scale == pytest.approx(0.3, rel=0.05)
    assert unit * found.low <= 0.3 <= unit * found.high
    assert 1.01 <= found.spread < 1.5


def test_no_class_need_be_absent() -> None:
    observation, samples = a_round(counts=np.array([9, 4, 7, 14, 5]))
    found = estimate_learning_rate(told_as(observation, 1.0), samples, None)
    assert found.scale == pytest.approx(0.3, rel=0.05)


def test_weight_decay_goes_with_the_rate() -> None:
    observation, samples = a_round(weight_decay=0.5)
    found = estimate_learning_rate(told_as(observation, 1.0), samples, None)
    assert found.scale == pytest.approx(0.3, rel=0.05)
    without = replace(observation, training=replace(observation.training, lr=1.0, weight_decay=0.0))
    assert estimate_learning_rate(without, samples, None).scale != pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("bias", [True, False])
def test_known_noise_is_no_part_of_the_rate(bias: bool) -> None:
    observation, samples = a_round(bias=bias)
    rng = np.random.default_rng(0)
    sigma = 0.02 * float(np.abs(observation.update.weight).max())
    update = observation.update
    noisy = replace(
        update,
        weight=update.weight + sigma * rng.normal(size=update.weight.shape),
        bias=None if update.bias is None else update.bias + sigma * rng.normal(size=N),
    )
    seen = told_as(replace(observation, update=noisy, noise_std=sigma), 1.0)
    found = estimate_learning_rate(seen, samples, None)
    assert found.low <= 0.3 <= found.high
    assert found.spread > estimate_learning_rate(told_as(observation, 1.0), samples, None).spread


def test_an_update_of_another_size_is_told_by_the_statistics_alone() -> None:
    observation, samples = a_round()
    statistics = replace(observation.start, samples=replace(samples, embeddings=None))
    observation = replace(observation, start=statistics)
    assert size_error(observation, TRUE, 0.0) is None
    slightly = told_as(observation, 0.3 * 1.08)
    assert size_error(slightly, TRUE, 0.0) is None  # none that matters
    seen = size_error(slightly, TRUE, 0.0, least=0.05)
    assert seen is not None
    assert seen.low <= 1 / 1.08 <= seen.high
    assert size_error(observation, TRUE, 0.0, least=0.01) is None
    for factor in (1.15, 1.2, 1.3, 1.45, 1.7, 2.5):  # what is seen at ten per cent is seen at five
        told = told_as(observation, 0.3 * factor)
        rough, fine = size_error(told, TRUE, 0.0), size_error(told, TRUE, 0.0, least=0.05)
        assert rough is None or fine is not None
    for rate in (0.1, 1.0):
        found = size_error(told_as(observation, rate), TRUE, 0.0)
        assert found is not None
        assert found.low <= 0.3 / rate <= found.high
    assert (
        size_error(told_as(replace(observation, start=replace(statistics, samples=None)), 1.0), TRUE, 0.0)
        is None
    )
    drifts = replace(observation, constant_gradient=observation.head)
    assert size_error(told_as(drifts, 1.0), TRUE, 0.0) is None


def test_the_likeliest_size_may_be_right_of_images_unlike_the_auxiliary_ones() -> None:
    """Ten of 30 right clients that shifted and mirrored their images were read at another size."""
    observation, samples = a_round()
    statistics = replace(observation.start, samples=replace(samples, embeddings=None))
    right = replace(observation, start=statistics)
    assert is_likeliest(right, 0.0)
    rng = np.random.default_rng(0)
    weight = right.update.weight
    blurred = replace(
        right.update, weight=weight + 0.1 * np.abs(weight).mean() * rng.normal(size=weight.shape)
    )
    unlike = replace(right, update=blurred)
    assert is_likeliest(unlike, 0.0)
    assert not any(
        is_likeliest(told_as(each, 0.3 * factor), 0.0) for each in (right, unlike) for factor in (0.5, 2.0)
    )
    assert not is_likeliest(replace(right, start=replace(statistics, samples=None)), 0.0)  # nothing tells


@pytest.mark.parametrize("count", [1, 3, 7, 8])
def test_a_handful_of_samples_of_a_trained_model_has_no_size(count: int) -> None:
    """One sample is no Gaussian: most right clients of one were called misscaled."""
    observation, samples = a_round()
    statistics = replace(observation.start, samples=replace(samples, embeddings=None))
    few = replace(observation.training, batch_size=count)
    trained = replace(statistics, confidence=0.1 + 0.5 * np.eye(N))
    assert is_trained(trained) and not is_trained(statistics)
    told = told_as(replace(observation, start=statistics, training=few), 1.0)
    assert size_error(told, TRUE, 0.0) is not None
    assert (size_error(replace(told, start=trained), TRUE, 0.0) is None) is (count < 8)


@pytest.mark.parametrize("told", [True, False])
def test_noise_does_not_hide_the_size(told: bool) -> None:
    observation, samples = a_round()
    sigma = 0.01 * float(np.abs(observation.update.weight).max())
    doubted = {0.3: 0, 0.1: 0, 1.0: 0}
    for seed in range(6):
        rng, update = np.random.default_rng(seed), observation.update
        assert update.bias is not None
        noisy = replace(
            update,
            weight=update.weight + sigma * rng.normal(size=update.weight.shape),
            bias=update.bias + sigma * rng.normal(size=N),
        )
        for rate in doubted:
            seen = told_as(replace(observation, update=noisy, noise_std=sigma, noise_told=told), rate)
            found = damaged_size_error(seen, samples)
            if found is None:
                continue
            doubted[rate] += 1
            if rate != 0.3:
                assert found.low <= 0.3 / rate <= found.high
    assert doubted[0.3] <= 1 and doubted[0.1] == doubted[1.0] == 6
    assert damaged_size_error(seen, replace(samples, embeddings=None)) is None
    drifts = replace(seen, constant_gradient=observation.head)
    assert damaged_size_error(drifts, samples) is None


def quantised(observation: Observation, bits: int) -> Observation:
    update = observation.update
    assert update.bias is not None
    flat = torch.from_numpy(np.concatenate((update.weight.ravel(), update.bias)))
    left = Defence(quantize=bits).apply(flat, torch.Generator()).numpy()
    rounded = replace(update, weight=left[: update.weight.size].reshape(update.weight.shape), bias=left[-N:])
    return replace(observation, update=rounded, noise_told=False)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_rounding_does_not_hide_the_size(bits: int, seen: bool) -> None:
    """The updates that say how far estimates miss are rounded as the client's was.

    What rounding adds counts though it is no noise that could change a count: without it the right size
    misfits, and nothing was said of an update of eight bits clipped to a seventh.
    """
    observation, samples = a_round(embedding_size=60)
    coarse = quantised(observation, bits)
    coarse = replace(coarse, noise_std=column_noise(coarse) if seen else 0.0)
    assert coarsening(coarse).quantised
    assert damaged_size_error(told_as(coarse, 0.3), samples) is None
    for rate in (0.1, 1.0):
        found = damaged_size_error(told_as(coarse, rate), samples)
        assert found is not None
        assert found.low <= 0.3 / rate <= found.high


def test_what_rounding_does_hangs_on_the_labels() -> None:
    """Updates of the same labels are rounded alike, and say that estimates hardly miss: nine were doubted."""
    rng, doubted = np.random.default_rng(5), 0
    for _ in range(20):
        counts = rng.multinomial(32, rng.dirichlet(np.full(N, 0.5)))
        coarse, samples = a_round(counts=counts, embedding_size=20, means=(0.8, 1.0))
        doubted += damaged_size_error(told_as(quantised(coarse, 3), 0.3), samples) is not None
        for rate in (0.06, 1.5) if counts.max() < 20 else ():
            assert damaged_size_error(told_as(quantised(coarse, 3), rate), samples) is not None
    assert doubted <= 5


def test_a_size_is_doubted_before_it_is_sure() -> None:
    assert check_damaged_size(None) == []
    codes = {
        high: check_damaged_size(LearningRate(0.5, 0.25 / high, high))[0].code
        for high in (0.6, 0.69, 0.72, 0.9)
    }
    assert codes == {
        0.6: "update-misscaled",
        0.69: "update-misscaled",
        0.72: "size-doubted",
        0.9: "size-doubted",
    }


def test_other_samples_than_the_clients_are_no_error_of_the_size() -> None:
    """Without the look at how well the likeliest size explains the update it would be 1.8 (1.57 to 2.07)."""
    observation, samples = a_round()
    strange = replace(samples, embeddings=None, logits=0.5 * samples.logits)
    seen = replace(observation, start=replace(observation.start, samples=strange))
    assert size_error(seen, TRUE, 0.0) is None


def test_same_seed_same_answer() -> None:
    observation, samples = a_round()
    one, again = (estimate_learning_rate(told_as(observation, 1.0), samples, None) for _ in range(2))
    assert one == again


def test_logits_alone_and_few_samples_are_refused() -> None:
    observation, samples = a_round()
    with pytest.raises(MismatchError, match="embeddings"):
        estimate_learning_rate(observation, replace(samples, embeddings=None), None)
    kept = np.concatenate([np.arange(9), np.arange(40, 200)])
    assert samples.embeddings is not None
    few = Activations(samples.logits[kept], samples.embeddings[kept], samples.labels[kept])
    with pytest.raises(MismatchError, match="found 9"):
        estimate_learning_rate(observation, few, None)


def test_scaled_keeps_the_form() -> None:
    assert scaled(LocalTraining(2, 4, 0.5), 0.1).lr == pytest.approx(0.05)
    assert scaled(LocalTraining(2, 4, (0.5, 0.25)), 0.1).lr == pytest.approx((0.05, 0.025))


NOISE = np.array([-0.2, -0.1, 0.0, 0.1, 0.2])


def test_distance_that_grows_as_a_power() -> None:
    found = rate_by_distance(lambda c, draw: c**0.5 * np.exp(NOISE[draw]), 0.2, least=1e-3)
    assert found is not None
    assert found.scale == pytest.approx(0.04, rel=1e-6)
    half = 2.776 * NOISE.std(ddof=1) * np.sqrt(1.2) / 0.5 + 0.005
    assert np.log(found.high / found.scale) == pytest.approx(half, rel=1e-3)
    assert np.log(found.scale / found.low) == pytest.approx(half, rel=1e-3)


def test_what_is_unknown_of_the_way_is_in_the_interval() -> None:
    def distance(c: float, draw: int) -> float:
        return float(c**0.5 * np.exp(NOISE[draw]))

    found = rate_by_distance(distance, 0.2, least=1e-3, error=0.3)
    assert found is not None
    half = 2.776 * np.hypot(NOISE.std(ddof=1) * np.sqrt(1.2), 0.3) / 0.5 + 0.005
    assert np.log(found.high / found.scale) == pytest.approx(half, rel=1e-3)


def test_of_several_rates_the_largest() -> None:
    # As far as the client at c = 0.01 and 0.5, and less far between.
    def distance(c: float, draw: int) -> float:
        x = np.log(c)
        return float(np.exp(0.3 * (x - np.log(0.01)) * (x - np.log(0.1)) * (x - np.log(0.5)) / 4))

    found = rate_by_distance(distance, 1.0, least=1e-3)
    assert found is not None
    assert found.scale == pytest.approx(0.5, rel=0.1)


def test_rates_that_diverge_or_never_get_there() -> None:
    def diverging(c: float, draw: int) -> float:
        return c if c < 0.5 else np.inf

    found = rate_by_distance(diverging, 0.1, least=1e-3)
    assert found is not None
    assert found.scale == pytest.approx(0.1, rel=1e-6)
    assert rate_by_distance(diverging, 10.0, least=1e-3) is None
    assert rate_by_distance(lambda c, draw: 1.0, 2.0, least=1e-3) is None
    assert LearningRate(1.0, 0.5, 2.0).spread == 4


def test_motion_widens_the_interval_beside_what_is_drawn() -> None:
    found = LearningRate(2.0, 2.0 * np.exp(-0.3), 2.0 * np.exp(0.3))
    wider = found.widened(0.4 / 0.98)
    assert (wider.low, wider.scale, wider.high) == pytest.approx((2 * np.exp(-0.5), 2.0, 2 * np.exp(0.5)))
    assert found.widened(0.0).spread == pytest.approx(found.spread)
