"""Served loads: timelines, queueing theory, conservation, figures against their definitions, saturation, memory."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import astuple, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.hill_climbing import HillClimbing
from sim.latency import LatencyModel
from sim.load import ClosedLoop, OpenLoop, Poisson
from sim.memory import Memory
from sim.placement import Placement
from sim.policy import Autoregressive, Fallback, LateBuild, PolicyTable, Speculative
from sim.recursion import expectations
from sim.serving import SKETCH_ERROR, QuantileSketch, Slo, capacity, serve, serve_trace
from sim.timeline import replicate
from sim.trace import Lane, Operation, Source
from tests.sim.served import run_of, served, ssd
from tests.sim.strategies import MOST_ROWS, policies, systems
from tests.sim.toy import markov, record_of, scripted_record, system_of, workload_of

VERIFY, STEP, GLUE, TREE, PREFILL = (
    Operation.VERIFY,
    Operation.DRAFT_STEP,
    Operation.GLUE,
    Operation.TREE_STEP,
    Operation.PREFILL,
)
AR = Autoregressive()


def clockwork(record, *, target_s: float = 4, draft_s: float = 3, **seconds):
    """Whole seconds: 10 to verify, 2 for a draft step, 1 for the glue pass, 3 for a tree step, half a second of host
    time, whatever the number of rows."""
    seconds = {"verify_s": 10, "draft_step_s": 2, "glue_s": 1, "tree_step_s": 3, "host_s": 0.5} | seconds
    return served(system_of(record, **seconds), target_s=target_s, draft_s=draft_s)


def spans_of(trace, lane: Lane) -> list[tuple]:
    return [(s.operation, s.batch_size, s.start_s, s.end_s) for s in trace.spans if s.lane is lane]


def trace_of(policy, load, system, seed: int = 0):
    return serve_trace(policy, load, workload_of(system.agreement), system, seed)


def report_of(policy, load, system, seed: int = 0, **options):
    return serve(policy, load, workload_of(system.agreement), system, seed, **options)


# ----------------------------------------------------------------------------------------------------------- timelines


def test_a_request_joins_between_two_rounds():
    """It arrives in the first round of another one, whose second waits for its prefill; then both run together."""
    record = scripted_record(0.0, num_prompts=1, length=3)
    load = OpenLoop(((0.0,), (5.0,)), max_batch_size=2)
    trace = trace_of(AR, load, clockwork(record))
    assert spans_of(trace, Lane.TARGET) == [
        (PREFILL, 1, 0.0, 4.0),
        (VERIFY, 1, 4.5, 14.5),
        (PREFILL, 1, 14.5, 18.5),
        (VERIFY, 2, 19.0, 29.0),
        (VERIFY, 1, 29.5, 39.5),
    ]
    times = [(s.arrival_s, s.prefill_start_s, s.decode_start_s, s.end_s) for s in trace.sequences]
    assert times == [(0.0, 0.0, 4.0, 29.0), (5.0, 14.5, 18.5, 39.5)]


def test_a_batch_that_is_full_lets_requests_wait_in_order():
    record = scripted_record(0.0, num_prompts=1, length=2)
    load = OpenLoop(((0.0,), (1.0,), (2.0,), (50.0,)), max_batch_size=1)
    trace = trace_of(AR, load, clockwork(record))
    assert [s.prefill_start_s for s in trace.sequences] == [0.0, 14.5, 29.0, 50.0]


def test_a_new_row_is_drafted_for_in_the_open_and_the_others_keep_what_they_have():
    """K = 2, all accepted and prepared: at 18.5 the first row has hit, the second is first; both draft models read the
    prompt beside the target."""
    record = scripted_record(1.0, num_prompts=1, length=9)
    trace = trace_of(ssd(2, 1), OpenLoop(((0.0,), (5.0,)), 2), clockwork(record))
    assert spans_of(trace, Lane.TARGET)[:4] == [
        (PREFILL, 1, 0.0, 4.0),
        (VERIFY, 1, 8.5, 18.5),
        (PREFILL, 1, 18.5, 22.5),
        (VERIFY, 2, 27.0, 37.0),
    ]
    assert spans_of(trace, Lane.DRAFT)[:10] == [
        (PREFILL, 1, 0.0, 3.0),
        (STEP, 1, 4.0, 6.0),
        (STEP, 1, 6.0, 8.0),
        (GLUE, 1, 8.5, 9.5),
        (TREE, 1, 9.5, 12.5),
        (TREE, 1, 12.5, 15.5),
        (PREFILL, 1, 18.5, 21.5),
        (STEP, 1, 22.5, 24.5),
        (STEP, 1, 24.5, 26.5),
        (GLUE, 2, 27.0, 28.0),
    ]
    assert [(r.sequence, r.source) for r in trace.rounds[:3]] == [
        (0, Source.FIRST),
        (0, Source.HIT),
        (1, Source.FIRST),
    ]


def test_drafting_waits_for_a_slow_draft_prefill():
    record = scripted_record(1.0, num_prompts=1, length=9)
    trace = trace_of(ssd(2, 1), OpenLoop(((0.0,), (5.0,)), 2), clockwork(record, draft_s=12))
    draft = spans_of(trace, Lane.DRAFT)
    assert draft[:2] == [(PREFILL, 1, 0.0, 12.0), (STEP, 1, 12.0, 14.0)]
    assert draft[6:8] == [(PREFILL, 1, 26.5, 38.5), (STEP, 1, 38.5, 40.5)]
    assert trace.sequences[0].decode_start_s == 4.0


def test_a_late_build_that_no_row_needs_is_abandoned_beside_a_prefill():
    """The only row has missed at 18.5, in the second of three tree steps; the draft model reads the new row's prompt
    when the build has ended, early or not."""
    record = scripted_record(0.0, num_prompts=1, length=9, rank=4)
    system = clockwork(record, tree_step_s=5, verify_s=8)
    for on_late, ends in ((LateBuild.WAIT, [16.5, 21.5, 26.5]), (LateBuild.ABANDON, [16.5, 21.5])):
        trace = trace_of(ssd(3, 1, on_late_build=on_late), OpenLoop(((0.0,), (5.0,)), 2), system)
        draft = [span for span in spans_of(trace, Lane.DRAFT) if span[0] in (TREE, PREFILL)]
        assert draft[0] == (PREFILL, 1, 0.0, 3.0)
        assert [(operation, end_s) for operation, _, _, end_s in draft[1 : 1 + len(ends)]] == [(TREE, s) for s in ends]
        assert draft[1 + len(ends)] == (PREFILL, 1, ends[-1], ends[-1] + 3)


def test_where_nothing_overlaps_the_draft_reads_after_the_target():
    record = scripted_record(1.0, num_prompts=1, length=4)
    system = replace(clockwork(record), overlaps=False)
    trace = trace_of(ssd(2, 1), OpenLoop(((0.0,),), 1), system)
    assert [(s.lane, s.operation, s.start_s) for s in sorted(trace.spans, key=lambda s: s.start_s)][:3] == [
        (Lane.TARGET, PREFILL, 0.0),
        (Lane.DRAFT, PREFILL, 4.0),
        (Lane.DRAFT, STEP, 7.0),
    ]


def test_a_table_switches_with_the_rows_and_the_draft_reads_what_it_has_not_read():
    """AR alone, SD from two rows on: when the second joins, the draft model reads its prompt beside the target and then
    the text so far of the first."""
    record = scripted_record(0.0, num_prompts=1, length=4)
    table = PolicyTable(((1, AR), (2, Speculative(2))))
    trace = trace_of(table, OpenLoop(((0.0,), (5.0,)), 2), clockwork(record))
    prefills = [(s.lane, s.num_tokens, s.start_s, s.end_s) for s in trace.spans if s.operation is PREFILL]
    assert prefills == [
        (Lane.TARGET, 4, 0.0, 4.0),
        (Lane.DRAFT, 4, 14.5, 17.5),
        (Lane.TARGET, 4, 14.5, 18.5),
        (Lane.DRAFT, 5, 18.5, 21.5),
    ]
    steps = [(s.batch_size, s.start_s) for s in trace.spans if s.operation is STEP]
    assert steps[0] == (2, 21.5)
    rows_of = {(s.sequence, s.round): s.batch_size for s in trace.spans if s.operation is VERIFY}
    drafted = {(r.sequence, r.index): r.num_drafted for r in trace.rounds}
    assert all((drafted[place] > 0) == (rows == 2) for place, rows in rows_of.items() if place[1] < 2)


def test_requests_go_to_the_target_with_the_fewest():
    record = scripted_record(0.0, num_prompts=1, length=3)
    system = replace(clockwork(record), placement=Placement(num_targets=2))
    trace = trace_of(AR, OpenLoop(((0.0,), (0.0,), (1.0,), (2.0,), (26.0,)), 1), system)
    device = {s.sequence: s.device for s in trace.spans if s.operation is PREFILL}
    assert device == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
    assert_conserved(trace, num_targets=2)


# ---------------------------------------------------------------------------------------------------------------- laws


def assert_conserved(trace, num_targets: int = 1) -> None:
    """Every request once and in order, its tokens its rounds', no device does two things at once, rows in lockstep."""
    assert [s.index for s in trace.sequences] == list(range(len(trace.sequences)))
    emitted: dict[int, int] = defaultdict(int)
    for r in trace.rounds:
        emitted[r.sequence] += r.num_emitted
    for s in trace.sequences:
        assert 1 + emitted[s.index] == len(s.tokens)
        assert s.arrival_s <= s.prefill_start_s <= s.decode_start_s <= s.end_s
    target_of = {s.sequence: s.device for s in trace.spans if s.operation is PREFILL and s.lane is Lane.TARGET}
    for target in range(num_targets):
        starts = [s.prefill_start_s for s in trace.sequences if target_of[s.index] == target]
        assert starts == sorted(starts), "admission in order of arrival"
    by_device = defaultdict(list)
    for span in trace.spans:
        by_device[span.lane, span.device].append((span.start_s, span.end_s))
    for spans in by_device.values():
        for before, after in pairwise(sorted(spans)):
            assert after[0] >= before[1] - 1e-12
    for target in range(num_targets):
        verified = [
            (s.end_s, s.batch_size)
            for s in trace.spans
            if s.operation is VERIFY and s.lane is Lane.TARGET and s.device == target
        ]
        ends = [r.end_s for r in trace.rounds if target_of[r.sequence] == target]
        rows = dict(zip(*np.unique(ends, return_counts=True), strict=True)) if ends else {}
        assert sum(size for _, size in verified) == len(ends)
        assert {end_s for end_s, _ in verified} == set(rows), "rows end their rounds with the verification"


