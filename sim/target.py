"""The target role of the event engine: decides who runs next and under which policy, asks for speculations, verifies.

The three decoders, who waits for whom, are here; `executor/loops.py` has those of real models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import simpy
from simpy.events import URGENT, Event, Timeout

from sim.decider import Chooser, Controller, RoundSeen, check_succession
from sim.draft_devices import Answer, Build, Place, Process, ask
from sim.durations import Drafted, Task
from sim.policy import Drafting, Fallback, LateBuild, Policy, Proposer, SpeculativeSpeculative
from sim.rows import AFTER_HIT, AFTER_MISS, Row
from sim.system import host_term
from sim.trace import Lane, Operation, Round, Source

if TYPE_CHECKING:
    from sim.timeline import Run


class Arrival(Event):
    """A moment at which something becomes known: it comes before whatever else ends at the same time."""

    def __init__(self, env: simpy.Environment, delay: float) -> None:
        self.env, self.callbacks, self._ok, self._value = env, [], True, None  # as `Timeout` does, for speed
        env.schedule(self, URGENT, delay)


class Admission(Protocol):
    """Which rows run next. Asked before every round; time may pass while it decides."""

    def next_rows(self, target: Target, rows: list[Row]) -> Process:
        """Returns the rows of the next round, given those that go on; none ends the target. Calls `target.begin` for
        each row that joins, at the moment of its first token."""


class StaticBatches:
    """The rows that run go on alone until the last has ended; then the next `batch_size` requests in order begin."""

    def __init__(self, requests: Iterable[Row], batch_size: int) -> None:
        self._requests = deque(requests)
        self._batch_size = batch_size
        self._batch: list[Row] = []

    def next_rows(self, target: Target, rows: list[Row]) -> Process:
        while not rows and (self._batch or self._requests):
            self._share_time(target.env.now)
            yield from target.await_build()  # of rows that have ended
            self._batch = [self._requests.popleft() for _ in range(min(self._batch_size, len(self._requests)))]
            for row in self._batch:
                row.admitted_s = target.env.now
                target.begin(row)
            rows = [row for row in self._batch if row.goes_on]
        return rows

    def _share_time(self, now: float) -> None:
        for row in self._batch:
            row.shared_s = (now - row.first_token_s) / len(self._batch)
        self._batch = []


class Target:
    """A target model on its own device, and the rows that it decodes."""

    policy: Policy

    def __init__(self, timeline: Run, index: int, admission: Admission) -> None:
        self.timeline, self.env, self.index, self.admission = timeline, timeline.env, index, admission
        self.system, self.placement = timeline.system, timeline.system.placement
        self.durations, self.devices = timeline.stage.durations, timeline.draft_devices
        self.recorder = timeline.recorder
        self.nothing_interrupts = self.placement.num_targets == 1 and not timeline.record
        self.slowdown = self.system.slowdown(Lane.TARGET, beside=True)
        self.round_start_s = self.verify_start_s = self.verify_s = self.draft_s = 0.0
        self.build: Build | None = None  # the last one, which may be older than the last round
        self.round_build: Build | None = None  # beside the last round
        self.prefills: list[Build] = []  # the draft model's, of rows that have just joined
        self.chooser = Chooser(timeline.policy)
        self._unseen: deque[tuple[RoundSeen, Build | None]] = deque()
        self._use(self.chooser.at(1))

    # ------------------------------------------------------------------------------------------------------ decoders

    def run(self) -> Process:
        """Round after round."""
        rows: list[Row] = []
        while rows := (yield from self.admission.next_rows(self, rows)):
            policy = self.chooser.at(len(rows))
            if policy is not self.policy and policy != self.policy:
                self._adopt(policy, rows)
            if self.speculation_length:
                yield from self._speculative(rows)
            else:
                yield from self._autoregressive(rows)
            rows = self._commit(rows)

    def _autoregressive(self, rows: list[Row]) -> Process:
        """AR: host time and a verification. A build of rounds before, which nobody needs, may still run."""
        self._plan(rows)
        if self.build is not None:
            self.build.is_needed_no_more()
        if self.host_s[AFTER_MISS]:
            yield Timeout(self.env, self.host_s[AFTER_MISS])
        self.draft_s = 0.0
        yield self._verification(rows, None)

    def _speculative(self, rows: list[Row]) -> Process:
        """SD and SSD: the outcomes go to the draft, speculations come back; SSD builds while the target verifies."""
        if self.redrafts and len(rows) > 1:
            self._redraft_all_if_one_missed(rows)
        self._plan(rows)
        if self.sends_messages and any(row.num_rounds for row in rows):
            yield Arrival(self.env, self.placement.outcome_s(len(rows)))
        if self._must_wait_for_build():
            yield from self.await_build()
        if self.prefills:
            yield from self._await_prefills()
        answer = self._question(rows)
        yield ask(self.devices, answer)
        self.draft_s, build = answer.took_s, answer.build
        self.build = build
        if build is not None and not self.system.overlaps:
            yield build.ended()
        if self.sends_messages:
            yield Timeout(self.env, self.placement.message_s(self.num_bytes))
        yield self._verification(rows, build)

    def _must_wait_for_build(self) -> bool:
        """Whether the last build is unfinished, unless the only device ends it before it takes up another question."""
        build = self.build
        return build is not None and build.num_open > 0 and not (build.in_one and len(self.devices) == 1)

    def await_build(self) -> Process:
        """The build of the last round ends, early if no row needs it and the policy says so."""
        build = self.build
        if build is not None and build.num_open:
            if not self.num_hits:
                build.is_needed_no_more()
            yield build.ended()

    def _await_prefills(self) -> Process:
        """The draft model has read the prompts before it drafts in the open; builds come after them anyway."""
        prefills, self.prefills = self.prefills, []
        for prefill in prefills if self.drafts_in_the_open else ():
            if prefill.num_open:
                yield prefill.ended()

    def _redraft_all_if_one_missed(self, rows: list[Row]) -> None:
        if not any(row.source is Source.MISS for row in rows):  # a row that has just joined has missed nothing
            return
        for row in rows:
            if row.source is Source.HIT:
                row.source, row.outcomes = Source.REDRAFTED, self.usual[AFTER_MISS]

    def _plan(self, rows: list[Row]) -> None:
        """What the next verification takes and what is built beside it, of all rows together."""
        num_hits = drafted = entries = 0
        building, built_on, branches, built_entries = 0, 0, 0, 0
        num_bytes = 0.0
        for row in rows:
            outcomes = row.outcomes
            if row.source is Source.HIT:
                num_hits += 1
            row.count_lookup()
            num_drafted, room = outcomes.num_drafted[row.luck][row.emitted], row.cap - row.emitted - 1
            if num_drafted > room:  # its own cap is lower than the workload's
                num_drafted = room
            row.num_drafted = num_drafted
            drafted += num_drafted
            entries += row.context
            num_bytes += num_drafted * outcomes.bytes_per_token
            num_branches = outcomes.num_branches[num_drafted]
            if num_branches and room:  # where the end is sure, nothing is prepared
                building, built_on, branches = building + 1, built_on + num_drafted, branches + num_branches
                built_entries += row.context
        self.num_hits, self.num_drafted, self.num_entries, self.num_bytes = num_hits, drafted, entries, num_bytes
        self.building = (building, built_on, branches, built_entries)

    def _question(self, rows: list[Row]) -> Answer:
        """What this round asks of the draft devices."""
        place = _place_of(rows)
        build = None
        if self.building[0]:
            tasks = self.durations.builds(*self.building, self.speculation_length)
            in_one = self.nothing_interrupts and self.on_late is LateBuild.WAIT
            build = Build(self.env, tasks, self.residuals, place, self.on_late, in_one)
        host_s = self.host_s[AFTER_HIT if self.num_hits == len(rows) else AFTER_MISS]
        return Answer(self.env, self._drafts(rows), self.residuals, place, host_s, build)

    def _drafts(self, rows: list[Row]) -> tuple[Task, ...]:
        """Draft steps in the open, by device: for the rows that have nothing in hand."""
        if not self.drafts_in_the_open or self.num_hits == len(rows):
            return ()
        drafted = [
            Drafted(row.num_drafted, row.context, 2 if row.all_accepted else 1)
            for row in rows
            if row.num_drafted and row.source is not Source.HIT
        ]
        return self.durations.drafts(drafted) if drafted else ()

    def _verification(self, rows: list[Row], build: Build | None) -> Event:
        """Starts now, beside a build or alone; happens when it has ended."""
        num_rows = len(rows)
        location_s = self.durations.verify_s(num_rows, self.num_drafted + num_rows, self.num_entries)
        self.verify_s = location_s * next(self.verify_residuals) * (1.0 if build is None else self.slowdown)
        self.verify_start_s, self.round_build = self.env.now, build
        return Arrival(self.env, self.verify_s)

    def _record(self, rows: list[Row]) -> None:
        """The verification that has just ended, and the round of every row."""
        num_rows = len(rows)
        means = ((self.num_drafted + num_rows) / num_rows, self.num_entries / num_rows)
        span = (Operation.VERIFY, num_rows, *means, self.verify_start_s, self.verify_s)
        self.recorder.end(Lane.TARGET, self.index, _place_of(rows), *span)
        self.timeline.trace.rounds.extend([self._round(row) for row in rows])

    # ------------------------------------------------------------------------------------------------------ outcomes

    def _commit(self, rows: list[Row]) -> list[Row]:
        """The outcomes are known. Returns the rows that go on."""
        if self.timeline.record:
            self._record(rows)
        else:
            self.recorder.worked(Lane.TARGET, self.verify_start_s, self.verify_s)
        if self.chooser.controller is not None:
            self._observe(rows, self.chooser.controller)
        self.round_start_s = self.env.now
        for row in rows:
            outcomes, luck, emitted = row.outcomes, row.luck, row.emitted
            num_accepted, left = outcomes.num_accepted[luck][emitted], row.length - emitted
            num_emitted = num_accepted + 1 if num_accepted < left else left  # after a stop token nothing counts
            row.emitted = emitted + num_emitted
            row.context += num_emitted
            row.num_rounds += 1
            if num_emitted == left:
                row.goes_on = False
                self.timeline.finish(row)
            elif self.is_ssd:
                row.side = AFTER_HIT if row.source is Source.HIT else AFTER_MISS
                is_hit = outcomes.is_prepared[luck][emitted]
                row.source = Source.HIT if is_hit else Source.MISS
                row.outcomes = self.usual[AFTER_HIT if is_hit else AFTER_MISS]
            else:
                row.all_accepted = 0 < row.num_drafted == num_accepted
        self.num_hits = 0
        return [row for row in rows if row.goes_on]

    def _round(self, row: Row) -> Round:
        num_accepted = row.num_accepted()
        return Round(
            sequence=row.index,
            index=row.num_rounds,
            source=row.source,
            num_drafted=row.num_drafted,
            num_accepted=num_accepted,
            num_emitted=min(num_accepted + 1, row.length - row.emitted),
            context=row.context,
            start_s=self.round_start_s if row.num_rounds else row.first_token_s,
            end_s=self.env.now,
            policy=self.policy_name,
        )

    def begin(self, row: Row) -> None:
        """A row joins: its first token is there."""
        row.first_token_s = self.round_start_s = self.env.now
        row.source = Source.FIRST if self.is_ssd else Source.SYNCHRONOUS
        row.outcomes = self.usual[AFTER_MISS]
        if not row.goes_on:
            self.timeline.finish(row)

    # ------------------------------------------------------------------------------------------------------ policies

    def _use(self, policy: Policy) -> None:
        """What follows from a policy, read in every round."""
        ssd = policy if isinstance(policy, SpeculativeSpeculative) else None
        self.policy, self.is_ssd, self.speculation_length = policy, ssd is not None, policy.speculation_length
        self.policy_name = policy.name
        self.sends_messages = self.speculation_length > 0 and self.placement.message_s(1e9) > 0
        self.redrafts = ssd is not None and ssd.fallback is Fallback.DRAFT
        self.on_late = LateBuild.WAIT if ssd is None else ssd.on_late_build
        sources = (Source.SYNCHRONOUS, Source.SYNCHRONOUS) if ssd is None else (Source.HIT, Source.MISS)
        self.drafts_in_the_open = policy.waits_for_draft(sources[AFTER_MISS])
        self.host_s = [self.system.host_s[host_term(policy, source)] for source in sources]
        self.usual = [self.timeline.outcomes(policy.drafting(source)) for source in sources]
        system, noise = self.system.as_run_by(policy), self.timeline.noise
        self.verify_residuals = noise.of(system, Lane.TARGET, self.index)[Operation.VERIFY]
        self.residuals = [noise.of(system, Lane.DRAFT, device) for device in range(len(self.devices))]

    def _adopt(self, policy: Policy, rows: list[Row]) -> None:
        """Go on under another policy. Speculations in hand keep their length, and the fan-out lists beside them are the
        new policy's, cut or padded with zeros to it; another kind of decoder drops them."""
        before = self.policy
        self._use(policy)
        for row in rows:
            row.all_accepted = row.all_accepted and not self.is_ssd
            row.outcomes = self.usual[AFTER_MISS]
            if not self.is_ssd:
                row.source = Source.SYNCHRONOUS
            elif not isinstance(before, SpeculativeSpeculative):
                row.source = Source.FIRST
            elif row.source is Source.HIT:
                row.outcomes = self.timeline.outcomes(_in_hand(before, policy))

    def _observe(self, rows: list[Row], controller: Controller) -> None:
        """Tell the controller about rounds, oldest first. One whose build is late is told once the build has ended."""
        round_s = self.env.now - self.round_start_s
        for row in rows:
            seen = RoundSeen(
                source=row.source,
                num_drafted=row.num_drafted,
                num_accepted=row.num_accepted(),
                policy=self.policy,
                round_s=round_s,
                verify_s=self.verify_s,
                draft_s=self.draft_s,
                build_s=0.0,
                batch_size=len(rows),
            )
            self._unseen.append((seen, self.round_build))
        while self._unseen and not _is_open(self._unseen[0][1]):
            seen, build = self._unseen.popleft()
            build_s = 0.0 if build is None or build.is_abandoned else build.took_s
            controller.observe(replace(seen, build_s=build_s))


def _place_of(rows: list[Row]) -> Place:
    return rows[0].index, rows[0].num_rounds


def _in_hand(before: Policy, policy: Policy) -> Drafting:
    """Prepared under one policy, verified under another."""
    check_succession(before, policy)
    length = before.speculation_length
    fan_out = (*policy.fan_out(Source.HIT), *(0,) * length)[: length + 1]
    return Drafting(Proposer.DRAFT_MODEL, length, fan_out, Source.HIT)


def _is_open(build: Build | None) -> bool:
    return build is not None and build.num_open > 0
