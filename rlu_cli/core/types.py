"""What the core takes and gives.

Symbols, as everywhere in this package: N classes, L embedding size, m local steps, B batch size,
η learning rate, head W (N, L) and b (N,), logits q = W e + b, s = softmax(q), and an update
Δ = local − global. Arrays are NumPy, float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.progress import Progress, ignore
from rlu_cli.errors import MismatchError

if TYPE_CHECKING:
    from rlu_cli.core.client_views import ReplayClients
    from rlu_cli.core.dense_layers import DenseTail
    from rlu_cli.core.fits import FitStore
    from rlu_cli.core.residuals import ResidualMoments, ResidualPath
    from rlu_cli.core.unit_direction import UnitDirection

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


HeadKind = TypeVar("HeadKind", bound="Head")


@dataclass(frozen=True)
class Head:
    """A model's output layer: q = W e + b.

    weight : shape (N, L)
    bias : shape (N,), or None for a head without one
    """

    weight: FloatArray
    bias: FloatArray | None

    @property
    def num_classes(self) -> int:
        return int(self.weight.shape[0])

    @property
    def embedding_size(self) -> int:
        return int(self.weight.shape[1])

    def divided(self: HeadKind, scale: float) -> HeadKind:
        """Both over a number."""
        return replace(
            self, weight=self.weight / scale, bias=None if self.bias is None else self.bias / scale
        )


class HeadUpdate(Head):
    """ΔW and Δb: local − global, subtracted in float64."""


@dataclass(frozen=True)
class Activations:
    """What one model makes of the auxiliary samples, in the precision that it computed in.

    logits : shape (M, N)
    embeddings : shape (M, L), or None where they are unknown
    labels : shape (M,)
    """

    logits: NDArray[np.floating]
    embeddings: NDArray[np.floating] | None
    labels: IntArray


@dataclass(frozen=True)
class LogitMoments:
    """Class-conditional mean and covariance of the logits: Σ̄_n = F_nᵀ F_n.

    mean : shape (N, N), mean[n] = μ_n, the mean logits of the samples of class n
    factor : shape (N, r, N), r ≤ min(max_n K_n, N); rows past a class's own rank are zero
    counts : shape (N,), samples K_n that each class's moments come from
    """

    mean: FloatArray
    factor: FloatArray
    counts: IntArray

    def covariance(self) -> FloatArray:
        """The full covariances, shape (N, N, N): N³ numbers, so only when asked."""
        return np.asarray(np.einsum("nri,nrj->nij", self.factor, self.factor))


@dataclass(frozen=True)
class Responses:
    """What single samples do to the head, by class: see `class_response`.

    mean : shape (d + 1, N, N), mean[b, n, j] = E[(1{n = j} − s_j) g_b | class n]
    spread : shape (N, d + 1, d + 1), Σ_j Cov[(1{n = j} − s_j) g_b, (1{n = j} − s_j) g_c | class n]; zero
        for a class of one sample
    """

    mean: FloatArray
    spread: FloatArray


@dataclass(frozen=True, eq=False)
class ModelStatistics:
    """What one model does with the auxiliary data; logits are always known, embeddings may not be.

    Compared by identity, so that what was worked out from one model's serves all of its clients.

    moments : class-conditional logit moments
    confidence : shape (N, N), S[n, j] = E[s_j | class n], rows sum to 1
    standard_error : shape (N, N), Monte Carlo standard error of ``confidence``
    embedding_mean : shape (N, L), mean embedding of each class, or None where only logits are known
    gradient_sum : shape (N, N), E[(s_j − 1{n = j}) Σ_l e_l | class n]: the mean row sums of the head's
        weight gradient, over the samples themselves; None together with ``embedding_mean``
    accuracy : shape (N,), share of each class's samples that the model gets right
    responses : what single samples do to the head, None where only logits are known or in old files
    residuals : what single samples do to the bias, None in old files and where classes are many
    samples : the single samples' logits, likewise
    unit : what stands for the bias of a head without one, None where there is one, and likewise
    """

    moments: LogitMoments
    confidence: FloatArray
    standard_error: FloatArray
    embedding_mean: FloatArray | None
    gradient_sum: FloatArray | None
    accuracy: FloatArray
    responses: Responses | None = None
    residuals: ResidualMoments | None = None
    samples: Activations | None = None
    unit: UnitDirection | None = None

    @property
    def num_classes(self) -> int:
        return int(self.confidence.shape[0])

    def embeddings_for(self, purpose: str) -> tuple[FloatArray, FloatArray]:
        """``embedding_mean`` and ``gradient_sum``, where they are known; ``purpose`` needs them.

        Raises
        ------
        MismatchError
        """
        if self.embedding_mean is None or self.gradient_sum is None:
            raise MismatchError(
                f"expected embeddings beside the logits, which {purpose} needs, found logits alone: add the "
                "array `embeddings` to the --aux-logits file, or choose another --method"
            )
        return self.embedding_mean, self.gradient_sum

    @property
    def overall_accuracy(self) -> float:
        counts = self.moments.counts
        return float(np.sum(self.accuracy * counts) / np.sum(counts))


@dataclass(frozen=True)
class LocalTraining:
    """How the client trained, as far as the output layer's recursion is concerned.

    steps : m, local optimiser steps
    batch_size : B, samples a step (the mean-reduced loss divides by it)
    lr : η of each step, shape (m,), or one number for all steps
    total : samples seen, m·B unless the last batches were smaller
    distinct : how many different samples the client has, None where nobody says; several epochs see the
        same ones again
    momentum, dampening, nesterov, weight_decay : as in torch.optim.SGD
    prox : λ of the proximal pull λ (θ − θ_global): FedProx, FedDyn, FedDC
    scheme : fedavg, fedprox, scaffold, feddyn or feddc
    optimizer : sgd, adam or adamw
    beta1, beta2, eps : as in torch.optim.Adam
    """

    steps: int
    batch_size: int
    lr: float | tuple[float, ...]
    total: int | None = None
    distinct: int | None = None
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    prox: float = 0.0
    scheme: str = "fedavg"
    optimizer: str = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def samples(self) -> int:
        """How many samples the client saw: what the counts sum to."""
        return self.steps * self.batch_size if self.total is None else self.total

    @property
    def seen(self) -> int:
        """How many different samples that were, as far as is known."""
        return self.samples if self.distinct is None else min(self.samples, self.distinct)

    @property
    def epochs(self) -> int | None:
        """Whole passes over the client's samples, the last batch of each smaller; None for other training."""
        if self.distinct is None or self.samples % self.distinct:
            return None
        epochs = self.samples // self.distinct
        return epochs if self.steps == epochs * math.ceil(self.distinct / self.batch_size) else None

    def resized(self, size: int) -> LocalTraining:
        """As many passes over so many samples; itself where it isn't whole passes or has rates by step."""
        epochs = self.epochs
        if epochs is None or not isinstance(self.lr, float):
            return self
        steps = epochs * math.ceil(size / self.batch_size)
        return replace(self, steps=steps, total=epochs * size, distinct=size)


