"""The client's earlier rounds, for schemes that remember them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from rlu_cli.audit.annotations import Annotations, whole
from rlu_cli.audit.annotations import number as annotation_number
from rlu_cli.audit.local_model import layer_head, local_head
from rlu_cli.audit.options import HistoryOptions, TrainingOptions
from rlu_cli.audit.training import resolve_training
from rlu_cli.audit.updates import add_update, check_same_tensors, update_kind
from rlu_cli.core.schemes import step_rates
from rlu_cli.core.types import FloatArray, Head, LocalTraining, Note
from rlu_cli.core.variates import ClientState, next_server_control
from rlu_cli.errors import FileError, MismatchError
from rlu_cli.files.checkpoint import Checkpoint, is_checkpoint, read_checkpoint
from rlu_cli.files.json_io import parse_json
from rlu_cli.files.metadata import read_sidecar
from rlu_cli.files.regular import is_folder, read_bounded

GLOBAL_STEM = "global"
SERVER_CONTROL_STEM = "server_control"
_ROUND = re.compile(r"(\d+)$")
_MANIFEST_LIMIT = 64 * 2**20
_NAMED = 8
"""How many missing rounds a warning names."""


@dataclass(frozen=True)
class PastRound:
    """The files of one earlier round; ``local`` is None where the client sat it out."""

    number: int
    reference: Path
    local: Path | None
    server_control: Path | None


@dataclass(frozen=True)
class History:
    """How to turn files into vectors: what the auditor knows of this round's network.

    named : the checkpoint with its tensors by name
    head_name : prefix of the output layer
    key : where weights lie in nested files
    parameters : all of a network's parameters in a checkpoint, None for its output layer alone
    """

    named: Callable[[Checkpoint], Checkpoint]
    head_name: str
    options: TrainingOptions
    key: str | None = None
    parameters: Callable[[Checkpoint], FloatArray] | None = None

    def read(self, path: Path) -> Checkpoint:
        """A file with its tensors by name."""
        return self.named(read_checkpoint(path, key=self.key, key_optional=True))

    def vector(self, checkpoint: Checkpoint) -> FloatArray:
        """[W | b] of the output layer, shape (N, L + 1), or (N, L) without bias; or all parameters."""
        if self.parameters is not None:
            return self.parameters(checkpoint)
        return stack(layer_head(checkpoint, self.head_name))

    def of_file(self, path: Path, like: FloatArray) -> FloatArray:
        """The same of a file, of this round's shape.

        Raises
        ------
        MismatchError
            It is of another network.
        """
        return _alike(self.vector(self.read(path)), like, path)

    def of_local(self, path: Path, reference: Path, like: FloatArray) -> tuple[FloatArray, Annotations]:
        """The same of a client's model, whose file may hold an update, and what is written of its round."""
        local, base = self.read(path), self.read(reference)
        annotations = Annotations(local.metadata, base.metadata, read_sidecar(path))
        kind = update_kind(self.options.update, annotations)
        if kind == "delta":  # what such a file lacks, or has in another shape, counts as unchanged else
            check_same_tensors(local, base)
        if self.parameters is None:
            return _alike(stack(local_head(local, base, kind, self.head_name)), like, path), annotations
        whole = self.vector(local if kind == "weights" else add_update(local, base))
        return _alike(whole, like, path), annotations

    def of_absence(self, reference: Path) -> Annotations:
        """What is written of a round that the client sat out."""
        metadata = read_checkpoint(reference, key=self.key, key_optional=True).metadata
        return Annotations({}, metadata, read_sidecar(reference))


def find_rounds(sources: Sequence[Path], client: str, before: int | None) -> list[PastRound]:
    """The rounds in ``sources``, in order, up to but without round ``before``.

    A source is a folder of round folders (``round_0003/global.safetensors``, ``round_0003/CLIENT.…``) or
    an NDJSON manifest with lines {"round", "global", "local", "server_control"}, the last two optional,
    paths relative to the manifest.

    Raises
    ------
    FileError
        A source that is neither, or that is damaged.
    MismatchError
        Two sources that disagree on a round.
    """
    found: dict[int, PastRound] = {}
    for source in sources:
        rounds = _from_folder(source, client) if is_folder(source) else _from_manifest(source)
        for past in rounds:
            if found.setdefault(past.number, past) != past:
                raise MismatchError(f"expected one entry for round {past.number} in --history, found two")
    return [found[number] for number in sorted(found) if before is None or number < before]


