"""Simulation-based regression: label proportions as a function of the update, learnt from made-up clients."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlu_cli.core.error_model import ResidualModel, fit, is_exact
from rlu_cli.core.fits import Arrays, Fits, checked
from rlu_cli.core.losses import LossRange, loss_range, losses
from rlu_cli.core.methods.base import Capabilities, Method, Problem
from rlu_cli.core.methods.gls import GLS, solve_instead
from rlu_cli.core.noise import centred, is_rounding, normalised_noise
from rlu_cli.core.parallel import one_thread
from rlu_cli.core.progress import Progress, ignore
from rlu_cli.core.regressor import Prediction, Regressor
from rlu_cli.core.residuals import MOST_SAMPLED, ResidualMoments
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.synthetic_clients import (
    ClientSimulator,
    FeatureNoise,
    SyntheticClients,
    update_features,
    without_size,
)
from rlu_cli.core.types import (
    Activations,
    Estimate,
    FloatArray,
    IntArray,
    LocalTraining,
    Note,
)

_CLIENTS = 24
"""Made-up clients for each of the Monte Carlo samples that are asked for."""

_ROWS, _NUMBERS = 16_000_000, 40_000_000
"""All these clients' samples and features, at most."""

_EMBEDDED, _FEWEST_EMBEDDED = 4_000_000_000, 10_000
"""The numbers of their samples' embeddings, where they are made up of these, at most; and the fewest of such
clients that are worth it."""

_HELD_OUT = 3000
_COMPARED, _RANGED = 150, 450
"""Clients that calibrate, and those of them that `gls` solves as well: more where they are rounded by steps
of all sizes, of which those nearest to the client's are compared."""

_LEVEL = 0.95

_MOST_CLASSES, _MOST_SAMPLES, _FEWEST_AUXILIARY = MOST_SAMPLED, 2000, 10
"""Where it was measured; beyond, features are many, updates near normal, or samples too few to learn from."""

_STRANGE = 2.0
"""How much stranger than all held-out clients an update may be."""


@dataclass(frozen=True)
class Regression:
    """A regressor with what it does on clients that it was not fitted to.

    steps : of the grids that clients were rounded to, 1 of those that weren't, shape (C,)
    errors : share of the labels that the regressor and `gls` got wrong of the same clients, shape (C, 2)
    widening : what is added to both sides of its bounds, so that 95 % hold after rounding
    strangest : the largest strangeness among the clients
    """

    regressor: Regressor
    steps: FloatArray
    errors: FloatArray
    widening: float
    strangest: float

    def compared(self, step: float) -> tuple[float, float, bool]:
        """Both mean errors, and whether the regressor's is smaller by twice the difference's standard error.

        Parameters
        ----------
        step : of the client's own grid, of clients rounded like whom they are; 1 where there is none
        """
        near = np.argsort(np.abs(np.log(self.steps / step)), kind="stable")[:_COMPARED]
        mine, its = self.errors[near].T
        gain = its - mine
        better = gain.mean() > 2 * gain.std(ddof=1) / np.sqrt(len(gain))
        return float(mine.mean()), float(its.mean()), bool(better)

    def arrays(self) -> Arrays:
        """Of which `from_arrays` makes it again."""
        measured = {"measured": np.array([self.widening, self.strangest])}
        return {**self.regressor.arrays(), "steps": self.steps, "errors": self.errors, **measured}

    @classmethod
    def from_arrays(cls, arrays: Arrays, features: int, num_classes: int) -> Regression:
        """From a file, for so many features; raises as `Regressor.from_arrays` does."""
        widening, strangest = map(float, checked(arrays, "measured", (2,)))
        steps = checked(arrays, "steps", (None,))
        errors = checked(arrays, "errors", (len(steps), 2))
        if min(errors.min(), widening) < 0 or min(strangest, steps.min()) <= 0 or len(steps) < 2:
            raise ValueError("errors are not positive")
        regressor = Regressor.from_arrays(arrays, features, num_classes)
        return cls(regressor, steps, errors, widening, strangest)


_regressions: Fits[Regression] = Fits("regression", Regression.arrays)


