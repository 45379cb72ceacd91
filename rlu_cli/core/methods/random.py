"""The floor: labels drawn blindly."""

from __future__ import annotations

import hashlib

import numpy as np

from rlu_cli.core.methods.base import Method, Problem, never
from rlu_cli.core.types import Estimate, Note


def solve(problem: Problem) -> Estimate:
    """z = counts/total of ``total`` labels drawn uniformly: what a method must beat.

    The draw is another one for every update, and the same whenever it is asked for.
    """
    observation = problem.observation
    total = observation.training.samples
    N = observation.head.num_classes
    sent = hashlib.sha256(observation.update.weight.tobytes()).digest()
    rng = np.random.default_rng((observation.seed, int.from_bytes(sent[:8], "little")))
    draws = rng.multinomial(total, np.full(N, 1.0 / N))
    note = Note("counts-random", "the counts are drawn at random, as a floor for methods: they mean nothing")
    return Estimate(draws / total, warnings=(note,))


RANDOM = Method(
    name="random",
    summary="labels drawn uniformly at random, without looking at the update",
    reference="",
    solve=solve,
    needs_end=never,
)
