"""``--cache``: the same bytes for less work, and never for other inputs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import (
    AUX,
    QUICK,
    SAMPLES,
    Outcome,
    call,
    metadata,
    sample,
    tensors,
    write_safetensors,
    write_torch,
)
from core_cases import random_confidence, statistics_of
from PIL import Image

from rlu_cli.audit.cache import Cache
from rlu_cli.audit.fit_file import read_fit, write_fit
from rlu_cli.audit.options import RunOptions
from rlu_cli.audit.replay import Replay
from rlu_cli.core.types import FloatArray, Head
from rlu_cli.errors import FileError

GLOBAL = SAMPLES / "untrained_m1" / "global.safetensors"
CODE = """
from torch import nn

def small():
    body = [nn.Conv2d(1, 4, 5, 3), nn.BatchNorm2d(4), nn.{activation}(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(256, 10))
"""


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def estimate(cache: Path, *more: object, reference: Path = GLOBAL, aux: Path = AUX) -> Outcome:
    """One entry for each different set of inputs."""
    outcome = call("estimate-logits", "--global", reference, "--aux", aux, "--cache", cache, *QUICK, *more)
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.fixture
def no_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to forbid passes over the images and Monte Carlo from then on."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("this is in the cache")

    def forbid() -> None:
        monkeypatch.setattr("rlu_cli.audit.image_source.probe", never)
        monkeypatch.setattr("rlu_cli.audit.source.model_statistics", never)
        monkeypatch.setattr("rlu_cli.core.methods.regression.fit_regression", never)
        monkeypatch.setattr("rlu_cli.audit.replayed_clients.ReplayedClients.__call__", never)

    return forbid


@pytest.mark.parametrize(("round_", "kept"), [("untrained_m1", 1), ("trained_m1", 2), ("trained_m10", 3)])
def test_a_hit_gives_the_same_bytes_without_a_pass(
    tmp_path: Path, round_: str, kept: int, no_pass: Callable[[], None]
) -> None:
    flags = ["recover", *sample(round_), *QUICK]
    without = call(*flags)
    first = call(*flags, "--cache", tmp_path / "new" / "cache")
    assert len(entries(tmp_path / "new" / "cache")) == kept
    no_pass()
    second = call(*flags, "--cache", tmp_path / "new" / "cache")
    assert without.code == 0
    assert (without.out, without.err) == (first.out, first.err) == (second.out, second.err)


def test_what_methods_fit_serves_other_clients_that_train_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    made = Replay.update

    def counted(self: Replay, z: FloatArray, draw: int = 0) -> Head | None:
        replays.append(draw)
        return made(self, z, draw)

    monkeypatch.setattr(Replay, "update", counted)
    flags = ["recover", *sample("trained_m1"), "--method", "surrogate", *QUICK]
    first = call(*flags, "--cache", tmp_path)
    number = len(replays)
    assert call(*flags, "--cache", tmp_path).out == first.out
    assert len(replays) == number + 60  # those near the client's own counts, which are its own


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """A cache that has all that is wanted for a round, and what was printed."""
    found = {}
    for round_ in ("trained_m1", "trained_m10"):
        folder = tmp_path_factory.mktemp(round_)
        found[round_] = folder, call("recover", *sample(round_), *QUICK, "--cache", folder)
    return found


@pytest.mark.parametrize(
    ("round_", "change"),
    [
        *(("trained_m1", change) for change in ("missing", "shape", "infinite", "facts", "bytes")),
        *(("trained_m10", change) for change in ("missing", "shape")),
    ],
)
def test_a_fit_that_was_changed_is_noted_and_made_again(
    tmp_path: Path, filled: dict[str, tuple[Path, Outcome]], round_: str, change: str
) -> None:
    folder, whole = filled[round_]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (entry,) = (path for path in tmp_path.iterdir() if "rlu.fit" in metadata(path))
    kept = entry.read_bytes()
    arrays, about = read_fit(entry)
    name = min(arrays)  # the checksum is made anew: only what the numbers are can tell
    if change == "missing":
        del arrays[name]
    elif change == "shape":
        arrays[name] = arrays[name][:-1]
    elif change == "infinite":
        arrays[name].flat[0] = np.inf
    elif change == "facts":
        about["cache_facts"]["seed"] += 1
    write_fit(entry, arrays, about)
    if change == "bytes":
        entry.write_bytes(_flip(kept))
    again = call("recover", *sample(round_), *QUICK, "--cache", tmp_path)
    assert again.codes == [*whole.codes, "cache-damaged"]
    assert again.document["counts"] == whole.document["counts"]
    assert entry.read_bytes() == kept


def test_commands_share_it(tmp_path: Path, no_pass: Callable[[], None]) -> None:
    saved = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    printed = [estimate(tmp_path / "cache", "-o", saved[0]).document]
    no_pass()
    printed.append(estimate(tmp_path / "cache", "-o", saved[1]).document)
    assert [document.pop("output") for document in printed] == [str(path) for path in saved]
    assert printed[0] == printed[1]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    flags = [*sample("untrained_m1"), "--cache", tmp_path / "cache", *QUICK]
    assert call("recover", *flags).code == 0
    assert call("evaluate", *flags, "--truth", GLOBAL.with_name("truth.json")).code == 0


def test_an_entry_is_a_statistics_file(tmp_path: Path) -> None:
    estimate(tmp_path)
    (entry,) = tmp_path.iterdir()
    stored = call("recover", *sample("untrained_m1", aux=None), "--stats", entry, *QUICK).document
    assert stored["counts"] == call("recover", *sample("untrained_m1"), *QUICK).document["counts"]


def test_it_goes_by_content_not_by_path_or_format(tmp_path: Path, no_pass: Callable[[], None]) -> None:
    estimate(tmp_path / "cache")
    shutil.copytree(AUX, tmp_path / "elsewhere")
    about = metadata(GLOBAL)
    moved = write_torch(tmp_path / "other.pt", {**about, "state_dict": tensors(GLOBAL)})
    no_pass()
    document = estimate(tmp_path / "cache", reference=moved, aux=tmp_path / "elsewhere").document
    assert document["inputs"]["aux"]["path"] == str(tmp_path / "elsewhere")
    assert document["inputs"]["global"]["path"] == str(moved)


def _brighter_pixel(folder: Path) -> dict[str, Any]:
    shutil.copytree(AUX, folder / "aux")
    path = sorted((folder / "aux" / "bag").iterdir())[0]
    with Image.open(path) as image:
        pixels = np.array(image)
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)
    return {"aux": folder / "aux"}


def _one_image_less(folder: Path) -> dict[str, Any]:
    shutil.copytree(AUX, folder / "aux")
    sorted((folder / "aux" / "bag").iterdir())[0].unlink()
    return {"aux": folder / "aux"}


def _other_weight(folder: Path) -> dict[str, Any]:
    state = tensors(GLOBAL)
    state["conv1.weight"].flatten()[0] += 1e-6
    return {"reference": write_safetensors(folder / "g.safetensors", state, metadata(GLOBAL))}


@pytest.mark.parametrize("change", [_brighter_pixel, _one_image_less, _other_weight])
def test_other_files_miss(tmp_path: Path, change: Callable[[Path], dict[str, Any]]) -> None:
    estimate(tmp_path / "cache")
    estimate(tmp_path / "cache", **change(tmp_path))
    assert len(entries(tmp_path / "cache")) == 2


def test_other_settings_miss(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    order = tmp_path / "order.txt"
    names = sorted(path.name for path in AUX.iterdir())
    order.write_text("\n".join(names[::-1]), encoding="utf-8")
    settings: list[list[object]] = [
        [],
        ["--samples", 300],
        ["--seed", 1],
        ["--normalize", "half"],
        ["--arch", "lenet5:activation=tanh"],
        ["--class-order", order],
    ]
    for count, flags in enumerate(settings, start=1):
        estimate(cache, *flags)
        assert len(entries(cache)) == count, flags
    for flags in settings:
        estimate(cache, *flags)
    assert len(entries(cache)) == len(settings)


def test_the_users_own_code_is_told_by_what_it_does(tmp_path: Path, no_pass: Callable[[], None]) -> None:
    state = {
        "0.weight": 0.3 * torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(0)),
        "0.bias": torch.zeros(4),
        "1.weight": torch.ones(4),
        "1.bias": torch.zeros(4),
        "1.running_mean": torch.zeros(4),
        "1.running_var": torch.ones(4),
        "4.weight": 0.1 * torch.randn(10, 256, generator=torch.Generator().manual_seed(1)),
        "4.bias": torch.zeros(10),
    }
    reference = write_safetensors(tmp_path / "g.safetensors", state, metadata(GLOBAL))
    cache = tmp_path / "cache"

    def measure(activation: str, *more: object) -> int:
        code = tmp_path / "net.py"
        code.write_text(CODE.format(activation=activation), encoding="utf-8")
        estimate(cache, "--arch", f"{code}:small", *more, reference=reference)
        return len(entries(cache))

    assert measure("ReLU") == 1
    assert measure("Tanh") == 2
    assert measure("ReLU", "--batch-norm", "running") == 3
    about = metadata(GLOBAL) | {"fl.batch_size": "8"}
    write_safetensors(reference, state, about)
    assert measure("ReLU") == 4
    assert measure("ReLU", "--batch-norm", "running") == 4  # the batch size changes nothing there
    # Statistics of other batches than the client's are used, and said to be.
    stats = tmp_path / "stats.safetensors"
    estimate(cache, "--arch", f"{tmp_path / 'net.py'}:small", "-o", stats, reference=reference)
    moved = {**state, "4.bias": 1e-3 * (torch.arange(10.0) - 4.5)}
    training = {"fl.lr": "0.01", "fl.steps": "1"}
    for batch, codes in (("8", []), ("16", ["stats-batch-size"])):
        local = write_safetensors(tmp_path / "k.safetensors", moved, {**training, "fl.batch_size": batch})
        flags = ["--global", reference, "--local", local, "--stats", stats, "--method", "random"]
        found = call("recover", *flags).codes
        of_counts = {"update-misscaled", "update-unexplained", "counts-random"}
        assert [code for code in found if code not in of_counts] == codes


def _cut(data: bytes) -> bytes:
    return data[:-9]


def _flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def _text(data: bytes) -> bytes:
    return b"no statistics"


def _nothing(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [_cut, _flip, _text, _nothing])
def test_a_damaged_entry_is_noted_and_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    whole = estimate(tmp_path).document
    (entry,) = tmp_path.iterdir()
    data = entry.read_bytes()
    entry.write_bytes(damage(data))
    again = estimate(tmp_path)
    assert again.codes == ["cache-damaged"]
    assert again.document["classes"] == whole["classes"]
    assert entry.read_bytes() == data
    assert entries(tmp_path) == {entry.name}
    assert estimate(tmp_path).codes == []


def test_an_entry_under_anothers_name_is_not_believed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    estimate(cache)
    (first,) = cache.iterdir()
    known = estimate(cache, "--seed", 1).document
    (second,) = set(cache.iterdir()) - {first}
    shutil.copy(first, second)
    again = estimate(cache, "--seed", 1)
    assert again.codes == ["cache-damaged"]
    assert again.document["classes"] == known["classes"]


def test_a_cache_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise FileError("no space left")

    monkeypatch.setattr("rlu_cli.audit.cache.write_statistics", full)
    outcome = estimate(tmp_path)
    assert outcome.codes == ["cache-not-written"]
    assert "no space left" in outcome.err


def test_a_cache_that_cannot_be_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    message = call("recover", *sample("untrained_m1"), "--cache", tmp_path / "file").refusal(3)
    assert "--cache" in message


def test_processes_may_share_a_folder(tmp_path: Path) -> None:
    """Every reader finds nothing or a whole entry, while others write it."""
    rng = np.random.default_rng(0)
    statistics = statistics_of(random_confidence(rng, 30), rng.normal(size=(30, 50)))
    unknown = ("arch", "image_size", "channels", "normalize", "batch_norm", "dropout", "class_order")
    about = {
        **dict.fromkeys(unknown),
        **{"global_sha256": "", "head": "fc", "num_classes": 30, "embedding_size": 50, "aux": {}},
        "class_names": [str(n) for n in range(30)],
    }

    def work(number: int) -> list[bool]:
        cache = Cache(tmp_path)
        slot = cache.slot({"fact": 1}, RunOptions())
        found = []
        for turn in range(20):
            if (turn + number) % 3 == 0:
                slot.write(statistics, about)
            kept = slot.read()
            found.append(kept is None or np.array_equal(kept.confidence, statistics.confidence))
        return [*found, not cache.notes]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(found) for found in pool.map(work, range(8)))
    assert len(os.listdir(tmp_path)) == 1  # noqa: PTH208
