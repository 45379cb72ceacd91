"""The methods as a table: what docs/methods.md shows."""

from __future__ import annotations

from dataclasses import fields

from rlu_cli.core.methods.base import Capabilities, Method

_HEADINGS = {
    "batch": "batch",
    "repeating_labels": "repeating labels",
    "any_activation": "any activation",
    "several_steps": "several steps",
    "trained_model": "trained model",
}


def capability_table(methods: dict[str, Method]) -> str:
    """The capabilities that the methods declare, as a Markdown table (the RLU paper's Table 5)."""
    names = [field.name for field in fields(Capabilities)]
    head = ["method", *(_HEADINGS[name] for name in names), "needs a bias", "uses aux"]
    rows = [head, ["---"] * len(head)]
    for method in methods.values():
        able = method.capabilities
        marks = ["–" if able is None else _mark(getattr(able, name)) for name in names]
        bias = "or unit direction" if method.or_unit else _mark(method.needs_bias)
        rows.append([f"`{method.name}`", *marks, bias, _mark(method.uses_auxiliary)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _mark(value: bool) -> str:
    return "yes" if value else "no"
