"""The replay method: exact where replays tell all, honest bounds, shared among clients, and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from core_cases import model_means, scripted_observation

from rlu_cli.core.client_views import ClientView, ReplayedClient, ReplayPlan
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.kernel_regression import ClassPrediction
from rlu_cli.core.methods import METHODS
from rlu_cli.core.methods.base import Problem
from rlu_cli.core.methods.replay import _predicted, _rescaled, out_of_scope
from rlu_cli.core.moments import softmax
from rlu_cli.core.progress import Progress
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.replayed_size import RelativeSize
from rlu_cli.core.residuals import ResidualPath
from rlu_cli.core.types import (
    UNTREATED,
    FloatArray,
    Head,
    HeadUpdate,
    IntArray,
    LocalTraining,
    LogitMoments,
    ModelStatistics,
    Observation,
    Treatment,
)
from rlu_cli.errors import MismatchError

N, L = 6, 8
LONG = LocalTraining(40, 16, 0.05, total=4 * 150, distinct=150)
K = 51


@dataclass
class Scripted:
    """`ReplayClients` whose training is made up."""

    noise: float = 0.0
    diverging: float = 0.0
    operations: float = 1e9
    plans: list[ReplayPlan] = field(default_factory=list)
    start: ModelStatistics | None = None
    own: str | None = None
    treatment: Treatment = UNTREATED

    def __call__(self, plans: list[ReplayPlan], progress: Progress) -> list[ReplayedClient | None]:
        self.plans += plans
        return [self._one(plan) for plan in plans]

    def cost(self, training: LocalTraining) -> float:
        return self.operations

    def trained(
        self, z: FloatArray, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[Head, FloatArray]:
        """The update, and mean logits by class afterwards, neither linear in z."""
        bias = training.steps * 0.05 * 0.1 * np.tanh(3 * (z - 1 / N)) + self.noise * rng.normal(size=N)
        logits = 3 * np.eye(N) + np.log(z + 0.05) + 20 * self.noise * rng.normal(size=(N, N))
        return _head(bias), logits

    def _one(self, plan: ReplayPlan) -> ReplayedClient | None:
        rng = np.random.default_rng((3, plan.draw))
        if rng.random() < self.diverging:
            return None
        z = plan.counts / plan.counts.sum()
        change, logits = self.trained(z, plan.training, rng)
        start = 3 * np.eye(N)
        return ReplayedClient(z, change, model_means(start), model_means(logits))


class Smooth(Scripted):
    """Training whose update is what least squares take it for, between two models that hardly differ."""

    def trained(
        self, z: FloatArray, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[Head, FloatArray]:
        before = 3 * np.eye(N)
        after = before + 0.1 * rng.normal(size=(N, N))
        S = (softmax(before) + softmax(after)) / 2
        return _head(training.steps * 0.05 * (z - S.T @ z)), after


def _head(bias: FloatArray) -> Head:
    weight = np.outer(bias, 0.5 + np.random.default_rng(5).random(L))
    return Head(weight, bias - bias.mean())


def observed(
    counts: IntArray, training: LocalTraining, made: Scripted, *, seed: int = 0, samples: int = K
) -> Observation:
    """A client that trained as `Scripted` has it, with models of one logit row a class."""
    observation, _ = scripted_observation(replace(training, momentum=0.0), classes=N, size=L)
    change, after = made.trained(counts / counts.sum(), training, np.random.default_rng((7, seed)))
    assert change.bias is not None

    def known(logits: FloatArray) -> tuple[LogitMoments, FloatArray]:
        return LogitMoments(logits, np.zeros((N, 1, N)), np.full(N, samples)), softmax(logits)

    ends = []
    for logits in (3 * np.eye(N), after):
        moments, S = known(logits)
        statistics = replace(observation.start, moments=moments, confidence=S)
        ends.append((statistics, model_means(logits, samples=samples).residuals))
    made.start = made.start or ends[0][0]  # so that its clients share their replays
    return replace(
        observation,
        update=HeadUpdate(change.weight, change.bias),
        start=made.start,
        end=ends[1][0],
        residuals=ResidualPath(ends[0][1], ends[1][1]),
        replayed_clients=made,
    )


def draws(count: int, total: int = 150) -> list[IntArray]:
    rng = np.random.default_rng(1)
    return [rng.multinomial(total, rng.dirichlet(np.full(N, 0.7))) for _ in range(count)]


def test_training_that_isnt_linear_is_turned_round() -> None:
    errors, made = [], Scripted()
    for seed, counts in enumerate(draws(12)):
        observation = observed(counts, LONG, made, seed=seed)
        found = recover_labels(observation, method="replay")
        assert found.counts.sum() == found.total == 600
        errors.append(np.abs(found.estimate / 600 - counts / 150).sum() / 2)
        assert found.diagnostics["replays"] == 228
        assert not {note.code for note in found.warnings} & {"replay-not-fitted", "replay-strange-update"}
    assert np.mean(errors) < 0.05


@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_bounds_hold_and_grow_with_the_noise(noise: float) -> None:
    made, held, widths = Scripted(noise), [], []
    for seed, counts in enumerate(draws(25)):
        found = recover_labels(observed(counts, LONG, made, seed=seed), method="replay")
        assert found.low is not None and found.high is not None and found.presence is not None
        assert np.all((found.low <= found.estimate) & (found.estimate <= found.high))
        assert np.all((found.presence >= 0) & (found.presence <= 1))
        held.append((found.low <= 4 * counts) & (4 * counts <= found.high))
        widths.append((found.high - found.low).mean() / found.total)
    assert 0.9 <= np.mean(held) <= 1.0
    assert (np.mean(widths) > 0.1) == (noise > 0.01)


def test_clients_share_replays_and_dont_hang_on_each_other() -> None:
    made = Scripted(0.05)
    first, second = draws(2)
    other = replace(LONG, steps=4 * 9, total=4 * 140, distinct=140)
    a = observed(first, LONG, made)
    b = replace(observed(second, other, made), start=a.start)
    both = [recover_labels(x, method="replay") for x in (a, b)]
    assert len(made.plans) == 220
    sizes = [int(plan.counts.sum()) for plan in made.plans]
    assert 128 <= min(sizes) < 140 and 230 < max(sizes) <= 256
    assert all(
        plan.training.epochs == 4 and plan.training.seen == size
        for plan, size in zip(made.plans, sizes, strict=True)
    )
    alone = replace(b, start=replace(b.start))
    assert recover_labels(alone, method="replay").estimate.tolist() == both[1].estimate.tolist()
    assert recover_labels(a, method="replay").estimate.tolist() == both[0].estimate.tolist()


@pytest.mark.parametrize(
    ("classes", "confidence", "read"), [(2, 0.95, False), (2, 0.5, True), (3, 0.95, True)]
)
def test_two_classes_of_a_trained_model_tell_no_size(classes: int, confidence: float, read: bool) -> None:
    """Six of 140 right clients were divided by such a size, or might have been."""
    observation, _ = scripted_observation(LocalTraining(10, 16, 0.05), classes=classes)
    rest = (1 - confidence) / (classes - 1)
    S = np.full((classes, classes), rest) + (confidence - rest) * np.eye(classes)
    asked = []

    def rescaled(factor: float, deviation: float) -> Observation:
        asked.append(factor)
        raise MismatchError("numbers beyond any size")

    observation = replace(observation, start=replace(observation.start, confidence=S), rescaled=rescaled)
    answer = _rescaled(observation, RelativeSize(np.log(0.2), 0.1), np.full(classes, 1 / classes))
    assert answer is None
    assert bool(asked) is read


@pytest.mark.parametrize(
    ("classes", "confidence", "optimizer", "treated", "averaged"),
    [
        (2, 0.95, "sgd", None, True),
        (2, 0.5, "sgd", None, False),
        (3, 0.95, "sgd", None, False),
        (2, 0.95, "adam", None, False),
        (2, 0.95, "sgd", "scaled", False),
        (2, 0.95, "sgd", "sparsified", False),
    ],
)
def test_two_classes_of_a_trained_model_are_averaged_with_least_squares(
    classes: int, confidence: float, optimizer: str, treated: str | None, averaged: bool
) -> None:
    """Over 374 clients the mean got 0.843 of their labels, replay alone 0.825 and least squares 0.838."""
    training = LocalTraining(10, 16, 0.05, optimizer=optimizer)
    observation, _ = scripted_observation(LocalTraining(10, 16, 0.05), classes=classes, size=100)
    rest = (1 - confidence) / (classes - 1)
    S = np.full((classes, classes), rest) + (confidence - rest) * np.eye(classes)
    observation = replace(
        observation, training=training, start=replace(observation.start, confidence=S), end=None
    )
    if treated == "scaled":
        observation = replace(observation, scaled=True)
    if treated == "sparsified":
        weight = observation.update.weight.copy()
        weight[0, np.abs(weight[0]) < np.median(np.abs(weight[0]))] = 0.0
        observation = replace(observation, update=HeadUpdate(weight, observation.update.bias))
    assert coarsening(observation).sparsified is (treated == "sparsified")
    z, width = np.arange(1.0, classes + 1), 0.01
    z /= z.sum()
    learnt = ClassPrediction(z, z - width, z + width, np.ones(classes))
    # -∇b of a batch of the last class alone, which least squares find outright
    u = np.eye(classes)[-1] - S[-1]
    gradient, means = Head(np.zeros((classes, 100)), -u), model_means(np.log(S), samples=K)
    view = ClientView(gradient, means, means, 0.5)
    problem = Problem(observation, u, gradient)
    found = _predicted(problem, view, lambda features: learnt, np.zeros((classes, 1)))
    if averaged:
        np.testing.assert_allclose(found.proportions, (z + np.eye(classes)[-1]) / 2, atol=1e-9)
        assert np.all(found.low <= found.proportions) and np.all(found.proportions <= found.high)
        assert np.all(found.low <= learnt.low) and np.all(learnt.high <= found.high)
        # half-way to what all updates like it would be said to be: of the last class alone, without spread
        np.testing.assert_allclose(found.low[0], (z[0] - width) / 2, atol=1e-3)
        np.testing.assert_allclose(found.high[1], (z[1] + width + 1) / 2, atol=1e-3)
    else:
        assert found is learnt


def test_fewer_samples_are_fewer_replays() -> None:
    made = Scripted(0.05)
    recover_labels(replace(observed(draws(1)[0], LONG, made), samples=100), method="replay")
    assert len(made.plans) == 20


@pytest.mark.parametrize(
    ("samples", "epochs", "more", "in_halves"),
    [(51, 4, 0, False), (50, 4, 44, False), (12, 4, 44, False), (12, 8, 0, True), (51, 8, 0, False)],
)
def test_replays_of_few_auxiliary_samples_draw_from_halves_of_them(
    samples: int, epochs: int, more: int, in_halves: bool
) -> None:
    """All where each is seen over sixteen times; up to fifty a class as many more as tell the bounds."""
    made = Scripted(0.05)
    long = replace(LONG, steps=10 * epochs, total=150 * epochs)
    found = recover_labels(observed(draws(1)[0], long, made, samples=samples), method="replay")
    halves = [plan.half for plan in made.plans if plan.half is not None]
    assert len(made.plans) == found.diagnostics["replays"] + more
    assert len(halves) == (len(made.plans) if in_halves else more)
    assert halves.count(0) == halves.count(1)


@pytest.mark.parametrize(
    ("operations", "shared", "near"), [(1e9, 220, 8), (1.2e10, 83, 5), (8e10, 20, 4), (1.1e11, 20, 0)]
)
def test_dear_replays_are_fewer(operations: float, shared: int, near: int) -> None:
    """Those near the answer are each client's own, and cost all the more."""
    made = Smooth(operations=operations)
    short = LocalTraining(10, 15, 0.05)
    for seed, counts in enumerate(draws(2)):
        recover_labels(observed(counts, short, made, seed=seed), method="replay")
    assert len(made.plans) == shared + 2 * near


