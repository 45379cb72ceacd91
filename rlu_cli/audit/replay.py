"""Train the global model again on auxiliary samples, to see what a client's models did on their way."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlu_cli.audit.network import Network
from rlu_cli.audit.probe import probe
from rlu_cli.core.residuals import ResidualMoments, residual_moments, residual_views
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import impulse_response
from rlu_cli.core.types import Activations, FloatArray, Head, IntArray, LocalTraining, Observation
from rlu_cli.files.state_dict import layer_tensors
from rlu_cli.images import ImageSet, Normalization
from rlu_cli.models import load_weights
from rlu_cli.simulation.client import Batch, local_training, single_images_refused
from rlu_cli.simulation.vectors import snapshot

_NODES = 10
"""Models on the way that the auxiliary images are passed through."""

_EARLY = 1.7
"""How much denser the nodes are at the beginning, where gradients shrink fastest."""


@dataclass(frozen=True)
class Replay:
    """One client's training, ready to be replayed on any class mix.

    From the global model the client's own optimiser takes its m steps, on batches of auxiliary samples
    mixed by z. The replayed models θ̃^τ end elsewhere than the client did, so they are drawn to its model
    evenly: θ^τ = θ̃^τ + (τ/m)(θ_local − θ̃^m), which is right at both ends.

    start, end : state dicts of the global and the local model, under the model's own names
    batch_norm, dropout, batch_size : how the auxiliary images are passed, see `probe`
    noise_std : of known Gaussian noise on the local model. Of θ_local − θ̃^m only as much is followed, tensor
        by tensor, as noise does not explain: 1 − n σ²/‖θ_local − θ̃^m‖² of it, or nothing
    along : see `ResidualPath`
    constant : what the scheme adds to every gradient, by parameter name (Scaffold, FedDyn, FedDC)
    frozen : names of the parameters that training leaves alone
    """

    network: Network
    images: ImageSet
    normalization: Normalization
    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    training: LocalTraining
    batch_norm: str
    dropout: str
    batch_size: int | None
    seed: int
    device: str
    noise_std: float = 0.0
    along: FloatArray | None = None
    constant: Mapping[str, Tensor] | None = None
    frozen: tuple[str, ...] = ()

    def __call__(self, z: FloatArray, draw: int = 0) -> ResidualMoments | None:
        """Moments of Σ_τ ρ^τ r^τ / Σ_τ ρ^τ over the auxiliary samples; None where training diverges."""
        nodes, weights = replay_nodes(self.training)
        *states, last = self.states(self._batches(z, draw), at=[*nodes, self.training.steps])
        missing = {
            name: self._without_noise(self.end[name].to(value) - value)
            for name, value in last.items()
            if name in self.end and value.is_floating_point()
        }
        if not all(bool(torch.isfinite(value).all()) for value in missing.values()):
            return None
        total: FloatArray | None = None
        for node, state, weight in zip(nodes, states, weights, strict=True):
            pull = node / self.training.steps
            drawn = {name: v + pull * missing[name] if name in missing else v for name, v in state.items()}
            self.network.model.load_state_dict(drawn)
            found = self.passed(self.network, self.images)
            part = weight * residual_views(found, self.along)
            total = part if total is None else total + part
        assert total is not None
        views = 1 if self.along is None else 2
        return residual_moments(total / sum(weights), self.images.labels.numpy(), views=views)

    def passed(self, network: Network, images: ImageSet) -> Activations:
        """Images through a network's present weights, as this replay passes them."""
        return probe(
            network,
            images,
            self.normalization,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
        )

    def update(self, z: FloatArray, draw: int = 0) -> Head | None:
        """ΔW and Δb of a replayed training on mix z; None where it diverges."""
        (last,) = self.states(self._batches(z, draw), at=[self.training.steps])
        return self.head_change(last)

    def head_change(self, last: Mapping[str, Tensor]) -> Head | None:
        """ΔW and Δb of a model from the global one to ``last``; None where it isn't finite."""
        names = layer_tensors(self.network.layer.name)
        changes = [last[name].double() - self.start[name].double().cpu() for name in names if name in last]
        if not all(bool(torch.isfinite(value).all()) for value in changes):
            return None
        weight, bias = changes[0], changes[1].numpy() if len(changes) > 1 else None
        return Head(weight.reshape(len(weight), -1).numpy(), bias)

    def _without_noise(self, missing: Tensor) -> Tensor:
        """James and Stein's shrinkage of what a known noise of σ a number lies on."""
        if not self.noise_std:
            return missing
        power = float(missing.double().square().sum())
        expected = missing.numel() * self.noise_std**2
        return missing * max(0.0, 1.0 - expected / power) if power > 0 else missing

    def distance(self, z: FloatArray, draw: int = 0) -> float:
        """‖θ̃^m − θ_global‖ over the parameters: how far a replayed training gets."""
        return self.travelled(self.states(self._batches(z, draw), at=[self.training.steps])[0])

    def travelled(self, end: Mapping[str, Tensor] | None = None) -> float:
        """‖θ_end − θ_global‖ over the parameters: how far a model got, by default the client's own."""
        end = self.end if end is None else end
        names = [name for name, _ in self.network.model.named_parameters() if name in end]
        ways = [(end[name].double() - self.start[name].double()).norm() for name in names]
        return float(torch.stack(ways).norm())

    def travelled_without_noise(self, noise_std: float) -> tuple[float, float] | None:
        """How far the client's model got itself, and the standard deviation of its logarithm.

            d² = ‖θ_end − θ_global‖² − P σ²,     sd(log d) = √(2P σ⁴ + 4 d² σ²) / (2 d²)

        None where noise hides it: no more than two standard deviations are left.

        Parameters
        ----------
        noise_std : σ of known noise on each of the P parameters
        """
        squared = self.travelled() ** 2
        numbers = sum(
            value.numel() for name, value in self.network.model.named_parameters() if name in self.end
        )
        variance = noise_std**2
        left = squared - numbers * variance
        deviation = math.sqrt(2 * numbers * variance**2 + 4 * max(left, 0.0) * variance)
        return (math.sqrt(left), deviation / (2 * left)) if left > 2 * deviation else None

    def states(
        self, batches: list[IntArray], *, at: list[int], random: bool = True
    ) -> list[dict[str, Tensor]]:
        """Train from the global model: copies of its state before each of the steps ``at``; m is the end.

        Parameters
        ----------
        batches : rows of auxiliary samples, for each step
        random : whether layers may take torch's random numbers, which threads share
        """
        model = copy.deepcopy(self.network.model).requires_grad_(True)
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(False)
        load_weights(model, self.start, where="the global model")
        seen: dict[int, dict[str, Tensor]] = {}

        def feed() -> Iterator[Batch]:
            for step, rows in enumerate(batches):
                if step in at:
                    seen[step] = snapshot(model)
                pixels = self.images.pixels[rows].to(self.device)
                yield self.normalization.apply(pixels), self.images.labels[rows].to(self.device)

        with ExitStack() as ways:
            ways.enter_context(torch.enable_grad())
            if random:
                ways.enter_context(torch.random.fork_rng(devices=[]))
                torch.manual_seed(self.seed)  # for dropout
            constant = self.constant and {name: k.to(self.device) for name, k in self.constant.items()}
            advice = "correct --batch-size, or --epochs and --dataset-size"
            with single_images_refused(batches, whose="a replay", advice=advice):
                local_training(model, feed(), self.training, constant=constant)
        seen[len(batches)] = snapshot(model)
        return [seen[step] for step in at]

    def _batches(self, z: FloatArray, draw: int = 0) -> list[IntArray]:
        """Rows of auxiliary samples for each step: the whole mix dealt out in random order.

        No sample comes twice before its whole class has been dealt.
        """
        rng = np.random.default_rng((self.seed, draw))
        labels = self.images.labels.numpy()
        steps, total = self.training.steps, self.training.samples
        dealt = []
        for n, count in enumerate(round_to_total(z, total)):
            members = np.flatnonzero(labels == n)
            rounds = -(-int(count) // len(members))
            dealt += [rng.permutation(members) for _ in range(rounds - 1)]
            dealt.append(rng.permutation(members)[: int(count) - max(0, rounds - 1) * len(members)])
        deck = rng.permutation(np.concatenate(dealt))
        return np.array_split(deck, steps)


@dataclass(frozen=True, eq=False)
class ReplayedUpdates:
    """`Observation.replayed_update` by the network itself."""

    replay: Replay

    def __call__(self, z: FloatArray, draw: int) -> Head | None:
        """ΔW and Δb of a training on mix z; None where it diverges."""
        return self.replay.update(z, draw)


def with_training(observation: Observation, training: LocalTraining) -> Observation:
    """The same measurements of a client that trained otherwise, and its replay under that training."""
    path, update = observation.residuals, observation.replayed_update
    if path is not None and isinstance(path.replay, Replay):
        path = replace(path, replay=replace(path.replay, training=training))
    if isinstance(update, ReplayedUpdates):
        update = ReplayedUpdates(replace(update.replay, training=training))
    other = replace(observation, training=training, residuals=path, replayed_update=update)
    rescaled = observation.rescaled
    if rescaled is None:
        return other
    return replace(other, rescaled=lambda *factor: with_training(rescaled(*factor), training))


def replay_nodes(training: LocalTraining) -> tuple[list[int], list[float]]:
    """Steps whose models stand for the steps around them, with the sum of ρ over those.

    All steps up to ten; of more, ten, closer together at the beginning.
    """
    rho = impulse_response(training)
    edges = np.unique(np.rint(training.steps * np.linspace(0, 1, _NODES + 1) ** _EARLY).astype(int))
    if training.steps <= _NODES:
        edges = np.arange(training.steps + 1)
    cells = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    return [(a + b - 1) // 2 for a, b in cells], [float(rho[a:b].sum()) for a, b in cells]
