"""Every scheme by its authors' definition, over rounds, inverted from the archive alone.

The clients' gradients are scripted: S and ē are known and stay the same, and every step's batch has the
same class mix, so each recovery is exact or wrong. What the schemes remember is tracked here literally as
their papers define it, with none of the package's recursions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import QUICK, call, sample, truth
from core_cases import random_confidence, statistics_of

from rlu_cli.audit.annotations import Annotations
from rlu_cli.audit.history import History, constant_gradient, find_rounds, stack, unstack
from rlu_cli.audit.options import HistoryOptions, TrainingOptions
from rlu_cli.audit.training import resolve_training
from rlu_cli.core.recover import head_update, recover_labels
from rlu_cli.core.types import FloatArray, Head, IntArray, LocalTraining, Note, Observation
from rlu_cli.core.variates import STATEFUL
from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.checkpoint import read_checkpoint
from rlu_cli.files.safetensors_io import save_safetensors

N, L, B, ETA, LAM, GAMMA = 5, 4, 16, 0.3, 1.0, 0.8
SCHEMES = ("sgd", "momentum", "nesterov", "fedprox", "scaffold", "feddyn", "feddc")
CLIENTS = ("ada", "ben", "cyd", "dan")
TAKES_PART = ("ada ben cyd", "ada ben dan", "ben cyd dan", "ada cyd dan", "ada ben cyd")
ROUNDS = range(1, len(TAKES_PART) + 1)
PLAIN = TrainingOptions(scheme="fedavg", momentum=0.0, nesterov=False, lambda_=0.0)


@dataclass
class Federation:
    """The schemes as their authors define them; θ, gradients and memories are [W | b], shape (N, L + 1)."""

    scheme: str
    theta: FloatArray
    server_control: FloatArray = field(default_factory=lambda: np.zeros((N, L + 1)))
    server_dual: FloatArray = field(default_factory=lambda: np.zeros((N, L + 1)))
    memory: dict[str, dict[str, FloatArray]] = field(default_factory=dict)

    def of(self, client: str) -> dict[str, FloatArray]:
        names = ("control", "gradient", "drift", "last_own", "last_global")
        return self.memory.setdefault(client, {name: np.zeros((N, L + 1)) for name in names})

    def train(self, client: str, gradient: FloatArray, m: int) -> FloatArray:
        """The client's θ_k after m local steps along its (constant) cross-entropy gradient."""
        mine = self.of(client)
        p = torch.nn.Parameter(torch.from_numpy(self.theta.copy()))
        momentum = GAMMA if self.scheme in ("momentum", "nesterov") else 0.0
        sgd = torch.optim.SGD([p], lr=ETA, momentum=momentum, nesterov=self.scheme == "nesterov")
        for _ in range(m):
            theta = p.detach().numpy()
            if self.scheme == "fedprox":  # L + λ/2 ‖θ − θ_g‖²
                step = gradient + LAM * (theta - self.theta)
            elif self.scheme == "scaffold":  # y ← y − η (g − c_k + c)
                step = gradient - mine["control"] + self.server_control
            elif self.scheme == "feddyn":  # L − ⟨∇L_k(θ_k^prev), θ⟩ + λ/2 ‖θ − θ_g‖²
                step = gradient - mine["gradient"] + LAM * (theta - self.theta)
            elif self.scheme == "feddc":  # L + λ/2 ‖d_k + θ − θ_g‖² + ⟨θ, Δθ_k − Δθ⟩/(ηm)
                step = gradient + LAM * (mine["drift"] + theta - self.theta)
                step = step + (mine["last_own"] - mine["last_global"]) / (ETA * m)
            else:
                step = gradient
            p.grad = torch.from_numpy(step)
            sgd.step()
        return p.detach().numpy().copy()

    def close(self, sent: dict[str, FloatArray], steps: dict[str, int]) -> None:
        """The server's part, and the clients' memories after the round."""
        before, P = self.theta, len(sent)
        after = sum(sent.values()) / P
        if self.scheme == "scaffold":
            change = np.zeros((N, L + 1))
            for client, own in sent.items():  # option II: c_k⁺ = c_k − c + (x − y)/(mη)
                mine = self.of(client)
                new = mine["control"] - self.server_control + (before - own) / (steps[client] * ETA)
                change += new - mine["control"]
                mine["control"] = new
            self.server_control = self.server_control + change / len(CLIENTS)
        if self.scheme == "feddyn":
            for client, own in sent.items():  # ∇L_k ← ∇L_k − λ (θ_k − θ_g)
                self.of(client)["gradient"] = self.of(client)["gradient"] - LAM * (own - before)
            moved = sum(own - before for own in sent.values())
            self.server_dual = self.server_dual - LAM / len(CLIENTS) * moved
            after = after - self.server_dual / LAM
        if self.scheme == "feddc":
            for client, own in sent.items():
                self.of(client)["drift"] = self.of(client)["drift"] + (own - before)
            after = sum(own + self.of(client)["drift"] for client, own in sent.items()) / P
        for client, own in sent.items():
            self.of(client)["last_own"] = own - before
            self.of(client)["last_global"] = after - before
        self.theta = after


