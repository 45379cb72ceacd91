"""What compression an update shows, and the same done to another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlu_cli.audit.compression import compressed, compression
from rlu_cli.core.coarse import coarsening_of, usual_share
from rlu_cli.core.types import Compression, HeadUpdate
from rlu_cli.files.checkpoint import Checkpoint
from rlu_cli.simulation.defences import Defence

SHAPES = {
    "conv.weight": (8, 1, 5, 5),
    "conv.bias": (8,),
    "fc.weight": (10, 84),
    "fc.bias": (10,),
    "empty.weight": (300,),
}


def models(
    defence: Defence | None, seed: int, *, each: bool = False
) -> tuple[Checkpoint, Checkpoint, Tensor]:
    """A local and a global model, and the update between them; defended whole, or tensor by tensor."""
    drawn = torch.Generator().manual_seed(seed)
    before = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
    change = {
        name: 1e-2 / (1 + place) * torch.randn(shape, generator=drawn) ** 3
        for place, (name, shape) in enumerate(SHAPES.items())
    }
    if defence is not None and each:
        change = {name: defence.apply(c.flatten(), drawn).view(c.shape) for name, c in change.items()}
    elif defence is not None:
        flat = defence.apply(torch.cat([value.flatten() for value in change.values()]), drawn)
        parts = torch.split(flat, [value.numel() for value in change.values()])
        change = {n: p.view(SHAPES[n]) for n, p in zip(change, parts, strict=True)}
    after = {name: before[name] + change[name] for name in before}
    flat = torch.cat([value.flatten() for value in change.values()])
    return _checkpoint(after), _checkpoint(before), flat


def _checkpoint(tensors: dict[str, Tensor]) -> Checkpoint:
    return Checkpoint(Path("model.safetensors"), "safetensors", tensors)


def seen(defence: Defence | None, seed: int = 0, *, each: bool = False) -> Compression | None:
    local, reference, _ = models(defence, seed, each=each)
    weight, bias = (
        (local.tensors[name].double() - reference.tensors[name].double()).numpy()
        for name in ("fc.weight", "fc.bias")
    )
    return compression(local, reference, coarsening_of(HeadUpdate(weight, bias), resolution=3e-7))


@pytest.mark.parametrize("seed", range(3))
def test_the_share_and_the_levels_are_found(seed: int) -> None:
    assert seen(None, seed) is None
    for share in (0.7, 0.5, 0.1, 0.03):
        assert seen(Defence(top_k=share), seed) == Compression(share)
        assert seen(Defence(top_k=share), seed, each=True) == Compression(share, by_tensor=True)
    for bits in (3, 6):
        assert seen(Defence(quantize=bits), seed) == Compression(levels=2**bits)
        assert seen(Defence(quantize=bits), seed, each=True) == Compression(by_tensor=True, levels=2**bits)
    assert seen(Defence(top_k=0.3, quantize=3), seed) == Compression(0.3, levels=8)


def test_shares_that_are_alike_are_one() -> None:
    found = {share: usual_share(share) for share in (0.999, 0.953, 0.9, 0.7, 0.07, 0.0101, 0.0012, 0.98e-3)}
    assert list(found.values()) == [0.99, 0.95, 0.9, 0.7, 0.07, 0.01, 0.0012, 0.001]
    assert seen(Defence(top_k=0.105)) == seen(Defence(top_k=0.095)) == Compression(0.1)
    assert seen(Defence(top_k=0.13)) == Compression(0.12)


@settings(max_examples=30, deadline=None)
@given(
    share=st.sampled_from((1.0, 0.9, 0.3, 0.01)),
    bits=st.sampled_from((0, 1, 2, 4, 8)),
    seed=st.integers(0, 99),
)
def test_an_update_loses_what_a_client_s_does(share: float, bits: int, seed: int) -> None:
    """The oracle is what `simulate` sends."""
    drawn = torch.Generator().manual_seed(seed)
    change = {name: torch.randn(shape, generator=drawn) ** 3 for name, shape in SHAPES.items()}
    flat = torch.cat([value.flatten() for value in change.values()])
    sent = Defence(top_k=share, quantize=bits or None).apply(flat, drawn)
    found, steps = compressed(change, Compression(share, levels=2**bits if bits else 0))
    torch.testing.assert_close(torch.cat([value.flatten() for value in found.values()]), sent)
    different = torch.unique(torch.cat([v[v != 0] for v in found.values()]))
    (step,) = set(steps.values())
    if bits and len(different) > 1:
        assert step <= float(torch.diff(different).min()) * 1.01
    assert (step > 0) == bool(bits)
    by_tensor, steps = compressed(change, Compression(share, by_tensor=True, levels=2**bits if bits else 0))
    for name, value in change.items():
        alone = Defence(top_k=share, quantize=bits or None).apply(value.flatten(), drawn)
        torch.testing.assert_close(by_tensor[name].flatten(), alone)
    assert steps.keys() == change.keys()


def test_each_tensor_keeps_its_own_largest() -> None:
    change = {"large": torch.arange(1.0, 101.0), "small": 1e-3 * torch.arange(1.0, 11.0)}
    found, _ = compressed(change, Compression(0.1, by_tensor=True))
    assert [int((value != 0).sum()) for value in found.values()] == [10, 1]
    found, _ = compressed(change, Compression(0.1))
    assert [int((value != 0).sum()) for value in found.values()] == [11, 0]


def test_an_update_of_equal_numbers_has_no_steps() -> None:
    change = {"flat": torch.full((20,), 0.5)}
    found, step = compressed(change, Compression(levels=4))
    assert step == {"flat": 0.0}
    np.testing.assert_array_equal(found["flat"], change["flat"])


def test_signs_have_the_mean_size_of_their_tensor() -> None:
    change = {"a": torch.tensor([0.1, -0.2, 0.3, -1.0]), "b": torch.tensor([2.0, -4.0])}
    found, steps = compressed(change, Compression(levels=2, signs=True, by_tensor=True))
    torch.testing.assert_close(found["a"], 0.4 * change["a"].sign())
    torch.testing.assert_close(found["b"], 3.0 * change["b"].sign())
    assert steps == {"a": pytest.approx(0.8), "b": pytest.approx(6.0)}
