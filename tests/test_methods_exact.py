"""Where a method's assumptions hold, its counts are exact; several identical steps change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import scripted_round
from methods_cases import in_steps, known_round, proportions, random_head, untrained

from rlu_cli.core.methods import METHODS
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.types import Head, HeadUpdate, LocalTraining

N, L = 8, 10
UNEVEN = np.array([9, 0, 3, 1, 0, 0, 17, 2])
EVEN = np.array([4, 0, 4, 0, 0, 0, 4, 4])


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, steps) for name in ("rlu", "zlg", "zlg+", "dimitrov", "ilrg", "llbg") for steps in (1, 10)),
        ("llg+", 1),  # its impact is 1/N² too small: exact up to some N² samples of a class
        ("llg+", 2),
    ],
)
def test_uneven_counts_of_an_untrained_model(name: str, steps: int) -> None:
    """Uniform softmax, equal embeddings of at least 0."""
    observation = known_round(UNEVEN, untrained(N, L), steps=steps, spread=0.0)
    recovery = recover_labels(observation, method=name)
    assert recovery.counts.tolist() == (steps * UNEVEN).tolist()


@pytest.mark.parametrize("name", ["llg", "ebi"])
def test_even_counts_of_an_untrained_model(name: str) -> None:
    """An impact taken from the negative gradients is too small, but the same for equally frequent classes."""
    observation = known_round(EVEN, untrained(N, L), spread=0.0)
    assert recover_labels(observation, method=name).counts.tolist() == EVEN.tolist()
    uneven = known_round(UNEVEN, untrained(N, L), spread=0.0)
    assert recover_labels(uneven, method=name).counts.tolist() != UNEVEN.tolist()


@pytest.mark.parametrize("name", ["ilrg", "llbg"])
def test_bias_methods_need_no_particular_activation(name: str) -> None:
    rng = np.random.default_rng(1)
    means = rng.normal(size=(N, L))
    observation = known_round(UNEVEN, untrained(N, L), class_means=means)
    assert recover_labels(observation, method=name).counts.tolist() == UNEVEN.tolist()


def test_ilrg_is_exact_where_classes_share_an_embedding_and_barely_overlap() -> None:
    """Non-uniform softmax, one embedding for all: ē_j is right in every row, absent classes included."""
    observation = known_round(UNEVEN, random_head(N, L), spread=0.0)
    assert recover_labels(observation, method="ilrg").counts.tolist() == UNEVEN.tolist()


@pytest.mark.parametrize("label", range(N))
def test_one_sample(label: int) -> None:
    """Found under any model by what assumes e ≥ 0, and under any activation by RLG and iLRG."""
    counts = np.eye(N, dtype=np.int64)[label]
    relu = known_round(counts, random_head(N, L, seed=label), seed=label)
    for name in ("idlg", "gradinversion", "rlg", "llg", "ilrg"):
        assert recover_labels(relu, method=name).counts.tolist() == counts.tolist()
    rng = np.random.default_rng(label)
    tanh = known_round(counts, random_head(N, L), class_means=rng.normal(size=(N, L)))
    for name in ("rlg", "ilrg"):
        assert recover_labels(tanh, method=name).counts.tolist() == counts.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_unique_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = np.zeros(20, dtype=np.int64)
    counts[rng.choice(20, size=6, replace=False)] = 1
    # Embeddings with a unit of their own for every class, as ReLU networks tend to have.
    means = np.abs(rng.normal(size=(20, 24))) * 0.2 + 3 * np.eye(20, 24)
    observation = known_round(counts, random_head(20, 24, seed=seed, scale=0.1), class_means=means)
    for name in ("gradinversion", "rlg"):
        recovery = recover_labels(observation, method=name)
        assert recovery.counts.tolist() == counts.tolist()
        assert not {note.code for note in recovery.warnings} & {
            "assumes-unique-labels",
            "assumes-few-samples",
        }


def test_rlg_survives_float32_checkpoints() -> None:
    """Rounding fills the null space of the update; those directions must not count."""
    rng = np.random.default_rng(0)
    counts = np.zeros(20, dtype=np.int64)
    counts[[2, 5, 11]] = 1, 2, 1
    means = rng.normal(size=(20, 24))
    observation = known_round(counts, random_head(20, 24), class_means=means)
    assert observation.head.bias is not None and observation.update.bias is not None
    head = Head(*(v.astype(np.float32).astype(np.float64) for v in (observation.head.weight, np.zeros(20))))
    local = (observation.head.weight + observation.update.weight).astype(np.float32).astype(np.float64)
    rounded = replace(observation, head=head, update=HeadUpdate(local - head.weight, observation.update.bias))
    recovery = recover_labels(rounded, method="rlg")
    assert np.flatnonzero(recovery.counts).tolist() == [2, 5, 11]
    assert recovery.diagnostics["rank"] <= 4


@pytest.mark.parametrize("name", [name for name in METHODS if name != "random"])
def test_identical_steps_are_one_step(name: str) -> None:
    rng = np.random.default_rng(2)
    counts = np.array([5, 0, 1, 0, 2, 0])
    means = np.abs(rng.normal(size=(6, 12)))
    observation = known_round(counts, random_head(6, 12), class_means=means)
    for steps in (2, 10):
        several = in_steps(observation, steps)
        expected = proportions(name, observation)
        np.testing.assert_allclose(proportions(name, several), expected, atol=1e-9)


OPTIMISERS = [
    LocalTraining(4, 32, 0.05, momentum=0.9),
    LocalTraining(4, 32, 0.05, momentum=0.9, nesterov=True),
    LocalTraining(4, 32, 0.05, weight_decay=0.1),
    LocalTraining(4, 32, (0.1, 0.05, 0.02, 0.01), prox=2.0, scheme="fedprox"),
]


@pytest.mark.parametrize("training", OPTIMISERS)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "surrogate")])
def test_the_optimiser_is_undone(name: str, training: LocalTraining) -> None:
    """torch's own SGD on the same gradients, whatever its momentum or decay, leaves the same answer."""
    rng = np.random.default_rng(4)
    observation = known_round(np.array([16, 0, 8, 8]), random_head(4, 6), spread=0.0)
    S, embeddings = observation.start.confidence, observation.start.embedding_mean
    z = rng.dirichlet(np.ones(4))

    def answer(how: LocalTraining) -> np.ndarray:
        local = scripted_round(S, embeddings, z, how, observation.head)
        update = head_update(local, observation.head)
        return proportions(name, replace(observation, update=update, training=how))

    plain = LocalTraining(4, 32, 0.05)
    np.testing.assert_allclose(answer(training), answer(plain), atol=1e-7)
