"""Defended updates as a user audits them: ``--noise-std``, ``--clip``, and what is seen by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_tools import (
    AUX,
    QUICK,
    SAMPLES,
    Outcome,
    call,
    metadata,
    sample,
    tensors,
    truth,
    within_bounds,
    write_safetensors,
)
from defended_rounds import defended, norm

from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.options import RunOptions, TrainingOptions
from rlu_cli.core.losses import Losses, LossRange, loss_range
from rlu_cli.core.metrics import score_counts
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.simulation.defences import Defence

ROUND = SAMPLES / "trained_m1"


@pytest.mark.parametrize("method", ["gls", "regression"])
def test_known_noise_is_in_the_bounds(tmp_path: Path, method: str) -> None:
    flags = defended(tmp_path, Defence(noise_std=1e-3), noise_std=1e-3)
    document = call("recover", *flags, "--method", method).document
    assert document["training"]["noise_std"] == 1e-3
    assert document["training"]["sources"]["noise_std"] == "local"
    assert document["diagnostics"]["update_noise"] == pytest.approx(0.1)
    assert within_bounds(document, truth("trained_m1")) >= 9
    assert not {warning["code"] for warning in document["warnings"]} & {"update-unbalanced"}


def test_noise_that_nobody_says_is_warned_of(tmp_path: Path) -> None:
    flags = defended(tmp_path, Defence(noise_std=1e-3))
    assert "update-unbalanced" in call("recover", *flags).codes
    told = call("recover", *flags, "--noise-std", 1e-3)
    assert not {"update-unbalanced", "noise-seen"} & set(told.codes)
    seen = call("recover", *flags)
    assert "noise-seen" in seen.codes
    assert seen.document["training"]["noise_std"] == 0.0
    widths = [sum(row["high"] - row["low"] for row in found.document["classes"]) for found in (told, seen)]
    assert widths[1] > 0.6 * widths[0] > 0


def test_the_size_of_a_coarse_update_is_told(tmp_path: Path) -> None:
    """By updates made as coarse; without them four of thirty right ones of 8 bits were doubted."""
    for defence in (Defence(), Defence(quantize=8), Defence(top_k=0.5)):
        flags = defended(tmp_path, defence, name="untrained_m1")
        for rate, doubted in ((0.01, False), (0.02, True)):
            codes = call("recover", *flags, "--method", "rlu", "--lr", rate).codes
            assert ("update-misscaled" in codes) is doubted


@pytest.mark.parametrize(
    "defence", [Defence(quantize=7), Defence(quantize=4), Defence(top_k=0.3), Defence(top_k=0.3, quantize=7)]
)
def test_clipping_that_nobody_says_shows_in_coarse_updates(tmp_path: Path, defence: Defence) -> None:
    """Their size was left alone: one count in ten was within its bounds, and the grade was good."""
    bound = 0.3 * norm("untrained_m1")
    clipped = call("recover", *defended(tmp_path, replace(defence, clip=bound), name="untrained_m1"))
    assert "update-misscaled" in clipped.codes
    assert clipped.document["reliability"]["grade"] == "poor"
    assert within_bounds(clipped.document, truth("untrained_m1")) >= 8
    whole = call("recover", *defended(tmp_path, defence, name="untrained_m1"))
    assert not {"update-misscaled", "size-doubted"} & set(whole.codes)


@pytest.mark.parametrize("defence", [Defence(quantize=8), Defence(top_k=0.3)])
def test_so_it_does_after_several_steps(tmp_path: Path, defence: Defence) -> None:
    bound, more = 0.1 * norm("untrained_m10"), ("--samples", 2000)  # twenty replays know too little

    def recovered(sent: Defence) -> Outcome:
        return call("recover", *defended(tmp_path, sent, name="untrained_m10"), *more)

    clipped = recovered(replace(defence, clip=bound))
    assert "update-misscaled" in clipped.codes
    assert clipped.document["reliability"]["grade"] == "poor"
    assert within_bounds(clipped.document, truth("untrained_m10")) >= 8
    for right in (defence, Defence(quantize=4), Defence(top_k=0.01)):
        assert "update-misscaled" not in recovered(right).codes


def test_quantised_updates_have_bounds_that_know(tmp_path: Path) -> None:
    coarse = call("recover", *defended(tmp_path, Defence(quantize=3), name="trained_m10"))
    fine = call("recover", *defended(tmp_path, Defence(), name="trained_m10"))
    assert "noise-seen" in coarse.codes and "noise-seen" not in fine.codes


def test_slightly_wrong_rates_are_doubted_after_several_steps_of_early_models() -> None:
    """Of 8 % too high ones none was seen, and hardly any bound held."""
    for rate, codes in (("0.01", []), ("0.0108", ["size-doubted"])):
        outcome = call("recover", *sample("untrained_m10"), "--samples", 2000, "--lr", rate)
        assert outcome.codes == codes
        assert within_bounds(outcome.document, truth("untrained_m10")) >= 9
        assert outcome.document["reliability"]["grade"] == "good"


@pytest.mark.parametrize(
    ("name", "method"),
    [("untrained_m10", "replay"), ("trained_m1", "regression"), ("untrained_m1", "regression")],
)
def test_made_up_clients_are_compressed_as_the_real_one(tmp_path: Path, name: str, method: str) -> None:
    """Of the first 2 of 10 counts were within their bounds; the second was searched for single samples."""
    outcome = call("recover", *defended(tmp_path, Defence(top_k=0.1, quantize=3), name=name))
    assert outcome.document["method"] == method
    assert within_bounds(outcome.document, truth(name)) >= 8
    assert {"update-sparsified", "update-quantised"} <= set(outcome.codes)
    assert not {"update-unbalanced", "update-unexplained", "embedding-mismatch"} & set(outcome.codes)
    assert outcome.document["reliability"]["grade"] != "poor"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_in_compressed_updates(tmp_path: Path, value: float) -> None:
    flags = defended(tmp_path, Defence(quantize=4), name="untrained_m10")
    local = tmp_path / "client_0.safetensors"
    whole = read_checkpoint(local)
    whole.tensors["conv1.bias"][0] = value
    save_safetensors(local, whole.tensors, whole.metadata)
    assert "conv1.bias" in call("recover", *flags).refusal(4)


def test_few_values_of_an_early_model_are_no_noise(tmp_path: Path) -> None:
    for bits, method in ((2, "regression"), (4, "regression"), (8, "gls")):
        flags = defended(tmp_path, Defence(quantize=bits), name="untrained_m1")
        outcome = call("recover", *flags)
        document = outcome.document
        assert document["method"] == method
        assert not {"size-doubted", "update-misscaled"} & set(outcome.codes)
        assert within_bounds(document, truth("untrained_m1")) >= 9
        if bits > 2:  # exact: of less than half a sample that the bias loses none is lost
            assert [row["count"] for row in document["classes"]] == list(truth("untrained_m1"))
            assert document["reliability"]["grade"] == "good"


def test_made_up_clients_round_between_the_ends_of_their_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the real one did: with grids that lie anywhere a fortieth more of two bits was lost."""
    kinds = []

    def seen(found: Losses) -> LossRange:
        kinds.append(found.kind)
        return loss_range(found)

    monkeypatch.setattr("rlu_cli.core.methods.regression.loss_range", seen)
    for defence in (Defence(quantize=2), Defence(quantize=4), Defence(top_k=0.3)):
        call("recover", *defended(tmp_path, defence, name="untrained_m1"), "--method", "regression")
    assert [kind.levels for kind in kinds] == [4, 16, 0]


