"""Run a model over the auxiliary images: logits and embeddings, as training would have seen them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from rlu_cli.audit.network import Network
from rlu_cli.audit.progress import Update
from rlu_cli.core.types import Activations
from rlu_cli.errors import MismatchError
from rlu_cli.images import ImageSet, Normalization
from rlu_cli.models.head import HeadTap, flatten_logits

_LARGEST_BATCH = 256
"""Images at once where that changes nothing but speed."""

_SMALLEST_BATCH = 4
_MAP_BYTES = {"cpu": 8 * 2**20}
_MAP_BYTES_ELSEWHERE = 256 * 2**20
"""Size of a layer's output up to which a batch grows: what a processor's cache takes, and a GPU's memory. It
is the same on every machine, whatever is free there, since the batch size decides how sums are rounded."""

_TRAINING_BATCH = 64
"""Batch size under batch statistics where the client's is not known."""


def probe(
    network: Network,
    images: ImageSet,
    normalization: Normalization,
    *,
    batch_norm: str = "batch",
    dropout: str = "off",
    batch_size: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Update | None = None,
) -> Activations:
    """Logits and embeddings of all images under the network's present weights.

    A client trains with batch statistics in its BatchNorm layers, so by default they are used here too:
    the images are shuffled across classes (by ``seed``) and taken in batches of about the client's size.
    Stored statistics are neither read nor changed then. Networks without BatchNorm don't depend on any of
    this; their batches are as large as a moderate amount of memory allows.

    Parameters
    ----------
    dropout : whether dropout layers are ``on``, as the client's were, each image under one mask (by ``seed``)
    batch_size : what `batch_that_matters` says
    """
    count = len(images.labels)
    head = network.layer
    with ExitStack() as ways:
        ways.enter_context(torch.inference_mode())
        ways.enter_context(_batch_statistics(network.model, batch_norm == "batch"))
        if dropout == "on":
            ways.enter_context(_dropping(network.model, seed, device))
        if batch_size is None:
            one = normalization.apply(images.pixels[:1].to(device))
            batches: Sequence[Tensor] = torch.split(torch.arange(count), batch_for_memory(network.model, one))
        else:
            batches = _shuffled(count, batch_size, seed)
        logits = embeddings = None
        done = 0
        for rows in batches:
            with HeadTap(network.model, head) as tap:
                pixels = images.pixels[rows].to(device)
                output = _forward(network.model, normalization.apply(pixels))
                embedding = tap.embedding
                if head.shifted:  # features of the logits themselves see what softmax does not
                    output = tap.logits
            if logits is None or embeddings is None:
                dtype = np.float64 if output.dtype == torch.float64 else np.float32
                logits = np.empty((count, head.num_classes), dtype)
                embeddings = np.empty((count, head.embedding_size), dtype)
            logits[rows.numpy()] = output.to(_wide(output)).cpu().numpy()
            embeddings[rows.numpy()] = embedding.to(_wide(output)).cpu().numpy()
            done += len(rows)
            if progress is not None:
                progress(done, count)
    assert logits is not None
    return Activations(logits, embeddings, images.labels.numpy())


def _wide(tensor: Tensor) -> torch.dtype:
    """A type that NumPy has too, at least float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def batch_that_matters(model: nn.Module, batch_norm: str, batch_size: int | None) -> int | None:
    """The batch size of a pass for a client that trains with ``batch_size``, None where it changes nothing.

    It matters where BatchNorm normalises with the batch's own statistics: when asked to, and in layers that
    keep no others.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if any(batch_norm == "batch" or layer.running_mean is None for layer in layers):
        return max(2, batch_size or _TRAINING_BATCH)
    return None


def batch_for_memory(model: nn.Module, image: Tensor) -> int:
    """How many images fit, by the largest output that any layer has for the one given."""
    largest = 1

    def see(module: nn.Module, args: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.numel() * output.element_size())

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(see).remove)
        _forward(model, image)
    room = _MAP_BYTES.get(image.device.type, _MAP_BYTES_ELSEWHERE)
    return max(_SMALLEST_BATCH, min(_LARGEST_BATCH, room // largest))


def _forward(model: nn.Module, pixels: Tensor) -> Tensor:
    try:
        return flatten_logits(model(pixels))
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise
        shape = tuple(pixels.shape[1:])
        reason = str(error).splitlines()[0]
        raise MismatchError(
            f"the model can't read images of shape {shape} (channels, height, width): {reason}. "
            "Give the size that it was trained on with --image-size"
        ) from error


def _shuffled(count: int, batch_size: int, seed: int) -> Sequence[Tensor]:
    """Row indices of all images, batch by batch; a small rest joins the batches before it."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.tensor_split(max(1, round(count / min(count, batch_size))))


@contextmanager
def _batch_statistics(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Let BatchNorm use the batch's own statistics, without touching the stored ones."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)] if enabled else []
    before = [(layer, layer.training, layer.track_running_stats) for layer in layers]
    try:
        for layer in layers:
            layer.training, layer.track_running_stats = True, False
        yield
    finally:
        for layer, training, tracking in before:
            layer.training, layer.track_running_stats = training, tracking


def has_dropout(model: nn.Module) -> bool:
    """Whether dropout layers drop anything in training."""
    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())


@contextmanager
def _dropping(model: nn.Module, seed: int, device: str) -> Iterator[None]:
    """Let dropout layers drop, by this seed."""
    layers = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    before = [layer.training for layer in layers]
    cards = range(torch.cuda.device_count()) if device.startswith("cuda") else ()
    try:
        for layer in layers:
            layer.training = True
        with torch.random.fork_rng(devices=cards):
            torch.manual_seed(seed)
            yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training