@dataclass
class Case:
    """A finished federation in ``root``, and what is known of it."""

    root: Path
    S: FloatArray
    mean_embedding: FloatArray
    counts: dict[tuple[int, str], IntArray]

    def folder(self, number: int) -> Path:
        return self.root / f"round_{number:04d}"

    def recover(
        self, number: int, client: str, options: TrainingOptions | None = None, **archived: Any
    ) -> tuple[IntArray, list[Note]]:
        """Counts from the archive alone, as the auditor does it."""
        local = read_checkpoint(self.folder(number) / f"{client}.safetensors")
        reference = read_checkpoint(self.folder(number) / "global.safetensors")
        annotations = Annotations(local.metadata, reference.metadata)
        training = resolve_training(options or TrainingOptions(), annotations).training
        before, after = head_of(reference.tensors), head_of(local.tensors)
        k, notes = None, []
        if training.scheme in STATEFUL:
            stacked, notes = constant_gradient(
                HISTORY,
                stack(before),
                training,
                client=client,
                archived=HistoryOptions(**{"history": [self.root], **archived}),
                annotations=annotations,
            )
            k = unstack(stacked, before)
        statistics = statistics_of(self.S, np.tile(self.mean_embedding, (N, 1)))
        observation = Observation(
            head_update(after, before), before, training, statistics, statistics, constant_gradient=k
        )
        return recover_labels(observation, method="rlu").counts, notes

    def exact(self, number: int, client: str, **archived: Any) -> bool:
        counts, notes = self.recover(number, client, **archived)
        first = (number, client) == (2, "dan")  # whom no earlier round has
        assert {note.code for note in notes} <= ({"history-without-client"} if first else set())
        return bool(np.array_equal(counts, self.counts[number, client]))


def head_of(tensors: dict[str, torch.Tensor]) -> Head:
    return Head(tensors["head.weight"].double().numpy(), tensors["head.bias"].double().numpy())


HISTORY = History(lambda checkpoint: checkpoint, "head", TrainingOptions())


