"""What a client does to its update before sending it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlu_cli.audit.options import SimulationOptions
from rlu_cli.simulation.defences import Defence
from rlu_cli.simulation.settings import defence_of


def update(size: int = 10_000, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def draw(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_nothing_is_done_by_default() -> None:
    assert not Defence().active
    assert not defence_of(SimulationOptions()).active
    assert torch.equal(Defence().apply(update(), draw()), update())


@pytest.mark.parametrize(
    "values",
    [{"clip": 1.0}, {"noise_std": 0.1}, {"top_k": 0.5}, {"quantize": 8}],
    ids=lambda v: next(iter(v)),
)
def test_each_alone_is_active(values: dict[str, float]) -> None:
    assert Defence(**values).active  # type: ignore[arg-type]
    assert defence_of(SimulationOptions(**values)) == Defence(**values)  # type: ignore[arg-type]
    assert not torch.equal(Defence(**values).apply(update(), draw()), update())  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [0.01, 1.0, 50.0])
def test_clip_bounds_the_norm_and_keeps_the_direction(bound: float) -> None:
    clipped = Defence(clip=bound).apply(update(), draw())
    assert float(clipped.norm()) == pytest.approx(bound, rel=1e-5)
    assert float(torch.cosine_similarity(clipped, update(), dim=0)) == pytest.approx(1.0, abs=1e-5)


def test_clip_leaves_small_updates_alone() -> None:
    small = 1e-3 * update(10)
    assert torch.equal(Defence(clip=1.0).apply(small, draw()), small)
    assert torch.equal(Defence(clip=1.0).apply(torch.zeros(4), draw()), torch.zeros(4))


def test_noise_has_the_standard_deviation_asked_for() -> None:
    noise = Defence(noise_std=0.3).apply(update(), draw()) - update()
    assert float(noise.std()) == pytest.approx(0.3, rel=0.03)  # 4 standard errors of 10,000 draws
    assert abs(float(noise.mean())) < 4 * 0.3 / 100
    assert abs(float((noise / 0.3).pow(4).mean()) - 3) < 0.3  # Gaussian
    assert abs(float(torch.corrcoef(torch.stack((noise, update())))[0, 1])) < 0.04


def test_noise_follows_from_its_seed() -> None:
    noisy = Defence(noise_std=0.3)
    assert torch.equal(noisy.apply(update(), draw(1)), noisy.apply(update(), draw(1)))
    assert not torch.equal(noisy.apply(update(), draw(1)), noisy.apply(update(), draw(2)))


def test_noise_comes_after_clipping() -> None:
    both = Defence(clip=1.0, noise_std=0.5)
    noise = both.apply(update(), draw()) - Defence(clip=1.0).apply(update(), draw())
    assert float(noise.std()) == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.25, 0.9999])
def test_top_k_sends_the_largest(share: float) -> None:
    sparse = Defence(top_k=share).apply(update(), draw())
    sent = sparse != 0
    assert int(sent.sum()) == max(1, round(share * 10_000))
    assert torch.equal(sparse[sent], update()[sent])
    assert update()[sent].abs().min() >= update()[~sent].abs().max()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_quantize_keeps_few_levels(bits: int) -> None:
    coarse = Defence(quantize=bits).apply(update(), draw())
    levels = coarse.unique()
    assert len(levels) <= 2**bits
    step = float(update().max() - update().min()) / (2**bits - 1)
    assert float((coarse - update()).abs().max()) <= step / 2 * (1 + 1e-4)
    assert float(levels.min()) == pytest.approx(float(update().min()))
    assert float(levels.max()) == pytest.approx(float(update().max()), rel=1e-5)


def test_quantize_leaves_a_constant_update_alone() -> None:
    assert torch.equal(Defence(quantize=4).apply(torch.full((5,), 0.3), draw()), torch.full((5,), 0.3))


def test_quantize_after_top_k_touches_only_what_is_sent() -> None:
    both = Defence(top_k=0.1, quantize=3).apply(update(), draw())
    unsent = Defence(top_k=0.1).apply(update(), draw()) == 0
    assert torch.count_nonzero(both[unsent]) == 0
    assert len(both[~unsent].unique()) <= 2**3
