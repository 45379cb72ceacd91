"""Fits to a global model: made once, the last used ones kept."""

from __future__ import annotations

import numpy as np
from core_cases import scripted_observation

from rlu_cli.core import fits
from rlu_cli.core.fits import Arrays, Fits
from rlu_cli.core.types import LocalTraining


def pack(fit: str) -> Arrays:
    return {"fit": np.array([float(fit)])}


def test_the_last_used_stay_in_memory() -> None:
    observation, _ = scripted_observation(LocalTraining(1, 8, 0.1), classes=3, size=4)
    kept, made = Fits("of strings", pack), list[int]()

    def get(number: int) -> str:
        def make() -> str:
            made.append(number)
            return str(number)

        return kept.get(observation, {"number": number}, make=make, unpack=lambda arrays: "")

    for number in range(fits._MOST):
        assert get(number) == str(number)
    assert get(0) == "0"  # used again, so that 1 has waited longest
    assert get(fits._MOST) == str(fits._MOST)
    assert made == list(range(fits._MOST + 1))
    assert [get(number) for number in (0, 2, fits._MOST)] == ["0", "2", str(fits._MOST)]
    assert len(made) == fits._MOST + 1
    assert get(1) == "1"
    assert made[-1] == 1
