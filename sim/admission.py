"""Continuous batching: requests arrive, wait, and join the rows that run between two of their rounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpy.events import Event, Timeout

from sim.draft_devices import Build, Process
from sim.durations import Task
from sim.errors import BadInput
from sim.memory import Memory
from sim.policy import LateBuild, Policy, PolicyTable
from sim.rows import Row
from sim.trace import Lane, Operation, Source

if TYPE_CHECKING:
    from sim.serving import ServedRun
    from sim.target import Target


class Dispatcher:
    """Gives every request, when it arrives, to the target that has the fewest; the lowest index among equals."""

    def __init__(self, run: ServedRun, rows: Iterator[Row], num_requests: int) -> None:
        self.run, self.env, self.rows = run, run.env, rows
        self.num_to_come = self.num_to_end = num_requests
        self.queues: list[ContinuousBatching] = []
        self.is_closed_loop = True
        self._queue_of: dict[int, ContinuousBatching] = {}

    def open_loop(self, times: Iterator[float]) -> Process:
        """Requests arrive at `times`."""
        self.is_closed_loop = False
        for time_s in times:
            yield Timeout(self.env, max(0.0, time_s - self.env.now))
            self.arrive()

    def arrive(self) -> None:
        """The next request is there."""
        if not self.num_to_come:
            return
        self.num_to_come -= 1
        row = next(self.rows)
        row.arrival_s = self.env.now
        self.run.tally.arrive(row.index, row.arrival_s)
        queue = min(self.queues, key=lambda queue: queue.num_requests)
        self._queue_of[row.index] = queue
        queue.put(row)

    def end(self, row: Row) -> None:
        """A request has ended; its client sends the next one."""
        self._queue_of.pop(row.index).num_requests -= 1
        self.num_to_end -= 1
        if self.is_closed_loop:
            self.arrive()
        if not self.num_to_end:
            for queue in self.queues:
                queue.close()


class ContinuousBatching:
    """Between rounds the requests that wait are admitted in order of arrival, up to `max_batch_size` rows and to what
    memory has room for; those that arrive meanwhile wait for the next round.

    The target reads the prompts one after another while the rows that run wait; each prefill emits a first token. Every
    draft device reads them too, beside the target where the roles overlap, after the builds that were begun. A row that
    a policy without a draft model admitted is read by the draft before the first round of a policy with one.
    """

    def __init__(self, run: ServedRun, index: int, max_batch_size: int) -> None:
        """Of target number `index`."""
        self.run, self.env, self.max_batch_size = run, run.env, max_batch_size
        self._residuals = run.noise.of(run.system, Lane.TARGET, index)[Operation.PREFILL]
        self.waiting: deque[Row] = deque()
        self.num_requests = 0  # waiting or being decoded
        self._is_closed = False
        self._arrival: Event | None = None
        self._unread: list[Row] = []  # rows whose text the draft model has not read
        self._at_work: list[Row] = []
        self._joined: list[Row] = []  # those of them that have joined before this round
        self._emitted = 0  # tokens of the rows at work before their round
        self._round_end_s = 0.0  # of the last round

    def put(self, row: Row) -> None:
        """A request waits."""
        self.num_requests += 1
        self.waiting.append(row)
        self._wake()

    def close(self) -> None:
        """No request will come any more."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None:
            self._arrival.succeed()
            self._arrival = None

    def next_rows(self, target: Target, rows: list[Row]) -> Process:
        self._end_round()
        while self.waiting or not rows:
            for _ in range(len(self.waiting)):
                if not self._has_room(target, rows):
                    break
                yield from self._admit(target, rows, self.waiting.popleft())
            if rows:
                break
            if self._is_closed:
                return rows
            if not self.waiting:
                self._arrival = Event(self.env)
                yield self._arrival
        if self._unread and _uses_draft(target, len(rows)):
            yield from self._read_what_is_unread(target)
        self._at_work, self._emitted = rows, sum([row.emitted for row in rows])
        return rows

    def _end_round(self) -> None:
        """Tell what the last round has emitted: the tokens of a row come together, after a gap."""
        if not self._at_work:
            return
        now, rows = self.env.now, self._at_work
        num_tokens = sum([row.emitted for row in rows]) - self._emitted
        gaps = [(now - row.first_token_s, 1) for row in self._joined]
        if len(gaps) < len(rows):
            gaps.append((now - self._round_end_s, len(rows) - len(gaps)))
        self.run.tally.end_round(now, len(rows), num_tokens, gaps)
        self._at_work, self._joined, self._round_end_s = [], [], now

    # -------------------------------------------------------------------------------------------------------- memory

    def _has_room(self, target: Target, rows: list[Row]) -> bool:
        """Whether the first request that waits may join. Raises `BadInput` if memory will never have room for it."""
        if len(rows) >= self.max_batch_size:
            return False
        if target.system.memory == Memory():
            return True
        why = self._why_no_room(target, [*rows, self.waiting[0]])
        if why and not rows:
            raise BadInput("memory", f"must have room for one request; {why}")
        return why is None

    def _why_no_room(self, target: Target, rows: list[Row]) -> str | None:
        """Rows reserve what they may need until their cap; a table's policies for fewer rows must have room too."""
        contexts = sorted((row.most_context for row in rows), reverse=True)
        for policy, most in _policies_up_to(target, len(rows)):
            context = math.ceil(sum(contexts[:most]) / most)
            sampled = self.run.workload.temperature > 0
            why = target.system.memory.why_infeasible(policy, most, context, target.placement, sampled=sampled)
            if why:
                return why
        return None

    # ------------------------------------------------------------------------------------------------------- prefill

    def _admit(self, target: Target, rows: list[Row], row: Row) -> Process:
        """Read its prompt; it joins the rows unless its first token is its last."""
        row.admitted_s = self.env.now
        self.run.tally.admit(row)
        _drop_build(target, rows)
        with_draft = _uses_draft(target, len(rows) + 1)
        overlaps = target.system.overlaps
        if with_draft and overlaps:
            self._let_draft_read(target, row, beside=True)
        yield from self._read(target, row, beside=with_draft)
        self.run.tally.emit_first(row, self.env.now)
        target.begin(row)
        if not row.goes_on:
            return
        rows.append(row)
        self._joined.append(row)
        if with_draft and overlaps:
            return
        self._unread = [unread for unread in self._unread if unread.goes_on] + [row]

    def _read(self, target: Target, row: Row, *, beside: bool) -> Process:
        step = target.durations.prefill(Lane.TARGET, row.context)
        seconds = step.location_s * next(self._residuals) * target.system.slowdown(Lane.TARGET, beside=beside)
        start_s = self.env.now
        yield Timeout(self.env, seconds)
        target.recorder.end(Lane.TARGET, target.index, (row.index, -1), *step[:-1], start_s, seconds)

    def _let_draft_read(self, target: Target, row: Row, *, beside: bool) -> None:
        """Every draft device reads the row's text, as any of them may serve it."""
        step = target.durations.prefill(Lane.DRAFT, row.context)
        location_s = step.location_s * target.system.slowdown(Lane.DRAFT, beside=beside)
        devices = target.devices
        tasks = (Task.of([step._replace(location_s=location_s)]),) * len(devices)
        residuals = [self.run.noise.of(target.system, Lane.DRAFT, device) for device in range(len(devices))]
        place, in_one = (row.index, -1), not self.run.record
        prefill = Build(self.env, tasks, residuals, place, LateBuild.WAIT, in_one)
        target.prefills = [other for other in target.prefills if other.num_open] + [prefill]
        devices[0].start(prefill)

    def _read_what_is_unread(self, target: Target) -> Process:
        for row in self._unread:
            if row.goes_on:
                self._let_draft_read(target, row, beside=False)
        self._unread = []
        if not target.system.overlaps:
            for prefill in target.prefills:
                if prefill.num_open:
                    yield prefill.ended()


def _uses_draft(target: Target, num_rows: int) -> bool:
    return target.chooser.at(num_rows).speculation_length > 0


def _policies_up_to(target: Target, num_rows: int) -> Iterator[tuple[Policy, int]]:
    """Policies under which `num_rows` rows may run until the last has ended, each with the most rows that it may have.

    Of a controller that is the present one: which others it will choose is not known.
    """
    decider = target.timeline.policy
    if not isinstance(decider, PolicyTable):
        yield target.chooser.at(num_rows), num_rows
        return
    starts = [start for start, _ in decider.entries if start <= num_rows]
    for start, after in zip(starts, [*starts[1:], num_rows + 1], strict=True):
        yield decider.at(start), after - 1


def _drop_build(target: Target, rows: list[Row]) -> None:
    """A build that no row needs need not go on beside a prefill."""
    sources, build = {row.source for row in rows}, target.build
    is_needed = Source.HIT in sources and not (target.redrafts and Source.MISS in sources)
    if build is not None and build.num_open and not is_needed:
        build.is_needed_no_more()
