"""What becomes of a run whose draft fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from executor.draft_client import DraftFailed
from executor.loops import NO_SPECULATION, Draft
from executor.sequence import Request, Verified
from executor.speculation_cache import Speculation
from sim.policy import Speculative, SpeculativeSpeculative
from sim.trace import Span


class OnDraftFailure(StrEnum):
    """Whether a run ends with its draft."""

    RAISE = "raise"
    CONTINUE = "continue"  # as AR from the last committed tokens


class ExpendableDraft:
    """A draft role that may fail: from then on every speculation is empty, which makes every round one of AR.

    Nothing is lost, for what was committed was verified. `failure` says when it was and why; None while all is well.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._sequences: list[int] = []
        self._num_rounds = 0
        self.failure: dict[str, Any] | None = None

    def begin(self, policy: Speculative | SpeculativeSpeculative, requests: Sequence[Request]) -> None:
        self._sequences, self._num_rounds = [request.index for request in requests], 0
        if self.failure is None:
            self._draft.begin(policy, requests)

    def wait(self) -> None:
        if self.failure is None:
            try:
                self._draft.wait()
            except DraftFailed as error:
                self._give_up(self._sequences[0], error)

    def speculate(self, verified: Mapping[int, Verified]) -> dict[int, Speculation]:
        if self.failure is None:
            try:
                self._num_rounds += 1
                return self._draft.speculate(verified)
            except DraftFailed as error:
                self._give_up(self._sequences[next(iter(verified))], error)
        return dict.fromkeys(verified, NO_SPECULATION)

    def spans(self) -> list[Span]:
        if self.failure is None:
            try:
                return self._draft.spans()
            except DraftFailed as error:
                self._give_up(self._sequences[-1], error)
        return []

    def _give_up(self, sequence: int, error: DraftFailed) -> None:
        self.failure = {"sequence": sequence, "round": self._num_rounds - 1, "message": str(error)}
