"""The benchmarks' own machinery: rounds measured once, tables that name their data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common import machine
from benchmarks.data import images
from benchmarks.paper.__main__ import main, run
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.settings import DATASETS, SCALES, Plan
from benchmarks.paper.tables import TABLES
from benchmarks.random_settings import setting
from benchmarks.random_settings import table as random_table
from benchmarks.rounds import Bench, Pretraining, Results, Round, Rows, play
from rlu_cli.audit.options import SimulationOptions, StepOptions
from rlu_cli.simulation.run import Simulator

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

TINY = Round(
    data="digits",
    arch="lenet5:activation=tanh",
    normalize="half",
    seed=0,
    training=StepOptions(lr="0.05", batch_size=16, steps=2),
    options=SimulationOptions(rounds=1, clients=4, participation=0.5, aux_per_class=8),
    methods=("rlu", "ebi"),
)


def test_a_round_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.rounds.CACHE", tmp_path / "cache")
    path = tmp_path / "rounds.ndjson"
    wanted = [TINY, replace(TINY, audit_aux=4), replace(TINY, pretraining=Pretraining(3, 16))]
    rows = Bench(Results(path), images, device="cpu").measure(wanted)
    # two clients, by two methods and the uniform guess
    assert len(rows) == 3 * 2 * 3
    assert {row["method"] for row in rows} == {"rlu", "ebi", "(uniform)"}
    assert all(0 <= row["iAcc"] <= 1 for row in rows)
    lines = path.read_text().splitlines()
    assert len(lines) == 3

    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:100])  # killed while it wrote the third
    played: list[Round] = []
    again = Bench(Results(path), images, device="cpu")

    def watched(alike: list[Round], *rest: Any) -> Any:
        played.extend(alike)
        return play(alike, *rest)

    monkeypatch.setattr("benchmarks.rounds.play", watched)
    assert again.measure(wanted) == rows
    assert played == [wanted[2]]
    assert [json.loads(line) for line in path.read_text().splitlines() if line not in lines[2][:100]]
    assert Bench(Results(path), images).measure(wanted) == rows
    assert len(played) == 1
    assert Bench(Results(path), images, jobs=0).measure([*wanted, replace(TINY, seed=9)]) == rows
    assert Results(path).machines == [machine()]
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


def test_a_new_method_is_measured_alone(tmp_path: Path) -> None:
    path = tmp_path / "rounds.ndjson"
    first = Bench(Results(path), images, device="cpu").measure([TINY])
    more = replace(TINY, methods=("ilrg", *TINY.methods))
    rows = Bench(Results(path), images, device="cpu").measure([more])
    assert json.loads(path.read_text().splitlines()[1])["round"]["methods"] == ["ilrg"]
    assert [row["method"] for row in rows] == [m for m in (*more.methods, "(uniform)") for _ in range(2)]
    scores = [{**row, "round": None} for row in rows if row["method"] != "ilrg"]
    assert scores == [{**row, "round": None} for row in first]


def test_rounds_alike_share_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[int] = []
    run_simulation = Simulator.run
    monkeypatch.setattr(Simulator, "run", lambda self: (simulated.append(1), run_simulation(self))[1])
    bench = Bench(Results(tmp_path / "rounds.ndjson"), images, device="cpu")
    rows = bench.measure([replace(TINY, audit_aux=size) for size in (2, 4, 8)])
    assert len(simulated) == 1
    assert len(rows) == 3 * 2 * 3


def test_processes_side_by_side_find_the_same(tmp_path: Path) -> None:
    wanted = [TINY, replace(TINY, seed=1)]
    alone = Bench(Results(tmp_path / "alone.ndjson"), images, device="cpu").measure(wanted)
    both = Bench(Results(tmp_path / "both.ndjson"), images, device="cpu", jobs=2).measure(wanted)
    assert both == alone


class Pretended(Bench):
    """Gives every method a score without playing: what tables make of it is what is tested."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(Results(tmp_path / "none.ndjson"), images)
        self.asked: list[Round] = []

    def measure(self, rounds: Iterable[Round]) -> Rows:
        rows: Rows = []
        for round_ in rounds:
            self.asked.append(round_)
            for place, method in enumerate([*round_.methods, "(uniform)"]):
                score = 0.5 if method == "rlu" else 0.6 if method == "llbg" else 0.01 * place
                values: dict[str, Any] = {"iAcc": score, "cAcc": score, "model_accuracy": 0.25}
                rows.append({"client": "client_0000", "method": method, "round": round_, **values})
        return rows


@pytest.mark.parametrize("name", ["table2", "table3", "table4"])
@pytest.mark.parametrize("scale", SCALES)
def test_tables_name_their_data_and_who_is_ahead(name: str, scale: str, tmp_path: Path) -> None:
    bench = Pretended(tmp_path)
    text = TABLES[name](Plan(SCALES[scale], {}), bench)
    assert "Fashion-MNIST (stands in for" in text
    assert "rlu 0.500, llbg 0.600" in text
    assert "**0.600" in text
    assert {round_.data for round_ in bench.asked} <= {dataset.stand_in for dataset in DATASETS.values()}
    official = Plan(SCALES[scale], dict.fromkeys(DATASETS, "/data"))
    bench.asked.clear()
    assert "stands in" not in TABLES[name](official, bench)
    assert {round_.data for round_ in bench.asked} == {"/data"}
    assert {round_.normalize for round_ in bench.asked} <= {
        dataset.normalize for dataset in DATASETS.values()
    }


