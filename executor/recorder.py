"""The only place that measures time. `time.perf_counter` is one clock for all processes of a Linux machine."""

from __future__ import annotations

import time

from sim.trace import Lane, Operation, Round, Source, Span


class Recorder:
    """Spans of one lane and, on the target's side, the rounds of the sequence that is being decoded."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.begin_sequence(0)

    def begin_sequence(self, index: int) -> None:
        """Forget what was recorded; what follows belongs to sequence `index`, before its first round."""
        self.sequence = index
        self.round = -1
        self.spans: list[Span] = []
        self.rounds: list[Round] = []
        self.prefill_start_s = self.decode_start_s = self.end_s = time.perf_counter()

    def begin_decoding(self) -> None:
        """Both prefills are done; round 0 starts now."""
        self.round = 0
        self.decode_start_s = self.end_s = time.perf_counter()

    def end_round(self, source: Source, num_drafted: int, num_accepted: int, num_emitted: int, context: int) -> None:
        """The outcome is known: the round ends, and the next one starts at this moment."""
        start_s, self.end_s = self.end_s, time.perf_counter()
        counts = (num_drafted, num_accepted, num_emitted, context)
        self.rounds.append(Round(self.sequence, self.round, source, *counts, start_s, self.end_s))
        self.round += 1

    def span(self, operation: Operation, num_tokens: int, context: int) -> _OpenSpan:
        """Context manager: its body is one operation."""
        return _OpenSpan(self, operation, num_tokens, context)


class _OpenSpan:
    __slots__ = ("_context", "_num_tokens", "_operation", "_recorder", "_start_s")

    def __init__(self, recorder: Recorder, operation: Operation, num_tokens: int, context: int) -> None:
        self._recorder = recorder
        self._operation = operation
        self._num_tokens = num_tokens
        self._context = context

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        end_s = time.perf_counter()
        r = self._recorder
        size = (self._num_tokens, self._context)
        r.spans.append(Span(r.lane, self._operation, r.sequence, r.round, *size, self._start_s, end_s))


def now_s() -> float:
    """For budgets: how long something may still take."""
    return time.perf_counter()
