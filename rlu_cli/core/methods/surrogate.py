"""A local linear model of what training makes of label proportions, fitted to replayed training."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from rlu_cli.core.client_views import Replays
from rlu_cli.core.fits import Fits
from rlu_cli.core.methods.base import Capabilities, Method, Problem, check_diverging, never
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import step_rates
from rlu_cli.core.simplex import SimplexSolution, simplex_least_squares
from rlu_cli.core.synthetic_clients import draw_mixes, mixes_near
from rlu_cli.core.types import Estimate, FloatArray, Head, Note
from rlu_cli.core.update_shape import check_shape, update_shape

_FIRST, _NEAR, _ROUNDS = 100, 30, 2
"""Replays on mixes of every kind, which all clients of a round share, and on mixes near the estimate."""

_CONCENTRATION = 20.0
"""How near to the estimate the later ones' mixes are, see `mixes_near`."""

_WIDTHS = (np.inf, 0.5, 0.5, 0.5)
_NEAR_WIDTHS = (0.25, 0.25, 0.25)
"""Standard deviations of the weights of replays by the distance of their mixes from the estimate."""

_DIRECTIONS = 3
"""In which the classes' embeddings differ most, along which the weight is looked at beside their mean."""

_FARTHEST = 1e6
"""How many times larger than all replayed an update may be; beyond, its size means nothing."""

_RIDGE = 1e-2
_DIAGONAL = 0.5
"""Share of the errors' covariance that is taken from its diagonal alone: it has as many rows as replays."""


_banks: Fits[Replays] = Fits("surrogate", Replays.arrays)
"""The first replays of each global model."""


def solve(problem: Problem) -> Estimate:
    """Label proportions whose replayed training makes the update that the client sent.

        f(z) ≈ a + J (z − z₀) near z₀,     min_z (f − a − J (z − z₀))ᵀ Σ⁻¹ (f − a − J (z − z₀)) on the simplex

    f is Δb and ΔW along the mean embedding and three directions in which the classes' embeddings differ, over
    the sum of the learning rates. Training on auxiliary samples, by the client's own optimiser, is replayed
    on 100 mixes of every kind (`draw_mixes`); a and J come from ridge regression with weights
    exp(−‖z_r − z₀‖²/2w²), Σ from its residuals, and z₀ moves to the solution.
    Twice, 30 replays near the estimate are added.

    Nothing is asked of the optimiser but that it can be run, so this serves Adam too, whose update isn't
    linear in the gradients. It gives no bounds.

    Assumptions: auxiliary samples like the client's; optimiser and step count known.
    Uses ΔW, Δb, the auxiliary images and the network.
    Source: local-linear regression on simulations (Beaumont et al. 2002), with the model turned round.
    """
    observation = problem.observation
    replay = observation.replayed_update
    assert replay is not None
    means, _ = observation.start.embeddings_for("surrogate")
    training, seed = observation.training, observation.seed
    views = _views(means)
    rate = float(step_rates(training).sum())
    N, total = problem.num_classes, training.samples

    def features(change: Head) -> FloatArray:
        assert change.bias is not None
        return np.concatenate((change.bias, (change.weight @ views).ravel())) / rate

    def shape(change: Head, draw: int) -> FloatArray:
        drawn = np.random.default_rng((seed, 2, draw)).normal(size=change.weight.shape)
        return update_shape((change.weight + observation.noise_std * drawn) / rate)

    def replayed(mixes: FloatArray, *, first: int) -> Replays:
        """Training on each of the mixes, in whole samples; those that diverge are left out."""
        changes = [(draw, z, replay(z, draw)) for draw, z in enumerate(mixes, start=first)]
        kept = [(draw, z, change) for draw, z, change in changes if change is not None]
        check_diverging(len(mixes) - len(kept), len(mixes))
        return Replays(
            np.array([round_to_total(z, total) / total for _, z, _ in kept]),
            np.array([features(change) for *_, change in kept]),
            np.array([shape(change, draw) for draw, _, change in kept]),
        )

    found = _banks.get(
        observation,
        {
            "training": asdict(training),
            "seed": seed,
            "noise_std": observation.noise_std,
            "frozen": observation.frozen,
        },
        make=lambda: replayed(draw_mixes(_FIRST, N, np.random.default_rng(seed)), first=0),
        unpack=lambda arrays: Replays.from_arrays(arrays, N, (N * (1 + views.shape[1]),)),
    )
    noise = np.full(N * (1 + views.shape[1]), observation.noise_std / rate)
    notes: tuple[Note, ...] = ()
    if training.optimizer != "sgd":
        own = update_shape(observation.update.weight / rate)
        notes = check_shape(own, found.shapes, sized=not observation.scaled)
    largest = _FARTHEST * float(np.abs(found.features).max())
    sent = np.clip(features(observation.update), -largest, largest)
    z = np.full(N, 1.0 / N)
    for width in _WIDTHS:
        z = fit_near(found, sent, z, width=width, noise=noise).z
    rng = np.random.default_rng((seed, 1))
    for round_ in range(_ROUNDS):
        mixes = mixes_near(z, _NEAR, rng, concentration=_CONCENTRATION)
        found = found.and_(replayed(mixes, first=_FIRST + round_ * _NEAR))
        for width in _NEAR_WIDTHS:
            solution = fit_near(found, sent, z, width=width, noise=noise)
            z = solution.z
    return Estimate(
        z,
        {
            "residual": solution.residual,
            "duality_gap": solution.gap,
            "solver_certified": solution.certified,
            "replays": len(found.proportions),
        },
        notes,
    )