@dataclass(frozen=True)
class Clipping:
    """How an update was scaled by a factor c that is not known to the letter.

    norm : of the whole update that clipping let through, so that c ≤ 1; None where it is not known what
        made the update of another size
    noise_std : standard deviation of the Gaussian noise added to each parameter's update after that
    deviation : of the logarithm of ĉ, by which the update and its noise were divided since; None for an
        update as it was sent
    """

    norm: float | None
    noise_std: float = 0.0
    deviation: float | None = None


@dataclass(frozen=True)
class Compression:
    """What an update lost before it was sent: by sparsification, then by uniform quantisation.

    share : of all numbers that training may move, those that moved most, which alone were sent
    by_tensor : whether each tensor was compressed by itself, or the whole update at once
    levels : to which the numbers sent were rounded, from the smallest to the largest; 0 for none
    signs : whether their signs were sent instead, and their mean size
    """

    share: float = 1.0
    by_tensor: bool = False
    levels: int = 0
    signs: bool = False

    @property
    def sparsified(self) -> bool:
        """Whether some numbers were not sent."""
        return self.share < 1


@dataclass(frozen=True)
class Treatment:
    """What was done to an update between training and its reading.

    noise_std : of the Gaussian noise added to each parameter's update, where there is no clipping
    clipping : how it was scaled before that, with noise of its own, and divided at last; None where it wasn't
    compression : what came after the noise, None where nothing did
    """

    noise_std: float = 0.0
    clipping: Clipping | None = None
    compression: Compression | None = None


UNTREATED = Treatment()


