"""Damaged and hostile files through the command line: 10,000 checkpoints, 2,000 images and data sets.

    python -m benchmarks.fuzz                              (both, some 20 minutes on one core)
    python -m benchmarks.fuzz --checkpoints 300 --images 100
    python -m benchmarks.fuzz --only checkpoints:1234      (one case again, with its traceback)

Every case takes a real file, changes it, and runs a command on it in this process, every 200th in a process
of its own. It must end with exit code 0, 3 or 4, print only lines of ours on stderr, run no code from the
file (a marker would appear), take less than a minute of CPU time, and leave the process below 1 GB. What
breaks a rule is printed and kept in --keep. Cases follow from --seed and their number alone. Prints a summary
as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.fuzz_corpus import Corpus, checkpoint_corpus, image_corpus

ALLOWED = (0, 3, 4)
SECONDS = 60
"""CPU time, which other work on the machine doesn't change."""

PATIENCE = 900
"""Seconds on the clock after which a case counts as hanging."""

MEGABYTES = 1000
PROCESS_EVERY = 200
BATCH = 250
"""Cases of one worker process, so that a leak can't hide the memory that one case takes."""

_WORDS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", b"\x00" * 8, b"\xff" * 8)


@dataclass(frozen=True)
class Case:
    """A changed file and the command that reads it.

    files : what to write into an empty folder, by relative path
    arguments : of the command; ``{}`` stands for the folder
    """

    form: str
    files: dict[str, bytes]
    arguments: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where failing files go")
    parser.add_argument(
        "--only", metavar="KIND:NUMBER", help="run one case in this process, with its traceback"
    )
    arguments = parser.parse_args()
    if arguments.only:
        kind, _, number = arguments.only.partition(":")
        show(kind, int(number), arguments.seed, arguments.keep)
        return
    summary = {
        kind: campaign(kind, count, arguments.seed, arguments.keep)
        for kind, count in (("checkpoints", arguments.checkpoints), ("images", arguments.images))
        if count
    }
    print(json.dumps(summary, indent=2))
    if any(part["failures"] for part in summary.values()):
        sys.exit(1)


# Cases.


def make_case(corpus: Corpus, kind: str, number: int, seed: int) -> Case:
    """The case of this number."""
    chance = random.Random(f"{seed}/{kind}/{number}")
    form = chance.choice(sorted(corpus.forms))
    sources = corpus.forms[form]
    files = dict(sources.files)
    victim = chance.choice(sorted(sources.victims))
    others = [data for other in corpus.forms.values() for data in other.files.values()]
    files[victim] = mutate(files[victim], chance, others)
    return Case(form, files, chance.choice(sources.commands))


def mutate(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """``data`` changed in one to eight places, most often where headers and directories are."""
    if chance.random() < 0.1:
        return data[: chance.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        _ACTIONS[chance.randrange(len(_ACTIONS))](changed, _place(changed, chance), chance, others)
        if not changed:
            break
    return bytes(changed)


def _place(data: bytearray, chance: random.Random) -> int:
    at = chance.randrange(len(data))
    if chance.random() < 0.7:
        head, tail = min(len(data), 700), min(len(data), 1200)
        return chance.choice((at % head, len(data) - 1 - at % tail))
    return at


Action = Callable[[bytearray, int, random.Random, Sequence[bytes]], None]


def _flip(data: bytearray, at: int, chance: random.Random, others: Sequence[bytes]) -> None:
    data[at] ^= 1 << chance.randrange(8)


def _set(data: bytearray, at: int, chance: random.Random, others: Sequence[bytes]) -> None:
    data[at] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))


def _delete(data: bytearray, at: int, chance: random.Random, others: Sequence[bytes]) -> None:
    del data[at : at + chance.choice((1, 2, 4, 8, 100))]


def _insert(data: bytearray, at: int, chance: random.Random, others: Sequence[bytes]) -> None:
    data[at:at] = chance.randbytes(chance.choice((1, 2, 4, 8, 100)))


def _word(data: bytearray, at: int, chance: random.Random, others: Sequence[bytes]) -> None:
    word = chance.choice(_WORDS)
    data[at : at + len(word)] = word


def _digits(data: bytearray, at: int, chance: random.Random, others: Sequence[bytes]) -> None:
    """Another number where the nearest number in text stands."""
    for here in range(at, min(len(data), at + 400)):
        if chr(data[here]).isdigit():
            number = chance.choice((b"0", b"-1", b"1e308", b"9" * 19, b"1" * 400, b"nan", b"99999999"))
            data[here : here + 1] = number
            return
    _flip(data, at, chance, others)


def _splice(data: bytearray, at: int, chance: random.Random, others: Sequence[bytes]) -> None:
    """A piece of another file, or of this one, in its place or between."""
    other = chance.choice(others) if chance.random() < 0.5 else bytes(data)
    start = chance.randrange(len(other) + 1)
    piece = other[start : start + chance.choice((4, 16, 64, 512))]
    data[at : at + (len(piece) if chance.random() < 0.5 else 0)] = piece


_ACTIONS: tuple[Action, ...] = (_flip, _flip, _set, _delete, _insert, _word, _digits, _splice)


# Running them.


def run_case(case: Case, folder: Path, *, own_process: bool = False) -> tuple[int, str]:
    """Exit code and stderr of the command on the case's files in ``folder``."""
    for name, data in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    arguments = [argument.replace("{}", str(folder)) for argument in case.arguments]
    if own_process:
        return _in_process(arguments)
    from rlu_cli.cli.app import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _descriptor_two() as rest:
        code = run(arguments)
        rest.seek(0)
        foreign = rest.read().decode(errors="replace")
    return code, err.getvalue() + foreign