def test_replays_of_noisy_clients(tmp_path: Path) -> None:
    flags = defended(tmp_path, Defence(noise_std=3e-4), name="trained_m10", noise_std=3e-4)
    document = call("recover", *flags, "--method", "gls").document
    assert document["diagnostics"]["replays"] == 3
    assert within_bounds(document, truth("trained_m10")) >= 8


def test_clipped_updates_have_no_bounds(tmp_path: Path) -> None:
    bound = 0.5 * norm()
    flags = defended(tmp_path, Defence(clip=bound))
    outcome = call("recover", *flags, "--method", "gls", "--clip", bound)
    assert "update-clipped" in outcome.codes
    assert all(row["low"] is None and row["presence"] is None for row in outcome.document["classes"])
    assert "update-clipped" in call("recover", *flags, "--method", "gls", "--clip", bound, "--strict").err


@pytest.mark.parametrize(
    ("name", "sigma", "share"),
    [("trained_m1", 0.0, 0.6), ("trained_m10", 0.0, 0.3), ("trained_m10", 2e-4, 0.3)],
)
def test_what_clipping_hides_is_in_the_bounds(tmp_path: Path, name: str, sigma: float, share: float) -> None:
    bound = share * norm(name)
    flags = defended(tmp_path, Defence(clip=bound, noise_std=sigma), name=name, clip=bound, noise_std=sigma)
    outcome = call("recover", *flags)
    assert outcome.codes == ["clip-simulated"]
    found = outcome.document
    assert found["method"] == ("disaggregation" if name == "trained_m1" else "replay")
    assert within_bounds(found, truth(name)) >= 9
    assert found["reliability"]["expected_iAcc"] is not None


