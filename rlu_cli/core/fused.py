"""What `SoftmaxExpectation` does to a block of logits, in one GPU kernel that reads them once (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32
"""Draws that one program of the kernel sums up."""

_TILE = 4096
"""Logits that it holds at once, in registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x, weights, sums, draws, frames, chunks, N, ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum over ROWS draws of one frame, for one row of weights."""
    chunk, frame, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shifts = tl.num_programs(2)
    column = tl.arange(0, C)
    inside = column < N
    w = tl.load(weights + ((frame // frames) * shifts + k) * N + column, mask=inside, other=0.0)
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, ROWS, R):
        row = chunk * ROWS + start + tl.arange(0, R)
        there = row < draws
        place = (frame * draws + row).to(tl.int64)[:, None] * N + column[None, :]
        E = tl.exp(tl.load(x + place, mask=there[:, None] & inside[None, :], other=0.0))
        inverse = 1.0 / E
        plus = tl.where(there, 1.0 / tl.sum(E * w[None, :], axis=1), 0.0)
        minus = tl.where(there, 1.0 / tl.sum(inverse * w[None, :], axis=1), 0.0)
        total += tl.sum(E * plus[:, None] + inverse * minus[:, None], axis=0)
    tl.store(sums + ((frame * chunks + chunk).to(tl.int64) * shifts + k) * N + column, total, mask=inside)


def summed_odds(x: Tensor, weights: Tensor, frames: int) -> Tensor:
    """Σ E / (E w) + (1/E) / ((1/E) w) over the draws of each frame, E = exp(x), shape (g·frames, k, N).

    Partial sums of a few draws are written and added up afterwards, so that bytes don't depend on which
    program comes first.

    Parameters
    ----------
    x : shape (g·frames, draws, N), contiguous
    weights : w, shape (g, k, N), contiguous
    """
    of_all, draws, N = x.shape
    k = weights.shape[1]
    columns = triton.next_power_of_2(N)
    chunks = triton.cdiv(draws, _ROWS)
    sums = torch.empty((of_all, chunks, k, N), dtype=torch.float32, device=x.device)
    rows = max(1, min(_ROWS, _TILE // columns))
    _kernel[(chunks, of_all, k)](
        x, weights, sums, draws, frames, chunks, N, _ROWS, rows, columns, num_warps=8
    )
    return sums.sum(dim=1)
