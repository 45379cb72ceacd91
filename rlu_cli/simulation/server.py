"""The server of every scheme: what it sends out and what it makes of what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlu_cli.core.schemes import step_rates
from rlu_cli.core.types import LocalTraining
from rlu_cli.core.variates import STATEFUL, ClientState


@dataclass(frozen=True)
class Contribution:
    """What one client sent back: its parameters as a vector, its buffers, and how it trained."""

    client: str
    parameters: Tensor
    buffers: Mapping[str, Tensor]
    weight: float
    training: LocalTraining


class Server:
    """Holds the global model and what the scheme remembers, and closes rounds.

    fedavg, fedprox   θ ← Σ_k w_k θ_k                                    (McMahan et al. 2017; Li et al. 2020)
    scaffold          θ ← mean θ_k,  c ← c + (1/K) Σ (c_k⁺ − c_k)        (Karimireddy et al. 2020)
    feddyn            h ← h − λ/K Σ (θ_k − θ),  θ ← mean θ_k − h/λ       (Acar et al. 2021)
    feddc             θ ← mean (θ_k + d_k)                               (Gao et al. 2022)

    Parameters
    ----------
    parameters : θ of the first round, shape (P,)
    buffers : the model's buffers by name
    clients : K, all clients there are
    scheme : fedavg, fedprox, scaffold, feddyn or feddc
    """

    def __init__(
        self, parameters: Tensor, buffers: Mapping[str, Tensor], *, clients: int, scheme: str
    ) -> None:
        self.parameters = parameters
        self.buffers = dict(buffers)
        self.clients = clients
        self.scheme = scheme
        self.control = torch.zeros_like(parameters)
        self.dual = torch.zeros_like(parameters)
        self._states: dict[str, ClientState[Tensor]] = {}

    def constant_gradient(self, client: str, training: LocalTraining) -> Tensor | None:
        """What the scheme adds to every gradient of this client in this round."""
        if self.scheme not in STATEFUL:
            return None
        return self._state(client).constant_gradient(
            training, server_control=self.control, total_rate=_total_rate(training)
        )

    def close_round(self, contributions: Sequence[Contribution]) -> None:
        """Aggregate what the round's clients sent back."""
        before = self.parameters
        weights = [1.0 if self.scheme in STATEFUL else c.weight for c in contributions]
        shares = [weight / sum(weights) for weight in weights]
        mean = _mean([c.parameters for c in contributions], shares)
        after = mean
        if self.scheme == "feddyn":
            pull = contributions[0].training.prox
            total = mean - before
            self.dual = self.dual - total * (pull * len(contributions) / self.clients)
            after = mean - self.dual * (1 / pull)
        elif self.scheme == "feddc":
            drifts = [self._state(c.client).drift + c.parameters - before for c in contributions]
            after = mean + _mean(drifts, shares)
        if self.scheme in STATEFUL:
            self._remember(contributions, before, after)
        self.parameters = after
        self.buffers = {
            name: _mean([c.buffers[name] for c in contributions], shares)
            if tensor.is_floating_point()
            else contributions[0].buffers[name]
            for name, tensor in self.buffers.items()
        }

    def _remember(self, contributions: Sequence[Contribution], before: Tensor, after: Tensor) -> None:
        """Bring the states of the round's clients, and Scaffold's server variate, up to date."""
        change = torch.zeros_like(self.control)
        for c in contributions:
            old = self._state(c.client)
            new = old.after_round(
                c.parameters - before,
                global_update=after - before,
                server_control=self.control,
                total_rate=_total_rate(c.training),
            )
            change = change + new.control - old.control
            self._states[c.client] = new
        self.control = self.control + change / self.clients

    def _state(self, client: str) -> ClientState[Tensor]:
        return self._states.get(client) or ClientState.fresh(torch.zeros_like(self.parameters))


def _total_rate(training: LocalTraining) -> float:
    return float(step_rates(training).sum())


def _mean(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros_like(vectors[0])
    for vector, share in zip(vectors, shares, strict=True):
        total = total + vector * share
    return total
