"""Local files that hold an update, nested files with --key, and output layers that did not move."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import (
    AUX,
    PLAIN,
    QUICK,
    SAMPLES,
    State,
    call,
    metadata,
    sample,
    tensors,
    write_safetensors,
    write_torch,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.audit.updates import add_update, check_kind, check_same_tensors, stored_rounding
from rlu_cli.errors import MismatchError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors

ROUNDS = ("untrained_m1", "trained_m1", "untrained_m10", "trained_m10")


def difference(round_: str, client: int = 0) -> State:
    """local − global of a sample round."""
    before = tensors(SAMPLES / round_ / "global.safetensors")
    after = tensors(SAMPLES / round_ / f"client_{client}.safetensors")
    return {name: after[name] - tensor for name, tensor in before.items()}


def as_update(folder: Path, round_: str, client: int = 0, **about: str) -> list[object]:
    """The flags of a sample round whose local file holds the update."""
    values = metadata(SAMPLES / round_ / f"client_{client}.safetensors")
    extra = {f"fl.{name}": value for name, value in about.items()}
    path = write_safetensors(
        folder / f"client_{client}.safetensors", difference(round_, client), values | extra
    )
    return ["--global", SAMPLES / round_ / "global.safetensors", "--local", path, "--aux", AUX]


# --- what the file holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("round_", ROUNDS)
def test_update_gives_the_counts_of_add_update(tmp_path: Path, round_: str) -> None:
    whole = call("recover", *sample(round_), *PLAIN).document
    found = call("recover", *as_update(tmp_path, round_), "--update", "delta", *PLAIN).document
    assert found["counts"] == whole["counts"]
    np.testing.assert_allclose(
        [entry["estimate"] for entry in found["classes"]],
        [entry["estimate"] for entry in whole["classes"]],
        atol=1e-3 * whole["total"],
    )
    assert found["warnings"] == whole["warnings"]


def test_annotation_says_what_the_file_holds(tmp_path: Path) -> None:
    whole = call("recover", *sample("trained_m1"), *PLAIN).document
    flags = as_update(tmp_path, "trained_m1", update="delta")
    found = call("recover", *flags, *PLAIN).document
    assert (found["counts"], found["inputs"]["local"]["update"]) == (whole["counts"], "delta")
    sidecar = as_update(tmp_path, "trained_m1")
    (tmp_path / "round.json").write_text('{"update": "delta"}')
    assert call("recover", *sidecar, *PLAIN).document["counts"] == whole["counts"]
    overruled = call("recover", *sidecar, "--update", "weights", *PLAIN)
    assert "local-looks-like-delta" in overruled.codes
    (tmp_path / "round.json").write_text('{"update": "gradient"}')
    refusal = call("recover", *sidecar).refusal(4)
    assert "weights or delta" in refusal and "round.json" in refusal and "--update" in refusal


def test_wrong_word_for_the_update() -> None:
    assert "delta" in call("recover", *sample("trained_m1"), "--update", "diff").err


@pytest.mark.parametrize("round_", ROUNDS)
def test_mistaken_kind_is_noticed_and_fails_strict(tmp_path: Path, round_: str) -> None:
    forgotten = call("recover", *as_update(tmp_path, round_), *PLAIN, "--strict")
    assert forgotten.code == 5 and "local-looks-like-delta" in forgotten.err
    claimed = call("recover", *sample(round_), "--update", "delta", *PLAIN, "--strict")
    assert claimed.code == 5 and "delta-looks-like-weights" in claimed.err


@pytest.mark.parametrize("round_", ROUNDS)
@pytest.mark.parametrize("client", range(3))
def test_no_false_alarm_on_real_rounds(round_: str, client: int) -> None:
    before = tensors(SAMPLES / round_ / "global.safetensors")
    after = tensors(SAMPLES / round_ / f"client_{client}.safetensors")
    update = difference(round_, client)
    before, after, update = (
        {name: tensor for name, tensor in state.items() if name.startswith("fc3")}
        for state in (before, after, update)
    )
    for scale in (1.0, 30.0):  # a learning rate 30 times as large as well
        assert not check_kind("delta", {n: scale * t for n, t in update.items()}, before)
        assert not check_kind("weights", {n: before[n] + scale * t for n, t in update.items()}, before)
    assert [n.code for n in check_kind("weights", update, before)] == ["local-looks-like-delta"]
    assert [n.code for n in check_kind("delta", after, before)] == ["delta-looks-like-weights"]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(1e-6, 0.49), st.sampled_from([torch.float32, torch.float64]))
def test_kinds_are_told_apart_however_training_moved(seed: int, size: float, dtype: torch.dtype) -> None:
    """‖Δ‖ < ‖g‖/2 is all that the criterion needs, whichever way Δ points."""
    chance = torch.Generator().manual_seed(seed)
    weights = {"a.weight": torch.randn(5, 4, generator=chance, dtype=dtype), "a.bias": torch.zeros(5)}
    directions = [torch.randn(5, 4, generator=chance), weights["a.weight"], -weights["a.weight"]]
    for direction in directions:
        step = size * float(weights["a.weight"].norm()) * direction / direction.norm()
        delta = {"a.weight": step.to(dtype), "a.bias": torch.zeros(5)}
        moved = {name: weights[name] + delta[name] for name in weights}
        assert not check_kind("weights", moved, weights)
        assert not check_kind("delta", delta, weights)
        assert check_kind("weights", delta, weights)
        assert check_kind("delta", moved, weights)


def test_nothing_is_said_where_chance_could_be_the_cause() -> None:
    """A layer that began tiny and moved a hundred times its norm shows nothing of where it began."""
    chance = torch.Generator().manual_seed(0)
    for _ in range(50):
        weights = {"w": 0.01 * torch.randn(20, 20, generator=chance)}
        delta = {"w": torch.randn(20, 20, generator=chance)}
        assert not check_kind("weights", {"w": weights["w"] + delta["w"]}, weights)
        assert not check_kind("delta", delta, weights)


def test_nothing_is_said_of_a_model_of_zeros() -> None:
    zero, other = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    assert not check_kind("weights", other, zero) and not check_kind("delta", other, zero)


@pytest.mark.parametrize("round_", ["untrained_m10", "trained_m1"])
def test_reversed_sign_is_noticed(tmp_path: Path, round_: str) -> None:
    """APPFL sends global − local. Where labels are far from even, only one sign fits."""
    flags = as_update(tmp_path, round_)
    path = Path(str(flags[3]))
    about = metadata(path)
    path.unlink()
    write_safetensors(path, {name: -tensor for name, tensor in difference(round_).items()}, about)
    assert "update-sign-reversed" in call("recover", *flags, "--update", "delta", *PLAIN).codes


# --- the sum -----------------------------------------------------------------------------------------


def _read(folder: Path, name: str, state: State) -> object:
    save_safetensors(folder / name, state)
    return read_checkpoint(folder / name)


def test_buffers_may_be_missing_and_counters_of_any_shape(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2))
    before = net.state_dict()
    delta = {name: torch.full_like(tensor, 2) for name, tensor in before.items()}
    delta["1.num_batches_tracked"] = torch.tensor([2])
    reference = _read(tmp_path, "g", before)
    whole = add_update(_read(tmp_path, "d", delta), reference).tensors
    assert torch.equal(whole["1.running_var"], before["1.running_var"].double() + 2)
    assert whole["2.bias"].dtype == torch.float64
    trained = {n: t for n, t in delta.items() if not n.startswith("1.running") and "tracked" not in n}
    whole = add_update(_read(tmp_path, "t", trained), reference).tensors
    assert torch.equal(whole["1.running_var"], before["1.running_var"])
    assert torch.equal(whole["2.bias"], before["2.bias"].double() + 2)


def test_update_of_another_network_is_refused(tmp_path: Path) -> None:
    reference = _read(tmp_path, "g", {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)})
    for number, state in enumerate(
        (
            {"fc.weight": torch.ones(2, 2)},
            {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(2)},
            {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2), "x": torch.ones(1)},
        )
    ):
        with pytest.raises(MismatchError, match="not of one round"):
            check_same_tensors(_read(tmp_path, f"d{number}", state), reference)


@pytest.mark.parametrize("old", [False, True])
def test_weight_norm_parts_are_added_before_they_are_joined(tmp_path: Path, old: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    delta = {name: 0.3 * torch.randn_like(tensor) for name, tensor in before.items()}
    layer.load_state_dict({name: before[name] + delta[name] for name in before})

    def named(state: State) -> State:
        if not old:
            return state
        return {
            name.replace("parametrizations.weight.original0", "weight_g").replace(
                "parametrizations.weight.original1", "weight_v"
            ): tensor
            for name, tensor in state.items()
        }

    found = add_update(_read(tmp_path, "d", named(delta)), _read(tmp_path, "g", named(before)))
    torch.testing.assert_close(found.tensors["weight"], layer.weight.detach().double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("old", [False, True])
def test_network_under_weight_norm(tmp_path: Path, old: bool) -> None:
    """Its files hold magnitudes and directions, and an update that may be zero in either."""
    code = tmp_path / "normed.py"
    code.write_text(NORMED)
    namespace: dict[str, object] = {}
    exec(code.read_text(), namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the old form deprecated
        net = namespace["make"](old)  # type: ignore[operator]
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        images = torch.rand(32, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(32) ** 2 % 7
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        after = net.state_dict()
        write_torch(tmp_path / "g.pt", before)
        write_torch(tmp_path / "weights.pt", after)
        write_torch(tmp_path / "delta.pt", {name: after[name] - before[name] for name in before})
        flags = ["--aux", AUX, "--arch", f"{code}:make:old={old}", "--normalize", "none", *QUICK]
        flags += ["--lr", 0.1, "--batch-size", 32, "--steps", 1, "--global", tmp_path / "g.pt"]
        found = {
            kind: call("recover", *flags, "--local", tmp_path / f"{kind}.pt", "--update", kind).document
            for kind in ("weights", "delta")
        }
    assert found["weights"]["counts"] == found["delta"]["counts"]
    true = torch.bincount(labels, minlength=10).tolist()
    assert sum(abs(a - b) for a, b in zip(found["delta"]["counts"], true, strict=True)) <= 2


NORMED = """
import torch
from torch import nn
def make(old):
    torch.manual_seed(0)
    normed = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
    head = normed(nn.Linear(16, 10))
    return nn.Sequential(nn.Flatten(), normed(nn.Linear(784, 16)), nn.ReLU(), head)
