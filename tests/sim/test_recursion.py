"""The exact engine: against a plain walk over all rounds, closed forms, limits, chance, and what it refuses."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import recursion
from sim.batch_chain import binomial, stationary, steady_state
from sim.errors import BadInput
from sim.latency import LatencyModel, OperationLatency
from sim.mean_times import TOLERANCE, Build, BuildDelays, Outcomes, Refinement, build_delays_s
from sim.parametric import HitCurve, ParametricAgreement
from sim.placement import Placement, Split
from sim.policy import (
    Autoregressive,
    Drafting,
    Fallback,
    LateBuild,
    Policy,
    PolicyTable,
    Proposer,
    Speculative,
    SpeculativeSpeculative,
)
from sim.recursion import Expectation, expectations, outcome_hit_mass, round_starts
from sim.replay import SOURCES, Replay
from sim.round_law import RoundLaw
from sim.simulate import predict
from sim.system import HostTerm, System, host_term
from sim.theory import (
    batched_ssd_speedup,
    critical_batch_size,
    expected_tokens_per_round,
    sd_speedup,
    ssd_over_sd_bounds,
    ssd_speedup,
)
from sim.trace import Lane, Operation, Source
from sim.workload import Workload
from tests.sim.toy import cut_at, markov, record_of, scripted_record, system_of, workload_of

FALLBACKS = list(Fallback)
LATE = list(LateBuild)


def ssd(K: int, F: int, fallback: Fallback = Fallback.DRAFT, late: LateBuild = LateBuild.WAIT, C: float = 1.0):
    after_miss = (F,) * (K + 1) if fallback is not Fallback.NONE else (F,)
    return SpeculativeSpeculative(K, (F,) * (K + 1), after_miss, fallback, C, late)


def seconds(policy: Policy, system: System, workload: Workload | None = None) -> float:
    workload = workload_of(system.agreement) if workload is None else workload
    return float(expectations([policy], workload, system)[0].seconds.sum())


def rate(expectation: Expectation) -> float:
    return float(expectation.num_tokens.sum() / expectation.seconds.sum())


# ------------------------------------------------------------------------------------- a plain walk, for reference


class Walk:
    """All rounds of one policy, one after another and one prompt at a time; durations do not vary."""

    def __init__(self, policy: Policy, workload: Workload, system: System) -> None:
        self.policy, self.system, self.placement = policy, system, system.placement
        self.replay = Replay(system.agreement, workload)
        self.sampled = workload.temperature > 0
        self.laws = {source: RoundLaw(self.replay, policy.drafting(source)) for source in Source}

    def totals(self, prompt: int) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        is_ssd = isinstance(self.policy, SpeculativeSpeculative)
        states = {(1, Source.MISS if is_ssd else Source.SYNCHRONOUS): 1.0} if self.replay.lengths[prompt] > 1 else {}
        while states:
            (start, source), chance = min(states.items(), key=lambda item: item[0][0])
            del states[start, source]
            law = self.laws[source]
            always_s, hit_s, other_s = self.round_s(law, prompt, start)
            found["rounds"] += chance
            found["starts", source, start] = chance
            found["seconds"] += chance * always_s
            for k in range(len(law.ended)):
                onward = chance * law.ended[k, prompt, start] * law.goes_on(k)[prompt, start]
                hit = onward * law.hits[k, prompt, start] if is_ssd else 0.0
                found["lookups", source] += onward
                found["hits", source] += hit
                found["seconds"] += hit * hit_s + (onward - hit) * (other_s + self.unfed_s(law, prompt, start, k))
                for into, flow in ((Source.HIT, hit), (Source.MISS if is_ssd else source, onward - hit)):
                    if flow:
                        states[start + k + 1, into] = states.get((start + k + 1, into), 0.0) + flow
        return found

    def round_s(self, law: RoundLaw, prompt: int, start: int) -> tuple[float, float, float]:
        """A round, and what stands between it and the next: before a hit, before any other."""
        source, context = law.drafting.source, int(self.replay.prompt_length[prompt]) + start - 1
        num_drafted = int(law.num_drafted[prompt, start])
        waiting_s = self.system.host_s[host_term(self.policy, source)]
        if self.policy.waits_for_draft(source):
            waiting_s += sum(self.op_s(Operation.DRAFT_STEP, 1, context + step) for step in range(num_drafted))
        message_s = outcome_s = 0.0
        if self.policy.speculation_length:
            sampled = self.sampled and law.drafting.proposer is Proposer.DRAFT_MODEL
            message_s = self.placement.speculation_s(num_drafted, sampled=sampled)
            outcome_s = self.placement.outcome_s()
        branches = sum(law.drafting.fan_out[: num_drafted + 1]) if start + 1 < self.replay.cap else 0
        verify_s = self.op_s(Operation.VERIFY, num_drafted + 1, context, beside=branches > 0)
        ends_s = self.build_ends_s(num_drafted, branches, context)
        whole_s = max((device[-1] for device in ends_s), default=0.0)
        if not self.system.overlaps:
            return waiting_s + whole_s + message_s + verify_s, outcome_s, outcome_s
        known_s = message_s + verify_s + outcome_s
        onward_s = other_s = outcome_s + max(0.0, whole_s - known_s)
        if getattr(self.policy, "on_late_build", LateBuild.WAIT) is LateBuild.ABANDON and ends_s:
            (device,) = ends_s
            other_s = outcome_s + next((end for end in device if end >= known_s), known_s) - known_s
        return waiting_s + message_s + verify_s, onward_s, other_s

    def unfed_s(self, law: RoundLaw, prompt: int, start: int, k: int) -> float:
        """SD feeds two tokens after a full acceptance, if the next round drafts."""
        if law.drafting.source is not Source.SYNCHRONOUS or not 0 < k == law.num_drafted[prompt, start]:
            return 0.0
        ahead = int(self.replay.prompt_length[prompt]) + start - 1 + k
        if start + k + 2 >= self.replay.cap:
            return 0.0
        return self.op_s(Operation.DRAFT_STEP, 2, ahead) - self.op_s(Operation.DRAFT_STEP, 1, ahead + 1)

    def build_ends_s(self, num_drafted: int, branches: int, context: int) -> list[list[float]]:
        """Of every draft device at work, when each of its operations ends."""
        devices = []
        for _, share in self.placement.shares_of_build(branches, 1) if branches else []:
            ends = [self.op_s(Operation.GLUE, num_drafted + 1, context, beside=True)]
            for step in range(self.policy.speculation_length):
                slots = context + num_drafted + 1 + step * share
                ends.append(ends[-1] + self.op_s(Operation.TREE_STEP, share, slots, beside=True))
            devices.append(ends)
        return devices

    def op_s(self, operation: Operation, num_tokens: int, context: int, *, beside: bool = False) -> float:
        lane = Lane.TARGET if operation is Operation.VERIFY else Lane.DRAFT
        return float(self.system.mean_s(lane, operation, num_tokens, context, beside=beside))


@st.composite
def policies(draw, fallbacks=FALLBACKS, weights=(1.0, 1.0, 0.4), late=LATE):
    K, fallback = draw(st.integers(1, 4)), draw(st.sampled_from(fallbacks))
    fan_out = st.integers(0, 4)
    after_hit = tuple(draw(fan_out) for _ in range(K + 1))
    after_miss = tuple(draw(fan_out) for _ in range(K + 1 if fallback is not Fallback.NONE else 1))
    C, rule = draw(st.sampled_from(weights)), draw(st.sampled_from(late))
    return SpeculativeSpeculative(K, after_hit, after_miss, fallback, C, rule)


milliseconds = st.floats(0.1, 20).map(lambda value: value / 1000)


@st.composite
def placements(draw, most_devices=1):
    return Placement(
        num_draft_devices=draw(st.integers(1, most_devices)),
        transfer_latency_s=draw(st.sampled_from((0.0, 0.0013))),
        transfer_bytes_per_s=draw(st.sampled_from((math.inf, 2e6))),
        distribution_bytes=draw(st.sampled_from((0, 997))),
    )


def with_jump(table: OperationLatency, at: int, factor: float) -> OperationLatency:
    """From the context after `at` on everything takes `factor` times as long."""

    def jumping(knots):
        contexts, locations = zip(*knots, strict=True)
        places = sorted({*contexts, at, at + 1})
        values = np.interp(places, contexts, locations) * np.where(np.array(places) > at, factor, 1.0)
        return tuple(zip(places, values.tolist(), strict=True))

    batched = {rows: {n: jumping(knots) for n, knots in by.items()} for rows, by in table.batched.items()}
    return replace(table, knots={n: jumping(knots) for n, knots in table.knots.items()}, batched=batched)


def jumping(system: System, operation: Operation, at: int, factor: float) -> System:
    tables = dict(system.latency.operations)
    (key,) = (key for key in tables if key[1] is operation)
    return replace(system, latency=LatencyModel(tables | {key: with_jump(tables[key], at, factor)}))


@st.composite
def systems(draw, residuals=(1.0,), most_devices=1):
    """Latencies rise with the context, and some jump."""
    seed, length = draw(st.integers(0, 50)), draw(st.integers(1, 14))
    record = record_of(*markov(seed), num_prompts=3, length=length, seed=seed + 1)
    if draw(st.booleans()):
        record = cut_at(record, draw(st.integers(0, 5)))
    slopes = [draw(milliseconds) / 50 for _ in range(3)]

    def table(operation: Operation) -> OperationLatency:
        base, per_token = draw(milliseconds), draw(milliseconds) / 10
        at = {n: tuple((c, base + per_token * n + slopes[n % 3] * c) for c in (0, 500)) for n in (1, 2, 4, 64)}
        straight = OperationLatency(operation, at, residuals)
        return draw(st.sampled_from((straight, with_jump(straight, draw(st.integers(0, 40)), draw(st.floats(0.3, 3))))))

    draft = (Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP)
    operations = {(Lane.DRAFT, operation): table(operation) for operation in draft}
    operations[Lane.TARGET, Operation.VERIFY] = table(Operation.VERIFY)
    return replace(
        system_of(record, contention=draw(st.sampled_from((1.0, 1.3)))),
        latency=LatencyModel(operations),
        host_s={term: draw(milliseconds) / 10 for term in HostTerm},
        overlaps=draw(st.sampled_from((True, True, False))),
        placement=draw(placements(most_devices)),
    )


def check_against_walk(policy: Policy, system: System, cap: int) -> None:
    workload = workload_of(system.agreement, min(cap, system.agreement.max_new_tokens))
    found, walk = expectations([policy], workload, system)[0], Walk(policy, workload, system)
    sources = SOURCES if isinstance(policy, SpeculativeSpeculative) else (Source.SYNCHRONOUS,)
    starts = round_starts({source: walk.laws[source] for source in sources})
    for prompt in range(3):
        totals = walk.totals(prompt)
        for source, mass in starts.items():
            expected = [totals["starts", source, start] for start in range(len(mass))]
            assert mass[:, prompt] == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert found.num_rounds[prompt] == pytest.approx(totals["rounds"], rel=1e-12)
        assert found.seconds[prompt] == pytest.approx(totals["seconds"], rel=TOLERANCE)
        for side, source in enumerate(SOURCES) if isinstance(policy, SpeculativeSpeculative) else ():
            assert found.num_lookups[side, prompt] == pytest.approx(totals["lookups", source], rel=1e-12, abs=1e-14)
            assert found.num_hits[side, prompt] == pytest.approx(totals["hits", source], rel=1e-12, abs=1e-14)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(), cap=st.integers(0, 14))
def test_rounds_look_ups_hits_and_seconds_are_those_of_a_plain_walk(policy, system, cap):
    check_against_walk(policy, system, cap)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(policy=policies(late=[LateBuild.WAIT]), system=systems(most_devices=3), cap=st.integers(2, 14))
def test_several_draft_devices_too(policy, system, cap):
    check_against_walk(policy, system, cap)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(K=st.integers(0, 4), is_ar=st.booleans(), system=systems(), cap=st.integers(0, 14))
def test_autoregressive_and_speculative_decoding_too(K, is_ar, system, cap):
    check_against_walk(Autoregressive() if is_ar else Speculative(K), system, cap)


@pytest.mark.parametrize("cells", [1, 500, 2**20])
def test_policies_do_not_depend_on_their_company(cells, monkeypatch):
    """One at a time, and all together in chunks of one policy, a few, or all."""
    monkeypatch.setattr(recursion, "CELLS", cells)
    record = record_of(*markov(5), num_prompts=4, length=12, seed=6)
    system, workload = system_of(record, tree_step_s=0.004, residuals=(0.7, 1.3)), workload_of(record)
    rng = np.random.default_rng(1)
    company: list[Policy] = [Autoregressive(), Speculative(2)]
    for fallback in FALLBACKS * 3:
        K, C, late = int(rng.integers(1, 4)), rng.choice([1.0, 0.5]), LATE[rng.integers(2)]
        lists = rng.integers(0, 5, (2, K + 1)).tolist()
        lists[1] = lists[1] if fallback is not Fallback.NONE else lists[1][:1]
        company.append(SpeculativeSpeculative(K, *map(tuple, lists), fallback, float(C), late))
    for policy, together in zip(company, expectations(company, workload, system), strict=True):
        alone = expectations([policy], workload, system)[0]
        for name in ("num_tokens", "num_rounds", "seconds", "num_lookups", "num_hits", "doubt"):
            assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-12, abs=1e-14)


def test_contexts_between_knots_and_texts_of_unlike_prompts():
    """Everything rises linearly with the context and the build is always late: interpolation is exact."""
    record = record_of(*markov(5), num_prompts=3, length=14, seed=6)
    record = replace(record, prompt_length=np.array([4, 9, 23]), prompt_tokens=())
    slopes = {Operation.VERIFY: 1e-4, Operation.DRAFT_STEP: 5e-5, Operation.GLUE: 2e-4, Operation.TREE_STEP: 3e-4}
    tables = {
        key: replace(table, knots={n: ((0, 0.01), (99, 0.01 + 99 * slopes[key[1]])) for n in (1, 2, 64)})
        for key, table in system_of(record).latency.operations.items()
    }
    system = replace(system_of(record), latency=LatencyModel(tables))
    for policy in (ssd(3, 2), ssd(3, 2, Fallback.NONE), Speculative(3), ssd(2, 1, late=LateBuild.WAIT)):
        check_against_walk(policy, system, 14)


# ------------------------------------------------------------------------------------------------- times over contexts


class EveryContext(BuildDelays):
    """Nothing is interpolated."""

    def at(self, build, num_branches, contexts, message_s, *, abandons):
        each = [
            BuildDelays.at(self, build, num_branches, at, message_s, abandons=abandons)
            for at in np.split(contexts, len(contexts))
        ]
        return np.concatenate(each, axis=-1)


def interpolated_and_at_every_context_s(policy: Policy, system: System) -> tuple[float, float]:
    found = seconds(policy, system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recursion, "BuildDelays", EveryContext)
        return found, seconds(policy, system)


RESIDUALS = st.sampled_from(
    ((1.0,), (0.6, 1.4), (1.0,) * 9 + (2.5,), tuple(np.random.default_rng(3).normal(1, 0.1, 40)))
)


@st.composite
def bent_tables(draw, operation: Operation, low_s: float, high_s: float, width: int = 64) -> OperationLatency:
    """Straight pieces, jumps, and durations that are alike, of few values or spread."""
    contexts = np.cumsum([0, *draw(st.lists(st.sampled_from((1, 1, 17, 40)), max_size=8)), 400]).tolist()
    at = {n: tuple((c, draw(st.floats(low_s, high_s))) for c in contexts) for n in (1, width)}
    return OperationLatency(operation, at, draw(RESIDUALS))


@st.composite
def bent_systems(draw) -> System:
    """Builds that are late, at random over all contexts."""
    curves = [(HitCurve(1 - rate, 0.0),) for rate in (0.8, 0.5)]
    ranges = {
        "VERIFY": (0.006, 0.012),
        "DRAFT_STEP": (0.001, 0.002),
        "GLUE": (0.001, 0.003),
        "TREE_STEP": (0.001, 0.004),
    }
    tables = {Operation[name]: draw(bent_tables(Operation[name], *times)) for name, times in ranges.items()}
    system = system_of(ParametricAgreement(16, 120, (draw(st.floats(0.2, 0.9)),), *curves), contention=1.1)
    lane = {operation: Lane.TARGET if operation is Operation.VERIFY else Lane.DRAFT for operation in tables}
    latency = LatencyModel({(lane[operation], operation): table for operation, table in tables.items()})
    return replace(system, latency=latency, overlaps=draw(st.sampled_from((True, True, True, False))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    K=st.integers(1, 4),
    F=st.integers(1, 3),
    late=st.sampled_from(LATE),
    devices=st.integers(1, 2),
    system=bent_systems(),
)
def test_times_are_those_at_every_context(K, F, late, devices, system):
    system = replace(system, placement=Placement(num_draft_devices=devices if late is LateBuild.WAIT else 1))
    found, expected = interpolated_and_at_every_context_s(ssd(K, F, late=late), system)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("operation", [Operation.TREE_STEP, Operation.VERIFY, Operation.GLUE])
@pytest.mark.parametrize("at", [30, 77, 100, 161])
def test_a_jump_at_one_context_is_where_it_is(operation, at, late):
    """A cache block, another kernel: from one context to the next an operation takes four times as long."""
    agreement = ParametricAgreement(16, 180, (0.7,), (HitCurve(0.4, 0.5),), (HitCurve(0.7, 0.5),))
    system = system_of(agreement, verify_s=0.008, draft_step_s=0.001, glue_s=0.001, tree_step_s=0.001)
    system = jumping(system, operation, at, 4.0)
    policy = ssd(5, 2, late=late)
    walk = Walk(policy, workload_of(agreement), system).totals(0)["seconds"]
    assert seconds(policy, system) == pytest.approx(walk, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("verify_s", "tree_step_s"), [((0.0126, 0.0126), (0.0020, 0.0071)), ((0.004, 0.05), (0.008, 0.008))]
)
def test_abandoned_builds_change_by_whole_steps(verify_s, tree_step_s):
    """Times that rise evenly and do not vary: a delay falls by a step wherever the outcome overtakes one."""
    agreement = ParametricAgreement(16, 300, (0.5,), (HitCurve(0.2, 0.5),), (HitCurve(0.1, 0.5),))
    system = system_of(agreement, draft_step_s=0.0005, glue_s=0.001)
    tables = dict(system.latency.operations)
    for key, (first_s, last_s) in {
        (Lane.TARGET, Operation.VERIFY): verify_s,
        (Lane.DRAFT, Operation.TREE_STEP): tree_step_s,
    }.items():
        tables[key] = replace(tables[key], knots={n: ((0, first_s), (400, last_s)) for n in (1, 64)})
    system, policy = replace(system, latency=LatencyModel(tables)), ssd(3, 1, late=LateBuild.ABANDON)
    walk = Walk(policy, workload_of(agreement), system).totals(0)["seconds"]
    assert seconds(policy, system) == pytest.approx(walk, rel=TOLERANCE)


def refined(contexts, of_first, of_second) -> tuple[np.ndarray, int]:
    """(2, contexts) values of a convex function and of one that jumps, and at how many contexts they were taken."""
    taken = set()

    def at(_row, places):
        taken.update(places.tolist())
        return np.stack([of_first(contexts[places]), of_second(contexts[places])])

    found = Refinement(contexts, [[]], np.ones((2, 1, len(contexts))), at).everywhere()
    return found[:, 0], len(taken)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    contexts=st.lists(st.integers(0, 3000), min_size=1, max_size=400, unique=True),
    lines=st.lists(st.tuples(st.floats(-0.01, 0.01), st.floats(-1, 1)), min_size=1, max_size=6),
    steps=st.lists(st.integers(-10, 3010), min_size=1, max_size=4),
)
def test_convex_values_are_within_the_tolerance_and_stairs_exact(contexts, lines, steps):
    """At unevenly spaced contexts too: texts of short and of long prompts."""
    contexts = np.sort(contexts)

    def convex(context):
        return np.max([slope * context + base for slope, base in lines], axis=0)

    def stairs(context):
        return np.greater_equal.outer(context, steps).mean(1)

    (found, stepped), _ = refined(contexts, convex, stairs)
    assert np.abs(found - convex(contexts)).max() <= TOLERANCE * (1 + 1e-6)
    assert stepped == pytest.approx(stairs(contexts), abs=1e-12)


def test_stairs_whose_middle_lies_on_a_line_are_seen():
    contexts = np.arange(1025)
    (_, stepped), _ = refined(contexts, lambda c: 0.0 * c, lambda c: 0.5 * (c > 300) + 0.5 * (c > 700))
    assert (stepped == 0.5 * (contexts > 300) + 0.5 * (contexts > 700)).all()


def test_only_where_it_is_needed_values_are_taken():
    """Three of a line; around a step as many as halving takes."""
    contexts = np.arange(1025)
    assert refined(contexts, lambda c: 0.001 * c, lambda c: 0.0 * c)[1] == 3
    assert refined(contexts, lambda c: 0.001 * c, lambda c: 1.0 * (c > 300))[1] <= 2 * 10 + 3


def test_a_table_bends_where_its_slope_changes():
    straight, bent = ((0, 1.0), (10, 2.0), (20, 3.0)), ((0, 1.0), (7, 1.0), (8, 4.0), (30, 4.0))
    table = OperationLatency(Operation.GLUE, {1: straight, 3: bent, 8: straight}, (1.0,), {4: {1: straight, 8: bent}})
    assert table.bends(1) == table.bends(8) == []
    assert table.bends(2) == table.bends(3) == table.bends(5) == table.bends(1.5, 4) == [7, 8]
    assert table.bends(1, 2) == [] and table.bends(8, 2) == [7, 8]


# ---------------------------------------------------------------------------------------------------- closed forms


def long_text(acceptance: float, after_hit: float, after_miss: float, **times) -> System:
    """Every look-up hits with one probability per source, if anything was prepared."""
    curves = [(HitCurve(1 - hit, 0.0),) for hit in (after_hit, after_miss)]
    return system_of(ParametricAgreement(4, 3500, (acceptance,), *curves), **times)


def speedup(policy: Policy, system: System, over: Policy | None = None) -> float:
    workload = workload_of(system.agreement)
    slow, fast = expectations([over or Autoregressive(), policy], workload, system)
    return rate(fast) / rate(slow)


@pytest.mark.parametrize(("acceptance", "K"), [(0.8, 4), (0.5, 4), (0.8, 8), (0.01, 5)])
def test_sd_is_its_closed_form(acceptance, K):
    system = long_text(acceptance, 0.5, 0.5, verify_s=0.010, draft_step_s=0.001)
    expected = sd_speedup(expected_tokens_per_round(acceptance, K), K * 0.1)
    assert speedup(Speculative(K), system) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("fallback", [Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NONE])
@pytest.mark.parametrize(("after_hit", "after_miss"), [(0.9, 0.4), (0.5, 0.5), (0.2, 0.7)])
def test_ssd_is_theorem_7(fallback, after_hit, after_miss):
    """With the draft as backup T_b = K steps; with none E_miss = 1 and T_b = 0. The hit rate is that of equation 1."""
    K, acceptance = 3, 0.7
    system = long_text(acceptance, after_hit, after_miss, draft_step_s=0.002, glue_s=0.001, tree_step_s=0.002)
    tokens = expected_tokens_per_round(acceptance, K)
    tokens_on_miss, backup_time = (1.0, 0.0) if fallback is Fallback.NONE else (tokens, 0.6)
    hit_rate = after_miss / (1 + after_miss - after_hit)
    expected = ssd_speedup(hit_rate, tokens, tokens_on_miss, primary_time=0.7, backup_time=backup_time)
    assert speedup(ssd(K, 2, fallback), system) == pytest.approx(expected, rel=2e-3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 50),
    K=st.integers(1, 4),
    F=st.integers(0, 4),
    share=st.floats(0.01, 1),
    late=st.sampled_from(LATE),
)
def test_corollary_8_the_draft_as_its_own_backup_is_never_slower_than_sd(seed, K, F, share, late):
    """A build as long as drafting, `share` <= 1 of a verification; strictly faster where anything hits."""
    record = record_of(*markov(seed), num_prompts=4, length=12, seed=seed)
    step_s = 0.010 * share / K
    system = system_of(record, verify_s=0.010, draft_step_s=step_s, glue_s=0.0, tree_step_s=step_s)
    sd, found = expectations([Speculative(K), ssd(K, F, late=late)], workload_of(record), system)
    assert found.seconds.sum() <= sd.seconds.sum() * (1 + 1e-12)
    if found.num_hits.sum() > 1e-6:
        assert found.seconds.sum() < sd.seconds.sum()


@pytest.mark.parametrize("hit_rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_corollary_9_bounds_a_fast_primary_with_a_free_backup(hit_rate, acceptance):
    K = 4
    system = long_text(acceptance, hit_rate, hit_rate, draft_step_s=0.002, glue_s=0.001, tree_step_s=0.002)
    tokens = expected_tokens_per_round(acceptance, K)
    low, high = ssd_over_sd_bounds(hit_rate, tokens, tokens, draft_time=0.8)
    found = speedup(ssd(K, 1, Fallback.NONE), system, over=Speculative(K))
    assert low * (1 - 2e-3) <= found <= high * (1 + 2e-3)


# ---------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("fallback", [Fallback.DRAFT, Fallback.DRAFT_MISSING])
@pytest.mark.parametrize("late", LATE)
def test_without_branches_ssd_is_sd_and_the_hand_over(fallback, late):
    record = record_of(*markov(3), num_prompts=20, length=16, seed=4)
    host_s = {term: 0.0 for term in HostTerm} | {HostTerm.SPECULATIVE: 0.0005, HostTerm.MISS: 0.0008}
    placement = Placement(transfer_latency_s=0.0002)
    system = replace(system_of(record), host_s=host_s, placement=placement)
    sd, found = expectations([Speculative(3), ssd(3, 0, fallback, late)], workload_of(record), system)
    assert found.num_rounds == pytest.approx(sd.num_rounds, rel=1e-12)
    assert found.seconds == pytest.approx(sd.seconds + 0.0003 * sd.num_rounds, rel=1e-12)
    assert not found.num_hits.any()


@pytest.mark.parametrize("late", LATE)
def test_without_branches_and_without_a_backup_ssd_is_ar(late):
    record = record_of(*markov(3), num_prompts=5, length=16, seed=4)
    ar, found = expectations([Autoregressive(), ssd(3, 0, Fallback.NONE, late)], workload_of(record), system_of(record))
    assert found.num_rounds == pytest.approx(ar.num_rounds)
    assert found.seconds == pytest.approx(ar.seconds)


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize("late", LATE)
def test_nothing_accepted_is_a_token_a_round_and_doubled_times_are_doubled(fallback, late):
    record = scripted_record(0.0, num_prompts=2, length=30)
    record = replace(record, rank=np.full(60, 3), token=np.tile(np.arange(30), 2))  # no token comes twice
    times = {"verify_s": 0.01, "draft_step_s": 0.002, "glue_s": 0.005, "tree_step_s": 0.004, "host_s": 0.001}
    once, twice = (
        expectations(
            [ssd(3, 2, fallback, late)],
            workload_of(record),
            system_of(record, residuals=(0.8, 1.2), **{name: factor * value for name, value in times.items()}),
        )[0]
        for factor in (1, 2)
    )
    accepted = 1 / 4 if fallback is Fallback.FILLER else 0.0  # a uniform token of 4 where p(x) = 1
    assert once.num_rounds[0] <= 29 and (accepted > 0 or once.num_rounds == pytest.approx(29))
    assert twice.seconds == pytest.approx(2 * once.seconds, rel=1e-12)


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_everything_accepted_and_prepared_is_one_verification_a_round(fallback):
    """25 rounds of 4 tokens; after a first round without draft tokens, one of 1 and 25 of at most 4."""
    record = scripted_record(1.0, num_prompts=1, length=1 + 4 * 25)
    system = system_of(record, verify_s=0.010, draft_step_s=0.002, glue_s=0.001, tree_step_s=0.002)
    found = expectations([ssd(3, 1, fallback)], workload_of(record), system)[0]
    if fallback in (Fallback.DRAFT, Fallback.DRAFT_MISSING):
        assert found.seconds[0] == pytest.approx(25 * 0.010 + 3 * 0.002)
    if fallback is Fallback.NONE:
        assert found.seconds[0] == pytest.approx(26 * 0.010)
    assert found.num_hits[0, 0] == pytest.approx(found.num_lookups[0, 0])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(policy=policies(late=[LateBuild.WAIT]), system=systems(residuals=(0.6, 1.0, 1.4)))
def test_abandoning_is_never_slower_than_waiting(policy, system):
    workload = workload_of(system.agreement)
    abandon = replace(policy, on_late_build=LateBuild.ABANDON)
    waited, abandoned = expectations([policy, abandon], workload, system)
    assert (abandoned.seconds <= waited.seconds * (1 + 1e-12)).all()
    assert abandoned.num_hits == pytest.approx(waited.num_hits)


def test_abandoning_is_waiting_where_no_build_is_late_and_faster_where_one_is():
    record = record_of(*markov(3), num_prompts=5, length=16, seed=4)
    late = {"glue_s": 0.004, "tree_step_s": 0.005}
    for times, is_late in (({}, False), (late, True)):
        system = (
            system_of(record, verify_s=0.0101, residuals=(0.9, 1.1), **times)
            if is_late
            else system_of(record, verify_s=0.05)
        )
        waited, abandoned = (seconds(ssd(3, 2, late=rule), system) for rule in LATE)
        assert abandoned < 0.99 * waited if is_late else abandoned == pytest.approx(waited, rel=1e-12)


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_throughput_rises_with_the_hit_rate_where_branches_are_free(fallback):
    record = record_of(*markov(3), num_prompts=10, length=24, seed=4)
    found = [seconds(ssd(3, F, fallback), system_of(record)) for F in range(6)]
    assert all(more < fewer for fewer, more in pairwise(found))


# ----------------------------------------------------------------------------------------------------- late builds

BUILD, BRANCHES, CONTEXT = Build(num_drafted=3, num_steps=4), 6, 50


def spread_system(verify_s: float) -> System:
    residuals = tuple(np.random.default_rng(7).lognormal(0.0, 0.35, 25))
    record = scripted_record(0.5, num_prompts=1, length=4)
    return system_of(record, verify_s=verify_s, glue_s=0.003, tree_step_s=0.002, residuals=residuals, contention=1.1)


def sampled_delays_s(system: System, num: int, *, abandons: bool) -> np.ndarray:
    """(num,) of a build whose operations are drawn one by one, beside a verification that is drawn too."""
    rng = np.random.default_rng(3)

    def drawn(lane: Lane, operation: Operation, num_tokens: int) -> np.ndarray:
        return rng.choice(system.samples_s(lane, operation, num_tokens, CONTEXT, beside=True), num)

    known_s = drawn(Lane.TARGET, Operation.VERIFY, 4)
    steps = [drawn(Lane.DRAFT, Operation.TREE_STEP, BRANCHES) for _ in range(BUILD.num_steps)]
    now_s = drawn(Lane.DRAFT, Operation.GLUE, 4)
    for step in steps:
        now_s = now_s + step * ((now_s < known_s) | (not abandons))
    return np.maximum(0.0, now_s - known_s)


def exact_delay_s(system: System, *, abandons: bool) -> float:
    contexts = np.array([CONTEXT])
    outcomes = Outcomes.of_verification(system, 4, contexts, message_s=0.0)
    found = build_delays_s(system, BUILD, [BRANCHES], contexts, outcomes, abandons=abandons)
    return float(found[1, 0, 0])


@pytest.mark.parametrize("verify_s", [0.002, 0.006, 0.009, 0.012, 0.02])
@pytest.mark.parametrize("abandons", [True, False])
def test_mean_delay_by_a_late_build_is_that_of_drawn_operations(verify_s, abandons):
    """10 comparisons of 300,000 draws at 5 standard errors: a false alarm has p < 1e-5 over all."""
    system = spread_system(verify_s)
    drawn = sampled_delays_s(system, 300_000, abandons=abandons)
    error = drawn.std() / math.sqrt(len(drawn))
    assert abs(exact_delay_s(system, abandons=abandons) - drawn.mean()) < 5 * error + 1e-4 * drawn.mean()


def test_waiting_and_abandoning_are_told_apart():
    """Negative control of the comparison: the other rule's delay is rejected by the same statistic."""
    system = spread_system(0.006)
    drawn = sampled_delays_s(system, 300_000, abandons=True)
    gate = 5 * drawn.std() / math.sqrt(len(drawn)) + 1e-4 * drawn.mean()
    assert abs(exact_delay_s(system, abandons=False) - drawn.mean()) > 10 * gate


