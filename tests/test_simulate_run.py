"""Whole simulations: the same bytes again, stopped and resumed, made longer; and what the files say."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlu_cli.audit.options import SimulationOptions, StepOptions
from rlu_cli.errors import FileError, MismatchError, UsageError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.images.datasets import open_dataset
from rlu_cli.images.load import ImageSet
from rlu_cli.models import LeNet5
from rlu_cli.simulation.archive import read_truth_lines
from rlu_cli.simulation.run import RoundReport, Simulator
from rlu_cli.simulation.settings import Simulation

K, M, B = 4, 3, 8
OPTIONS = SimulationOptions(clients=K, rounds=4, participation=0.75, aux_per_class=3, test_size=40)
TRAINING = StepOptions(lr="0.05", batch_size=B, steps=M)
PLAIN = Simulation("digits", "lenet5", "half", 0, TRAINING, OPTIONS)
SCHEMES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"scheme": "scaffold"},
    "feddyn": {"scheme": "feddyn", "lambda_": 0.5},
    "feddc": {"scheme": "feddc", "lambda_": 0.5},
}
USER_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Dropout(0.5))
        self.fc = nn.Linear(20, 10)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, images):
        return self.fc(self.scale * self.body(images))

class Inner(nn.Module):
    # All names begin as those in a wrapper do, and a weight is stored in two parts.
    def __init__(self):
        super().__init__()
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 20))
        self.model = nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Linear(20, 10))

    def forward(self, images):
        return self.model(images)

class Pair(Net):
    def forward(self, images):
        return super().forward(images), images.mean()
"""


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return open_dataset("digits")


def simulation(
    *, seed: int = 0, arch: str = "lenet5", training: Mapping[str, Any] = {}, **options: Any
) -> Simulation:
    return Simulation(
        "digits", arch, "half", seed, replace(TRAINING, **training), replace(OPTIONS, **options)
    )


def run(what: Simulation, images: ImageSet, root: Path, **arguments: Any) -> list[RoundReport]:
    return list(Simulator(what, images, root, device="cpu", **arguments).run())


def content(root: Path) -> dict[str, bytes]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def state(root: Path, number: int, name: str = "global") -> Mapping[str, Tensor]:
    return read_checkpoint(root / f"round_{number:04d}" / f"{name}.safetensors").tensors


def about(root: Path, number: int, name: str) -> Mapping[str, str]:
    return read_checkpoint(root / f"round_{number:04d}" / f"{name}.safetensors").metadata


@pytest.fixture(scope="module", params=SCHEMES)
def finished(
    request: pytest.FixtureRequest, digits: ImageSet, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Simulation, Path]:
    """An archive of each scheme, of four rounds; not to be changed."""
    what = simulation(training=SCHEMES[request.param])
    root = tmp_path_factory.mktemp(request.param) / "archive"
    run(what, digits, root)
    return what, root


# The same again.


def test_same_seed_same_bytes_and_global_random_state_is_left_alone(
    finished: tuple[Simulation, Path], digits: ImageSet, tmp_path: Path
) -> None:
    what, root = finished
    torch.manual_seed(99)
    np.random.seed(99)
    before = torch.get_rng_state()
    run(what, digits, tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before)
    assert content(tmp_path / "again") == content(root)


