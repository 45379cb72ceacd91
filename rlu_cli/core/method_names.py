"""The methods' names, for help texts: importing the methods themselves takes torch."""

from __future__ import annotations

METHOD_NAMES = (
    "rlu",
    "gls",
    "disaggregation",
    "regression",
    "replay",
    "surrogate",
    "idlg",
    "gradinversion",
    "rlg",
    "llg",
    "llg+",
    "zlg",
    "zlg+",
    "ilrg",
    "ebi",
    "llbg",
    "dimitrov",
    "random",
)

METHOD_CHOICE = f"auto, {', '.join(METHOD_NAMES[:-1])} or {METHOD_NAMES[-1]}"