def constant_gradient(
    history: History,
    now: FloatArray,
    training: LocalTraining,
    *,
    client: str,
    archived: HistoryOptions,
    annotations: Annotations,
) -> tuple[FloatArray, list[Note]]:
    """The scheme's constant gradient in this round, from the client's earlier ones, shaped as ``now``.

    Parameters
    ----------
    now : this round's global model, as `History.vector` has it

    Raises
    ------
    MismatchError
        Rounds or variates that the scheme needs are missing; the message names them.
    """
    number = annotations.get("round", archived.round, _number)
    participation = annotations.get("participation", archived.participation, _share)
    known = find_rounds(archived.history or [], client, None if number is None else number + 1)
    rounds = [past for past in known if past.number != number]
    total_rate = float(step_rates(training).sum())
    zero = np.zeros_like(now)
    given = _given_control(history, now, training.scheme, archived, known, number)
    if archived.client_control is not None:
        if given is None:
            raise MismatchError("expected --server-control beside --client-control: pass both variates")
        return given - history.of_file(archived.client_control, now), []
    if number is not None and number <= 1 and not rounds:  # some count from 0
        return zero if given is None else given, []
    if not rounds:
        raise MismatchError(_missing_history(training.scheme, number))
    notes = _gaps(rounds, number)
    if notes and training.scheme == "scaffold" and not _has_controls(rounds, given):
        raise MismatchError(
            "scaffold needs the global models of all earlier rounds, or its server variates, but "
            f"{notes[0].message}"
        )
    if training.scheme == "feddc":
        _check_last_update(rounds, number)
    state, control = ClientState.fresh(zero), zero
    models = (history.of_file(past.reference, now) for past in rounds)  # two at a time: networks are large
    before = next(models)
    for past in rounds:
        if number is None and np.array_equal(before, now):
            raise MismatchError(
                f"expected earlier rounds in --history, found this one (round {past.number} has the same "
                f"global output layer): say which round this is with --round {past.number}"
            )
        after = next(models, now)
        if past.server_control is not None:
            control = history.of_file(past.server_control, now)
        if past.local is None:
            rate = _past_rate(history.options, history.of_absence(past.reference), annotations, total_rate)
        else:
            local, written = history.of_local(past.local, past.reference, now)
            rate = _past_rate(history.options, written, annotations, total_rate)
            state = state.after_round(
                local - before, global_update=after - before, server_control=control, total_rate=rate
            )
        control = next_server_control(
            control, after - before, participation=participation or 1.0, total_rate=rate
        )
        before = after
    if all(past.local is None for past in rounds):
        notes.append(
            Note(
                "history-without-client",
                "the history has no local checkpoint of this client, so it is taken to train for the first "
                "time: name its files as in this round, or list them in a manifest",
            )
        )
    k = state.constant_gradient(
        training, server_control=control if given is None else given, total_rate=total_rate
    )
    return k, notes


def _given_control(
    history: History,
    now: FloatArray,
    scheme: str,
    archived: HistoryOptions,
    known: Sequence[PastRound],
    number: int | None,
) -> FloatArray | None:
    """Scaffold's c of this round: the flag's, else the archive's own, else None."""
    if scheme != "scaffold":
        if archived.server_control is not None or archived.client_control is not None:
            raise MismatchError(
                f"expected --server-control and --client-control with scaffold only, found {scheme}: leave "
                "them out, or correct --scheme"
            )
        return None
    path = archived.server_control
    if path is None:
        path = next((now.server_control for now in known if now.number == number), None)
    return None if path is None else history.of_file(path, now)


def _alike(found: FloatArray, like: FloatArray, path: Path) -> FloatArray:
    """The vector, if it has this round's shape and numbers."""
    if not np.isfinite(found).all():
        raise MismatchError(f"expected finite weights in {path}, found NaN or infinity: restore the file")
    if found.shape != like.shape:
        raise MismatchError(
            f"expected tensors of this round's shapes in {path}, found others ({found.shape} where the "
            f"global model has {like.shape}, weights and biases together): it is of another model"
        )
    return found


def _number(value: str) -> int:
    number = whole(value)
    if number < 0:
        raise ValueError("expected a round's number, at least 0")
    return number


def _share(value: str) -> float:
    share = annotation_number(value)
    if not 0 < share <= 1:
        raise ValueError("expected a share of the clients, above 0 and at most 1")
    return share


def stack(head: Head) -> FloatArray:
    """[W | b], shape (N, L + 1), or W alone for a head without bias."""
    return head.weight if head.bias is None else np.column_stack((head.weight, head.bias))


def unstack(stacked: FloatArray, like: Head) -> Head:
    """The inverse of `stack`."""
    if like.bias is None:
        return Head(stacked, None)
    return Head(stacked[:, :-1], stacked[:, -1])