def test_a_method_reads_alike_whatever_else_is_asked_for(tmp_path: Path) -> None:
    """Those that learn from clipped clients of theirs read another update than those that don't."""
    bound = 0.3 * norm("trained_m1")
    flags = defended(tmp_path, Defence(clip=bound), name="trained_m1", clip=bound)
    auditor = Auditor(flags[1], [flags[3]], aux=AUX, run=RunOptions(samples=200))
    methods = ["rlu", "auto", "gls"]
    together = auditor.recover(flags[3], TrainingOptions(), methods).recoveries
    for method, found in zip(methods, together, strict=True):
        (alone,) = auditor.recover(flags[3], TrainingOptions(), [method]).recoveries
        np.testing.assert_array_equal(alone.estimate, found.estimate)
        assert alone.warnings == found.warnings
        clipping = {note.code for note in found.warnings if "clip" in note.code}
        assert clipping == {"clip-simulated" if method == "auto" else "update-clipped"}


@pytest.mark.parametrize(
    ("name", "sigma"),
    [("untrained_m1", 1e-4), ("untrained_m10", 1e-4), ("trained_m1", 1e-4), ("trained_m10", 3e-4)],
)
def test_noise_that_nobody_says_is_no_part_of_the_rate(tmp_path: Path, name: str, sigma: float) -> None:
    """Taken for training it made the rates two to seven times too large, and sure of it."""
    outcome = call("recover", *defended(tmp_path, Defence(noise_std=sigma), name=name), "--lr", "auto")
    assert "noise-seen" in outcome.codes
    interval = re.search(r"95 %: ([0-9.e-]+) to ([0-9.e-]+)\)", outcome.err)
    assert interval is not None
    low, high = map(float, interval.groups())
    assert low <= 0.01 <= high


def test_noise_that_nobody_says_is_no_part_of_what_was_clipped(tmp_path: Path) -> None:
    """Taken for training it made the update seem hardly clipped: four of these ten bounds held."""
    bound = 0.3 * norm("untrained_m10")
    flags = defended(tmp_path, Defence(clip=bound, noise_std=1e-4), name="untrained_m10")
    outcome = call("recover", *flags, "--clip", bound)
    assert {"noise-seen", "clip-estimated"} <= set(outcome.codes)
    assert within_bounds(outcome.document, truth("untrained_m10")) >= 9


def test_what_is_larger_than_the_bound_was_not_clipped_to_it(tmp_path: Path) -> None:
    """It was read as scaled down, by a factor that its weights were asked for."""
    flags = [*defended(tmp_path, Defence()), *QUICK]
    told, untold = call("recover", *flags, "--clip", 0.4 * norm()), call("recover", *flags)
    assert told.codes == ["clip-exceeded"]
    assert told.document["classes"] == untold.document["classes"]
    assert told.document["training"]["clip"] == 0.4 * norm()
    assert told.document["reliability"]["grade"] == "poor"
    assert call("recover", *flags, "--clip", 0.4 * norm(), "--strict").code == 5
    assert "clip-exceeded" not in call("recover", *flags, "--clip", 0.6 * norm()).codes