"""


def test_rounding_of_what_is_stored() -> None:
    """Against the error itself: never above the bound, and of its size on average."""
    values = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16):
        for scale in (1.0, 1e-6):
            stored = (scale * values).to(dtype)
            error = float((stored.double() - scale * values).norm())
            assert (
                error
                <= stored_rounding(stored)
                <= (4 if scale == 1.0 or dtype is torch.bfloat16 else 1e3) * error
            )
    assert stored_rounding(values, values.float(), torch.ones(2, dtype=torch.int64)) == 0.0
    assert stored_rounding(stored, stored) == pytest.approx(2**0.5 * stored_rounding(stored))


# --- --key -------------------------------------------------------------------------------------------


def nested(folder: Path, *, round_: str = "trained_m1") -> list[Path]:
    """Global and local as training scripts write them: stale weights first, the round's own under a key."""
    paths = []
    for name in ("global", "client_0"):
        state = tensors(SAMPLES / round_ / f"{name}.safetensors")
        stale = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        about = metadata(SAMPLES / round_ / f"{name}.safetensors")
        paths.append(write_torch(folder / f"{name}.pt", {"model": stale, "ema": {"shadow": state}, **about}))
    return paths


def test_key_chooses_among_nested_weights(tmp_path: Path) -> None:
    counts = call("recover", *sample("trained_m1"), *PLAIN).document["counts"]
    reference, local = nested(tmp_path)
    flags = ["--aux", AUX, "--key", "ema.shadow", *PLAIN]
    both = call("recover", "--global", reference, "--local", local, *flags)
    assert both.document["counts"] == counts
    folder = SAMPLES / "trained_m1"
    for pair in ((reference, folder / "client_0.safetensors"), (folder / "global.safetensors", local)):
        found = call("recover", "--global", pair[0], "--local", pair[1], *flags)
        assert found.document["counts"] == counts
    scored = call(
        "evaluate", "--global", reference, "--local", local, "--truth", folder / "truth.json", *flags
    )
    assert scored.document["results"][0]["counts"] == counts