def solve(problem: Problem) -> Estimate:
    """Label proportions by regression on simulated clients.

        z ≈ median of z given f,     f = (−∇b, −∇W Wᵀ)

    Under the global model one sample adds r = onehot − s to the bias and r ⊗ e to the weight. Where the model
    is mostly right, r is near 0 for most samples and large for a few, so u is far from normal given the
    counts, and least squares, which look at means and covariances, lose what its exact size says. Here
    24 clients for each of ``--samples`` are made up from the auxiliary samples (`ClientSimulator`), and a
    network learns z, its 2.5 % and 97.5 % quantiles and the presence of each class from f (`Regressor`).
    Clients held out widen the bounds until 95 % of the rounded ones hold, and decide by the labels it gets
    wrong between the network and `gls`, which is exact where residuals don't vary within a class. An update
    far outside of all that were simulated gets the answer of `gls` too. Known noise is drawn for the
    simulated clients.
    Where the update was scaled by an unknown factor c (clipping), so are theirs, by factors log-uniform from
    0.05 to 1, and the network sees f/‖f‖ alone, with known noise log ‖f‖ too. Where it was sparsified or
    quantised so are theirs, number by number, by any least size near the client's, and to a grid between the
    ends of their own numbers, or of any step near the client's, and the network sees these as well.

    Assumptions: one step, or else the answer is that of `gls`; auxiliary samples like the client's.
    Uses ΔW, Δb and single auxiliary samples' logits.
    Source: regression for simulators (Beaumont et al. 2002; Papamakarios & Murray 2016), on exact gradients.
    """
    observation = problem.observation
    path = observation.residuals
    assert path is not None
    why = out_of_scope(path.start.counts, observation.training)
    if path.samples is None and why is None:
        why = "single auxiliary samples' logits are unknown, and regression simulates clients from them"
    if observation.noise_std and path.along is None and why is None:
        why = "the update has noise, and single auxiliary samples' embeddings are unknown"
    if path.samples is None or why is not None:
        return solve_instead(problem, Note("regression-not-fitted", f"{why}: the counts are those of gls"))
    lost = None if path.samples.embeddings is None else losses(observation)
    lossy = None if lost is None else loss_range(lost)
    if lossy is not None and _affordable(problem.total, observation.head.weight) < _FEWEST_EMBEDDED:
        why = "the update was compressed, and clients of so many samples take too long to make up"
        return solve_instead(problem, Note("regression-not-fitted", f"{why}: the counts are those of gls"))
    noise = _known_noise(problem, lossy)
    seen = torch.from_numpy(update_features(problem.gradient, observation.head, noise))[None].float()
    look = _Look(
        problem.num_classes, observation.head.bias is not None, observation.scaled, noise is not None, lossy
    )
    features = look(seen if lost is None else torch.cat((seen, lost.features()), dim=1))
    regression = _regression(problem, path.samples, path.start, noise, look, features.shape[1])
    strangeness = float(regression.regressor.strangeness(features)[0])
    mine, its, better = regression.compared(1.0 if lost is None or not lost.step else float(lost.step))
    found = {
        "regression_error": mine,
        "regression_error_gls": its,
        "regression_strangeness": strangeness / regression.strangest,
    }
    if not better:
        return solve_instead(problem, **found)
    if not strangeness <= _STRANGE * regression.strangest:
        note = Note(
            "regression-strange-update",
            "the update is unlike that of any simulated client (noise, other data or training values?): the "
            "counts are those of gls",
        )
        return solve_instead(problem, note, **found)
    prediction = regression.regressor(features)
    low, high = rounded_bounds(prediction, problem.total, regression.widening)
    z = prediction.proportions[0]
    found["residual"] = problem.residual(z)
    return Estimate(
        z, found, low=low[0], high=high[0], presence=prediction.presence[0], any_size=observation.scaled
    )


def rounded_bounds(prediction: Prediction, total: int, widening: float) -> tuple[FloatArray, FloatArray]:
    """Bounds of the counts, whole numbers in [0, total] around the estimate, each of shape (S, N)."""
    counts = total * prediction.proportions
    low = np.rint(total * (prediction.low - widening))
    high = np.rint(total * (prediction.high + widening))
    return np.clip(low, 0, np.floor(counts)), np.clip(high, np.ceil(counts), total)


def widening_for(prediction: Prediction, clients: SyntheticClients) -> float:
    """The least δ ≥ 0 by which bounds must grow for 95 % of these counts to lie within the rounded ones."""
    total = clients.counts.sum(axis=1, keepdims=True)
    below = prediction.low - (clients.counts + 0.5) / total
    above = (clients.counts - 0.5) / total - prediction.high
    return max(0.0, float(np.quantile(np.maximum(below, above), _LEVEL)))


