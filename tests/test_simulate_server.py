"""The server of every scheme against its authors' update, on small vectors with partial participation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlu_cli.core.types import LocalTraining
from rlu_cli.simulation.server import Contribution, Server

P, K, M, ETA, LAM = 7, 4, 5, 0.2, 0.5
ROUNDS = (("a", "b"), ("b", "c", "d"), ("a",), ("a", "b", "c", "d"))


def training(scheme: str, **values: float) -> LocalTraining:
    return LocalTraining(steps=M, batch_size=8, lr=ETA, scheme=scheme, **{"prox": LAM, **values})  # type: ignore[arg-type]


def sent(generator: torch.Generator, client: str, scheme: str, weight: float = 1.0) -> Contribution:
    parameters = torch.randn(P, generator=generator, dtype=torch.float64)
    buffers = {"mean": torch.randn(2, generator=generator), "seen": torch.tensor(len(client))}
    return Contribution(client, parameters, buffers, weight, training(scheme))


def start(scheme: str) -> Server:
    buffers = {"mean": torch.zeros(2), "seen": torch.tensor(0)}
    return Server(torch.linspace(-1, 1, P, dtype=torch.float64), buffers, clients=K, scheme=scheme)


def close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", ["fedavg", "fedprox"])
def test_weighted_mean(scheme: str) -> None:
    generator = torch.Generator().manual_seed(0)
    server = start(scheme)
    parts = [
        sent(generator, name, scheme, weight) for name, weight in (("a", 30.0), ("b", 10.0), ("c", 60.0))
    ]
    server.close_round(parts)
    expected = 0.3 * parts[0].parameters + 0.1 * parts[1].parameters + 0.6 * parts[2].parameters
    assert close(server.parameters, expected)
    mean = 0.3 * parts[0].buffers["mean"] + 0.1 * parts[1].buffers["mean"] + 0.6 * parts[2].buffers["mean"]
    assert torch.allclose(server.buffers["mean"], mean)
    assert server.constant_gradient("a", training(scheme)) is None


def test_scaffold() -> None:
    generator = torch.Generator().manual_seed(1)
    server = start("scaffold")
    theta, c = server.parameters.clone(), torch.zeros(P, dtype=torch.float64)
    controls = {name: torch.zeros(P, dtype=torch.float64) for name in "abcd"}
    for names in ROUNDS:
        for name in "abcd":
            k = server.constant_gradient(name, training("scaffold"))
            assert k is not None
            assert close(k, c - controls[name])
        parts = [sent(generator, name, "scaffold", 5.0 * len(names)) for name in names]
        server.close_round(parts)
        moves, changes = [], []
        for part in parts:  # option II
            new = controls[part.client] - c + (theta - part.parameters) / (M * ETA)
            moves.append(part.parameters - theta)
            changes.append(new - controls[part.client])
            controls[part.client] = new
        theta = theta + sum(moves) / len(parts)
        c = c + len(parts) / K * (sum(changes) / len(parts))
        assert close(server.parameters, theta)
        assert close(server.control, c)


def test_scaffold_control_stays_the_mean_of_the_clients() -> None:
    generator = torch.Generator().manual_seed(2)
    server = start("scaffold")
    for names in ROUNDS:
        server.close_round([sent(generator, name, "scaffold") for name in names])
    gaps = [server.constant_gradient(name, training("scaffold")) for name in "abcd"]
    assert close(sum(gaps), torch.zeros(P, dtype=torch.float64))  # type: ignore[arg-type]


def test_feddyn() -> None:
    generator = torch.Generator().manual_seed(3)
    server = start("feddyn")
    theta, h = server.parameters.clone(), torch.zeros(P, dtype=torch.float64)
    gradients = {name: torch.zeros(P, dtype=torch.float64) for name in "abcd"}
    for names in ROUNDS:
        for name in "abcd":
            k = server.constant_gradient(name, training("feddyn"))
            assert k is not None
            assert close(k, -gradients[name])
        parts = [sent(generator, name, "feddyn", 3.0 + len(name)) for name in names]
        server.close_round(parts)
        for part in parts:
            gradients[part.client] = gradients[part.client] - LAM * (part.parameters - theta)
        h = h - LAM / K * sum(part.parameters - theta for part in parts)
        theta = sum(part.parameters for part in parts) / len(parts) - h / LAM
        assert close(server.parameters, theta)


def test_feddc() -> None:
    generator = torch.Generator().manual_seed(4)
    server = start("feddc")
    theta = server.parameters.clone()
    zero = torch.zeros(P, dtype=torch.float64)
    drift = dict.fromkeys("abcd", zero)
    own, whole = dict.fromkeys("abcd", zero), dict.fromkeys("abcd", zero)
    for names in ROUNDS:
        for name in "abcd":
            k = server.constant_gradient(name, training("feddc"))
            assert k is not None
            assert close(k, LAM * drift[name] + (own[name] - whole[name]) / (ETA * M))
        parts = [sent(generator, name, "feddc") for name in names]
        server.close_round(parts)
        for part in parts:
            drift[part.client] = drift[part.client] + part.parameters - theta
        new = sum(part.parameters + drift[part.client] for part in parts) / len(parts)
        for part in parts:
            own[part.client], whole[part.client] = part.parameters - theta, new - theta
        theta = new
        assert close(server.parameters, theta)


@pytest.mark.parametrize("scheme", ["scaffold", "feddyn", "feddc"])
def test_clients_weigh_the_same_in_schemes_that_remember(scheme: str) -> None:
    servers = []
    for weights in ((1.0, 1.0), (1.0, 99.0)):
        generator = torch.Generator().manual_seed(5)
        server = start(scheme)
        parts = [sent(generator, name, scheme, w) for name, w in zip("ab", weights, strict=True)]
        server.close_round(parts)
        servers.append(server.parameters)
    assert torch.equal(*servers)


def test_a_learning_rate_a_step() -> None:
    # η m becomes Σ_τ η_τ.
    rates = (0.4, 0.2, 0.1, 0.05, 0.05)
    record = LocalTraining(steps=M, batch_size=8, lr=rates, scheme="scaffold")
    server = start("scaffold")
    moved = server.parameters - 0.8
    server.close_round([Contribution("a", moved, server.buffers, 1.0, record)])
    k = server.constant_gradient("a", record)
    assert k is not None
    assert close(k, torch.full((P,), 1.0 / K - 1.0, dtype=torch.float64))


def test_counters_are_not_averaged() -> None:
    generator = torch.Generator().manual_seed(6)
    server = start("fedavg")
    server.close_round([sent(generator, "a", "fedavg"), sent(generator, "bb", "fedavg")])
    assert server.buffers["seen"].dtype == torch.int64
    assert int(server.buffers["seen"]) == 1
