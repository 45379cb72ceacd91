"""The built-in architectures: shapes, names, parameter counts, initialisation; matching and loading."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.models import (
    ACTIVATIONS,
    BUILTIN,
    LeNet5,
    ModelSpec,
    ResNet32,
    ResNet50,
    build_model,
    load_weights,
    make_activation,
    match_builtin,
)
from rlu_cli.models.spec import BUILTIN_NAMES

HEAD_NAMES = {"lenet5": "fc3", "vgg16": "classifier", "resnet32": "linear", "resnet50": "fc"}


def build(name: str, **kwargs: object) -> nn.Module:
    return build_model(ModelSpec(name, kwargs), allow_user_code=False)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def meta_shapes(name: str, **kwargs: object) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return shapes_of(build(name, **kwargs))


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Activations


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("relu", nn.ReLU),
        ("leaky_relu", nn.LeakyReLU),
        ("leaky-relu", nn.LeakyReLU),
        ("LeakyReLU", nn.LeakyReLU),
        ("Tanh", nn.Tanh),
        ("elu", nn.ELU),
        ("selu", nn.SELU),
        ("SiLU", nn.SiLU),
    ],
)
def test_activation_by_any_spelling(text: str, kind: type[nn.Module]) -> None:
    assert type(make_activation(text)) is kind


def test_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'gelu'.*relu, leaky_relu, tanh, elu, selu, silu"):
        make_activation("gelu")


# Shapes and names


def test_builtin_names_agree() -> None:
    assert tuple(BUILTIN) == BUILTIN_NAMES


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("lenet5", 1, (28, 28)),
        ("lenet5", 3, (32, 32)),
        ("lenet5", 2, (17, 40)),
        ("vgg16", 3, (32, 32)),
        ("vgg16", 1, (33, 65)),
        ("resnet32", 3, (32, 32)),
        ("resnet32", 4, (27, 21)),
        ("resnet50", 3, (64, 64)),
        ("resnet50", 1, (33, 47)),
    ],
)
def test_forward_shapes(name: str, channels: int, size: tuple[int, int], activation: str) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=7, in_channels=channels, image_size=size, activation=activation)
    assert (model.num_classes, model.in_channels, model.image_size) == (7, channels, size)
    assert any(type(module) is ACTIVATIONS[activation] for module in model.modules())
    others = tuple(kind for name_, kind in ACTIVATIONS.items() if name_ != activation)
    assert not any(type(module) in others for module in model.modules())
    assert model(torch.empty(2, channels, *size, device="meta")).shape == (2, 7)
    assert shapes_of(model)[f"{HEAD_NAMES[name]}.bias"] == (7,)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *(("lenet5", name) for name in ACTIVATIONS),
        ("vgg16", "elu"),
        ("resnet32", "relu"),
        ("resnet32", "leaky_relu"),
        ("resnet50", "tanh"),
    ],
)
def test_forward_depends_on_every_image_and_is_finite(name: str, activation: str) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=5, in_channels=2, image_size=(33, 41), activation=activation).eval()
    with torch.inference_mode():
        images = torch.randn(2, 2, 33, 41)
        logits = model(images)
        alone = model(images[1:])
    assert torch.isfinite(logits).all()
    assert not torch.allclose(logits[0], logits[1])
    torch.testing.assert_close(alone[0], logits[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kwargs", "count"),
    [
        ("lenet5", {}, 61_706),
        ("lenet5", {"image_size": 32}, 61_706),
        ("vgg16", {}, 14_728_266),
        ("resnet32", {}, 464_154),
        ("resnet50", {}, 25_557_032),
    ],
)
def test_parameter_counts_as_published(name: str, kwargs: dict[str, object], count: int) -> None:
    with torch.device("meta"):
        assert parameter_count(build(name, **kwargs)) == count


def batch_norm_shapes(name: str, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (channels,)
    yield f"{name}.num_batches_tracked", ()


def test_lenet5_tensors() -> None:
    assert meta_shapes("lenet5") == {
        "conv1.weight": (6, 1, 5, 5),
        "conv1.bias": (6,),
        "conv2.weight": (16, 6, 5, 5),
        "conv2.bias": (16,),
        "fc1.weight": (120, 400),
        "fc1.bias": (120,),
        "fc2.weight": (84, 120),
        "fc2.bias": (84,),
        "fc3.weight": (10, 84),
        "fc3.bias": (10,),
    }


def test_vgg16_tensors_are_kuangliu_s() -> None:
    expected: dict[str, tuple[int, ...]] = {"classifier.weight": (10, 512), "classifier.bias": (10,)}
    # Indices of the convolutions in kuangliu/pytorch-cifar's VGG16, each followed by its batch norm.
    indices = [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]
    widths = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    for index, before, width in zip(indices, [3, *widths], widths, strict=False):
        expected[f"features.{index}.weight"] = (width, before, 3, 3)
        expected[f"features.{index}.bias"] = (width,)
        expected |= dict(batch_norm_shapes(f"features.{index + 1}", width))
    assert meta_shapes("vgg16") == expected


def test_resnet32_tensors_are_akamaster_s() -> None:
    expected: dict[str, tuple[int, ...]] = {"conv1.weight": (16, 3, 3, 3)}
    expected |= dict(batch_norm_shapes("bn1", 16))
    before = 16
    for layer, width in ((1, 16), (2, 32), (3, 64)):
        for block in range(5):
            for number in (1, 2):
                expected[f"layer{layer}.{block}.conv{number}.weight"] = (width, before, 3, 3)
                expected |= dict(batch_norm_shapes(f"layer{layer}.{block}.bn{number}", width))
                before = width
    expected |= {"linear.weight": (10, 64), "linear.bias": (10,)}
    assert meta_shapes("resnet32") == expected


def test_resnet50_tensors_are_torchvision_s() -> None:
    expected: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}
    expected |= dict(batch_norm_shapes("bn1", 64))
    before = 64
    for layer, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            prefix = f"layer{layer}.{block}"
            if block == 0:
                expected[f"{prefix}.downsample.0.weight"] = (4 * width, before, 1, 1)
                expected |= dict(batch_norm_shapes(f"{prefix}.downsample.1", 4 * width))
            for number, shape in (
                (1, (width, before, 1, 1)),
                (2, (width, width, 3, 3)),
                (3, (4 * width, width, 1, 1)),
            ):
                expected[f"{prefix}.conv{number}.weight"] = shape
                expected |= dict(batch_norm_shapes(f"{prefix}.bn{number}", shape[0]))
            before = 4 * width
    expected |= {"fc.weight": (1000, 2048), "fc.bias": (1000,)}
    assert meta_shapes("resnet50") == expected
    assert len(expected) == 320


def test_resnet50_computes_what_torchvision_s_does() -> None:
    models = pytest.importorskip("torchvision.models")
    theirs = models.resnet50(num_classes=5)
    ours = ResNet50(num_classes=5)
    load_weights(ours, theirs.state_dict(), where="torchvision")
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))


def test_resnet32_shortcut_subsamples_and_pads_with_zero_channels() -> None:
    block = ResNet32().layer2[0].eval()
    nn.init.zeros_(block.bn2.weight)  # the residual is zero: the block returns relu(shortcut)
    maps = torch.rand(2, 16, 9, 7)
    out = block(maps)
    assert torch.equal(out[:, 8:24], maps[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()


def test_resnet50_small_stem_keeps_resolution() -> None:
    model = ResNet50(num_classes=3, image_size=32, stem="small").eval()
    sizes: list[tuple[int, ...]] = []
    model.layer1.register_forward_hook(lambda module, args, output: sizes.append(tuple(args[0].shape)))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert sizes == [(1, 64, 32, 32)]


def test_lenet_padding_rule() -> None:
    assert LeNet5(image_size=28).conv1.padding == (2, 2)
    assert LeNet5(image_size=31).conv1.padding == (2, 2)
    assert LeNet5(image_size=32).conv1.padding == (0, 0)
    assert LeNet5(image_size=28, padding=0).fc1.in_features == 256


def test_residual_networks_start_with_he_initialisation() -> None:
    torch.manual_seed(0)
    weight = ResNet32().layer3[1].conv1.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)  # fan in
    weight = ResNet50().layer2[1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.05)  # fan out


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("lenet5", {"image_size": 15, "padding": 0}, "at least 16 pixels"),
        ("lenet5", {"padding": -1}, "padding must be a whole number of at least 0"),
        ("lenet5", {"in_channels": 0}, "in_channels must be"),
        ("vgg16", {"image_size": 31}, "image_size must be .* at least 32"),
        ("vgg16", {"image_size": (32, 32, 3)}, "HEIGHTxWIDTH"),
        ("vgg16", {"batch_norm": 1}, "batch_norm must be true or false"),
        ("resnet32", {"num_classes": 1.5}, "num_classes must be a whole number"),
        ("resnet32", {"num_classes": True}, "num_classes must be a whole number"),
        ("resnet50", {"stem": "big"}, "imagenet, small"),
    ],
)
def test_bad_values_are_usage_errors(name: str, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(name, **kwargs)


# Matching


CASES = st.one_of(
    st.tuples(st.just("lenet5"), st.fixed_dictionaries({"padding": st.sampled_from([0, 2])})),
    st.tuples(st.just("vgg16"), st.fixed_dictionaries({"batch_norm": st.booleans()})),
    st.tuples(st.just("resnet32"), st.just({})),
    st.tuples(st.just("resnet50"), st.fixed_dictionaries({"stem": st.sampled_from(["imagenet", "small"])})),
)


@settings(max_examples=20, deadline=None)
@given(
    case=CASES,
    classes=st.integers(1, 300),
    channels=st.integers(1, 5),
    height=st.integers(32, 70),
    width=st.integers(32, 70),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
def test_match_round_trip(
    case: tuple[str, dict[str, object]],
    classes: int,
    channels: int,
    height: int,
    width: int,
    activation: str,
) -> None:
    name, extra = case
    side = height if height == width else (height, width)
    kwargs = {"num_classes": classes, "in_channels": channels, "image_size": side, "activation": activation}
    kwargs |= extra
    shapes = meta_shapes(name, **kwargs)
    assert match_builtin(shapes, image_size=(height, width), activation=activation) == ModelSpec(name, kwargs)
    # Without the hint the size may be another, but the tensors are the same (non-square LeNets excepted).
    blind = match_builtin(shapes, activation=activation)
    if blind is not None:
        assert meta_shapes(blind.name, **blind.kwargs) == shapes
    else:
        assert name == "lenet5" and height != width


@pytest.mark.parametrize("side", [12, 15, 20, 24, 27, 28, 31, 32, 35, 36, 48, 64, 96, 224])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_square_lenet_is_matched_without_a_hint(side: int, channels: int) -> None:
    shapes = meta_shapes("lenet5", image_size=side, in_channels=channels)
    spec = match_builtin(shapes)
    assert spec is not None
    assert meta_shapes("lenet5", **spec.kwargs) == shapes


@pytest.mark.parametrize(
    ("built", "hint", "expected"),
    [
        # 400 features: 28 px padded or 32 px plain.
        ({"in_channels": 1, "image_size": 28}, None, (28, 2)),
        ({"in_channels": 1, "image_size": 32}, None, (28, 2)),
        ({"in_channels": 3, "image_size": 28}, None, (32, 0)),
        ({"in_channels": 3, "image_size": 32}, None, (32, 0)),
        ({"in_channels": 1, "image_size": 28}, (32, 32), (32, 0)),
        ({"in_channels": 3, "image_size": 32}, (28, 28), (28, 2)),
        ({"in_channels": 1, "image_size": 28}, (64, 64), (28, 2)),  # a hint that can't be
        # Other feature counts: a usual size where there is one.
        ({"in_channels": 1, "image_size": 28, "padding": 0}, None, (28, 0)),
        ({"in_channels": 3, "image_size": 32, "padding": 2}, None, (32, 2)),
        ({"in_channels": 3, "image_size": 64}, None, (64, 0)),
        ({"in_channels": 3, "image_size": 20}, None, (20, 2)),
    ],
)
def test_lenet_ambiguity(
    built: dict[str, object], hint: tuple[int, int] | None, expected: tuple[int, int]
) -> None:
    spec = match_builtin(meta_shapes("lenet5", **built), image_size=hint)
    assert spec is not None
    assert (spec.kwargs["image_size"], spec.kwargs["padding"]) == expected


def test_match_is_explicit_and_builds() -> None:
    spec = match_builtin(meta_shapes("vgg16", num_classes=5, batch_norm=False), activation="elu")
    assert str(spec) == ("vgg16:activation=elu,batch_norm=false,image_size=32,in_channels=3,num_classes=5")


@pytest.mark.parametrize("shape", [None, (), (1,)])
def test_match_ignores_batch_norm_counters(shape: tuple[int, ...] | None) -> None:
    shapes = {
        name: shape if name.endswith("num_batches_tracked") else own
        for name, own in meta_shapes("resnet32").items()
        if shape is not None or not name.endswith("num_batches_tracked")
    }
    spec = match_builtin({name: own for name, own in shapes.items() if own is not None})
    assert spec is not None and spec.name == "resnet32"


def test_match_refuses_other_networks() -> None:
    assert match_builtin({}) is None
    assert match_builtin({"fc.weight": (10, 3), "fc.bias": (10,)}) is None
    shapes = meta_shapes("resnet32")
    assert match_builtin(shapes | {"extra.weight": (3,)}) is None
    assert match_builtin(shapes | {"layer1.0.conv1.weight": (16, 16, 5, 5)}) is None
    assert match_builtin({name: s for name, s in shapes.items() if name != "linear.bias"}) is None
    assert match_builtin(shapes | {"linear.weight": (0, 64), "linear.bias": (0,)}) is None
    lenet = meta_shapes("lenet5")
    assert match_builtin(lenet | {"fc1.weight": (120, 401)}) is None
    assert match_builtin(lenet | {"fc1.weight": (120,)}) is None


def test_match_with_unknown_activation_is_an_error() -> None:
    with pytest.raises(UsageError, match="gelu"):
        match_builtin(meta_shapes("lenet5"), activation="gelu")


# Loading


def test_load_weights_copies_and_casts() -> None:
    source = {name: t.to(torch.float16) for name, t in LeNet5().state_dict().items()}
    model = LeNet5()
    load_weights(model, source, where="global.pt")
    before = model.fc3.bias.clone()
    assert before.dtype == torch.float32
    assert torch.equal(before, source["fc3.bias"].float())
    same_dtype = dict(LeNet5().state_dict())
    load_weights(model, same_dtype, where="global.pt")
    before = model.fc3.bias.clone()
    same_dtype["fc3.bias"].add_(1)
    assert torch.equal(model.fc3.bias, before)
    assert model.fc3.bias.requires_grad


def resnet32_tensors() -> dict[str, Tensor]:
    model = ResNet32(num_classes=4)
    model(torch.randn(2, 3, 8, 8))
    return dict(model.state_dict())


def test_load_weights_takes_old_batch_norm_counters() -> None:
    tensors = resnet32_tensors()
    one = {n: t.reshape(1) if n.endswith("num_batches_tracked") else t for n, t in tensors.items()}
    model = ResNet32(num_classes=4)
    load_weights(model, one, where="k.npz")
    assert model.bn1.num_batches_tracked.shape == () and int(model.bn1.num_batches_tracked) == 1
    assert torch.equal(model.bn1.running_mean, tensors["bn1.running_mean"])
    none = {n: t for n, t in tensors.items() if not n.endswith("num_batches_tracked")}
    load_weights(ResNet32(num_classes=4), none, where="k.npz")


def test_load_weights_takes_one_name_of_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

    model, source = Tied(), dict(Tied().state_dict())
    del source["second.weight"]
    load_weights(model, source, where="k.safetensors")
    assert torch.equal(model.second.weight, source["first.weight"])


def test_load_weights_reports_everything_at_once_and_changes_nothing() -> None:
    tensors = resnet32_tensors()
    model = ResNet32(num_classes=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.startswith("layer1.0")]:
        tensors[f"block.{name}"] = tensors.pop(name)
    with pytest.raises(MismatchError) as caught:
        load_weights(model, tensors, where="k.pt")
    message = str(caught.value)
    assert message.startswith("The tensors of k.pt don't fit the model: ")
    assert re.search(r"10 missing \(layer1\.0\.bn1\.bias, layer1\.0\.bn1\.running_mean, .*, …\)", message)
    assert "12 unexpected (block.layer1.0.bn1.bias, block.layer1.0.bn1.num_batches_tracked, " in message
    assert "2 of another shape (linear.bias (4,) in the file, (3,) in the model; linear.weight" in message
    assert message.count("block.layer1") == 5
    assert "--arch" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