def out_of_scope(counts: IntArray, training: LocalTraining) -> str | None:
    """Why there is no regression for such a client, None where there is one.

    Parameters
    ----------
    counts : auxiliary samples of each class
    """
    classes, fewest, total = len(counts), int(counts.min()), training.samples
    if training.steps > 1:
        return f"the client took {training.steps} steps, and regression simulates one"
    if classes > _MOST_CLASSES:
        return f"there are {classes} classes, and regression is made for {_MOST_CLASSES} at most"
    if total > _MOST_SAMPLES:
        return f"the client saw {total} samples, and regression is made for {_MOST_SAMPLES} at most"
    if fewest < _FEWEST_AUXILIARY:
        return f"a class has {fewest} auxiliary samples, and regression needs {_FEWEST_AUXILIARY}"
    return None


def _known_noise(problem: Problem, lossy: LossRange | None) -> FeatureNoise | None:
    """Noise that is but seen in a quantised update may be what rounding adds, to made-up clients as well."""
    observation = problem.observation
    path, std = observation.residuals, normalised_noise(observation)
    if std == 0.0 or path is None or path.along is None:
        return None
    weight = observation.head.weight
    if lossy is not None and lossy.rounded and is_rounding(observation):
        std = 0.0
    return FeatureNoise(std, weight, path.along)


def _affordable(total: int, weight: FloatArray) -> int:
    """How many clients can be made up of embeddings."""
    return _EMBEDDED // (total * sum(weight.shape))


@dataclass(frozen=True)
class _Look:
    """What the network sees of updates' features.

    has_bias : whether there is a bias: what stands for it is good for sums, and not sample by sample
    scaled, noisy : whether updates are scaled by unknown factors, and have noise
    lossy : how they were compressed; what is seen of that comes last
    """

    num_classes: int
    has_bias: bool
    scaled: bool
    noisy: bool
    lossy: LossRange | None = None

    def __call__(self, features: Tensor) -> Tensor:
        """Of clients' `update_features`, shape (S, …)."""
        learnt = features if self.has_bias else features[:, self.num_classes :]
        if self.lossy is None:
            return without_size(learnt, noisy=self.noisy) if self.scaled else learnt
        last = learnt.shape[1] - self.lossy.width
        learnt, lost = learnt[:, :last], learnt[:, last:]
        if self.scaled:
            size = torch.linalg.norm(learnt, dim=1, keepdim=True).clamp(min=torch.finfo(learnt.dtype).tiny)
            sizes, places = lost[:, : self.lossy.logarithms], lost[:, self.lossy.logarithms :]
            learnt, lost = (
                without_size(learnt, noisy=self.noisy),
                torch.cat((sizes - size.log(), places), dim=1),
            )
        return torch.cat((learnt, lost), dim=1)


def _regression(
    problem: Problem,
    samples: Activations,
    moments: ResidualMoments,
    noise: FeatureNoise | None,
    look: _Look,
    features: int,
) -> Regression:
    """The global model's, fitted once for all clients with as many samples, for so many features."""
    observation = problem.observation
    bias, seed = observation.head.bias, observation.seed

    def make() -> Regression:
        return fit_regression(
            samples,
            moments,
            bias,
            problem.total,
            clients=_CLIENTS * observation.samples,
            seed=seed,
            noise=noise,
            scaled=look.scaled,
            lossy=look.lossy,
            weight=observation.head.weight,
            progress=observation.progress,
        )

    values: dict[str, Any] = {
        "total": problem.total,
        "samples": observation.samples,
        "seed": seed,
        "noise": None if noise is None else noise.std,
        "scaled": observation.scaled,
    }
    if look.lossy is not None:
        values["lossy"] = asdict(look.lossy)
    return _regressions.get(
        observation,
        values,
        make=make,
        unpack=lambda arrays: Regression.from_arrays(arrays, features, problem.num_classes),
    )