def test_key_that_is_nowhere(tmp_path: Path) -> None:
    flags = ["--aux", AUX, "--key", "nope"]
    reference, local = nested(tmp_path)
    refusal = call("recover", "--global", reference, "--local", local, *flags).refusal(3)
    assert "'nope'" in refusal and "ema.shadow" in refusal and "model" in refusal
    plain = call("recover", *sample("trained_m1"), "--key", "nope").refusal(4)
    assert "leave out --key" in plain
    alone = ["--global", SAMPLES / "trained_m1" / "global.safetensors", *flags]
    assert "conv1" in call("estimate-logits", *alone).refusal(3)
    assert "conv1" in call("inspect", alone[1], "--key", "nope").refusal(3)


def test_nested_file_without_the_key_is_never_read_otherwise(tmp_path: Path) -> None:
    """Averaged weights of one model against plain ones of the other would be an update of nothing."""
    reference, local = nested(tmp_path)
    state = tensors(SAMPLES / "trained_m1" / "client_0.safetensors")
    write_torch(local, {"model": state, **metadata(SAMPLES / "trained_m1" / "client_0.safetensors")})
    flags = ["--global", reference, "--local", local, "--aux", AUX, "--key", "ema.shadow"]
    assert "'ema.shadow'" in call("recover", *flags).refusal(3)


