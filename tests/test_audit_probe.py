"""Passes over the auxiliary images: batches change nothing but speed, unless BatchNorm sees them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlu_cli.audit.network import Network
from rlu_cli.audit.probe import batch_that_matters, has_dropout, probe
from rlu_cli.core.types import Activations
from rlu_cli.errors import MismatchError
from rlu_cli.images import ImageSet, parse_normalization
from rlu_cli.models import find_head, parse_spec


class Net(nn.Module):
    """Two convolutions, the first with large outputs; counts the batches that it sees."""

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.norm = norm()
        self.second = nn.Conv2d(width, 6, 3, stride=2)
        self.fc = nn.Linear(6, 3)
        self.batches: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        maps = torch.relu(self.norm(self.first(images)))
        logits: Tensor = self.fc(self.second(maps).mean(dim=(2, 3)))
        return logits


class DoubleNet(Net):
    """The same in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.double())


def built(net: Net, size: int = 12) -> Network:
    net.eval()
    head = find_head(net, torch.randn(2, 1, size, size))
    net.batches.clear()
    return Network(net, parse_spec("lenet5"), head, 1, (size, size), False, "")


def images(count: int, size: int = 12) -> ImageSet:
    pixels = torch.randint(0, 256, (count, 1, size, size), dtype=torch.uint8)
    return ImageSet(pixels=pixels, labels=torch.arange(count) % 3, names=("a", "b", "c"))


def run(network: Network, given: ImageSet, **more: object) -> Activations:
    return probe(network, given, parse_normalization("none"), **more)  # type: ignore[arg-type]


def whole(network: Network, given: ImageSet) -> Tensor:
    with torch.inference_mode():
        return network.model(parse_normalization("none").apply(given.pixels))


def test_batches_change_nothing_and_are_smaller_for_large_layers() -> None:
    given = images(300, size=32)
    for width, most in ((4, 256), (500, 4)):
        torch.manual_seed(0)
        network = built(Net(width=width), size=32)
        expected = whole(network, given)
        network.model.batches.clear()
        found = run(network, given)
        np.testing.assert_allclose(found.logits, expected, atol=1e-5)
        assert found.embeddings is not None
        head = network.model.fc
        np.testing.assert_allclose(
            found.logits,
            found.embeddings @ head.weight.detach().numpy().T + head.bias.detach().numpy(),
            atol=1e-5,
        )
        assert network.model.batches[0] == 1  # one image to see how large the layers are
        assert max(network.model.batches[1:]) == most
        assert sum(network.model.batches[1:]) == 300


def test_they_stay_in_the_precision_of_the_model() -> None:
    network = built(Net())
    found = run(network, images(9))
    assert found.embeddings is not None
    assert (found.logits.dtype, found.embeddings.dtype) == (np.float32, np.float32)
    assert run(built(DoubleNet()), images(9)).logits.dtype == np.float64


def test_batch_statistics_are_of_shuffled_batches_and_leave_no_trace() -> None:
    torch.manual_seed(1)
    network = built(Net(lambda: nn.BatchNorm2d(4)))
    before = {name: tensor.clone() for name, tensor in network.model.state_dict().items()}
    given = images(64)
    found = run(network, given, batch_size=16)
    assert network.model.batches == [16] * 4
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    network.model.norm.train()
    network.model.norm.track_running_stats = False
    expected = whole(network, ImageSet(given.pixels[order[:16]], given.labels[order[:16]], given.names))
    np.testing.assert_allclose(found.logits[order[:16].numpy()], expected, atol=1e-5)
    after = network.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("norm", "mode", "matters"),
    [
        (nn.Identity, "batch", None),
        (lambda: nn.GroupNorm(2, 4), "batch", None),
        (lambda: nn.BatchNorm2d(4), "batch", 16),
        (lambda: nn.BatchNorm2d(4), "running", None),
        (lambda: nn.BatchNorm2d(4, track_running_stats=False), "running", 16),
    ],
)
def test_which_batch_size_matters(norm: Callable[[], nn.Module], mode: str, matters: int | None) -> None:
    model = Net(norm)
    assert batch_that_matters(model, mode, 16) == matters
    given = images(64)
    network = built(model)
    few = run(network, given, batch_norm=mode, batch_size=batch_that_matters(model, mode, 8)).logits
    many = run(network, given, batch_norm=mode, batch_size=batch_that_matters(model, mode, 32)).logits
    assert np.allclose(few, many, atol=1e-6) == (matters is None)
    unknown = batch_that_matters(model, mode, None)
    assert (unknown is None) == (matters is None)
    assert batch_that_matters(model, mode, 1) in (None, 2)  # no statistics of a single image


def test_dropout_drops_when_asked_and_leaves_no_trace() -> None:
    torch.manual_seed(2)
    net = Net()
    net.fc = nn.Sequential(nn.Dropout(0.25), nn.Linear(6, 3))
    network = built(net)
    given = images(300)
    off = run(network, given)
    np.testing.assert_allclose(off.logits, whole(network, given), atol=1e-5)
    state = torch.get_rng_state()
    on = run(network, given, dropout="on", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in network.model.modules())
    assert off.embeddings is not None and on.embeddings is not None
    dropped = on.embeddings == 0
    assert dropped.mean() == pytest.approx(0.25, abs=0.03)
    np.testing.assert_allclose(on.embeddings[~dropped], off.embeddings[~dropped] / 0.75, rtol=1e-5)
    for seed, same in ((3, True), (4, False)):
        assert np.array_equal(run(network, given, dropout="on", seed=seed).logits, on.logits) == same
    np.testing.assert_array_equal(run(network, given).logits, off.logits)


@pytest.mark.parametrize(
    ("layer", "drops"),
    [(nn.Dropout(0.25), True), (nn.Dropout2d(), True), (nn.Dropout(0.0), False), (nn.ReLU(), False)],
)
def test_which_networks_drop(layer: nn.Module, drops: bool) -> None:
    assert has_dropout(nn.Sequential(nn.Linear(4, 4), layer)) is drops


def test_images_that_the_network_cannot_read() -> None:
    with pytest.raises(MismatchError, match="--image-size"):
        run(built(Net()), images(5, size=1))
