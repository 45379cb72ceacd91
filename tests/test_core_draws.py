"""The Monte Carlo draws: exactly normal one by one, evenly spread together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rlu_cli.core.draws import frame_shape, paired_normals


@pytest.mark.parametrize("pairs", [1, 2, 3, 9, 10, 11, 5000, 5001, 30_000])
def test_frames_hold_at_least_the_pairs_asked_for(pairs: int) -> None:
    frames, rows = frame_shape(pairs)
    assert frames >= 2  # else there is no standard error
    assert pairs <= frames * rows < pairs + frames + 2
    assert frames >= 10 or pairs < 10
    assert rows <= 2048
    assert paired_normals(pairs, 2, 0).shape == (frames, rows, 2)


@pytest.mark.parametrize(
    ("pairs", "rank"), [(20, 1), (40, 3), (40, 4), (30, 8)], ids=["r=1", "tall", "square", "wide"]
)
def test_each_draw_is_normal(pairs: int, rank: int) -> None:
    """A row of each frame, over seeds: normal in every direction, with the norm of a normal vector."""
    first = np.concatenate([paired_normals.__wrapped__(pairs, rank, seed)[:, 0] for seed in range(200)])
    axes = [*np.eye(rank), np.ones(rank) / np.sqrt(rank)]
    assert min(stats.kstest(first @ axis, "norm").pvalue for axis in axes) > 1e-3
    assert stats.kstest(np.sum(first**2, axis=1), stats.chi2(rank).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("pairs", "rank"), [(5000, 3), (5000, 100), (1000, 99), (20_000, 300)])
def test_second_moments_are_nearer_to_one_than_by_chance(pairs: int, rank: int) -> None:
    draws = paired_normals.__wrapped__(pairs, rank, 0).double().numpy()
    rows = draws.shape[1]
    for frame in draws:
        off = frame.T @ frame / rows - np.eye(rank)
        by_chance = np.sqrt(2 / rows)  # standard deviation of a diagonal entry of independent draws
        assert np.sqrt(np.mean(np.diag(off) ** 2)) < 0.3 * by_chance
        assert np.abs(off).max() < by_chance


def test_rows_are_orthogonal_where_there_are_fewer_of_them_than_numbers_in_each() -> None:
    for frame in paired_normals.__wrapped__(50, 40, 3).double().numpy():
        gram = frame @ frame.T
        np.testing.assert_allclose(gram - np.diag(np.diag(gram)), 0.0, atol=1e-4)


def test_frames_are_independent() -> None:
    """Means of squares of the frames don't move together over seeds."""
    means = np.stack(
        [paired_normals.__wrapped__(20, 4, seed).square().mean(dim=(1, 2)) for seed in range(300)]
    )
    correlations = np.corrcoef(means.T)[np.triu_indices(10, 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(300)
    assert np.sqrt(np.mean(correlations**2)) < 1.5 / np.sqrt(300)


def test_same_seed_same_draws_on_any_number_of_threads(torch_threads: None) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(paired_normals.__wrapped__(3000, 20, 4).numpy().tobytes())
        assert torch.get_num_threads() == threads  # as it was
    assert found[0] == found[1] == found[2]
    assert found[0] != paired_normals.__wrapped__(3000, 20, 5).numpy().tobytes()