# ------------------------------------------------------------------------------------------------ placement, messages


def priced_by_branch(system: System) -> System:
    """Free glue, tree steps of 1 ms a branch: builds are late."""
    tables = dict(system.latency.operations)
    for operation, per_branch_s in ((Operation.TREE_STEP, 0.001), (Operation.GLUE, 0.0)):
        knots = {n: ((0, per_branch_s * n), (4096, per_branch_s * n)) for n in (1, 2, 64)}
        tables[Lane.DRAFT, operation] = replace(tables[Lane.DRAFT, operation], knots=knots)
    return replace(system, latency=LatencyModel(tables))


def test_two_draft_devices_with_free_glue_halve_the_branches():
    """Every token at rank 0: what is prepared beyond one token changes nothing but the build's length."""
    record = scripted_record(0.6, num_prompts=2, length=20)
    one = priced_by_branch(system_of(record, verify_s=0.003))
    two = replace(one, placement=Placement(num_draft_devices=2))
    assert seconds(ssd(3, 4), two) == pytest.approx(seconds(ssd(3, 2), one), rel=1e-12)
    assert seconds(ssd(3, 2), one) < seconds(ssd(3, 4), one)


def test_one_row_on_devices_that_share_rows_is_on_one_of_them():
    record = scripted_record(0.6, num_prompts=2, length=20)
    one = priced_by_branch(system_of(record, verify_s=0.003, residuals=(0.5, 1.5)))
    rows = replace(one, placement=Placement(num_draft_devices=2, split=Split.ROWS))
    for late in LATE:
        assert seconds(ssd(3, 4, late=late), rows) == pytest.approx(seconds(ssd(3, 4, late=late), one), rel=1e-12)


