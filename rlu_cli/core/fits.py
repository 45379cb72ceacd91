"""What methods fit to a global model once, for all of its clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rlu_cli.core.types import FloatArray, ModelStatistics, Observation

Arrays = Mapping[str, NDArray[Any]]
"""The numbers that a fit consists of."""

T = TypeVar("T")

_MOST = 16
"""Fits of a kind to one global model that stay in memory, the last used: those of `replay` are tens of
megabytes each, and where rates are estimated or schemes remember every client has one of its own."""


class FitStore(Protocol):
    """Keeps fits to one global model between runs, by all else that they follow from, as JSON values."""

    def read(self, facts: Mapping[str, Any], unpack: Callable[[Arrays], T]) -> T | None:
        """The fit, or None where none is kept, or numbers from which ``unpack`` can't make one."""

    def write(self, facts: Mapping[str, Any], arrays: Arrays) -> None:
        """Keep a fit."""


class Fits(Generic[T]):
    """The fits of one kind, to any global models.

    Parameters
    ----------
    kind : names it among the facts
    pack : the numbers of a fit
    """

    def __init__(self, kind: str, pack: Callable[[T], Arrays]) -> None:
        self._kind, self._pack = kind, pack
        self._known: WeakKeyDictionary[ModelStatistics, dict[str, T]] = WeakKeyDictionary()

    def get(
        self,
        observation: Observation,
        values: Mapping[str, Any],
        *,
        make: Callable[[], T],
        unpack: Callable[[Arrays], T],
    ) -> T:
        """The fit to the observation's global model, made only if it is nowhere known.

        Parameters
        ----------
        values : all that it follows from beside the global model, the auxiliary data and the settings
        unpack : the fit of packed numbers, with ValueError or KeyError where they can't be one
        """
        facts = {"fit": self._kind, **values}
        key = json.dumps(facts, sort_keys=True)
        known = self._known.setdefault(observation.start, {})
        fit = known.pop(key, None)
        if fit is None:
            store = observation.fits
            fit = None if store is None else store.read(facts, unpack)
            if fit is None:
                fit = make()
                if store is not None:
                    store.write(facts, self._pack(fit))
        known[key] = fit  # the last
        if len(known) > _MOST:
            del known[next(iter(known))]
        return fit


def checked(arrays: Arrays, name: str, shape: tuple[int | None, ...]) -> FloatArray:
    """One of the arrays as float64, finite and of this shape; None stands for any length but zero.

    Raises
    ------
    KeyError, ValueError
    """
    array = np.asarray(arrays[name], dtype=np.float64)
    fits = array.ndim == len(shape) and all(
        found > 0 if wanted is None else found == wanted
        for found, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits or not np.isfinite(array).all():
        raise ValueError(f"{name} is not what was written")
    return array