def test_another_seed_another_archive(digits: ImageSet, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(simulation(seed=seed, rounds=1), digits, tmp_path / str(seed))
    one, other = content(tmp_path / "0"), content(tmp_path / "1")
    same = {name for name in one.keys() & other.keys() if one[name] == other[name]}
    assert not {name for name in same if not name.startswith("aux")}
    assert one["aux/0/0000.png"] != other["aux/0/0000.png"]


def test_stopped_between_rounds(finished: tuple[Simulation, Path], digits: ImageSet, tmp_path: Path) -> None:
    what, root = finished
    stopped = Simulator(what, digits, tmp_path / "a", device="cpu").run()
    assert [report.number for report in itertools.islice(stopped, 2)] == [1, 2]
    stopped.close()
    assert not (tmp_path / "a" / "final.safetensors").exists()
    reports = run(what, digits, tmp_path / "a")
    assert [report.resumed for report in reports] == [True, True, False, False]
    assert content(tmp_path / "a") == content(root)


def test_stopped_within_a_round(finished: tuple[Simulation, Path], digits: ImageSet, tmp_path: Path) -> None:
    what, whole = finished
    root = tmp_path / "a"
    shutil.copytree(whole, root)
    lines = (root / "truth.ndjson").read_text(encoding="utf-8").splitlines(keepends=True)
    (root / "truth.ndjson").write_text("".join(lines[:4]), encoding="utf-8")  # round 1, and a bit of round 2
    (root / "final.safetensors").unlink()
    shutil.rmtree(root / "round_0004")
    clients = sorted((root / "round_0002").glob("client_*"))
    clients[-1].unlink()
    clients[0].write_bytes(b"half a file")
    shutil.rmtree(root / "aux" / "7")
    reports = run(what, digits, root)
    assert [report.resumed for report in reports] == [True, False, False, False]
    assert content(root) == content(whole)


def test_made_longer(finished: tuple[Simulation, Path], digits: ImageSet, tmp_path: Path) -> None:
    what, whole = finished
    short = replace(what, options=replace(what.options, rounds=2))
    run(short, digits, tmp_path / "a")
    assert content(tmp_path / "a")["final.safetensors"] != content(whole)["final.safetensors"]
    run(what, digits, tmp_path / "a")
    assert content(tmp_path / "a") == content(whole)
    run(short, digits, tmp_path / "a")  # fewer rounds than there are: nothing is taken back
    assert content(tmp_path / "a") == content(whole)


def test_a_damaged_truth_is_said(finished: tuple[Simulation, Path], digits: ImageSet, tmp_path: Path) -> None:
    what, whole = finished
    shutil.copytree(whole, tmp_path / "a")
    with (tmp_path / "a" / "truth.ndjson").open("a", encoding="utf-8") as handle:
        handle.write('{"round": 5, "cli')
    with pytest.raises(FileError, match=r"truth\.ndjson: line 13 is damaged"):
        run(what, digits, tmp_path / "a")


# Whose folder it is.


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (simulation(seed=1), ["--seed"]),
        (simulation(training={"lr": "0.1", "momentum": 0.9}), ["--lr", "--momentum"]),
        (simulation(training={"scheme": "fedprox", "lambda_": 1.0}), ["--lambda", "--scheme"]),
        (simulation(alpha=0.1, noise_std=0.1), ["--alpha", "--noise-std"]),
        (replace(PLAIN, normalize="none", init="ab12"), ["--init", "--normalize"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_folder_takes_one_simulation(
    digits: ImageSet, tmp_path: Path, other: Simulation, named: list[str]
) -> None:
    # The first one needs no training here: what counts is what its folder says.
    next(Simulator(replace(PLAIN, options=replace(OPTIONS, rounds=1)), digits, tmp_path, device="cpu").run())
    before = content(tmp_path)
    with pytest.raises(MismatchError, match=f"other values of {', '.join(named)}: choose another folder"):
        run(other, digits, tmp_path)
    assert content(tmp_path) == before


def test_an_archive_goes_on_with_the_same_data_alone(digits: ImageSet, tmp_path: Path) -> None:
    """The settings held the data's path, and other images there were shared out otherwise."""
    short = simulation(rounds=1)
    run(short, digits, tmp_path / "a")
    before = content(tmp_path / "a")
    labels = digits.labels.clone()
    labels[0] = (labels[0] + 1) % 10
    for other in (
        replace(digits, pixels=digits.pixels[:-1], labels=digits.labels[:-1]),
        replace(digits, pixels=digits.pixels.flip(3)),
        replace(digits, labels=labels),
        replace(digits, names=(*digits.names[:-1], "ten")),
    ):
        with pytest.raises(MismatchError, match="found other images, labels or class names in digits"):
            run(simulation(rounds=2), other, tmp_path / "a")
        assert content(tmp_path / "a") == before
    assert [report.resumed for report in run(simulation(rounds=2), digits, tmp_path / "a")] == [True, False]


def test_archives_of_earlier_versions_go_on(digits: ImageSet, tmp_path: Path) -> None:
    run(simulation(rounds=1), digits, tmp_path)
    path = tmp_path / "simulation.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    assert len(settings.pop("data_sha256")) == 64
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert [report.resumed for report in run(simulation(rounds=2), digits, tmp_path)] == [True, False]
    with pytest.raises(MismatchError, match="other values of --seed: choose another folder"):
        run(simulation(seed=1), digits, tmp_path)


def test_a_foreign_folder_is_refused(digits: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(MismatchError, match="to be empty or an archive"):
        run(PLAIN, digits, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_bad_values_leave_no_folder(digits: ImageSet, tmp_path: Path) -> None:
    cases: list[tuple[Simulation, type[Exception], str]] = [
        (simulation(clients=0), UsageError, "--clients at least 1"),
        (simulation(top_k=0.0), UsageError, r"--top-k in \(0, 1\]"),
        (simulation(quantize=17), UsageError, "--quantize from 1 to 16"),
        (simulation(training={"lr": None}), MismatchError, r"lr \(--lr\)"),
        (simulation(training={"epochs": 1}), UsageError, "either --steps or --epochs"),
        (
            simulation(training={"scheme": "feddyn", "lambda_": 0.0}),
            UsageError,
            "positive --lambda for feddyn",
        ),
        (simulation(training={"scheme": "fedsgd"}), UsageError, "a scheme among"),
        (simulation(training={"lr": "0.1,0.01"}), MismatchError, "one learning rate or 3"),
        (simulation(training={"lr": "0.1,0.1"}), MismatchError, "one learning rate or 3"),
        (simulation(arch="lenet6"), UsageError, "Unknown architecture"),
        (simulation(aux_per_class=500), MismatchError, "at least 500 images of each class"),
    ]
    for what, kind, message in cases:
        with pytest.raises(kind, match=message):
            run(what, digits, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("equal", [False, True])
def test_rates_of_every_step_with_epochs(digits: ImageSet, tmp_path: Path, equal: bool) -> None:
    """Only the largest client's steps were looked at, and round 1 was left half-written."""
    plain = simulation(training={"steps": None, "epochs": 1}, rounds=1)
    data = Simulator(plain, digits, tmp_path / "a", device="cpu").data
    most = -(-max(map(len, data.shares)) // B)
    assert len({-(-len(share) // B) for share in data.shares}) > 1
    rates = [0.05 if equal else 0.05 / step for step in range(1, most + 1)]
    listed = replace(plain, training=replace(plain.training, lr=",".join(map(str, rates))))
    message = rf"since the clients' epochs take \d+ to {most} steps, found {most}: pass one --lr"
    with pytest.raises(MismatchError, match=message):
        run(listed, digits, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    run(replace(plain, training=replace(plain.training, lr_decay=0.9)), digits, tmp_path / "decays")
    alone = simulation(clients=1, participation=1.0, rounds=1, training={"steps": None, "epochs": 1})
    share = Simulator(alone, digits, tmp_path / "b", device="cpu").data.shares[0]
    rates = [0.05 / step for step in range(1, -(-len(share) // B) + 1)]
    assert run(
        replace(alone, training=replace(alone.training, lr=",".join(map(str, rates)))), digits, tmp_path / "b"
    )


# What the files say.


def test_truth_adds_up(finished: tuple[Simulation, Path], digits: ImageSet) -> None:
    what, root = finished
    data = Simulator(what, digits, root, device="cpu").data
    lines = read_truth_lines(root)
    assert [line.round for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert len({tuple(line.client for line in lines if line.round == n) for n in range(1, 5)}) > 1
    table = data.partition_table()
    for line, raw in zip(
        lines, (root / "truth.ndjson").read_text(encoding="utf-8").splitlines(), strict=True
    ):
        assert np.array_equal(np.sum(line.step_counts, axis=0), line.counts)
        assert [sum(step) for step in line.step_counts] == [B] * M
        assert json.loads(raw)["total"] == sum(line.counts) == M * B
        assert np.all((table[int(line.client[-4:])] > 0) | (np.array(line.counts) == 0))
        files = sorted(path.stem for path in (root / f"round_{line.round:04d}").glob("client_*"))
        assert line.client in files
        assert len(files) == 3


def test_annotations(finished: tuple[Simulation, Path]) -> None:
    what, root = finished
    scheme = what.training.scheme or "fedavg"
    line = read_truth_lines(root)[-1]
    said = about(root, 4, line.client)
    expected = {
        "fl.arch": "lenet5:activation=relu,image_size=8x8,in_channels=1,num_classes=10,padding=4",
        "fl.class_names": json.dumps([str(n) for n in range(10)]),
        "fl.normalize": "half",
        "fl.image_size": "8x8",
        "fl.round": "4",
        "fl.client": line.client,
        "fl.scheme": scheme,
        "fl.optimizer": "sgd",
        "fl.lr": "0.05",
        "fl.batch_size": str(B),
        "fl.steps": str(M),
    }
    if what.training.lambda_:
        expected["fl.lambda"] = "0.5"
    if scheme != "fedavg":
        expected["fl.participation"] = "0.75"
    normalize = said["fl.normalize"]
    assert {**said, "fl.normalize": "half"} == expected
    assert "0.5" in normalize or normalize == "half"
    shared = {k: said[k] for k in ("fl.arch", "fl.class_names", "fl.normalize", "fl.image_size", "fl.round")}
    assert about(root, 4, "global") == shared
    assert (root / "round_0004" / "server_control.safetensors").exists() == (scheme == "scaffold")


def test_the_next_global_model_is_the_aggregate(digits: ImageSet, tmp_path: Path) -> None:
    for averaging in ("size", "uniform"):
        root = tmp_path / averaging
        simulator = Simulator(simulation(rounds=2, averaging=averaging), digits, root, device="cpu")
        reports = list(simulator.run())
        sizes = [float(len(simulator.data.shares[int(name[-4:])])) for name in reports[0].clients]
        weights = np.array(sizes if averaging == "size" else [1.0] * 3)
        weights /= weights.sum()
        sent = [state(root, 1, name) for name in reports[0].clients]
        for name, tensor in state(root, 2).items():
            mean = sum(w * part[name].double() for w, part in zip(weights, sent, strict=True))
            assert torch.allclose(tensor.double(), mean, atol=1e-6)  # type: ignore[arg-type]


def test_final_model_and_its_accuracy(finished: tuple[Simulation, Path], digits: ImageSet) -> None:
    what, root = finished
    simulator = Simulator(what, digits, root, device="cpu")
    reports = list(simulator.run())
    assert all(report.resumed for report in reports)
    final = read_checkpoint(root / "final.safetensors").tensors
    model = LeNet5(image_size=8, padding=4)
    model.load_state_dict(dict(final))
    model.eval()
    images, labels = simulator.data.batch(simulator.data.test)
    right = float((model(images).argmax(dim=1) == labels).float().mean())
    assert simulator.accuracy() == pytest.approx(right)


# Ways of training.


def test_epochs(digits: ImageSet, tmp_path: Path) -> None:
    what = simulation(rounds=1, training={"steps": None, "epochs": 2, "batch_size": 64})
    simulator = Simulator(what, digits, tmp_path, device="cpu")
    list(simulator.run())
    for line in read_truth_lines(tmp_path):
        size = len(simulator.data.shares[int(line.client[-4:])])
        said = about(tmp_path, 1, line.client)
        assert (said["fl.epochs"], said["fl.dataset_size"]) == ("2", str(size))
        assert "fl.steps" not in said
        per_epoch = [64] * (size // 64) + ([size % 64] if size % 64 else [])
        assert [sum(step) for step in line.step_counts] == per_epoch * 2
        assert line.counts == [
            2 * n for n in simulator.data.counts(simulator.data.shares[int(line.client[-4:])])
        ]


def test_scaffold_over_epochs_uses_each_clients_own_steps(digits: ImageSet, tmp_path: Path) -> None:
    what = simulation(
        rounds=2,
        participation=1.0,
        averaging="uniform",
        training={"steps": None, "epochs": 1, "batch_size": 64, "scheme": "scaffold"},
    )
    run(what, digits, tmp_path)
    lines = [line for line in read_truth_lines(tmp_path) if line.round == 1]
    assert len({len(line.step_counts) for line in lines}) > 1
    before, control = state(tmp_path, 1), state(tmp_path, 2, "server_control")
    for name in ("fc3.weight", "conv1.bias"):
        terms = [
            (before[name] - state(tmp_path, 1, line.client)[name]) / (len(line.step_counts) * 0.05)
            for line in lines
        ]
        assert torch.allclose(control[name], sum(terms) / K, atol=1e-5)  # type: ignore[arg-type]


def test_batch_norm_statistics_are_averaged(digits: ImageSet, tmp_path: Path) -> None:
    what = simulation(arch="resnet32", rounds=2, training={"steps": 1})
    simulator = Simulator(what, digits, tmp_path, device="cpu")
    first = next(iter(simulator.run()))
    again = Simulator(what, digits, tmp_path, device="cpu")
    list(again.run())
    sizes = np.array([len(simulator.data.shares[int(name[-4:])]) for name in first.clients], dtype=np.float64)
    sent = [state(tmp_path, 1, name) for name in first.clients]
    buffers = [name for name in sent[0] if name.endswith(("running_mean", "running_var"))]
    assert buffers
    for name in buffers:
        mean = sum(w * part[name] for w, part in zip(sizes / sizes.sum(), sent, strict=True))
        assert torch.allclose(state(tmp_path, 2)[name], mean, atol=1e-6)  # type: ignore[arg-type]
        assert not torch.equal(state(tmp_path, 2)[name], state(tmp_path, 1)[name])
    counter = next(name for name in sent[0] if name.endswith("num_batches_tracked"))
    assert [int(state(tmp_path, number)[counter]) for number in (1, 2)] == [0, 1]


def test_init_is_the_first_global_model(digits: ImageSet, tmp_path: Path) -> None:
    torch.manual_seed(5)
    start = LeNet5(image_size=8, padding=4).state_dict()
    run(simulation(rounds=1), digits, tmp_path, start=start)
    assert all(torch.equal(tensor, start[name]) for name, tensor in state(tmp_path, 1).items())


@pytest.mark.parametrize("scheme", ["fedavg", "feddyn"])
def test_names_that_reading_changes(digits: ImageSet, tmp_path: Path, scheme: str) -> None:
    """A wrapper's prefix and weight norm's parts are undone in what is read, so resuming ended as a fault."""
    (tmp_path / "net.py").write_text(USER_MODEL, encoding="utf-8")
    what = simulation(arch=f"{tmp_path / 'net.py'}:Inner", training=SCHEMES[scheme], rounds=3)
    whole, halted, other = (tmp_path / name for name in ("whole", "halted", "other"))
    run(what, digits, whole, allow_user_code=True)
    run(replace(what, options=replace(what.options, rounds=1)), digits, halted, allow_user_code=True)
    resumed = run(what, digits, halted, allow_user_code=True)
    assert [report.resumed for report in resumed] == [True, False, False]
    assert content(halted) == content(whole)
    first = read_checkpoint(whole / "final.safetensors")
    run(what, digits, other, allow_user_code=True, start=first)
    assert all(torch.equal(tensor, first.tensors[name]) for name, tensor in state(other, 1).items())


def test_logits_first_among_several_outputs(digits: ImageSet, tmp_path: Path) -> None:
    """As models with auxiliary classifiers answer in training."""
    (tmp_path / "net.py").write_text(USER_MODEL, encoding="utf-8")
    for name in ("Net", "Pair"):
        what = simulation(arch=f"{tmp_path / 'net.py'}:{name}", rounds=2)
        run(what, digits, tmp_path / name, allow_user_code=True)
    both = [state(tmp_path / name, 2) for name in ("Net", "Pair")]
    assert all(torch.equal(tensor, both[1][name]) for name, tensor in both[0].items())


def test_users_own_model_with_dropout(digits: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(USER_MODEL, encoding="utf-8")
    what = simulation(arch=f"{tmp_path / 'net.py'}:Net", rounds=2)
    with pytest.raises(FileError, match="never does"):
        run(what, digits, tmp_path / "a")
    archives = []
    for name in ("a", "b"):
        torch.manual_seed(len(archives))  # what came before must not matter
        run(what, digits, tmp_path / name, allow_user_code=True)
        archives.append(content(tmp_path / name))
    assert archives[0] == archives[1]
    assert "scale" not in state(tmp_path / "a", 2)
    stopped = Simulator(what, digits, tmp_path / "c", device="cpu", allow_user_code=True).run()
    next(stopped)
    stopped.close()
    run(what, digits, tmp_path / "c", allow_user_code=True)
    assert content(tmp_path / "c") == archives[0]


def test_defences_are_off_unless_asked_for_and_noise_is_reproducible(
    digits: ImageSet, tmp_path: Path
) -> None:
    def flat(root: Path, name: str) -> Tensor:
        return torch.cat([tensor.double().flatten() for tensor in state(root, 1, name).values()])

    for name, options in (
        ("plain", {}),
        ("clip", {"clip": 0.01}),
        ("noise", {"noise_std": 0.01}),
        ("top", {"top_k": 0.1}),
    ):
        run(simulation(rounds=1, **options), digits, tmp_path / name)
    run(simulation(rounds=1, noise_std=0.01), digits, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "noise")
    start = flat(tmp_path / "plain", "global")
    for line in read_truth_lines(tmp_path / "plain"):
        plain, clipped, noisy, sparse = (
            flat(tmp_path / name, line.client) - start for name in ("plain", "clip", "noise", "top")
        )
        assert float(plain.norm()) > 0.011
        assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-3)
        assert float((noisy - plain).std()) == pytest.approx(0.01, rel=0.02)
        assert abs(int((sparse != 0).sum()) - 0.1 * plain.numel()) < 2
        assert about(tmp_path / "clip", 1, line.client)["fl.clip"] == "0.01"
        assert about(tmp_path / "noise", 1, line.client)["fl.noise_std"] == "0.01"
    assert read_truth_lines(tmp_path / "plain") == read_truth_lines(tmp_path / "noise")


def test_clients_without_data_are_never_asked(digits: ImageSet, tmp_path: Path) -> None:
    simulator = Simulator(
        simulation(clients=40, alpha=0.01, rounds=2, participation=1.0), digits, tmp_path, device="cpu"
    )
    empty = {f"client_{k:04d}" for k, share in enumerate(simulator.data.shares) if not len(share)}
    assert empty
    for report in simulator.run():
        assert not empty & set(report.clients)
        assert len(report.clients) == 40 - len(empty)