@pytest.mark.parametrize(
    ("more", "code"), [((), "clip-simulated"), (("--aux-per-class", 5), "update-clipped")]
)
def test_clipping_is_not_forgotten_where_another_method_answers(
    tmp_path: Path, more: tuple[object, ...], code: str
) -> None:
    """A third to a half of the labels were wrong, and the grade was good."""
    bound = 0.3 * norm()
    flags = [*defended(tmp_path, Defence(clip=bound)), "--clip", bound, "--method", "disaggregation"]
    outcome = call("recover", *flags, "--batch-size", 128, *more)  # too many to be told apart
    assert {"disaggregation-not-possible", code} <= set(outcome.codes)
    assert (outcome.document["reliability"]["grade"] == "poor") or code == "clip-simulated"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_none_is_refused(tmp_path: Path, value: float) -> None:
    """Of one step the output layer alone is read, unless the norm is: then --clip was dropped unsaid."""
    source = SAMPLES / "untrained_m1"
    state = tensors(source / "client_0.safetensors")
    state["conv1.weight"].flatten()[0] = value
    local = write_safetensors(tmp_path / "k.safetensors", state, metadata(source / "client_0.safetensors"))
    flags = ["--global", source / "global.safetensors", "--local", local, "--aux", AUX]
    message = call("recover", *flags, "--method", "rlu", "--clip", 0.5 * norm()).refusal(4)
    assert "conv1.weight" in message
    assert "k.safetensors" in message
    call("recover", *flags, "--method", "rlu").document  # noqa: B018


@pytest.mark.parametrize(
    ("noise_std", "quantize", "said"), [(0.01, None, {}), (0.01, None, {"noise_std": 0.01}), (0.0, 2, {})]
)
def test_what_noise_and_rounding_add_is_not_taken_for_another_bound(
    tmp_path: Path, noise_std: float, quantize: int | None, said: dict[str, float]
) -> None:
    """Each makes this update four times as large and more."""
    bound = 0.3 * norm()
    flags = defended(tmp_path, Defence(clip=bound, noise_std=noise_std, quantize=quantize), **said)
    codes = call("recover", *flags, "--clip", bound).codes
    assert "clip-exceeded" not in codes
    assert {"clip-simulated", "update-clipped", "clip-estimated"} & set(codes)


@pytest.mark.parametrize(("share", "clipped"), [(0.3, True), (1.0, True), (20.0, False)])
def test_what_was_not_sent_is_part_of_the_norm(tmp_path: Path, share: float, clipped: bool) -> None:
    """Clipped, and then its largest tenth sent: its norm was taken for one that clipping had not reached."""
    bound = share * norm("untrained_m10")
    flags = defended(tmp_path, Defence(clip=bound, top_k=0.1), name="untrained_m10")
    outcome = call("recover", *flags, "--clip", bound)
    assert outcome.codes == ["clip-estimated"] * clipped + ["update-sparsified"]
    assert abs(np.array(outcome.document["counts"]) - truth("untrained_m10")).sum() <= 4


@pytest.mark.parametrize("name", ["untrained_m1", "trained_m1"])
@pytest.mark.parametrize("sigma", [1e-5, 1e-4])
@pytest.mark.parametrize("said", [True, False])
def test_clipping_that_nobody_says_shows_under_noise(
    tmp_path: Path, name: str, sigma: float, said: bool
) -> None:
    """None of these bounds held, or one, and the grade was good."""
    flags = defended(tmp_path, Defence(clip=0.3 * norm(name), noise_std=sigma), name=name)
    if said:
        flags += ["--noise-std", sigma]
    outcome = call("recover", *flags)
    assert {"update-misscaled", "size-doubted"} & set(outcome.codes)
    found = outcome.document
    assert found["method"] == "regression" and found["reliability"]["grade"] == "poor"
    if found["classes"][0]["low"] is not None:  # with so few draws `gls` may have to answer
        assert within_bounds(found, truth(name)) >= 9
    without = call("recover", *defended(tmp_path, Defence(noise_std=sigma), name=name), *flags[8:])
    assert not {"update-misscaled", "size-doubted"} & set(without.codes)
    assert within_bounds(without.document, truth(name)) >= 9


@pytest.mark.parametrize(
    ("name", "delta", "sigma"),
    [("untrained_m1", False, 0.0), ("untrained_m1", True, 2e-7), ("untrained_m10", False, 2e-6)],
)
def test_an_early_model_tells_how_much_was_clipped(
    tmp_path: Path, name: str, delta: bool, sigma: float
) -> None:
    bound = 0.3 * norm(name)
    flags = defended(tmp_path, Defence(clip=bound, noise_std=sigma), name=name, delta=delta)
    if sigma:
        flags += ["--noise-std", sigma]
    outcome = call("recover", *flags, "--clip", bound)
    assert outcome.codes == ["clip-estimated"]
    found = outcome.document
    assert abs(np.array(found["counts"]) - np.array(truth(name))).sum() <= (4 if sigma else 0)
    assert within_bounds(found, truth(name)) >= 9
    assert found["training"]["clip"] == bound
    assert found["training"]["noise_std"] == sigma
    assert re.search(r"to about 0\.(3|30\d|29\d) of itself", outcome.err)


