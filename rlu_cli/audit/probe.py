"""Run a model over the auxiliary images: logits and embeddings, as training would have seen them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlu_cli.audit.network import Network
from rlu_cli.audit.progress import Update
from rlu_cli.core.types import FloatArray, IntArray
from rlu_cli.errors import MismatchError
from rlu_cli.images import ImageSet, Normalization
from rlu_cli.models.head import HeadTap, flatten_logits

_EVALUATION_BATCH = 256
"""Batch size where it changes nothing but speed."""

_TRAINING_BATCH = 64
"""Batch size under batch statistics where the client's is not known."""


@dataclass(frozen=True)
class Activations:
    """What one model makes of the auxiliary images.

    logits : shape (M, N)
    embeddings : shape (M, L)
    labels : shape (M,)
    """

    logits: FloatArray
    embeddings: FloatArray
    labels: IntArray


def probe(
    network: Network,
    images: ImageSet,
    normalization: Normalization,
    *,
    batch_norm: str = "batch",
    batch_size: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Update | None = None,
) -> Activations:
    """Logits and embeddings of all images under the network's present weights.

    A client trains with batch statistics in its BatchNorm layers, so by default they are used here too:
    the images are shuffled across classes (by ``seed``) and taken in batches of about the client's size.
    Stored statistics are neither read nor changed then. Dropout is off. Networks without BatchNorm don't
    depend on any of this.
    """
    count = len(images.labels)
    batches = list(_batches(network.model, count, batch_norm, batch_size, seed))
    logits = np.empty((count, network.layer.num_classes))
    embeddings = np.empty((count, network.layer.embedding_size))
    done = 0
    with torch.inference_mode(), _batch_statistics(network.model, batch_norm == "batch"):
        for rows in batches:
            with HeadTap(network.model, network.layer) as tap:
                pixels = images.pixels[rows].to(device)
                output = _forward(network.model, normalization.apply(pixels))
                logits[rows.numpy()] = output.double().cpu().numpy()
                embeddings[rows.numpy()] = tap.embedding.double().cpu().numpy()
            done += len(rows)
            if progress is not None:
                progress(done, count)
    return Activations(logits, embeddings, images.labels.numpy())


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has layers whose output depends on the rest of the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


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


def _batches(
    model: nn.Module, count: int, batch_norm: str, batch_size: int | None, seed: int
) -> Iterator[Tensor]:
    """Row indices, batch by batch; under batch statistics a small rest joins the batch before it."""
    if batch_norm != "batch" or not has_batch_norm(model):
        yield from torch.split(torch.arange(count), _EVALUATION_BATCH)
        return
    size = min(count, max(2, batch_size or _TRAINING_BATCH))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = max(1, round(count / size))
    yield from order.tensor_split(parts)


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
