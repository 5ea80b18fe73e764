"""The three decoders as SimPy processes on two devices (the mirror of `executor/loops.py`).

Outcomes follow the replay law of the agreement record; durations are drawn from the system's empirical residuals.
Acceptance and hits are decided by random numbers of their (prompt, position), noise by a stream of its lane: two
policies under one seed meet the same text and the same luck.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from sim.policy import Autoregressive, Drafting, Policy, Proposer, Speculative, SpeculativeSpeculative
from sim.replay import Replay
from sim.streams import Streams, outcome_uniforms
from sim.system import System, host_term
from sim.trace import Lane, Operation, Round, Sequence, Source, Span, Trace
from sim.workload import Workload

Process = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True)
class _Verified:
    """What a round did to the sequence."""

    num_accepted: int
    num_emitted: int
    goes_on: bool
    is_prepared: bool  # whether the outcome is in the speculation cache


class _Outcomes:
    """Outcomes of one seed: a pair of uniforms per (prompt, position) decides acceptance and hits."""

    def __init__(self, replay: Replay, stream: np.random.Generator) -> None:
        self.replay = replay
        self.accept_uniforms, self.hit_uniforms = outcome_uniforms(replay, stream)
        self._hit_tables: dict[tuple[int, int, int, Source], NDArray[np.float64]] = {}

    def verify(
        self, prompt: int, emitted: int, num_drafted: int, source: Source, fan_out: tuple[int, ...]
    ) -> _Verified:
        """One round from a state; `fan_out` () where no speculation cache exists."""
        left = int(self.replay.lengths[prompt]) - emitted
        k = 0
        while k < min(num_drafted, left) and self._is_accepted(prompt, emitted + k, k):
            k += 1
        if k == left:  # a stop token among the accepted ones: the tail counts nowhere
            return _Verified(k, k, goes_on=False, is_prepared=False)
        goes_on = k + 1 < left
        is_prepared = (
            goes_on and bool(fan_out) and self._is_hit(prompt, emitted + k, (fan_out[k], k, num_drafted, source))
        )
        return _Verified(k, k + 1, goes_on, is_prepared)

    def _is_accepted(self, prompt: int, position: int, draft_index: int) -> bool:
        return bool(self.accept_uniforms[prompt, position] < self.replay.acceptance(draft_index)[prompt, position])

    def _is_hit(self, prompt: int, position: int, key: tuple[int, int, int, Source]) -> bool:
        if key not in self._hit_tables:
            fan_out, k, num_drafted, source = key
            drafting = Drafting(Proposer.DRAFT_MODEL, num_drafted, (), source)
            self._hit_tables[key] = self.replay.agreement.hit_table(fan_out, k, drafting, rejected=k < num_drafted)
        return bool(self.hit_uniforms[prompt, position] < self._hit_tables[key][prompt, position])


class Timeline:
    """One policy over the prompts of the system's agreement record, one sequence after another."""

    def __init__(self, policy: Policy, workload: Workload, system: System, seed: int) -> None:
        streams = Streams.of(seed)
        self.policy, self.workload, self.system = policy, workload, system.as_run_by(policy)
        self.outcomes = _Outcomes(Replay(system.agreement, workload), streams.outcomes)
        self.noise = streams.noise
        self.env = simpy.Environment()
        self.trace = Trace(policy=policy.to_dict(), workload=workload.identity())

    def run(self) -> Trace:
        decoders = {Autoregressive: self._synchronous, Speculative: self._synchronous}
        decode = decoders.get(type(self.policy), self._speculative_speculative)
        for prompt in range(self.system.agreement.num_prompts):
            self.env.run(self.env.process(decode(prompt)))
            self.env.run()  # an unfinished build ends before the next prompt
        return self.trace

    # ------------------------------------------------------------------------------------------------- decoders

    def _synchronous(self, prompt: int) -> Process:
        """AR and SD: draft, verify, repeat."""
        K = self.policy.speculation_length
        host_s = self._host_s(Source.SYNCHRONOUS)
        sequence = _Decoding(self, prompt)
        all_accepted = False
        while sequence.goes_on:
            num_drafted = sequence.room_for(K)
            yield from self._draft(sequence, num_drafted, first_takes_two=all_accepted)
            yield self.env.timeout(host_s)
            verified = yield from self._verify(sequence, Source.SYNCHRONOUS, num_drafted, fan_out=(), beside=False)
            all_accepted = 0 < num_drafted == verified.num_accepted
        sequence.finish()

    def _speculative_speculative(self, prompt: int) -> Process:
        """SSD, seen from the target: ask for a speculation, verify it while the draft builds, repeat."""
        policy = self.policy
        assert isinstance(policy, SpeculativeSpeculative)
        sequence = _Decoding(self, prompt)
        requests: simpy.Store = simpy.Store(self.env)
        replies: simpy.Store = simpy.Store(self.env)
        if sequence.goes_on:
            self.env.process(self._drafter(sequence, policy, requests, replies))
        source = Source.FIRST
        while sequence.goes_on:
            requests.put(source)
            num_drafted = yield replies.get()
            beside = sequence.num_branches(policy.fan_out(source), num_drafted) > 0
            verified = yield from self._verify(sequence, source, num_drafted, policy.fan_out(source), beside=beside)
            source = Source.HIT if verified.is_prepared else Source.MISS
        requests.put(None)
        sequence.finish()

    def _drafter(
        self, sequence: _Decoding, policy: SpeculativeSpeculative, requests: simpy.Store, replies: simpy.Store
    ) -> Process:
        """SSD, seen from the draft: answer an outcome, then build for the next one."""
        while (source := (yield requests.get())) is not None:
            num_drafted = sequence.room_for(policy.num_drafted(source))
            if source is not Source.HIT:
                yield from self._draft(sequence, num_drafted)
            yield self.env.timeout(self._host_s(source))
            num_branches = sequence.num_branches(policy.fan_out(source), num_drafted)
            place = (sequence.context, sequence.num_rounds)  # taken now: the round may end before its build
            build = self._build(sequence, policy.speculation_length, num_drafted, num_branches, *place)
            if not self.system.overlaps:
                yield from build
            replies.put(num_drafted)
            if self.system.overlaps:
                yield from build

    # ------------------------------------------------------------------------------------------------ operations

    def _host_s(self, source: Source) -> float:
        return self.system.host_s[host_term(self.policy, source)]

    def _verify(
        self, sequence: _Decoding, source: Source, num_drafted: int, fan_out: tuple[int, ...], *, beside: bool
    ) -> Process:
        yield from self._work(
            sequence,
            Lane.TARGET,
            Operation.VERIFY,
            num_drafted + 1,
            sequence.context,
            sequence.num_rounds,
            beside=beside,
        )
        verified = self.outcomes.verify(sequence.prompt, sequence.emitted, num_drafted, source, fan_out)
        sequence.commit(source, num_drafted, verified)
        return verified

    def _draft(self, sequence: _Decoding, num_drafted: int, *, first_takes_two: bool = False) -> Process:
        for step in range(num_drafted):
            unfed = 2 if first_takes_two and step == 0 else 1
            context = sequence.context + step + 1 - unfed
            yield from self._work(
                sequence, Lane.DRAFT, Operation.DRAFT_STEP, unfed, context, sequence.num_rounds, beside=False
            )

    def _build(
        self, sequence: _Decoding, num_steps: int, num_drafted: int, num_branches: int, context: int, index: int
    ) -> Process:
        if num_branches == 0:
            return
        yield from self._work(sequence, Lane.DRAFT, Operation.GLUE, num_drafted + 1, context, index, beside=True)
        for step in range(num_steps):
            slots = context + num_drafted + 1 + step * num_branches
            yield from self._work(sequence, Lane.DRAFT, Operation.TREE_STEP, num_branches, slots, index, beside=True)

    def _work(
        self,
        sequence: _Decoding,
        lane: Lane,
        operation: Operation,
        num_tokens: int,
        context: int,
        index: int,
        *,
        beside: bool,
    ) -> Process:
        """One operation on its lane, recorded as a span."""
        durations = self.system.samples_s(lane, operation, num_tokens, context, beside=beside)
        start_s = self.env.now
        yield self.env.timeout(float(durations[self.noise[lane].integers(len(durations))]))
        self.trace.spans.append(
            Span(lane, operation, sequence.prompt, index, num_tokens, context, start_s, self.env.now)
        )


