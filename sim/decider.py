"""Who decides under which policy a round runs, and what a controller is told of the rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sim.errors import BadInput
from sim.policy import Autoregressive, Policy, PolicyTable, Speculative, SpeculativeSpeculative
from sim.trace import Source


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """What an engine sees of one row of one round, in seconds; the times are those of the round, equal for its rows.

    `source` says where the speculation verified came from, and with it whether the look-up before it hit. `round_s` is
    the time between the outcomes of the round before and its own. `draft_s` is drafting that the target waited for, 0
    without it. `build_s` is the build beside this verification, 0 where there was none or it was abandoned; a round is
    told once its build has ended, so that others may have run since. `batch_size` is the number of rows of the round.
    """

    source: Source
    num_drafted: int
    num_accepted: int
    policy: Policy
    round_s: float
    verify_s: float
    draft_s: float
    build_s: float
    batch_size: int


class Controller(Protocol):
    """Fresh for each run: `policy` is that of the next round, `observe` is told of every row of every round."""

    @property
    def policy(self) -> Policy: ...

    def observe(self, seen: RoundSeen) -> None: ...


class Adaptive(Protocol):
    """A configuration, which is a frozen value. `start` makes a controller without any past: nothing carries over from
    one run to the next. Neither sees the agreement record, the text or the system."""

    @property
    def name(self) -> str: ...

    def start(self) -> Controller: ...

    def to_dict(self) -> dict[str, Any]: ...


Decider = Policy | PolicyTable | Adaptive  # a fixed policy, one by the number of rows, or as a controller says


def check_decider(policy: object) -> None:
    """Raises `BadInput` unless it is one of these."""
    is_adaptive = callable(getattr(policy, "start", None)) and callable(getattr(policy, "to_dict", None))
    if isinstance(policy, type) or not (is_adaptive or isinstance(policy, Policy | PolicyTable)):
        raise BadInput("policy", "must be a policy, a table of them or an adaptive choice", policy)


def _require_policy(chosen: object) -> Policy:
    if not isinstance(chosen, (Autoregressive, Speculative, SpeculativeSpeculative)):
        raise BadInput("policy of an adaptive choice", "must be a single policy", chosen)
    return chosen


def check_succession(before: Policy, policy: Policy) -> None:
    """For what was prepared under one policy and is verified under another: raises `BadInput` if one of them
    down-weights, because it was drawn for the fan-out list and the C of the policy before."""
    for one in (before, policy):
        if isinstance(one, SpeculativeSpeculative) and one.downweight != 1:
            raise BadInput("downweight", "must be 1 in policies that follow one another", one.downweight)


class Chooser:
    """Says under which policy the next round runs: a fixed one, by the number of rows, or as a controller decides."""

    def __init__(self, decider: Decider) -> None:
        """Starts a controller without any past. Raises `BadInput` if `decider` is none."""
        check_decider(decider)
        self.controller: Controller | None = None
        self._table: PolicyTable | None = None
        self._policy: Policy
        if isinstance(decider, PolicyTable):
            self._table = decider
        elif isinstance(decider, (Autoregressive, Speculative, SpeculativeSpeculative)):
            self._policy = decider
        else:
            self.controller = decider.start()

    def at(self, num_rows: int) -> Policy:
        """The policy of a round with so many rows. Raises `BadInput` if a controller says anything else."""
        if self.controller is not None:
            return _require_policy(self.controller.policy)
        return self._policy if self._table is None else self._table.at(num_rows)


class RowsOfRounds:
    """Puts the rows of a round together."""

    def __init__(self) -> None:
        self._rows: list[RoundSeen] = []

    def add(self, seen: RoundSeen) -> list[RoundSeen]:
        """The rows of the round that this row completes, in order; nothing before."""
        if self._rows and self._rows[0].batch_size != seen.batch_size:
            self._rows = []
        self._rows.append(seen)
        if len(self._rows) < seen.batch_size:
            return []
        rows, self._rows = self._rows, []
        return rows
