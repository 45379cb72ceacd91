"""How a data set is shared out among clients."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.types import IntArray


def dirichlet_partition(labels: IntArray, clients: int, alpha: float, *, seed: int) -> list[IntArray]:
    """Label-skewed shares (paper, appendix; Yurochkin et al. 2019).

        p^(j) ~ Dir_K(α),     N_k^(j) = p_k^(j) N^(j)

    Each class j is shared out among the K clients in proportions drawn from a symmetric Dirichlet
    distribution: the smaller α, the fewer classes a client has. Every sample goes to exactly one client.

    Parameters
    ----------
    labels : shape (M,)
    clients : K
    alpha : α > 0
    seed : of the proportions and of which samples go where

    Returns
    -------
    list of K sorted index arrays; a client may get none at small α
    """
    if clients < 1 or not alpha > 0:
        raise ValueError(f"expected at least one client and a positive alpha, got {clients} and {alpha}")
    rng = np.random.default_rng(seed)
    shares: list[list[IntArray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        sizes = round_to_total(rng.dirichlet(np.full(clients, alpha)), len(members))
        for share, part in zip(shares, np.split(members, np.cumsum(sizes)[:-1]), strict=True):
            share.append(part)
    return [np.sort(np.concatenate(share)).astype(np.int64) for share in shares]
