"""A Flower simulation of two clients over two rounds; run as a script with the folder to save into.

Server and clients save what Flower's own guide saves: the global model after each round, as a torch state
dict and as NumPy arrays, and each client's model likewise, beside the counts of what it trained on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from real_rounds import batch, sample_images, train_one_step

from rlu_cli.models import build_model, parse_spec

ARCH = "lenet5:activation=relu,image_size=28,in_channels=1,num_classes=10"
CLIENTS, ROUNDS = 2, 2


def folder() -> Path:
    return Path(os.environ["FLOWER_OUT"])


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(parse_spec(ARCH), allow_user_code=False)


def save(name: str, arrays: ArrayRecord) -> None:
    torch.save(arrays.to_torch_state_dict(), folder() / f"{name}.pt")
    np.savez(folder() / f"{name}.npz", *arrays.to_numpy_ndarrays())


client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    number, round_ = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = sample_images(1, 28)
    chosen = batch(10 * round_ + number)
    train_one_step(model, images[chosen], labels[chosen])
    arrays = ArrayRecord(model.state_dict())
    save(f"client_{number}_round_{round_}", arrays)
    counts = torch.bincount(labels[chosen], minlength=10).tolist()
    (folder() / f"client_{number}_round_{round_}.json").write_text(json.dumps({"counts": counts}))
    metrics = MetricRecord({"num-examples": len(chosen)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(new_model().state_dict()),
        train_config=ConfigRecord({"lr": 0.05}),
        num_rounds=ROUNDS,
        evaluate_fn=lambda round_, arrays: save(f"model_{round_}", arrays),
    )


if __name__ == "__main__":
    os.environ["FLOWER_OUT"] = sys.argv[1]
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1}},
    )