def save(path: Path, stacked: FloatArray, about: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    weight, bias = torch.from_numpy(stacked[:, :-1].copy()), torch.from_numpy(stacked[:, -1].copy())
    save_safetensors(path, {"head.weight": weight, "head.bias": bias}, about or {})
    return path


def annotations_of(scheme: str, steps: int) -> dict[str, str]:
    extra = {
        "momentum": {"fl.momentum": str(GAMMA)},
        "nesterov": {"fl.momentum": str(GAMMA), "fl.nesterov": "true"},
    }.get(scheme, {"fl.scheme": scheme} if scheme != "sgd" else {})
    if scheme in ("fedprox", "feddyn", "feddc"):
        extra["fl.lambda"] = str(LAM)
    training = {"fl.lr": str(ETA), "fl.batch_size": str(B), "fl.steps": str(steps)}
    return {**training, **extra, "fl.participation": "0.75"}


def federate(
    root: Path,
    scheme: str,
    m: int | dict[str, int],
    *,
    server_controls: bool = False,
    client_controls: bool = False,
    seed: int = 3,
) -> Case:
    rng = np.random.default_rng(seed)
    S = random_confidence(rng, N)
    assert np.abs(S - S.T).max() > 0.1
    embedding = rng.uniform(0.5, 1.5, size=L)
    world = Federation(scheme, rng.normal(size=(N, L + 1)))
    case = Case(root, S, embedding, {})
    for number, names in zip(ROUNDS, TAKES_PART, strict=True):
        folder = case.folder(number)
        save(folder / "global.safetensors", world.theta, {"fl.round": str(number)})
        if server_controls:
            save(folder / "server_control.safetensors", world.server_control)
        sent, steps = {}, {}
        for client in names.split():
            steps[client] = m if isinstance(m, int) else m[client]
            per_step = rng.multinomial(B, rng.dirichlet(np.full(N, 0.6)))
            residual = (S.T @ per_step - per_step) / B
            gradient = np.outer(residual, np.append(embedding, 1.0))
            if client_controls:
                save(folder / "controls" / f"{client}.safetensors", world.of(client)["control"])
            sent[client] = world.train(client, gradient, steps[client])
            about = annotations_of(scheme, steps[client])
            save(folder / f"{client}.safetensors", sent[client], about)
            case.counts[number, client] = steps[client] * per_step
        world.close(sent, steps)
    return case


# Every scheme, from the archive.


@pytest.mark.parametrize("m", [1, 10])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_round_of_every_scheme_is_inverted_exactly(tmp_path: Path, scheme: str, m: int) -> None:
    case = federate(tmp_path, scheme, m)
    assert len(case.counts) == 15
    assert [at for at in case.counts if not case.exact(*at)] == []


@pytest.mark.parametrize("m", [1, 10])
@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_told_plain_fedavg_late_rounds_are_wrong(tmp_path: Path, scheme: str, m: int) -> None:
    # The proof that the scheme and the history carry the test above.
    case = federate(tmp_path, scheme, m)
    wrong = [at for at, true in case.counts.items() if np.any(case.recover(*at, PLAIN)[0] != true)]
    late = [at for at in case.counts if at[0] >= 3]
    if m == 1 and scheme in ("momentum", "fedprox"):
        assert wrong == []  # a single step from the global model: nothing to remember, nothing to pull
    else:
        assert set(late) <= set(wrong)
    if scheme in STATEFUL:
        assert not [at for at in wrong if at[0] == 1 and m == 1]  # nothing is remembered yet


@pytest.mark.parametrize("scheme", STATEFUL)
def test_another_clients_history_gives_other_counts(tmp_path: Path, scheme: str) -> None:
    case = federate(tmp_path, scheme, 10)
    # dan's round 4 with ada's files in the place of his own: the memory is the client's, not the round's.
    for number in (2, 3):
        theirs = case.folder(number) / "ada.safetensors"
        if not theirs.exists():
            theirs = case.folder(number) / "ben.safetensors"
        theirs.replace(case.folder(number) / "dan.safetensors")
    assert not case.exact(4, "dan")


def test_the_manifest_says_the_same_as_the_folder(tmp_path: Path) -> None:
    for scheme in STATEFUL:
        case = federate(tmp_path / scheme, scheme, 10)
        lines = []
        for number in ROUNDS:  # names of its own: only the manifest can know them
            (case.folder(number) / "global.safetensors").rename(case.root / f"g{number}.safetensors")
            entry: dict[str, Any] = {"round": number, "global": f"g{number}.safetensors"}
            if (own := case.folder(number) / "ada.safetensors").exists():
                own.rename(case.root / f"a{number}.safetensors")
                entry["local"] = f"a{number}.safetensors"
            lines.append(json.dumps(entry))
        manifest = case.root / "ada.ndjson"
        manifest.write_text("\n".join(reversed(lines)) + "\n\n", encoding="utf-8-sig")  # as Windows
        last = case.folder(5)
        (case.root / "g5.safetensors").rename(last / "global.safetensors")
        (case.root / "a5.safetensors").rename(last / "ada.safetensors")
        assert case.exact(5, "ada", history=[manifest])


@pytest.mark.parametrize("scheme", STATEFUL)
def test_earlier_files_may_hold_updates(tmp_path: Path, scheme: str) -> None:
    case = federate(tmp_path, scheme, 10)
    for number in ROUNDS[:-1]:
        path = case.folder(number) / "ada.safetensors"
        if path.exists():
            local, base = read_checkpoint(path), read_checkpoint(case.folder(number) / "global.safetensors")
            change = {name: tensor - base.tensors[name] for name, tensor in local.tensors.items()}
            path.unlink()
            save_safetensors(path, change, {**local.metadata, "fl.update": "delta"})
    assert case.exact(ROUNDS[-1], "ada")


# Scaffold's variates.


def test_archived_variates_need_no_history(tmp_path: Path) -> None:
    case = federate(tmp_path, "scaffold", 10, client_controls=True)
    server = federate(tmp_path / "with", "scaffold", 10, server_controls=True)
    for number, client in case.counts:
        assert case.exact(
            number,
            client,
            history=None,
            server_control=server.folder(number) / "server_control.safetensors",
            client_control=case.folder(number) / "controls" / f"{client}.safetensors",
        )


def test_scaffold_needs_no_archived_variates_only_the_right_participation(tmp_path: Path) -> None:
    case = federate(tmp_path, "scaffold", 10)
    assert not list(tmp_path.rglob("server_control*"))
    assert all(case.exact(*at) for at in case.counts)
    wrong = [at for at in case.counts if not case.exact(*at, participation=1.0)]
    # In round 2, (1 − p) c is nothing either way, but p Δ is not.
    assert {at for at in case.counts if at[0] >= 2} <= set(wrong)
    assert all(case.exact(*at, participation=0.75) for at in case.counts)


def test_archived_server_variates_outrank_what_is_derived(tmp_path: Path) -> None:
    # With unequal step counts the global models don't tell c, so this round's own file counts too.
    steps = {"ada": 3, "ben": 5, "cyd": 8, "dan": 10}
    case = federate(tmp_path / "with", "scaffold", steps, server_controls=True)
    assert [at for at in case.counts if not case.exact(*at)] == []
    without = federate(tmp_path / "without", "scaffold", steps)
    assert not all(without.exact(*at) for at in case.counts if at[0] >= 3)


def test_this_rounds_variate_by_flag(tmp_path: Path) -> None:
    steps = {"ada": 3, "ben": 5, "cyd": 8, "dan": 10}
    case = federate(tmp_path, "scaffold", steps, server_controls=True)
    moved = (case.folder(5) / "server_control.safetensors").rename(tmp_path / "c5.safetensors")
    assert case.exact(5, "ada", server_control=moved)


def test_variates_of_another_scheme_are_refused(tmp_path: Path) -> None:
    case = federate(tmp_path, "feddyn", 1)
    file = save(tmp_path / "c.safetensors", np.zeros((N, L + 1)))
    with pytest.raises(MismatchError, match="with scaffold only, found feddyn"):
        case.recover(2, "ada", server_control=file, client_control=file)


def test_a_client_variate_alone_is_refused(tmp_path: Path) -> None:
    case = federate(tmp_path, "scaffold", 1, client_controls=True)
    control = case.folder(2) / "controls" / "ada.safetensors"
    with pytest.raises(MismatchError, match="--server-control beside --client-control"):
        case.recover(2, "ada", history=None, client_control=control)


# What is missing.


@pytest.mark.parametrize("scheme", STATEFUL)
def test_missing_history_names_the_rounds(tmp_path: Path, scheme: str) -> None:
    case = federate(tmp_path, scheme, 1)
    with pytest.raises(MismatchError, match=f"{scheme} needs .* rounds 1 to 4.*--history") as refusal:
        case.recover(5, "ada", history=None)
    assert ("--server-control" in str(refusal.value)) == (scheme == "scaffold")
    with pytest.raises(MismatchError, match=r"checkpoints of round 1\b"):
        case.recover(2, "ada", history=None)


@pytest.mark.parametrize("scheme", STATEFUL)
def test_round_one_needs_no_history(tmp_path: Path, scheme: str) -> None:
    case = federate(tmp_path, scheme, 10)
    for client in ("ada", "ben", "cyd"):
        assert case.exact(1, client, history=None)


@pytest.mark.parametrize("scheme", STATEFUL)
def test_rounds_may_be_counted_from_zero(tmp_path: Path, scheme: str) -> None:
    """Round 0 was said to need the rounds 1 to -1."""
    case = federate(tmp_path, scheme, 10)
    for number in ROUNDS:
        case.folder(number).rename(case.folder(number - 1))
        path = case.folder(number - 1) / "global.safetensors"
        stored = read_checkpoint(path)
        save(path, stack(head_of(stored.tensors)), {"fl.round": str(number - 1)})
    case.counts = {(number - 1, client): counts for (number, client), counts in case.counts.items()}
    assert np.array_equal(case.recover(0, "ada", history=None)[0], case.counts[0, "ada"])
    for number in (0, 1, 4):
        assert np.array_equal(case.recover(number, "ada")[0], case.counts[number, "ada"])
    path = case.folder(0) / "global.safetensors"
    save(path, stack(head_of(read_checkpoint(path).tensors)), {"fl.round": "-3"})
    with pytest.raises(MismatchError, match="round in the global checkpoint's metadata: expected a round's"):
        case.recover(0, "ada")


def test_without_a_round_number_history_must_be_earlier(tmp_path: Path) -> None:
    case = federate(tmp_path, "feddyn", 10)
    reference = case.folder(4) / "global.safetensors"
    save(reference, stack(head_of(read_checkpoint(reference).tensors)))  # says nothing of its round
    with pytest.raises(MismatchError, match=r"all earlier rounds.*--round 1"):
        case.recover(4, "ada", history=None)
    with pytest.raises(MismatchError, match=r"found this one \(round 4 .*--round 4"):
        case.recover(4, "ada")
    assert case.exact(4, "ada", round=4)
    past = tmp_path / "past"
    past.mkdir()
    for number in (1, 2, 3):
        case.folder(number).rename(past / f"r{number}")
    assert case.exact(4, "ada", history=[past])


def test_a_gap_warns_where_it_may_be_harmless(tmp_path: Path) -> None:
    case = federate(tmp_path, "feddyn", 10)
    for path in case.folder(3).iterdir():
        path.unlink()
    case.folder(3).rmdir()
    counts, notes = case.recover(5, "ada")  # ada sat round 3 out: nothing of hers is lost
    assert [note.code for note in notes] == ["history-gap"]
    assert "round 3" in notes[0].message
    assert np.array_equal(counts, case.counts[5, "ada"])
    counts, notes = case.recover(5, "ben")  # ben did not
    assert [note.code for note in notes] == ["history-gap"]
    assert np.any(counts != case.counts[5, "ben"])


def test_feddc_needs_the_global_model_after_the_clients_last_round(tmp_path: Path) -> None:
    """Its gap was taken over all rounds that were missing too, with a good grade."""
    case = federate(tmp_path, "feddc", 10)
    case.folder(4).rename(tmp_path / "elsewhere")
    with pytest.raises(MismatchError, match=r"after the client's last round, 3, .* lacks round 4"):
        case.recover(5, "ben")
    (tmp_path / "elsewhere").rename(case.folder(4))
    case.folder(1).rename(tmp_path / "elsewhere")
    _, notes = case.recover(5, "dan" if "dan" in TAKES_PART[4] else "ben")
    assert [note.code for note in notes] == ["history-gap"]


def test_dates_as_round_numbers_leave_gaps_that_nobody_lists(tmp_path: Path) -> None:
    case = federate(tmp_path, "feddyn", 10)
    past = tmp_path / "past"
    past.mkdir()
    for number, name in ((1, "r1"), (2, "r2"), (3, "r3"), (4, "run_20260131235959")):
        case.folder(number).rename(past / name)
    counts, notes = case.recover(5, "ada", history=[past], round=10**15)
    assert [note.code for note in notes] == ["history-gap"]
    assert "lacks round 4, 5, 6, 7, 8, 9, 10, 11…" in notes[0].message
    assert np.array_equal(counts, case.counts[5, "ada"])


def test_a_gap_is_refused_for_scaffold_without_server_variates(tmp_path: Path) -> None:
    plain = federate(tmp_path / "plain", "scaffold", 10)
    archived = federate(tmp_path / "archived", "scaffold", 10, server_controls=True)
    for case in (plain, archived):
        case.folder(3).rename(case.root.parent / f"{case.root.name}_3")
    with pytest.raises(MismatchError, match=r"scaffold needs the global models .* lacks round 3"):
        plain.recover(5, "ada")
    counts, notes = archived.recover(5, "ada")
    assert [note.code for note in notes] == ["history-gap"]
    assert np.array_equal(counts, archived.counts[5, "ada"])


@pytest.mark.parametrize("scheme", STATEFUL)
def test_a_client_absent_from_its_history_is_said(tmp_path: Path, scheme: str) -> None:
    case = federate(tmp_path, scheme, 10)
    counts, notes = case.recover(2, "dan")  # his first round, indeed
    assert [note.code for note in notes] == ["history-without-client"]
    assert np.array_equal(counts, case.counts[2, "dan"])


def test_a_damaged_history_is_a_file_error(tmp_path: Path) -> None:
    case = federate(tmp_path, "feddyn", 1)
    (case.folder(2) / "global.safetensors").unlink()
    with pytest.raises(FileError, match="round_0002: expected a global checkpoint"):
        case.recover(3, "ben")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileError, match="expected round folders"):
        find_rounds([empty], "ada", None)
    with pytest.raises(FileError, match="can't be read"):
        find_rounds([tmp_path / "nothing"], "ada", None)
    with pytest.raises(FileError, match="device or pipe"):
        find_rounds([Path("/dev/zero")], "ada", None)
    damaged = ('{"round": 1}', "[1]", '{"round": "x", "global": "g"}', "no", '{"round": 1, "global": 3}')
    damaged = (*damaged, '{"round": 2.5, "global": "g"}', '{"round": true, "global": "g"}')
    for line in damaged:
        manifest = tmp_path / "m.ndjson"
        manifest.write_text(line + "\n", encoding="utf-8")
        with pytest.raises(FileError, match="line 1: expected"):
            find_rounds([manifest], "ada", None)


