"""Recovery methods, one a file, behind one interface."""

from __future__ import annotations

from rlu_cli.core.methods.auto import AUTO, best_method
from rlu_cli.core.methods.base import Capabilities, Method
from rlu_cli.core.methods.dimitrov import DIMITROV
from rlu_cli.core.methods.disaggregation import DISAGGREGATION
from rlu_cli.core.methods.ebi import EBI
from rlu_cli.core.methods.gls import GLS
from rlu_cli.core.methods.gradinversion import GRADINVERSION
from rlu_cli.core.methods.idlg import IDLG
from rlu_cli.core.methods.ilrg import ILRG
from rlu_cli.core.methods.llbg import LLBG
from rlu_cli.core.methods.llg import LLG
from rlu_cli.core.methods.llg_plus import LLG_PLUS
from rlu_cli.core.methods.random import RANDOM
from rlu_cli.core.methods.regression import REGRESSION
from rlu_cli.core.methods.replay import REPLAY
from rlu_cli.core.methods.rlg import RLG
from rlu_cli.core.methods.rlu import RLU
from rlu_cli.core.methods.surrogate import SURROGATE
from rlu_cli.core.methods.zlg import ZLG
from rlu_cli.core.methods.zlg_plus import ZLG_PLUS
from rlu_cli.errors import UsageError

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        RLU,
        GLS,
        DISAGGREGATION,
        REGRESSION,
        REPLAY,
        SURROGATE,
        IDLG,
        GRADINVERSION,
        RLG,
        LLG,
        LLG_PLUS,
        ZLG,
        ZLG_PLUS,
        ILRG,
        EBI,
        LLBG,
        DIMITROV,
        RANDOM,
    )
}
"""In the order of `rlu_cli.core.method_names`."""


def get_method(name: str) -> Method:
    """The method called ``name``, which is not ``auto``: see `best_method`.

    Raises
    ------
    UsageError
        No such method.
    """
    method = METHODS.get(name)
    if method is None:
        raise UsageError(f"expected a method among {AUTO}, {', '.join(METHODS)}, found {name!r}")
    return method


__all__ = ["AUTO", "METHODS", "Capabilities", "Method", "best_method", "get_method"]
