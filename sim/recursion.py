"""Exact expectation of a policy over an agreement record: no sampling of outcomes, no noise.

A forward recursion over (tokens emitted so far, source of the round). Policies of equal K and fallback are carried
through together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.latency import mean_of_maximum
from sim.policy import Autoregressive, Drafting, Fallback, Policy, Proposer, Speculative, SpeculativeSpeculative
from sim.replay import SOURCES, Replay
from sim.system import System, host_term
from sim.trace import Lane, Operation, Source
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CHUNK = 256  # policies carried together; bounds memory
NUM_CONTEXT_KNOTS = 5  # contexts at which E[max(verify, build)] is evaluated; it is nearly linear between them


@dataclass(frozen=True)
class Expectation:
    """Expected totals of each prompt under one policy; arrays are (num_prompts,), or (2, num_prompts) by source of the
    round that ends with the look-up: after a hit, after a miss."""

    num_tokens: FloatArray
    num_rounds: FloatArray
    seconds: FloatArray
    num_lookups: FloatArray
    num_hits: FloatArray


def expectations(policies: Sequence[Policy], workload: Workload, system: System) -> list[Expectation]:
    """One `Expectation` per policy, in their order."""
    replay = Replay(system.agreement, workload)
    results: dict[int, Expectation] = {}
    groups: dict[tuple[int, Fallback], list[int]] = {}
    for index, policy in enumerate(policies):
        if isinstance(policy, SpeculativeSpeculative):
            groups.setdefault((policy.speculation_length, policy.fallback), []).append(index)
        else:
            results[index] = _synchronous(policy, replay, system.as_run_by(policy))
    for members in groups.values():
        for start in range(0, len(members), CHUNK):
            chunk = members[start : start + CHUNK]
            group = [policy for policy in (policies[i] for i in chunk) if isinstance(policy, SpeculativeSpeculative)]
            found = _speculative_speculative(group, replay, system.as_run_by(group[0]))
            results.update(zip(chunk, found, strict=True))
    return [results[index] for index in range(len(policies))]


def outcome_hit_mass(agreement: Agreement, speculation_length: int, max_fan_out: int, source: Source) -> FloatArray:
    """(K + 1, max_fan_out + 1) P(k accepted and bonus token among the f prepared), over rounds that start anywhere.

    Every position that leaves room for a whole round counts once as a start. Input of `sim.policy.exact_fan_out`.
    """
    K = speculation_length
    drafting = Drafting(Proposer.DRAFT_MODEL, K, (max_fan_out,) * (K + 1), source)
    longest = int(agreement.lengths.max(initial=0))
    starts = np.arange(1, max(1, longest - K))  # position 0 comes from the prefill, no round tests it
    counted = starts + K < agreement.lengths[:, None]
    survived = counted / max(1, counted.sum())
    mass = np.zeros((K + 1, max_fan_out + 1))
    for k in range(K + 1):
        here = starts + k
        accepted = agreement.acceptance_table(k, drafting)[:, here] if k < K else np.zeros_like(survived)
        ended = survived * (1 - accepted)
        for f in range(max_fan_out + 1):
            mass[k, f] = (ended * agreement.hit_table(f, k, drafting, rejected=k < K)[:, here]).sum()
        survived = survived * accepted
    return mass


def _verify_s(system: System, num_drafted: int, contexts: IntArray, *, beside: bool) -> FloatArray:
    return system.mean_s(Lane.TARGET, Operation.VERIFY, num_drafted + 1, contexts, beside=beside)


def _draft_s(system: System, num_drafted: int, contexts: IntArray) -> FloatArray:
    """Mean time of `num_drafted` draft steps one after another; `contexts` before the first."""
    steps = [
        system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, 1, contexts + step, beside=False) for step in range(num_drafted)
    ]
    return np.sum(steps, axis=0) if steps else np.zeros(len(contexts))


def _synchronous(policy: Autoregressive | Speculative, replay: Replay, system: System) -> Expectation:
    """AR and SD: every round drafts, then verifies."""
    K = policy.speculation_length
    host_s = system.host_s[host_term(policy, Source.SYNCHRONOUS)]
    mass = np.zeros((replay.num_prompts, replay.longest + K + 2))
    mass[replay.lengths > 1, 1:2] = 1.0
    rounds, seconds = np.zeros((2, replay.num_prompts))
    for i in range(1, replay.longest):
        num_drafted = replay.room_for(K, i)
        contexts = replay.context(i)
        round_s = _draft_s(system, num_drafted, contexts) + _verify_s(system, num_drafted, contexts, beside=False)
        rounds += mass[:, i]
        seconds += mass[:, i] * (round_s + host_s)
        for k, (probability, goes_on) in enumerate(replay.accept_counts(i, num_drafted)):
            flow = mass[:, i] * probability * goes_on
            mass[:, i + k + 1] += flow
            if 0 < k == num_drafted and i + k + 2 < replay.cap:
                # The last draft token was never fed to the draft: the next first step takes two tokens.
                ahead = contexts + k
                two = system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, 2, ahead, beside=False)
                seconds += flow * (two - system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, 1, ahead + 1, beside=False))
    nothing = np.zeros((2, replay.num_prompts))
    return Expectation(replay.num_tokens(), rounds, seconds, nothing, nothing)


def _mean_delay_s(
    system: System, num_drafted: int, num_branches: int, num_steps: int, contexts: IntArray
) -> FloatArray:
    """At each context: by how much a build delays the answer, E[max(verify, build)] - E[verify], or all of it where
    nothing overlaps. 0 without branches."""
    if num_branches == 0 or not len(contexts):
        return np.zeros(len(contexts))
    knots = np.unique(np.linspace(contexts.min(), contexts.max(), NUM_CONTEXT_KNOTS).astype(int))
    delays = []
    for context in knots:
        verify = system.samples_s(Lane.TARGET, Operation.VERIFY, num_drafted + 1, context, beside=True)
        build = system.build_samples_s(num_drafted, num_branches, num_steps, context)
        delays.append(mean_of_maximum(verify, build) - verify.mean() if system.overlaps else build.mean())
    return np.interp(contexts, knots, delays)


class _SideTables:
    """What a group of policies needs in rounds of one source: arrays are (policies, num_prompts) at a position."""

    def __init__(self, policies: list[SpeculativeSpeculative], source: Source, replay: Replay, system: System) -> None:
        self.replay, self.system, self.source = replay, system, source
        self.num_steps = policies[0].speculation_length
        self.num_drafted = policies[0].num_drafted(source)
        self.host_s = system.host_s[host_term(policies[0], source)]
        self.fan_out = np.array([policy.fan_out(source) for policy in policies])
        self.fan_outs = range(int(self.fan_out.max()) + 1)
        self.laws: dict[tuple[int, bool], FloatArray] = {}
        self.usual_times = self._times(self.num_drafted, replay.contexts_with_room(self.num_drafted))

    def _times(self, num_drafted: int, contexts: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Waiting for a speculation and verifying it, alone (1, contexts) and beside the build (policies, contexts);
        delay by the build (policies, contexts)."""
        drafted_in_the_open = num_drafted if self.source is Source.MISS else 0
        wait_s = self.host_s + _draft_s(self.system, drafted_in_the_open, contexts)
        verify_s = [_verify_s(self.system, num_drafted, contexts, beside=beside) for beside in (False, True)]
        # A round that the cap shortens prepares for the accept counts that it can have.
        budgets, budget_of = np.unique(self.fan_out[:, : num_drafted + 1].sum(1), return_inverse=True)
        delay_s = [_mean_delay_s(self.system, num_drafted, int(b), self.num_steps, contexts) for b in budgets]
        beside_s = np.stack([verify_s[int(b > 0)] for b in budgets])
        return wait_s + verify_s[0][None], (wait_s + beside_s)[budget_of], np.stack(delay_s)[budget_of]

    def times(self, emitted: int) -> tuple[FloatArray, FloatArray]:
        """Mean of waiting for the speculation and verifying it, and mean delay by its build."""
        num_drafted, contexts = self.replay.room_for(self.num_drafted, emitted), self.replay.context(emitted)
        if num_drafted == self.num_drafted:
            at = contexts - self.replay.first_context
            alone_s, beside_s, delay_s = (table[:, at] for table in self.usual_times)
        else:
            alone_s, beside_s, delay_s = self._times(num_drafted, contexts)
        if emitted + 1 == self.replay.cap:  # the round surely ends the sequence: nothing is built beside it
            return alone_s, np.zeros_like(alone_s)
        return beside_s, delay_s

    def hit(self, k: int, num_drafted: int, position: int) -> FloatArray:
        """Hit probability after k acceptances out of `num_drafted`."""
        key = (k, k < num_drafted)
        if key not in self.laws:
            hit_table = self.replay.agreement.hit_table
            drafting = Drafting(Proposer.DRAFT_MODEL, num_drafted, (), self.source)
            tables = [hit_table(f, k, drafting, rejected=k < num_drafted) for f in self.fan_outs]
            self.laws[key] = np.stack(tables)
        return self.laws[key][self.fan_out[:, k], :, position]