@pytest.mark.parametrize("wrong", ["global", "ada", "update", "control"])
def test_a_history_of_another_model_is_refused(tmp_path: Path, wrong: str) -> None:
    """Shapes that don't go together ended as a fault of ours, or an update of them counted as none."""
    case = federate(tmp_path, "scaffold", 1, server_controls=True)
    path = case.folder(1) / f"{'ada' if wrong == 'update' else wrong}.safetensors"
    if wrong == "control":
        path = case.folder(2) / "server_control.safetensors"
    save(path, np.ones((N - 1, L + 1)), {"fl.update": "delta"} if wrong == "update" else None)
    with pytest.raises(MismatchError, match=r"not of one round" if wrong == "update" else "another model"):
        case.recover(2, "ada")


def test_notes_beside_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """The last file of a name was taken for the checkpoint, whatever it held."""
    case = federate(tmp_path, "feddyn", 10)
    for name in ("global.json", "global.sha256", "global.txt", "ada.yaml"):
        (case.folder(2) / name).write_text("abc", encoding="utf-8")
    assert case.exact(4, "ada")
    torch.save({"head.weight": torch.zeros(N, L), "head.bias": torch.zeros(N)}, case.folder(2) / "ada.pt")
    with pytest.raises(FileError, match=r"one checkpoint called ada, found ada\.pt, ada\.safetensors"):
        case.recover(4, "ada")


