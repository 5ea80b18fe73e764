"""What becomes of a run whose draft fails."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from executor.draft_client import DraftFailed
from executor.loops import Draft
from executor.observation import DraftWork
from executor.sequence import Question, Request
from executor.speculation_cache import NO_SPECULATION, Speculation
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
        self._last_work = DraftWork()
        self.failure: dict[str, Any] | None = None

    @property
    def work(self) -> DraftWork:
        return DraftWork() if self.failure else self._draft.work

    def begin(self, requests: Sequence[Request], *, tells_builds: bool = False) -> None:
        self._sequences, self._num_rounds = [request.index for request in requests], 0
        if self.failure is None:
            try:
                self._draft.begin(requests, tells_builds=tells_builds)
            except DraftFailed as error:
                self._give_up(self._sequences[0], error)

    def wait(self) -> None:
        if self.failure is None:
            try:
                self._draft.wait()
            except DraftFailed as error:
                self._give_up(self._sequences[0], error)

    def speculate(self, question: Question) -> dict[int, Speculation]:
        if self.failure is None:
            try:
                self._num_rounds += 1 + question.num_rounds_without
                speculations = self._draft.speculate(question)
            except DraftFailed as error:
                self._give_up(self._sequences[next(iter(question.verified))], error)
            else:
                self._last_work = self._draft.work
                return speculations
        return dict.fromkeys(question.verified, NO_SPECULATION)

    def take_notice(self) -> None:
        if self.failure is None:
            self._draft.take_notice()
        elif self._last_work.build_s is None:
            self._last_work.build_s = 0.0  # it will never be known

    def spans(self) -> list[Span]:
        if self.failure is None:
            try:
                return self._draft.spans()
            except DraftFailed as error:
                self._give_up(self._sequences[-1], error)
        return []

    def _give_up(self, sequence: int, error: DraftFailed) -> None:
        self.failure = {"sequence": sequence, "round": self._num_rounds - 1, "message": str(error)}
