"""Count for count the same as `breaching` (Geiping et al., MIT), where the definitions coincide.

Slow, and skipped where breaching can't be imported: pip install --no-deps --target DIR breaching==0.1.2, then
PYTHONPATH=DIR. Its parent packages need torchvision and hydra, so they stand in as empty modules here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from methods_cases import in_steps, known_round, problem_of, random_head

from rlu_cli.core.recover import recover_labels
from rlu_cli.core.types import IntArray, Observation

pytestmark = pytest.mark.slow

N, L, CASES = 10, 16, 200


@pytest.fixture(scope="module")
def attacker() -> Iterator[Any]:
    """breaching's base attacker, without its constructor."""
    found = importlib.util.find_spec("breaching")
    if found is None or found.origin is None:
        pytest.skip("breaching is not installed")
    root = Path(found.origin).parent
    before = set(sys.modules)
    for name in ("breaching", "breaching.attacks", "breaching.attacks.auxiliaries", "breaching.cases"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = stub
    common = types.ModuleType("breaching.attacks.auxiliaries.common")
    common.optimizer_lookup = None  # type: ignore[attr-defined]
    models = types.ModuleType("breaching.cases.models")
    dictionary = types.ModuleType("breaching.cases.models.transformer_dictionary")
    dictionary.lookup_grad_indices = None  # type: ignore[attr-defined]
    sys.modules.update({m.__name__: m for m in (common, models, dictionary)})
    module = importlib.import_module("breaching.attacks.base_attack")
    instance = object.__new__(module._BaseAttacker)
    instance.setup = {"device": torch.device("cpu"), "dtype": torch.float64}
    yield instance
    for name in set(sys.modules) - before:
        del sys.modules[name]


def labels_of(attacker: Any, strategy: str, observation: Observation, total: int) -> list[int]:
    """breaching's labels for the mean gradient of the round."""
    gradient = problem_of(observation).gradient
    assert gradient.bias is not None
    attacker.cfg = SimpleNamespace(label_strategy=strategy)
    data = {
        "gradients": [torch.from_numpy(gradient.weight.copy()), torch.from_numpy(gradient.bias.copy())],
        "metadata": {"num_data_points": total},
    }
    torch.manual_seed(0)
    return [int(label) for label in attacker._recover_label_information([data], None, None)]


def some_round(seed: int, counts: IntArray, steps: int = 1) -> Observation:
    rng = np.random.default_rng([seed, 9])
    means = np.abs(rng.normal(size=(N, L)))
    observation = known_round(counts, random_head(N, L, seed=seed), seed=seed, class_means=means)
    return in_steps(observation, steps)


def uneven(seed: int) -> IntArray:
    rng = np.random.default_rng([seed, 1])
    return rng.multinomial(32, rng.dirichlet(np.full(N, 0.5)))


@pytest.mark.parametrize("steps", [1, 10])
def test_ebi_is_bias_corrected(attacker: Any, steps: int) -> None:
    for seed in range(CASES):
        observation = some_round(seed, uneven(seed), steps)
        theirs = np.bincount(labels_of(attacker, "bias-corrected", observation, 32), minlength=N)
        assert recover_labels(observation, method="ebi").counts.tolist() == theirs.tolist()


def test_gradinversion_is_yin(attacker: Any) -> None:
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        total = int(rng.integers(1, N + 1))
        counts = rng.multinomial(total, np.full(N, 1 / N))  # repeated labels too
        observation = some_round(seed, counts)
        theirs = np.bincount(labels_of(attacker, "yin", observation, total), minlength=N)
        assert recover_labels(observation, method="gradinversion").counts.tolist() == theirs.tolist()


def test_idlg(attacker: Any) -> None:
    for seed in range(CASES):
        observation = some_round(seed, np.eye(N, dtype=np.int64)[seed % N])
        assert labels_of(attacker, "iDLG", observation, 1) == [seed % N]
        assert recover_labels(observation, method="idlg").counts[seed % N] == 1


def test_llg_is_wainakh_simple_until_its_stale_index_matters(attacker: Any) -> None:
    """Stage 2 subtracts at ``idx``, where stage 1 ended: always the last class. The first label of stage 2 is
    right all the same, so with at most one of them the counts agree; later ones repeat the same class."""
    compared = 0
    for seed in range(20 * CASES):
        rng = np.random.default_rng([seed, 2])
        counts = rng.multinomial(int(rng.integers(1, 7)), rng.dirichlet(np.ones(N)))
        observation = some_round(seed, counts)
        total = int(counts.sum())
        given = int(np.count_nonzero(problem_of(observation).row_sums < 0))
        if total - 1 <= given <= total:
            theirs = np.bincount(labels_of(attacker, "wainakh-simple", observation, total), minlength=N)
            assert recover_labels(observation, method="llg").counts.tolist() == theirs.tolist()
            compared += 1
    assert compared > CASES
    broken = labels_of(attacker, "wainakh-simple", some_round(0, uneven(0)), 32)
    assert np.bincount(broken).max() > 20  # nearly everything in one class
