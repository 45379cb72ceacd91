"""A small network from updates to label counts, fitted to clients that were made up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adam import adam

from rlu_cli.core.fits import Arrays, checked
from rlu_cli.core.parallel import one_thread
from rlu_cli.core.progress import Progress, ignore
from rlu_cli.core.synthetic_clients import SyntheticClients
from rlu_cli.core.types import FloatArray

_SCALES = (0.1, 0.01)
"""Features are seen at these shares of their standard deviation too: a class that the model knows well
leaves a small mark, but an exact one."""

_WIDTH = 192
_DEPTH = 3
_BATCH = 1024
_EPOCHS, _MOST_EPOCHS, _STEPS = 2, 8, 300
"""Passes over the clients: more than two where they make fewer steps, and never so many that it learns them
by heart."""

_MATRIX_RATE, _RATE = 0.04, 4e-3
_MOMENTUM = 0.95
_WARM_UP, _COOL_DOWN = 0.1, 0.6
_EDGE = 0.025
_TAILS, _THERE = 4.0, 0.05
"""Weights of the loss of the bounds and of presence beside that of the proportions."""


@dataclass(frozen=True)
class Prediction:
    """What the network says of clients, each of shape (S, N).

    proportions : z, on the simplex
    low, high : the 2.5 % and 97.5 % quantiles of each class's proportion
    presence : probability that there is any sample of the class
    """

    proportions: FloatArray
    low: FloatArray
    high: FloatArray
    presence: FloatArray


class Regressor:
    """z, its bounds and the presence of each class, as functions of an update's features.

    The input is every feature f, centred and divided by its standard deviation σ, and asinh(f/(aσ)) for two
    small a. Three layers of 192 follow. The loss is

        ‖p − z‖₁ + 4 Σ_n (pinball_{2.5 %}(low_n) + pinball_{97.5 %}(high_n)) + 0.05 · presence's cross-entropy

    whose minimum is the median and the quantiles of z given the update, under the law that the clients were
    drawn from. Matrices take orthogonalised momentum steps (Muon, Jordan et al. 2024), which get further
    with as many clients than Adam's; the biases take Adam's. Deterministic by ``seed``. It runs on the CPU,
    wherever the models do: training amplifies rounding, and counts shouldn't depend on the device.

    Parameters
    ----------
    mean, scale : of the features, by which they are standardised, shape (F,)
    model : from the inputs to what `_parts` takes apart
    """

    def __init__(self, mean: Tensor, scale: Tensor, model: nn.Sequential) -> None:
        self._mean, self._scale, self._model = mean, scale, model

    @classmethod
    def fitted(cls, clients: SyntheticClients, *, seed: int, progress: Progress = ignore) -> Regressor:
        """Learnt from these clients; ``progress`` is told of the steps taken, and how many there will be."""
        features = clients.features
        scale = features.std(dim=0)
        floor = max(1e-4 * float(scale.mean()), 1e-12)
        model = _network(features.shape[1], clients.counts.shape[1], seed)
        regressor = cls(features.mean(dim=0), torch.clamp(scale, min=floor), model)
        proportions = clients.counts / clients.counts.sum(axis=1, keepdims=True)
        with one_thread():  # a network as small as this waits longer for its threads than it computes
            regressor._fit(features, torch.from_numpy(proportions.astype(np.float32)), seed, progress)
        return regressor

    def arrays(self) -> Arrays:
        """Of which `from_arrays` makes it again."""
        weights = {name: value.detach().numpy() for name, value in self._model.state_dict().items()}
        return {**weights, "mean": self._mean.numpy(), "scale": self._scale.numpy()}

    @classmethod
    def from_arrays(cls, arrays: Arrays, features: int, classes: int) -> Regressor:
        """From a file, for so many features and classes.

        Raises
        ------
        KeyError, ValueError
            The arrays aren't such.
        """
        model = _network(features, classes, seed=0)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        shapes |= {"mean": (features,), "scale": (features,)}
        found = {
            name: torch.from_numpy(checked(arrays, name, shape).astype(np.float32))
            for name, shape in shapes.items()
        }
        mean, scale = found.pop("mean"), found.pop("scale")
        if not bool((scale > 0).all()):
            raise ValueError("the scale is not positive")
        model.load_state_dict(found)
        return cls(mean, scale, model)

    def __call__(self, features: Tensor) -> Prediction:
        """For clients' features, shape (S, N + N²)."""
        with torch.no_grad():
            found = [part.double().numpy() for part in _parts(self._model(self._inputs(features)))]
        point, low, high, presence = found
        return Prediction(point, low, high, 1.0 / (1.0 + np.exp(-presence)))

    def strangeness(self, features: Tensor) -> FloatArray:
        """Mean square of the standardised features, shape (S,): 1 on average over the clients fitted to."""
        scaled = (features - self._mean) / self._scale
        return np.asarray(scaled.square().mean(dim=1).double().numpy())

    def _inputs(self, features: Tensor) -> Tensor:
        seen = [(features - self._mean) / self._scale]
        for share in _SCALES:
            seen.append(torch.asinh(features / (self._scale * share)) / float(np.arcsinh(1 / share)))
        return torch.cat(seen, dim=1)

    def _fit(self, features: Tensor, proportions: Tensor, seed: int, progress: Progress) -> None:
        parameters = list(self._model.parameters())
        matrices = _Matrices([p for p in parameters if p.ndim == 2])
        others = _Others([p for p in parameters if p.ndim != 2])
        order = torch.Generator().manual_seed(seed)
        batches = max(len(features) // _BATCH, 1)
        steps = min(max(_EPOCHS * batches, _STEPS), _MOST_EPOCHS * batches)
        for step in range(steps):
            if step % batches == 0:
                rows = torch.randperm(len(features), generator=order)
            taken = rows[step % batches :: batches]
            loss = _loss(self._model(self._inputs(features[taken])), proportions[taken])
            for parameter, found in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = found
            done = (step + 0.5) / steps
            pace = min(1.0, done / _WARM_UP, (1 - done) / _COOL_DOWN)
            matrices.step(pace * _MATRIX_RATE)
            others.step(pace * _RATE)
            progress(step + 1, steps)


def _network(features: int, classes: int, seed: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    width = (1 + len(_SCALES)) * features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(_DEPTH):
            layers += [nn.Linear(width, _WIDTH), nn.SiLU()]
            width = _WIDTH
        return nn.Sequential(*layers, nn.Linear(width, 4 * classes))


def _parts(raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Proportions, low and high around them, and the logit of presence."""
    point, below, above, presence = raw.chunk(4, dim=1)
    z = torch.softmax(point, dim=1)
    centre = z.detach()  # so that the bounds don't draw the proportions
    return z, centre * torch.sigmoid(below), centre + (1 - centre) * torch.sigmoid(above - 2.0), presence


def _loss(raw: Tensor, true: Tensor) -> Tensor:
    z, low, high, presence = _parts(raw)
    tails = _pinball(true - low, _EDGE) + _pinball(true - high, 1 - _EDGE)
    there = functional.binary_cross_entropy_with_logits(presence, (true > 0).float(), reduction="none")
    return ((z - true).abs() + _TAILS * tails + _THERE * there).sum(dim=1).mean()


def _pinball(excess: Tensor, level: float) -> Tensor:
    return torch.maximum(level * excess, (level - 1) * excess)


class _Matrices:
    """Each matrix moves by its momentum with singular values nearer to 1 (Newton–Schulz).

    Three rounds instead of Muon's five: they learn as well, and cost as much as the gradients already.
    """

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self._moved = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]

    def step(self, rate: float) -> None:
        for matrix, momentum in self._moved:
            self._step(matrix, momentum, rate)

    @staticmethod
    @torch.no_grad()
    def _step(matrix: nn.Parameter, momentum: Tensor, rate: float) -> None:
        assert matrix.grad is not None
        momentum.mul_(_MOMENTUM).add_(matrix.grad)
        way = matrix.grad + _MOMENTUM * momentum
        tall = way.shape[0] > way.shape[1]
        X = (way.T if tall else way) / (torch.linalg.norm(way) + 1e-12)
        for _ in range(3):
            A = X @ X.T
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        stretch = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
        matrix.sub_(X.T if tall else X, alpha=rate * stretch)


class _Others:
    """Adam with torch's defaults, by its functional form: the class would load torch's compiler."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._mean = [torch.zeros_like(p) for p in parameters]
        self._square = [torch.zeros_like(p) for p in parameters]
        self._steps = [torch.tensor(0.0) for _ in parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        adam(
            list(self._parameters),
            [p.grad for p in self._parameters if p.grad is not None],
            self._mean,
            self._square,
            [],
            self._steps,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