@st.composite
def loads(draw, most_rows: int = MOST_ROWS):
    num_requests, most = draw(st.integers(8, 40)), draw(st.integers(1, most_rows))
    kind = draw(st.sampled_from(("closed", "poisson", "trace")))
    if kind == "closed":
        return ClosedLoop(draw(st.integers(1, 7)), num_requests, most)
    if kind == "poisson":
        return OpenLoop(Poisson(draw(st.floats(0.5, 50))), most, num_requests)
    times = sorted(draw(st.lists(st.floats(0, 5), min_size=num_requests, max_size=num_requests)))
    lengths = draw(st.lists(st.sampled_from((None, 1, 2)), min_size=num_requests, max_size=num_requests))
    return OpenLoop(tuple((time, None, n) for time, n in zip(times, lengths, strict=True)), most)


def overlap_s(spans, start_s: float, end_s: float) -> float:
    return math.fsum(max(0.0, min(b, end_s) - max(a, start_s)) for a, b in spans)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(most_targets=3), load=loads(), draft_s=st.sampled_from((0.0, 0.003, 0.05)))
def test_laws_of_every_run(policy, system, load, draft_s):
    """Little's law by areas, conservation, busy times, means by their definitions; recording changes nothing."""
    system = served(system, target_s=0.004, draft_s=draft_s)
    run = run_of(policy, load, system)
    trace, tally, totals = run.trace, run.tally, run.tally.totals
    assert_conserved(trace, system.placement.num_targets)
    window = (tally.start_s, tally.end_s)
    assert len(trace.sequences) == load.num_requests and totals.seconds == pytest.approx(window[1] - window[0])
    in_system = [(s.arrival_s, s.end_s) for s in trace.sequences]
    waiting = [(s.arrival_s, s.prefill_start_s) for s in trace.sequences]
    assert totals.in_system_s == pytest.approx(overlap_s(in_system, *window), rel=1e-9, abs=1e-9)
    assert totals.waiting_s == pytest.approx(overlap_s(waiting, *window), rel=1e-9, abs=1e-9)
    for lane, busy_s in ((Lane.TARGET, totals.target_s), (Lane.DRAFT, totals.draft_s)):
        spans = [(s.start_s, s.end_s) for s in trace.spans if s.lane is lane]
        assert busy_s == pytest.approx(overlap_s(spans, *window), rel=1e-9, abs=1e-9)
    inside = [s for s in trace.sequences if window[0] < s.end_s <= window[1]]
    assert totals.ended == len(inside)
    first = [s.decode_start_s - s.arrival_s for s in trace.sequences if window[0] < s.decode_start_s <= window[1]]
    assert totals.first_tokens == len(first) and totals.ttft_s == pytest.approx(sum(first))
    rounds = [r for r in trace.rounds if window[0] < r.end_s <= window[1]]
    assert totals.tokens == len(first) + sum(r.num_emitted for r in rounds)
    last = {s.index: s.decode_start_s for s in trace.sequences}
    gaps = []
    for r in trace.rounds:
        gaps.append((r.end_s, r.end_s - last[r.sequence]))
        last[r.sequence] = r.end_s
    assert totals.gap_s == pytest.approx(sum(gap for end_s, gap in gaps if window[0] < end_s <= window[1]))
    if isinstance(load, ClosedLoop):
        clients = min(load.concurrency, load.num_requests)
        assert totals.in_system_s == pytest.approx(clients * totals.seconds)
    quiet = run_of(policy, load, system, record=False)
    assert astuple(quiet.tally.totals) == pytest.approx(astuple(totals), rel=1e-9, abs=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(), rate=st.floats(1, 50), most=st.integers(1, MOST_ROWS))
