"""Training and history flags that would change nothing: nobody should believe that they did something."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlu_cli.audit.annotations import Annotations, number, text
from rlu_cli.audit.options import HistoryOptions, StepOptions
from rlu_cli.audit.training import PULLED
from rlu_cli.core.schemes import SCHEMES
from rlu_cli.errors import UsageError


@dataclass(frozen=True)
class _Flag:
    """A flag that was given, and the schemes that take it; all of them where only momentum does."""

    name: str
    schemes: tuple[str, ...] = SCHEMES
    momentum: bool = False

    def taken(self, scheme: str, *, momentum: bool) -> bool:
        """Whether a client that trains so takes it; a scheme that there isn't is refused elsewhere."""
        return scheme not in SCHEMES or (scheme in self.schemes and (momentum or not self.momentum))

    def refusal(self, scheme: str) -> UsageError:
        """What to say where no client takes it."""
        if self.momentum:
            return UsageError(
                f"expected a momentum above 0 beside {self.name}, which dampens what it adds, found none: "
                f"pass --momentum, or leave {self.name} out"
            )
        return UsageError(
            f"expected {self.name} with the scheme {' or '.join(self.schemes)} alone, found {scheme}: "
            f"correct --scheme, or leave {self.name} out"
        )


def refuse_ignored(options: StepOptions, history: HistoryOptions, clients: Iterable[Annotations]) -> None:
    """Refuse flags that none of a call's clients takes; what files say may well be of no use.

    Clients of one call may differ by what their files say, and a flag is for those that take it. They are
    read only as long as a flag is left that none took.

    Raises
    ------
    UsageError
    """
    left, scheme, unread = _given(options, history), "", iter(clients)
    while left:
        said = next(unread, None)
        if said is None:
            raise left[0].refusal(scheme)
        scheme = (said.get("scheme", options.scheme, text) or "fedavg").lower()
        optimizer = (said.get("optimizer", options.optimizer, text) or "sgd").lower()
        gathers = optimizer != "sgd" or bool(said.get("momentum", options.momentum, number))
        left = [flag for flag in left if not flag.taken(scheme, momentum=gathers)]  # Adam refuses it itself


def _given(options: StepOptions, history: HistoryOptions) -> list[_Flag]:
    """The flags that not every client takes; a pull or a dampening of 0 is true of all others.

    ``--history``, ``--round`` and ``--participation`` are true of any client, and scripts pass them to all.
    """
    flags = (
        (options.lambda_ or None, _Flag("--lambda", PULLED)),
        (options.dampening or None, _Flag("--dampening", momentum=True)),
        (history.server_control, _Flag("--server-control", ("scaffold",))),
        (history.client_control, _Flag("--client-control", ("scaffold",))),
    )
    return [flag for value, flag in flags if value is not None]
