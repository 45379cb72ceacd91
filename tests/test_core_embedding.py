"""The embedding that an update implies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import random_confidence, random_head, scripted_observation, statistics_of

from rlu_cli.core.embedding import (
    embedding_gram,
    embedding_match,
    implied_embedding,
    subtract_heads,
    weight_direction,
)
from rlu_cli.core.gradients import normalised_update
from rlu_cli.core.types import FloatArray, Head, HeadUpdate, LocalTraining, ModelStatistics


def test_implied_embedding_of_a_rank_one_update_is_exact() -> None:
    rng = np.random.default_rng(0)
    e, bias = rng.normal(size=7), rng.normal(size=5)
    bias[2] = 0.0  # where the paper's quotient ΔW_j/Δb_j breaks
    implied = implied_embedding(HeadUpdate(np.outer(bias, e), bias))
    assert implied is not None
    np.testing.assert_allclose(implied, e, rtol=1e-12)


def test_implied_embedding_is_the_least_squares_solution() -> None:
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(5, 7)), rng.normal(size=5)
    expected = np.linalg.lstsq(bias[:, None], weight, rcond=None)[0][0]
    implied = implied_embedding(HeadUpdate(weight, bias))
    assert implied is not None
    np.testing.assert_allclose(implied, expected, rtol=1e-12)


def test_no_embedding_without_a_bias_update() -> None:
    assert implied_embedding(HeadUpdate(np.ones((3, 2)), None)) is None
    assert implied_embedding(HeadUpdate(np.ones((3, 2)), np.zeros(3))) is None


def test_the_weight_along_its_direction_is_the_bias_of_a_rank_one_update() -> None:
    rng = np.random.default_rng(2)
    e, bias = rng.normal(size=7), rng.normal(size=5)
    np.testing.assert_allclose(np.outer(bias, e) @ weight_direction(e[None]), bias, rtol=1e-12, atol=1e-15)


def seen(statistics: ModelStatistics) -> tuple[FloatArray, FloatArray]:
    """What the match compares with."""
    return statistics.confidence, statistics.embedding_mean


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_match_of_a_consistent_update_is_one(steps: int, momentum: float) -> None:
    observation, truth = scripted_observation(LocalTraining(steps, 32, 0.05, momentum=momentum), seed=3)
    u, z = normalised_update(observation), truth / truth.sum()
    match = embedding_match(observation.update, z, u, *seen(observation.start))
    assert match == pytest.approx(1.0, abs=1e-12)


def test_match_of_another_embedding_is_low() -> None:
    observation, truth = scripted_observation(LocalTraining(1, 32, 0.05), size=40, seed=4)
    u, z = normalised_update(observation), truth / truth.sum()
    embeddings = observation.start.embedding_mean
    other = replace(observation.start, embedding_mean=embeddings * np.resize([1, -1], 40))
    match = embedding_match(observation.update, z, u, *seen(other))
    assert match is not None
    assert match < 0.5


def test_nothing_to_compare_is_none() -> None:
    observation, truth = scripted_observation(LocalTraining(1, 32, 0.05), seed=5)
    u, z = normalised_update(observation), truth / truth.sum()
    headless = HeadUpdate(observation.update.weight, None)
    assert embedding_match(headless, z, u, *seen(observation.start)) is None
    blank = replace(observation.start, embedding_mean=np.zeros_like(observation.start.embedding_mean))
    assert embedding_match(observation.update, z, u, *seen(blank)) is None


def test_gram_is_how_one_class_moves_anothers_logits() -> None:
    """Step the head on one sample of class n and see by how much the logits of ē_n' move."""
    rng = np.random.default_rng(6)
    embeddings = rng.normal(size=(4, 5))
    statistics = statistics_of(random_confidence(rng, 4), embeddings)
    direction = rng.normal(size=4)
    for bias in (True, False):
        gram = embedding_gram(statistics, has_bias=bias)
        for n in range(4):
            weight_step = np.outer(direction, embeddings[n])
            moved = embeddings @ weight_step.T + (direction if bias else 0.0)
            np.testing.assert_allclose(moved, gram[:, n, None] * direction, rtol=1e-12)


def test_subtract_heads() -> None:
    rng = np.random.default_rng(7)
    local, reference = random_head(rng, 3, 4), random_head(rng, 3, 4)
    update = subtract_heads(local, reference)
    assert local.bias is not None
    assert reference.bias is not None
    assert update.bias is not None
    np.testing.assert_array_equal(update.weight, local.weight - reference.weight)
    np.testing.assert_array_equal(update.bias, local.bias - reference.bias)
    assert subtract_heads(Head(local.weight, None), Head(reference.weight, None)).bias is None