def test_full_scale_has_the_papers_settings(tmp_path: Path) -> None:
    bench = Pretended(tmp_path)
    TABLES["table2"](Plan(SCALES["full"], {}), bench)
    asked = {
        (r.arch, r.training.batch_size, r.training.lr, r.training.steps, r.options.alpha)
        for r in bench.asked
        if r.options.aux_per_class == 100 and r.options.clients == 10 and r.options.participation == 1
    }
    for steps in (1, 10):
        assert ("lenet5:activation=tanh", 32, "0.01", steps, 0.5) in asked
        assert ("vgg16:activation=elu", 64, "0.01", steps, 0.5) in asked
        assert ("vgg16:activation=selu", 256, "0.01", steps, 0.1) in asked
        assert ("resnet50:activation=silu", 256, "0.01", steps, 0.1) in asked


def test_few_has_the_papers_networks_and_no_replays(tmp_path: Path) -> None:
    bench = Pretended(tmp_path)
    for name in ("table3", "table4"):
        TABLES[name](Plan(SCALES["few"], {}), bench)
    assert {r.arch for r in bench.asked} == {"lenet5:activation=relu", "vgg16:activation=relu"}
    assert {r.data for r in bench.asked if r.arch.startswith("lenet5")} == {DATASETS["SVHN"].stand_in}
    assert not any("gls" in r.methods for r in bench.asked)
    assert all("rlu" in r.methods for r in bench.asked)


def test_plain_vgg_has_no_batch_norm(tmp_path: Path) -> None:
    bench = Pretended(tmp_path)
    text = TABLES["plain-vgg"](Plan(SCALES["cpu"], {}), bench)
    assert all(r.arch.startswith("vgg16:") and r.arch.endswith(",batch_norm=false") for r in bench.asked)
    assert "(0.946)" in text and "FedProx λ = 5" in text


@pytest.mark.parametrize("name", ["progress", "aux-size"])
def test_curves_are_drawn(name: str, tmp_path: Path) -> None:
    text = FIGURES[name](Plan(SCALES["cpu"], {}), Pretended(tmp_path), tmp_path)
    assert "Fashion-MNIST (stands in for SVHN)" in text
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"]


def test_partitions_and_capabilities_are_written(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (800, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", images=noise, labels=np.arange(800) % 10)
    plan = Plan(SCALES["quick"], dict.fromkeys(("CIFAR-10", "CIFAR-100"), str(tmp_path / "noise.npz")))
    folder = tmp_path / "results"
    run(["partitions", "table5"], plan, folder=folder)
    assert {path.name for path in folder.iterdir()} == {
        "partitions.md",
        "partitions_cifar10.png",
        "partitions_cifar100.png",
        "table5.md",
    }
    assert "| `rlu` | yes |" in (folder / "table5.md").read_text()
    assert (
        f"python -m benchmarks.paper partitions --scale quick --data CIFAR-10={tmp_path}"
        in (folder / "partitions.md").read_text()
    )


def test_an_unknown_data_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["table5", "--data", "MNIST=x"])
    assert "SVHN, CIFAR-10, CIFAR-100, Tiny-ImageNet" in capsys.readouterr().err


def test_other_benchmarks_import() -> None:
    from benchmarks import batch_norm, common, networks

    assert batch_norm.SMALL_NETWORKS and networks.small_cnn(norm="group")
    assert common.mean_sd([0.5]) == "0.500"


def test_every_committed_result_can_be_read() -> None:
    folder = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
    files = [path for path in folder.rglob("*.ndjson") if '{"round": {' in path.read_text()[:20]]
    assert len(files) >= 4
    for path in files:
        assert Results(path).machines


def test_random_settings_are_drawn_by_their_number() -> None:
    drawn = [setting(number) for number in range(60)]
    assert drawn == [setting(number) for number in range(60)]
    assert {r.data for r in drawn} == {"digits", "fashion-mnist-32-2000", "glyphs-62-32-200"}
    assert {r.training.steps for r in drawn} >= {None, 1, 5, 10, 20}
    assert {r.training.optimizer for r in drawn} == {None, "adam"}


def test_random_settings_are_told_by_what_the_default_was() -> None:
    def row(asked: str, method: str, score: float, **more: Any) -> dict[str, Any]:
        found = {"number": 1, "client": "a", "asked": asked, "method": method, "iAcc": score}
        return {**found, "expected_iAcc": None, "grade": None, **more}

    bounds = {"bounds_hold": 0.9, "bounds_width": 0.1, "expected_iAcc": 0.8, "grade": "fair"}
    rows = [row("rlu", "rlu", 0.5), row("auto", "replay", 0.75, **bounds), {"number": 2, "refused": "why"}]
    text = random_table(rows)
    assert "| `replay` | 1 | 0.500 | 0.750 | 0.800 | 90.0%, 10.0% | 0 | 1 |" in text
    assert "| with bounds, good | 0 |" in text
