"""Method disaggregation: on real clients of a trained network, where it can't be, and as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import AUX, QUICK, SAMPLES, call, sample, tensors, truth, within_bounds, write_safetensors
from real_rounds import sample_images
from torch import Tensor, nn

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.options import RunOptions, TrainingOptions
from rlu_cli.core.methods import METHODS, get_method
from rlu_cli.core.methods.base import Problem
from rlu_cli.core.recover import recover_labels
from rlu_cli.core.types import Estimate, HeadUpdate, IntArray, Observation
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.models import build_model
from rlu_cli.models.spec import parse_spec

ARCH = f"{Path(__file__).resolve().parent.parent / 'benchmarks' / 'networks.py'}:mlp"
"""Two hidden layers of a hundred on digits."""

METHOD = ("--method", "disaggregation", *QUICK)


@pytest.fixture(scope="module")
def observed() -> Iterator[Observation]:
    """What the method sees of a sample client of one step."""
    seen: list[Observation] = []
    method = get_method("disaggregation")
    patch = pytest.MonkeyPatch()

    def solve(problem: Problem) -> Estimate:
        seen.append(problem.observation)
        return method.solve(problem)

    patch.setitem(METHODS, "disaggregation", replace(method, solve=solve))
    folder = SAMPLES / "trained_m1"
    local = folder / "client_1.safetensors"
    auditor = Auditor(folder / "global.safetensors", [local], aux=AUX, run=RunOptions(samples=200))
    auditor.recover(local, TrainingOptions(), ["disaggregation"])
    patch.undo()
    yield seen[0]


def test_most_samples_of_a_trained_model_are_told_apart() -> None:
    right = {"disaggregation": 0, "rlu": 0}
    held = 0
    for client in range(3):
        known = truth("trained_m1", client)
        for method in right:
            document = call("recover", *sample("trained_m1", client), "--method", method, *QUICK).document
            right[method] += sum(map(min, document["counts"], known))
            if method == "disaggregation":
                found = document["diagnostics"]
                assert found["samples_found"] >= 20 and found["gradient_rank"] == 32
                assert found["update_scale"] == pytest.approx(1.0, abs=1e-3)
                assert document["reliability"]["grade"] == "good"
                held += within_bounds(document, known)
    assert held >= 28
    assert right["disaggregation"] > right["rlu"]


def test_untrained_rounds_are_exact() -> None:
    document = call("recover", *sample("untrained_m1"), *METHOD).document
    assert document["counts"] == truth("untrained_m1")


def test_a_sample_found_is_there_for_certain() -> None:
    document = call("recover", *sample("trained_m1", 1), *METHOD).document
    found = document["diagnostics"]["samples_found"]
    lows = sum(row["low"] for row in document["classes"])
    assert found <= lows <= document["total"]
    assert all(row["presence"] == 1 for row in document["classes"] if row["low"] > 0)


def test_several_steps_are_left_to_others() -> None:
    outcome = call("recover", *sample("trained_m10"), *METHOD)
    assert "disaggregation-not-possible" in outcome.codes
    assert "the client took 10 steps" in outcome.err
    gls = call("recover", *sample("trained_m10"), "--method", "gls", *QUICK).document
    assert outcome.document["classes"] == gls["classes"]


def test_statistics_alone_are_left_to_regression(tmp_path: Path) -> None:
    stats = tmp_path / "stats.safetensors"
    files = sample("trained_m1", aux=None)
    assert call("estimate-logits", *files[:2], "--aux", AUX, "-o", stats, *QUICK).code == 0
    outcome = call("recover", *files, "--stats", stats, *METHOD)
    assert "disaggregation-not-possible" in outcome.codes
    regression = call("recover", *files, "--stats", stats, "--method", "regression", *QUICK).document
    assert outcome.document["classes"] == regression["classes"]


def test_coarse_numbers_are_left_to_regression(tmp_path: Path) -> None:
    """Half precision hides single samples, whose gradients are far smaller than weights."""
    local = SAMPLES / "trained_m1" / "client_0.safetensors"
    state = {name: tensor.half() for name, tensor in tensors(local).items()}
    flags = sample("trained_m1")
    flags[3] = write_safetensors(tmp_path / "client_0.safetensors", state, read_checkpoint(local).metadata)
    outcome = call("recover", *flags, *QUICK, *METHOD)
    assert "disaggregation-not-possible" in outcome.codes


def test_dense_layers_that_hold_no_numbers_are_refused(tmp_path: Path) -> None:
    """They went unseen, and another method answered without a word."""
    local = SAMPLES / "trained_m1" / "client_0.safetensors"
    state = dict(tensors(local))
    state["fc1.weight"].flatten()[3] = torch.nan
    flags = sample("trained_m1")
    flags[3] = write_safetensors(tmp_path / "k.safetensors", state, read_checkpoint(local).metadata)
    message = call("recover", *flags, *QUICK).refusal(4)
    assert "fc1.weight" in message and "k.safetensors" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_so_are_coarse_updates(tmp_path: Path, dtype: torch.dtype) -> None:
    """A file that holds the update is added to the global weights: its sum seemed to be exact."""
    folder = SAMPLES / "trained_m1"
    before, after = (tensors(folder / f"{name}.safetensors") for name in ("global", "client_0"))
    change = {name: (after[name] - before[name]).to(dtype) for name in before}
    flags = sample("trained_m1")
    about = read_checkpoint(folder / "client_0.safetensors").metadata
    flags[3] = write_safetensors(tmp_path / "client_0.safetensors", change, about)
    flags += ["--update", "delta", *QUICK]
    outcome = call("recover", *flags, *METHOD)
    assert "disaggregation-not-possible" in outcome.codes
    assert call("recover", *flags).document["method"] == "regression"


def test_few_auxiliary_images_leave_it_to_rlu() -> None:
    """With one a class `gls` knew nothing of how samples differ: bounds of 13 to 15 for 9, graded good."""
    for method, said in ((METHOD, "the counts are those of rlu"), (["--method", "gls"], "")):
        outcome = call("recover", *sample("trained_m1"), "--aux-per-class", 1, *method)
        assert all(row["low"] is None for row in outcome.document["classes"])
        assert said in outcome.err


def test_an_update_that_no_samples_make_is_left_to_others(observed: Observation) -> None:
    """Of dense layers that moved at random: nothing is told apart, and nothing made up."""
    assert observed.dense is not None
    rng = np.random.default_rng(0)
    layers = tuple(
        replace(layer, update=HeadUpdate(rng.normal(size=layer.update.weight.shape), layer.update.bias))
        for layer in observed.dense.layers
    )
    strange = replace(observed, dense=replace(observed.dense, layers=layers))
    recovery = recover_labels(strange, method="disaggregation")
    assert "disaggregation-incomplete" in {note.code for note in recovery.warnings}
    regression = recover_labels(observed, method="regression")
    assert recovery.counts.tolist() == regression.counts.tolist()


def test_a_head_that_contradicts_the_samples_is_left_to_others(observed: Observation) -> None:
    assert observed.update.bias is not None
    bias = observed.update.bias.copy()
    bias[:2] += np.array([10.0, -10.0]) * 0.01 / 32 * 10
    changed = replace(observed, update=HeadUpdate(observed.update.weight, bias))
    recovery = recover_labels(changed, method="disaggregation")
    incomplete = [note for note in recovery.warnings if note.code == "disaggregation-incomplete"]
    assert incomplete and "those told apart leave" in incomplete[0].message


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_another_size_is_said_and_counts_stay(observed: Observation, factor: float) -> None:
    """The learning rate that was told is wrong; what single samples say isn't."""
    told = replace(observed.training, lr=observed.training.lr / factor)  # type: ignore[operator]
    right, wrong = (
        recover_labels(replace(observed, training=training), method="disaggregation")
        for training in (observed.training, told)
    )
    assert wrong.diagnostics["update_scale"] == pytest.approx(factor, rel=0.01)
    notes = [note for note in wrong.warnings if note.code == "update-misscaled"]
    assert len(notes) == 1 and f"{factor:g} times" in notes[0].message
    assert wrong.low is not None and np.abs(wrong.counts - right.counts).sum() <= 4
    assert not [note for note in right.warnings if note.code == "update-misscaled"]


