"""The only place that measures time. `time.perf_counter` is one clock for all processes of a Linux machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

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


class Clock(Protocol):
    """When a device is done with what it was given. Marking never waits for it."""

    def start(self) -> None:
        """Begin anew, before a batch; may wait for the device."""

    def mark(self) -> Any:
        """The moment at which the device will have done what it was given so far."""

    def time_s(self, mark: Any) -> float:
        """When that was, on `time.perf_counter`; waits for it."""


class HostClock:
    """The CPU has done its work when the call returns."""

    mark = staticmethod(time.perf_counter)

    def start(self) -> None:
        """Nothing to prepare."""

    def time_s(self, mark: float) -> float:
        return mark


class CudaClock:
    """A GPU works on after the call has returned: events in its stream tell when.

    `start` ties the first event to the host's clock; the others are so much later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._first = self.mark()
        self._first.synchronize()
        self._first_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def time_s(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._first_s + 1e-3 * self._first.elapsed_time(mark)


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


class Recorder:
    """Spans of one lane and, on the target's side, the rounds of the batch that is being decoded.

    `sequence` is the first one of the rows at work, `round` the number that their rounds share. A span is the time in
    which the device worked, so that host work before a kernel is in none; a round is measured by the host.
    """

    def __init__(self, lane: Lane, clock: Clock | None = None) -> None:
        self.lane = lane
        self._clock = clock or HostClock()
        self.begin_batch([0])

    def begin_batch(self, sequences: Sequence[int]) -> None:
        """Forget what was recorded; what follows belongs to these sequences, before their first round."""
        self.sequences = sequences
        self.sequence = sequences[0]
        self.round = -1
        self.forget()
        self.rounds: list[Round] = []
        self._clock.start()
        self.prefill_start_s = self.decode_start_s = self.end_s = time.perf_counter()

    def forget(self) -> None:
        """Drop the spans recorded so far."""
        self._spans: list[Span] = []
        self._marked: list[_Marked] = []

    @property
    def num_spans(self) -> int:
        """How many were recorded, whether their times are known or not."""
        return len(self._spans) + len(self._marked)

    @property
    def spans(self) -> list[Span]:
        """What was recorded."""
        self.wait()
        return self._spans

    def wait(self) -> None:
        """Until the device has done what was recorded so far."""
        self._spans += [marked.span(self.lane, self._clock) for marked in self._marked]
        self._marked = []

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


class _Marked(NamedTuple):
    """A span whose times may not be known yet."""

    operation: Operation
    sequence: int
    round: int
    num_tokens: int
    contexts: Sequence[int]
    start: Any
    end: Any

    def span(self, lane: Lane, clock: Clock) -> Span:
        times = clock.time_s(self.start), clock.time_s(self.end)
        num_rows = len(self.contexts)
        size = self.num_tokens, sum(self.contexts) // num_rows
        return Span(lane, self.operation, self.sequence, self.round, *size, *times, num_rows)


class _OpenSpan:
    __slots__ = ("_contexts", "_num_tokens", "_operation", "_recorder", "_start")

    def __init__(self, recorder: Recorder, operation: Operation, num_tokens: int, contexts: Sequence[int]) -> None:
        self._recorder = recorder
        self._operation = operation
        self._num_tokens = num_tokens
        self._contexts = contexts

    def __enter__(self) -> None:
        self._start = self._recorder._clock.mark()

    def __exit__(self, *_error: object) -> None:
        r = self._recorder
        end = r._clock.mark()
        place = (self._operation, r.sequence, r.round)
        r._marked.append(_Marked(*place, self._num_tokens, self._contexts, self._start, end))


def now_s() -> float:
    """For budgets: how long something may still take."""
    return time.perf_counter()
