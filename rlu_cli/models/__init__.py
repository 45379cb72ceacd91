"""Architectures: from a text (``--arch``) or from tensor shapes to a model with a checkpoint's weights."""

from rlu_cli.models.activations import ACTIVATIONS, make_activation
from rlu_cli.models.cost import activation_bytes, multiply_adds
from rlu_cli.models.head import Head, HeadTap, find_head, flatten_logits
from rlu_cli.models.lenet import LeNet5
from rlu_cli.models.matching import match_builtin
from rlu_cli.models.registry import BUILTIN, build_model
from rlu_cli.models.resnet import ResNet32, ResNet50
from rlu_cli.models.spec import ModelSpec, parse_spec
from rlu_cli.models.vgg import VGG16
from rlu_cli.models.weights import check_weights, load_weights

__all__ = [
    "ACTIVATIONS",
    "BUILTIN",
    "VGG16",
    "Head",
    "HeadTap",
    "LeNet5",
    "ModelSpec",
    "ResNet32",
    "ResNet50",
    "activation_bytes",
    "build_model",
    "check_weights",
    "find_head",
    "flatten_logits",
    "load_weights",
    "make_activation",
    "match_builtin",
    "multiply_adds",
    "parse_spec",
]