def test_inspect_and_estimate_logits_take_the_key(tmp_path: Path) -> None:
    reference, _ = nested(tmp_path)
    document = call("inspect", reference, "--key", "ema.shadow").document
    assert document["notes"] == ["read from 'ema.shadow'"]
    found = call("estimate-logits", "--global", reference, "--key", "ema.shadow", "--aux", AUX, *QUICK)
    plain = call("estimate-logits", *sample("trained_m1")[:2], "--aux", AUX, *QUICK)
    assert found.document["classes"] == plain.document["classes"]


def test_statistics_remember_the_key(tmp_path: Path) -> None:
    """Statistics of averaged weights say nothing of those beside them in the same file."""
    reference, local = nested(tmp_path)
    stats = tmp_path / "stats.safetensors"
    made = ["--global", reference, "--key", "ema.shadow", "--aux", AUX, *QUICK, "-o", stats]
    assert call("estimate-logits", *made).code == 0
    pair = ["--global", reference, "--local", local, "--stats", stats]
    found = call("recover", *pair, "--key", "ema.shadow", *PLAIN).document
    assert found["counts"] == call("recover", *sample("trained_m1"), *PLAIN).document["counts"]
    assert "'ema.shadow'" in call("recover", *pair, *QUICK).refusal(4)


# --- heads that did not move -------------------------------------------------------------------------


