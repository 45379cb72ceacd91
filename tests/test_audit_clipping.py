"""Updates that were scaled down, and what they were before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from methods_cases import known_round, random_head

from rlu_cli.audit.clipping import Clipped, clip_factor
from rlu_cli.audit.local_model import open_local
from rlu_cli.audit.reading import Reading
from rlu_cli.audit.training import TrainingRecord
from rlu_cli.audit.updates import enlarged
from rlu_cli.core.rate_likelihood import LearningRate
from rlu_cli.core.types import Activations, Clipping, LocalTraining
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors


@pytest.mark.parametrize("factor", [0.01, 0.7, 1.0])
def test_a_scaled_update_is_made_whole_again(tmp_path: Path, factor: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    before = {
        "conv.weight": torch.randn(4, 3, generator=drawn),
        "norm.running_mean": torch.randn(4, generator=drawn),
        "norm.num_batches_tracked": torch.tensor(7),
    }
    change = torch.randn(4, 3, generator=drawn)
    sent = {
        "conv.weight": before["conv.weight"] + factor * change,
        "norm.running_mean": before["norm.running_mean"] + 1,
        "norm.num_batches_tracked": torch.tensor(8),
    }
    paths = [tmp_path / name for name in ("global.safetensors", "local.safetensors")]
    for path, tensors in zip(paths, (before, sent), strict=True):
        save_safetensors(path, tensors)
    reference, local = (read_checkpoint(path) for path in paths)
    whole = enlarged(local, reference, factor).tensors
    expected = before["conv.weight"].double() + change.double()
    torch.testing.assert_close(whole["conv.weight"], expected, atol=1e-6 / factor, rtol=0)
    assert torch.equal(whole["norm.running_mean"], sent["norm.running_mean"])
    assert torch.equal(whole["norm.num_batches_tracked"], sent["norm.num_batches_tracked"])


def test_what_adds_to_gradients_hides_the_factor() -> None:
    observation = known_round(np.array([5, 2, 0, 3]), random_head(4, 3))
    nothing = Activations(np.zeros((1, 4)), np.zeros((1, 3)), np.zeros(1, dtype=np.int64))
    decayed = replace(observation, training=replace(observation.training, weight_decay=0.1))
    for changed in (decayed, replace(observation, constant_gradient=observation.head)):
        assert clip_factor(changed, nothing, None) is None
    assert clip_factor(observation, nothing, None) is None  # too few samples


def sent(tmp_path: Path, *, steps: int = 3, sigma: float = 0.0) -> Reading:
    """A client that sent 0.3 of its update."""
    drawn = torch.Generator().manual_seed(0)
    before = {"fc.weight": torch.randn(4, 3, generator=drawn), "fc.bias": torch.randn(4, generator=drawn)}
    after = {name: value + 0.3 * torch.ones_like(value).cumsum(0) for name, value in before.items()}
    paths = [tmp_path / name for name in ("global.safetensors", "local.safetensors")]
    for path, tensors in zip(paths, (before, after), strict=True):
        save_safetensors(path, tensors)
    reference, local = (read_checkpoint(path) for path in paths)
    record = TrainingRecord(LocalTraining(steps, 8, 0.1), {}, {}, noise_std=sigma, clip=2.0)
    return Reading(open_local(local, reference, "weights", "fc"), record)


@pytest.mark.parametrize(
    ("found", "whole", "simulated"),
    [
        (None, "by an unknown factor, so the counts are too even", "so are those of the clients"),
        (LearningRate(0.3, 0.298, 0.302), "to about 0.3 of itself (95 %: 0.298 to 0.302)", None),
        (LearningRate(0.3, 0.27, 0.33), "too vague for bounds", "to about 0.3 of itself"),
        (LearningRate(0.3, 0.2, 0.5), "too vague for bounds", "so are those of the clients"),
    ],
)
def test_the_notes_say_what_is_known(
    tmp_path: Path, found: LearningRate | None, whole: str, simulated: str | None
) -> None:
    clipped = Clipped(2.0, 2.0, found, "fc")
    read = clipped.whole(sent(tmp_path))
    assert whole in read.notes[0].message
    assert (read.notes[0].code == "clip-estimated") == clipped.sharp == (not read.scaled)
    assert clipped.sharp == (simulated is None)
    assert "noise" not in read.notes[0].message
    assert (
        "but for its noise, or for what wasn't sent"
        in replace(clipped, norm=1.8).whole(sent(tmp_path)).notes[0].message
    )
    if simulated is not None:
        learnt = clipped.simulated(sent(tmp_path))
        assert simulated in learnt.notes[0].message
        assert learnt.notes[0].code in ("clip-estimated", "clip-simulated")
        assert learnt.scaled and learnt.clipping is not None


def test_what_is_divided_by_the_factor(tmp_path: Path) -> None:
    """Update and noise grow, and what is simulated has the noise that was added and an error as large."""
    update = sent(tmp_path).opened.update
    clipped = Clipped(2.0, 2.0, LearningRate(0.3, 0.29, 0.31), "fc")
    for read in (clipped.whole(sent(tmp_path, sigma=0.01)), clipped.simulated(sent(tmp_path, sigma=0.01))):
        np.testing.assert_allclose(read.opened.update.weight, update.weight / 0.3, rtol=1e-12)
        assert read.record.noise_std == pytest.approx(0.01 / 0.3)
    assert read.clipping == Clipping(2.0, 0.01, 0.035)
    wider = Clipped(2.0, 2.0, LearningRate(0.3, 0.24, 0.4), "fc").simulated(sent(tmp_path))
    assert wider.clipping == Clipping(2.0, 0.0, 0.16)


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_hardly_known_is_left_as_it_was_sent(tmp_path: Path, steps: int) -> None:
    """Of one step any factor that isn't sharp: the regression sees what tells of it by itself."""
    found = LearningRate(0.3, 0.29, 0.31) if steps == 1 else LearningRate(0.3, 0.1, 0.9)
    before = sent(tmp_path, steps=steps, sigma=0.01)
    read = Clipped(2.0, 2.0, found, "fc").simulated(before)
    assert read.opened is before.opened
    assert read.record is before.record
    assert read.clipping == Clipping(2.0, 0.01, None)
