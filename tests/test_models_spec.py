"""The text that names an architecture, and the registry that builds from it."""

from __future__ import annotations

import string
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlu_cli.errors import FileError, UsageError
from rlu_cli.models import VGG16, ModelSpec, build_model, parse_spec


@pytest.mark.parametrize(
    ("text", "kind", "target", "factory", "kwargs"),
    [
        ("lenet5", "builtin", "lenet5", None, {}),
        (" LeNet5 ", "builtin", "lenet5", None, {}),
        (
            "vgg16:activation=elu,num_classes=100",
            "builtin",
            "vgg16",
            None,
            {"activation": "elu", "num_classes": 100},
        ),
        ("lenet5:image_size=28x30", "builtin", "lenet5", None, {"image_size": (28, 30)}),
        ("lenet5:image_size=28", "builtin", "lenet5", None, {"image_size": 28}),
        (
            "vgg16:batch_norm=False, num_classes = 3",
            "builtin",
            "vgg16",
            None,
            {"batch_norm": False, "num_classes": 3},
        ),
        ("torchvision:resnet18", "torchvision", "resnet18", None, {}),
        ("torchvision:resnet18:num_classes=7", "torchvision", "resnet18", None, {"num_classes": 7}),
        ("timm:resnet18.a1_in1k:drop_rate=1e-1", "timm", "resnet18.a1_in1k", None, {"drop_rate": 0.1}),
        ("fl.models:make", "module", "fl.models", "make", {}),
        ("models:Nets.small:width=3", "module", "models", "Nets.small", {"width": 3}),
        ("torchvision.models:resnet18", "module", "torchvision.models", "resnet18", {}),
        ("net.py:make", "file", "net.py", "make", {}),
        ("../my dir/a:b/net.py:make:x=y:z", "file", "../my dir/a:b/net.py", "make", {"x": "y:z"}),
        ("a.py:f:next=b.py:g", "file", "a.py", "f", {"next": "b.py:g"}),
    ],
)
def test_parse(text: str, kind: str, target: str, factory: str | None, kwargs: dict[str, object]) -> None:
    spec = parse_spec(text)
    assert (spec.kind, spec.target, spec.factory, spec.kwargs) == (kind, target, factory, kwargs)
    assert parse_spec(str(spec)) == spec
    assert hash(parse_spec(str(spec))) == hash(spec)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("FALSE", False),
        ("nan", "nan"),
        ("1e999", "1e999"),
        ("1_000", "1_000"),
        ("28x28", "28x28"),  # a size only where a size is meant
        ("imagenet", "imagenet"),
    ],
)
def test_values(text: str, value: object) -> None:
    found = parse_spec(f"lenet5:key={text}").kwargs["key"]
    assert found == value and type(found) is type(value)


def test_canonical_text_sorts_keys() -> None:
    spec = parse_spec("vgg16:num_classes=100,batch_norm=TRUE,activation=elu,image_size=32x40")
    assert str(spec) == "vgg16:activation=elu,batch_norm=true,image_size=32x40,num_classes=100"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a built-in name"),
        ("package.module", "package.module:factory"),
        ("models/net.py", r"models/net.py:factory"),
        ("models/net:make", "expected a built-in name"),
        ("torchvision", "torchvision:resnet18"),
        ("timm:", "timm:resnet18"),
        ("vgg16:", "expected key=value pairs"),
        ("vgg16:elu", "vgg16:activation=elu,num_classes=100"),
        ("vgg16:activation=", "key=value"),
        ("vgg16:=elu", "key=value"),
        ("vgg16:a=1,,b=2", "key=value"),
        ("vgg16:not-a-name=1", "key=value"),
        ("vgg16:a=1,a=2", "a is given twice"),
        ("timm:hf-hub:somebody/model", "key=value"),
    ],
)
def test_malformed(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_spec(text)


NAMES = st.sampled_from(
    ["lenet5", "no_such", "torchvision:resnet18", "timm:a/b.c-d", "a.b:C.d", "../x y/net.py:make", "/n.py:f"]
)
KEYS = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)
VALUES = st.one_of(
    st.integers(-(10**17), 10**17),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(string.ascii_letters + string.digits + "=:./_-+ é", min_size=1).filter(str.strip),
)


@given(name=NAMES, kwargs=st.dictionaries(KEYS, VALUES, max_size=4))
def test_round_trip(name: str, kwargs: dict[str, object]) -> None:
    spec = parse_spec(str(ModelSpec(name, kwargs)))
    assert spec.name == name and spec.kwargs.keys() == kwargs.keys()
    assert all(spec.kwargs[key] == value for key, value in kwargs.items() if not isinstance(value, str))
    again = parse_spec(str(spec))
    assert again == spec
    assert [type(value) for value in again.kwargs.values()] == [
        type(spec.kwargs[key]) for key in again.kwargs
    ]


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_a_usage_error(text: str) -> None:
    try:
        spec = parse_spec(text)
    except UsageError:
        return
    assert parse_spec(str(spec)) == spec


# Registry


def build(text: str, *, allow_user_code: bool = False) -> nn.Module:
    return build_model(parse_spec(text), allow_user_code=allow_user_code)


def test_build_builtin() -> None:
    model = build("vgg16:num_classes=12,activation=elu")
    assert isinstance(model, VGG16) and model.num_classes == 12


def test_unknown_builtin_lists_names() -> None:
    with pytest.raises(UsageError, match=r"'vgg19'.*lenet5, vgg16, resnet32, resnet50"):
        build("vgg19")


def test_unknown_keyword_lists_the_accepted_ones() -> None:
    with pytest.raises(
        UsageError, match=r"'depth'.*num_classes, in_channels, image_size, activation, batch_norm"
    ):
        build("vgg16:depth=3")


@pytest.mark.parametrize("text", ["os:system:command=id", "net.py:make"])
def test_code_named_by_a_file_is_refused(text: str) -> None:
    with pytest.raises(FileError, match=r"code which the file chose.*--arch"):
        build(text)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_missing_library_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.models", None)
    with pytest.raises(UsageError, match=rf"pip install 'rlu-cli\[{package}\]'"):
        build(f"{package}:resnet18")


def fake_resnet(name: str, *, num_classes: int = 1000, **weights: object) -> nn.Module:
    assert name == "resnet18"
    assert not any(weights.values()), "weights must not be asked for"
    return nn.Linear(2, num_classes)


@pytest.fixture
def fake_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    vars(models).update(list_models=lambda module: ["resnet18"], get_model=fake_resnet)
    timm = ModuleType("timm")
    vars(timm).update(is_model=lambda name: name == "resnet18", create_model=fake_resnet)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    monkeypatch.setitem(sys.modules, "timm", timm)


@pytest.mark.usefixtures("fake_libraries")
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_libraries(library: str) -> None:
    model = build(f"{library}:resnet18:num_classes=7")
    assert isinstance(model, nn.Linear) and model.out_features == 7
    with pytest.raises(UsageError, match=f"{library} has no .*'nonsense'"):
        build(f"{library}:nonsense")
    with pytest.raises(UsageError, match="TypeError"):
        build(f"{library}:resnet18:num_classes=seven")


@pytest.mark.usefixtures("fake_libraries")
@pytest.mark.parametrize(
    "text",
    [
        "torchvision:resnet18:weights=DEFAULT",
        "timm:resnet18:pretrained=true",
        "timm:resnet18:checkpoint_path=/tmp/evil.pth",
    ],
)
def test_libraries_never_read_weights_of_their_own(text: str) -> None:
    with pytest.raises(UsageError, match="no other file is read or downloaded"):
        build(text)
