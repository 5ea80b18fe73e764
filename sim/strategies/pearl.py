"""PEARL: target and draft work at the same time; the first draft token is tested while the others are drafted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sim.agreement import Agreement
from sim.errors import require_count
from sim.strategies.places import FloatArray, accepted
from sim.strategies.strategy import DraftWork, RoundWork, RowState
from sim.system import HostTerm
from sim.trace import Operation

PRE_VERIFY, POST_VERIFY = 0, 1


@dataclass(frozen=True)
class Pearl:
    """ "PEARL: Parallel Speculative Decoding with Adaptive Draft Length" (arXiv 2408.11850), with windows of `window`
    draft tokens.

    Pre-verify: the target computes the law of the next token while the draft makes a window; if the window's first
    token passes, the rest is pending, otherwise it is dropped and the target's token stands. Post-verify: the target
    verifies the pending tokens while the draft makes the next window, whose first token is tested with the law after
    the last pending one; if all pass, the row stays in post-verify. So windows of g are SSD with K = g - 1 that
    prepares one outcome only, all accepted and the draft's own token as the bonus token, with fallback `none`; at
    temperature 0 the two make the same rounds. They differ in time: the draft goes on with its chain, without a glue
    pass. Assumes that a window starts and ends with the verification beside it (the paper picks the window that takes
    as long).
    """

    window: int
    room: int | None = None  # draft tokens that the length cap leaves room for; all pending ones unless given

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", require_count("window", self.window, 1))

    @property
    def name(self) -> str:
        return f"PEARL window {self.window}"

    @property
    def num_drafted(self) -> int:
        return self.window - 1

    @property
    def drafts_beside(self) -> bool:
        return True

    def shortened(self, num_drafted: int) -> Pearl:
        return replace(self, room=num_drafted)

    def states(self, agreement: Agreement) -> tuple[RowState, RowState]:
        return (
            RowState("pre-verify", self._work(0, HostTerm.UNDRAFTED_MISS), self._pre_verify(agreement)),
            RowState("post-verify", self._work(self._num_pending, HostTerm.HIT), self._post_verify(agreement)),
        )

    @property
    def _num_pending(self) -> int:
        return self.window - 1 if self.room is None else self.room

    def _work(self, num_drafted: int, host: HostTerm) -> RoundWork:
        return RoundWork(num_drafted, host, beside=(DraftWork(Operation.DRAFT_STEP, 1, self.window),))

    def _pre_verify(self, agreement: Agreement) -> FloatArray:
        passed = accepted(agreement, 0, 0)
        moves = np.zeros((self.window + 1, 2, *np.shape(passed)))
        moves[1, PRE_VERIFY], moves[1, POST_VERIFY] = 1 - passed, passed
        return moves

    def _post_verify(self, agreement: Agreement) -> FloatArray:
        survived = np.ones_like(accepted(agreement, 0, 0))
        moves = np.zeros((self.window + 1, 2, *np.shape(survived)))
        for k in range(self._num_pending):
            passed = accepted(agreement, k + 1, k)
            moves[k + 1, PRE_VERIFY] = survived * (1 - passed)
            survived = survived * passed
        passed = accepted(agreement, 0, self._num_pending)  # the first of the next window
        moves[self._num_pending + 1, PRE_VERIFY] += survived * (1 - passed)
        moves[self._num_pending + 1, POST_VERIFY] += survived * passed
        return moves
