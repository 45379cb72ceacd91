"""Paths that no file can have, on the command line and in files: refused, never a fault of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_tools import AUX, QUICK, SAMPLES, call, sample, tensors, write_safetensors

from rlu_cli.errors import FileError
from rlu_cli.files.checkpoint import read_checkpoint

LONG = "x" * 5000
TRUTH = SAMPLES / "untrained_m1" / "truth.json"
GLOBAL, LOCAL = sample("untrained_m1", aux=None)[:2], sample("untrained_m1", aux=None)[2:]
ROUND = sample("untrained_m1")
TRAINING = ["--rounds", 1, "--clients", 2, "--aux-per-class", 5, "--lr", 0.1, "--batch-size", 8, "--steps", 1]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["recover", "--global", LONG, *LOCAL, "--aux", AUX], 3),
        (["recover", *GLOBAL, "--local", LONG, "--aux", AUX], 3),
        (["recover", *GLOBAL, *LOCAL, "--aux", LONG], 3),
        (["recover", *GLOBAL, *LOCAL, "--stats", LONG], 3),
        (["recover", *GLOBAL, *LOCAL, "--aux-logits", LONG], 3),
        (["recover", *ROUND, "--class-order", LONG], 2),
        (["recover", *ROUND, "--arch", f"{LONG}.py:make"], 3),
        (["recover", *ROUND, "--scheme", "feddyn", "--lambda", 1, "--history", LONG], 3),
        (["recover", *ROUND, "--scheme", "scaffold", "--server-control", LONG, "--client-control", LONG], 3),
        (["recover", *ROUND, *QUICK, "--cache", LONG], 3),
        (["recover", *ROUND, *QUICK, "-o", LONG], 3),
        (["estimate-logits", *GLOBAL, "--aux", AUX, *QUICK, "-o", LONG], 3),
        (["evaluate", *ROUND, *QUICK, "--truth", LONG], 3),
        (["evaluate", "--result", LONG, "--truth", TRUTH], 3),
        (["evaluate", "--archive", LONG], 3),
        (["simulate", "--data", LONG, "-o", "out"], 3),
        (["simulate", "--data", AUX, *TRAINING, "-o", LONG], 3),
        (["inspect", LONG], 3),
    ],
    ids=lambda value: " ".join(str(part)[:20] for part in value) if isinstance(value, list) else None,
)
def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    message = call(*arguments).refusal(code)
    assert "fault of rlu" not in message
    assert list(tmp_path.iterdir()) == []


def test_what_the_system_refuses_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/private/\x1b[31mlog")

    monkeypatch.setattr("rlu_cli.audit.client_round.recover_together", denied)
    message = call("recover", *ROUND, *QUICK).refusal(3)
    assert "/private/" in message and "Permission denied" in message and "\x1b" not in message


@pytest.mark.parametrize("shard", [LONG, "x" * 300, "a\ud800.safetensors"])
def test_shards(tmp_path: Path, shard: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(FileError, match="1 of 1 shards are missing"):
        read_checkpoint(tmp_path / "index.json")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"round": 1, "global": LONG}, "can't be read"),
        ({"round": 1, "global": "a\0b"}, "a?b"),
        ({"round": 1, "global": str(ROUND[1]), "local": LONG}, "can't be read"),
        ('{"round": 1e999, "global": "g"}', "line 1"),
        ('{"round": NaN, "global": "g"}', "line 1"),
    ],
)
def test_manifests_of_history(tmp_path: Path, line: dict[str, object] | str, words: str) -> None:
    manifest = tmp_path / "rounds.ndjson"
    manifest.write_text(line if isinstance(line, str) else json.dumps(line))
    flags = ["--scheme", "feddyn", "--lambda", 1, "--history", manifest, "--round", 2]
    assert words in call("recover", *ROUND, *QUICK, *flags).refusal(3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "lenet5:a b=1"}, "damaged statistics file"),
        ({"normalize": "mean=;std="}, "damaged statistics file"),
        ({"image_size": [28, "x"]}, "damaged statistics file"),
        ({"class_names": [1] * 10}, "expected a statistics file"),
        ({"class_names": ["a"]}, "expected a statistics file"),
        ({"class_names": 3}, "expected a statistics file"),
        ({"embedding_size": "84"}, "expected a statistics file"),
        ({"head": None}, "expected a statistics file"),
        ({"arch": 5}, "expected a statistics file"),
    ],
)
def test_statistics_with_a_right_checksum_and_wrong_words(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    from rlu_cli.audit.statistics_file import StoredStatistics, read_statistics, write_statistics

    stats = tmp_path / "s.safetensors"
    assert call("estimate-logits", *GLOBAL, "--aux", AUX, *QUICK, "-o", stats).code == 0
    kept = read_statistics(stats)
    about = {name: value for name, value in kept.about.items() if name != "sha256"}
    write_statistics(stats, StoredStatistics(kept.statistics, {**about, **changes}))
    assert words in call("recover", *GLOBAL, *LOCAL, "--stats", stats).refusal(3)


def test_statistics_whose_words_were_changed(tmp_path: Path) -> None:
    stats = tmp_path / "s.safetensors"
    assert call("estimate-logits", *GLOBAL, "--aux", AUX, *QUICK, "-o", stats).code == 0
    about = json.loads(read_checkpoint(stats).metadata["rlu.statistics"])
    about["class_names"] = about["class_names"][::-1]
    write_safetensors(stats, tensors(stats), {"rlu.statistics": json.dumps(about)})
    assert "not what was written" in call("recover", *GLOBAL, *LOCAL, "--stats", stats).refusal(3)