@pytest.mark.parametrize("client", [0, 1, 2])
def test_counts_that_are_not_whole_show_a_wrong_rate(client: int) -> None:
    """Too little for the likelihood; then only samples that are told apart know the counts for sure."""
    flags = [*sample("untrained_m1", client), *QUICK]
    wrong = call("recover", *flags, "--method", "gls", "--lr", 0.0115)
    assert "counts-not-whole" in wrong.codes
    assert wrong.document["reliability"]["grade"] == "poor"
    assert all(row["low"] is None and row["presence"] is None for row in wrong.document["classes"])
    for right in ((), ("--noise-std", 1e-4, "--lr", 0.0115)):  # known noise leaves room for parts of samples
        assert "counts-not-whole" not in call("recover", *flags, "--method", "gls", *right).codes
    told_apart = call("recover", *flags, "--lr", 0.0115).document
    assert told_apart["method"] == "disaggregation"
    assert told_apart["counts"] == truth("untrained_m1", client)
    assert call("recover", *flags).document["method"] == "gls"


def test_the_learning_rate_is_read_off_single_samples() -> None:
    flags = [*sample("trained_m1"), "--lr", "auto", *QUICK]
    document = call("recover", *flags).document
    assert document["training"]["lr"] == pytest.approx(0.01, rel=0.005)
    assert document["warnings"][0]["code"] == "lr-estimated"
    known = call("recover", *sample("trained_m1"), *QUICK).document
    assert np.abs(np.subtract(document["counts"], known["counts"])).sum() <= 4


