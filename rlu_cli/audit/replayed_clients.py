"""Clients made up by training on auxiliary samples, to learn from what training does."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlu_cli.audit.compression import compressed
from rlu_cli.audit.replay import Replay
from rlu_cli.core.client_views import ModelMeans, ReplayedClient, ReplayPlan
from rlu_cli.core.parallel import for_each
from rlu_cli.core.progress import Progress
from rlu_cli.core.residuals import residual_moments, residuals
from rlu_cli.core.types import UNTREATED, FloatArray, IntArray, LocalTraining, Treatment
from rlu_cli.files.hashing import sha256_tensors
from rlu_cli.files.state_dict import layer_tensors
from rlu_cli.models import activation_bytes, load_weights, multiply_adds
from rlu_cli.simulation.client import epoch_indices, step_indices

_LOOKED_AT, _ENOUGH, _MOST_LOOKED_AT = 0.2, 10, 0.4
"""Share of each class's auxiliary samples that a client doesn't draw from and is looked at on; where that is
fewer than ten, ten, but no more than four in ten."""

_MEMORY, _COPIES = 4 * 2**30, 6
"""Bytes that replays side by side may take, and how often each has the weights: before, now, gradients…"""

_EVENNESS = 2.0
"""Their weights are Dirichlet's with this concentration."""


