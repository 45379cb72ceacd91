"""Regression on simulated clients: better than least squares where residuals are skewed, and calibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from core_cases import scripted_observation
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.core.error_model import ResidualModel, fit
from rlu_cli.core.gradients import normalised_update
from rlu_cli.core.methods.regression import (
    Regression,
    fit_regression,
    rounded_bounds,
    widening_for,
)
from rlu_cli.core.moments import model_statistics
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.regressor import Prediction
from rlu_cli.core.residuals import ResidualPath, residual_moments, residuals
from rlu_cli.core.synthetic_clients import SyntheticClients
from rlu_cli.core.types import (
    Activations,
    FloatArray,
    Head,
    IntArray,
    LocalTraining,
    Observation,
    Recovery,
)

N, L, TOTAL = 5, 8, 16
FEW = 300
"""Monte Carlo samples, and so 7,200 clients: enough to see what is learnt."""


@dataclass(frozen=True)
class World:
    """A linear classifier that is mostly sure and right; ``spread`` is that of the embeddings in a class."""

    spread: float
    seed: int = 0

    @property
    def head(self) -> Head:
        rng = np.random.default_rng(self.seed)
        return Head(self._centres + 0.1 * rng.normal(size=(N, L)), 0.1 * rng.normal(size=N))

    @property
    def _centres(self) -> FloatArray:
        return np.asarray(3.0 * np.eye(N, L))

    def embeddings(self, labels: IntArray, seed: int) -> FloatArray:
        rng = np.random.default_rng([self.seed, seed])
        return np.asarray(self._centres[labels] + self.spread * rng.normal(size=(len(labels), L)))

    def logits(self, embeddings: FloatArray) -> FloatArray:
        head = self.head
        assert head.bias is not None
        return np.asarray(embeddings @ head.weight.T + head.bias)

    def auxiliary(self, each: int = 60) -> Activations:
        labels = np.repeat(np.arange(N), each)
        embeddings = self.embeddings(labels, 0)
        return Activations(self.logits(embeddings), embeddings, labels)

    def observe(self, aux: Activations, counts: IntArray, seed: int) -> Observation:
        """A client's real step; call `start` once, so that all share the statistics."""
        labels = np.repeat(np.arange(N), counts)
        e, head = self.embeddings(labels, seed), self.head
        assert head.bias is not None
        r = residuals(self.logits(e), labels)
        local = Head(head.weight + 0.1 * r.T @ e / len(e), head.bias + 0.1 * r.mean(axis=0))
        values = residuals(aux.logits, aux.labels)
        start = model_statistics(aux.logits, aux.embeddings, aux.labels, N, samples=400)
        return Observation(
            head_update(local, head),
            head,
            LocalTraining(1, len(e), 0.1),
            start,
            residuals=ResidualPath(residual_moments(values, aux.labels), samples=aux),
            samples=FEW,
        )

    def clients(self, count: int) -> list[tuple[IntArray, Observation]]:
        rng = np.random.default_rng(9)
        aux = self.auxiliary()
        mixes = [rng.multinomial(TOTAL, rng.dirichlet(np.full(N, 0.5))) for _ in range(count)]
        found = [(c, self.observe(aux, c, 1 + i)) for i, c in enumerate(mixes)]
        start = found[0][1].start
        return [(c, replace(o, start=start)) for c, o in found]


@pytest.fixture(scope="module")
def trained() -> list[tuple[IntArray, Observation]]:
    return World(spread=1.2).clients(80)


@pytest.fixture(scope="module")
def recovered(trained: list[tuple[IntArray, Observation]]) -> list[Recovery]:
    return [recover_labels(o, method="regression") for _, o in trained]


def estimates(recoveries: list[Recovery]) -> list[FloatArray]:
    return [recovery.estimate for recovery in recoveries]


def errors(found: list[FloatArray], clients: list[tuple[IntArray, Observation]]) -> FloatArray:
    """Total variation of each client, of estimates or counts."""
    return np.array([np.abs(z - c).sum() / 2 / TOTAL for z, (c, _) in zip(found, clients, strict=True)])


def test_it_beats_least_squares_on_a_sure_model(
    trained: list[tuple[IntArray, Observation]], recovered: list[Recovery]
) -> None:
    path = trained[0][1].residuals
    assert path is not None
    model = ResidualModel([(1.0, path.start)], trained[0][1].training)
    by_gls = [TOTAL * fit(model, normalised_update(o)[:-1]).solution.z for _, o in trained]
    by_rlu = [recover_labels(o, method="rlu").estimate for _, o in trained]
    mine = errors(estimates(recovered), trained)
    for others in (by_gls, by_rlu):
        gain = errors(others, trained) - mine
        assert gain.mean() > 2 * gain.std() / np.sqrt(len(gain))


