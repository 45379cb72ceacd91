"""Finding the output layer, and capturing the embedding that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.models import Head, HeadTap, ModelSpec, build_model, find_head, flatten_logits

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def trunk(width: int = 6) -> list[nn.Module]:
    return [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()]


def pool() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


class Wrapped(nn.Module):
    """A model whose output is made by a function of the logits and an auxiliary branch called last."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], object], classes: int = 4, extra: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(*trunk(), *pool())
        self.fc = nn.Linear(6, classes)
        self.aux = nn.Linear(6, extra)
        self.wrap = wrap

    def forward(self, images: Tensor) -> object:
        features = self.body(images)
        logits = self.fc(features)
        return self.wrap(logits, self.aux(features))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


MODELS: dict[str, tuple[Callable[[], nn.Module], Head]] = {
    "linear": (
        lambda: nn.Sequential(*trunk(), *pool(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)),
        Head("7", 4, 5, True),
    ),
    "no bias": (
        lambda: nn.Sequential(*trunk(), *pool(), nn.Linear(6, 4, bias=False)),
        Head("5", 4, 6, False),
    ),
    "dropout before": (
        lambda: nn.Sequential(*trunk(), *pool(), nn.Dropout(0.9), nn.Linear(6, 4)),
        Head("6", 4, 6, True),
    ),
    "conv, then pooling": (
        lambda: nn.Sequential(*trunk(), nn.Conv2d(6, 4, 1), *pool()),
        Head("3", 4, 6, True),
    ),
    "pooling, then conv": (
        lambda: nn.Sequential(*trunk(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 4, 1, bias=False)),
        Head("4", 4, 6, False),
    ),
    "auxiliary branch last": (lambda: Wrapped(lambda logits, aux: logits), Head("fc", 4, 6, True)),
    "tuple": (lambda: Wrapped(lambda logits, aux: (logits, aux)), Head("fc", 4, 6, True)),
    "dict": (lambda: Wrapped(lambda logits, aux: {"aux": aux, "logits": logits}), Head("fc", 4, 6, True)),
    "object": (lambda: Wrapped(lambda logits, aux: Output(logits)), Head("fc", 4, 6, True)),
    "one class": (lambda: Wrapped(lambda logits, aux: logits, classes=1), Head("fc", 1, 6, True)),
    "double": (lambda: nn.Sequential(*trunk(), *pool(), nn.Linear(6, 4)).double(), Head("5", 4, 6, True)),
    "bfloat16": (lambda: nn.Sequential(*trunk(), *pool(), nn.Linear(6, 4)).bfloat16(), Head("5", 4, 6, True)),
}


@pytest.mark.parametrize("case", MODELS)
def test_find_and_tap(case: str) -> None:
    torch.manual_seed(0)
    make, expected = MODELS[case]
    model = make()
    dtype = next(model.parameters()).dtype
    images = IMAGES.to(dtype)
    assert find_head(model, images) == expected
    assert model.training and all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())

    model.eval()
    with HeadTap(model, expected) as tap, torch.no_grad():
        logits = flatten_logits(model(images))
        embedding = tap.embedding
    weight = model.get_parameter(f"{expected.name}.weight").flatten(1)
    bias = model.get_parameter(f"{expected.name}.bias") if expected.has_bias else 0
    assert embedding.shape == (3, expected.embedding_size)
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(embedding @ weight.T + bias, logits, **tolerance)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lenet5", Head("fc3", 10, 84, True)),
        ("vgg16", Head("classifier", 10, 512, True)),
        ("resnet32", Head("linear", 10, 64, True)),
        ("resnet50", Head("fc", 10, 2048, True)),
    ],
)
def test_builtin_heads_are_found_with_random_images(name: str, expected: Head) -> None:
    size = 28 if name == "lenet5" else 32
    kwargs: dict[str, object] = {"num_classes": 10, "image_size": size}
    assert find_head(build_model(ModelSpec(name, kwargs), allow_user_code=False)) == expected


def test_finding_leaves_modes_buffers_and_random_state() -> None:
    model = Wrapped(lambda logits, aux: logits)
    model.body.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    find_head(model, IMAGES[:1])
    find_head(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and model.fc.training and not model.body.training


def test_single_image_size_attribute() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 5 * 5, 2))
    model.image_size = 5
    assert find_head(model) == Head("1", 2, 75, True)


def test_tokens_averaged_after_the_head() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, images: Tensor) -> Tensor:
            return self.fc(input=images.flatten(2).transpose(1, 2)).mean(1)

    model = Tokens()
    head = find_head(model, IMAGES)
    assert head == Head("fc", 4, 3, True)
    with HeadTap(model, head) as tap:
        logits = model(IMAGES)
        torch.testing.assert_close(model.fc(tap.embedding), logits)


def test_tap_keeps_gradients_and_the_latest_pass() -> None:
    model = nn.Sequential(*trunk(), *pool(), nn.Linear(6, 4))
    with HeadTap(model, Head("5", 4, 6, True)) as tap:
        with pytest.raises(RuntimeError, match="no forward pass"):
            _ = tap.embedding
        model(IMAGES[:1])
        model(IMAGES[:2])
        tap.embedding.sum().backward()
    assert tap.embedding.shape == (2, 6)
    assert model[0].weight.grad is not None


