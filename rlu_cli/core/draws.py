"""The normal numbers of the Monte Carlo integrals: few, and spread evenly."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from rlu_cli.core.parallel import for_each
from rlu_cli.core.types import FloatArray

_FRAMES = 10
"""Independent frames, at least (where there are as many draws): the standard error is from their spread."""

_FRAME_ROWS = 2048
"""Rows of a frame, at most: its evenness gains nothing from more."""


def frame_shape(pairs: int) -> tuple[int, int]:
    """Frames, and rows of each, for at least ``pairs`` draws in all."""
    frames = max(min(_FRAMES, pairs), 2, -(-pairs // _FRAME_ROWS))
    return frames, -(-pairs // frames)


@lru_cache(maxsize=4)
def paired_normals(pairs: int, rank: int, seed: int, device: str = "cpu") -> torch.Tensor:
    """Standard normal vectors, to be used with both signs, in independent frames.

        ξ_i = χ_p q_i,     q_i the rows of a random orthonormal frame, p = max(rows, rank)

    A frame is the orthonormal factor of a rows × rank Gaussian matrix (columns orthonormal or, where there
    are fewer rows than columns, the rows), so it is uniformly distributed: the direction of q_i is uniform
    and ‖q_i‖² is Beta(rank/2, (p − rank)/2), independently of it. With an independent χ²_p on top each ξ_i
    is N(0, I) exactly, and means over the draws are unbiased. Yet within a frame Σ_i ξ_i ξ_iᵀ / rows is
    nearly I, so terms of second order of the integrand come out right, as by a second-order Taylor control
    variate, and the odd ones cancel between +ξ and −ξ. Different frames are independent. (Orthogonal Monte
    Carlo: Yu et al., Orthogonal Random Features, NIPS 2016.)

    They are drawn on the CPU, so that every device sees the same ones, moved to the device at once, and
    kept for the next models: pairs · rank numbers, where the integrals take pairs · rank · N².

    Returns
    -------
    Tensor
        Shape (frames, rows, rank) of `frame_shape`, float32.
    """
    frames, rows = frame_shape(pairs)
    draws = np.empty((frames, rows, rank), dtype=np.float32)

    def work(frame: int) -> None:
        rng = np.random.default_rng((seed, frame))
        gaussian = rng.standard_normal((rows, rank))
        radius = np.sqrt(rng.chisquare(max(rows, rank), size=(rows, 1)))
        draws[frame] = radius * _orthonormal(gaussian)

    for_each(work, range(frames))
    return torch.from_numpy(draws).to(device)


def _orthonormal(gaussian: FloatArray) -> FloatArray:
    """Q of G = Q R or, where G is wider than tall, of Gᵀ = Qᵀ R, with a positive diagonal of R."""
    rows, rank = gaussian.shape
    if rows < rank:
        return np.asarray(_orthonormal(gaussian.T).T)
    Q, R = torch.linalg.qr(torch.from_numpy(gaussian))
    return np.asarray(Q * torch.diagonal(R).sign(), dtype=np.float64)