def test_replays_that_diverge_are_left_out_unless_most_do() -> None:
    counts = draws(1)[0]
    found = recover_labels(observed(counts, LONG, Scripted(0.05, diverging=0.3)), method="replay")
    assert 110 < found.diagnostics["replays"] < 170
    with pytest.raises(MismatchError, match="220 replays diverge"):
        recover_labels(observed(counts, LONG, Scripted(0.02, diverging=0.7)), method="replay")


def test_what_cant_be_replayed_is_answered_by_gls() -> None:
    base = observed(draws(1)[0], LONG, Scripted())
    path = base.residuals
    assert path is not None and path.end is not None
    few = replace(path.start, counts=np.full(N, 9))
    one = LocalTraining(1, 150, 0.05)
    for changed, why in (
        (replace(base, replayed_clients=None), "can't be replayed"),
        (replace(base, scaled=True), "clipped"),
        (replace(base, end=None), "local model's statistics"),
        (replace(base, start=replace(base.start, embedding_mean=None)), "embeddings"),
        (replace(base, residuals=replace(path, start=few)), "9 auxiliary samples"),
        (replace(base, training=one), "one step"),
    ):
        found = recover_labels(changed, method="replay")
        by_gls = recover_labels(changed, method="gls")
        notes = {note.code: note.message for note in found.warnings}
        assert why in notes["replay-not-fitted"]
        assert found.estimate.tolist() == by_gls.estimate.tolist()
    assert out_of_scope(np.full(101, 50), LONG) is not None
    assert out_of_scope(np.full(100, 10), LONG) is None