def fit_regression(
    samples: Activations,
    moments: ResidualMoments,
    bias: FloatArray | None,
    total: int,
    *,
    clients: int,
    seed: int,
    noise: FeatureNoise | None = None,
    scaled: bool = False,
    lossy: LossRange | None = None,
    weight: FloatArray | None = None,
    progress: Progress = ignore,
) -> Regression:
    """A regressor for clients with so many samples, with its errors and those of `gls`, which knows no scale.

    Parameters
    ----------
    samples : of the auxiliary data under the global model
    moments : of their residuals
    bias : the global head's b, None if it has none: the regressor then learns from the weight alone
    total : samples of a client
    clients : to fit to, at most
    noise : that the clients' updates have; ``moments`` are of both views then
    scaled : whether the clients' updates are scaled by unknown factors
    lossy, weight : how they are compressed, and the head's W then
    progress : told of the network's steps
    """
    N = samples.logits.shape[1]
    b = np.zeros(N) if bias is None else bias
    simulator = ClientSimulator(
        samples,
        b,
        total,
        seed=seed,
        noise=noise,
        scaled=scaled,
        lossy=lossy,
        weight=weight,
        has_bias=bias is not None,
    )
    clients = min(clients, _ROWS // total, _NUMBERS // (N + N * N))
    if lossy is not None and weight is not None:
        clients = min(clients, _affordable(total, weight))
    look = _Look(N, bias is not None, scaled, noise is not None, lossy)
    drawn = simulator.draw(clients)
    drawn = replace(drawn, features=look(drawn.features))
    regressor = Regressor.fitted(drawn, seed=seed, progress=progress)
    others = simulator.draw(_HELD_OUT)
    with one_thread():
        prediction = regressor(look(others.features))
    steps = None if lossy is None or not lossy.rounded else lossy.steps(others.features)
    few = slice(_COMPARED if steps is None else _RANGED)
    some = SyntheticClients(others.counts[few], others.features[few])
    solved = (
        prediction.proportions[few],
        _solved_by_gls(some, moments, noise, None if bias is None else lossy),
    )
    return Regression(
        regressor,
        np.ones(len(some.counts)) if steps is None else steps[few],
        np.column_stack([_wrong(z, some.counts) for z in solved]),
        widening=widening_for(prediction, others),
        strangest=float(regressor.strangeness(look(others.features)).max()),
    )


def _solved_by_gls(
    clients: SyntheticClients, moments: ResidualMoments, noise: FeatureNoise | None, lossy: LossRange | None
) -> FloatArray:
    """Proportions of each client as `gls` finds them of the views that it has of such ones, shape (S, N)."""
    N, total = clients.counts.shape[1], int(clients.counts[0].sum())
    training = LocalTraining(1, total, 1.0)
    features = clients.features.double().numpy()
    bias = features[:, :N]
    added = np.full(len(bias), 0.0 if noise is None else noise.std)
    plain = noise is None
    if lossy is not None and lossy.rounded and not added.any():
        added = lossy.bias_steps(bias, clients.features) / np.sqrt(12)
        bias = centred(bias)
        plain = plain or is_exact(moments, training)
    updates, lengths = bias[:, :-1], [1.0]
    if noise is not None and not plain:
        along = features[:, N : N + N * len(noise.rows)].reshape(len(bias), N, -1)[:, :-1, -1]
        updates = np.concatenate((updates, along), axis=1)
        lengths.append(float(np.linalg.norm(noise.along)))
    with one_thread():  # many small systems
        return np.stack(
            [
                fit(
                    ResidualModel([(1.0, moments)], training, noise=tuple(std * x for x in lengths)), u
                ).solution.z
                for std, u in zip(added, updates, strict=True)
            ]
        )


def _wrong(z: FloatArray, counts: IntArray) -> FloatArray:
    """Share of the labels of each client that whole counts of these proportions get wrong, shape (S,)."""
    found = np.stack([round_to_total(row, int(own.sum())) for row, own in zip(z, counts, strict=True)])
    return np.asarray(np.abs(found - counts).sum(axis=1) / 2 / counts.sum(axis=1))


REGRESSION = Method(
    name="regression",
    summary="a regression on simulated clients of one step, shared by all clients, with error bars",
    reference="regression for simulators (Beaumont et al. 2002), on the head's exact gradient",
    solve=solve,
    needs_end=GLS.needs_end,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=True,
        trained_model=True,
    ),
    needs_bias=True,
    or_unit=True,
    uses_auxiliary=True,
    needs_residuals=True,
    needs_samples=True,
    out_of_scope=out_of_scope,
)
