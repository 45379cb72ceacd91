"""Independent random streams, so that no draw depends on how many another one made."""

from __future__ import annotations

import numpy as np

SPLIT, SHARES, SAMPLING, BATCHES, NOISE, LAYERS = range(6)


def stream_seed(seed: int, purpose: int, *key: int) -> int:
    """A seed of its own for each purpose, round and client, from the simulation's one seed."""
    state = np.random.SeedSequence((seed, purpose, *key)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
