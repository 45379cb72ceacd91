"""Statistics without embeddings: what needs none works as before, the rest is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import scripted_observation

from rlu_cli.core.methods import METHODS
from rlu_cli.core.moments import model_statistics
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.types import LocalTraining, ModelStatistics, Observation
from rlu_cli.errors import MismatchError

NEED_EMBEDDINGS = ("surrogate", "llg+", "zlg+", "dimitrov")


def without_embeddings(observation: Observation) -> Observation:
    def strip(statistics: ModelStatistics) -> ModelStatistics:
        return replace(statistics, embedding_mean=None, gradient_sum=None)

    assert observation.end is not None
    return replace(observation, start=strip(observation.start), end=strip(observation.end))


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_works_as_before_or_says_that_it_cannot(name: str, steps: int) -> None:
    observation, _ = scripted_observation(LocalTraining(steps, 32, 0.05))
    bare = without_embeddings(observation)
    if name in NEED_EMBEDDINGS:
        with pytest.raises(MismatchError, match=f"embeddings.*{name.replace('+', '[+]')} needs"):
            recover_labels(bare, method=name)
        return
    known, found = (recover_labels(given, method=name) for given in (observation, bare))
    assert found.counts.tolist() == known.counts.tolist()
    assert found.diagnostics["embedding_match"] is None
    assert known.diagnostics["embedding_match"] is not None


def test_a_head_without_bias_needs_embeddings() -> None:
    observation, _ = scripted_observation(LocalTraining(1, 32, 0.05), bias=False)
    with pytest.raises(MismatchError, match="output layer without a bias needs"):
        recover_labels(without_embeddings(observation), method="rlu")


@pytest.mark.parametrize("constant", [False, True])
def test_the_search_needs_embeddings(constant: bool) -> None:
    training = LocalTraining(10, 32, 0.05, scheme="scaffold" if constant else "fedavg")
    observation, _ = scripted_observation(training, constant=constant)
    with pytest.raises(MismatchError, match="posterior search needs"):
        recover_labels(replace(without_embeddings(observation), search_iterations=2), method="rlu")


def test_statistics_of_logits_alone() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 8)
    logits = rng.normal(size=(24, 3))
    bare = model_statistics(logits, None, labels, 3, samples=100)
    known = model_statistics(logits, rng.normal(size=(24, 5)), labels, 3, samples=100)
    assert bare.embedding_mean is None
    assert bare.gradient_sum is None
    np.testing.assert_array_equal(bare.confidence, known.confidence)
    np.testing.assert_array_equal(bare.accuracy, known.accuracy)