def test_its_errors_are_those_that_it_foresaw(
    trained: list[tuple[IntArray, Observation]], recovered: list[Recovery]
) -> None:
    foreseen = recovered[0].diagnostics["regression_error"]
    assert 0.7 < errors([r.counts for r in recovered], trained).mean() / foreseen < 1.4
    assert foreseen < recovered[0].diagnostics["regression_error_gls"]


def test_bounds_and_presence_are_calibrated(
    trained: list[tuple[IntArray, Observation]], recovered: list[Recovery]
) -> None:
    inside, there, presence = [], [], []
    for recovery, (counts, _) in zip(recovered, trained, strict=True):
        low, high, p = recovery.low, recovery.high, recovery.presence
        assert low is not None and high is not None and p is not None
        assert np.all((low >= 0) & (low <= recovery.counts))
        assert np.all((recovery.counts <= high) & (high <= TOTAL))
        inside.append((low <= counts) & (counts <= high))
        there.append(counts > 0)
        presence.append(p)
    assert 0.91 <= np.mean(inside) <= 0.995
    assert np.mean((np.array(presence) - there) ** 2) < 0.2  # always ½ would give 0.25
    for chosen in (np.array(presence) < 0.5, np.array(presence) >= 0.5):
        assert np.sum(chosen) > 50
        assert abs(np.mean(np.array(there)[chosen]) - np.mean(np.array(presence)[chosen])) < 0.12


def test_proportions_are_on_the_simplex(recovered: list[Recovery]) -> None:
    for recovery in recovered:
        assert recovery.estimate.min() >= 0
        assert recovery.estimate.sum() == pytest.approx(TOTAL)
        assert recovery.counts.sum() == TOTAL


def test_samples_that_are_alike_give_exact_counts_by_gls() -> None:
    for counts, observation in World(spread=0.0).clients(4):
        observation = replace(observation, samples=100)
        recovery = recover_labels(observation, method="regression")
        assert recovery.counts.tolist() == counts.tolist()
        assert recovery.diagnostics["chi_squared"] is not None  # as only gls says
        assert recovery.diagnostics["regression_error_gls"] < recovery.diagnostics["regression_error"]