@contextlib.contextmanager
def _descriptor_two() -> Iterator[BinaryIO]:
    """What libraries write to stderr's descriptor, past Python, goes into a file."""
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            yield file
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _in_process(arguments: list[str]) -> tuple[int, str]:
    """The same by a process of its own; too much memory counts as a line on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "rlu_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    more = f"a process took {used:.0f} MB\n" if used > MEGABYTES else ""
    return done.returncode, done.stderr + more


def judge(code: int, err: str, marker: Path) -> str | None:
    """What rule the outcome breaks, if any."""
    if code not in ALLOWED:
        return f"exit code {code}"
    if marker.exists():
        return "code from the file ran"
    foreign = [line for line in err.splitlines() if not line.startswith("rlu: ")]
    if foreign:
        return f"foreign line on stderr: {foreign[0][:200]}"
    if code and len(err.splitlines()) - err.count("rlu: warning") != 1:
        return "not one error line"
    return None


def _cpu() -> float:
    """CPU seconds of this process and of those it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def corpus_of(kind: str, folder: Path, marker: Path) -> Corpus:
    return (checkpoint_corpus if kind == "checkpoints" else image_corpus)(folder, marker)


def worker(kind: str, numbers: range, seed: int, keep: Path, pipe: Connection) -> None:
    """Run cases and report each: number, form, exit code, fault, seconds, megabytes."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        marker = root / "marker"
        corpus = corpus_of(kind, root / "corpus", marker)
        for number in numbers:
            pipe.send(("start", number))
            case = make_case(corpus, kind, number, seed)
            folder = root / f"case{number}"
            started = _cpu()
            try:
                code, err = run_case(case, folder, own_process=number % PROCESS_EVERY == 0)
            except BaseException as error:  # noqa: BLE001  (whatever escapes is what is looked for)
                code, err = -1, f"{type(error).__name__}: {error}"
            seconds = _cpu() - started
            megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            fault = judge(code, err, marker)
            if fault is None and megabytes > MEGABYTES:
                fault = f"{megabytes:.0f} MB"
            if fault is None and seconds > SECONDS:
                fault = f"{seconds:.0f} s of CPU time"
            if fault is not None:
                kept = keep / f"{kind}-{number}"
                kept.parent.mkdir(parents=True, exist_ok=True)
                if not kept.exists():
                    folder.rename(kept)
            pipe.send(("end", number, case.form, code, fault, seconds, megabytes))
            marker.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            if megabytes > MEGABYTES:
                break


def campaign(kind: str, count: int, seed: int, keep: Path) -> dict[str, Any]:
    """Run ``count`` cases in worker processes that are watched."""
    codes: Counter[int] = Counter()
    forms: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest, most, started = 0.0, 0.0, time.monotonic()
    first = 0
    while first < count:
        numbers = range(first, min(first + BATCH, count))
        for number, form, code, fault, seconds, megabytes in _watched(kind, numbers, seed, keep):
            first = number + 1
            codes[code] += 1
            forms[form] += 1
            slowest, most = max(slowest, seconds), max(most, megabytes)
            if fault is not None:
                failures.append({"number": number, "form": form, "fault": fault})
                print(f"{kind}:{number} ({form}): {fault}", file=sys.stderr, flush=True)
    return {
        "cases": sum(codes.values()),
        "seed": seed,
        "exit_codes": {str(code): codes[code] for code in sorted(codes)},
        "forms": dict(sorted(forms.items())),
        "failures": failures,
        "slowest_cpu_seconds": round(slowest, 1),
        "peak_megabytes": round(most),
        "minutes": round((time.monotonic() - started) / 60),
    }


Report = tuple[int, str, int, "str | None", float, float]


def _watched(kind: str, numbers: range, seed: int, keep: Path) -> Iterator[Report]:
    """The reports of one worker; a case that hangs or kills it is one too, and ends it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=worker, args=(kind, numbers, seed, keep, theirs), daemon=False
    )
    process.start()
    theirs.close()
    current = numbers.start
    try:
        while True:
            if not ours.poll(PATIENCE):
                os.kill(process.pid or 0, signal.SIGKILL)
                yield current, "?", -2, f"no end after {PATIENCE} s", 0.0, 0.0
                return
            try:
                message = ours.recv()
            except EOFError:
                break
            if message[0] == "start":
                current = message[1]
            else:
                yield message[1:]
                current = -1
    finally:
        process.join()
    if current >= 0:
        yield current, "?", -3, f"the process died ({process.exitcode})", 0.0, 0.0


def show(kind: str, number: int, seed: int, keep: Path) -> None:
    """Run one case with its traceback, and keep its files."""
    with tempfile.TemporaryDirectory() as name:
        marker = Path(name) / "marker"
        case = make_case(corpus_of(kind, Path(name) / "corpus", marker), kind, number, seed)
        folder = keep / f"{kind}-{number}"
        case = Case(case.form, case.files, (*case.arguments, "-vv"))
        code, err = run_case(case, folder)
        print(
            case.form, " ".join(case.arguments).replace("{}", str(folder)), f"exit code {code}", err, sep="\n"
        )
        print("marker!" if marker.exists() else "no marker")


if __name__ == "__main__":
    main()
