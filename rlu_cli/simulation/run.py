"""Federated training from images to an archive."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlu_cli.audit.annotations import Annotations
from rlu_cli.audit.devices import choose_device
from rlu_cli.audit.history import GLOBAL_STEM, SERVER_CONTROL_STEM
from rlu_cli.audit.ignored_flags import refuse_ignored
from rlu_cli.audit.network import named_tensors
from rlu_cli.audit.options import HistoryOptions, TrainingOptions
from rlu_cli.audit.training import resolve_training
from rlu_cli.core.schemes import step_rates
from rlu_cli.core.types import IntArray, LocalTraining
from rlu_cli.errors import MismatchError, UsageError
from rlu_cli.files.checkpoint import Checkpoint, read_checkpoint
from rlu_cli.files.text import one_line
from rlu_cli.images import ImageSet, parse_normalization
from rlu_cli.models import ModelSpec, build_model, flatten_logits, load_weights, parse_spec
from rlu_cli.simulation import archive
from rlu_cli.simulation.client import epoch_indices, local_training, single_images_refused, step_indices
from rlu_cli.simulation.data import FederatedData, data_digest
from rlu_cli.simulation.randomness import BATCHES, LAYERS, NOISE, SAMPLING, stream_seed
from rlu_cli.simulation.server import Contribution, Server
from rlu_cli.simulation.settings import Simulation, check_options, defence_of, training_annotations
from rlu_cli.simulation.vectors import Layout, snapshot

_EVALUATION_BATCH = 500
_LENET_SIDE = 12
"""Smaller images (scikit-learn's digits) need more than LeNet-5's usual padding of 2."""


@dataclass(frozen=True)
class RoundReport:
    """One finished round: who took part, and how good its global model was before."""

    number: int
    accuracy: float
    clients: tuple[str, ...]
    resumed: bool


class Simulator:
    """Runs a `Simulation` into a folder, or goes on where an earlier run stopped.

    Every random choice follows from the seed, the round and the client alone, so a resumed run writes the
    same bytes as one that was never stopped. What a scheme remembers is not stored: it is made again from
    the archived checkpoints, as an auditor would.

    Parameters
    ----------
    simulation : the full description
    images : the data
    root : where the archive goes
    start : weights of the first global model, by the model's own names or as a file has them; None for a
        fresh model
    allow_user_code : whether the architecture may be the user's own code
    """

    def __init__(
        self,
        simulation: Simulation,
        images: ImageSet,
        root: Path,
        *,
        start: Mapping[str, Tensor] | Checkpoint | None = None,
        allow_user_code: bool = False,
        device: str = "auto",
    ) -> None:
        check_options(simulation.options)
        self.simulation, self.options, self.root = simulation, simulation.options, root
        self.device = torch.device(choose_device(device))
        normalization = parse_normalization(simulation.normalize)
        self._digest = data_digest(images)
        self.data = FederatedData(
            images, normalization, simulation.options, seed=simulation.seed, device=self.device
        )
        spec = complete_spec(simulation.arch, self.data)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(simulation.seed)
            self.model = build_model(spec, allow_user_code=allow_user_code)
        if isinstance(start, Checkpoint):
            start = named_tensors(start, self.model)
        if start is not None:
            load_weights(self.model, start, where="the initial checkpoint")
        self.model.to(self.device)
        self._check_model()
        self.layout = Layout(self.model)
        self.about = {
            "fl.arch": str(spec),
            "fl.class_names": json.dumps(list(self.data.names)),
            "fl.normalize": str(normalization),
            "fl.image_size": "x".join(map(str, self.data.shape[1:])),
        }
        state = snapshot(self.model)
        self.server = Server(
            self.layout.flatten(state).to(self.device),
            self._buffers(state),
            clients=self.options.clients,
            scheme=self._scheme(),
        )

    def _check_model(self) -> None:
        """Refuse a model that can't read the images, has no output for some class, or nothing to train.

        Raises
        ------
        MismatchError
        """
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise MismatchError(
                "expected a model with weights to train, found all of them frozen: correct --arch"
            )
        images, _ = self.data.batch(np.resize(self.data.test, 2))
        self.model.eval()
        with torch.inference_mode():
            try:
                answer = self.model(images)
            except Exception as error:
                raise MismatchError(
                    f"the model can't read images of shape {tuple(images.shape[1:])} (channels, height, "
                    f"width): {type(error).__name__}: {one_line(error)}. Correct --arch, or use other data"
                ) from error
        outputs = flatten_logits(answer).shape[1]
        if outputs < len(self.data.names):
            raise MismatchError(
                f"expected a model with an output for each of {len(self.data.names)} classes, found "
                f"{outputs}: correct --arch"
            )

    def run(self) -> Iterator[RoundReport]:
        """Simulate round by round; each is complete in the archive when its report comes.

        Raises
        ------
        MismatchError
            The folder holds an archive of another simulation or of other data, or other files.
        """
        archive.claim(self.root, self.simulation, self._digest)
        self.data.write_aux(self.root / archive.AUX)
        lines = archive.read_truth_lines(self.root)
        for number in range(1, self.options.rounds + 1):
            participants = self._participants(number)
            names = tuple(archive.client_name(k) for k in participants)
            done = [line for line in lines if line.round == number]
            resumed = tuple(line.client for line in done) == names
            if resumed:
                self._replay(number, participants)
            else:
                done = self._play(number, participants)
                lines = [line for line in lines if line.round < number] + done
                archive.write_truth(self.root, lines)
            yield RoundReport(number, done[0].accuracy, names, resumed)
        if not lines or lines[-1].round == self.options.rounds:  # not a prefix of a longer archive
            archive.save_model(self.root / "final.safetensors", self._global_state(), self.about)

    def accuracy(self) -> float:
        """Share of the held-out images that the global model gets right."""
        self._load_global()
        self.model.eval()
        test, right = self.data.test, 0
        with torch.inference_mode():
            for rows in np.split(test, range(_EVALUATION_BATCH, len(test), _EVALUATION_BATCH)):
                images, labels = self.data.batch(rows)
                right += int((flatten_logits(self.model(images)).argmax(dim=1) == labels).sum())
        return right / len(test)

    # One round.

    def _play(self, number: int, participants: Sequence[int]) -> list[archive.TruthLine]:
        folder = archive.round_folder(self.root, number)
        about = {**self.about, "fl.round": str(number)}
        archive.save_model(folder / f"{GLOBAL_STEM}.safetensors", self._global_state(), about)
        if self.server.scheme == "scaffold":
            control = {name: part.cpu() for name, part in self.layout.split(self.server.control).items()}
            archive.save_model(folder / f"{SERVER_CONTROL_STEM}.safetensors", control, about)
        accuracy = self.accuracy()
        contributions, lines = [], []
        for client in participants:
            name = archive.client_name(client)
            training, batches = self._plan(number, client)
            sent = self._train(number, client, training, batches)
            size = len(self.data.shares[client])
            trained = training_annotations(self.simulation, training, size, len(participants))
            archive.save_model(folder / f"{name}.safetensors", sent, {**about, "fl.client": name, **trained})
            contributions.append(self._contribution(client, sent, training))
            steps = [self.data.counts(rows) for rows in batches]
            counts = self.data.counts(np.concatenate(batches))
            lines.append(archive.TruthLine(number, name, counts, steps, accuracy))
        self.server.close_round(contributions)
        return lines

    def _train(
        self, number: int, client: int, training: LocalTraining, batches: Sequence[IntArray]
    ) -> dict[str, Tensor]:
        """The state that the client sends back."""
        self._load_global()
        constant = self.server.constant_gradient(archive.client_name(client), training)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(stream_seed(self.simulation.seed, LAYERS, number, client))  # dropout
            advice = "use --steps, which makes full batches, or another --batch-size"
            with single_images_refused(batches, whose=archive.client_name(client), advice=advice):
                local_training(
                    self.model,
                    (self.data.batch(rows) for rows in batches),
                    training,
                    constant=None if constant is None else self.layout.split(constant),
                )
        state = snapshot(self.model)
        if not all(bool(torch.isfinite(part).all()) for part in state.values()):
            raise MismatchError(
                f"expected training that converges, found NaN or infinity in {archive.client_name(client)} "
                f"of round {number}: lower --lr or take fewer steps, and write to a new folder"
            )
        defence = defence_of(self.options)
        if not defence.active:
            return state
        before = self.server.parameters.cpu()
        generator = torch.Generator().manual_seed(stream_seed(self.simulation.seed, NOISE, number, client))
        sent = before + defence.apply(self.layout.flatten(state) - before, generator)
        return {**state, **{name: part.clone() for name, part in self.layout.split(sent).items()}}

    def _replay(self, number: int, participants: Sequence[int]) -> None:
        """Close an archived round again, from what its clients sent."""
        folder = archive.round_folder(self.root, number)
        contributions = []
        for client in participants:
            stored = read_checkpoint(folder / f"{archive.client_name(client)}.safetensors")
            sent = named_tensors(stored, self.model)  # reading takes a wrapper's prefix off all names
            training = self._training(len(self.data.shares[client]))
            contributions.append(self._contribution(client, sent, training))
        self.server.close_round(contributions)

    def _contribution(self, client: int, sent: Mapping[str, Tensor], training: LocalTraining) -> Contribution:
        weight = float(len(self.data.shares[client])) if self.options.averaging == "size" else 1.0
        parameters = self.layout.flatten(sent).to(self.device)
        return Contribution(archive.client_name(client), parameters, self._buffers(sent), weight, training)

    def _plan(self, number: int, client: int) -> tuple[LocalTraining, list[IntArray]]:
        """How the client trains in this round, and on which samples at each step."""
        share = self.data.shares[client]
        training = self._training(len(share))
        rng = np.random.default_rng(stream_seed(self.simulation.seed, BATCHES, number, client))
        epochs = self.simulation.training.epochs
        if epochs is not None:
            return training, list(epoch_indices(share, epochs, training.batch_size, rng=rng))
        return training, list(step_indices(share, training.steps, training.batch_size, rng=rng))

    def _training(self, size: int) -> LocalTraining:
        """The training values of a client with ``size`` samples."""
        options = TrainingOptions(**vars(self.simulation.training))
        if options.epochs is not None:
            options = replace(options, dataset_size=size)
        return resolve_training(options, Annotations()).training

    def _scheme(self) -> str:
        """The scheme, once the training values are known to be good."""
        if self.simulation.training.steps is not None and self.simulation.training.epochs is not None:
            raise UsageError("expected either --steps or --epochs, found both: leave one out")
        refuse_ignored(self.simulation.training, HistoryOptions(), [Annotations()])
        training = self._training(max(len(share) for share in self.data.shares))
        self._check_rates()
        if training.scheme == "feddyn" and training.prox <= 0:
            raise UsageError("expected a positive --lambda for feddyn, whose server divides by it, found 0")
        return training.scheme

    def _check_rates(self) -> None:
        """Refuse a list of rates that the steps of some client don't fit, whatever round it takes part in.

        Raises
        ------
        MismatchError
        """
        trainings = [self._training(size) for size in {len(share) for share in self.data.shares} if size]
        steps = sorted(training.steps for training in trainings)
        for training in trainings:
            if isinstance(training.lr, tuple) and steps[0] < steps[-1] and len(training.lr) != training.steps:
                raise MismatchError(
                    f"expected one learning rate, since the clients' epochs take {steps[0]} to {steps[-1]} "
                    f"steps, found {len(training.lr)}: pass one --lr, with --lr-decay or not, or --steps"
                )
            step_rates(training)

    def _participants(self, number: int) -> list[int]:
        """Which clients take part: a fixed share of them, among those that have data."""
        able = [k for k, share in enumerate(self.data.shares) if len(share)]
        wanted = min(len(able), max(1, round(self.options.participation * self.options.clients)))
        rng = np.random.default_rng(stream_seed(self.simulation.seed, SAMPLING, number))
        return sorted(int(k) for k in rng.choice(able, size=wanted, replace=False))

    # The model's state.

    def _buffers(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in state.items() if name not in self.layout.shapes}

    def _global_state(self) -> dict[str, Tensor]:
        parts = self.layout.split(self.server.parameters)
        return {**{name: part.cpu().clone() for name, part in parts.items()}, **self.server.buffers}

    def _load_global(self) -> None:
        parts = self.layout.split(self.server.parameters)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(parts[name])
            for name, buffer in self.model.named_buffers():
                if name in self.server.buffers:  # not one that checkpoints leave out
                    buffer.copy_(self.server.buffers[name])


def complete_spec(arch: str, data: FederatedData) -> ModelSpec:
    """The architecture with what the data settle, where it is a built-in: classes, channels, size."""
    spec = parse_spec(arch)
    if spec.kind != "builtin":
        return spec
    channels, height, width = data.shape
    settled: dict[str, object] = {
        "num_classes": len(data.names),
        "in_channels": channels,
        "image_size": (height, width),
        "activation": "relu",
    }
    if spec.target == "lenet5" and min(height, width) < _LENET_SIDE:
        settled["padding"] = (_LENET_SIDE + 5 - min(height, width)) // 2
    return ModelSpec(spec.name, {**settled, **spec.kwargs})