def test_two_sources_may_agree_but_not_differ(tmp_path: Path) -> None:
    case = federate(tmp_path / "one", "feddyn", 1)
    other = federate(tmp_path / "two", "feddyn", 1)
    rounds = find_rounds([case.root, case.root], "ada", 4)
    assert [past.number for past in rounds] == [1, 2, 3]
    assert [past.local is None for past in rounds] == [False, False, True]
    with pytest.raises(MismatchError, match="one entry for round 1"):
        find_rounds([case.root, other.root], "ada", 4)


def test_earlier_rates_are_the_files_own(tmp_path: Path) -> None:
    # c_k after a round of 10 steps, used in a round of 2: dividing by this round's η m would be wrong.
    steps = dict.fromkeys(CLIENTS, 10)
    case = federate(tmp_path, "scaffold", steps, server_controls=True)
    local = case.folder(1) / "ada.safetensors"
    assert case.exact(2, "ada")
    save(local, stack(head_of(read_checkpoint(local).tensors)), annotations_of("scaffold", 2))
    assert not case.exact(2, "ada")


def faster(case: Case, number: int) -> None:
    """Let ada train twice as fast in this round: a step's gradients and variates stay the same."""
    own, reference = (case.folder(number) / f"{name}.safetensors" for name in ("ada", "global"))
    after, before = (stack(head_of(read_checkpoint(path).tensors)) for path in (own, reference))
    about = {**read_checkpoint(own).metadata, "fl.lr": str(2 * ETA)}
    save(own, 2 * after - before, about)