def test_the_same_in_any_company_and_from_the_cache(tmp_path: Path) -> None:
    both = [*sample("trained_m1", 0), "--local", sample("trained_m1", 1)[3]]
    together = call("recover", *both, *METHOD, "--cache", tmp_path).lines
    for client in (0, 1):
        alone = call("recover", *sample("trained_m1", client), *METHOD, "--cache", tmp_path).document
        assert alone["classes"] == together[client]["classes"]


MIXED = np.random.default_rng(0).permutation(300)[:32]
"""Rows of the sample's auxiliary images."""


def one_step(
    folder: Path, round_: str, rows: IntArray, loss: nn.Module | None = None
) -> tuple[list[object], Tensor]:
    """Flags of a sample round whose client took its step on these auxiliary images, and their labels."""
    about = read_checkpoint(SAMPLES / round_ / "client_0.safetensors").metadata
    model = build_model(parse_spec(about["fl.arch"]), allow_user_code=False)
    model.load_state_dict(tensors(SAMPLES / round_ / "global.safetensors"))
    pixels, folders = sample_images(1, 28)
    names, outputs = sorted(path.name for path in AUX.iterdir()), json.loads(about["fl.class_names"])
    batch = torch.from_numpy(rows)
    labels = torch.tensor([outputs.index(names[label]) for label in folders[batch].tolist()])
    (loss or nn.CrossEntropyLoss())(model((pixels[batch] - 0.286) / 0.353), labels).backward()
    for value in model.parameters():
        assert value.grad is not None
        value.data -= 0.01 * value.grad
    flags = sample(round_)
    flags[3] = write_safetensors(folder / "client_0.safetensors", model.state_dict(), about)
    return flags, labels


