"""A small sample of the fuzz run (benchmarks/fuzz.py), and that the run notices what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz import Case, corpus_of, judge, make_case, run_case
from benchmarks.fuzz_corpus import IMAGE_FORMS, Corpus

SAMPLE = {"checkpoints": 120, "images": 80}
SEED = 1
"""Not the recorded run's: these cases are others."""


@pytest.fixture(scope="module", params=sorted(SAMPLE))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def corpus(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Path]:
    root = tmp_path_factory.mktemp("corpus")
    return corpus_of(kind, root / "files", root / "marker"), root / "marker"


def test_sample(kind: str, corpus: tuple[Corpus, Path], tmp_path: Path) -> None:
    forms, marker = corpus
    codes = set()
    for number in range(SAMPLE[kind]):
        case = make_case(forms, kind, number, SEED)
        code, err = run_case(case, tmp_path / str(number))
        assert judge(code, err, marker) is None, (f"{kind}:{number}", case.form, case.arguments, code, err)
        codes.add(code)
    assert {0, 3} <= codes  # some changes do no harm, and some are noticed


def test_unchanged_files_are_read(kind: str, corpus: tuple[Corpus, Path], tmp_path: Path) -> None:
    """The corpus itself is sound: what fails in the run fails because it was changed."""
    forms, marker = corpus
    for name, form in forms.forms.items():
        for number, command in enumerate(form.commands):
            code, err = run_case(Case(name, dict(form.files), command), tmp_path / name / str(number))
            if name in IMAGE_FORMS and "28" not in command:
                continue  # the turned image may have another size
            expected = 3 if "payload" in name else 0
            assert (code, judge(code, err, marker)) == (expected, None), (name, command, err)


@pytest.mark.parametrize(
    ("code", "err", "fault"),
    [
        (0, "", None),
        (3, "rlu: error: x.\n", None),
        (4, "rlu: warning [a]: b.\nrlu: error: x.\n", None),
        (1, "rlu: error: x.\n", "exit code 1"),
        (2, "rlu: error: x.\n", "exit code 2"),
        (-1, "", "exit code -1"),
        (3, "Traceback (most recent call last):\nrlu: error: x.\n", "foreign line"),
        (0, "a.py:3: RuntimeWarning: overflow\n", "foreign line"),
        (3, "", "not one error line"),
    ],
)
def test_judge(tmp_path: Path, code: int, err: str, fault: str | None) -> None:
    found = judge(code, err, tmp_path / "marker")
    assert found is None if fault is None else fault in str(found)
    (tmp_path / "marker").touch()
    assert judge(0, "", tmp_path / "marker") == "code from the file ran"