def messages_of(policy: Policy, system: System) -> tuple[float, float, float]:
    """Rounds, and seconds without and with messages of 0.1 ms each."""
    slow = replace(system, placement=Placement(transfer_latency_s=1e-4))
    rounds = expectations([policy], workload_of(system.agreement), system)[0].num_rounds.sum()
    return float(rounds), seconds(policy, system), seconds(policy, slow)


@pytest.mark.parametrize("policy", [Speculative(3), ssd(3, 2), ssd(3, 2, Fallback.NONE), ssd(3, 2, Fallback.NGRAM)])
def test_messages_are_paid_where_the_build_is_never_late(policy):
    """A speculation in every round, an outcome in every round but the first of each of 4 texts."""
    record = record_of(*markov(3), num_prompts=4, length=20, seed=4)
    rounds, free, paid = messages_of(policy, system_of(record, verify_s=0.1))
    assert paid - free == pytest.approx(1e-4 * (2 * rounds - 4))


def test_messages_are_hidden_by_a_longer_build():
    """Only the message of each text's last round, which nobody builds for, is seen."""
    record = record_of(*markov(3), num_prompts=4, length=20, seed=4)
    _, free, paid = messages_of(ssd(3, 2), system_of(record, verify_s=0.001, glue_s=0.01))
    assert paid - free == pytest.approx(4e-4)


