"""Normalisation: presets and number forms, hand arithmetic, and what doesn't fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.images import PRESETS, Normalization, parse_normalization

PRESET_NAMES = ["imagenet", "cifar10", "cifar100", "svhn", "tiny-imagenet", "half", "none"]


def pixels(*values: int, channels: int = 3) -> torch.Tensor:
    """One uint8 image (1, C, 1, W) with the same values in every channel."""
    return torch.tensor(values, dtype=torch.uint8).expand(1, channels, 1, len(values))


def test_preset_names_and_round_trip() -> None:
    assert list(PRESETS) == PRESET_NAMES
    for name in PRESET_NAMES:
        assert str(parse_normalization(name)) == name
        assert parse_normalization(f" {name.upper()} ") == PRESETS[name]


def test_hand_arithmetic() -> None:
    found = parse_normalization("mean=0.5,0.25,0;std=0.5,0.25,1").apply(pixels(0, 51, 255))
    assert found.dtype == torch.float32
    expected = torch.tensor([[-1, -0.6, 1], [-1, -0.2, 3], [0, 0.2, 1]])[None, :, None, :]
    torch.testing.assert_close(found, expected)


def test_imagenet_by_hand() -> None:
    found = parse_normalization("imagenet").apply(pixels(128))[0, :, 0, 0]
    expected = [(128 / 255 - m) / s for m, s in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_cifar10_is_the_true_pixel_std() -> None:
    assert parse_normalization("cifar10").std == (0.2470, 0.2435, 0.2616)


def test_none_only_scales() -> None:
    values = pixels(*range(256))
    assert torch.equal(parse_normalization("none").apply(values), values.float() / 255)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_single_values_serve_any_channel_count(channels: int) -> None:
    for spec in ("half", "mean=0.5;std=0.5"):
        found = parse_normalization(spec).apply(pixels(0, 255, channels=channels))
        assert torch.equal(found, torch.tensor([-1.0, 1.0]).expand(1, channels, 1, 2))


def test_one_std_for_three_means() -> None:
    found = parse_normalization("std=0.5;mean=0,0.5,1").apply(pixels(255))[0, :, 0, 0]
    assert found.tolist() == [2, 1, 0]


def test_input_is_left_alone() -> None:
    values = pixels(1, 2, 3).clone()
    parse_normalization("svhn").apply(values)
    assert torch.equal(values, pixels(1, 2, 3))


def test_values_that_do_not_fit_the_channels() -> None:
    with pytest.raises(MismatchError, match="'imagenet' has 3 mean values, but the model takes 1 channel:"):
        parse_normalization("imagenet").apply(pixels(0, channels=1))
    with pytest.raises(MismatchError, match="2 std values, but the model takes 3 channels"):
        parse_normalization("mean=0;std=1,1").check_channels(3)


def test_only_uint8_batches() -> None:
    with pytest.raises(TypeError, match="uint8"):
        PRESETS["none"].apply(torch.zeros(1, 3, 2, 2))
    with pytest.raises(TypeError, match="uint8"):
        PRESETS["none"].apply(torch.zeros(3, 2, 2, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("cifar", "neither a known name"),
        ("", "neither a known name"),
        ("mean=0.5", "both mean and std"),
        ("mean=0.5;mean=0.5", "neither a known name"),
        ("mean=0.5;std=0.5;", "neither a known name"),
        ("mean=a;std=1", "mean is not a comma-separated list"),
        ("mean=0,;std=1", "mean is not a comma-separated list"),
        ("mean=0;std=", "std is not a comma-separated list"),
        ("mean=0,0;std=1,1,1", "2 mean values but 3 std values"),
        ("mean=0;std=0", "std must be above 0"),
        ("mean=0;std=1,-1", "std must be above 0"),
        ("mean=nan;std=1", "every mean must be finite"),
        ("mean=0;std=inf", "every std must be finite"),
        ("mean=0;std=1e-60", "overflow single precision"),
        ("mean=1e300;std=1", "overflow single precision"),
    ],
)
def test_bad_specs_say_why_and_what_is_known(spec: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        parse_normalization(spec)
    assert ", ".join(PRESET_NAMES) in str(caught.value)
    assert "mean=0.5,0.5,0.5;std=0.2,0.2,0.2" in str(caught.value)


MEANS = st.floats(-1e3, 1e3)
STDS = st.floats(1e-6, 1e3)


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(*[st.lists(v, min_size=n, max_size=n) for v in (MEANS, STDS)])
    )
)
def test_numbers_round_trip(values: tuple[list[float], list[float]]) -> None:
    mean, std = map(tuple, values)
    original = Normalization("custom", mean, std)
    assert parse_normalization(str(original)) == original


@given(st.text())
def test_any_text_parses_or_is_a_usage_error(text: str) -> None:
    try:
        found = parse_normalization(text)
    except UsageError:
        return
    assert parse_normalization(str(found)) == found


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees() -> None:
    values = pixels(*range(256))
    found = PRESETS["cifar10"].apply(values.cuda())
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), PRESETS["cifar10"].apply(values))