def test_twice_the_times_and_half_the_rate_take_twice_as_long(policy, system, rate, most):
    placement = replace(system.placement, transfer_bytes_per_s=math.inf)
    system = served(replace(system, placement=placement), target_s=0.004, draft_s=0.003)
    tables = {
        key: replace(
            table,
            knots={w: tuple((c, 2 * s) for c, s in row) for w, row in table.knots.items()},
            batched={
                b: {w: tuple((c, 2 * s) for c, s in row) for w, row in knots.items()}
                for b, knots in table.batched.items()
            },
        )
        for key, table in system.latency.operations.items()
    }
    slow = replace(
        system,
        latency=LatencyModel(tables),
        host_s={term: 2 * seconds for term, seconds in system.host_s.items()},
        placement=replace(placement, transfer_latency_s=2 * placement.transfer_latency_s),
    )
    fast_run = run_of(policy, OpenLoop(Poisson(rate), most, 30), system, record=False).tally
    slow_run = run_of(policy, OpenLoop(Poisson(rate / 2), most, 30), slow, record=False).tally
    for name in ("seconds", "wait_s", "ttft_s", "tpot_s", "gap_s", "in_system_s", "waiting_s", "target_s", "draft_s"):
        assert getattr(slow_run.totals, name) == 2 * getattr(fast_run.totals, name), name
    for name in ("tokens", "ended", "rounds", "rows", "lookups", "hits"):
        assert getattr(slow_run.totals, name) == getattr(fast_run.totals, name), name


