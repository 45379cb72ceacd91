"""Who holds which images, and which of them a step sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlu_cli.audit.options import SimulationOptions
from rlu_cli.errors import MismatchError
from rlu_cli.images import parse_normalization
from rlu_cli.images.datasets import open_dataset
from rlu_cli.images.load import ImageSet
from rlu_cli.simulation.client import epoch_indices, step_indices
from rlu_cli.simulation.data import FederatedData
from rlu_cli.simulation.partition import dirichlet_partition
from rlu_cli.simulation.randomness import stream_seed

LABELS = np.repeat(np.arange(6), 100)


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return open_dataset("digits")


def federated(images: ImageSet, seed: int = 0, **options: float) -> FederatedData:
    chosen = SimulationOptions(**{"clients": 5, "aux_per_class": 4, "test_size": 50, **options})  # type: ignore[arg-type]
    return FederatedData(images, parse_normalization("half"), chosen, seed=seed, device=torch.device("cpu"))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 100.0])
def test_every_sample_goes_to_exactly_one_client(alpha: float) -> None:
    parts = dirichlet_partition(LABELS, 7, alpha, seed=1)
    assert len(parts) == 7
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    assert all(np.array_equal(part, np.sort(part)) for part in parts)


def test_small_alpha_skews_and_large_alpha_evens_out() -> None:
    def largest(alpha: float) -> float:
        shares = []
        for part in dirichlet_partition(LABELS, 7, alpha, seed=2):
            counts = np.bincount(LABELS[part], minlength=6)
            shares.append(counts.max() / max(1, counts.sum()))
        return float(np.mean(shares))

    assert largest(0.05) > 0.6 > 0.3 > largest(1000.0)


def test_partition_follows_from_its_seed() -> None:
    one, same, other = (dirichlet_partition(LABELS, 4, 0.5, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("clients", "alpha"), [(0, 0.5), (3, 0.0), (3, float("nan"))])
def test_partition_refuses(clients: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="at least one client"):
        dirichlet_partition(LABELS, clients, alpha, seed=0)


def test_auxiliary_held_out_and_client_images_are_disjoint(digits: ImageSet) -> None:
    data = federated(digits)
    everything = np.concatenate((data.aux, data.test, *data.shares))
    assert np.array_equal(np.sort(everything), np.arange(len(digits.labels)))
    assert data.counts(data.aux) == [4] * 10
    assert len(data.test) == 50
    table = data.partition_table()
    assert table.shape == (5, 10)
    assert table.sum() == len(digits.labels) - 90


def test_the_split_does_not_depend_on_how_the_rest_is_shared(digits: ImageSet) -> None:
    one, other = federated(digits), federated(digits, clients=9, alpha=5.0)
    assert np.array_equal(one.aux, other.aux)
    assert np.array_equal(one.test, other.test)
    assert not np.array_equal(one.test, federated(digits, seed=1).test)


def test_the_default_held_out_set_fits_small_data(digits: ImageSet) -> None:
    data = federated(digits, test_size=None, aux_per_class=100)  # type: ignore[arg-type]
    assert len(data.test) == (len(digits.labels) - 1000) // 5


def test_too_little_data_is_said(digits: ImageSet) -> None:
    with pytest.raises(MismatchError, match="found 797: lower --test-size or --aux-per-class"):
        federated(digits, aux_per_class=100, test_size=797)


def test_a_batch_is_what_the_auditor_would_see(digits: ImageSet, tmp_path: Path) -> None:
    data = federated(digits)
    data.write_aux(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.png"))}
    assert len(before) == 40
    for label, name in enumerate(digits.names):
        rows = data.aux[data.labels[data.aux] == label]
        images, targets = data.batch(rows)
        assert targets.tolist() == [label] * 4
        for image, path in zip(images, sorted((tmp_path / name).iterdir()), strict=True):
            pixels = torch.from_numpy(np.array(Image.open(path))).float() / 255
            assert torch.allclose(image[0], (pixels - 0.5) / 0.5, atol=1e-6)
    data.write_aux(tmp_path)  # a class that is there whole is left alone
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(tmp_path.rglob(".*"))


def test_an_unfinished_class_is_written_again(digits: ImageSet, tmp_path: Path) -> None:
    data = federated(digits)
    (tmp_path / ".3.unfinished").mkdir(parents=True)
    (tmp_path / ".3.unfinished" / "0000.png").write_bytes(b"half a file")
    data.write_aux(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(n) for n in range(10)]
    Image.open(tmp_path / "3" / "0000.png").verify()


def test_steps_are_full_batches_of_reshuffled_passes() -> None:
    mine = np.array([5, 8, 13, 21, 34, 55, 89])
    steps = list(step_indices(mine, 10, 4, rng=np.random.default_rng(0)))
    assert [len(step) for step in steps] == [4] * 10
    seen = np.concatenate(steps)
    for start in range(0, 35, 7):  # each pass is a permutation
        assert np.array_equal(np.sort(seen[start : start + 7]), mine)
    assert not np.array_equal(seen[:7], seen[7:14])


def test_a_client_smaller_than_a_batch_repeats_samples() -> None:
    steps = list(step_indices(np.array([3, 4]), 2, 5, rng=np.random.default_rng(0)))
    assert [len(step) for step in steps] == [5, 5]
    assert set(np.concatenate(steps).tolist()) == {3, 4}
    with pytest.raises(ValueError, match="at least one sample"):
        next(step_indices(np.array([], dtype=np.int64), 1, 5, rng=np.random.default_rng(0)))


@pytest.mark.parametrize(("size", "last"), [(10, 2), (8, 4), (3, 3)])
def test_epochs_end_with_what_is_left(size: int, last: int) -> None:
    mine = np.arange(100, 100 + size)
    steps = list(epoch_indices(mine, 2, 4, rng=np.random.default_rng(0)))
    per_epoch = -(-size // 4)
    assert len(steps) == 2 * per_epoch
    for epoch in (steps[:per_epoch], steps[per_epoch:]):
        assert [len(step) for step in epoch] == [4] * (per_epoch - 1) + [last]
        assert np.array_equal(np.sort(np.concatenate(epoch)), mine)


def test_random_streams_are_independent() -> None:
    keys = [(number, client) for number in range(1, 20) for client in range(20)]
    seeds = {stream_seed(seed, purpose, *key) for seed in range(3) for purpose in range(3) for key in keys}
    assert len(seeds) == 3 * 3 * len(keys)
    assert stream_seed(1, 2, 3) == stream_seed(1, 2, 3)


@pytest.mark.parametrize(
    "name",
    ["../up", "/tmp/rlu-never-there", "AC/DC", "a\\b", "", ".", "..", ".x", "__MACOSX", "1", "x" * 256],
)
def test_class_names_that_are_no_folders(digits: ImageSet, name: str) -> None:
    """A data set's own names could say where on the disk images are written; two of one name lost a class."""
    images = replace(digits, names=(name, *digits.names[1:]))
    with pytest.raises(MismatchError, match="names of different folders"):
        federated(images)
    assert federated(images, aux_per_class=0).names[0] == name
