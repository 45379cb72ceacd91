"""Many clients in one call: each as if it were alone, and the global model's work done once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import AUX, PLAIN, QUICK, SAMPLES, call, metadata, sample, tensors, write_safetensors

from rlu_cli.audit import client_round
from rlu_cli.core import recover as core_recover
from rlu_cli.core.expectation import SoftmaxExpectation

ROUND = SAMPLES / "untrained_m1"
NORMED = """
import torch
from torch import nn

def small():
    body = [nn.Conv2d(1, 4, 5, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(256, 10))
"""


def recover(reference: Path, locals_: list[Path], *more: object) -> list[dict[str, Any]]:
    given = [flag for path in locals_ for flag in ("--local", path)]
    outcome = call("recover", "--global", reference, *given, "--aux", AUX, *more)
    return outcome.lines if len(locals_) > 1 else [outcome.document]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the expensive things are done."""
    done: Counter[str] = Counter()

    def count(home: str, name: str) -> None:
        module = __import__(home, fromlist=[name])
        original: Callable[..., Any] = getattr(module, name)

        def counting(*args: object, **kwargs: object) -> Any:
            done[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    for name in ("scan_auxiliary", "load_auxiliary", "build_network", "probe"):
        count("rlu_cli.audit.image_source", name)
    count("rlu_cli.audit.source", "model_statistics")
    return done


def test_one_step_needs_one_pass_for_all(counted: Counter[str]) -> None:
    paths = [ROUND / f"client_{client}.safetensors" for client in (0, 1, 2, 0)]
    recover(ROUND / "global.safetensors", paths, *QUICK)
    assert set(counted.values()) == {1}
    assert len(counted) == 5


def test_several_steps_need_one_more_pass_each(counted: Counter[str]) -> None:
    folder = SAMPLES / "trained_m10"
    recover(folder / "global.safetensors", [folder / f"client_{c}.safetensors" for c in (0, 1, 2)], *QUICK)
    assert (counted.pop("probe"), counted.pop("model_statistics")) == (4, 4)
    assert set(counted.values()) == {1}


@pytest.fixture
def normed(tmp_path: Path) -> tuple[Path, list[Path], list[object]]:
    """A round of a network with BatchNorm whose clients train with different batch sizes."""
    code = tmp_path / "model.py"
    code.write_text(NORMED, encoding="utf-8")
    torch.manual_seed(0)
    state = {
        "0.weight": 0.3 * torch.randn(4, 1, 5, 5),
        "0.bias": torch.zeros(4),
        "1.weight": torch.ones(4),
        "1.bias": torch.zeros(4),
        "1.running_mean": torch.zeros(4),
        "1.running_var": torch.ones(4),
        "1.num_batches_tracked": torch.tensor(1),
        "4.weight": 0.1 * torch.randn(10, 256),
        "4.bias": torch.zeros(10),
    }
    reference = write_safetensors(
        tmp_path / "global.safetensors", state, metadata(ROUND / "global.safetensors")
    )
    locals_ = []
    for client, batch in enumerate((4, 64, 16)):
        update = torch.randn(10)
        moved = {**state, "4.bias": 1e-3 * (update - update.mean()), "4.weight": state["4.weight"] + 1e-4}
        about = {"fl.lr": "0.01", "fl.batch_size": str(batch), "fl.steps": "2"}
        locals_.append(write_safetensors(tmp_path / f"client_{client}.safetensors", moved, about))
    return reference, locals_, ["--arch", f"{code}:small", "--method", "rlu", *QUICK]


def test_the_order_of_the_clients_changes_nothing(normed: tuple[Path, list[Path], list[object]]) -> None:
    reference, locals_, flags = normed
    alone = [recover(reference, [path], *flags)[0] for path in locals_]
    assert recover(reference, locals_, *flags) == alone
    assert recover(reference, locals_[::-1], *flags) == alone[::-1]
    estimates = [[entry["estimate"] for entry in document["classes"]] for document in alone]
    flags += ["--batch-norm", "running"]
    stored = [[entry["estimate"] for entry in d["classes"]] for d in recover(reference, locals_, *flags)]
    assert estimates != stored  # the batch size has something to change here


def test_one_pass_of_the_global_model_for_each_batch_size_that_matters(
    normed: tuple[Path, list[Path], list[object]], counted: Counter[str]
) -> None:
    reference, locals_, flags = normed
    recover(reference, [*locals_, locals_[0]], *flags)
    assert counted.pop("probe") == 3 + 4
    counted.clear()
    recover(reference, [*locals_, locals_[0]], *flags, "--batch-norm", "running")
    assert counted.pop("probe") == 1 + 4


def test_batches_that_share_statistics_may_miss_more(
    normed: tuple[Path, list[Path], list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 right clients of a network with BatchNorm nine were warned of as unexplained."""
    reference, locals_, flags = normed
    said: list[bool] = []
    original = core_recover.misfit

    def spying(*args: Any, shared: bool, **kwargs: Any) -> float | None:
        said.append(shared)
        return original(*args, shared=shared, **kwargs)

    monkeypatch.setattr(core_recover, "misfit", spying)
    stats = tmp_path / "stats.safetensors"
    arch = ["--arch", flags[1]]
    for norm, shared in (("batch", True), ("running", False)):
        call("estimate-logits", "--global", reference, "--aux", AUX, *arch, "--batch-norm", norm, "-o", stats)
        recover(reference, locals_[:1], *flags, "--batch-norm", norm)
        recover(reference, locals_[:1], *flags, "--stats", stats)
        assert said == [shared, shared]
        said.clear()


@pytest.mark.parametrize("first", [0, 1])
def test_clients_that_describe_different_inputs_are_refused_in_any_order(tmp_path: Path, first: int) -> None:
    state = tensors(ROUND / "client_0.safetensors")
    about = metadata(ROUND / "client_0.safetensors")
    reference = write_safetensors(tmp_path / "g.safetensors", tensors(ROUND / "global.safetensors"))
    silent = {key: value for key, value in about.items() if key != "fl.normalize"}
    paths = [
        write_safetensors(tmp_path / "says.safetensors", state, about),
        write_safetensors(tmp_path / "silent.safetensors", state, silent),
    ]
    given = [flag for path in (paths[first], paths[1 - first]) for flag in ("--local", path)]
    outcome = call("recover", "--global", reference, *given, "--aux", AUX, *PLAIN)
    assert outcome.code == 4
    assert "agree on fl.normalize" in outcome.err
    assert outcome.out.count("\n") == 1  # the first one's result stands
    agreed = call("recover", "--global", reference, *given, "--aux", AUX, *PLAIN, "--normalize", "half")
    assert len(agreed.lines) == 2  # the flag outranks both


@pytest.mark.parametrize("first", [0, 1])
def test_a_config_json_describes_the_client_beside_it_alone(tmp_path: Path, first: int) -> None:
    """The first client's served all, so that counts depended on the order."""
    silent = {key: v for key, v in metadata(ROUND / "client_0.safetensors").items() if key != "fl.normalize"}
    reference = write_safetensors(tmp_path / "g.safetensors", tensors(ROUND / "global.safetensors"))
    paths = []
    for client, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        state = tensors(ROUND / f"client_{client}.safetensors")
        paths.append(write_safetensors(tmp_path / name / "k.safetensors", state, silent))
    config = {"architecture": 5, "pretrained_cfg": {"mean": [0.3], "std": [0.3]}}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    paths = [paths[first], paths[1 - first]]
    given = [flag for path in paths for flag in ("--local", path)]
    outcome = call("recover", "--global", reference, *given, "--aux", AUX, *PLAIN)
    assert outcome.code == 4
    assert "agree on fl.normalize" in outcome.err
    agreed = recover(reference, paths, *PLAIN, "--normalize", "half")
    assert agreed == [recover(reference, [path], *PLAIN, "--normalize", "half")[0] for path in paths]
    codes = [[warning["code"] for warning in document["warnings"]] for document in agreed]
    assert ["config-ignored" in found for found in codes] == [first == 0, first == 1]


def test_of_a_local_model_that_is_not_run_the_output_layer_alone_is_read(tmp_path: Path) -> None:
    for round_, code in (("untrained_m1", 0), ("untrained_m10", 4)):
        source = SAMPLES / round_ / "client_0.safetensors"
        state = tensors(source)
        state["conv1.weight"][0] = float("nan")
        path = write_safetensors(tmp_path / f"{round_}.safetensors", state, metadata(source))
        outcome = call("recover", *sample(round_)[:2], "--local", path, "--aux", AUX, *QUICK)
        assert outcome.code == code, outcome.err
    assert "conv1.weight" in outcome.err


def test_a_layer_of_another_shape_is_seen_though_not_read(tmp_path: Path) -> None:
    source = ROUND / "client_0.safetensors"
    state = tensors(source) | {"conv1.weight": torch.zeros(6, 1, 3, 3)}
    path = write_safetensors(tmp_path / "k.safetensors", state, metadata(source))
    message = call("recover", *sample("untrained_m1")[:2], "--local", path, "--aux", AUX).refusal(4)
    assert "conv1.weight" in message


SEARCH = ("--method", "rlu", "--search-iterations", "4", *QUICK)


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal documents, but for the rounding of what the search compares."""
    names = ("search_mismatch", "search_initial_mismatch")
    for one, other in zip(found, expected, strict=True):
        near = {name: other["diagnostics"][name] for name in names if name in other["diagnostics"]}
        close = {name: pytest.approx(value, rel=1e-4) for name, value in near.items()}
        assert one == {**other, "diagnostics": {**other["diagnostics"], **close}}


def test_clients_that_are_searched_together_get_what_they_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """S is evaluated for all of them at once, in groups that are bounded."""
    together: list[int] = []
    evaluate = SoftmaxExpectation.at

    def counting(self: SoftmaxExpectation, shifts: np.ndarray, active: np.ndarray) -> np.ndarray:
        together.append(len(shifts))
        return evaluate(self, shifts, active)

    monkeypatch.setattr(SoftmaxExpectation, "at", counting)
    folder = SAMPLES / "trained_m10"
    locals_ = [folder / f"client_{client}.safetensors" for client in (0, 1, 2, 0, 1)]
    alone = [recover(folder / "global.safetensors", [path], *SEARCH)[0] for path in locals_]
    assert set(together) == {1}
    for most, limit, widest in ((16, 2**28, 5), (2, 2**28, 2), (16, 1, 1)):
        together.clear()
        monkeypatch.setattr(client_round, "_TOGETHER", most)
        monkeypatch.setattr(client_round, "_BYTES", limit)
        assert_alike(recover(folder / "global.safetensors", locals_, *SEARCH), alone)
        assert max(together) == widest
    assert any(document["diagnostics"]["search_moves"] for document in alone)


def test_clients_that_train_otherwise_are_searched_apart(tmp_path: Path) -> None:
    """One step needs no search, another learning rate another simulation; the order stays."""
    folder = SAMPLES / "trained_m10"
    state, about = (read(folder / "client_0.safetensors") for read in (tensors, metadata))
    others = [
        write_safetensors(tmp_path / f"{name}.safetensors", state, about | changed)
        for name, changed in (("one", {"fl.steps": "1"}), ("slow", {"fl.lr": "0.008"}))
    ]
    plain = [folder / f"client_{client}.safetensors" for client in (0, 1)]
    locals_ = [plain[0], *others, plain[1]]
    alone = [recover(folder / "global.safetensors", [path], *SEARCH)[0] for path in locals_]
    assert_alike(recover(folder / "global.safetensors", locals_, *SEARCH), alone)
    assert ["search_moves" in document["diagnostics"] for document in alone] == [True, False, True, True]


@pytest.mark.parametrize("broken", ["network", "rate"])
def test_what_was_waiting_is_recovered_before_a_client_that_cannot_be(tmp_path: Path, broken: str) -> None:
    folder = SAMPLES / "trained_m10"
    state, about = (read(folder / "client_0.safetensors") for read in (tensors, metadata))
    if broken == "network":
        state["conv1.weight"] = torch.zeros(6, 1, 3, 3)
    else:
        about["fl.lambda"], about["fl.scheme"] = "1000", "fedprox"
    wrong = write_safetensors(tmp_path / "wrong.safetensors", state, about)
    good = [folder / f"client_{client}.safetensors" for client in (0, 1)]
    given = [flag for path in (*good, wrong, *good) for flag in ("--local", path)]
    outcome = call("recover", "--global", folder / "global.safetensors", *given, "--aux", AUX, *SEARCH)
    assert outcome.code == 4, outcome.err
    assert outcome.out.count("\n") == 2
