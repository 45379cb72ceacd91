"""``recover --sensitivity``."""

from __future__ import annotations

import pytest
from cli_tools import QUICK, call, sample

from rlu_cli.audit import measurements


@pytest.mark.parametrize(("method", "compared"), [("rlu", 6), ("gls", 1)])
def test_each_entry_is_what_the_changed_call_gives(method: str, compared: int) -> None:
    flags = ("recover", *sample("untrained_m10"), *QUICK, "--method", method)
    plain = call(*flags).document
    document = call(*flags, "--sensitivity").document
    found = document.pop("sensitivity")
    assert document == plain
    assert [(e["value"], e["used"]) for e in found] == [
        ("lr", pytest.approx(0.009)),
        ("lr", pytest.approx(0.011)),
        ("steps", 9),
        ("steps", 11),
        ("batch_size", 29),
        ("batch_size", 35),
    ]
    told = [row["estimate"] / 320 for row in plain["classes"]]
    for entry in found[:compared]:
        flag = "--" + entry["value"].replace("_", "-")
        changed = call(*flags, flag, entry["used"]).document
        assert entry["counts"] == changed["counts"]
        assert entry["total"] == changed["total"] == sum(entry["counts"])
        share = [row["estimate"] / changed["total"] for row in changed["classes"]]
        moved = 0.5 * sum(abs(a - b) for a, b in zip(share, told, strict=True))
        assert entry["moved"] == pytest.approx(moved, abs=1e-9)
    assert found[0]["moved"] > 0.01


def test_it_is_in_the_table_and_no_model_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    measure = measurements.Measurement

    def counted(*args: object, **kwargs: object) -> object:
        measured.append(args)
        return measure(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(measurements, "Measurement", counted)
    outcome = call("recover", *sample("untrained_m1"), *QUICK, "--sensitivity", "-v")
    found = outcome.document["sensitivity"]
    shown = " ".join(outcome.err.split())
    assert f"labels moved if off: lr ×0.90 {found[0]['moved']:.0%}, lr ×1.10" in shown
    assert "steps ×2.00" in shown
    assert len(measured) == 1
