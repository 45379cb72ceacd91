"""``recover --sensitivity``."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_tools import QUICK, call, sample
from defended_rounds import defended, norm

from rlu_cli.audit import measurements
from rlu_cli.simulation.defences import Defence


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


def test_after_several_steps_a_wrong_value_is_not_put_right(tmp_path: Path) -> None:
    """A rate 10 % too low was noticed and corrected, one too high wasn't, and the report was one-sided."""
    name = "untrained_m10"
    right, clipped = (
        call("recover", *flags, "--method", "replay", "--samples", 500, "--sensitivity").document
        for flags in ([*sample(name), *QUICK], defended(tmp_path, Defence(clip=0.3 * norm(name)), name=name))
    )
    rates = [entry["moved"] for entry in right["sensitivity"] if entry["value"] == "lr"]
    assert len(rates) == 2 and all(0.02 < moved < 0.07 for moved in rates)
    assert "update_divided_by" not in right["diagnostics"]
    assert clipped["diagnostics"]["update_divided_by"] == pytest.approx(0.3, rel=0.1)
    assert all(entry["moved"] < 0.01 for entry in clipped["sensitivity"])