def fit_near(
    replayed: Replays, features: FloatArray, z: FloatArray, *, width: float, noise: FloatArray
) -> SimplexSolution:
    """The proportions that explain ``features`` best under a linear model fitted about z.

    Parameters
    ----------
    features : of the client's update, shape (F,)
    width : w of the replays' weights, infinite for equal ones
    noise : standard deviation of known noise on each feature, shape (F,)
    """
    apart = replayed.proportions - z
    nearness = np.exp(-np.square(apart).sum(axis=1) / (2 * width**2))
    weights = nearness / nearness.mean()
    X = np.column_stack((np.ones(len(apart)), apart))
    ridge = _RIDGE * np.eye(X.shape[1])
    ridge[0, 0] = 0.0
    found = np.linalg.solve(
        X.T @ (weights[:, None] * X) + ridge, X.T @ (weights[:, None] * replayed.features)
    )
    errors = np.sqrt(weights)[:, None] * (replayed.features - X @ found)
    covariance = errors.T @ errors / max(len(X) - X.shape[1], 1)
    covariance = (1 - _DIAGONAL) * covariance + _DIAGONAL * np.diag(np.diag(covariance))
    floor = max(1e-9 * float(np.trace(covariance)) / len(covariance), 1e-16)
    root = np.linalg.cholesky(covariance + np.diag(floor + noise**2))
    J = found[1:].T
    white = np.linalg.solve(root, np.column_stack((J, features - found[0] + J @ z)))
    return simplex_least_squares(white[:, :-1], white[:, -1])


def _views(means: FloatArray) -> FloatArray:
    """Orthonormal directions of the embedding, shape (L, 1 + 3)."""
    centre = means.mean(axis=0)
    along = centre / max(float(np.linalg.norm(centre)), np.finfo(float).tiny)
    apart = means - centre
    apart = apart - np.outer(apart @ along, along)
    return np.column_stack((along, np.linalg.svd(apart, full_matrices=False)[2][:_DIRECTIONS].T))


SURROGATE = Method(
    name="surrogate",
    summary="a linear model fitted to replays of the training on many mixes, for any optimiser",
    reference="local-linear regression on simulations (Beaumont et al. 2002)",
    solve=solve,
    needs_end=never,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=True,
        trained_model=True,
    ),
    needs_bias=True,
    uses_auxiliary=True,
    needs_update_replays=True,
    any_optimizer=True,
)