def test_runs_depend_on_the_seed_only():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = served(system_of(record, residuals=(0.8, 1.0, 1.2)), target_s=0.005, draft_s=0.002)
    load = OpenLoop(Poisson(20.0), 4, 100)
    first, again, other = (report_of(ssd(3, 2), load, system, seed).to_dict() for seed in (1, 1, 2))
    assert first == again != other
    assert trace_of(ssd(3, 2), load, system, 1).digest() == trace_of(ssd(3, 2), load, system, 1).digest()


# ----------------------------------------------------------------------------------------------- against other engines


@pytest.mark.parametrize("policy", [AR, Speculative(3), ssd(3, 1), ssd(3, 1, on_late_build=LateBuild.ABANDON)])
def test_one_client_whose_prefill_is_free_is_the_engine_of_batch_one(policy):
    """At temperature 0 no luck decides: the same rounds at the same times, with late builds, and the same tokens/s."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4, temperature=0.0)
    system = system_of(record, tree_step_s=0.006, host_s=0.001)
    expected = replicate(policy, workload_of(record), system, [0])[0]
    load = ClosedLoop(1, 6, shapes=tuple((prompt,) for prompt in range(6)))
    trace = trace_of(policy, load, served(system))
    assert trace.digest() == expected.digest()
    ends = [[r.end_s for r in t.rounds] for t in (trace, expected)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


@pytest.mark.parametrize("policy", [Speculative(3), ssd(3, 1), ssd(2, 2, Fallback.NONE)])
def test_tokens_per_second_of_one_client_are_the_exact_ones(policy):
    """2,000 requests; t of 29 degrees of freedom is beyond 6 with probability 2e-6. Another K is told apart."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = system_of(record, residuals=(0.8, 1.0, 1.2))

    def exact(policy) -> float:
        expected = expectations([policy], workload_of(record), system)[0]
        return expected.num_tokens.sum() / expected.seconds.sum()

    rate = run_of(policy, ClosedLoop(1, 2000), served(system), record=False).tally.ratio("further_tokens", "seconds")
    error = (rate.high - rate.value) / 2.045
    assert abs(rate.value - exact(policy)) < 6 * error
    assert abs(rate.value - exact(Speculative(1))) > 6 * error