def test_autoregressive_decoding_sends_nothing():
    record = record_of(*markov(3), num_prompts=4, length=20, seed=4)
    for policy in (Autoregressive(), Speculative(0)):
        _, free, paid = messages_of(policy, system_of(record))
        assert paid == free


def test_distributions_travel_only_where_they_were_sampled():
    """A verification of K drafted tokens waits for K distributions, one of an n-gram or at temperature 0 for none."""
    sampled, greedy = (
        record_of(*markov(3), num_prompts=4, length=20, seed=4, temperature=temperature) for temperature in (1.0, 0.0)
    )
    heavy = Placement(transfer_bytes_per_s=1e6, distribution_bytes=1000)
    light = replace(heavy, distribution_bytes=0)

    def longer_s(policy: Policy, record) -> float:
        slow, fast = (replace(system_of(record, verify_s=0.1), placement=placement) for placement in (heavy, light))
        return seconds(policy, slow) - seconds(policy, fast)

    assert longer_s(ssd(3, 2), sampled) > 0.01
    assert longer_s(ssd(3, 2), greedy) == 0
    assert longer_s(ssd(3, 0, Fallback.NGRAM), sampled) == 0


# ---------------------------------------------------------------------------------------------------------- batches


def at(batch_size: int, system: System) -> Workload:
    return replace(workload_of(system.agreement), batch_size=batch_size)


