"""The baseline and the yardsticks of benchmarks/speed.py."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from core_cases import moments_of

from benchmarks.clock import Clock, Probes, Rates
from benchmarks.literal import LiteralConfidence, literal_final_means, literal_search
from benchmarks.speed import Bench
from benchmarks.speed_cases import check_agreement
from benchmarks.speed_plot import exponent
from benchmarks.speed_run import Runner
from rlu_cli.core.confidence import monte_carlo_confidence
from rlu_cli.core.search import MeanSimulator, posterior_search
from rlu_cli.core.types import FloatArray, LocalTraining, LogitMoments


def case(classes: int = 5) -> tuple[LogitMoments, FloatArray]:
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(classes, classes)) + np.eye(classes)
    embeddings = np.abs(rng.normal(size=(classes, 6)))
    return moments_of(mean, rng.normal(size=(classes, 3, classes)) / 2), embeddings @ embeddings.T + 1.0


def test_literal_confidence_is_ours_within_its_error() -> None:
    torch.manual_seed(0)
    moments, _ = case()
    literal = LiteralConfidence(moments, 20_000)
    draws = [literal.softmaxes(n) for n in range(5)]
    error = torch.stack([d.std(dim=0) for d in draws]).numpy() / np.sqrt(20_000)
    S = literal.rows(np.arange(5)).numpy()
    assert np.all(np.abs(S - monte_carlo_confidence(moments).mean) < 5 * error + 1e-4)


def test_literal_search_walks_as_ours() -> None:
    torch.manual_seed(0)
    moments, gram = case()
    training = LocalTraining(4, 10, 0.05)
    literal = LiteralConfidence(moments, 4000)
    truth, first = np.array([12, 4, 16, 8, 0]), np.array([8, 8, 16, 8, 0])
    final = literal_final_means(literal, gram, training, truth, 4)
    simulator = MeanSimulator(moments, gram, training, samples=4000)
    np.testing.assert_allclose(final, simulator.final_means(truth[None])[0], atol=5e-3)
    (found,) = posterior_search(simulator, final[None], first[None], 5)
    assert literal_search(literal, gram, training, final, first, 5).tolist() == truth.tolist()
    assert found.counts.tolist() == truth.tolist()


def test_exponent_is_the_slope_of_the_larger_half() -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    assert exponent(sizes, [5, 5, 5, *(2.0 * s**1.5 for s in sizes[3:])]) == pytest.approx(1.5)


def test_rates_and_floor() -> None:
    probes = Probes("cpu", (500, 100, 200))
    rates = probes.rates([1.0, 2.0, 4.0])
    assert rates.products == 2 * 100 * 500 * 100 * 200
    assert rates.exponentials == 100 * 2**16 / 2
    assert rates.bytes == 2 * 8 * 2**24 / 4
    floor = Rates(10.0, 5.0, 2.0).floor(products=20.0, exponentials=5.0, bytes_=1.0)
    assert floor == pytest.approx(2 + 1 + 0.5)


def test_works_are_timed_in_turn() -> None:
    order: list[str] = []
    times = Clock().interleaved([lambda: order.append("a"), lambda: order.append("b")], 2)
    assert order == ["a", "b"] * 3  # the first round warms up
    assert [len(column) for column in times] == [2, 2]


def test_a_case_that_fails_or_takes_too_long_loses_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> dict[str, object]:
        raise ValueError("out of luck\nand more")

    def hang() -> dict[str, object]:
        while True:
            time.sleep(0.01)

    runner = Runner(tmp_path / "rows.ndjson", case_limit=0.1)
    columns = [
        ("N", lambda row: str(row["N"])),
        ("a", lambda row: str(row["a"])),
        ("b", lambda r: str(r["b"])),
    ]
    runner.section("s", [({"N": 1}, fail), ({"N": 2}, hang), ({"N": 3}, lambda: {"a": 4, "b": 5})], columns)
    runner.deadline = 0.0
    runner.section("t", [({"N": 6}, hang)], columns)
    assert capsys.readouterr().out.splitlines() == [
        "| N | a | b |",
        "| --- | --- | --- |",
        "| 1 | ValueError: out of luck |  |",
        "| 2 | TimeoutError: took more than 0 s |  |",
        "| 3 | 4 | 5 |",
        "",
        "| N | a | b |",
        "| --- | --- | --- |",
        "| 6 | skipped: no time left |  |",
        "",
    ]
    rows = [json.loads(line) for line in (tmp_path / "rows.ndjson").read_text().splitlines()]
    assert [(row["section"], row["N"]) for row in rows] == [("s", 1), ("s", 2), ("s", 3), ("t", 6)]

    again = Runner(tmp_path / "rows.ndjson")
    again.keep_other_sections(["s"])
    assert [row["N"] for row in again.rows] == [6]


def test_a_literal_case_that_takes_too_long_or_too_much_is_skipped() -> None:
    arguments = argparse.Namespace(
        device="cpu",
        clock="wall",
        repeats=1,
        quick=True,
        literal_classes=4,
        literal_limit=0.05,
        repeat_limit=1.0,
        case_limit=1.0,
    )
    bench = Bench(arguments)

    def too_big() -> None:
        raise RuntimeError("not enough memory\nand more")

    def floor(rates: Rates) -> float:
        return 1.0

    assert bench.reason_against(lambda: time.sleep(0.1)) == {"literal_skipped": "once takes 0 s"}
    row = bench.compare(lambda: None, too_big, 1.0, floor, shape=(500, 100, 200))
    assert row["literal_skipped"] == "RuntimeError: not enough memory"
    assert "ratios" not in row and row["floor_s"] == 1.0
    row = bench.compare(lambda: None, lambda: None, 3.0, floor, shape=(500, 100, 200), ready=lambda: None)
    assert len(row["ratios"]) == len(row["ready_over_floor"]) == 1


def test_the_check_of_a_device_sees_every_class() -> None:
    assert check_agreement("cpu") == 0.0