@pytest.mark.parametrize("policy", [Speculative(3), ssd(4, 1), ssd(3, 1, Fallback.NGRAM), ssd(3, 1, Fallback.NONE)])
def test_a_request_that_is_cut_runs_as_under_a_lower_cap(policy):
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = served(system_of(record), target_s=0.001, draft_s=0.001)
    cut = ClosedLoop(3, 40, shapes=((None, 7),))
    low = replace(workload_of(record), max_new_tokens=7)
    expected = serve_trace(policy, ClosedLoop(3, 40), low, system, 3)
    trace = trace_of(policy, cut, system, 3)
    assert trace.rounds == expected.rounds and trace.spans == expected.spans


def test_speculations_in_hand_outlive_a_change_of_rows():
    """A table of two SSD policies and a controller run through; what they decode is what the record says."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = served(system_of(record), target_s=0.001, draft_s=0.001)
    for policy in (PolicyTable(((1, ssd(4, 2)), (3, ssd(2, 1, Fallback.NONE)))), HillClimbing((0, 2, 4), (4, 8))):
        assert_conserved(trace_of(policy, OpenLoop(Poisson(15.0), 6, 80), system))


# ------------------------------------------------------------------------------------------------------------ queueing


def one_at_a_time(num_tokens: int, service_s: float = 1.0):
    """A system that serves a text in `service_s` seconds of constant verifications."""
    record = scripted_record(0.0, num_prompts=1, length=num_tokens)
    return served(system_of(record, verify_s=service_s / (num_tokens - 1)), most_rows=2)


def lindley(times: np.ndarray, service_s: float = 1.0) -> np.ndarray:
    """Waits of a first-come first-served queue of constant service."""
    steps = np.concatenate([[0.0], np.cumsum(service_s - np.diff(times))])
    return steps - np.minimum.accumulate(steps)


@pytest.mark.parametrize(("load", "num", "seed", "most_error"), [(0.5, 50_000, 1, 0.03), (0.9, 100_000, 1, 0.06)])
def test_mean_wait_of_md1(load, num, seed, most_error):
    """rho / (2 (1 - rho)) services, within 3 % for this seed. The relative standard error by batch means, asserted
    below, is about 2 % at load .5 and 5 % at .9; that the waits are Lindley's, request by request, is the sharper
    test."""
    open_loop = OpenLoop(Poisson(load), 1, num)
    report = report_of(AR, open_loop, one_at_a_time(2), seed)
    wait = report.wait_s.mean
    expected = load / (2 * (1 - load))
    assert abs(wait.value / expected - 1) < 0.03
    assert (wait.high - wait.value) / 2.045 < most_error * expected
    waits = lindley(np.array(list(open_loop.arrival_times(seed))))
    assert wait.value == pytest.approx(waits[int(0.2 * num) :].mean(), rel=2e-3)
    assert report.num_waiting.value == pytest.approx(report.requests_per_s.value * wait.value, rel=2e-3)
    assert report.target_utilisation.value == pytest.approx(load, rel=0.02)
    assert not report.is_saturated and report.capacity_per_s == pytest.approx(1.0)


def test_lindley_is_md1():
    """4 million arrivals at load .9: a relative standard error of about .8 %, within 3 %."""
    times = np.cumsum(np.random.default_rng(0).exponential(1 / 0.9, 4_000_000))
    assert lindley(times).mean() == pytest.approx(4.5, rel=0.03)


def test_waits_are_those_of_lindley_one_by_one():
    load = OpenLoop(Poisson(0.9), 1, 2000)
    trace = trace_of(AR, load, one_at_a_time(5), 3)
    waits = [s.prefill_start_s - s.arrival_s for s in trace.sequences]
    assert waits == pytest.approx(lindley(np.array(list(load.arrival_times(3)))), rel=1e-6, abs=1e-6)


def test_saturation_is_said():
    system = one_at_a_time(2)
    for load, saturated in ((0.5, False), (0.9, False), (0.95, False), (1.5, True)):
        report = report_of(AR, OpenLoop(Poisson(load), 1, 4000), system)
        assert report.is_saturated is saturated
        if saturated:
            assert report.note == "saturated, no steady state"
            growing = (report.ttft_s, report.wait_s, report.num_waiting, report.num_in_system, report.goodput_per_s)
            assert growing == (None,) * 5
            assert report.requests_per_s.value == pytest.approx(1.0, rel=0.01)
    trace = tuple((0.6 * n,) for n in range(400))
    assert report_of(AR, OpenLoop(trace, 1), system).is_saturated
    assert not report_of(AR, OpenLoop(tuple((1.2 * n,) for n in range(400)), 1), system).is_saturated


def test_number_in_system_of_mm1():
    """Geometric lengths of 12 rounds on average at load .6: rho / (1 - rho) within 5 standard errors by batch means
    (t of 29 degrees of freedom: 3e-5), and the standard error is below 5 %; constant lengths are told apart."""
    rng, num = np.random.default_rng(4), 12_000
    lengths = np.minimum(1 + rng.geometric(1 / 12, num), 150)
    times = np.cumsum(rng.exponential(12 / 0.6, num))
    system = served(system_of(scripted_record(0.0, num_prompts=1, length=150), verify_s=1.0), most_rows=2)
    trace = tuple((float(time), None, int(n)) for time, n in zip(times, lengths, strict=True))
    in_system = run_of(AR, OpenLoop(trace, 1), system, record=False).tally.ratio("in_system_s", "seconds")
    error = (in_system.high - in_system.value) / 2.045
    assert error < 0.05 * 1.5
    assert abs(in_system.value - 1.5) < 5 * error
    constant = tuple((float(time), None, 13) for time in times)
    other = run_of(AR, OpenLoop(constant, 1), system, record=False).tally.ratio("in_system_s", "seconds")
    assert abs(other.value - 1.5) > 5 * (other.high - other.value) / 2.045


def test_closed_loop_of_n_clients_has_n_in_the_system():
    """N = X R: requests/s times the mean time in the system, here TTFT and the further tokens."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = served(system_of(record), target_s=0.005, draft_s=0.002)
    report = report_of(ssd(3, 2), ClosedLoop(6, 3000, max_batch_size=4), system)
    assert report.num_in_system.value == pytest.approx(6, rel=1e-9)
    residence_s = report.ttft_s.mean.value + report.tpot_s.mean.value * 19
    assert report.requests_per_s.value * residence_s == pytest.approx(6, rel=0.01)
    assert 3 < report.batch_size.value <= 4