def batch_rate(policy: Policy, system: System, batch_size: int) -> float:
    return rate(expectations([policy], at(batch_size, system), system)[0])


def batch_speedup(policy: Policy, system: System, batch_size: int) -> float:
    """Of a batch of rows over AR, per sequence: over b times AR of one row, where a batch costs what one row does."""
    return batch_rate(policy, system, batch_size) / batch_rate(Autoregressive(), system, batch_size)


def for_batches(system: System, largest: int = 64, per_row_s: float = 0.0) -> System:
    """Every operation costs so much more for each row beyond the first."""
    tables = {}
    for key, table in system.latency.operations.items():
        more = per_row_s * (largest - 1)
        rows = {width: tuple((c, value + more) for c, value in knots) for width, knots in table.knots.items()}
        tables[key] = replace(table, batched={largest: rows})
    return replace(system, latency=LatencyModel(tables))


@pytest.mark.parametrize("batch_size", [2, 3, 8, 16])
@pytest.mark.parametrize("fallback", [Fallback.DRAFT, Fallback.NONE])
@pytest.mark.parametrize("hit_rate", [0.3, 0.8, 0.95])
def test_batches_are_corollary_16(batch_size, fallback, hit_rate):
    K, acceptance = 3, 0.7
    times = {"draft_step_s": 0.002, "glue_s": 0.001, "tree_step_s": 0.002}
    system = for_batches(long_text(acceptance, hit_rate, hit_rate, **times))
    tokens = expected_tokens_per_round(acceptance, K)
    on_miss, backup_time = (tokens, 0.6) if fallback is Fallback.DRAFT else (1.0, 0.0)
    expected = batched_ssd_speedup(batch_size, hit_rate, tokens, on_miss, 0.7, backup_time)
    assert batch_speedup(ssd(K, 2, fallback), system, batch_size) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("primary_time", "hit_rate", "critical"),
    [(0.6, 0.75, 1.96), (0.6, 0.87, 1.60), (0.8, 0.75, 1.36), (0.8, 0.87, 1.16), (1.0, 0.87, 0.91)],
)
def test_the_free_backup_wins_from_theorem_17s_batch_size_on(primary_time, hit_rate, critical):
    K, tokens = 7, 5.6
    low, high = 0.5, 0.999
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_per_round(middle, K) < tokens else (low, middle)
    step_s = 0.010 * primary_time / K
    system = for_batches(
        long_text(low, hit_rate, hit_rate, draft_step_s=step_s, glue_s=0.0, tree_step_s=step_s), largest=4
    )
    b_star = critical_batch_size(hit_rate, tokens, 1.0, primary_time)
    assert b_star == pytest.approx(critical, abs=5e-3)
    for batch_size in (1, 2, 3, 4):
        slow, free = (
            rate(steady_state(ssd(K, 1, fallback), at(batch_size, system), system))
            for fallback in (Fallback.DRAFT, Fallback.NONE)
        )
        assert (free > slow) == (batch_size > b_star)