def test_a_strange_update_is_answered_by_gls() -> None:
    base = observed(draws(1)[0], LONG, Scripted(0.02))
    bias = base.update.bias
    assert bias is not None
    other = np.random.default_rng(0).normal(size=base.update.weight.shape)
    strange = replace(base, update=HeadUpdate(3 * other, bias))
    found = recover_labels(strange, method="replay")
    assert "replay-strange-update" in {note.code for note in found.warnings}
    assert found.diagnostics["replay_strangeness"] > 2
    assert found.estimate.tolist() == recover_labels(strange, method="gls").estimate.tolist()


def test_adam_has_bounds_and_gls_never_answers_for_it() -> None:
    adam = replace(LONG, optimizer="adam")
    made, held = Scripted(0.02), []
    for seed, counts in enumerate(draws(10)):
        found = recover_labels(observed(counts, adam, made, seed=seed), method="replay")
        assert found.low is not None and found.high is not None and found.presence is not None
        held.append((found.low <= 4 * counts) & (4 * counts <= found.high))
        assert found.diagnostics["residual"] is None
    assert np.mean(held) > 0.85
    base = observed(draws(1)[0], adam, made)
    other = np.random.default_rng(0).normal(size=base.update.weight.shape)
    strange = replace(base, update=HeadUpdate(3 * other, base.update.bias))
    found = recover_labels(strange, method="replay")
    assert found.low is None and found.presence is None
    assert {note.code: note.message for note in found.warnings}["update-unlike-replays"].endswith("no bounds")
    clipped = recover_labels(replace(base, scaled=True), method="replay")
    assert clipped.low is None and clipped.presence is None
    for missing in (replace(base, replayed_clients=None), replace(base, end=None)):
        with pytest.raises(MismatchError, match="try --method surrogate"):
            recover_labels(missing, method="replay")
    assert METHODS["replay"].needs_end(replace(adam, steps=1))
    assert out_of_scope(np.full(10, 50), replace(adam, steps=1)) is None


def test_a_smooth_way_is_found_as_well_as_least_squares_find_it() -> None:
    """Updates that are A z halfway between models that hardly move: no replay's neighbours say as much."""
    short = LocalTraining(10, 15, 0.05)
    errors, made = [], Smooth()
    for seed, counts in enumerate(draws(6)):
        found = recover_labels(observed(counts, short, made, seed=seed), method="replay")
        errors.append(np.abs(found.estimate / 150 - counts / 150).sum() / 2)
    assert METHODS["replay"].needs_end(short)
    assert np.mean(errors) < 0.01