# ------------------------------------------------------------------------------------------------------------- figures


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    values=st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=60),
    share=st.sampled_from((0.1, 0.5, 0.9, 0.99, 1.0)),
)
def test_quantiles_of_the_sketch_are_within_their_error(values, share):
    sketch = QuantileSketch()
    for value in values:
        sketch.add(value)
    exact = np.quantile(values, share, method="inverted_cdf")
    assert sketch.quantile(share) == pytest.approx(exact, rel=SKETCH_ERROR * (1 + 1e-9))


def test_sketch_of_many_numbers_stays_small():
    values = np.random.default_rng(1).lognormal(0, 2, 50_000)
    sketch, by_weight = QuantileSketch(), QuantileSketch()
    for value in values.tolist():
        sketch.add(value)
        by_weight.add(value, 3)
    for share in (0.5, 0.9, 0.99, 0.999):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert sketch.quantile(share) == pytest.approx(exact, rel=SKETCH_ERROR * (1 + 1e-9))
        assert by_weight.quantile(share) == sketch.quantile(share)
    assert len(sketch._weights) < 2_500
    assert math.isnan(QuantileSketch().quantile(0.5))


def test_figures_of_requests_are_theirs():
    """Quantiles of the report against those of the trace; goodput by counting."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = served(system_of(record), target_s=0.005, draft_s=0.002)
    load, policy = ClosedLoop(5, 600, max_batch_size=3), ssd(3, 2)
    trace = trace_of(policy, load, system)
    slo = Slo(ttft_s=0.09, tpot_s=0.0125)
    report = report_of(policy, load, system, slo=slo)
    start_s, end_s = report.start_s, report.end_s
    assert (start_s, end_s) == pytest.approx((trace.sequences[120].arrival_s, trace.sequences[-1].arrival_s))
    start_s, end_s = trace.sequences[120].arrival_s, trace.sequences[-1].arrival_s
    ended = [s for s in trace.sequences if start_s < s.end_s <= end_s]
    ttft = [s.decode_start_s - s.arrival_s for s in trace.sequences if start_s < s.decode_start_s <= end_s]
    tpot = [s.decode_s / s.num_decoded for s in ended]
    for spread, values in ((report.ttft_s, ttft), (report.tpot_s, tpot)):
        assert spread.mean.value == pytest.approx(np.mean(values))
        exact = np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf")
        assert (spread.p50, spread.p90, spread.p99) == pytest.approx(exact, rel=SKETCH_ERROR * 1.001)
    good = sum(
        s.decode_start_s - s.arrival_s <= slo.ttft_s and one <= slo.tpot_s for s, one in zip(ended, tpot, strict=True)
    )
    assert 0 < good < len(ended) == report.num_measured
    assert report.goodput_per_s.value == pytest.approx(good / (end_s - start_s))
    assert report_of(policy, load, system, slo=Slo()).goodput_per_s.value == report.requests_per_s.value
    assert report.gap_s.p50 == 0.0 < report.gap_s.p99, "tokens of one round come together"


def test_devices_count():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    base = served(system_of(record))
    two = replace(base, placement=Placement(num_draft_devices=2))
    alone = replace(base, overlaps=False)
    load = ClosedLoop(2, 60)
    for system, policy, num in ((base, AR, 1), (base, ssd(2, 1), 2), (two, ssd(2, 1), 3), (alone, ssd(2, 1), 1)):
        report = report_of(policy, load, system)
        assert report.num_devices == num
        assert report.tokens_per_s_per_device == report.tokens_per_s.value / num
        assert (report.draft_utilisation is None) == (policy is AR)
    assert report_of(PolicyTable(((1, AR), (2, ssd(2, 1)))), load, base).num_devices == 2


def test_tails_do_not_depend_on_the_horizon():
    """16 clients: p99 of every spread changes by less than 5 % when twice as many requests are served."""
    record = record_of(*markov(3), num_prompts=20, length=24, seed=4)
    system = served(system_of(record, residuals=(0.8, 1.0, 1.2)), target_s=0.004, draft_s=0.002)
    short, long = (report_of(ssd(3, 2), ClosedLoop(16, num, max_batch_size=8), system) for num in (1500, 3000))
    for name in ("ttft_s", "tpot_s", "gap_s"):
        assert getattr(short, name).p99 == pytest.approx(getattr(long, name).p99, rel=0.05), name


def test_intervals_cover_the_mean():
    """The 95 % interval of requests/s at load .5 over 100 seeds: of a binomial with p = .95, 84 or fewer cover with
    probability 7e-5."""
    system, load = one_at_a_time(2), OpenLoop(Poisson(0.5), 1, 400)
    rates = [run_of(AR, load, system, seed, record=False).tally.ratio("ended", "seconds") for seed in range(100)]
    assert 84 < sum(rate.low <= 0.5 <= rate.high for rate in rates) < 100


def test_one_batch_has_no_interval():
    one = report_of(AR, ClosedLoop(1, 2), one_at_a_time(3), warm_up=0.0)
    assert one.tokens_per_s.n == 1 and one.to_dict()["tokens_per_s"]["low"] is None


def test_reports_are_written_as_json():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = served(system_of(record))
    for load in (ClosedLoop(2, 40), OpenLoop(Poisson(5.0), 2, 40), OpenLoop(Poisson(5e3), 2, 40)):
        report = report_of(ssd(2, 1), load, system, slo=Slo(ttft_s=1.0))
        data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert data["slo"] == {"ttft_s": 1.0, "tpot_s": None} and data["load"] == load.to_dict()
        assert data["tpot_s"]["mean"]["value"] == report.tpot_s.mean.value


# -------------------------------------------------------------------------------------------------- batches and memory


def test_long_speculations_lose_where_verification_is_bound_by_compute():
    """Verification takes 10 ms up to 32 tokens of all rows, and in proportion beyond: the best K does not rise with the
    number of clients, and is 0 past the knee."""
    record = record_of(*markov(5), num_prompts=20, length=24, seed=4)
    base = served(system_of(record, draft_step_s=0.0005))
    verify = base.latency[Lane.TARGET, VERIFY]

    def knots(rows: int) -> dict:
        return {w: tuple((c, 0.010 * max(1.0, rows * w / 32)) for c in (0, 4096)) for w in range(1, 9)}

    batched = {rows: knots(rows) for rows in (2, 4, 8, 16, 32, 64)}
    tables = dict(base.latency.operations) | {(Lane.TARGET, VERIFY): replace(verify, knots=knots(1), batched=batched)}
    system = replace(base, latency=LatencyModel(tables))
    best = []
    for clients in (1, 8, 16, 64):
        load = ClosedLoop(clients, 300 + 5 * clients)
        rates = {K: report_of(Speculative(K), load, system).tokens_per_s.value for K in (0, 1, 2, 4, 6)}
        best.append(max(rates, key=rates.__getitem__))
    assert best == sorted(best, reverse=True) and best[0] >= 4 and best[-1] == 0


def test_memory_limits_the_batch():
    """250 slots of KV: a request reserves its 24 tokens and K + 1 ahead of them, so that 10 fit under AR and 8 under SD
    with K = 4; shorter requests reserve less."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    memory = Memory(target_bytes=250.0, target_kv_bytes_per_token=1.0)
    system = replace(served(system_of(record)), memory=memory)
    load = ClosedLoop(40, 300)
    most = {}
    for policy in (AR, Speculative(4)):
        trace = trace_of(policy, load, system)
        assert_conserved(trace)
        most[policy] = max(s.batch_size for s in trace.spans if s.operation is VERIFY)
        assert most[policy] == memory.most_rows(policy, 24, system.placement, sampled=True)
    assert most[Speculative(4)] == 8 < most[AR] == 10
    short = ClosedLoop(40, 300, shapes=((None, 4),))
    trace = trace_of(AR, short, system)
    assert max(s.batch_size for s in trace.spans if s.operation is VERIFY) == 250 // 9