@pytest.mark.parametrize("said", ["global", "sidecar", "rate alone"])
def test_earlier_rates_are_read_wherever_this_rounds_are(tmp_path: Path, said: str) -> None:
    """Only the client's own file was asked, and else this round's rate taken without a word."""
    case = federate(tmp_path, "scaffold", 10, server_controls=True)
    faster(case, 2)
    assert case.exact(2, "ada")
    own, reference = (case.folder(1) / f"{name}.safetensors" for name in ("ada", "global"))
    save(own, stack(head_of(read_checkpoint(own).tensors)))
    assert not case.exact(2, "ada")  # nobody says that it was another
    about = {"fl.round": "1", **annotations_of("scaffold", 10)}
    if said == "global":
        save(reference, stack(head_of(read_checkpoint(reference).tensors)), about)
    else:
        values = about if said == "sidecar" else {"lr": ETA}
        (case.folder(1) / "round.json").write_text(json.dumps(values), encoding="utf-8")
    assert case.exact(2, "ada")


def test_the_rate_of_a_round_that_the_client_sat_out(tmp_path: Path) -> None:
    """Scaffold's c hangs on it."""
    case = federate(tmp_path, "scaffold", 2)
    faster(case, 4)
    assert not case.exact(4, "ada")
    (case.folder(3) / "round.json").write_text(json.dumps({"lr": ETA}), encoding="utf-8")
    assert case.exact(4, "ada")


