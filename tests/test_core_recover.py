"""From an update to counts: exact where nothing is random, refused or warned where it can't be right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import (
    random_head,
    scripted_observation,
    statistics_of,
    with_bias_update,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.core import path as path_module
from rlu_cli.core.confidence import coefficient_matrix
from rlu_cli.core.gradients import normalised_update
from rlu_cli.core.methods import METHODS, get_method
from rlu_cli.core.methods import rlu as rlu_module
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.schemes import path_position
from rlu_cli.core.search import MeanSimulator, SearchResult
from rlu_cli.core.simplex import SimplexSolution, SimplexSolver, simplex_least_squares
from rlu_cli.core.types import FloatArray, Head, LocalTraining, Recovery
from rlu_cli.errors import MismatchError, UsageError


def codes(recovery: Recovery) -> list[str]:
    return [note.code for note in recovery.warnings]


SCHEMES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "momentum": {"momentum": 0.9},
    "dampened momentum": {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "fedprox": {"prox": 5.0, "scheme": "fedprox"},
    "fedprox with momentum": {"prox": 5.0, "momentum": 0.5, "scheme": "fedprox"},
    "weight decay": {"weight_decay": 0.1},
    "scaffold": {"scheme": "scaffold"},
    "feddyn": {"prox": 2.0, "scheme": "feddyn"},
    "everything": {"prox": 1.0, "momentum": 0.5, "nesterov": True, "weight_decay": 0.1, "scheme": "feddc"},
}
WITH_CONSTANT = {"scaffold", "feddyn", "everything"}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("name", SCHEMES)
def test_noise_free_counts_are_exact(name: str, steps: int, bias: bool) -> None:
    training = LocalTraining(steps, 32, 0.05, **SCHEMES[name])
    for seed in range(3):
        observation, truth = scripted_observation(
            training, seed=seed, bias=bias, constant=name in WITH_CONSTANT
        )
        recovery = recover_labels(observation, method="rlu")
        assert recovery.counts.tolist() == truth.tolist()
        assert recovery.total == 32 * steps
        assert recovery.diagnostics["residual"] < 1e-9
        assert recovery.diagnostics["solver_certified"]
        assert codes(recovery) == []
        if bias:
            assert recovery.diagnostics["embedding_match"] == pytest.approx(1.0, abs=1e-9)


def test_learning_rate_schedule() -> None:
    training = LocalTraining(5, 32, (0.1, 0.08, 0.05, 0.02, 0.01), momentum=0.9)
    observation, truth = scripted_observation(training, seed=4)
    assert recover_labels(observation).counts.tolist() == truth.tolist()


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(1, 20), st.integers(1, 64))
@settings(max_examples=40)
def test_any_class_mix_is_recovered(seed: int, classes: int, steps: int, batch: int) -> None:
    observation, truth = scripted_observation(LocalTraining(steps, batch, 0.1), classes=classes, seed=seed)
    recovery = recover_labels(observation, method="rlu")
    assert recovery.counts.tolist() == truth.tolist()
    np.testing.assert_allclose(recovery.estimate, truth, atol=1e-6)


def test_the_factor_m() -> None:
    """u = Δb/(η m), not the Δb/η of the paper's Alg. 1, which is wrong as soon as m > 1."""
    training = LocalTraining(10, 32, 0.05)
    observation, truth = scripted_observation(training, seed=1)
    bias = observation.update.bias
    assert bias is not None
    np.testing.assert_allclose(normalised_update(observation), bias / (0.05 * 10), rtol=1e-12)
    assert recover_labels(observation).counts.tolist() == truth.tolist()
    without = recover_labels(with_bias_update(observation, 10 * bias))  # u = Δb/η
    assert np.abs(without.counts - truth).sum() > 0.2 * truth.sum()
    assert "update-too-large" in codes(without)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_confidence_is_weighed_along_the_path(momentum: float) -> None:
    """m steps see S where their gradients were taken; both that place and z are found together."""
    training = LocalTraining(10, 32, 0.05, momentum=momentum)
    observation, truth = scripted_observation(training, seed=2)
    z, true_S = truth / truth.sum(), observation.start.confidence
    other = np.roll(true_S, 1, axis=1)
    u = normalised_update(observation)
    # Move both ends so that only their right average is the S of the training; the right place depends on
    # the gradients at the ends, so it is a fixed point.
    position = path_position(training)
    for _ in range(100):
        start = true_S + 0.05 * position * (other - true_S)
        end = true_S - 0.05 * (1 - position) * (other - true_S)
        decay = (u @ coefficient_matrix(end) @ z) / (u @ coefficient_matrix(start) @ z)
        position = path_position(training, decay=decay)
    assert abs(position - path_position(training)) > 1e-5  # … which κ = 1 misses
    embeddings = observation.start.embedding_mean
    moved = replace(observation, start=statistics_of(start, embeddings), end=statistics_of(end, embeddings))
    recovery = recover_labels(moved)
    assert recovery.counts.tolist() == truth.tolist()
    assert recovery.diagnostics["path_position"] == pytest.approx(position, abs=2e-6)
    assert recovery.diagnostics["residual"] < 1e-6
    halfway = coefficient_matrix(0.5 * start + 0.5 * end)  # the paper's plain average of the two
    assert simplex_least_squares(halfway, u).residual > 10 * recovery.diagnostics["residual"]