def test_statistics_alone_dont_tell_how_much_was_clipped(tmp_path: Path) -> None:
    bound = 0.3 * norm("untrained_m1")
    flags = defended(tmp_path, Defence(clip=bound), name="untrained_m1")
    stats = tmp_path / "stats.safetensors"
    reference = SAMPLES / "untrained_m1" / "global.safetensors"
    assert call("estimate-logits", "--global", reference, "--aux", AUX, *QUICK, "-o", stats).code == 0
    without_images = [flag for flag in flags if flag not in ("--aux", AUX)]
    outcome = call("recover", *without_images, "--stats", stats, "--clip", bound, "--method", "gls")
    assert outcome.codes == ["update-clipped"]
    assert all(row["low"] is None for row in outcome.document["classes"])
    learnt = call("recover", *without_images, "--stats", stats, "--clip", bound)
    assert learnt.codes == ["clip-simulated"]
    assert within_bounds(learnt.document, truth("untrained_m1")) >= 9


def test_updates_of_another_size_than_training_makes(tmp_path: Path) -> None:
    name = "untrained_m10"
    assert call("recover", *sample(name), *QUICK).codes == []
    clipped = call("recover", *defended(tmp_path, Defence(clip=0.4 * norm(name)), name=name))
    assert "update-misscaled" in clipped.codes
    assert re.search(r"is 0\.(4|40\d|39\d) times what its training values make", clipped.err)
    assert "it is read as if it had been divided by that" in clipped.err
    assert clipped.document["reliability"]["grade"] == "poor"
    assert within_bounds(clipped.document, truth(name)) >= 9
    rate = clipped.document["training"]["lr"]
    wrong = call("recover", *sample(name), *QUICK, "--lr", rate / 2)
    assert "update-misscaled" in wrong.codes
    assert re.search(r"is (2|2\.0\d|1\.9\d) times what", wrong.err)


@pytest.mark.parametrize(
    ("name", "defence", "least"),
    [
        ("untrained_m10", Defence(), 0.99),
        ("untrained_m10", Defence(noise_std=1e-4), 0.95),
        ("trained_m10", Defence(), 0.8),
        ("trained_m10", Defence(noise_std=1e-4), 0.8),
    ],
)
def test_clipping_that_nobody_says_costs_several_steps_little(
    tmp_path: Path, name: str, defence: Defence, least: float
) -> None:
    """A third of the labels was lost to counts that are too even, and there were no bounds."""
    flags = [*defended(tmp_path, replace(defence, clip=0.3 * norm(name)), name=name), "--samples", 2000]
    found, plain = (call("recover", *flags, "--method", method).document for method in ("auto", "rlu"))
    assert found["method"] == "replay"
    assert share_right(found, name) >= least > 0.75 > share_right(plain, name)
    assert within_bounds(found, truth(name)) >= 9
    assert found["reliability"]["grade"] == "poor"
    again = call("recover", *flags, "--method", "auto", "--cache", tmp_path / "fits").document
    kept = call("recover", *flags, "--method", "auto", "--cache", tmp_path / "fits").document
    assert again["classes"] == kept["classes"] == found["classes"]


def test_sizes_that_are_doubted_vaguely_have_bounds_that_reach_them(tmp_path: Path) -> None:
    """Beyond the vaguest level nothing was made of the doubt, nor said: six of ten bounds held."""
    name = "trained_m10"
    flags = defended(tmp_path, Defence(clip=0.45 * norm(name)), name=name)
    found = call("recover", *flags, "--samples", 2000)
    assert found.codes == ["size-doubted"]
    assert within_bounds(found.document, truth(name)) >= 9
    assert found.document["diagnostics"]["misfit"] < 2


