"""A client's local training against the same steps written out with autograd."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlu_cli.core.types import LocalTraining
from rlu_cli.simulation.client import Batch, local_training
from rlu_cli.simulation.vectors import Layout, snapshot

M, B = 4, 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def batches(count: int = M) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(B, 1, 3, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (B,), generator=generator),
        )
        for _ in range(count)
    ]


def literal(training: LocalTraining, constant: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The objective with all its terms, differentiated by autograd; SGD written out."""
    net = model()
    start = [p.detach().clone() for p in net.parameters()]
    names = [name for name, _ in net.named_parameters()]
    velocity: list[Tensor] = [torch.zeros_like(p) for p in start]
    rates = np.broadcast_to(np.asarray(training.lr), (training.steps,))
    for number, (rate, (images, labels)) in enumerate(zip(rates, batches(), strict=True)):
        logits = net(images)
        loss = -torch.log_softmax(logits, dim=1)[torch.arange(B), labels].mean()
        for name, p, anchor in zip(names, net.parameters(), start, strict=True):
            loss = loss + training.prox / 2 * (p - anchor).pow(2).sum()
            loss = loss + training.weight_decay / 2 * p.pow(2).sum()
            if constant is not None:
                loss = loss + (constant[name] * p).sum()
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(net.parameters(), grads, strict=True)):
                velocity[i] = (
                    g if number == 0 else training.momentum * velocity[i] + (1 - training.dampening) * g
                )
                p -= float(rate) * (g + training.momentum * velocity[i] if training.nesterov else velocity[i])
    return snapshot(net)


@pytest.mark.parametrize("with_constant", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4},
        {"momentum": 0.9, "nesterov": True},
        {"prox": 2.0},
        {"prox": 2.0, "momentum": 0.5, "weight_decay": 0.01},
        {"lr": (0.2, 0.1, 0.05, 0.01)},
    ],
    ids=str,
)
def test_local_training(values: dict[str, float], with_constant: bool) -> None:
    training = LocalTraining(**{"steps": M, "batch_size": B, "lr": 0.1, **values})  # type: ignore[arg-type]
    net = model()
    constant = None
    if with_constant:
        constant = {
            name: torch.sin(torch.arange(p.numel()).double()).view_as(p) for name, p in net.named_parameters()
        }
    local_training(net, batches(), training, constant=constant)
    for name, expected in literal(training, constant).items():
        assert torch.allclose(net.state_dict()[name], expected, rtol=1e-10, atol=1e-12), name


def test_training_is_in_train_mode_and_batches_must_match_the_steps() -> None:
    net = model().eval()
    local_training(net, batches(), LocalTraining(steps=M, batch_size=B, lr=0.1))
    assert net.training
    with pytest.raises(ValueError, match="zip"):
        local_training(net, batches(M - 1), LocalTraining(steps=M, batch_size=B, lr=0.1))


def test_layout_takes_parameters_apart_and_together() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    layout = Layout(net)
    state = snapshot(net)
    vector = layout.flatten(state)
    assert vector.shape == (sum(p.numel() for p in net.parameters()),)
    parts = layout.split(vector)
    assert set(parts) == {name for name, _ in net.named_parameters()}
    assert all(torch.equal(parts[name], state[name]) for name in parts)


def test_a_snapshot_is_a_copy() -> None:
    net = model()
    state = snapshot(net)
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    assert not torch.equal(state["1.weight"], net.state_dict()["1.weight"])