@dataclass(frozen=True)
class Observation:
    """All that a recovery method may look at.

    update : ΔW, Δb of the head
    head : the global model's head
    training : the client's training values
    start : statistics of the global model on the auxiliary data
    end : statistics of the local model, or None where they were not measured
    constant_gradient : the scheme's constant gradient of the head (Scaffold's c − c_k, FedDyn's and
        FedDC's linear terms), None where there is none
    rounding : norm of the error that storing the weights in a type coarser than float32 left in Δb (in ΔW
        for a head without bias), 0 where there is none
    residuals : single samples' residuals along the client's way, for the methods that ask for them
    magnified : how many times as large as it was sent the update is read, and what storing it rounded
    noise_std : standard deviation of the Gaussian noise on each parameter's update
    noise_told : whether it is known; noise that was only seen may be a sign of wrong inputs, and the checks
        go on as if there were none
    levels : how many values the grid has that the whole update was rounded to, from its smallest to its
        largest number; 0 for none, or where that isn't known
    replayed_update : from proportions z, shape (N,), and the number of a draw to ΔW and Δb of a replayed
        training on such a mix, None where it diverges; for the methods that ask for it
    replayed_clients : replays training on class mixes and looks at the models too; likewise
    frozen : names of the parameters that replays leave alone, as the client's training did
    rescaled : from a factor and the standard deviation of its logarithm to what there would be to look at if
        the update had been divided by it, with clients that were likewise by factors that miss as far; for
        `replay`, None where that can't be had
    dense : the dense layers before the head and their update; likewise, None where there are none or it isn't
        exact
    shared : whether a batch's samples share statistics (BatchNorm in training)
    fits : keeps what methods fit to the global model for the next run, if anything does
    scaled : whether the update was scaled by an unknown factor; then bounds are those of methods alone
        that know of it (`Estimate.any_size`)
    clipping : how, for methods that have clipped clients made up; None where that is not known
    notes : what was found out about the update before any method saw it
    kept_bytes : of the posterior search's exponentials that are kept; more are made again, with the same bits
    progress : told how far the methods are that take seconds
    """

    update: HeadUpdate
    head: Head
    training: LocalTraining
    start: ModelStatistics
    end: ModelStatistics | None = None
    constant_gradient: Head | None = None
    rounding: float = 0.0
    magnified: float = 1.0
    noise_std: float = 0.0
    noise_told: bool = True
    levels: int = 0
    replayed_update: Callable[[FloatArray, int], Head | None] | None = None
    replayed_clients: ReplayClients | None = None
    rescaled: Callable[[float, float], Observation] | None = None
    frozen: tuple[str, ...] = ()
    dense: DenseTail | None = None
    shared: bool = False
    fits: FitStore | None = None
    scaled: bool = False
    clipping: Clipping | None = None
    notes: tuple[Note, ...] = ()
    residuals: ResidualPath | None = None
    samples: int = 10_000
    search_iterations: int = 0
    kept_bytes: int = 2**30
    seed: int = 0
    device: str = "cpu"
    progress: Progress = ignore


@dataclass(frozen=True)
class Note:
    """A warning: a stable code for programs and a sentence for people."""

    code: str
    message: str


@dataclass(frozen=True)
class Estimate:
    """A method's answer before rounding.

    proportions : z, shape (N,), on the simplex
    low, high : 95 % bounds of the counts, real or whole, shape (N,), where the method has an error model
    presence : probability that there is any sample of the class, shape (N,), likewise
    any_size : whether bounds and presence allow for an update that was scaled by an unknown factor
    batch_variance : `rlu_cli.core.schemes.batch_variance` of the batch as it was found, where it was
    settled : the update's size over what training made it, where least squares answered for it at that size
    divided_by : the factor by which it was divided, where that was done for a method that answers
    """

    proportions: FloatArray
    diagnostics: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[Note, ...] = ()
    low: FloatArray | None = None
    high: FloatArray | None = None
    presence: FloatArray | None = None
    any_size: bool = False
    batch_variance: float | None = None
    settled: float | None = None
    divided_by: float | None = None


@dataclass(frozen=True)
class Recovery:
    """The recovered label counts of one client's round.

    counts : shape (N,), integers that sum to ``total``
    estimate : shape (N,), the real-valued solution, total·z
    widths : shape (N,), high − low as they were before they were made whole, 0 where both are nearest to one
    """

    method: str
    total: int
    counts: IntArray
    estimate: FloatArray
    low: IntArray | None
    high: IntArray | None
    presence: FloatArray | None
    diagnostics: dict[str, Any]
    warnings: tuple[Note, ...]
    widths: FloatArray | None = None
