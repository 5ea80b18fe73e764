"""The only place that measures time. `time.perf_counter` is one clock for all processes of a Linux machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sim.trace import Lane, Operation, Round, Source, Span


class RowRound(NamedTuple):
    """A round of one row, its times left out."""

    row: int
    source: Source
    num_drafted: int
    num_accepted: int
    num_emitted: int
    context: int
    policy: str


class Recorder:
    """Spans of one lane and, on the target's side, the rounds of the batch that is being decoded.

    `sequence` is the first one of the rows at work, `round` the number that their rounds share.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.begin_batch([0])

    def begin_batch(self, sequences: Sequence[int]) -> None:
        """Forget what was recorded; what follows belongs to these sequences, before their first round."""
        self.sequences = sequences
        self.sequence = sequences[0]
        self.round = -1
        self.spans: list[Span] = []
        self.rounds: list[Round] = []
        self.prefill_start_s = self.decode_start_s = self.end_s = time.perf_counter()

    def begin_decoding(self) -> None:
        """Both prefills are done; round 0 starts now."""
        self.round = 0
        self.decode_start_s = self.end_s = time.perf_counter()

    def at_work(self, row: int) -> None:
        """From here on `row` is the first of the batch's rows that are at work."""
        self.sequence = self.sequences[row]

    def end_round(self, rows: Iterable[RowRound]) -> None:
        """The outcomes are known: the round ends, and the next one starts at this moment."""
        start_s, self.end_s = self.end_s, time.perf_counter()
        for r in rows:
            counts = (r.num_drafted, r.num_accepted, r.num_emitted, r.context)
            times = (start_s, self.end_s)
            self.rounds.append(Round(self.sequences[r.row], self.round, r.source, *counts, *times, r.policy))
        self.round += 1

    def last_round(self) -> tuple[list[Round], float]:
        """The round that ended last, of every row, and how long its verification took."""
        index = self.rounds[-1].index
        rounds = [r for r in self.rounds[-len(self.sequences) :] if r.index == index]
        return rounds, self.spans[-1].duration_s

    def span(self, operation: Operation, num_tokens: int, contexts: Sequence[int]) -> _OpenSpan:
        """Context manager: its body is one operation on `num_tokens` tokens of rows with these contexts."""
        return _OpenSpan(self, operation, num_tokens, contexts)


class _OpenSpan:
    __slots__ = ("_contexts", "_num_tokens", "_operation", "_recorder", "_start_s")

    def __init__(self, recorder: Recorder, operation: Operation, num_tokens: int, contexts: Sequence[int]) -> None:
        self._recorder = recorder
        self._operation = operation
        self._num_tokens = num_tokens
        self._contexts = contexts

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        end_s = time.perf_counter()
        r = self._recorder
        num_rows = len(self._contexts)
        size = (self._num_tokens, sum(self._contexts) // num_rows)
        r.spans.append(Span(r.lane, self._operation, r.sequence, r.round, *size, self._start_s, end_s, num_rows))


def now_s() -> float:
    """For budgets: how long something may still take."""
    return time.perf_counter()
