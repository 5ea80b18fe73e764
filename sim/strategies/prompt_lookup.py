"""Prompt look-up: the target verifies what followed the last tokens where they occurred before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sim.agreement import Agreement
from sim.errors import require_count, require_number
from sim.policy import Fallback, SpeculativeSpeculative
from sim.strategies.strategy import RoundWork, RowState
from sim.system import HostTerm


def prompt_lookup_policy(speculation_length: int) -> SpeculativeSpeculative:
    """Prompt look-up (Saxena 2023; `sim.ngram`) in every round, as a policy: SSD that prepares nothing and falls back
    on it. On an agreement record `sim.predict` is exact, and the executor runs it."""
    nothing = (0,) * (speculation_length + 1)
    return SpeculativeSpeculative(speculation_length, nothing, nothing, Fallback.NGRAM)


@dataclass(frozen=True)
class PromptLookup:
    """The same from two numbers, as a record holds what they stand for and summary numbers do not: in a share `match`
    of the rounds K tokens are found, each of which is accepted with probability `acceptance` once it is tested.

    Assumes that matches are independent of each other and that looking up costs nothing. Without matches it is AR.
    """

    speculation_length: int
    match: float
    acceptance: float

    def __post_init__(self) -> None:
        require_count("speculation_length", self.speculation_length, 0)
        for name in ("match", "acceptance"):
            require_number(f"prompt look-up: {name}", getattr(self, name), 0, 1)

    @property
    def name(self) -> str:
        return f"prompt look-up K={self.speculation_length}"

    @property
    def num_drafted(self) -> int:
        return self.speculation_length

    @property
    def drafts_beside(self) -> bool:
        return False

    def shortened(self, num_drafted: int) -> PromptLookup:
        return replace(self, speculation_length=num_drafted)

    def states(self, agreement: Agreement) -> tuple[RowState, ...]:
        """By whether the round has found something."""
        survival = self.acceptance ** np.arange(self.speculation_length + 1)
        of_found = np.append(survival[:-1] * (1 - self.acceptance), survival[-1])
        laws = (("no match", 0, np.eye(len(survival))[0]), ("match", self.speculation_length, of_found))
        return tuple(
            RowState(name, RoundWork(num_drafted, HostTerm.AUTOREGRESSIVE), self._moves(law))
            for name, num_drafted, law in laws
        )

    def _moves(self, emitted: np.ndarray) -> np.ndarray:
        return np.vstack([np.zeros(2), np.outer(emitted, [1 - self.match, self.match])])
