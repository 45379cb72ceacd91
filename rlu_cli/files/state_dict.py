"""From what a checkpoint holds to one flat dictionary of tensors under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.text import names
from rlu_cli.files.weight_norm import join_weight_norm

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PREFIXES",
    "WRAPPERS",
    "float_difference",
    "has_key",
    "is_flat",
    "join_weight_norm",
    "layer_tensors",
    "strip_prefixes",
    "unwrap",
]

WRAPPERS = ("state_dict", "model", "model_state_dict", "net", "params", "weights", "model_weights")
"""Keys under which tools put the weights, in order of preference."""
PREFIXES = ("module.", "_orig_mod.", "_module.", "_fsdp_wrapped_module.", "model.")
"""What wrappers (DDP, torch.compile, Opacus, FSDP, Lightning) put before every name."""
_AVERAGED = "n_averaged"
_DEPTH = 4


def layer_tensors(layer: str) -> tuple[str, str]:
    """The names of a layer's weight and bias; a layer that was saved alone has no name."""
    prefix = f"{layer}." if layer else ""
    return f"{prefix}weight", f"{prefix}bias"


def _tensor_count(value: object) -> int:
    import torch

    return sum(isinstance(item, torch.Tensor) for item in value.values()) if isinstance(value, Mapping) else 0


def _dictionaries(
    value: Mapping[Any, Any], prefix: str = "", depth: int = _DEPTH, seen: dict[int, int] | None = None
) -> Iterator[str]:
    """Dotted paths of all dictionaries that hold tensors, for messages.

    seen : how deep was looked below each dictionary; those that hold one another have no end of paths
    """
    seen = {} if seen is None else seen
    for key, item in value.items():
        if isinstance(key, str) and isinstance(item, Mapping):
            if _tensor_count(item):
                yield prefix + key
            if depth > 1 and seen.get(id(item), 1) < depth:
                seen[id(item)] = depth
                yield from _dictionaries(item, f"{prefix}{key}.", depth - 1, seen)


def _descend(value: object, key: str, depth: int = 8) -> object | None:
    """What lies under a dotted path; keys may contain dots themselves. None where nothing does."""
    if not isinstance(value, Mapping) or depth == 0:
        return None
    if key in value:
        found: object = value[key]
        return found
    for cut in (position for position, letter in enumerate(key) if letter == "."):
        if isinstance(value.get(key[:cut]), Mapping):
            deeper = _descend(value[key[:cut]], key[cut + 1 :], depth - 1)
            if deeper is not None:
                return deeper
    return None


def _numbered(value: object) -> dict[str, Any] | None:
    """A list of tensors alone, named by position as NumPy would."""
    import torch

    if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
        return {f"arr_{index}": item for index, item in enumerate(value)}
    return None


def _under(obj: object, key: str) -> tuple[dict[str, Any], str] | None:
    """The tensors under a key, or whose names begin with it, and a note; None where there are none."""
    found = _descend(obj, key)
    numbered = _numbered(found)
    if numbered is not None:
        return numbered, f"read from {key!r}"
    if isinstance(found, Mapping) and _tensor_count(found):
        return dict(found), f"read from {key!r}"
    if isinstance(obj, Mapping):
        inner = {name[len(key) + 1 :]: v for name, v in obj.items() if str(name).startswith(f"{key}.")}
        if _tensor_count(inner):
            return inner, f"read the tensors under {key!r}"
    return None


def has_key(obj: object, key: str) -> bool:
    """Whether there are tensors under ``key``."""
    return _under(obj, key) is not None


def is_flat(obj: object) -> bool:
    """Whether ``obj`` is tensors alone, without dictionaries of tensors in it to choose among."""
    return not isinstance(obj, Mapping) or next(_dictionaries(obj), None) is None


def _by_key(obj: object, key: str) -> tuple[dict[str, Any], list[str]]:
    under = _under(obj, key)
    if under is not None:
        return under[0], [under[1]]
    if not is_flat(obj):
        assert isinstance(obj, Mapping)
        hint = f"the keys that have some are {names(_dictionaries(obj), 12)}"
    else:
        hint = f"nothing is nested in it{_beginnings(obj)}, so leave out --key"
    raise FileError(f"expected tensors under the key {key!r}, found none; {hint}.")