def rich_batch_system(**changes) -> System:
    """Two hit curves, spread durations, rows that cost, builds that are sometimes late, messages."""
    times = {"verify_s": 0.009, "draft_step_s": 0.002, "glue_s": 0.003, "tree_step_s": 0.002, "contention": 1.1}
    system = long_text(0.7, 0.8, 0.5, residuals=(0.7, 0.9, 1.0, 1.4), verify_per_token_s=0.0003, **times)
    misses_s = {HostTerm.MISS: 2e-3, HostTerm.UNDRAFTED_MISS: 1e-3}
    host_s = {HostTerm.AUTOREGRESSIVE: 1e-4, HostTerm.SPECULATIVE: 2e-4, HostTerm.HIT: 3e-4} | misses_s
    placement = Placement(transfer_latency_s=2e-4, transfer_bytes_per_s=1e6, distribution_bytes=30)
    return for_batches(replace(system, host_s=host_s, placement=placement, **changes), per_row_s=0.0005)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("fallback", [Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NONE])
def test_a_batch_of_one_is_the_recursion_on_a_long_text(fallback, overlaps, late):
    system = rich_batch_system(overlaps=overlaps)
    check_against_middle_of_text(ssd(3, 2, fallback, late), system)


def check_against_middle_of_text(policy: Policy, system: System) -> None:
    """What a text has more than one of half its length: both have the same first rounds and ends."""
    whole, half = (workload_of(system.agreement, cap) for cap in (3000, 1500))
    chain = steady_state(policy, whole, system)
    more, less = (expectations([policy], workload, system)[0] for workload in (whole, half))
    rounds = more.num_rounds.sum() - less.num_rounds.sum()
    for name in ("num_tokens", "seconds", "num_lookups", "num_hits"):
        middle = (getattr(more, name) - getattr(less, name)) / rounds
        assert getattr(chain, name) == pytest.approx(middle, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(0), Speculative(3)])
