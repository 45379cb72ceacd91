"""Clients made up from auxiliary samples: how many samples of each class, and the update that they make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlu_cli.core.losses import LossRange
from rlu_cli.core.parallel import for_each
from rlu_cli.core.types import Activations, FloatArray, Head, IntArray

_NOISES = 2048
"""Different noises a class; more would be drawn no differently."""

_TOGETHER = 400
"""Clients that share one reweighting of the auxiliary samples."""

_AT_ONCE = 20_000_000
"""Numbers of their samples' embeddings, where they are made up of these: then they may be fewer."""

SPARSEST, FULLEST = 0.1, 3.0
"""Dirichlet concentrations of the class mixes, from a few classes a client to nearly all alike."""

_OF_FEW = 1 / 11
"""Share of clients that have only a few classes, as where data sets are cut into shards by class. More of
them would make the others' counts worse."""

_SMALLEST = 0.05
"""Factor by which clipping scales an update, at least."""

_EVERYWHERE = 0.15
"""Of mixes near one: what classes that it lacks get."""


@dataclass(frozen=True)
class FeatureNoise:
    """Known noise on the gradient that features are made of.

    std : standard deviation on each element of ∇b and of ∇W; 0 where it is what rounding adds, and made-up
        clients are rounded themselves
    weight : W, shape (N, L)
    along : a direction of the embedding, shape (L,), along which the weight is looked at besides
    """

    std: float
    weight: FloatArray
    along: FloatArray

    @property
    def rows(self) -> FloatArray:
        """What the weight's gradient is multiplied with, shape (N + 1, L)."""
        return np.vstack((self.weight, self.along))


def update_features(gradient: Head, head: Head, noise: FeatureNoise | None = None) -> FloatArray:
    """What is looked at of an update, shape (N + N²,): its bias, and its weight along the head's own rows.

        −∇b = (1/B) Σ_i r_i,     −∇W Wᵀ = (1/B) Σ_i r_i ⊗ W e_i,     r = onehot(y) − softmax(W e + b)

    Both follow from the samples' labels and logits alone, so single auxiliary logits say what they would be.
    Where there is known noise, −∇W v with v along the mean embedding is looked at as well, shape
    (N + N(N + 1),), and what noise adds along (1, …, 1) is taken away.

    Parameters
    ----------
    gradient : ∇W and ∇b, the gradient of the mean loss
    head : W and b
    """
    assert gradient.bias is not None
    if noise is None:
        return np.concatenate((-gradient.bias, (-gradient.weight @ head.weight.T).ravel()))
    by_class = np.column_stack((-gradient.bias, -gradient.weight @ noise.rows.T))
    by_class -= by_class.mean(axis=0)
    return np.concatenate((by_class[:, 0], by_class[:, 1:].ravel()))


def without_size(features: Tensor, *, noisy: bool) -> Tensor:
    """Features f of updates that were scaled by unknown factors: f/‖f‖, shape (S, F).

    With noise, whose share of f is larger the smaller f is, log ‖f‖ as well, shape (S, F + 1).
    """
    lengths = torch.linalg.norm(features, dim=1, keepdim=True).clamp(min=torch.finfo(features.dtype).tiny)
    direction = features / lengths
    return torch.cat((direction, lengths.log()), dim=1) if noisy else direction


@dataclass(frozen=True)
class SyntheticClients:
    """Clients of known counts.

    counts : shape (S, N), each row sums to the total
    features : float32, shape (S, N + N²), as `update_features` finds them, with `Losses.features` after them
        where updates were compressed
    """

    counts: IntArray
    features: Tensor