def changed_round(folder: Path, change: object, *extra: object, round_: str = "trained_m1") -> list[object]:
    """The flags of a sample round whose local tensors were changed by ``change(before, after)``."""
    before = tensors(SAMPLES / round_ / "global.safetensors")
    after = tensors(SAMPLES / round_ / "client_0.safetensors")
    change(before, after)  # type: ignore[operator]
    about = metadata(SAMPLES / round_ / "client_0.safetensors")
    reference = write_torch(folder / "global.pt", before)
    local = write_torch(folder / "client_0.pt", {"state_dict": after, **about})
    return ["--global", reference, "--local", local, "--aux", AUX, *extra]


def test_frozen_head_is_told_from_a_copy(tmp_path: Path) -> None:
    def freeze(before: State, after: State) -> None:
        after["fc3.weight"], after["fc3.bias"] = before["fc3.weight"], before["fc3.bias"]

    refusal = call("recover", *changed_round(tmp_path, freeze)).refusal(4)
    assert "fc3" in refusal and "8 other tensors moved" in refusal and "frozen" in refusal

    def copy(before: State, after: State) -> None:
        after.update(before)

    assert "identical" in call("recover", *changed_round(tmp_path, copy)).refusal(4)


def test_adapters_are_named(tmp_path: Path) -> None:
    def adapt(before: State, after: State) -> None:
        for state, value in ((before, 0.0), (after, 1.0)):
            state["fc2.lora_A.default.weight"] = torch.ones(2, 120)
            state["fc2.lora_B.default.weight"] = torch.full((84, 2), value)
        after.update({name: tensor for name, tensor in before.items() if "lora_B" not in name})

    refusal = call("recover", *changed_round(tmp_path, adapt, "--arch", "lenet5")).refusal(4)
    assert "LoRA adapters (of fc2)" in refusal and "merge_and_unload" in refusal

    def only_local(before: State, after: State) -> None:
        after["fc2.lora_A.default.weight"] = torch.ones(2, 120)

    refusal = call("recover", *changed_round(tmp_path, only_local)).refusal(4)
    assert "LoRA adapters (of fc2)" in refusal


def test_head_frozen_beside_trained_adapters(tmp_path: Path) -> None:
    """A user's own network may carry its adapters; then all fits but the head that stands still."""
    code = tmp_path / "adapted.py"
    code.write_text(
        "import torch\n"
        "class Adapted(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = torch.nn.Linear(784, 8)\n"
        "        self.lora_A = torch.nn.Linear(784, 2, bias=False)\n"
        "        self.lora_B = torch.nn.Linear(2, 8, bias=False)\n"
        "        self.fc = torch.nn.Linear(8, 10)\n"
        "    def forward(self, x):\n"
        "        x = x.flatten(1)\n"
        "        return self.fc(self.body(x) + self.lora_B(self.lora_A(x)))\n"
    )
    namespace: dict[str, object] = {}
    exec(code.read_text(), namespace)
    state = namespace["Adapted"]().state_dict()  # type: ignore[operator]
    write_torch(tmp_path / "g.pt", state)
    write_torch(tmp_path / "k.pt", {n: t + 1 if "lora_B" in n else t for n, t in state.items()})
    flags = ["--global", tmp_path / "g.pt", "--local", tmp_path / "k.pt", "--aux", AUX]
    given = ["--arch", f"{code}:Adapted", "--lr", 0.1, "--batch-size", 8, "--steps", 1]
    refusal = call("recover", *flags, *given, *QUICK).refusal(4)
    assert "1 other tensors moved (lora_B.weight)" in refusal and "LoRA adapters were trained" in refusal


def test_frozen_bias_is_left_out(tmp_path: Path) -> None:
    """As for a head without bias, whose counts come from the weights: close to those that the bias gives."""

    def freeze(before: State, after: State) -> None:
        after["fc3.bias"] = before["fc3.bias"]

    found = call("recover", *changed_round(tmp_path, freeze, round_="untrained_m1"))
    assert found.codes == ["head-bias-frozen"]
    counts = call("recover", *sample("untrained_m1")).document["counts"]
    assert sum(abs(a - b) for a, b in zip(found.document["counts"], counts, strict=True)) <= 8
