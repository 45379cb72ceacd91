"""Updates that were scaled down, and what they were before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from methods_cases import known_round, random_head

from rlu_cli.audit.clipping import clip_factor, clipping_note
from rlu_cli.audit.updates import enlarged
from rlu_cli.core.rate_likelihood import LearningRate
from rlu_cli.core.types import Activations
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


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (None, "update-clipped", "unknown factor"),
        (LearningRate(0.5, 0.49, 0.51), "clip-estimated", "to about 0.5 of itself (95 %: 0.49 to 0.51)"),
        (LearningRate(0.5, 0.3, 0.8), "update-clipped", "too vague for bounds"),
    ],
)
def test_the_note_says_what_is_known(found: LearningRate | None, code: str, said: str) -> None:
    note = clipping_note(1.0, 1.0, found)
    assert note.code == code
    assert said in note.message