def _beginnings(obj: object) -> str:
    """What the names of a flat checkpoint begin with."""
    if not isinstance(obj, Mapping):
        return ""
    return f" (its names begin with {names(dict.fromkeys(str(key).split('.')[0] for key in obj))})"


def _find(obj: Mapping[Any, Any], depth: int = _DEPTH) -> tuple[Mapping[Any, Any], str, list[str]] | None:
    """The weights inside ``obj``, the path to them, and the rival wrapper keys passed over."""
    candidates: list[tuple[Mapping[Any, Any], str, list[str]]] = []
    for wrapper in WRAPPERS:
        value = obj.get(wrapper)
        if isinstance(value, Mapping) and depth > 0:
            inner = _find(value, depth - 1)
            if inner is not None:
                candidates.append((inner[0], f"{wrapper}.{inner[1]}".rstrip("."), inner[2]))
    if candidates and _tensor_count(candidates[0][0]) >= _tensor_count(obj):
        found, path, rivals = candidates[0]
        return found, path, rivals + [other[1] for other in candidates[1:]]
    return (obj, "", []) if _tensor_count(obj) else None


def unwrap(obj: object, key: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The dictionary of tensors inside a loaded checkpoint, and notes on how it was found.

    With ``key``, a name or dotted path, exactly that is taken. Otherwise a nested dictionary under one of
    ``WRAPPERS`` wins over the top level unless the top level holds more tensors. Averaged weights
    (``state_dict_ema``, …) are only ever taken by ``key``. Values that aren't tensors are kept here.

    Raises:
        FileError: No tensors there; the message lists what is.
    """
    if key is not None:
        return _by_key(obj, key)
    numbered = _numbered(obj)
    if numbered is not None:
        return numbered, ["a list of tensors without names"]
    if not isinstance(obj, Mapping):
        raise FileError(f"expected a dictionary of tensors, found {type(obj).__name__}.")
    found = _find(obj)
    others = list(_dictionaries(obj))
    if found is None:
        keys = f"found the keys {names(obj, 12)}" if obj else "found an empty dictionary"
        hint = f"; tensors lie under {names(others, 12)}, so name one with --key" if others else ""
        raise FileError(f"expected a dictionary of tensors, {keys} and no tensors there{hint}.")
    weights, path, rivals = found
    notes = [f"read from {path!r}"] if path else []
    if rivals:
        notes.append(f"not read, though they hold tensors too: {names(rivals)}")
    averaged = [name for name in others if "ema" in name.lower().replace(".", "_").split("_")]
    if averaged:
        notes.append(f"averaged weights are there too, under {names(averaged)}; --key reads them")
    return dict(weights), notes


def strip_prefixes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Names without the wrappers' prefixes that every one of them has, and what was cut off.

    ``n_averaged``, which ``AveragedModel`` puts beside ``module.…``, doesn't count as a name and goes too.
    """
    current = dict(tensors)
    stripped = ""
    while current:
        keys = [key for key in current if key != _AVERAGED]
        shared = [
            p for p in PREFIXES if keys and all(key.startswith(p) and len(key) > len(p) for key in keys)
        ]
        if not shared or (_AVERAGED in current and shared[0] != "module."):
            break
        prefix = shared[0]
        current = {key[len(prefix) :]: current[key] for key in keys}
        stripped += prefix
    return current, stripped


def float_difference(local: Tensor, global_: Tensor) -> Tensor:
    """``local − global`` in float64, upcast before subtracting so that half precision loses nothing more.

    Raises:
        MismatchError: The shapes differ.
    """
    import torch

    if local.shape != global_.shape:
        raise MismatchError(
            f"expected tensors of one shape, found {tuple(local.shape)} and {tuple(global_.shape)}."
        )
    return local.detach().cpu().to(torch.float64) - global_.detach().cpu().to(torch.float64)