@pytest.mark.parametrize("name", ["untrained_m10", "trained_m10"])
@pytest.mark.parametrize("share", [1e-5, 1e-2])
def test_an_output_layer_alone_of_another_size(tmp_path: Path, name: str, share: float) -> None:
    """The whole model was enlarged by its factor: the other layers burst, and the recovery with them."""
    before, after = (
        read_checkpoint(SAMPLES / name / f"{part}.safetensors") for part in ("global", "client_0")
    )
    sent = {
        key: value + (share if key.startswith("fc3") else 1.0) * (after.tensors[key] - value)
        for key, value in before.tensors.items()
    }
    local = tmp_path / "client_0.safetensors"
    save_safetensors(local, sent, after.metadata)
    flags = ["--global", SAMPLES / name / "global.safetensors", "--local", local, "--aux", AUX, *QUICK]
    found = call("recover", *flags, "--samples", 2000)
    assert "update-misscaled" in found.codes
    assert "there are no bounds" in found.err
    assert all(row["low"] is None for row in found.document["classes"])
    assert sum(found.document["counts"]) == 320


def share_right(document: dict[str, Any], name: str) -> float:
    return score_counts(np.array(document["counts"]), np.array(truth(name))).i_acc


@pytest.mark.parametrize("share", [0.4, 0.85])
def test_single_steps_of_another_size_are_told_by_their_samples(tmp_path: Path, share: float) -> None:
    """Where least squares alone get counts that are too even, and could only warn."""
    name = "untrained_m1"
    right = call("recover", *sample(name), *QUICK)
    assert right.codes == [] and right.document["method"] == "gls"
    flags = defended(tmp_path, Defence(clip=share * norm(name)), name=name)
    assert call("recover", *flags, "--method", "gls").document["counts"] != truth(name)
    clipped = call("recover", *flags)
    assert clipped.document["method"] == "disaggregation"
    assert clipped.codes == ["update-misscaled"]
    assert clipped.document["diagnostics"]["update_scale"] == pytest.approx(share, rel=0.01)
    assert clipped.document["counts"] == truth(name)
    assert within_bounds(clipped.document, truth(name)) == 10
    wrong = call("recover", *sample(name), *QUICK, "--lr", 0.02)
    assert wrong.document["counts"] == truth(name)
    assert wrong.codes == ["update-misscaled"]


def test_clipping_that_did_nothing_changes_nothing(tmp_path: Path) -> None:
    plain = call("recover", *sample("trained_m1"), *QUICK, "--method", "gls").document
    found = call("recover", *sample("trained_m1"), *QUICK, "--method", "gls", "--clip", 1.5 * norm()).document
    assert found["classes"] == plain["classes"]
    assert found["warnings"] == plain["warnings"]


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_clipping_is_told_under_noise(tmp_path: Path, scale: float) -> None:
    bound, sigma = scale * norm(), 1e-4
    flags = defended(tmp_path, Defence(clip=bound, noise_std=sigma))
    codes = call("recover", *flags, "--clip", bound, "--noise-std", sigma).codes
    assert codes == (["clip-simulated"] if scale < 1 else [])


def test_coarse_updates_are_seen(tmp_path: Path) -> None:
    for defence, code in (
        (Defence(top_k=0.3), "update-sparsified"),
        (Defence(quantize=6), "update-quantised"),
    ):
        assert code in call("recover", *defended(tmp_path, defence), "--method", "rlu").codes


@pytest.mark.parametrize("flag", [("--noise-std", -1), ("--clip", 0)])
def test_values_out_of_range(flag: tuple[str, float]) -> None:
    assert flag[0] in call("recover", *sample("trained_m1"), *flag).refusal(2)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_archives_of_clipped_and_noisy_clients_need_no_flags(tmp_path: Path, optimizer: str) -> None:
    """As differential privacy has it; no step of Adam tells a factor, and its size is no reason for doubt."""
    federation = ["--data", "digits", "--clients", 4, "--rounds", 1, "--aux-per-class", 20]
    trained = ["--optimizer", optimizer, "--lr", 0.002 if optimizer == "adam" else 0.05]
    private = ["--clip", 0.1, "--noise-std", 1e-4]
    root = tmp_path / "a"
    flags = [*federation, *trained, "--batch-size", 16, "--steps", 6, *private, "-o", root]
    assert call("simulate", *flags).code == 0
    document = call("evaluate", "--archive", root, "--samples", 2000, "--method", "auto").document
    pairs = [pair for pair in document["pairs"] if pair["method"] == "replay"]
    assert len(pairs) == 4
    assert all(set(pair["warnings"]) <= {"clip-simulated", "clip-estimated"} for pair in pairs)
    assert any(pair["warnings"] for pair in pairs)
    assert np.mean([pair["bounds_hold"] for pair in pairs]) >= 0.9
