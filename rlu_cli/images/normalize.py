"""Input normalisation: ``(pixel / 255 − mean) / std`` per channel, as the client trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlu_cli.errors import MismatchError, UsageError

if TYPE_CHECKING:
    import torch

CUSTOM = "custom"
"""Name of a normalisation that was given as numbers."""

FORM = "mean=0.5,0.5,0.5;std=0.2,0.2,0.2"

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Normalization:
    """Per-channel mean and std for pixels scaled to 0..1; a single value serves any channel count."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        """The text that :func:`parse_normalization` reads back to an equal value."""
        if PRESETS.get(self.name) == self:
            return self.name
        return f"mean={_join(self.mean)};std={_join(self.std)}"

    def check_channels(self, channels: int) -> None:
        """Raise MismatchError unless the values fit images of `channels` channels."""
        for label, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise MismatchError(
                    f"normalisation {str(self)!r} has {len(values)} {label} values, but the model takes "
                    f"{channels} channel{'' if channels == 1 else 's'}: pass --normalize with one value "
                    f"or {channels} ({FORM!r} is the form for 3)"
                )

    def apply(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise uint8 pixels (B, C, H, W) to float32 of the same shape, on the same device.

        Same operations in the same order as torchvision's ToTensor and Normalize.
        """
        import torch

        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise TypeError(f"expected uint8 pixels (B, C, H, W), got {pixels.dtype} {tuple(pixels.shape)}")
        self.check_channels(pixels.shape[1])
        mean = torch.tensor(self.mean, dtype=torch.float32, device=pixels.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float32, device=pixels.device).view(1, -1, 1, 1)
        return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


# Rival constants are in use for the same data; these are the ones a preset name stands for. Others must
# be given as numbers:
#   cifar10        std 0.2023, 0.1994, 0.2010 (mean of the per-image stds) is widely copied
#   cifar100       mean 0.5071, 0.4865, 0.4409; std 0.2673, 0.2564, 0.2762 (FedML, some of Flower)
#   svhn           109.9, 109.7, 113.8 and 50.1, 50.6, 50.8, each over 255 (train and extra images)
#   tiny-imagenet  std 0.2302, 0.2265, 0.2262 (mean of the per-image stds)
PRESETS: dict[str, Normalization] = {
    preset.name: preset
    for preset in (
        Normalization("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        Normalization("cifar10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        Normalization("cifar100", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        Normalization("svhn", (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        Normalization("tiny-imagenet", (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
        Normalization("half", (0.5,), (0.5,)),
        Normalization("none", (0.0,), (1.0,)),
    )
}


def parse_normalization(spec: str) -> Normalization:
    """Read a preset name or ``mean=…;std=…``; raise UsageError for anything else."""
    text = spec.strip()
    preset = PRESETS.get(text.lower())
    if preset is not None:
        return preset
    fields: dict[str, tuple[float, ...]] = {}
    for part in text.split(";"):
        key, equals, values = part.partition("=")
        key = key.strip().lower()
        if not equals or key not in ("mean", "std") or key in fields:
            raise _bad(spec, "it is neither a known name nor one mean and one std")
        fields[key] = _numbers(spec, key, values)
    if len(fields) != 2:
        raise _bad(spec, "it needs both mean and std")
    mean, std = fields["mean"], fields["std"]
    if 1 not in (len(mean), len(std)) and len(mean) != len(std):
        raise _bad(spec, f"it has {len(mean)} mean values but {len(std)} std values")
    if min(std) <= 0:
        raise _bad(spec, "every std must be above 0")
    if (1 + max(abs(value) for value in mean)) / min(std) > FLOAT32_MAX or max(std) > FLOAT32_MAX:
        raise _bad(spec, "its values overflow single precision")
    return Normalization(CUSTOM, mean, std)


def _numbers(spec: str, key: str, text: str) -> tuple[float, ...]:
    """The finite numbers of a comma-separated list."""
    try:
        values = tuple(float(value) for value in text.split(","))
    except ValueError:
        raise _bad(spec, f"{key} is not a comma-separated list of numbers") from None
    if not all(math.isfinite(value) for value in values):
        raise _bad(spec, f"every {key} must be finite")
    return values


def _join(values: tuple[float, ...]) -> str:
    return ",".join(repr(value) for value in values)


def _bad(spec: str, why: str) -> UsageError:
    return UsageError(
        f"can't use the normalisation {spec!r}: {why}; expected {', '.join(PRESETS)}, or numbers for pixels "
        f"scaled to 0..1 in the form {FORM!r}"
    )