class ClientSimulator:
    """Draws clients that take one step on samples like the auxiliary ones.

    The class mix of a client is `draw_mixes`'s. Its samples are a smoothed bootstrap: an auxiliary sample of
    the class, with logits q + h F_nᵀ ξ, where F_nᵀ F_n is the class's covariance, ξ standard normal and h
    `bandwidth`'s. The auxiliary samples are themselves but a draw, so every 400 clients choose among them
    with weights of their own, uniform on the simplex (the Bayesian bootstrap, Rubin 1981): what is learnt
    over many such groups doesn't lean on single samples. No weights lead beyond the farthest of them, so the
    samples' distances from their class's mean are multiplied by a number s of the group and class, with
    (K − 1)/s² ~ χ² of K − 1 degrees of freedom: as far as K samples know how wide a normal law is.

    Parameters
    ----------
    samples : logits, shape (M, N), and labels of the auxiliary samples, some of every class
    bias : b, shape (N,): features take the logits without it
    total : samples of a client
    noise : to be drawn for each client as well; ``samples`` have embeddings then
    scaled : whether updates are scaled down before that, by factors log-uniform from 0.05 to 1
    lossy : how they are compressed after that; ``samples`` have embeddings then too
    weight : W, shape (N, L), where they are
    has_bias : whether a bias was sent, and compressed with the weight
    """

    def __init__(
        self,
        samples: Activations,
        bias: FloatArray,
        total: int,
        *,
        seed: int,
        noise: FeatureNoise | None = None,
        scaled: bool = False,
        lossy: LossRange | None = None,
        weight: FloatArray | None = None,
        has_bias: bool = True,
    ) -> None:
        self.total = total
        self._lossy, self._has_bias = lossy, has_bias
        self._scaled = scaled
        self.num_classes = N = samples.logits.shape[1]
        self._seed, self._groups = seed, 0
        rng = np.random.default_rng((seed, 0))
        self._bias = torch.from_numpy(bias.astype(np.float32))
        order = np.argsort(samples.labels, kind="stable")
        self._ends = np.cumsum(np.bincount(samples.labels, minlength=N))
        plain = samples.logits[order].astype(np.float64) - bias
        self._known: FeatureNoise | None = noise
        dimensions = N
        if lossy is not None:
            assert samples.embeddings is not None and weight is not None
            plain = np.column_stack((plain, samples.embeddings[order].astype(np.float64)))
            self._rows = torch.from_numpy((weight if noise is None else noise.rows).astype(np.float32))
        elif noise is not None:
            assert samples.embeddings is not None
            plain = np.column_stack((plain, samples.embeddings[order].astype(np.float64) @ noise.along))
            dimensions = N + 1
            # RᵀR = σ² times the rows' products
            root: FloatArray = np.linalg.qr(noise.std * noise.rows.T, mode="r")  # type: ignore[assignment]
            self._root = torch.from_numpy(root.astype(np.float32))
        self._width = P = plain.shape[1]
        smooth = np.empty((N, _NOISES, P), dtype=np.float32)
        for n, rows in enumerate(np.split(plain, self._ends[:-1])):
            smooth[n] = smoothing(rows, bandwidth(len(rows), dimensions), _NOISES, rng)
        sizes = np.diff(self._ends, prepend=0)
        self._freedom = np.maximum(sizes - 1, 1)
        means = np.stack([rows.mean(axis=0) for rows in np.split(plain, self._ends[:-1])])
        self._means = torch.from_numpy(means.astype(np.float32))
        self._apart = torch.from_numpy((plain - np.repeat(means, sizes, axis=0)).astype(np.float32))
        self._noise = torch.from_numpy(smooth.reshape(N * _NOISES, P))

    def draw(self, clients: int) -> SyntheticClients:
        """So many new clients, each group of them by random numbers of its own."""
        N = self.num_classes
        counts = np.empty((clients, N), dtype=np.int64)
        views = self._width if self._lossy is None else len(self._rows)
        features = torch.empty(clients, N + N * views + (0 if self._lossy is None else self._lossy.width))
        drawn, together = self._groups, _TOGETHER
        if self._lossy is not None:
            together = max(1, min(_TOGETHER, _AT_ONCE // (self.total * self._width)))

        def draw_group(first: int) -> None:
            group = slice(first, min(first + together, clients))
            rng = np.random.default_rng((self._seed, 1 + drawn + first // together))
            counts[group] = rng.multinomial(self.total, draw_mixes(group.stop - first, N, rng))
            whole = self._features(counts[group], rng)
            if self._scaled:
                logarithms = rng.uniform(np.log(_SMALLEST), 0.0, (len(whole), 1))
                whole = whole * torch.from_numpy(np.exp(logarithms).astype(np.float32))
            features[group] = self._noisy(whole, rng) if self._lossy is None else self._sent(whole, rng)

        for_each(draw_group, range(0, clients, together))
        self._groups += -(-clients // together)
        return SyntheticClients(counts, features)

    def _noisy(self, features: Tensor, rng: np.random.Generator) -> Tensor:
        """With known noise, where there is any, less its share along (1, …, 1)."""
        if self._known is None:
            return features
        N, clients = self.num_classes, len(features)
        bias, weight = features[:, :N], features[:, N:].view(clients, N, self._width)
        drawn = rng.standard_normal((clients, N, 1 + self._root.shape[0]), dtype=np.float32)
        noise = torch.from_numpy(drawn)
        bias = bias + self._known.std * noise[:, :, 0]
        weight = weight + noise[:, :, 1:] @ self._root
        bias, weight = bias - bias.mean(dim=1, keepdim=True), weight - weight.mean(dim=1, keepdim=True)
        return torch.cat((bias, weight.flatten(1)), dim=1)

    def _sent(self, whole: Tensor, rng: np.random.Generator) -> Tensor:
        """Features of updates that are known number by number, as they are after noise and compression."""
        assert self._lossy is not None
        N, clients = self.num_classes, len(whole)
        bias, weight = whole[:, :N], whole[:, N:].view(clients, N, self._width)[:, :, N:]
        if self._known is not None and self._known.std:
            shape = (clients, N, 1 + weight.shape[2])
            noise = torch.from_numpy(self._known.std * rng.standard_normal(shape, dtype=np.float32))
            bias, weight = bias + noise[:, :, 0], weight + noise[:, :, 1:]
        sent = torch.cat((bias, weight.flatten(1)), dim=1) if self._has_bias else weight.flatten(1)
        largest = (bias if self._has_bias else sent).abs().amax(dim=1)
        own = weight.flatten(1) if self._lossy.kind.apart else sent
        lost = self._lossy.draw(clients, rng).reaching(largest).spanning(own)
        bias, weight = lost.of_bias(bias), lost.of(weight) @ self._rows.T
        if self._known is not None:
            bias, weight = bias - bias.mean(dim=1, keepdim=True), weight - weight.mean(dim=1, keepdim=True)
        return torch.cat((bias, weight.flatten(1), lost.features()), dim=1)

    def _features(self, counts: IntArray, rng: np.random.Generator) -> Tensor:
        """Of the updates of a group of clients with these counts, by class and not by client."""
        N, group = self.num_classes, len(counts)
        labels = np.repeat(np.tile(np.arange(N), group), counts.ravel())
        chosen = np.empty(len(labels), dtype=np.int64)
        places = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts.sum(axis=0))[:-1])
        for end, size, place in zip(self._ends, np.diff(self._ends, prepend=0), places, strict=True):
            weights = np.cumsum(rng.dirichlet(np.ones(size)))
            picked = np.searchsorted(weights, rng.random(len(place)) * weights[-1], side="right")
            chosen[place] = end - size + np.minimum(picked, size - 1)
        noise = labels * _NOISES + rng.integers(0, _NOISES, len(labels))
        wide = torch.from_numpy(np.sqrt(self._freedom / rng.chisquare(self._freedom)).astype(np.float32))
        apart = self._apart[torch.from_numpy(chosen)] + self._noise[torch.from_numpy(noise)]
        of = torch.from_numpy(labels)
        return sample_features(self._means[of] + wide[of, None] * apart, self._bias, of, group)


def draw_mixes(clients: int, num_classes: int, rng: np.random.Generator) -> FloatArray:
    """Class proportions, shape (clients, N), of clients that may be skewed in any way.

    They are Dirichlet's, with a concentration drawn log-uniformly from 0.1 to 3: of ten clients in eleven
    over all classes, of the eleventh over k of them, k log-uniform up to N/2.
    """
    N = num_classes
    alpha = np.exp(rng.uniform(np.log(SPARSEST), np.log(FULLEST), (clients, 1)))
    k = np.floor(np.exp(rng.uniform(0.0, np.log(max(N / 2, 1.0)), clients)))
    k = np.where(rng.random(clients) < _OF_FEW, k, N)
    place = np.argsort(np.argsort(rng.random((clients, N)), axis=1), axis=1)
    return _dirichlet(alpha, (clients, N), rng, there=place < k[:, None])


def mixes_near(z: FloatArray, clients: int, rng: np.random.Generator, *, concentration: float) -> FloatArray:
    """Class proportions (clients, N), Dirichlet's with c z + 0.15."""
    return _dirichlet(concentration * z + _EVERYWHERE, (clients, len(z)), rng)


def _dirichlet(
    alpha: FloatArray,
    shape: tuple[int, int],
    rng: np.random.Generator,
    *,
    there: NDArray[np.bool_] | bool = True,
) -> FloatArray:
    """Dirichlet's proportions of the classes that are there, a client a row."""
    parts = (rng.standard_gamma(alpha, shape) + np.finfo(float).tiny) * there
    return np.asarray(parts / parts.sum(axis=1, keepdims=True))


def bandwidth(count: int, dimensions: int) -> float:
    """h = (4/(K (d + 2)))^(1/(d + 4)), in standard deviations; K samples in d dimensions (Silverman 1986)."""
    return float((4.0 / (count * (dimensions + 2))) ** (1.0 / (dimensions + 4)))


def smoothing(rows: FloatArray, h: float, draws: int, rng: np.random.Generator) -> FloatArray:
    """h Fᵀ ξ of one class, shape (draws, d), from its samples, shape (K, d): see `ClientSimulator`."""
    spread = (rows - rows.mean(axis=0)) / np.sqrt(max(len(rows) - 1, 1))
    return np.asarray(h * rng.standard_normal((draws, len(rows))) @ spread)


def sample_features(plain: Tensor, bias: Tensor, labels: Tensor, clients: int) -> Tensor:
    """Features of the updates of clients with as many samples each, in order, shape (clients, N + N²).

    Parameters
    ----------
    plain : logits without bias, shape (clients · B, N), with more columns for more views of the weight
    bias : shape (N,)
    labels : shape (clients · B,)
    """
    N = len(bias)
    residual = -torch.softmax(plain[:, :N] + bias, dim=1)
    residual[torch.arange(len(labels)), labels] += 1.0
    residual, plain = residual.view(clients, -1, N), plain.view(clients, -1, plain.shape[1])
    along = residual.transpose(1, 2) @ plain / residual.shape[1]
    return torch.cat((residual.mean(dim=1), along.flatten(1)), dim=1)