def test_tap_is_removed_after_an_exception() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    with pytest.raises(ValueError), HeadTap(model, Head("1", 2, 192, True)):
        raise ValueError
    assert not model[1]._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "wrap", [lambda logits, aux: logits.log_softmax(1), lambda logits, aux: logits + aux[:, :1] + 1]
)
def test_a_layer_behind_which_rows_are_shifted(
    wrap: Callable[[Tensor, Tensor], object], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, images = Wrapped(wrap).to(dtype).eval(), IMAGES.to(dtype)
    expected = Head("fc", 4, 6, True, shifted=True)
    assert find_head(model, images) == find_head(model, images, override="fc") == expected
    with HeadTap(model, expected) as tap, torch.no_grad():
        outputs = flatten_logits(model(images))
        torch.testing.assert_close(tap.logits, model.fc(tap.embedding))
    assert not torch.allclose(tap.logits, outputs, atol=0.1)
    tolerance = {"rtol": 0.05, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(tap.logits.softmax(1), outputs.softmax(1), **tolerance)


def test_the_tap_averages_a_convolutions_outputs() -> None:
    model = nn.Sequential(*trunk(), nn.Conv2d(6, 4, 1), *pool(), nn.LogSoftmax(1)).eval()
    head = find_head(model, IMAGES)
    assert head == Head("3", 4, 6, True, shifted=True)
    with HeadTap(model, head) as tap:
        torch.testing.assert_close(model(IMAGES), tap.logits.log_softmax(1))
        torch.testing.assert_close(model[:6](IMAGES), tap.logits)


def test_a_layer_that_gives_the_outputs_goes_before_one_that_is_shifted() -> None:
    torch.manual_seed(0)
    model = Wrapped(lambda logits, aux: logits)
    with torch.no_grad():
        model.aux.weight.copy_(model.fc.weight)
        model.aux.bias.copy_(model.fc.bias + 1)
    assert find_head(model, IMAGES) == Head("fc", 4, 6, True)


# No head


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda logits, aux: logits.relu(), r"The last such layer called is 'aux'"),
        (lambda logits, aux: logits + aux, r"linear or a 1x1 convolution"),
        (lambda logits, aux: logits.log_softmax(1) * 2, r"linear or a 1x1 convolution"),
        (lambda logits, aux: logits.softmax(1), r"look like probabilities"),
        (lambda logits, aux: (1e-9 * logits).softmax(1), r"look like probabilities"),
    ],
)
def test_no_layer_gives_the_logits(wrap: Callable[[Tensor, Tensor], object], message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(MismatchError, match=message):
        find_head(Wrapped(wrap), IMAGES)


def test_ordinary_logits_get_no_softmax_hint() -> None:
    torch.manual_seed(0)
    with pytest.raises(MismatchError) as caught:
        find_head(Wrapped(lambda logits, aux: logits + aux), IMAGES)
    assert "probabilities" not in str(caught.value)


def test_layers_that_head_could_name_are_listed() -> None:
    torch.manual_seed(0)
    with pytest.raises(MismatchError, match=r"one of those with 4 outputs: fc, aux\.$"):
        find_head(Wrapped(lambda logits, aux: logits + aux), IMAGES)
    with pytest.raises(MismatchError, match=r"No such layer has 8 outputs"):
        find_head(Wrapped(lambda logits, aux: torch.cat([logits, aux], 1)), IMAGES)


def test_no_linear_layer_at_all() -> None:
    with pytest.raises(MismatchError, match="calls no such layer"):
        find_head(nn.Sequential(nn.Conv2d(3, 4, 3), *pool()), IMAGES)


def test_not_finite_logits_fit_nothing() -> None:
    with pytest.raises(MismatchError, match="No output layer found"):
        find_head(Wrapped(lambda logits, aux: logits), IMAGES * float("nan"))


def test_wrong_image_size_is_explained() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(10, 2))
    with pytest.raises(MismatchError, match=r"can't read images of shape \(3, 8, 8\).*--image-size"):
        find_head(model, IMAGES)
    assert model.training and not model[1]._forward_hooks


# --head


@pytest.mark.parametrize("text", ["aux", "aux.weight", "aux."])
def test_override_wins(text: str) -> None:
    model = Wrapped(lambda logits, aux: logits)
    assert find_head(model, IMAGES, override=text) == Head("aux", 4, 6, True)


def test_override_must_exist() -> None:
    with pytest.raises(UsageError, match=r"--head body: .* It has: aux, fc\."):
        find_head(Wrapped(lambda logits, aux: logits), IMAGES, override="body")


def test_override_must_be_called_and_fit_the_classes() -> None:
    with pytest.raises(MismatchError, match="9 outputs, the model returns 4"):
        find_head(Wrapped(lambda logits, aux: logits, extra=9), IMAGES, override="aux")
    model = Wrapped(lambda logits, aux: logits)
    model.unused = nn.Linear(6, 4)
    with pytest.raises(MismatchError, match="never calls"):
        find_head(model, IMAGES, override="unused")


# Outputs


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2, 5),
        torch.ones(2, 5, 1, 1),
        (torch.ones(2, 5), torch.zeros(2, 3)),
        [torch.ones(2, 5)],
        {"loss": None, "logits": torch.ones(2, 5)},
        Output(torch.ones(2, 5, 1, 1)),
    ],
)
def test_flatten_logits(output: object) -> None:
    assert torch.equal(flatten_logits(output), torch.ones(2, 5))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.ones(2, 5, 3, 3), r"\(2, 5, 3, 3\): expected logits"),
        (torch.ones(5), r"\(5,\)"),
        ({"out": torch.ones(2, 5)}, "returned NoneType"),
        ((), "returned tuple"),
        ("text", "returned str"),
    ],
)
def test_outputs_that_are_no_logits(output: object, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        flatten_logits(output)