def _speculative_speculative(
    policies: list[SpeculativeSpeculative], replay: Replay, system: System
) -> list[Expectation]:
    """SSD policies of equal K and fallback; arrays carry a leading axis over policies."""
    K = policies[0].speculation_length
    shape = (len(policies), replay.num_prompts)
    tables = [_SideTables(policies, source, replay, system) for source in SOURCES]
    hit_side, miss_side = range(2)
    mass = np.zeros((2, replay.longest + K + 2, *shape))
    mass[miss_side, 1] = replay.lengths > 1
    rounds, seconds = np.zeros((2, *shape))
    lookups, hits = np.zeros((2, 2, *shape))
    for i in range(1, replay.longest):
        counts: dict[int, list[tuple[FloatArray, NDArray[np.bool_]]]] = {}
        for side in (hit_side, miss_side):
            here = mass[side, i]
            num_drafted = replay.room_for(tables[side].num_drafted, i)
            if num_drafted not in counts:
                counts[num_drafted] = replay.accept_counts(i, num_drafted)
            round_s, delay_s = tables[side].times(i)
            goes_on = np.zeros(shape)
            for k, (probability, continues) in enumerate(counts[num_drafted]):
                weight = probability * continues
                if weight.any():
                    flow = here * weight
                    hit = flow * tables[side].hit(k, num_drafted, i + k)
                    mass[hit_side, i + k + 1] += hit
                    mass[miss_side, i + k + 1] += flow - hit
                    goes_on += flow
                    hits[side] += hit
            rounds += here
            lookups[side] += goes_on
            seconds += here * round_s + (goes_on if system.overlaps else here) * delay_s
    num_tokens = replay.num_tokens()
    return [Expectation(num_tokens, rounds[j], seconds[j], lookups[:, j], hits[:, j]) for j in range(len(policies))]