def test_so_it_is_without_a_speculation_cache(policy):
    system = rich_batch_system()
    table = system.latency[Lane.DRAFT, Operation.DRAFT_STEP]
    dear = {width: tuple((c, s + 0.001 * (width > 1)) for c, s in knots) for width, knots in table.knots.items()}
    tables = dict(system.latency.operations) | {(Lane.DRAFT, Operation.DRAFT_STEP): replace(table, knots=dear)}
    system = replace(system, latency=LatencyModel(tables))
    check_against_middle_of_text(policy, system)


def test_times_of_a_batch_are_means_over_the_contexts_of_its_texts():
    """Every operation takes twice as long at the end of a text of 3500 tokens as at its start."""
    system = rich_batch_system()
    tables = {
        key: replace(table, knots={n: tuple((c, s * (1 + c / 3500)) for c, s in at) for n, at in table.knots.items()})
        for key, table in system.latency.operations.items()
    }
    system = replace(system, latency=LatencyModel(tables))
    workload = workload_of(system.agreement)
    for policy in (ssd(3, 2), ssd(3, 2, Fallback.NONE, LateBuild.ABANDON), Speculative(3)):
        chain, text = steady_state(policy, workload, system), expectations([policy], workload, system)[0]
        assert rate(chain) == pytest.approx(rate(text), rel=2e-3)


@pytest.mark.parametrize("operation", [Operation.VERIFY, Operation.DRAFT_STEP, Operation.TREE_STEP])
@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(3), ssd(3, 2, late=LateBuild.ABANDON)])
def test_batches_of_long_texts_meet_a_jump_where_it_is(policy, operation):
    """Finite texts are slower, by the rows that are missing at their ends. 9 comparisons at 4 half widths of a 95 %
    interval, almost 8 standard errors: a false alarm has p < 1e-12."""
    system = jumping(rich_batch_system(), operation, 2700, 2.5)
    system = replace(system, agreement=replace(system.agreement, num_texts=3))
    doubt = 4 * 0.002
    drawn = predict(policy, at(3, system), system, engine="vectorized", relative_half_width=0.002)
    above = batch_rate(policy, system, 3) / drawn.tokens_per_s.value - 1
    assert -doubt < above < doubt + (0.015 if policy.speculation_length else 0.0)


def test_rows_on_several_devices_draft_over_every_context():
    """The slower of two devices, of which one serves two rows: draft steps jump with the context."""
    rows = Placement(num_draft_devices=2, split=Split.ROWS)
    system = jumping(replace(rich_batch_system(), placement=rows), Operation.DRAFT_STEP, 2700, 3.0)
    policy, text = ssd(3, 0, Fallback.DRAFT), workload_of(system.agreement)
    contexts = Replay(system.agreement, text).contexts_with_room(3)[4:]
    drafting_s = np.mean([system.draft_samples_s(3, context, 3).mean() for context in contexts.tolist()])
    host_s, messages_s = system.host_s[HostTerm.MISS], rows.speculation_s(9, sampled=False) + rows.outcome_s(3)
    verify_s = float(system.mean_s(Lane.TARGET, Operation.VERIFY, 4, 100, beside=False, batch_size=3))
    found = steady_state(policy, at(3, system), system)
    assert 3 * found.seconds[0] == pytest.approx(host_s + messages_s + verify_s + drafting_s, rel=1e-4)


def test_autoregressive_rows_share_a_step():
    system = for_batches(long_text(0.5, 0.5, 0.5, verify_s=0.01), largest=8, per_row_s=0.001)
    for batch_size in (2, 5, 8):
        expected = batch_size / (0.01 + 0.001 * (batch_size - 1))
        assert batch_rate(Autoregressive(), system, batch_size) == pytest.approx(expected)


class SimulatedBatch:
    """Rounds of a batch in lockstep, drawn one after another; two branches for every accept count."""

    def __init__(self, policy: SpeculativeSpeculative, system: System, size: int) -> None:
        self.policy, self.system, self.size = policy, system, size
        self.rng = np.random.default_rng(11)
        self.is_hit = np.zeros(size, dtype=bool)
        self.samples_s: dict[tuple, np.ndarray] = {}

    def rate(self, num_rounds: int = 60) -> float:
        rounds = [self.round() for _ in range(num_rounds)]
        return sum(tokens for tokens, _ in rounds) / sum(took_s for _, took_s in rounds)

    def round(self) -> tuple[int, float]:
        """Tokens, and seconds until the next verification starts."""
        policy, agreement, K = self.policy, self.system.agreement, self.policy.speculation_length
        num_drafted = np.where(self.is_hit, K, policy.num_drafted_after_miss)
        survives = np.cumprod(self.rng.random((K, self.size)) < agreement.acceptance[0], axis=0)
        tokens = self.size + int((survives * (np.arange(K)[:, None] < num_drafted)).sum())
        curves = np.where(self.is_hit, agreement.after_hit[0].hit_rate(2), agreement.after_miss[0].hit_rate(2))
        found = self.rng.random(self.size) < curves
        took_s = self.verified_and_built_s(num_drafted, found) + self.waiting_s(found)
        self.is_hit = found & (found.all() or policy.fallback is not Fallback.DRAFT)
        return tokens, took_s

    def verified_and_built_s(self, num_drafted: np.ndarray, found: np.ndarray) -> float:
        width, placement = num_drafted.mean() + 1, self.system.placement
        known_s = self.drawn_s(Lane.TARGET, Operation.VERIFY, width, self.size, beside=True)
        known_s += placement.speculation_s(num_drafted.sum(), sampled=False) + placement.outcome_s(self.size)
        needed = found.all() if self.policy.fallback is Fallback.DRAFT else found.any()
        now_s = self.drawn_s(Lane.DRAFT, Operation.GLUE, width, self.size, beside=True)
        for _ in range(self.policy.speculation_length):
            if needed or self.policy.on_late_build is LateBuild.WAIT or now_s < known_s:
                branches = 2 * width
                now_s += self.drawn_s(Lane.DRAFT, Operation.TREE_STEP, branches, self.size, beside=True)
        return max(known_s, now_s)

    def waiting_s(self, found: np.ndarray) -> float:
        waits = self.policy.waits_for_draft(Source.MISS)
        missed = HostTerm.MISS if waits else HostTerm.UNDRAFTED_MISS
        host_s = self.system.host_s[HostTerm.HIT if found.all() else missed]
        if found.all() or not waits:
            return host_s
        anew = self.size if self.policy.fallback is Fallback.DRAFT else self.size - int(found.sum())
        steps = range(self.policy.speculation_length)
        return host_s + sum(self.drawn_s(Lane.DRAFT, Operation.DRAFT_STEP, 1, anew, beside=False) for _ in steps)

    def drawn_s(self, lane: Lane, operation: Operation, num_tokens: float, rows: int, *, beside: bool) -> float:
        key = (lane, operation, num_tokens, rows)
        if key not in self.samples_s:
            self.samples_s[key] = self.system.samples_s(*key[:3], 50, beside=beside, batch_size=rows)
        return float(self.samples_s[key][self.rng.integers(len(self.samples_s[key]))])

    def mean_rate(self) -> tuple[float, float]:
        """Of 50 stretches of rounds, with its standard error; a first one is thrown away."""
        rates = [self.rate() for _ in range(51)][1:]
        return float(np.mean(rates)), float(np.std(rates, ddof=1) / math.sqrt(len(rates)))


