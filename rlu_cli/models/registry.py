"""From a spec to a model: the built-in architectures, torchvision, timm, and the user's own code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType

from torch import nn

from rlu_cli.errors import FileError, NotInstalledError, UsageError
from rlu_cli.models.lenet import LeNet5
from rlu_cli.models.resnet import ResNet32, ResNet50
from rlu_cli.models.spec import ModelSpec
from rlu_cli.models.user_code import build_user_model, check_keywords
from rlu_cli.models.vgg import VGG16

BUILTIN: Mapping[str, type[nn.Module]] = MappingProxyType(
    {"lenet5": LeNet5, "vgg16": VGG16, "resnet32": ResNet32, "resnet50": ResNet50}
)
"""The architectures of the RLU paper, by the name that ``--arch`` takes."""

# These make the library read or download a weights file. The spec may come from a file's metadata, which
# must not choose what else is read; and the weights come from the checkpoint anyway.
_WEIGHT_KEYWORDS = frozenset(
    {"weights", "weights_backbone", "progress", "pretrained", "pretrained_backbone", "checkpoint_path"}
    | {"pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
)


def build_model(spec: ModelSpec, *, allow_user_code: bool) -> nn.Module:
    """A new model with random weights.

    ``allow_user_code`` must be True only when the spec was typed by the user (``--arch``): a spec that a file
    carries is refused when it names code to import.
    """
    if spec.kind in ("module", "file"):
        if not allow_user_code:
            raise FileError(
                f"The file's metadata asks for the model {str(spec)!r}, and building that would run code "
                "which the file chose; rlu never does. Check the code, then give it yourself: "
                f"--arch {str(spec)!r}."
            )
        return build_user_model(spec)
    if spec.kind == "torchvision":
        return _build_torchvision(spec)
    if spec.kind == "timm":
        return _build_timm(spec)
    if spec.target not in BUILTIN:
        raise UsageError(
            f"Unknown architecture {spec.target!r}: built in are {', '.join(BUILTIN)}; others are given as "
            "torchvision:NAME, timm:NAME, package.module:factory or path/to/file.py:factory."
        )
    factory = BUILTIN[spec.target]
    check_keywords(spec.name, factory, spec.kwargs)
    return _call(spec, lambda: factory(**spec.kwargs))


def _build_torchvision(spec: ModelSpec) -> nn.Module:
    models = _library("torchvision", "torchvision.models")
    _refuse_weights(spec)
    if spec.target not in models.list_models(module=models):
        raise UsageError(
            f"torchvision has no image classifier {spec.target!r}: its names are like resnet18 or vgg16_bn."
        )
    return _call(spec, lambda: models.get_model(spec.target, weights=None, **spec.kwargs))


def _build_timm(spec: ModelSpec) -> nn.Module:
    timm = _library("timm", "timm")
    _refuse_weights(spec)
    if not timm.is_model(spec.target):
        raise UsageError(f"timm has no model {spec.target!r}: `timm.list_models()` names them.")
    return _call(spec, lambda: timm.create_model(spec.target, pretrained=False, **spec.kwargs))


def _library(package: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise NotInstalledError(
            f"{package} isn't installed, so its models can't be built: pip install 'rlu-cli[{package}]'."
        ) from None


def _refuse_weights(spec: ModelSpec) -> None:
    if refused := sorted(_WEIGHT_KEYWORDS & spec.kwargs.keys()):
        raise UsageError(
            f"{spec.name} can't take {', '.join(refused)}: the weights come from the checkpoint, "
            "and no other file is read or downloaded."
        )


def _call(spec: ModelSpec, build: Callable[[], nn.Module]) -> nn.Module:
    """Build, with a wrong argument's exception turned into the user's error."""
    try:
        return build()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, AssertionError) as error:
        raise UsageError(f"Can't build {str(spec)!r}: {type(error).__name__}: {error}") from error