@dataclass(frozen=True, eq=False)
class ReplayedClients:
    """`ReplayClients` by the network itself.

    base : any replay from the same global model; its training and its end don't matter
    treatment : of each update: it is clipped, gets the noise, is compressed, and is divided by a factor whose
        logarithm misses that of its own by so much, where the real one's was estimated
    """

    base: Replay
    treatment: Treatment = UNTREATED

    def __call__(self, plans: list[ReplayPlan], progress: Progress) -> list[ReplayedClient | None]:
        """One client a plan, each by random numbers of its own: the same on any number of threads."""
        found: list[ReplayedClient | None] = [None] * len(plans)
        done = 0

        def replay(index: int) -> None:
            nonlocal done
            found[index] = self._client(plans[index])
            done += 1
            progress(done, len(plans))

        _ = self._before
        if self._side_by_side:
            for_each(replay, range(len(plans)), most=self._at_once(plans))
        else:
            for index in range(len(plans)):
                replay(index)
        return found

    @cached_property
    def own(self) -> str | None:
        """By the gradients that the client's scheme adds, where there are any."""
        constant = self.base.constant
        if not constant or not any(bool(value.any()) for value in constant.values()):
            return None
        return sha256_tensors(constant)

    def cost(self, training: LocalTraining) -> float:
        """Two for each multiplication; a training step takes three passes."""
        looked_at = sum(_looked_at(int(count)) for count in np.bincount(self._labels))
        return 2.0 * self._multiply_adds * (looked_at + 3 * training.samples)

    @cached_property
    def _multiply_adds(self) -> int:
        return multiply_adds(self.base.network.model, self.base.network.black(self.base.device))

    @cached_property
    def _bytes(self) -> tuple[int, int]:
        """Of one image's outputs, and of the weights."""
        network = self.base.network
        weights = sum(value.numel() * value.element_size() for value in network.model.state_dict().values())
        return activation_bytes(network.model, network.black(self.base.device)), int(weights)

    def _at_once(self, plans: list[ReplayPlan]) -> int:
        """How many of these fit into memory side by side, outputs and their gradients."""
        outputs, weights = self._bytes
        batch = max(plan.training.batch_size for plan in plans)
        return max(1, _MEMORY // (2 * batch * outputs + _COPIES * weights))

    @cached_property
    def _side_by_side(self) -> bool:
        """Whether threads stay out of each other's way: on the CPU, without random numbers that all share.

        Dropout draws them, and so may the user's own code: two images are passed to see.
        """
        base = self.base
        if base.device != "cpu":
            return False
        model = copy.deepcopy(base.network.model).train()
        pixels = base.normalization.apply(base.images.pixels[:2])
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = _random_states()
            model(pixels)
            return _random_states() == before

    @cached_property
    def _needs_pairs(self) -> bool:
        """Whether the network can't train on a single image: BatchNorm has no variance of one value.

        The real client had no such batch, but one that is made up has another size, whose epochs may end so.
        """
        base = self.base
        model = copy.deepcopy(base.network.model).train()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model(base.normalization.apply(base.images.pixels[:1]).to(base.device))
        except ValueError:
            return True
        return False

    @cached_property
    def _labels(self) -> IntArray:
        return self.base.images.labels.numpy()

    @cached_property
    def _of_class(self) -> list[IntArray]:
        """The rows of each class's auxiliary samples."""
        return [np.flatnonzero(self._labels == n) for n in range(int(self._labels.max()) + 1)]

    @cached_property
    def _before(self) -> FloatArray:
        """The global model's logits, shape (M, N)."""
        return self._logits(self.base.start, np.arange(len(self._labels)))

    def _client(self, plan: ReplayPlan) -> ReplayedClient | None:
        rng = np.random.default_rng((self.base.seed, 2, plan.draw))
        share, held_out = self._share(plan, rng)
        batches = _batches(share, plan.training, rng)
        lone = plan.training.batch_size > 1 and any(len(rows) == 1 for rows in batches)
        if lone and self._needs_pairs:
            batches = [rows if len(rows) > 1 else np.append(rows, rng.choice(share)) for rows in batches]
        replay = replace(self.base, training=plan.training)
        (end,) = replay.states(batches, at=[len(batches)], random=not self._side_by_side)
        if not _is_finite(end):
            return None
        end, noise_std = self._sent(end, plan.draw)
        change = replay.head_change(end)
        if change is None or not _is_finite(end):
            return None
        labels = self._labels[held_out]
        seen = np.bincount(self._labels[np.concatenate(batches)], minlength=len(plan.counts))
        return ReplayedClient(
            seen / seen.sum(),
            change,
            _means(self._before[held_out], labels),
            _means(self._logits(end, held_out), labels),
            noise_std,
        )

    def _share(self, plan: ReplayPlan, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """The client's samples, rows of the auxiliary ones, and the rows that it can't have drawn."""
        share, held_out = [], []
        for members, count in zip(self._of_class, plan.counts, strict=True):
            if plan.half is None:
                mixed = rng.permutation(members)
                kept = len(mixed) - _looked_at(len(mixed))
                own, others = mixed[:kept], mixed[kept:]
            else:
                own, others = members[plan.half :: 2], members[1 - plan.half :: 2]
            weights = rng.dirichlet(np.full(len(own), _EVENNESS))
            share.append(rng.choice(own, int(count), p=weights))
            held_out.append(others)
        return np.concatenate(share), np.sort(np.concatenate(held_out))

    def _sent(self, state: dict[str, Tensor], draw: int) -> tuple[dict[str, Tensor], float]:
        """The model as it is read once it was sent, and the noise on each number of its update."""
        clipping = self.treatment.clipping
        if clipping is None:
            return self._compressed(*self._noisy(state, self.treatment.noise_std, draw))
        most, share = math.inf, 1.0
        if clipping.norm is not None:
            length = self.base.travelled(state)
            most, share = 1.0, min(1.0, clipping.norm / length) if length > 0 else 1.0
        noisy = self._noisy(self._scaled(state, share), clipping.noise_std, draw)
        sent, noise_std = self._compressed(*noisy)
        if clipping.deviation is None:
            return sent, noise_std
        error = clipping.deviation * np.random.default_rng((self.base.seed, 3, draw)).standard_normal()
        estimated = min(most, share * math.exp(error))
        return self._scaled(sent, 1 / estimated), noise_std / estimated

    def _noisy(
        self, state: dict[str, Tensor], noise_std: float, draw: int
    ) -> tuple[dict[str, Tensor], float]:
        if not noise_std:
            return state, 0.0
        drawn = torch.Generator().manual_seed(draw)
        noisy = {
            name: value + noise_std * torch.randn(value.shape, generator=drawn).to(value)
            if name in self._trained
            else value
            for name, value in state.items()
        }
        return noisy, noise_std

    def _compressed(self, state: dict[str, Tensor], noise_std: float) -> tuple[dict[str, Tensor], float]:
        """What quantisation adds counts as noise where there is no other, as it does where it is seen."""
        how = self.treatment.compression
        if how is None:
            return state, noise_std
        start = {name: self.base.start[name].to(state[name]) for name in state if name in self._trained}
        change, steps = compressed({name: state[name] - before for name, before in start.items()}, how)
        step = steps.get(layer_tensors(self.base.network.layer.name)[0], 0.0)
        seen = step / math.sqrt(12) if not how.sparsified else 0.0  # of sparsified ones none is
        return {**state, **{name: start[name] + change[name] for name in start}}, noise_std or seen

    def _scaled(self, state: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        """The model that moved so much of the way."""
        start = self.base.start
        return {
            name: torch.lerp(start[name].to(value), value, share) if name in self._trained else value
            for name, value in state.items()
        }

    @cached_property
    def _trained(self) -> frozenset[str]:
        names = (name for name, _ in self.base.network.model.named_parameters())
        return frozenset(names) - frozenset(self.base.frozen)

    def _logits(self, state: Mapping[str, Tensor], rows: IntArray) -> FloatArray:
        base = self.base
        network = replace(base.network, model=copy.deepcopy(base.network.model))
        load_weights(network.model, state, where="a replayed model")
        images = replace(base.images, pixels=base.images.pixels[rows], labels=base.images.labels[rows])
        return base.passed(network, images).logits.astype(np.float64)


def _is_finite(state: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.values())


def _looked_at(count: int) -> int:
    """Of so many samples of a class, how many a client is looked at on."""
    return max(math.floor(_LOOKED_AT * count), min(_ENOUGH, math.floor(_MOST_LOOKED_AT * count)))


def _random_states() -> tuple[object, ...]:
    """Where the streams of random numbers are that threads share."""
    numpys: Any = np.random.get_state(legacy=False)
    words, position = numpys["state"]["key"].tolist(), numpys["state"]["pos"]
    return random.getstate(), words, position, numpys["gauss"], torch.get_rng_state().tolist()


def _batches(share: IntArray, training: LocalTraining, rng: np.random.Generator) -> list[IntArray]:
    """Which samples each step sees, as `simulate` has it."""
    if training.epochs is not None:
        return list(epoch_indices(share, training.epochs, training.batch_size, rng=rng))
    if training.seen < training.samples:
        return list(step_indices(share, training.steps, training.batch_size, rng=rng))
    return np.array_split(rng.permutation(share), training.steps)


def _means(logits: FloatArray, labels: IntArray) -> ModelMeans:
    classes = range(logits.shape[1])
    return ModelMeans(
        np.stack([logits[labels == n].mean(axis=0) for n in classes]),
        residual_moments(residuals(logits, labels), labels),
    )
