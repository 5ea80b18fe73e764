"""What a way of decoding says about itself: the states of a row between rounds, their laws, and the work of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.system import HostTerm
from sim.trace import Operation

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class DraftWork:
    """Operations of the drafter one after another, `num_times` of them over `num_tokens` tokens of each row.

    They take `ratio` times what the system's draft model takes for them.
    """

    operation: Operation
    num_tokens: float
    num_times: int = 1
    ratio: float = 1.0

    @property
    def kind(self) -> tuple[Operation, int, float]:
        """Equal for works that rows of a batch do together."""
        return self.operation, self.num_times, self.ratio


@dataclass(frozen=True)
class RoundWork:
    """The work of a row's round: the target verifies `num_drafted` draft tokens and the pending one.

    `before` is drafted while the target waits, `beside` while it verifies; the next round waits for a late end of it.
    `host` is the time that no operation explains.
    """

    num_drafted: int
    host: HostTerm
    before: tuple[DraftWork, ...] = ()
    beside: tuple[DraftWork, ...] = ()


@dataclass(frozen=True)
class RowState:
    """How a row stands before a round. `moves[n, s]` is the probability that the round emits n tokens and that the row
    is in state s after it.

    Trailing axes, if any, are (num_prompts, width) by the tokens emitted before the round, as in
    `sim.round_law.RoundLaw`.
    """

    name: str
    work: RoundWork
    moves: FloatArray

    def chance_of(self, num_tokens: int) -> FloatArray:
        """Probability that the round emits so many tokens."""
        return self.moves[num_tokens].sum(0)


class Strategy(Protocol):
    """A way of decoding on the inputs that `sim.predict` takes."""

    @property
    def name(self) -> str: ...

    @property
    def num_drafted(self) -> int:
        """The longest chain of draft tokens of a round."""

    @property
    def drafts_beside(self) -> bool:
        """Whether it needs a device for the draft beside that of the target."""

    def states(self, agreement: Agreement) -> tuple[RowState, ...]:
        """The states of a row, that of its first round first. Raises `BadInput` where the agreement does not say how
        its rounds go."""

    def shortened(self, num_drafted: int) -> Strategy:
        """The same where the length cap leaves room for so many draft tokens of a chain."""
