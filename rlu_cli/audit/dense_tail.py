"""The rectified dense layers before a network's head, as samples and a client's update show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from rlu_cli.audit.network import Network
from rlu_cli.audit.updates import is_exact
from rlu_cli.core.dense_layers import DenseLayer, DenseTail, LayerInputs
from rlu_cli.core.fits import Arrays
from rlu_cli.core.types import Head, HeadUpdate
from rlu_cli.files.state_dict import layer_tensors

_MOST_LAYERS = 4
"""Two are searched, and two more may be too small for it."""

_MOST_NUMBERS = 2_500_000
"""Weights of a layer whose singular vectors take less than seconds."""

_MOST_SAMPLES = 2000
"""Auxiliary samples whose inputs are kept."""

_EQUAL = 1e-5
"""Relative difference up to which one layer's input is another one's rectified output."""


@dataclass(frozen=True, eq=False)
class DenseLayers:
    """The layers of a `DenseTail` by their names in checkpoints, with the samples' inputs to them, in order.

    inputs : of each layer, shape (M, d), float32; none where a network has no such layers
    """

    inputs: Mapping[str, Tensor]

    @cached_property
    def _shared(self) -> dict[str, LayerInputs]:
        return {name: LayerInputs(x) for name, x in self.inputs.items()}

    def tail(
        self,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        constants: Mapping[str, Tensor] | None = None,
    ) -> DenseTail | None:
        """With a client's update; None where numbers are missing or coarser than float32.

        Parameters
        ----------
        before, after : tensors of the global and the local model
        constants : what the scheme adds to every gradient, of all parameters, None where nothing
        """
        layers = []
        for name, inputs in self._shared.items():
            parts = layer_tensors(name)
            if not all(part in before and part in after for part in parts):
                return None
            if any(not is_exact(tensors[part]) for tensors in (before, after) for part in parts):
                return None
            weight, bias = (before[part].double().cpu() for part in parts)
            moved = [after[part].double().cpu() - before[part].double().cpu() for part in parts]
            added = None if constants is None else [constants[part].double().numpy() for part in parts]
            layers.append(
                DenseLayer(
                    Head(weight.numpy(), bias.numpy()),
                    HeadUpdate(moved[0].numpy(), moved[1].numpy()),
                    inputs,
                    None if added is None else Head(added[0], added[1]),
                )
            )
        return DenseTail(tuple(layers)) if layers else None

    @property
    def tensors(self) -> list[str]:
        """What `tail` reads of either model, by name."""
        return [part for name in self.inputs for part in layer_tensors(name)]

    def arrays(self) -> Arrays:
        """Of which `from_arrays` makes them again."""
        numbered = {f"{place} {name}": x.numpy() for place, (name, x) in enumerate(self.inputs.items())}
        return {**numbered, "layers": np.array([len(numbered)])}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> DenseLayers:
        """From a file; raises KeyError or ValueError where that can't be one."""
        count = int(arrays["layers"][0])
        names = sorted(name for name in arrays if name != "layers")
        inputs = {name.partition(" ")[2]: torch.from_numpy(arrays[name]) for name in names}
        sound = all(x.dim() == 2 and bool(torch.isfinite(x).all()) for x in inputs.values())
        if not sound or len(inputs) != count or len({len(x) for x in inputs.values()}) > 1:
            raise ValueError("inputs are not what was written")
        return cls(inputs)


def find_dense_layers(network: Network, run: Callable[[], object]) -> DenseLayers:
    """The last linear layers with biases whose rectified output the next one reads.

    Which layer reads what shows in the numbers: the inputs of all linear layers are kept as the images pass.

    Parameters
    ----------
    run : passes the auxiliary images through the network's global weights
    """
    head = network.layer.name
    modules = {name: m for name, m in network.model.named_modules() if isinstance(m, nn.Linear)}
    if head not in modules:
        return DenseLayers({})
    with _inputs(modules) as seen:
        run()
    chain: list[str] = []
    following = head
    while len(chain) < _MOST_LAYERS:
        found = [name for name in modules if _feeds(modules[name], seen.get(name), seen.get(following))]
        if len(found) != 1 or found[0] in (head, *chain):
            break
        following = found[0]
        chain.insert(0, following)
    return DenseLayers({name.removeprefix(network.prefix): _some(torch.cat(seen[name])) for name in chain})


@contextmanager
def _inputs(modules: dict[str, nn.Linear]) -> Iterator[dict[str, list[Tensor]]]:
    """What the layers read while this lasts, batch by batch."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args and args[0].dim() == 2:
                seen.setdefault(name, []).append(args[0].detach().cpu())

        return hook

    with ExitStack() as hooks:
        for name, module in modules.items():
            if module.weight.numel() <= _MOST_NUMBERS:
                hooks.callback(module.register_forward_pre_hook(keep(name)).remove)
        yield seen


def _feeds(layer: nn.Linear, inputs: list[Tensor] | None, read: list[Tensor] | None) -> bool:
    """Whether what was ``read`` is the rectified output of the layer."""
    if layer.bias is None or not inputs or not read or len(inputs) != len(read):
        return False
    weight, bias = layer.weight.detach().cpu(), layer.bias.detach().cpu()
    first, expected = inputs[0], read[0]
    if expected.shape != (len(first), len(weight)):
        return False
    output = torch.nn.functional.linear(first, weight, bias).clamp(min=0)
    size = float(output.abs().max())
    return size > 0 and bool((output - expected).abs().max() <= _EQUAL * size)


def _some(inputs: Tensor) -> Tensor:
    """Rows spread evenly over all samples."""
    rows = np.unique(np.linspace(0, len(inputs) - 1, min(len(inputs), _MOST_SAMPLES)).astype(int))
    return inputs[torch.from_numpy(rows)]
