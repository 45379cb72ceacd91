"""Regression on replayed clients: exact worlds, calibrated bounds, and where gls answers instead."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from cli_tools import QUICK, call, sample, truth
from core_cases import scripted_observation

from rlu_cli.core.recover import recover_labels
from rlu_cli.core.residuals import ReplayedClient, ResidualMoments, ResidualPath
from rlu_cli.core.types import FloatArray, IntArray, LocalTraining, Observation, Recovery

N, TOTAL = 6, 600
TRAINING = LocalTraining(steps=30, batch_size=20, lr=0.1)


@dataclass(frozen=True)
class World:
    """Training that takes a model to features that are linear in √z but for noise."""

    true: IntArray
    noise: float
    moments: ResidualMoments
    seed: int = 0
    diverging: int = 0

    def features(self, counts: IntArray, seed: object) -> FloatArray:
        rng = np.random.default_rng([7, *np.atleast_1d(np.asarray(seed))])
        away = np.random.default_rng(3).normal(size=(4 * N, N)) @ np.sqrt(counts / counts.sum())
        return np.asarray(away + self.noise * rng.normal(size=4 * N))

    def client(self, z: FloatArray, draw: int) -> ReplayedClient | None:
        if draw < self.diverging:
            return None
        counts = np.random.default_rng([draw, 1]).multinomial(TOTAL, z)
        return ReplayedClient(counts, self.features(counts, draw))

    def observed(self) -> FloatArray:
        return self.features(self.true, (999, self.seed))

    def __call__(self, z: FloatArray, draw: int) -> ResidualMoments:
        return self.moments


def observe(
    *,
    noise: float = 0.0,
    seed: int = 0,
    diverging: int = 0,
    classes: int = N,
    training: LocalTraining = TRAINING,
) -> tuple[Observation, IntArray]:
    observation, _ = scripted_observation(training, classes=classes)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(TOTAL, rng.dirichlet(np.full(N, 0.7)))
    factor = 0.1 * (np.eye(classes) - 1 / classes)
    moments = ResidualMoments(
        0.8 * (np.eye(classes) - 1 / classes),
        np.broadcast_to(factor, (classes, classes, classes)).copy(),
        np.full(classes, 20),
    )
    world = World(counts, noise, moments, seed, diverging)
    return replace(observation, residuals=ResidualPath(moments, moments, world)), counts


def codes(recovery: Recovery) -> set[str]:
    return {note.code for note in recovery.warnings}


@pytest.mark.parametrize("seed", range(3))
def test_a_linear_world_is_solved(seed: int) -> None:
    observation, counts = observe(seed=seed)
    recovery = recover_labels(observation, method="replay")
    assert np.abs(recovery.estimate - counts).sum() / 2 < 0.02 * TOTAL
    assert recovery.diagnostics["replay_error"] < 0.02
    assert recovery.counts.sum() == TOTAL


def test_bounds_and_presence_are_calibrated() -> None:
    held, present, there = [], [], []
    for seed in range(60):
        observation, counts = observe(noise=0.25, seed=seed)
        recovery = recover_labels(observation, method="replay")
        low, high, presence = recovery.low, recovery.high, recovery.presence
        assert low is not None and high is not None and presence is not None
        assert np.all((low >= 0) & (low <= recovery.counts))
        assert np.all((recovery.counts <= high) & (high <= TOTAL))
        held.append((low <= counts) & (counts <= high))
        present.append(presence)
        there.append(counts > 0)
    assert 0.92 <= np.mean(held) <= 0.98
    assert np.mean((np.array(present) - there) ** 2) < np.mean(there) * (1 - np.mean(there))


@pytest.mark.parametrize("how", ["one step", "many classes", "few samples", "no replay", "divergence"])
def test_where_gls_answers(how: str) -> None:
    if how == "one step":
        observation, _ = observe(training=LocalTraining(1, TOTAL, 0.1))
    elif how == "many classes":
        observation, _ = observe(classes=21)
    elif how == "divergence":
        observation, _ = observe(diverging=51)
    else:
        observation, _ = observe()
        path = observation.residuals
        assert path is not None
        start = path.start
        if how == "few samples":
            start = ResidualMoments(start.mean, start.factor, np.array([9, *start.counts[1:]]))
        path = replace(path, start=start, replay=None if how == "no replay" else path.replay)
        observation = replace(observation, residuals=path)
    found, expected = (recover_labels(observation, method=name) for name in ("replay", "gls"))
    assert "replay-not-fitted" in codes(found)
    np.testing.assert_array_equal(found.estimate, expected.estimate)


def test_half_of_the_replays_may_diverge() -> None:
    observation, counts = observe(diverging=50)
    recovery = recover_labels(observation, method="replay")
    assert "replay-not-fitted" not in codes(recovery)
    assert recovery.diagnostics["replays"] == 50
    assert np.abs(recovery.estimate - counts).sum() / 2 < 0.05 * TOTAL


def test_a_real_round() -> None:
    document = call("recover", *sample("trained_m10"), "--method", "replay", *QUICK).document
    counts = truth("trained_m10")
    inside = [
        row["low"] <= count <= row["high"] for row, count in zip(document["classes"], counts, strict=True)
    ]
    assert sum(inside) >= 8
    assert document["diagnostics"]["replays"] == 100
    assert sum(document["counts"]) == document["total"]


def test_the_residual_is_that_of_the_answer() -> None:
    observation, _ = observe()
    by_rlu = recover_labels(observation, method="rlu")
    found = recover_labels(observation, method="replay")
    assert found.diagnostics["residual"] >= by_rlu.diagnostics["residual"]  # which minimises it
    assert np.isfinite(found.diagnostics["residual"])