def test_one_step_sees_the_global_model_alone() -> None:
    observation, truth = scripted_observation(LocalTraining(1, 32, 0.05), seed=2)
    far = np.roll(observation.start.confidence, 1, axis=1)
    end = statistics_of(far, observation.start.embedding_mean)
    recovery = recover_labels(replace(observation, end=end), method="rlu")
    assert recovery.counts.tolist() == truth.tolist()
    assert recovery.diagnostics["path_position"] == 0.0


@pytest.mark.parametrize("method", ["rlu", "gls"])
def test_a_solution_without_certificate_is_noted(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = SimplexSolver.solve

    def uncertain(self: SimplexSolver, u: FloatArray) -> SimplexSolution:
        return replace(solve(self, u), certified=False, gap=0.25)

    observation, _ = scripted_observation(LocalTraining(1, 32, 0.05))
    assert codes(recover_labels(observation, method=method)) == []
    monkeypatch.setattr(SimplexSolver, "solve", uncertain)
    (note,) = recover_labels(observation, method=method).warnings
    assert note.code == "solver-uncertified"
    assert "0.25" in note.message


@pytest.mark.parametrize("method", ["rlu", "gls"])
def test_missing_local_statistics_are_noted_when_they_matter(method: str) -> None:
    many, truth = scripted_observation(LocalTraining(10, 32, 0.05))
    assert many.residuals is not None
    many = replace(many, end=None, residuals=replace(many.residuals, end=None))
    recovery = recover_labels(many, method=method)
    assert codes(recovery) == ["local-statistics-missing"]
    assert recovery.counts.tolist() == truth.tolist()
    one, _ = scripted_observation(LocalTraining(1, 32, 0.05))
    assert codes(recover_labels(replace(one, end=None), method=method)) == []


@pytest.mark.parametrize("steps", [1, 10])
def test_wrong_learning_rate_is_noticed(steps: int) -> None:
    observation, _ = scripted_observation(LocalTraining(steps, 32, 0.05), seed=1)
    wrong = replace(observation, training=LocalTraining(steps, 32, 0.005))
    assert codes(recover_labels(wrong)) == ["update-too-large"]


def test_noise_is_noticed() -> None:
    observation, _ = scripted_observation(LocalTraining(1, 32, 0.05), seed=1)
    bias = observation.update.bias
    assert bias is not None
    noise = 0.3 * np.abs(bias).max() * np.random.default_rng(0).normal(size=len(bias))
    assert "update-unbalanced" in codes(recover_labels(with_bias_update(observation, bias + noise)))


def test_undeclared_weight_decay_is_noticed() -> None:
    observation, _ = scripted_observation(LocalTraining(10, 32, 0.05, weight_decay=0.1), seed=1)
    undeclared = replace(observation, training=LocalTraining(10, 32, 0.05))
    assert "update-unbalanced" in codes(recover_labels(undeclared))


def test_another_embedding_is_noticed() -> None:
    observation, truth = scripted_observation(LocalTraining(1, 32, 0.05), size=40, seed=1)
    embeddings = observation.start.embedding_mean * np.resize([1, -1], 40)
    wrong = replace(observation, start=statistics_of(observation.start.confidence, embeddings))
    recovery = recover_labels(wrong)
    assert codes(recovery) == ["embedding-mismatch"]
    assert recovery.counts.tolist() == truth.tolist()


@pytest.mark.parametrize("total", [1, 250, 300, 319])
def test_fewer_samples_than_steps_times_batch(total: int) -> None:
    observation, truth = scripted_observation(LocalTraining(10, 32, 0.05))
    recovery = recover_labels(replace(observation, training=LocalTraining(10, 32, 0.05, total=total)))
    assert recovery.total == total
    assert recovery.counts.sum() == total
    assert np.all(np.abs(recovery.counts - truth * total / 320) < 1 + 1e-6)


@pytest.mark.parametrize("which", ["start", "end"])
@pytest.mark.parametrize(("classes", "size"), [(5, 8), (6, 7)])
def test_statistics_of_another_network_are_refused(which: str, classes: int, size: int) -> None:
    observation, _ = scripted_observation(LocalTraining(10, 32, 0.05))
    other = statistics_of(np.full((classes, classes), 1 / classes), np.ones((classes, size)))
    with pytest.raises(MismatchError, match="another network"):
        recover_labels(replace(observation, **{which: other}))


def test_update_that_is_none_is_refused() -> None:
    head = random_head(np.random.default_rng(0), 4, 3)
    with pytest.raises(MismatchError, match="identical"):
        head_update(head, head)
    with pytest.raises(MismatchError, match="finite"):
        head_update(Head(head.weight * np.nan, head.bias), head)
    with pytest.raises(MismatchError, match="different networks"):
        head_update(Head(head.weight[:, :2], head.bias), head)


def test_impossible_training_is_refused() -> None:
    observation, _ = scripted_observation(LocalTraining(2, 32, 0.05))
    with pytest.raises(UsageError):
        recover_labels(replace(observation, training=LocalTraining(2, 32, -0.05)))
    with pytest.raises(MismatchError):
        recover_labels(replace(observation, training=LocalTraining(2, 32, (0.1, 0.1, 0.1))))


@pytest.mark.parametrize("name", ["auto", *METHODS])
def test_every_method_gives_counts_that_sum_to_total(name: str) -> None:
    observation, _ = scripted_observation(LocalTraining(3, 16, 0.05))
    first, again = (recover_labels(observation, method=name) for _ in range(2))
    assert first.method == ("rlu" if name == "auto" else name)  # gls would need replays
    assert first.counts.dtype == np.int64
    assert first.counts.sum() == first.total == 48
    assert np.all(first.counts >= 0)
    assert first.estimate.sum() == pytest.approx(48)
    assert first.counts.tobytes() == again.counts.tobytes()


def test_random_follows_the_seed() -> None:
    observation, _ = scripted_observation(LocalTraining(3, 16, 0.05))
    draws = {
        tuple(recover_labels(replace(observation, seed=seed), method="random").counts) for seed in range(20)
    }
    assert len(draws) > 15


def test_unknown_method_is_refused() -> None:
    with pytest.raises(UsageError, match="'nonsense'"):
        get_method("nonsense")


@pytest.mark.parametrize("bias", [True, False])
def test_search_simulates_the_clients_own_training(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """It starts from the least-squares counts and is told how head and scheme move the mean logits."""
    training = LocalTraining(10, 32, 0.05, scheme="scaffold")
    observation, truth = scripted_observation(training, bias=bias, constant=True)
    observation = replace(observation, search_iterations=5, samples=10)
    k, asked = observation.constant_gradient, []
    assert k is not None

    def spy(
        simulator: MeanSimulator,
        final_mean: np.ndarray,
        counts: np.ndarray,
        iterations: int,
        constant: np.ndarray,
    ) -> list[SearchResult]:
        asked.append((simulator, final_mean[0], counts[0].tolist(), iterations, constant[0]))
        return [SearchResult(counts[0], 1.0, 1.0, 0)]

    monkeypatch.setattr(rlu_module, "posterior_search", spy)
    recover_labels(observation)
    ((simulator, final_mean, counts, iterations, constant),) = asked
    assert counts == truth.tolist()
    assert iterations == 5
    assert simulator.training is training
    assert observation.end is not None
    np.testing.assert_array_equal(final_mean, observation.end.moments.mean)
    # A step of the head along −k moves the logits of embedding ē_n by −(k_W ē_n + k_b).
    for n, e in enumerate(observation.start.embedding_mean):
        moved = k.weight @ e + (k.bias if k.bias is not None else 0.0)
        np.testing.assert_allclose(constant[n], moved, rtol=1e-12)
        for other, f in enumerate(observation.start.embedding_mean):
            assert simulator.gram[n, other] == pytest.approx(e @ f + (1.0 if bias else 0.0))


def test_search_keeps_the_real_valued_solution_where_it_does_not_win() -> None:
    observation, _ = scripted_observation(LocalTraining(10, 32, 0.05, total=301))
    plain = recover_labels(observation)
    first = recover_labels(replace(observation, search_iterations=5, samples=100))
    if first.diagnostics["search_moves"] == 0:
        np.testing.assert_array_equal(first.estimate, plain.estimate)
    else:
        assert first.diagnostics["search_mismatch"] < first.diagnostics["search_initial_mismatch"]
    assert first.counts.sum() == 301
    assert "search_moves" not in plain.diagnostics


def test_search_that_wins_gives_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    observation, _ = scripted_observation(LocalTraining(10, 32, 0.05))
    found = np.array([320, 0, 0, 0, 0, 0])
    for moves in (0, 2):
        result = SearchResult(found, mismatch=1.0, initial_mismatch=2.0, moves=moves)
        monkeypatch.setattr(rlu_module, "posterior_search", lambda *_, result=result, **__: [result])
        recovery = recover_labels(replace(observation, search_iterations=5, samples=10))
        assert (recovery.counts.tolist() == found.tolist()) == (moves > 0)
        assert recovery.diagnostics["search_moves"] == moves


def test_search_is_skipped_for_one_step() -> None:
    observation, _ = scripted_observation(LocalTraining(1, 32, 0.05))
    recovery = recover_labels(replace(observation, search_iterations=5))
    assert "search_moves" not in recovery.diagnostics


def test_clients_of_one_global_model_share_what_does_not_depend_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    for module, name in ((path_module, "SimplexSolver"), (rlu_module, "MeanSimulator")):
        original = getattr(module, name)

        def counted(*arguments: object, original=original, name=name, **options: object) -> object:
            made.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, counted)
    one_step, _ = scripted_observation(LocalTraining(1, 32, 0.05))
    for scale in (1.0, 0.9, 0.8):
        bias = scale * np.asarray(one_step.update.bias)
        recover_labels(with_bias_update(one_step, bias))
    assert made == ["SimplexSolver"]
    made.clear()
    many, _ = scripted_observation(LocalTraining(4, 32, 0.05))
    search = replace(many, search_iterations=1, samples=10)
    first, again = (recover_labels(search) for _ in range(2))
    assert first.estimate.tobytes() == again.estimate.tobytes()
    recover_labels(replace(search, samples=20))
    recover_labels(replace(search, start=replace(search.start)))  # another model, if an equal one
    assert made == ["MeanSimulator"] * 3
