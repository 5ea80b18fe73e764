"""Exact expectation of a policy over an agreement record: no sampling of outcomes, no noise.

A forward recursion over (tokens emitted so far, source of the round). Policies of equal K and fallback are carried
through together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sim.agreement import AgreementRecord
from sim.latency import mean_of_maximum, sum_of_independent
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative
from sim.replay import Replay
from sim.system import HostTerm, System
from sim.trace import Lane, Operation, Source
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SOURCES = (Source.HIT, Source.MISS)  # a first round behaves as after a miss
CHUNK = 64  # policies carried together; bounds memory
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
            results[index] = _synchronous(policy, replay, system)
    for members in groups.values():
        for start in range(0, len(members), CHUNK):
            chunk = members[start : start + CHUNK]
            group = [policy for policy in (policies[i] for i in chunk) if isinstance(policy, SpeculativeSpeculative)]
            results.update(zip(chunk, _speculative_speculative(group, replay, system), strict=True))
    return [results[index] for index in range(len(policies))]


def outcome_hit_mass(record: AgreementRecord, speculation_length: int, max_fan_out: int) -> FloatArray:
    """(K + 1, max_fan_out + 1) P(k accepted and bonus token among the f prepared), over rounds that start anywhere.

    Every position that leaves room for a whole round counts once as a start. Input of `sim.policy.exact_fan_out`.
    """
    K = speculation_length
    accepted = record.padded(record.acceptance, fill=1.0)
    lengths = record.lengths
    starts = np.arange(accepted.shape[1])[None, :] + K < lengths[:, None]
    starts[:, :1] = False  # position 0 comes from the prefill, no round tests it
    num_starts = max(1, int(starts.sum()))
    rejection = [record.padded(record.hit_after_rejection(f)) for f in range(max_fan_out + 1)]
    acceptance = [record.padded(record.hit_after_acceptance(f)) for f in range(max_fan_out + 1)]
    mass = np.zeros((K + 1, max_fan_out + 1))
    survived = np.ones_like(accepted)
    for k in range(K + 1):
        here = _shift(accepted, k, 1.0)
        ended = survived * (1 - here) if k < K else survived
        for f, table in enumerate(rejection if k < K else acceptance):
            mass[k, f] = (starts * ended * _shift(table, k, 0.0)).sum() / num_starts
        survived = survived * here
    return mass


def _shift(table: FloatArray, by: int, fill: float) -> FloatArray:
    """Entry (n, i) is `table[n, i + by]`."""
    if by == 0:
        return table
    shifted = np.full_like(table, fill)
    shifted[:, :-by] = table[:, by:]
    return shifted


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
    host_s = system.host_s[HostTerm.SPECULATIVE if K else HostTerm.AUTOREGRESSIVE]
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
                seconds += flow * (two - system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, 1, ahead, beside=False))
    nothing = np.zeros((2, replay.num_prompts))
    return Expectation(replay.num_tokens(), rounds, seconds, nothing, nothing)


def _mean_round_s(
    system: System, num_drafted: int, num_branches: int, num_steps: int, lowest: int, highest: int
) -> tuple[FloatArray, FloatArray]:
    """At contexts lowest..highest: mean of verify, and E[max(verify, build)]; without branches there is no build."""
    contexts = np.arange(lowest, highest + 1)
    if num_branches == 0:
        alone = _verify_s(system, num_drafted, contexts, beside=False)
        return alone, alone
    knots = np.unique(np.linspace(lowest, highest, NUM_CONTEXT_KNOTS).astype(int))
    maxima = []
    for context in knots:
        verify = system.samples_s(Lane.TARGET, Operation.VERIFY, num_drafted + 1, context, beside=True)
        glue = system.samples_s(Lane.DRAFT, Operation.GLUE, num_drafted + 1, context, beside=True)
        slots = context + num_drafted + 1
        steps = [
            system.samples_s(Lane.DRAFT, Operation.TREE_STEP, num_branches, slots + j * num_branches, beside=True)
            for j in range(num_steps)
        ]
        maxima.append(mean_of_maximum(verify, sum_of_independent([glue, *steps])))
    return _verify_s(system, num_drafted, contexts, beside=True), np.interp(contexts, knots, maxima)


def _speculative_speculative(
    policies: list[SpeculativeSpeculative], replay: Replay, system: System
) -> list[Expectation]:
    """SSD policies of equal K and fallback; arrays carry a leading axis over policies."""
    K = policies[0].speculation_length
    shape = (len(policies), replay.num_prompts)
    branches = {s: [sum(policy.fan_out(s)) for policy in policies] for s in SOURCES}
    lowest, highest = int(replay.prompt_length.min()), int(replay.prompt_length.max()) + max(0, replay.longest - 2)
    round_times = cache(lambda num_drafted, num: _mean_round_s(system, num_drafted, num, K, lowest, highest))

    def hit_tables(source: Source, k: int, num_drafted: int) -> FloatArray:
        """(policies, prompts, positions) hit probability after k acceptances out of `num_drafted`."""
        law = replay.hit_after_rejection if k < num_drafted else replay.hit_after_acceptance
        return np.stack([law(policy.fan_out(source)[k]) for policy in policies])

    tables = cache(hit_tables)
    mass = {s: np.zeros((*shape, replay.longest + K + 2)) for s in SOURCES}
    starts = (replay.lengths > 1).astype(float)
    mass[Source.MISS][:, :, 1] = starts
    rounds, seconds = np.zeros((2, *shape))
    lookups, hits = np.zeros((2, *shape, 2))

    def fallback_s(emitted: int) -> FloatArray:
        num_drafted = replay.room_for(policies[0].num_drafted_after_miss, emitted)
        return system.host_s[HostTerm.MISS] + _draft_s(system, num_drafted, replay.context(emitted))

    if replay.longest > 1:
        seconds += starts * fallback_s(1)
    after_miss_s = {i: fallback_s(i) for i in range(1, replay.longest)}
    for i in range(1, replay.longest):
        at = replay.context(i) - lowest
        for side, source in enumerate(SOURCES):
            here = mass[source][:, :, i]
            num_drafted = replay.room_for(policies[0].num_drafted(source), i)
            if i + 1 == replay.cap:  # the round surely ends the sequence: nothing is built beside it
                times = [round_times(num_drafted, 0)] * len(policies)
            else:
                times = [round_times(num_drafted, num) for num in branches[source]]
            verify_s = np.stack([verify[at] for verify, _ in times])
            round_s = np.stack([longer[at] for _, longer in times])
            rounds += here
            seconds += here * verify_s
            for k, (probability, goes_on) in enumerate(replay.accept_counts(i, num_drafted)):
                weight = probability * goes_on
                if not weight.any():
                    continue
                flow = here * weight
                hit = flow * tables(source, k, num_drafted)[:, :, i + k]
                miss = flow - hit
                mass[Source.HIT][:, :, i + k + 1] += hit
                mass[Source.MISS][:, :, i + k + 1] += miss
                seconds += flow * (round_s - verify_s) + hit * system.host_s[HostTerm.HIT]
                seconds += miss * after_miss_s[i + k + 1]
                lookups[:, :, side] += flow
                hits[:, :, side] += hit
    num_tokens = replay.num_tokens()
    return [Expectation(num_tokens, rounds[j], seconds[j], lookups[j].T, hits[j].T) for j in range(len(policies))]
