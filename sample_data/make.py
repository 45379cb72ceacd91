"""Make the sample rounds: real federated training of LeNet-5 on Fashion-MNIST, with known labels.

    apt-get install dataset-fashion-mnist
    python sample_data/make.py

Writes four rounds beside this script, each with its global model, three clients of different class mixes
and truth.json, and aux/, 30 images of each class that no client trained on. Deterministic: one seed, one
thread. The images are Fashion-MNIST's (MIT licence, see NOTICE).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from rlu_cli.core.types import IntArray, LocalTraining
from rlu_cli.files.atomic import write_text
from rlu_cli.files.safetensors_io import save_safetensors
from rlu_cli.images.datasets import FASHION_MNIST_CLASSES, read_idx
from rlu_cli.images.normalize import parse_normalization
from rlu_cli.models import LeNet5
from rlu_cli.simulation.client import local_training, step_indices
from rlu_cli.simulation.partition import dirichlet_partition

HERE = Path(__file__).resolve().parent
SOURCE = Path("/usr/share/datasets/fashion-mnist")
CLASSES = FASHION_MNIST_CLASSES
SEED = 20261128
ALPHA, CLIENTS, SHOWN = 0.5, 10, 3
BATCH_SIZE, LR = 32, 0.01
AUX_PER_CLASS = 30
TRAINED_ACCURACY = 0.6
NORMALIZATION = parse_normalization("mean=0.286;std=0.353")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    pixels = torch.from_numpy(read_idx(SOURCE / "train-images-idx3-ubyte.gz").copy())[:, None]
    labels = read_idx(SOURCE / "train-labels-idx1-ubyte.gz").astype(np.int64)
    images = NORMALIZATION.apply(pixels)
    order = rng.permutation(len(labels))
    aux = np.concatenate([order[labels[order] == n][:AUX_PER_CLASS] for n in range(len(CLASSES))])
    write_aux(pixels, labels, aux)
    rest = np.setdiff1d(order, aux)
    held_out, rest = rest[:2000], rest[2000:]

    model = LeNet5()
    untrained = snapshot(model)
    accuracy = train_until(model, images, labels, rest, held_out, rng)
    print(f"trained model: {accuracy:.1%}")
    shares = [rest[part] for part in dirichlet_partition(labels[rest], CLIENTS, ALPHA, seed=SEED)]
    for name, weights, number in (("untrained", untrained, 1), ("trained", snapshot(model), 12)):
        for steps in (1, 10):
            write_round(HERE / f"{name}_m{steps}", weights, number, steps, shares, images, labels, rng)


def write_aux(pixels: torch.Tensor, labels: IntArray, chosen: IntArray) -> None:
    """One folder of PNGs per class."""
    shutil.rmtree(HERE / "aux", ignore_errors=True)
    for n, name in enumerate(CLASSES):
        folder = HERE / "aux" / name
        folder.mkdir(parents=True)
        for number, index in enumerate(chosen[labels[chosen] == n]):
            Image.fromarray(pixels[index, 0].numpy()).save(folder / f"{number:02d}.png", optimize=True)


def train_until(
    model: nn.Module,
    images: torch.Tensor,
    labels: IntArray,
    rest: IntArray,
    held_out: IntArray,
    rng: np.random.Generator,
) -> float:
    """Train centrally, standing in for earlier rounds, until the held-out accuracy is reached."""
    while True:
        with torch.inference_mode():
            predicted = model(images[held_out]).argmax(dim=1).numpy()
        accuracy = float(np.mean(predicted == labels[held_out]))
        if accuracy >= TRAINED_ACCURACY:
            return accuracy
        training = LocalTraining(steps=10, batch_size=BATCH_SIZE, lr=LR)
        train(model, training, list(step_indices(rest, 10, BATCH_SIZE, rng=rng)), images, labels)


def train(
    model: nn.Module,
    training: LocalTraining,
    steps: list[IntArray],
    images: torch.Tensor,
    labels: IntArray,
) -> None:
    """Local training on the given samples."""
    local_training(model, ((images[rows], torch.from_numpy(labels[rows])) for rows in steps), training)


def write_round(
    folder: Path,
    weights: dict[str, torch.Tensor],
    number: int,
    steps: int,
    shares: list[IntArray],
    images: torch.Tensor,
    labels: IntArray,
    rng: np.random.Generator,
) -> None:
    """One round: what the server sent, what three clients sent back, and what they trained on."""
    folder.mkdir(exist_ok=True)
    about = {
        "fl.arch": "lenet5:activation=relu,image_size=28x28,in_channels=1,num_classes=10",
        "fl.class_names": json.dumps(CLASSES),
        "fl.normalize": str(NORMALIZATION),
        "fl.round": str(number),
    }
    save_safetensors(folder / "global.safetensors", weights, about)
    training = LocalTraining(steps=steps, batch_size=BATCH_SIZE, lr=LR)
    truth = {}
    for client, share in enumerate(shares[:SHOWN]):
        chosen = list(step_indices(share, steps, BATCH_SIZE, rng=rng))
        model = LeNet5()
        model.load_state_dict(weights)
        train(model, training, chosen, images, labels)
        local = {
            **about,
            "fl.client": f"client_{client}",
            "fl.scheme": "fedavg",
            "fl.optimizer": "sgd",
            "fl.lr": str(LR),
            "fl.batch_size": str(BATCH_SIZE),
            "fl.steps": str(steps),
        }
        save_safetensors(folder / f"client_{client}.safetensors", snapshot(model), local)
        counts = [np.bincount(labels[rows], minlength=len(CLASSES)) for rows in chosen]
        truth[f"client_{client}"] = {"counts": np.sum(counts, axis=0).tolist()}
    write_text(folder / "truth.json", json.dumps({"clients": truth}, indent=2) + "\n")


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


if __name__ == "__main__":
    main()
