"""One client's local training, by torch's own optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from rlu_cli.core.schemes import step_rates
from rlu_cli.core.types import IntArray, LocalTraining
from rlu_cli.errors import MismatchError
from rlu_cli.models import flatten_logits

Batch = tuple[Tensor, Tensor]


def local_training(
    model: nn.Module,
    batches: Iterable[Batch],
    training: LocalTraining,
    *,
    constant: Mapping[str, Tensor] | None = None,
) -> None:
    """Train ``model`` in place, one optimiser step a batch, with mean cross-entropy.

        θ ← optimiser step along  ∇L_ce(batch) + λ (θ − θ_global) + k

    λ = ``training.prox`` is the proximal pull of FedProx, FedDyn and FedDC; ``constant`` is k by
    parameter name: Scaffold's c − c_k, FedDyn's −∇L_k, FedDC's λ d_k + (Δ_k − Δ)/(η m). Everything else
    is torch.optim.SGD, Adam or AdamW, by its functional form: the class would load torch's compiler, which
    takes a second.

    Parameters
    ----------
    batches : images (B, C, H, W) float32 and labels (B,) int64; one is used a step
    """
    model.train()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names, parameters = zip(*trained, strict=True)
    rates = step_rates(training)
    momenta: list[Tensor | None] = [None] * len(parameters)
    moments = _AdamMoments(parameters) if training.optimizer != "sgd" else None
    anchors = [p.detach().clone() for p in parameters] if training.prox else None
    constants = [constant[name] for name in names] if constant else None
    loss_function = nn.CrossEntropyLoss()
    for rate, (images, labels) in zip(rates, batches, strict=True):
        loss = loss_function(flatten_logits(model(images)), labels)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            grads = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
            if anchors is not None:
                torch._foreach_add_(grads, torch._foreach_sub(parameters, anchors), alpha=training.prox)
            if constants is not None:
                torch._foreach_add_(grads, constants)
            if moments is not None:
                moments.step(grads, float(rate), training)
                continue
            sgd(
                list(parameters),
                grads,
                momenta,
                lr=float(rate),
                momentum=training.momentum,
                dampening=training.dampening,
                nesterov=training.nesterov,
                weight_decay=training.weight_decay,
                maximize=False,
            )


@contextmanager
def single_images_refused(batches: Sequence[IntArray], *, whose: str, advice: str) -> Iterator[None]:
    """While training on these rows: what BatchNorm says of a single image, as an error to act on.

    Raises
    ------
    MismatchError
    """
    try:
        yield
    except ValueError as error:
        if min(map(len, batches)) > 1:
            raise
        raise MismatchError(
            f"expected batches that the model can train on, found one of a single image ({whose}: {error}): "
            f"{advice}"
        ) from error


class _AdamMoments:
    """What Adam remembers of the gradients of these parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._means = [torch.zeros_like(p) for p in parameters]
        self._squares = [torch.zeros_like(p) for p in parameters]
        self._steps = [torch.tensor(0.0) for _ in parameters]

    def step(self, gradients: list[Tensor], rate: float, training: LocalTraining) -> None:
        """One step; adamw shrinks the parameters by themselves, adam through their gradients."""
        decoupled = training.optimizer == "adamw"
        if decoupled and training.weight_decay:
            torch._foreach_mul_(self._parameters, 1 - rate * training.weight_decay)
        adam(
            self._parameters,
            gradients,
            self._means,
            self._squares,
            [],
            self._steps,
            amsgrad=False,
            beta1=training.beta1,
            beta2=training.beta2,
            lr=rate,
            weight_decay=0.0 if decoupled else training.weight_decay,
            eps=training.eps,
            maximize=False,
        )


def step_indices(
    indices: IntArray, steps: int, batch_size: int, *, rng: np.random.Generator
) -> Iterator[IntArray]:
    """Which samples each step sees: reshuffled passes over the client's data, in full batches.

    A pass that ends in the middle of a batch goes on with the next one, so each step sees exactly
    ``batch_size`` samples, repeated if the client has fewer.
    """
    if len(indices) == 0:
        raise ValueError("expected a client with at least one sample")
    pool = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        while len(pool) < batch_size:
            pool = np.concatenate((pool, rng.permutation(indices)))
        yield pool[:batch_size]
        pool = pool[batch_size:]


def epoch_indices(
    indices: IntArray, epochs: int, batch_size: int, *, rng: np.random.Generator
) -> Iterator[IntArray]:
    """Which samples each step sees: reshuffled passes, each with a smaller last batch if need be."""
    for _ in range(epochs):
        order = rng.permutation(indices)
        yield from np.split(order, range(batch_size, len(order), batch_size))