class _Decoding:
    """State of the sequence being decoded; commits its rounds to the trace."""

    def __init__(self, timeline: Timeline, prompt: int) -> None:
        self.timeline, self.prompt = timeline, prompt
        self.prompt_length = int(timeline.system.agreement.prompt_length[prompt])
        self.length = int(timeline.outcomes.replay.lengths[prompt])
        self.emitted = min(1, self.length)  # the prefill emits the first token
        self.num_rounds = 0
        self.decode_start_s = self.round_start_s = timeline.env.now

    @property
    def goes_on(self) -> bool:
        return self.emitted < self.length

    @property
    def remaining(self) -> int:
        return self.timeline.workload.max_new_tokens - self.emitted

    @property
    def context(self) -> int:
        """KV entries of either model: everything but the pending token."""
        return self.prompt_length + self.emitted - 1

    def room_for(self, num_drafted: int) -> int:
        return min(num_drafted, self.remaining - 1)

    def num_branches(self, fan_out: tuple[int, ...], num_drafted: int) -> int:
        """Branches of the build of a round: none if the round must be the last, fewer if the cap shortens it."""
        return sum(fan_out[: num_drafted + 1]) if self.remaining > 1 else 0

    def commit(self, source: Source, num_drafted: int, verified: _Verified) -> None:
        now = self.timeline.env.now
        self.timeline.trace.rounds.append(
            Round(
                sequence=self.prompt,
                index=self.num_rounds,
                source=source,
                num_drafted=num_drafted,
                num_accepted=verified.num_accepted,
                num_emitted=verified.num_emitted,
                context=self.context,
                start_s=self.round_start_s,
                end_s=now,
            )
        )
        self.emitted += verified.num_emitted
        self.num_rounds += 1
        self.round_start_s = now

    def finish(self) -> None:
        agreement = self.timeline.system.agreement
        is_whole = self.length == int(agreement.lengths[self.prompt])
        stopped = is_whole and bool(agreement.stopped[self.prompt])
        self.timeline.trace.sequences.append(
            Sequence(
                index=self.prompt,
                prompt_length=self.prompt_length,
                tokens=agreement.text(self.prompt)[: self.length],
                prefill_start_s=self.decode_start_s,
                decode_start_s=self.decode_start_s,
                end_s=self.round_start_s,
                stopped=stopped,
            )
        )


def replicate(policy: Policy, workload: Workload, system: System, seeds: Iterable[int]) -> list[Trace]:
    """One trace per seed."""
    traces = []
    for seed in seeds:
        trace = Timeline(policy, workload, system, seed).run()
        trace.meta = {"producer": "simulator", "engine": "des", "seed": seed, "identity": system.identity}
        traces.append(trace)
    return traces
