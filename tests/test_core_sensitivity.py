"""Training values that are a little off, and what that does to the counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from methods_cases import known_round, random_head

from rlu_cli.core.methods import METHODS
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.sensitivity import perturbations, sensitivity
from rlu_cli.core.types import LocalTraining

Change = tuple[str, object, int, int]


def changes(training: LocalTraining) -> list[Change]:
    """Value, what is used, steps, and samples of each perturbation."""
    return [(p.value, p.used, p.training.steps, p.training.samples) for p in perturbations(training)]


def test_ten_per_cent_each_way() -> None:
    assert changes(LocalTraining(20, 32, 0.5)) == [
        ("lr", 0.45, 20, 640),
        ("lr", 0.55, 20, 640),
        ("steps", 18, 18, 576),
        ("steps", 22, 22, 704),
        ("batch_size", 29, 20, 580),
        ("batch_size", 35, 20, 700),
    ]


def test_steps_and_batch_size_change_by_one_at_least() -> None:
    assert changes(LocalTraining(1, 2, 1.0))[2:] == [
        ("steps", 2, 2, 4),
        ("batch_size", 1, 1, 1),
        ("batch_size", 3, 1, 3),
    ]
    factors = [p.factor for p in perturbations(LocalTraining(4, 100, 1.0))]
    assert factors == pytest.approx([0.9, 1.1, 3 / 4, 5 / 4, 0.9, 1.1])


def test_rates_of_each_step_follow_the_steps() -> None:
    found = {(p.value, p.factor > 1): p.used for p in perturbations(LocalTraining(3, 5, (0.4, 0.2, 0.1)))}
    assert found["lr", True] == pytest.approx([0.44, 0.22, 0.11])
    rates = [p.training.lr for p in perturbations(LocalTraining(3, 5, (0.4, 0.2, 0.1))) if p.value == "steps"]
    assert rates == [(0.4, 0.2), (0.4, 0.2, 0.1, 0.1)]


def test_whole_epochs_keep_their_samples_under_another_batch_size() -> None:
    training = LocalTraining(steps=2 * 10, batch_size=10, lr=0.1, total=2 * 95, distinct=95)
    assert changes(training)[4:] == [("batch_size", 9, 2 * 11, 190), ("batch_size", 11, 2 * 9, 190)]
    partial = replace(training, total=200)  # steps told: no whole epochs
    assert changes(partial)[4:] == [("batch_size", 9, 20, 180), ("batch_size", 11, 20, 220)]


def test_values_that_no_training_has_are_left_out() -> None:
    training = LocalTraining(5, 32, 0.19, prox=10.0, scheme="fedprox")  # λ η = 1.9; 2.09 diverges
    assert [p.factor for p in perturbations(training) if p.value == "lr"] == [0.9]


def test_one_step_by_hand() -> None:
    # Three outputs of confidence 1/3: z = u + 1/3, and u goes with 1/lr.
    head = random_head(3, 2, scale=0.0)
    observation = known_round(np.array([5, 2, 3]), head, spread=0.0)

    def again(training: LocalTraining) -> object:
        return recover_labels(replace(observation, training=training), method="rlu")

    told = recover_labels(observation, method="rlu")
    moved = sensitivity(told, observation.training, again)  # type: ignore[arg-type]
    z = np.array([0.5, 0.2, 0.3])
    for entry, factor in zip(moved[:2], (0.9, 1.1), strict=True):
        expected = (z - 1 / 3) / factor + 1 / 3
        assert entry.moved == pytest.approx(0.5 * np.abs(expected - z).sum(), abs=1e-9)
        assert entry.total == entry.counts.sum() == 10
    by_value = {(e.perturbation.value, e.perturbation.used): e for e in moved}
    assert by_value["batch_size", 11].moved == pytest.approx(0, abs=1e-9)
    assert by_value["batch_size", 11].counts.sum() == 11
    twice = (z - 1 / 3) / 2 + 1 / 3
    assert by_value["steps", 2].moved == pytest.approx(0.5 * np.abs(twice - z).sum(), abs=1e-9)
    assert by_value["steps", 2].counts.sum() == 20


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_part(method: str) -> None:
    observation = known_round(np.array([5, 2, 0, 3]), random_head(4, 3))
    told = recover_labels(observation, method=method)
    moved = sensitivity(
        told,
        observation.training,
        lambda training: recover_labels(replace(observation, training=training), method=method),
    )
    assert [entry.perturbation.value for entry in moved] == [
        "lr",
        "lr",
        "steps",
        "batch_size",
        "batch_size",
    ]
