"""Which layers of a network its dense tail is, by the numbers that pass through it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlu_cli.audit.dense_tail import DenseLayers, find_dense_layers
from rlu_cli.audit.network import Network
from rlu_cli.models import LeNet5, find_head, parse_spec


class Skipping(nn.Module):
    """Whose second layer reads more than the first one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.one, self.two = nn.Linear(784, 30), nn.Linear(30, 30)
        self.head = nn.Linear(30, 10)

    def forward(self, images: Tensor) -> Tensor:
        first = self.one(self.flatten(images)).relu()
        logits: Tensor = self.head(self.two(first).relu() + first)
        return logits


def mlp(*, act: type[nn.Module] = nn.ReLU, bias: bool = True, between: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 40),
        act(),
        *([between] if between else []),
        nn.Linear(40, 30, bias=bias),
        act(),
        nn.Linear(30, 10),
    )


def network_of(model: nn.Module) -> Network:
    model.eval()
    head = find_head(model, torch.rand(4, 1, 28, 28))
    return Network(model, parse_spec("lenet5"), head, 1, (28, 28), False, "")


def found_in(model: nn.Module) -> list[str]:
    network = network_of(model)
    images = torch.rand(64, 1, 28, 28)

    def run() -> None:
        with torch.no_grad():
            for batch in images.split(20):
                model(batch)

    found = find_dense_layers(network, run)
    again = DenseLayers.from_arrays(found.arrays())
    assert list(again.inputs) == list(found.inputs)
    assert all(torch.equal(again.inputs[name], x) for name, x in found.inputs.items())
    return list(found.inputs)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LeNet5(), ["fc1", "fc2"]),
        (LeNet5(activation="tanh"), []),
        (mlp(), ["1", "3"]),
        (mlp(between=nn.Dropout(0.5)), ["1", "4"]),
        (mlp(between=nn.BatchNorm1d(40)), ["4"]),
        (mlp(bias=False), []),
        (mlp(act=nn.LeakyReLU), []),
        (Skipping(), []),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), []),
        (nn.Sequential(nn.Conv2d(1, 10, 28), nn.Flatten(), nn.Linear(10, 10)), []),
    ],
)
def test_layers_are_told_by_their_numbers(model: nn.Module, expected: list[str]) -> None:
    if any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules()):
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.BatchNorm1d):
                    layer.weight.fill_(2.0)
                    layer.bias.fill_(0.5)
    assert found_in(model) == expected


def test_the_update_is_the_difference_in_double_precision() -> None:
    before = mlp().state_dict()
    after = {**before, "1.weight": before["1.weight"] + 1e-7 * torch.randn(40, 784)}
    tail = DenseLayers({"1": torch.rand(5, 784)}).tail(before, after)
    assert tail is not None and len(tail.layers) == 1
    expected = after["1.weight"].double() - before["1.weight"].double()
    assert np.array_equal(tail.layers[0].update.weight, expected.numpy())
    assert not np.any(tail.layers[0].update.bias)


@pytest.mark.parametrize("wrong", ["half", "missing"])
def test_no_update_of_numbers_that_say_too_little(wrong: str) -> None:
    before = mlp().state_dict()
    after = dict(before)
    if wrong == "half":
        after["1.weight"] = before["1.weight"].half()
    else:
        del after["1.bias"]
    assert DenseLayers({"1": torch.rand(5, 784)}).tail(before, after) is None


def test_no_layers_have_no_update() -> None:
    assert DenseLayers({}).tail({}, {}) is None
