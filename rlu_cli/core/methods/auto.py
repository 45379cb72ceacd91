"""Which method ``auto`` stands for."""

from __future__ import annotations

from collections.abc import Callable

from rlu_cli.core.error_model import ResidualModel, foreseen_error, is_exact
from rlu_cli.core.methods.base import Method
from rlu_cli.core.methods.disaggregation import DISAGGREGATION
from rlu_cli.core.methods.gls import BOUNDED_STEPS, GLS
from rlu_cli.core.methods.regression import REGRESSION
from rlu_cli.core.methods.regression import out_of_scope as no_regression
from rlu_cli.core.methods.replay import REPLAY
from rlu_cli.core.methods.replay import out_of_scope as no_replay
from rlu_cli.core.methods.rlu import RLU
from rlu_cli.core.methods.surrogate import SURROGATE
from rlu_cli.core.residuals import ResidualMoments, too_few
from rlu_cli.core.types import LocalTraining

AUTO = "auto"

_TRAINED = 0.05
"""Share of the labels that `gls` would expect to get wrong if the model stayed as it is: 0.0001 on untrained
models, 0.1 and more on trained ones."""


def best_method(
    training: LocalTraining,
    *,
    has_bias: bool,
    residuals: ResidualMoments | None,
    has_samples: bool,
    can_replay: bool,
    can_make_clients: bool,
    alone: bool = False,
    separable: Callable[[], bool] = bool,
    scaled: bool = False,
) -> Method:
    """`disaggregation` or `regression` for one step of a trained model, `replay` for several, else `gls`.

    Averaged over the clients of any regime that was measured, each is at least as good there as `rlu`, or
    level within the error (Scaffold at 80 %). `rlu` answers too where they don't have all that
    they need; see "Which method when" in docs/method.md. How trained a model is shows in the error that
    `gls` foresees.

    Parameters
    ----------
    has_bias : whether the output layer has one, or what stands for it
    residuals : single auxiliary samples' moments under the global model, None where they aren't known
    has_samples : whether the samples' own logits are known too
    can_replay : whether the client's training can be replayed, as `gls` does for several steps, in seconds
    can_make_clients : whether `replay` can make up clients, in two minutes at most, or half a minute for one
        client's alone
    alone : whether those serve one client alone, so that they are few: then `gls` knows more of few steps of
        models that are not trained
    separable : whether the samples of its one step may be told apart; asked where they are worth it
    scaled : whether the update was scaled by an unknown factor, and made-up clients can be as well
    """
    if residuals is None or not has_bias:
        return RLU if training.optimizer == "sgd" else SURROGATE
    counts = residuals.counts
    if training.optimizer != "sgd":
        return REPLAY if can_make_clients and no_replay(counts, training) is None else SURROGATE
    few = too_few(counts)
    if training.steps > 1:
        if few:
            return RLU
        many = training.steps > BOUNDED_STEPS
        trained = foreseen_error(ResidualModel([(1.0, residuals)], training)) > _TRAINED
        if can_make_clients and no_replay(counts, training) is None and (many or trained or not alone):
            return REPLAY
        if not can_replay:
            return RLU
        return RLU if many and trained else GLS
    exact = not few and not scaled and is_exact(residuals, training)
    if not exact and separable():
        return DISAGGREGATION
    if few:
        return RLU
    if exact or not has_samples or no_regression(counts, training) is not None:
        return GLS
    return REGRESSION
