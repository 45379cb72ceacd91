"""What methods declare, the warnings that follow from it, and what they refuse."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from cli_tools import QUICK, SAMPLES, call, sample, truth
from methods_cases import known_round, problem_of, random_head, untrained

import rlu_cli.core.methods as package
from rlu_cli.core.method_names import METHOD_CHOICE, METHOD_NAMES
from rlu_cli.core.methods import METHODS, Capabilities
from rlu_cli.core.methods.base import on_simplex
from rlu_cli.core.methods.table import capability_table
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.reliability import UNRELIABLE, reliability
from rlu_cli.core.trained import shows_training
from rlu_cli.core.types import Estimate, Head, HeadUpdate, Observation
from rlu_cli.errors import MismatchError

ROOT = Path(__file__).resolve().parent.parent
N, L = 8, 10
SPREAD = np.array([6, 0, 2, 1, 0, 0, 3, 2])


def codes(observation: Observation, name: str) -> set[str]:
    found = {note.code for note in recover_labels(observation, method=name).warnings}
    return {code for code in found if code.startswith(("assumes-", "method-"))}


def plain() -> Observation:
    """One step of an untrained ReLU network."""
    return known_round(SPREAD, untrained(N, L))


def names_without(capability: str) -> set[str]:
    able = {name: method.capabilities for name, method in METHODS.items()}
    return {name for name, c in able.items() if c is not None and not getattr(c, capability)}


def names_with_code(observation: Observation, code: str) -> set[str]:
    return {name for name in METHODS if code in codes(observation, name)}


# Declarations.


def test_names_for_help_are_those_of_the_methods() -> None:
    assert tuple(METHODS) == METHOD_NAMES
    assert all(METHODS[name].name == name for name in METHODS)
    assert METHOD_CHOICE.startswith("auto, rlu, ") and METHOD_CHOICE.endswith(" or random")


def test_one_method_a_file() -> None:
    folder = Path(package.__file__).parent
    for name in METHODS:
        page = folder / f"{name.replace('+', '_plus')}.py"
        tree = ast.parse(page.read_text(encoding="utf-8"))
        solve = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "solve")
        text = ast.get_docstring(solve) or ""
        if name not in ("rlu", "random"):
            for word in ("Assumptions:", "Source:", "Uses "):
                assert word in text, f"{page.name} lacks {word}"
            assert METHODS[name].reference


def test_capabilities_agree_with_the_papers_table() -> None:
    """Table 5 of the RLU paper: batch, repeating labels, activation-agnostic, multiple epochs, trained."""
    printed = {
        "idlg": "00001",
        "gradinversion": "10001",
        "rlg": "10111",
        "llg": "11001",
        "llg+": "11001",
        "zlg": "11000",
        "zlg+": "11000",
        "ilrg": "11100",
        "rlu": "11111",
    }
    for name, marks in printed.items():
        able = METHODS[name].capabilities
        assert able is not None
        assert "".join(str(int(getattr(able, f.name))) for f in fields(Capabilities)) == marks, name


def test_documented_table_is_the_declared_one() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert capability_table(METHODS) in page
    for name in METHODS:
        rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(rows) >= 2  # an idea and a capability row


# Warnings.


def test_no_warning_where_the_assumptions_hold() -> None:
    for name in METHODS:
        expected = {
            "idlg": {"assumes-one-sample"},
            "gradinversion": {"assumes-unique-labels"},
            "rlg": {"assumes-unique-labels", "assumes-few-samples"},
        }
        assert codes(plain(), name) == expected.get(name, set())


def test_one_sample() -> None:
    single = known_round(np.eye(N, dtype=np.int64)[3], untrained(N, L))
    for name in METHODS:
        assert codes(single, name) == set()
    assert names_with_code(plain(), "assumes-one-sample") == names_without("batch")


def test_unique_labels() -> None:
    expected = names_without("repeating_labels") - names_without("batch")
    assert names_with_code(plain(), "assumes-unique-labels") == expected
    # Fewer samples than classes, but repeated: GradInversion can tell by the rows that stayed positive, and
    # RLG by the classes that it separates.
    repeated = known_round(np.array([4, 0, 0, 0, 0, 0, 0, 0]), untrained(N, L))
    assert names_with_code(repeated, "assumes-unique-labels") == {"gradinversion", "rlg"}
    for method in ("gradinversion", "rlg"):
        notes = recover_labels(repeated, method=method).warnings
        assert "4 samples have left a trace in 1 of them" in " ".join(note.message for note in notes)


def test_few_samples() -> None:
    assert names_with_code(plain(), "assumes-few-samples") == {"rlg"}


def test_nonnegative_embedding() -> None:
    means = np.random.default_rng(0).normal(size=(N, L))
    observation = known_round(SPREAD, untrained(N, L), class_means=means)
    assert names_with_code(observation, "assumes-nonnegative-embedding") == names_without("any_activation")
    notes = recover_labels(observation, method="llg").warnings
    assert f"{np.mean(means < 0):.0%}" in " ".join(note.message for note in notes)


def test_one_step() -> None:
    observation = known_round(SPREAD, untrained(N, L), steps=3)
    assert names_with_code(observation, "assumes-one-step") == names_without("several_steps")
    assert "dimitrov" not in names_without("several_steps")


@pytest.mark.parametrize(
    ("confidence", "classes", "trained"),
    [
        (0.19, 10, False),
        (0.21, 10, True),
        (0.74, 2, False),
        (0.76, 2, True),
        (0.66, 3, False),
        (0.67, 3, True),
    ],
)
def test_when_a_model_shows_training(confidence: float, classes: int, trained: bool) -> None:
    """Twice chance is 1 for two classes: none ever did."""
    assert shows_training(confidence, classes) is trained


def test_untrained_model() -> None:
    confidence = np.full((N, N), 0.3 / (N - 1))
    np.fill_diagonal(confidence, 0.7)
    observation = plain()
    skilled = replace(observation, start=replace(observation.start, confidence=confidence))
    assert names_with_code(skilled, "assumes-untrained-model") == names_without("trained_model")


def test_dimitrov_without_the_local_model() -> None:
    observation = replace(known_round(SPREAD, untrained(N, L), steps=3), end=None)
    found = recover_labels(observation, method="dimitrov")
    assert "local-statistics-missing" in {note.code for note in found.warnings}
    zlg_plus = recover_labels(observation, method="zlg+")
    assert found.counts.tolist() == zlg_plus.counts.tolist()


def test_every_assumption_makes_strict_fail() -> None:
    declared = {f.name for f in fields(Capabilities)}
    assert declared == {"batch", "repeating_labels", "any_activation", "several_steps", "trained_model"}
    assert len([code for code in UNRELIABLE if code.startswith("assumes-")]) == len(declared) + 1


# Heads without bias, and updates that determine nothing.


@pytest.mark.parametrize("name", METHODS)
def test_heads_without_bias(name: str) -> None:
    observation = known_round(SPREAD, untrained(N, L, bias=False))
    assert observation.update.bias is None
    if METHODS[name].needs_bias:
        with pytest.raises(MismatchError, match=rf"with a bias, which {name.replace('+', '.')} works on"):
            recover_labels(observation, method=name)
    else:
        assert recover_labels(observation, method=name).counts.sum() == SPREAD.sum()


def test_methods_that_need_a_bias() -> None:
    assert {name for name, m in METHODS.items() if m.needs_bias} == {
        *("gls", "disaggregation", "regression", "replay", "surrogate", "zlg", "ilrg", "ebi", "llbg")
    }


@pytest.mark.parametrize("values", [[0.0, -1.0, 0.0], [np.nan, 1.0, 1.0], [np.inf, 1.0, 1.0]])
def test_no_answer_is_a_uniform_guess_with_a_warning(values: list[float]) -> None:
    z, (note,) = on_simplex(np.array(values))
    np.testing.assert_allclose(z, 1 / 3)
    assert note.code == "method-undetermined"


@pytest.mark.parametrize("name", METHODS)
def test_extreme_updates_leave_finite_counts(name: str) -> None:
    """Dead embeddings, a bias alone that moved, a bias alone that stood still, a single row, huge numbers."""
    observation = known_round(SPREAD, random_head(N, L))
    weight, bias = observation.update.weight, observation.update.bias
    assert bias is not None
    one = np.zeros_like(bias)
    one[2] = 1e-320
    updates = [(0 * weight, bias), (weight, 0 * bias), (weight, one), (weight, -abs(bias))]
    updates += [(1e200 * weight, bias), (np.abs(weight), np.abs(bias))]
    dead = replace(observation.start, embedding_mean=np.zeros((N, L)), gradient_sum=np.zeros((N, N)))
    for w, b in updates:
        for start in (observation.start, dead):
            odd = replace(observation, update=type(observation.update)(w, b), start=start, end=start)
            z = METHODS[name].solve(problem_of(odd)).proportions
            assert np.all(np.isfinite(z)) and z.min() >= 0
            assert z.sum() == pytest.approx(1)


def test_dead_embeddings_are_undetermined_for_zlg() -> None:
    observation = known_round(SPREAD, random_head(N, L))
    dead = replace(observation.start, embedding_mean=np.zeros((N, L)))
    estimate: Estimate = METHODS["zlg+"].solve(problem_of(replace(observation, start=dead)))
    assert [note.code for note in estimate.warnings] == ["method-undetermined"]
    still = type(observation.update)(0 * observation.update.weight, observation.update.bias)
    estimate = METHODS["zlg"].solve(problem_of(replace(observation, update=still)))
    assert [note.code for note in estimate.warnings] == ["method-undetermined"]


def test_ilrg_survives_a_class_that_stood_still() -> None:
    """∇b_j = 0 has no ē_j; the embedding of all rows takes its place and the counts stay right."""
    counts = np.array([1, 4, 2, 1, 0, 0, 0, 0])  # the first has exactly its share 1/N of 8 samples
    observation = known_round(counts, untrained(N, L), spread=0.0)
    assert observation.update.bias is not None
    assert np.any(observation.update.bias == 0)
    assert recover_labels(observation, method="ilrg").counts.tolist() == counts.tolist()


def test_a_head_needs_no_bias_only_where_declared() -> None:
    """No method touches the bias of a head that has one without saying so."""
    observation = known_round(SPREAD, random_head(N, L))
    for name, method in METHODS.items():
        if name in ("rlu", "random") or method.needs_bias:
            continue
        other = replace(
            observation,
            head=Head(observation.head.weight, None),
            update=type(observation.update)(observation.update.weight, None),
        )
        given, without = (method.solve(problem_of(o)).proportions for o in (observation, other))
        np.testing.assert_array_equal(given, without)


def test_random_counts_are_never_trusted() -> None:
    observation = known_round(SPREAD, random_head(N, L))
    found = recover_labels(observation, method="random")
    other = replace(observation, update=HeadUpdate(2 * observation.update.weight, observation.update.bias))
    drawn = [recover_labels(o, method="random").counts.tolist() for o in (observation, other)]
    assert drawn[0] == found.counts.tolist() != drawn[1]
    assert [note.code for note in found.warnings] == ["counts-random"]
    assert reliability(found, ["counts-random"]).grade == "poor"


# The commands.


def test_evaluate_with_every_method() -> None:
    flags = [flag for name in METHODS for flag in ("--method", name)]
    outcome = call(
        "evaluate",
        *sample("untrained_m10"),
        *QUICK,
        "--truth",
        SAMPLES / "untrained_m10" / "truth.json",
        *flags,
    )
    results = {entry["method"]: entry for entry in outcome.document["results"]}
    assert tuple(results) == METHOD_NAMES
    total = sum(truth("untrained_m10"))
    for entry in results.values():
        assert sum(entry["counts"]) == total
    found = {name: {w["code"] for w in results[name]["warnings"]} for name in results}
    assert "assumes-one-step" in found["ilrg"]
    assert "assumes-one-step" not in found["rlu"] | found["dimitrov"]
    best = max(results.values(), key=lambda entry: entry["iAcc"])
    assert results["rlu"]["iAcc"] >= best["iAcc"] - 0.05


def test_strict_fails_on_a_broken_assumption() -> None:
    flags = ["recover", *sample("untrained_m10"), *QUICK, "--method", "ilrg"]
    assert call(*flags).code == 0
    outcome = call(*flags, "--strict")
    assert outcome.code == 5
    assert "the counts are unreliable (assumes-one-step)" in outcome.err


def test_stored_statistics_give_the_same_counts(tmp_path: Path) -> None:
    """The statistics file holds all that the methods take."""
    path = tmp_path / "stats.safetensors"
    argument = sample("untrained_m1")
    reference, aux = (argument[argument.index(flag) + 1] for flag in ("--global", "--aux"))
    stored = call("estimate-logits", "--global", reference, "--aux", aux, *QUICK, "-o", path)
    assert stored.code == 0
    for name in ("llg+", "zlg+"):
        direct = call("recover", *argument, *QUICK, "--method", name).document
        reused = call("recover", *argument, *QUICK, "--method", name, "--stats", path).document
        assert direct["classes"] == reused["classes"]