def test_one_fit_serves_all_clients_in_any_order(
    monkeypatch: pytest.MonkeyPatch, trained: list[tuple[IntArray, Observation]]
) -> None:
    from rlu_cli.core.methods import regression

    fits = []

    def counted(*given: object, **named: object) -> Regression:
        fits.append(1)
        return fit_regression(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(regression, "fit_regression", counted)
    answers = []
    for order in (1, -1):
        start = replace(trained[0][1].start)  # not known to the memory
        fits.clear()
        clients = [replace(o, start=start, samples=100) for _, o in trained[:3]][::order]
        torch.manual_seed(order)  # nobody's global seed matters
        found = [recover_labels(o, method="regression") for o in clients][::order]
        assert len(fits) == 1
        answers.append([r.estimate.tobytes() for r in found])
    assert answers[0] == answers[1]


def test_the_global_random_state_is_left_alone(trained: list[tuple[IntArray, Observation]]) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    observation = trained[0][1]
    recover_labels(replace(observation, start=replace(observation.start), samples=100), method="regression")
    assert torch.equal(torch.random.get_rng_state(), before)


# Updates that were scaled down.


def scaled_down(observation: Observation, factor: float) -> Observation:
    update = observation.update
    assert update.bias is not None
    smaller = replace(update, weight=factor * update.weight, bias=factor * update.bias)
    return replace(observation, update=smaller, scaled=True, samples=2 * FEW)


def test_an_unknown_factor_costs_little_and_bounds_know(
    trained: list[tuple[IntArray, Observation]], recovered: list[Recovery]
) -> None:
    found = [recover_labels(scaled_down(o, 0.2), method="regression") for _, o in trained]
    as_it_is = [recover_labels(replace(scaled_down(o, 0.2), scaled=False), method="rlu") for _, o in trained]
    lost = errors(estimates(found), trained)
    assert lost.mean() < errors(estimates(recovered), trained).mean() + 0.05
    assert lost.mean() < errors(estimates(as_it_is), trained).mean() - 0.05
    inside = []
    for recovery, (counts, _) in zip(found, trained, strict=True):
        assert recovery.low is not None and recovery.high is not None and recovery.presence is not None
        inside.append((recovery.low <= counts) & (counts <= recovery.high))
    assert 0.91 <= np.mean(inside) <= 0.995


@settings(max_examples=5, deadline=None)
@given(factor=st.floats(0.001, 1.0))
def test_the_factor_changes_nothing(trained: list[tuple[IntArray, Observation]], factor: float) -> None:
    one, other = (
        recover_labels(scaled_down(trained[0][1], c), method="regression").estimate for c in (1.0, factor)
    )
    np.testing.assert_allclose(one, other, atol=1e-3)


def test_gls_in_its_place_has_no_bounds_for_a_scaled_update(
    trained: list[tuple[IntArray, Observation]],
) -> None:
    observation = scaled_down(trained[0][1], 0.5)
    path = observation.residuals
    assert path is not None
    recovery = recover_labels(
        replace(observation, residuals=replace(path, samples=None)), method="regression"
    )
    assert "regression-not-fitted" in codes(recovery)
    assert recovery.low is None and recovery.presence is None


def test_who_answers_is_decided_among_clients_rounded_alike(
    trained: list[tuple[IntArray, Observation]],
) -> None:
    """The regressor where steps are large, and its errors small beside those of gls; gls else."""
    steps = np.geomspace(0.01, 1.0, 450)
    mine, its = np.full(450, 0.02), steps**2
    regression = Regression(
        None,  # type: ignore[arg-type]
        steps,
        np.column_stack((mine, its)),
        0.0,
        1.0,
    )
    assert regression.compared(0.02)[2] is False
    error, by_gls, better = regression.compared(0.5)
    assert better and error == pytest.approx(0.02)
    near = np.sort(np.abs(np.log(steps / 0.5)))[149]
    assert by_gls == pytest.approx(np.mean(its[np.abs(np.log(steps / 0.5)) <= near + 1e-9]))
    noise = np.random.default_rng(0).normal(size=150)  # of nothing the sign tells nothing
    alike = replace(regression, steps=np.ones(150), errors=np.abs(np.column_stack((noise, noise[::-1]))))
    assert alike.compared(1.0)[2] is False


# Where it gives way to gls.


def codes(recovery: Recovery) -> set[str]:
    return {note.code for note in recovery.warnings}


def test_an_update_like_no_clients_is_left_to_gls(trained: list[tuple[IntArray, Observation]]) -> None:
    observation = trained[0][1]
    noise = np.random.default_rng(0).normal(size=(N, L))
    far = replace(observation.update, weight=observation.update.weight + noise)
    recovery = recover_labels(replace(observation, update=far), method="regression")
    assert "regression-strange-update" in codes(recovery)
    expected = recover_labels(replace(observation, update=far), method="gls")
    np.testing.assert_array_equal(recovery.estimate, expected.estimate)


@pytest.mark.parametrize(
    "how", ["few samples", "many samples", "no samples", "many classes", "several steps"]
)
def test_what_it_was_not_made_for_is_left_to_gls(
    how: str, trained: list[tuple[IntArray, Observation]]
) -> None:
    observation = trained[0][1]
    if how == "few samples":
        observation = World(1.2).observe(World(1.2).auxiliary(each=9), np.array([3, 3, 3, 3, 4]), 1)
    elif how == "many samples":
        observation = replace(observation, training=replace(observation.training, batch_size=2001))
    elif how == "no samples":
        path = observation.residuals
        assert path is not None
        observation = replace(observation, residuals=replace(path, samples=None))
    elif how == "several steps":
        observation = replace(observation, training=replace(observation.training, steps=2))
    else:
        observation, _ = scripted_observation(LocalTraining(1, 32, 0.1), classes=21)
        path = observation.residuals
        assert path is not None
        labels = np.repeat(np.arange(21), 10)
        samples = Activations(np.zeros((210, 21)), None, labels)
        observation = replace(observation, residuals=replace(path, samples=samples))
    found, expected = (recover_labels(observation, method=name) for name in ("regression", "gls"))
    assert "regression-not-fitted" in codes(found)
    np.testing.assert_array_equal(found.estimate, expected.estimate)
    assert found.low is not None and expected.low is not None
    np.testing.assert_array_equal(found.low, expected.low)


# Bounds.


def predictions(seed: int, clients: int) -> Prediction:
    rng = np.random.default_rng(seed)
    z = rng.dirichlet(np.ones(N), size=clients)
    return Prediction(z, z * rng.random(z.shape), z + (1 - z) * rng.random(z.shape), rng.random(z.shape))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.floats(0, 0.5))
def test_bounds_are_whole_and_hold_the_estimate(seed: int, total: int, widening: float) -> None:
    found = predictions(seed, 4)
    low, high = rounded_bounds(found, total, widening)
    assert np.all(low == np.rint(low)) and np.all(high == np.rint(high))
    assert np.all((low >= 0) & (low <= total * found.proportions))
    assert np.all((high <= total) & (high >= np.floor(total * found.proportions)))


def test_widening_makes_95_percent_hold() -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(50, np.full(N, 1 / N), size=2000)
    clients = SyntheticClients(counts, torch.empty(0))
    z = np.full((2000, N), 1 / N)
    narrow = Prediction(z, z - 0.01, z + 0.01, z)
    by = widening_for(narrow, clients)
    held = []
    for widening in (by, 0.9 * by):
        low, high = rounded_bounds(narrow, 50, widening)
        held.append(float(np.mean((low <= counts) & (counts <= high))))
    assert held[0] >= 0.95 > held[1]
    wide = Prediction(z, 0 * z, 0 * z + 1, z)
    assert widening_for(wide, clients) == 0.0