@pytest.mark.parametrize("images", [(5,), (5, 40), (7, 100, 200, 250)])
def test_clients_of_few_images_that_repeat_are_as_good_as_they_are(
    tmp_path: Path, images: tuple[int, ...]
) -> None:
    """Few different samples stray more from their class means: that is no update unexplained."""
    flags, labels = one_step(tmp_path, "trained_m1", np.tile(images, 32 // len(images)))
    document = call("recover", *flags, *QUICK).document
    assert document["counts"] == torch.bincount(labels, minlength=10).tolist()
    assert document["reliability"]["grade"] == "good" and not document["warnings"]


def test_samples_that_stand_out_and_are_none_hint_at_another_loss(tmp_path: Path) -> None:
    """Label smoothing: r is not s − onehot, while the update is as exact as any."""
    flags, _ = one_step(tmp_path, "trained_m1", MIXED, nn.CrossEntropyLoss(label_smoothing=0.3))
    outcome = call("recover", *flags, *METHOD)
    assert "disaggregation-incomplete" in outcome.codes
    assert "32 stand out" in outcome.err and "label smoothing" in outcome.err


@pytest.mark.parametrize("heavy", [None, 2.0, 3.0])
def test_weights_of_classes_that_samples_settle_are_no_counts(tmp_path: Path, heavy: float | None) -> None:
    """Samples of weight 1 tell the size, and least squares read the others' weights as counts, surely."""
    weighted = heavy is not None  # with 3 the counts sum to more than there are, and nothing fits
    weight = torch.tensor([heavy, 1, 1, 0.5, 1, 1, heavy, 1, 1, 0.5]) if weighted else None
    flags, labels = one_step(tmp_path, "untrained_m1", MIXED, nn.CrossEntropyLoss(weight))
    outcome = call("recover", *flags, *METHOD)
    found = outcome.document["diagnostics"]
    assert found["samples_found"] >= 8
    assert outcome.document["reliability"]["grade"] == ("poor" if weighted else "good")
    assert ("counts-not-whole" in outcome.codes) is weighted
    assert all((row["low"] is None) is weighted for row in outcome.document["classes"])
    counts = torch.bincount(labels, minlength=10).tolist()
    assert (outcome.document["counts"] == counts) is not weighted


@pytest.mark.parametrize("scheme", ["scaffold", "feddyn", "feddc"])
def test_stateful_schemes_have_their_constants_taken_out(tmp_path: Path, scheme: str) -> None:
    """Clients of one step in the third round: what they remember is no gradient of theirs."""
    root = tmp_path / "archive"
    flags = ["--arch", ARCH, "--data", "digits", "--output", root, "--rounds", 3, "--clients", 2]
    flags += ["--steps", 1, "--batch-size", 8, "--lr", 0.05, "--scheme", scheme, "--aux-per-class", 20]
    if scheme != "scaffold":
        flags += ["--lambda", 0.1]
    assert call("simulate", *flags).code == 0
    evaluated = ["evaluate", "--archive", root, "--arch", ARCH, "--method", "disaggregation", *QUICK]
    pairs = [pair for pair in call(*evaluated).document["pairs"] if pair["method"] == "disaggregation"]
    assert len(pairs) == 6
    assert all(pair["iAcc"] == 1.0 and not pair["warnings"] for pair in pairs)


def test_one_thread_or_two_give_the_same(observed: Observation) -> None:
    counts = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        counts.append(recover_labels(observed, method="disaggregation").estimate)
    torch.set_num_threads(before)
    assert np.array_equal(*counts)


def test_clipped_updates_of_early_models_are_exact(tmp_path: Path) -> None:
    """Single samples tell the factor, and least squares the few that could not be told apart."""
    folder = SAMPLES / "untrained_m1"
    before, after = (tensors(folder / f"{name}.safetensors") for name in ("global", "client_0"))
    size = sum(float((after[name] - value).square().sum()) for name, value in before.items()) ** 0.5
    sent = {name: value + 0.3 * (after[name] - value) for name, value in before.items()}
    metadata = {**read_checkpoint(folder / "client_0.safetensors").metadata, "fl.clip": str(0.3 * size)}
    flags = sample("untrained_m1")
    flags[3] = write_safetensors(tmp_path / "client_0.safetensors", sent, metadata)
    document = call("recover", *flags, *METHOD).document
    assert "clip-estimated" in {warning["code"] for warning in document["warnings"]}
    assert document["counts"] == truth("untrained_m1")
    assert all(row["low"] <= row["count"] <= row["high"] for row in document["classes"])
