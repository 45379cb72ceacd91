"""What Scaffold, FedDyn and FedDC remember of a client, and the constant gradient they make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rlu_cli.core.types import LocalTraining

STATEFUL = ("scaffold", "feddyn", "feddc")
"""Schemes whose local training depends on the client's earlier rounds."""

V = TypeVar("V", bound="Vector")


class Vector(Protocol):
    """Anything with vector arithmetic: a NumPy array of the head, a torch tensor of all parameters."""

    def __add__(self: V, other: V, /) -> V: ...

    def __sub__(self: V, other: V, /) -> V: ...

    def __mul__(self: V, other: float, /) -> V: ...


@dataclass(frozen=True)
class ClientState(Generic[V]):
    """A client's memory after the rounds it took part in; zeros before the first.

    drift : d_k = Σ_r Δ_k^(r). FedDC's local drift; FedDyn's −∇L_k is λ times it
    control : Scaffold's c_k
    gap : Δ_k^(r) − Δ^(r) of the client's last round, with Δ^(r) the global update of that round
    """

    drift: V
    control: V
    gap: V

    @classmethod
    def fresh(cls, zero: V) -> ClientState[V]:
        """The state of a client that has not taken part yet."""
        return cls(zero, zero, zero)

    def after_round(
        self, update: V, *, global_update: V, server_control: V, total_rate: float
    ) -> ClientState[V]:
        """The state after a round of the client's (Table 1's sources, as their authors define them).

            d_k ← d_k + Δ_k
            c_k ← c_k − c − Δ_k/(Σ_τ η_τ)            (Scaffold, option II)

        Parameters
        ----------
        update : Δ_k = local − global
        global_update : next round's global model − this round's
        server_control : Scaffold's c of this round
        total_rate : Σ_τ η_τ, which is η m at a fixed rate
        """
        return ClientState(
            drift=self.drift + update,
            control=self.control - server_control - update * (1 / total_rate),
            gap=update - global_update,
        )

    def constant_gradient(self, training: LocalTraining, *, server_control: V, total_rate: float) -> V:
        """k of `LinearRecursion`: what the scheme adds to every gradient of the coming round.

        scaffold   c − c_k
        feddyn     λ d_k
        feddc      λ d_k + (Δ_k − Δ)^(last)/(Σ_τ η_τ)
        """
        if training.scheme == "scaffold":
            return server_control - self.control
        if training.scheme == "feddyn":
            return self.drift * training.prox
        if training.scheme == "feddc":
            return self.drift * training.prox + self.gap * (1 / total_rate)
        raise ValueError(f"{training.scheme} has no constant gradient")


def next_server_control(control: V, global_update: V, *, participation: float, total_rate: float) -> V:
    """Scaffold's server control of the next round.

        c ← c + (1/K) Σ_{k ∈ P} (c_k⁺ − c_k) = (1 − p) c − p Δ/(Σ_τ η_τ)

    with p = |P|/K the share of clients in the round and Δ the global update, their plain mean (server rate
    1). So c needs no archive of its own: the global models determine it, from c^(1) = 0 on.
    """
    return control * (1 - participation) - global_update * (participation / total_rate)