def test_stack_and_unstack() -> None:
    rng = np.random.default_rng(0)
    for head in (Head(rng.normal(size=(3, 2)), rng.normal(size=3)), Head(rng.normal(size=(3, 2)), None)):
        back = unstack(stack(head), head)
        assert np.array_equal(back.weight, head.weight)
        assert (back.bias is None) == (head.bias is None)
        assert head.bias is None or np.array_equal(back.bias, head.bias)


def test_plain_training_is_what_the_ablation_says() -> None:
    about = Annotations(local=annotations_of("feddc", 10))
    told = resolve_training(PLAIN, about).training
    assert replace(told, total=None) == LocalTraining(steps=10, batch_size=B, lr=ETA)


# On the command line.

LAMBDA: dict[str, list[object]] = {"scaffold": [], "feddyn": ["--lambda", 0.1], "feddc": ["--lambda", 0.1]}


@pytest.mark.parametrize("scheme", STATEFUL)
def test_missing_history_on_the_command_line(scheme: str) -> None:
    flags = [*sample("untrained_m1"), *QUICK, "--scheme", scheme, *LAMBDA[scheme], "--round"]
    message = call("recover", *flags, 4).refusal(4)
    assert "rounds 1 to 3" in message
    assert "--history" in message
    document = call("recover", *flags, 1).document
    assert document["counts"] == truth("untrained_m1")
    assert document["training"]["scheme"] == scheme