@pytest.mark.parametrize("fallback", [Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NONE])
@pytest.mark.parametrize("late", LATE)
def test_the_chain_is_that_of_simulated_batches(fallback, late):
    """6 comparisons of a t statistic with 49 degrees of freedom at 5.5: a false alarm has p < 1e-5 over all."""
    system, policy = rich_batch_system(), ssd(3, 2, fallback, late)
    mean, error = SimulatedBatch(policy, system, 3).mean_rate()
    assert abs(batch_rate(policy, system, 3) - mean) < 5.5 * error


def test_chains_of_other_fallbacks_are_told_apart():
    """Negative control of the comparison."""
    system = rich_batch_system()
    mean, error = SimulatedBatch(ssd(3, 2, Fallback.DRAFT_MISSING), system, 3).mean_rate()
    assert abs(batch_rate(ssd(3, 2, Fallback.DRAFT), system, 3) - mean) > 5.5 * error


def test_a_result_in_steady_state_says_what_it_leaves_out():
    system = rich_batch_system()
    found = expectations([ssd(3, 2)], at(4, system), system)[0]
    assert "finite texts are slower" in found.notes[0]
    assert not expectations([ssd(3, 2)], workload_of(system.agreement), system)[0].notes
    assert predict(ssd(3, 2), at(4, system), system).tokens_per_s.value == pytest.approx(rate(found))


def test_chains_that_stay_or_alternate():
    """No look-up ever hits after a miss; all hit after a miss and none after a hit; a hit for ever."""
    rows = [np.convolve(binomial(hits, 1.0), binomial(2 - hits, 0.0)) for hits in range(3)]
    assert stationary(np.stack(rows)) == pytest.approx([1, 0, 0])
    rows = [np.convolve(binomial(hits, 0.0), binomial(2 - hits, 1.0)) for hits in range(3)]
    assert stationary(np.stack(rows)) == pytest.approx([0.5, 0, 0.5])
    rows = [np.convolve(binomial(hits, 1.0), binomial(2 - hits, 0.3)) for hits in range(3)]
    assert stationary(np.stack(rows)) == pytest.approx([0, 0, 1])


# --------------------------------------------------------------------------------------------------- curves, doubt


def test_hit_mass_follows_the_source():
    """Each source's own curve: mass over the probability of k is the curve's hit rate."""
    curves = (HitCurve(0.4, 0.5),), (HitCurve(0.8, 0.3),)
    agreement = ParametricAgreement(4, 50, (0.7,), *curves)
    for source, (curve,) in zip(SOURCES, curves, strict=True):
        mass = outcome_hit_mass(agreement, 2, 5, source)
        ended = np.array([0.3, 0.21, 0.49])
        expected = ended[:, None] * [curve.hit_rate(f) for f in range(6)]
        assert mass == pytest.approx(expected)


def test_a_column_of_hit_mass_is_the_law_of_a_uniform_list():
    """With C below 1 too, where the list changes acceptance; and there it differs from C = 1."""
    record = record_of(*markov(3), num_prompts=30, length=20, seed=1)
    replay, K = Replay(record, workload_of(record)), 3
    plain, down = (outcome_hit_mass(record, K, 4, Source.MISS, downweight=C) for C in (1.0, 0.4))
    assert np.abs(plain - down).max() > 0.01
    for C, mass in ((1.0, plain), (0.4, down)):
        for F in range(5):
            law = RoundLaw(replay, Drafting(Proposer.DRAFT_MODEL, K, (F,) * (K + 1), Source.MISS, C))
            counted = (law.starts > 0) & (law.left > K + 1)
            expected = (law.ended * law.hits)[:, counted].sum(-1) / counted.sum()
            assert mass[:, F] == pytest.approx(expected)


def test_doubt_of_a_record_reaches_the_result():
    """Half of the vocabulary recorded: how often down-weighted tokens are rejected is known between bounds only."""
    record = record_of(*markov(3, 0.3), num_prompts=10, length=20, seed=4, num_candidates=5)
    policies = [ssd(2, 2), ssd(2, 2, C=0.9), ssd(2, 3, Fallback.NGRAM)]
    plain, down, ngram = expectations(policies, workload_of(record), system_of(record))
    replay = Replay(record, workload_of(record))
    assert plain.doubt == ngram.doubt == 0
    assert down.doubt == max(RoundLaw(replay, policies[1].drafting(source)).doubt for source in SOURCES) > 0


def test_starts_that_a_record_leaves_open_are_refused():
    record = record_of(*markov(5), num_prompts=20, length=12, seed=5, num_candidates=3)
    replay = Replay(record, workload_of(record))
    with pytest.raises(BadInput, match=r"hit rate at downweight 0\.3: must be known"):
        round_starts({source: RoundLaw(replay, ssd(3, 2, C=0.3).drafting(source)) for source in SOURCES})


# ------------------------------------------------------------------------------------------------------- bad input


def refused(match: str, policy, system: System, workload: Workload | None = None) -> None:
    with pytest.raises(BadInput, match=match):
        expectations([policy], workload or workload_of(system.agreement), system)


def test_what_is_outside_its_reach_is_refused():
    record = record_of(*markov(3), num_prompts=4, length=20, seed=4)
    system = system_of(record)
    refused(r"batch_size: must be 1 .* vectorized or des, got 2", ssd(3, 2), system, at(2, system))
    refused("num_targets: .* engine des, got 2", ssd(3, 2), replace(system, placement=Placement(num_targets=2)))
    refused("policy: .* tables and controllers", PolicyTable(((1, ssd(3, 2)),)), system)
    two = replace(system, placement=Placement(num_draft_devices=2))
    refused("on_late_build: .* several draft devices", ssd(3, 2, late=LateBuild.ABANDON), two)
    assert seconds(ssd(3, 2), two) > 0


def test_what_batches_of_alike_rounds_cannot_say_is_refused():
    system = for_batches(long_text(0.5, 0.5, 0.5))
    refused("fallback ngram", ssd(3, 2, Fallback.NGRAM), system, at(2, system))
    refused("downweight", ssd(3, 2, C=0.5), system, at(2, system))
    refused("number of rows must be in the profiled range", ssd(3, 2), system, at(65, system))
    short = replace(at(2, system), max_new_tokens=8)
    refused("max_new_tokens: must leave room for two rounds", ssd(3, 2), system, short)
    rows = replace(system, placement=Placement(num_draft_devices=2, split=Split.ROWS))
    refused("placement.split", Speculative(3), rows, at(2, rows))
    devices = replace(system, placement=Placement(num_draft_devices=2))
    refused("on_late_build", ssd(3, 2, late=LateBuild.ABANDON), devices, at(2, devices))