def test_a_table_fits_with_every_number_of_rows_that_may_be_left():
    """Seven rows of SD need 203 bytes, eight of AR 200: with 202, seven long requests must not be what is left of
    eight, even where short ones let the eighth in."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    table = PolicyTable(((1, Speculative(4)), (8, AR)))
    load = ClosedLoop(12, 100, shapes=(*((None, n) for n in range(4, 12)), *((None, 20),) * 40))
    for room in (203.0, 202.0):
        memory = Memory(target_bytes=room, target_kv_bytes_per_token=1.0)
        trace = trace_of(table, load, replace(served(system_of(record)), memory=memory))
        rows, reserved = defaultdict(int), defaultdict(float)
        for r in trace.rounds:
            rows[r.end_s] += 1
            reserved[r.end_s] += 4 + len(trace.sequences[r.sequence].tokens) + 1
        needed = {end_s: size + 4 * rows[end_s] * (rows[end_s] < 8) for end_s, size in reserved.items()}
        assert max(rows.values()) > 8 and max(needed.values()) <= room
        assert any(size == 200 and rows[end_s] == 8 for end_s, size in reserved.items()) == (room == 203)


# ----------------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_served_is_refused():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    bare = system_of(record)
    with pytest.raises(BadInput, match="latency of target prefill: must be profiled"):
        report_of(AR, ClosedLoop(1, 10), bare)
    system = served(bare)
    tables = {k: v for k, v in system.latency.operations.items() if k != (Lane.DRAFT, PREFILL)}
    no_draft = replace(system, latency=LatencyModel(tables))
    assert report_of(AR, ClosedLoop(1, 10), no_draft).tokens_per_s
    with pytest.raises(BadInput, match="latency of draft prefill: must be profiled"):
        report_of(ssd(2, 1), ClosedLoop(1, 10), no_draft)
    small = replace(system, memory=Memory(target_bytes=20.0, target_kv_bytes_per_token=1.0))
    with pytest.raises(BadInput, match="memory: must have room for one request; target memory: 25 B needed, 20 B"):
        report_of(AR, ClosedLoop(1, 10), small)
    with pytest.raises(BadInput, match="load: must leave time to measure"):
        report_of(AR, ClosedLoop(4, 4), system)
    for warm_up in (-0.1, 1.0):
        with pytest.raises(BadInput, match="warm_up"):
            report_of(AR, ClosedLoop(1, 10), system, warm_up=warm_up)
    with pytest.raises(BadInput, match=r"slo.ttft_s: must be > 0"):
        Slo(ttft_s=0)
    with pytest.raises(BadInput, match="max_new_tokens: must be >= 1"):
        serve(AR, ClosedLoop(1, 10), workload_of(record, 0), system)
    with pytest.raises(BadInput, match=r"number of rows must be in the profiled range 1\.\.64"):
        report_of(AR, ClosedLoop(65, 100), system)


def test_capacity_is_that_of_a_full_batch():
    record = scripted_record(0.0, num_prompts=1, length=11)
    system = replace(served(system_of(record, verify_s=0.1)), placement=Placement(num_targets=2))
    assert capacity(AR, OpenLoop(Poisson(1.0), 4, 10), workload_of(record), system) == pytest.approx(8.0, rel=0.02)
