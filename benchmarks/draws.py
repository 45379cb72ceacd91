"""Which random numbers know S best: ways to draw ξ, all used with both signs, at the same number of samples.

    python -m benchmarks.draws          (some 10 minutes on one core)

For networks from unsure to sure: how much smaller the variance of S is than with M independent samples, and
how far off the mean over many runs is (in standard errors of ten frames' mean, as rlu reports it), against a
reference of many more draws. "Orthonormal" are frames of orthonormal columns as they are, which are not
normal; "rlu" is `rlu_cli.core.draws`. Sobol points are scrambled by torch; "sorted" turns each class's
factor so that its largest directions come first. "Taylor" takes softmax's second-order expansion around the
mean, whose expectation is known, for a control variate with the coefficient of the least variance; it doubles
the work on each draw.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.common import machine, markdown
from benchmarks.speed_cases import network_moments
from rlu_cli.core.draws import paired_normals
from rlu_cli.core.types import LogitMoments

ROWS = 500
"""Pairs of one frame at M = 10,000."""

CLASSES, PER_CLASS, SHOWN = 200, 100, 6


def independent(rank: int, seed: int) -> Tensor:
    return torch.randn(ROWS, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sobol(rank: int, seed: int, rows: int = ROWS) -> Tensor:
    uniform = SobolEngine(rank, scramble=True, seed=seed).draw(rows, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))


def orthonormal(rank: int, seed: int) -> Tensor:
    Q, R = torch.linalg.qr(independent(rank, seed))
    return Q * torch.diagonal(R).sign() * ROWS**0.5


def ours(rank: int, seed: int) -> Tensor:
    return paired_normals.__wrapped__(10 * ROWS, rank, seed // 10)[seed % 10].double()


def confidence(mean: Tensor, factor: Tensor, draws: Tensor) -> Tensor:
    """S of some classes, in double precision."""
    return torch.stack([softmaxes(mu, draws @ F).mean(0) for mu, F in zip(mean, factor, strict=True)])


def taylor_confidence(mean: Tensor, factor: Tensor, draws: Tensor) -> Tensor:
    """The same with a control variate: softmax(μ + x)_j ≈ … + ½ s_j (c_j² − Σ_k s_k c_k²), c = x − s·x."""
    rows = []
    for mu, F in zip(mean, factor, strict=True):
        found, s = softmaxes(mu, draws @ F), torch.softmax(mu, 0)
        centred = F - (F @ s)[:, None]
        terms = second_order((draws @ centred).square(), s)
        expected = second_order(centred.square().sum(0, keepdim=True), s)
        deviation = terms - terms.mean(0)
        slope = (deviation * found).sum(0) / deviation.square().sum(0).clamp_min(1e-300)
        rows.append(found.mean(0) - slope * (terms.mean(0) - expected[0]))
    return torch.stack(rows)


def softmaxes(mu: Tensor, x: Tensor) -> Tensor:
    """Of μ + x and μ − x, averaged."""
    return 0.5 * (torch.softmax(mu + x, 1) + torch.softmax(mu - x, 1))


def second_order(squares: Tensor, s: Tensor) -> Tensor:
    return 0.5 * s * (squares - squares @ s[:, None])


Way = tuple[Callable[[int, int], Tensor], bool, Callable[[Tensor, Tensor, Tensor], Tensor]]
"""How to draw, whether to sort, and what to make of the draws."""

DRAWS: dict[str, Way] = {
    "independent": (independent, False, confidence),
    "independent, Taylor": (independent, False, taylor_confidence),
    "Sobol": (sobol, False, confidence),
    "Sobol, sorted": (sobol, True, confidence),
    "orthonormal": (orthonormal, False, confidence),
    "rlu": (ours, False, confidence),
    "rlu, Taylor": (ours, False, taylor_confidence),
}


def study(moments: LogitMoments, runs: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Mean confidence in the own class; variance gain and bias of each way of drawing."""
    mean, factor = torch.from_numpy(moments.mean[:SHOWN]), torch.from_numpy(moments.factor[:SHOWN])
    _, values, directions = torch.linalg.svd(factor, full_matrices=False)
    by_size = values[:, :, None] * directions
    rank = factor.shape[1]
    references = torch.stack([confidence(mean, by_size, sobol(rank, 10**6 + s, 8192)) for s in range(8)])
    reference, uncertainty = references.mean(0), float(references.var(0).mean() / 8)
    many = torch.cat([independent(rank, 10**7 + s) for s in range(20)])
    plain = [torch.softmax(mu + many @ F, 1).var(0) for mu, F in zip(mean, factor, strict=True)]
    literal = float(torch.stack(plain).mean()) / (2 * ROWS)
    found = {}
    for name, (draw, is_sorted, estimate) in DRAWS.items():
        S = torch.stack(
            [estimate(mean, by_size if is_sorted else factor, draw(rank, s)) for s in range(runs)]
        )
        variance = float(S.var(0).mean())
        off = float(((S.mean(0) - reference) ** 2).mean()) - variance / runs - uncertainty
        found[name] = literal / variance, max(off, 0.0) ** 0.5 / (variance / 10) ** 0.5
    return float(torch.diagonal(reference[:, :SHOWN]).mean()), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    arguments = parser.parse_args()
    rows = []
    for margin, spread in ((3.0, 0.5), (6.0, 2.0), (12.0, 2.0)):
        own, found = study(network_moments(CLASSES, PER_CLASS, margin=margin, spread=spread), arguments.runs)
        cells = [f"{gain:.3g} ({bias:.1f})" for gain, bias in found.values()]
        rows.append((f"{own:.0%}", *cells))
    print(f"{machine()}; N = {CLASSES}, K = {PER_CLASS}, {arguments.runs} frames of {ROWS} pairs\n")
    print("variance, independent samples / this (bias in standard errors)\n")
    print(markdown(("mean S[n, n]", *DRAWS), rows))


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
