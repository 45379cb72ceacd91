"""How fast `rlu simulate` trains, against a bare PyTorch loop that takes the same steps.

    python benchmarks/simulate_speed.py          (a few minutes on one core)

LeNet-5 on Fashion-MNIST (or, with --data, on other images), 10 rounds × 10 clients × 10 steps of 32 images.
The bare loop is what one would write by hand: torch.optim.SGD over batches indexed from tensors in memory,
state dicts averaged, nothing archived. Both run in one process on one thread, in turn, so that the load of
the machine hits both; printed are the medians and the ratio bare / rlu (1 is as fast, 0.5 half as fast).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common import NORMALIZATION, machine
from torch import nn

from rlu_cli.audit.options import SimulationOptions, StepOptions
from rlu_cli.images import ImageSet
from rlu_cli.images.datasets import open_dataset
from rlu_cli.models import build_model
from rlu_cli.simulation.data import FederatedData
from rlu_cli.simulation.run import Simulator, complete_spec
from rlu_cli.simulation.settings import Simulation

LR, BATCH_SIZE, STEPS = 0.01, 32, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = open_dataset(arguments.data)
    options = SimulationOptions(clients=arguments.clients, rounds=arguments.rounds)
    training = StepOptions(lr=str(LR), batch_size=BATCH_SIZE, steps=STEPS)
    simulation = Simulation(arguments.data, "lenet5", NORMALIZATION, 0, training, options)
    bare, whole, steps_only = [], [], []
    for number in range(arguments.repeats + 1):  # the first warms up
        with tempfile.TemporaryDirectory() as folder:
            simulator = Simulator(simulation, images, Path(folder) / "archive", device="cpu")
            bare.append(bare_loop(simulator.data, options))
            whole.append(seconds(simulator))
            simulator = Simulator(simulation, images, Path(folder) / "other", device="cpu")
            steps_only.append(training_alone(simulator))
        print(f"{number}: bare {bare[-1]:.2f} s, rlu {whole[-1]:.2f} s, steps alone {steps_only[-1]:.2f} s")
    print(f"\n{machine()}, 1 thread; {describe(images, options)}")
    print(f"bare loop {spread(bare[1:], 's')}")
    for name, times in (("rlu simulate, everything archived", whole), ("its training alone", steps_only)):
        ratios = [b / t for b, t in zip(bare[1:], times[1:], strict=True)]
        print(f"{name} {spread(times[1:], 's')}; speed against the bare loop {spread(ratios)}")


def bare_loop(data: FederatedData, options: SimulationOptions) -> float:
    """Seconds of FedAvg written by hand: the same model, images, batch size and number of steps."""
    rng = np.random.default_rng(0)
    inputs, targets = data.batch(np.arange(len(data.labels)))
    torch.manual_seed(0)
    model = build_model(complete_spec("lenet5", data), allow_user_code=False)
    loss_function = nn.CrossEntropyLoss()
    start = time.perf_counter()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(options.rounds):
        states = []
        for share in data.shares:
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            order = np.resize(rng.permutation(share), STEPS * BATCH_SIZE)
            for rows in torch.from_numpy(order).split(BATCH_SIZE):
                optimizer.zero_grad()
                loss_function(model(inputs[rows]), targets[rows]).backward()
                optimizer.step()
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        state = {name: torch.stack([s[name] for s in states]).mean(dim=0) for name in state}
    return time.perf_counter() - start


def seconds(simulator: Simulator) -> float:
    """Of a whole simulation: training, measuring the accuracy, aggregating, writing the archive."""
    start = time.perf_counter()
    for _ in simulator.run():
        pass
    return time.perf_counter() - start


def training_alone(simulator: Simulator) -> float:
    """Of the clients' training within a simulation."""
    spent = 0.0
    train = simulator._train

    def timed(*arguments: object) -> object:
        nonlocal spent
        start = time.perf_counter()
        try:
            return train(*arguments)  # type: ignore[arg-type]
        finally:
            spent += time.perf_counter() - start

    simulator._train = timed  # type: ignore[method-assign,assignment]
    seconds(simulator)
    return spent


def describe(images: ImageSet, options: SimulationOptions) -> str:
    shape = "x".join(map(str, images.pixels.shape[1:]))
    return (
        f"{options.rounds} rounds x {options.clients} clients x {STEPS} steps of {BATCH_SIZE} images {shape}"
    )


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median and range."""
    unit = f" {unit}" if unit else ""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
