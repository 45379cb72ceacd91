"""The command line as a process: start-up, pipes, terminals, interrupts, and the same answer anywhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tools import AUX, QUICK, SAMPLES, Outcome, call, process, sample

from rlu_cli.cli.app import app

COMMANDS = [str(command.name) for command in app.registered_commands]
RLU = [sys.executable, "-m", "rlu_cli"]

LOADED = """
import sys
from rlu_cli.cli.app import run
code = run(sys.argv[1:])
sys.stderr.write(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
sys.exit(code)
"""
"""Runs a command and tells on stderr which packages it has loaded."""


def test_help_loads_nothing_heavy() -> None:
    for arguments in (["--help"], ["recover", "--help"]):
        outcome = process(*arguments, python=LOADED)
        assert outcome.code == 0
        loaded = set(outcome.err.split())
        assert "typer" in loaded
        assert not loaded & {"torch", "numpy", "scipy", "rich", "PIL", "safetensors"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    outcome = call(command, "--help")
    assert outcome.code == 0
    assert f"rlu {command} " in outcome.out.replace(f"Usage: rlu {command}", "")
    assert outcome.out == call(command, "-h").out


def test_main_help_names_every_command_and_an_example() -> None:
    text = call("--help").out
    assert {"estimate-logits", "recover", "evaluate", "inspect"} <= set(COMMANDS)
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.MULTILINE)
    assert "rlu recover --global g.safetensors --local k.safetensors --aux ./aux" in text
    assert "\x1b" not in text


def test_version_as_process() -> None:
    outcome = process("--version")
    assert re.fullmatch(r"rlu \d+\.\d+\.\d+\S*\n", outcome.out)
    assert (outcome.code, outcome.err) == (0, "")


def test_errors_as_process() -> None:
    assert "--bogus" in process("recover", "--bogus").refusal(2)


def test_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Hash randomisation never shows; other thread counts change at most the last digits."""
    estimate = ["estimate-logits", "--global", SAMPLES / "trained_m1" / "global.safetensors", "--aux", AUX]
    found: list[tuple[Outcome, Outcome, bytes]] = []
    for number, (seed, threads) in enumerate([("1", "1"), ("2", "1"), ("3", "2")]):
        environment = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads}
        stats = tmp_path / f"stats{number}.safetensors"
        both = process(*estimate, *QUICK, "-o", stats, python=BOTH, **environment)
        assert both.code == 0, both.err
        loaded = set(both.err.split())
        assert {"torch", "PIL"} <= loaded
        assert not loaded & {"scipy", "rich", "sklearn", "torchvision", "timm"}
        summary, _, recovered = both.out.partition("\x00")
        found.append((Outcome(0, summary, ""), Outcome(0, recovered, ""), stats.read_bytes()))
    first, second, threaded = found
    assert first[0].document["classes"] == second[0].document["classes"]
    assert first[1].out == second[1].out
    assert first[2] == second[2]
    one, two = first[1].document, threaded[1].document
    assert one["counts"] == two["counts"]
    estimates = [[entry["estimate"] for entry in document["classes"]] for document in (one, two)]
    assert estimates[0] == pytest.approx(estimates[1], rel=1e-6, abs=1e-6)  # replays train in float32


BOTH = f"""
import sys
from rlu_cli.cli.app import run
code = run(sys.argv[1:])
sys.stdout.write("\\0")
sys.stdout.flush()
code = code or run(["recover", *{[str(flag) for flag in (*sample("trained_m10", 1), *QUICK)]!r}])
sys.stderr.write(" ".join(sorted({{name.partition(".")[0] for name in sys.modules}})))
sys.exit(code)
"""
"""Both commands in one process, as loading torch takes longer than either; tells what is loaded as well."""

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX signals, pipes and terminals")


def _heed_interrupts() -> None:
    """A shell's background jobs inherit the signal ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def many() -> Iterator[subprocess.Popen[bytes]]:
    """A recovery of many clients, which prints the first lines long before it ends."""
    local = [str(flag) for _ in range(1000) for flag in sample("untrained_m1")[2:4]]
    start = [str(flag) for flag in sample("untrained_m1")[:2]]
    command = [*RLU, "recover", *start, *local, "--aux", str(AUX), *QUICK]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heed_interrupts
    ) as running:
        yield running
        running.kill()


@posix
def test_reader_that_leaves_is_no_fault(many: subprocess.Popen[bytes]) -> None:
    assert many.stdout is not None
    assert many.stderr is not None
    assert many.stdout.read(1) == b"{"
    many.stdout.close()
    assert many.stderr.read() == b""
    assert many.wait(timeout=60) == 0


@posix
def test_130_on_a_real_interrupt(many: subprocess.Popen[bytes]) -> None:
    assert many.stdout is not None
    assert many.stderr is not None
    assert many.stdout.readline().startswith(b"{")  # lines come as they are ready, not at the end
    many.send_signal(signal.SIGINT)
    rest = many.stdout.read()
    assert rest == b"" or rest.endswith(b"}\n")
    assert many.stderr.read() == b""
    assert many.wait(timeout=60) == 130


@posix
def test_a_full_disk_behind_stdout() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with full.open("wb") as stdout:
        command = [*RLU, "inspect", str(SAMPLES / "untrained_m1" / "global.safetensors")]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == 3
    assert re.fullmatch(rb"rlu: error: stdout can't be written [^\n]*\n", done.stderr)


def on_terminal(*arguments: object, **environment: str) -> tuple[int, bytes, str]:
    """Run with stderr on a terminal: exit code, stdout, and what the terminal got."""
    pty = pytest.importorskip("pty")
    here, there = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [*RLU, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=there,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    ) as running:
        os.close(there)
        shown = b""
        while True:
            try:
                piece = os.read(here, 65536)
            except OSError:  # Linux tells the end of a terminal so
                break
            if not piece:
                break
            shown += piece
        assert running.stdout is not None
        out = running.stdout.read()
        code = running.wait(timeout=60)
    os.close(here)
    return code, out, shown.decode("utf-8")


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")


@posix
def test_a_terminal_gets_progress_and_a_table() -> None:
    flags = ["recover", *sample("untrained_m1"), *QUICK]
    code, out, shown = on_terminal(*flags)
    assert code == 0
    assert out.decode("utf-8") == call(*flags).out  # the pipe gets what it gets anyway
    assert "ankle-boot" in shown
    assert "auxiliary images" in shown
    assert COLOUR.search(shown)


@posix
def test_no_color_on_a_terminal() -> None:
    code, _, shown = on_terminal("recover", *sample("untrained_m1"), *QUICK, NO_COLOR="1")
    assert code == 0
    assert "ankle-boot" in shown
    assert not COLOUR.search(shown)