def _from_folder(root: Path, client: str) -> list[PastRound]:
    rounds = []
    for folder in sorted(root.iterdir()):
        match = _ROUND.search(folder.name)
        if match is None or not folder.is_dir():
            continue
        reference = _checkpoint(folder, GLOBAL_STEM)
        if reference is None:
            raise FileError(f"{folder}: expected a global checkpoint, found none; name it global.safetensors")
        own, control = _checkpoint(folder, client), _checkpoint(folder, SERVER_CONTROL_STEM)
        rounds.append(PastRound(int(match[1]), reference, own, control))
    if not rounds:
        raise FileError(
            f"{root}: expected round folders such as round_0001, each with global.safetensors and the "
            "clients' checkpoints, found none"
        )
    return rounds


def _checkpoint(folder: Path, stem: str) -> Path | None:
    """The checkpoint of that name in a round's folder, whatever lies beside it (``global.sha256``)."""
    found = [path for path in sorted(folder.iterdir()) if path.stem == stem and path.is_file()]
    if len(found) > 1:
        found = [path for path in found if is_checkpoint(path)] or found[:1]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise FileError(f"{folder}: expected one checkpoint called {stem}, found {names}; keep one of them")
    return found[0] if found else None


def _from_manifest(path: Path) -> list[PastRound]:
    try:
        lines = read_bounded(path, _MANIFEST_LIMIT).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise FileError(
            f"{path}: can't be read ({reason}); pass a folder of rounds or an NDJSON manifest"
        ) from error
    rounds = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            local, control = entry.get("local"), entry.get("server_control")
            rounds.append(
                PastRound(
                    _number(str(entry["round"])),
                    path.parent / entry["global"],
                    None if local is None else path.parent / local,
                    None if control is None else path.parent / control,
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise FileError(
                f'{path}: line {number}: expected {{"round": 3, "global": "…", "local": "…"}}, found '
                f"{line[:60]!r}"
            ) from error
    return rounds


def _past_rate(options: TrainingOptions, written: Annotations, now: Annotations, default: float) -> float:
    """Σ_τ η_τ of an earlier round: what is written of it, filled from this one if need be, else its."""
    this_round = {**now.sidecar, **now.reference, **now.local}
    for filled in (written, replace(written, config=this_round)):
        try:
            record = resolve_training(options, filled)
        except MismatchError:
            continue
        return float(step_rates(record.training).sum())
    return default


def _gaps(rounds: Sequence[PastRound], current: int | None) -> list[Note]:
    """A note when earlier rounds are missing from the history."""
    last = (rounds[-1].number + 1) if current is None else current
    there = {past.number for past in rounds if 1 <= past.number < last}
    missing = last - 1 - len(there)  # counted, not listed: a date may stand for the number
    if missing <= 0:
        return []
    first = islice((number for number in range(1, last) if number not in there), _NAMED)
    shown = ", ".join(map(str, first)) + ("…" if missing > _NAMED else "")
    message = f"the history lacks round {shown}, which the client is taken to have sat out"
    return [Note("history-gap", message)]


def _check_last_update(rounds: Sequence[PastRound], current: int | None) -> None:
    """Refuse a history without the global model after the client's last round, which FedDC's gap is to.

    Raises
    ------
    MismatchError
    """
    taken = [place for place, past in enumerate(rounds) if past.local is not None]
    if not taken:
        return
    last = rounds[taken[-1]].number
    after = rounds[taken[-1] + 1].number if taken[-1] + 1 < len(rounds) else current
    if after is not None and after != last + 1:
        raise MismatchError(
            f"feddc needs the global model after the client's last round, {last}, but the history lacks "
            f"round {last + 1}: add its global checkpoint"
        )


def _has_controls(rounds: Sequence[PastRound], current: FloatArray | None) -> bool:
    """Whether Scaffold's c is archived for this round and for all that the client took part in."""
    return current is not None and all(
        past.server_control is not None for past in rounds if past.local is not None
    )


def _missing_history(scheme: str, number: int | None) -> str:
    earlier = "all earlier rounds" if number is None else f"rounds 1 to {number - 1}"
    if number == 2:
        earlier = "round 1"
    more = " (or its variates: --server-control and --client-control)" if scheme == "scaffold" else ""
    first = "" if number is not None else ". If this is the client's first round, say so with --round 1"
    return (
        f"missing history: {scheme} needs this client's global and local checkpoints of {earlier}{more}: "
        f"pass --history with the folder of rounds or a manifest{first}"
    )
