"""The event engine: timelines asserted as times, conservation, determinism, controllers, and what it refuses."""

from __future__ import annotations

import time
import tracemalloc
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import metrics
from sim.agreement import AgreementRecord
from sim.decider import RoundSeen
from sim.durations import MAX_KEPT, Durations
from sim.errors import BadInput, RunFailed
from sim.latency import LatencyModel
from sim.placement import Placement, Split
from sim.policy import (
    Autoregressive,
    Fallback,
    LateBuild,
    Policy,
    PolicyTable,
    Speculative,
    SpeculativeSpeculative,
    uniform_fan_out,
)
from sim.system import System
from sim.timeline import MAX_TABLES, Timeline, mean_of, replicate, totals
from sim.trace import Lane, Operation, Source, Trace
from tests.sim.strategies import batched, policies, systems
from tests.sim.toy import markov, record_of, scripted_record, system_of, workload_of

VERIFY, STEP, GLUE, TREE = Operation.VERIFY, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP
FIRST, HIT, MISS, REDRAFTED, SYNCHRONOUS = (
    Source.FIRST,
    Source.HIT,
    Source.MISS,
    Source.REDRAFTED,
    Source.SYNCHRONOUS,
)


def ssd(K: int, F: int, fallback: Fallback = Fallback.DRAFT, **options) -> SpeculativeSpeculative:
    after_miss = (F,) * (K + 1) if fallback is not Fallback.NONE else (F,)
    return SpeculativeSpeculative(K, (F,) * (K + 1), after_miss, fallback, **options)


def script(*texts: str) -> AgreementRecord:
    """Texts of equal length whose fate is certain, a letter for each token after the prefill's: a or A is accepted if
    it is drafted, r or R is not; capitals are prepared with any fan-out above 0, small letters never."""
    record = scripted_record(1.0, num_prompts=len(texts), length=1 + len(texts[0]), prompt_length=4)
    letters = "".join("A" + text for text in texts)
    return replace(
        record,
        log_q=np.array([0.0 if letter in "aA" else -1e6 for letter in letters]),
        rank=np.array([0 if letter.isupper() else 4 for letter in letters]),
        top_q=np.full((len(letters), 4), 0.25),
    )


def clockwork(record: AgreementRecord, *, second_row_s: float = 0.0, **seconds: float) -> System:
    """Whole seconds, to be asserted exactly: 10 to verify, 2 for a draft step, 1 for the glue pass, 3 for a tree step,
    half a second of host time; `second_row_s` more for two rows."""
    seconds = {"verify_s": 10, "draft_step_s": 2, "glue_s": 1, "tree_step_s": 3, "host_s": 0.5} | seconds
    system = system_of(record, **seconds)

    def knots(location_s: float) -> dict:
        return {width: ((0, location_s), (4096, location_s)) for width in range(1, 17)}

    tables = {
        key: replace(table, knots=knots(table.knots[1][0][1]), batched={2: knots(table.knots[1][0][1] + second_row_s)})
        for key, table in system.latency.operations.items()
    }
    return replace(system, latency=LatencyModel(tables))


def spans_of(trace: Trace, lane: Lane) -> list[tuple]:
    """(operation, from, to) by start, with the device in front where it is not the first."""
    found = sorted((s.start_s, s.device, s) for s in trace.spans if s.lane is lane)
    return [(*[d][: d > 0], s.operation, s.start_s, s.end_s) for _, d, s in found]


def rounds_of(trace: Trace) -> list[tuple]:
    return [(r.source, r.num_drafted, r.num_emitted, r.end_s) for r in trace.rounds]


def run(policy, record: AgreementRecord, system: System, *, seed: int = 0, **workload) -> Trace:
    trace = replicate(policy, replace(workload_of(record), **workload), system, [seed])[0]
    assert_conserved(trace)
    return trace


# ----------------------------------------------------------------------------------------------------------- timelines


def test_timeline_of_three_rounds():
    """K = 2, everything accepted and prepared; cap 8: the prefill's token, then rounds of 3, 3 and 1."""
    record = scripted_record(1.0, num_prompts=1, length=8)
    trace = run(ssd(2, 1), record, clockwork(record))
    assert spans_of(trace, Lane.TARGET) == [(VERIFY, 4.5, 14.5), (VERIFY, 15.0, 25.0), (VERIFY, 25.5, 35.5)]
    assert spans_of(trace, Lane.DRAFT) == [
        (STEP, 0.0, 2.0),
        (STEP, 2.0, 4.0),
        (GLUE, 4.5, 5.5),
        (TREE, 5.5, 8.5),
        (TREE, 8.5, 11.5),
        (GLUE, 15.0, 16.0),
        (TREE, 16.0, 19.0),
        (TREE, 19.0, 22.0),
    ]
    assert rounds_of(trace) == [(FIRST, 2, 3, 14.5), (HIT, 2, 3, 25.0), (HIT, 0, 1, 35.5)]
    assert [s.num_tokens for s in trace.spans if s.operation is TREE] == [3] * 4


HIT_MISS_MISS_HIT = script("AAA" + "r" + "R" + "AAa")


def test_timeline_of_hits_and_misses():
    trace = run(ssd(2, 1), HIT_MISS_MISS_HIT, clockwork(HIT_MISS_MISS_HIT))
    assert rounds_of(trace) == [(FIRST, 2, 3, 14.5), (HIT, 2, 1, 25.0), (MISS, 2, 1, 39.5), (HIT, 2, 3, 50.0)]
    assert [s for s in spans_of(trace, Lane.DRAFT) if s[0] is not TREE] == [
        (STEP, 0.0, 2.0),
        (STEP, 2.0, 4.0),
        (GLUE, 4.5, 5.5),
        (GLUE, 15.0, 16.0),
        (STEP, 25.0, 27.0),
        (STEP, 27.0, 29.0),
        (GLUE, 29.5, 30.5),
        (GLUE, 40.0, 41.0),
    ]
    assert [s.num_rounds for s in [totals_of(ssd(2, 1), HIT_MISS_MISS_HIT)]] == [4]


def totals_of(policy, record, system=None, seed: int = 0, **workload):
    system = system or clockwork(record)
    return totals(policy, replace(workload_of(record), **workload), system, [seed])[0]


@pytest.mark.parametrize(
    ("fallback", "drafted", "end_s"),
    [
        (Fallback.DRAFT, 2, 39.5),
        (Fallback.DRAFT_MISSING, 2, 39.5),
        (Fallback.FILLER, 2, 35.5),
        (Fallback.NONE, 0, 35.5),
    ],
)
def test_only_a_drafting_fallback_takes_draft_time(fallback, drafted, end_s):
    record = script("AAA" + "r" + "rrrrrr")
    trace = run(ssd(2, 1, fallback), record, clockwork(record))
    first_draft_s = 4.0 if fallback in (Fallback.DRAFT, Fallback.DRAFT_MISSING) else 0.0
    at_the_end = next(r for r in trace.rounds if r.source is MISS)
    if fallback is not Fallback.NONE:  # which accepts nothing in the first round
        assert (at_the_end.num_drafted, at_the_end.end_s) == (drafted, end_s + first_draft_s - 4.0)
    assert {s.start_s for s in trace.spans if s.operation is STEP} >= ({0.0, 25.0} if first_draft_s else set())
    assert first_draft_s or not any(s.operation is STEP for s in trace.spans)


@pytest.mark.parametrize(
    ("verify_s", "on_late_build", "restart_s"),
    [
        (0.5, "wait", 19.0),  # glue 12..13, tree steps 13..16 and 16..19
        (0.5, "abandon", 13.0),  # known at 12.5, in the glue pass, which is finished
        (2.0, "abandon", 16.0),  # known at 14, in the first tree step
        (4.0, "abandon", 16.0),  # known at 16, just when the second would begin
        (4.5, "abandon", 19.0),
        (7.0, "abandon", 19.0),  # known when all is done
        (9.0, "abandon", 21.5),
        (9.0, "wait", 21.5),
    ],
)
def test_a_late_build_is_awaited_or_abandoned(verify_s, on_late_build, restart_s):
    """The second round's build begins at 12, or when the first build (4.5..11.5) is not late, half a second after the
    verification; a hit always waits for its speculation."""
    record = HIT_MISS_MISS_HIT
    system = clockwork(record, verify_s=verify_s)
    trace = run(ssd(2, 1, on_late_build=LateBuild(on_late_build)), record, system)
    build_s = max(12.0, 4.5 + verify_s + 0.5)
    assert [s[1] for s in spans_of(trace, Lane.DRAFT) if s[0] is GLUE][1] == build_s
    restart_s = max(restart_s, build_s + verify_s)
    assert [s[1] for s in spans_of(trace, Lane.DRAFT) if s[0] is STEP][2] == restart_s
    assert trace.rounds[2].end_s == restart_s + 4 + 0.5 + verify_s


def test_an_outcome_that_arrives_with_the_end_of_an_operation_comes_first():
    """Messages of 1 s: speculations leave at 4.5 and are verified until 7.5; the outcome is there at 8.5, just when the
    first tree step (5.5..8.5) ends: no second one begins, though it was planned before the message was sent."""
    record = script("AAa" + "rrrr")
    system = replace(clockwork(record, verify_s=2), placement=Placement(transfer_latency_s=1.0))
    trace = run(ssd(2, 1, on_late_build=LateBuild.ABANDON), record, system)
    assert spans_of(trace, Lane.DRAFT)[2:5] == [(GLUE, 4.5, 5.5), (TREE, 5.5, 8.5), (STEP, 8.5, 10.5)]


PAIR = script("AAAA", "AaAA")  # under K = 1 the first text hits after its first round, the second misses


@pytest.mark.parametrize(
    ("fallback", "sources", "step", "end_s"),
    [
        (Fallback.DRAFT, [REDRAFTED, MISS], (STEP, 14.5, 17.5), 29.0),
        (Fallback.DRAFT_MISSING, [HIT, MISS], (STEP, 14.5, 16.5), 28.0),
    ],
)
def test_timeline_of_two_rows(fallback, sources, step, end_s):
    """One second more for the second row: verifications of 11, draft steps of 3, glue passes of 2, tree steps of 4."""
    system = clockwork(PAIR, second_row_s=1)
    trace = run(ssd(1, 1, fallback), PAIR, system, batch_size=2)
    verify_s = end_s - 11
    assert spans_of(trace, Lane.TARGET) == [(VERIFY, 3.5, 14.5), (VERIFY, verify_s, end_s)]
    assert spans_of(trace, Lane.DRAFT) == [
        (STEP, 0.0, 3.0),
        (GLUE, 3.5, 5.5),
        (TREE, 5.5, 9.5),
        step,
        (GLUE, verify_s, verify_s + 2),
        (TREE, verify_s + 2, verify_s + 6),
    ]
    assert [r.source for r in trace.rounds] == [FIRST, FIRST, *sources]
    assert [(s.operation, s.batch_size) for s in trace.spans if s.start_s == step[1]][-1] == (
        STEP,
        1 + (fallback is Fallback.DRAFT),
    )
    assert metrics.hit_rate([trace]).value == 0.5, "a speculation that is drafted anew was found"


def test_a_batch_of_misses_and_hits_abandons_only_what_nobody_needs():
    """Builds of 6 s beside verifications of 2: drafted anew, no row needs them; row by row the one that hit does."""
    system = clockwork(PAIR, second_row_s=1, verify_s=1)
    restarts = {}
    for fallback in (Fallback.DRAFT, Fallback.DRAFT_MISSING):
        trace = run(ssd(1, 1, fallback, on_late_build=LateBuild.ABANDON), PAIR, system, batch_size=2)
        restarts[fallback] = [s[1] for s in spans_of(trace, Lane.DRAFT) if s[0] is STEP][1]
    assert restarts == {Fallback.DRAFT: 5.5, Fallback.DRAFT_MISSING: 9.5}  # the glue pass ends at 5.5, all at 9.5


def test_rows_leave_and_the_next_batch_starts_when_the_last_has_ended():
    """Three texts two at a time, without acceptance K = 1: rounds of one token."""
    record = replace(script("rrr", "rrr", "rrr"), stopped=np.array([False, True, False]))
    keep = ~((record.prompt == 1) & (record.position > 1))
    columns = ("prompt", "position", "token", "log_p", "log_q", "rank", "overlap", "top_token", "top_p", "top_q")
    record = replace(record, **{name: getattr(record, name)[keep] for name in columns})
    trace = run(Speculative(1), record, clockwork(record, second_row_s=1), batch_size=2)
    assert [(s.start_s, s.batch_size) for s in trace.spans if s.operation is VERIFY] == [
        (3.5, 2),
        (17.0, 1),
        (27.5, 1),  # under the cap nothing is drafted for the last token
        (40.0, 1),
        (52.5, 1),
        (63.0, 1),
    ]
    assert [(s.decode_start_s, s.end_s) for s in trace.sequences] == [(0, 37.5), (0, 14.5), (37.5, 73.0)]
    shared_s = totals(
        Speculative(1), replace(workload_of(record), batch_size=2), clockwork(record, second_row_s=1), [0]
    )[0].shared_s
    assert shared_s.tolist() == [18.75, 18.75, 35.5]


def test_messages_delay_the_target_and_the_draft():
    """8 bytes a second after a second: an outcome takes 2 s, two draft tokens of 16 bytes with their distributions 5 s.

    The build begins when the speculations leave, the draft knows an outcome when it has arrived.
    """
    record = HIT_MISS_MISS_HIT
    placement = Placement(transfer_latency_s=1.0, transfer_bytes_per_s=8.0, distribution_bytes=12)
    trace = run(ssd(2, 1), record, replace(clockwork(record), placement=placement))
    assert spans_of(trace, Lane.TARGET)[:3] == [(VERIFY, 9.5, 19.5), (VERIFY, 27.0, 37.0), (VERIFY, 48.5, 58.5)]
    assert [s[1] for s in spans_of(trace, Lane.DRAFT) if s[0] in (GLUE, STEP)][:6] == [0.0, 2.0, 4.5, 22.0, 39.0, 41.0]
    filler = run(ssd(2, 1, Fallback.FILLER), record, replace(clockwork(record), placement=placement))
    assert spans_of(filler, Lane.TARGET)[0] == (VERIFY, 2.5, 12.5), "nothing is drafted, and no distribution travels"


def test_messages_of_other_decoders():
    """SD sends as SSD does; AR sends nothing."""
    record = script("rrr")
    placement = Placement(transfer_latency_s=1.0)
    system = replace(clockwork(record), placement=placement)
    # 2 steps, host, message, verify; then outcome message, 1 step and so on; the last round drafts nothing.
    ends = [r.end_s for r in run(Speculative(2), record, system).rounds]
    assert ends == [15.5, 30.0, 42.5]
    assert [r.end_s for r in run(Autoregressive(), record, system).rounds] == [10.5, 21.0, 31.5]


def test_two_devices_share_the_branches():
    record = script("AAAA")
    system = replace(clockwork(record), placement=Placement(num_draft_devices=2))
    trace = run(ssd(1, 2), record, system)
    assert spans_of(trace, Lane.DRAFT)[:5] == [
        (STEP, 0.0, 2.0),
        (GLUE, 2.5, 3.5),
        (1, GLUE, 2.5, 3.5),
        (TREE, 3.5, 6.5),
        (1, TREE, 3.5, 6.5),
    ]
    assert [(s.num_tokens, s.device) for s in trace.spans if s.operation is TREE][:2] == [(2, 0), (2, 1)]


def test_two_devices_share_the_rows():
    system = replace(clockwork(PAIR, second_row_s=1), placement=Placement(num_draft_devices=2, split=Split.ROWS))
    trace = run(ssd(1, 1), PAIR, system, batch_size=2)
    assert spans_of(trace, Lane.DRAFT)[:6] == [
        (STEP, 0.0, 2.0),
        (1, STEP, 0.0, 2.0),
        (GLUE, 2.5, 3.5),
        (1, GLUE, 2.5, 3.5),
        (TREE, 3.5, 6.5),
        (1, TREE, 3.5, 6.5),
    ]
    assert spans_of(trace, Lane.TARGET)[0] == (VERIFY, 2.5, 13.5)


def test_the_slowest_device_decides():
    """Residuals of .5 and 1.5: a build of two devices lasts as long as the slower one of each round."""
    record = scripted_record(1.0, num_prompts=3, length=30)
    system = clockwork(record, verify_s=0.1, host_s=0.0, residuals=(0.5, 1.5))
    trace = run(ssd(2, 2), record, replace(system, placement=Placement(num_draft_devices=2)))
    ends: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for s in trace.spans:
        if s.operation is TREE:
            ends[s.sequence, s.round][s.device] = s.end_s
    starts = {(s.sequence, s.round): s.start_s for s in trace.spans if s.operation is VERIFY}
    followed = [(max(by_device.values()), starts.get((i, n + 1))) for (i, n), by_device in ends.items()]
    assert all(start is None or start == end for end, start in followed)
    assert len({end == by_device[0] for by_device in ends.values() for end in [max(by_device.values())]}) == 2


def test_two_targets_queue_for_the_draft():
    """Both ask at 0. An answer goes before a build step that has not begun: the second target's draft step before the
    first one's build. At 14 the second target's outcome finds the first one's tree step (13..16) in progress."""
    record = script("AAAA", "AAAA")
    system = replace(clockwork(record, host_s=0.0), placement=Placement(num_targets=2))
    trace = run(ssd(1, 1), record, system)
    assert spans_of(trace, Lane.DRAFT)[:8] == [
        (STEP, 0.0, 2.0),
        (STEP, 2.0, 4.0),
        (GLUE, 4.0, 5.0),
        (TREE, 5.0, 8.0),
        (GLUE, 8.0, 9.0),
        (TREE, 9.0, 12.0),
        (GLUE, 12.0, 13.0),
        (TREE, 13.0, 16.0),
    ]
    assert spans_of(trace, Lane.TARGET) == [
        (VERIFY, 2.0, 12.0),
        (1, VERIFY, 4.0, 14.0),
        (VERIFY, 12.0, 22.0),
        (1, VERIFY, 16.0, 26.0),
    ]


def test_a_build_that_is_abandoned_before_it_begins_still_runs_its_glue_pass():
    """Verifications of 1 s. The first target hits and waits for its build (4..8), the second misses at 5 while its own
    build has not begun. At 8 the first target's answer, of no length, goes before the second one's glue pass, without
    which nobody would know of the miss."""
    record = script("AAAA", "AaAA")
    system = replace(clockwork(record, verify_s=1, host_s=0.0), placement=Placement(num_targets=2))
    trace = run(ssd(1, 1, on_late_build=LateBuild.ABANDON), record, system)
    assert spans_of(trace, Lane.DRAFT)[:6] == [
        (STEP, 0.0, 2.0),
        (STEP, 2.0, 4.0),
        (GLUE, 4.0, 5.0),
        (TREE, 5.0, 8.0),
        (GLUE, 8.0, 9.0),
        (STEP, 9.0, 11.0),
    ]
    assert spans_of(trace, Lane.TARGET) == [
        (VERIFY, 2.0, 3.0),
        (1, VERIFY, 4.0, 5.0),
        (VERIFY, 8.0, 9.0),
        (1, VERIFY, 11.0, 12.0),
    ]


def test_prompts_are_dealt_to_targets_in_turn():
    record = scripted_record(0.0, num_prompts=5, length=3)
    system = replace(clockwork(record), placement=Placement(num_targets=2))
    trace = run(Autoregressive(), record, system)
    assert {(s.sequence, s.device) for s in trace.spans} == {(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)}
    assert [s.decode_start_s for s in trace.sequences] == [0, 0, 21, 21, 42]


# ------------------------------------------------------------------------------------------------------------ policies


class Script:
    """Chooses the policies given, one after another, the last one for good; keeps what it sees.

    It is asked once at the beginning, and then before every round.
    """

    def __init__(self, *policies: Policy) -> None:
        self.policies = policies

    def start(self) -> Script:
        self.seen: list[RoundSeen] = []
        self.num_asked = -2
        return self

    @property
    def policy(self) -> Policy:
        self.num_asked += 1
        return self.policies[min(max(0, self.num_asked), len(self.policies) - 1)]

    def observe(self, seen: RoundSeen) -> None:
        self.seen.append(seen)

    def to_dict(self) -> dict:
        return {"kind": "script"}


def test_a_change_of_policy_keeps_the_speculation_in_hand():
    """K = 2, then K = 1: the two tokens in hand are verified beside a build for the new list, padded with zero; SD, AR
    and SSD again drop what was prepared."""
    record = scripted_record(1.0, num_prompts=1, length=30)
    after_miss = SpeculativeSpeculative(1, (2, 1), (1, 1))
    changes = Script(ssd(2, 1), after_miss, after_miss, Speculative(3), Speculative(3), Autoregressive(), ssd(2, 1))
    trace = run(changes, record, clockwork(record))
    assert [(r.source, r.num_drafted, r.num_emitted) for r in trace.rounds][:8] == [
        (FIRST, 2, 3),
        (HIT, 2, 3),
        (MISS, 1, 2),
        (SYNCHRONOUS, 3, 4),
        (SYNCHRONOUS, 3, 4),
        (SYNCHRONOUS, 0, 1),
        (FIRST, 2, 3),
        (HIT, 2, 3),
    ]
    branches = defaultdict(list)
    for s in trace.spans:
        if s.operation is TREE:
            branches[s.round].append(s.num_tokens)
    assert [branches[index] for index in range(7)] == [[3, 3], [3], [2], [], [], [], [3, 3]]
    first_steps = {s.round: s.num_tokens for s in reversed(trace.spans) if s.operation is STEP}
    assert first_steps == {0: 1, 2: 1, 3: 1, 4: 2, 6: 1}, "two tokens after a full acceptance of SD, and only there"


def test_a_late_build_holds_up_the_decoder_that_follows_it():
    """Built until 18.5 under SSD that waits; SD needs the draft, AR does not."""
    record = scripted_record(1.0, num_prompts=1, length=30)
    system = clockwork(record, tree_step_s=6.5)
    waits, abandons = ssd(2, 1), ssd(2, 1, on_late_build=LateBuild.ABANDON)
    second = {
        name: run(Script(first, then), record, system).rounds[1].end_s
        for name, first, then in (
            ("waits, SD", waits, Speculative(2)),
            ("waits, AR", waits, Autoregressive()),
            ("abandons, SD", abandons, Speculative(2)),
        )
    }
    # Outcome at 14.5, build 4.5..18.5 with tree steps 5.5..12 and 12..18.5.
    assert second == {"waits, SD": 33.0, "waits, AR": 25.0, "abandons, SD": 33.0}
    system = clockwork(record, tree_step_s=4.5, verify_s=5.0)
    ends = [run(Script(one, Speculative(2)), record, system).rounds[1].end_s for one in (waits, abandons)]
    assert ends == [14.5 + 9.5, 10.0 + 9.5], "known at 9.5, in the first tree step (5.5..10)"


def test_a_table_is_asked_before_every_round():
    """Two rows under one policy, the last one alone under another."""
    record = script("rrrr", "AAAA")
    table = PolicyTable(((1, Speculative(3)), (2, ssd(1, 1, Fallback.NONE))))
    trace = run(table, record, clockwork(record, second_row_s=1), batch_size=2)
    sources = defaultdict(list)
    for r in trace.rounds:
        sources[r.sequence].append(r.source)
    assert sources[1] == [FIRST, HIT, HIT] or sources[1] == [FIRST, HIT]
    assert sources[0][-1] is SYNCHRONOUS and sources[0][0] is FIRST
    assert trace.policy["kind"] == "table"


def test_a_controller_sees_every_row_of_every_round_in_order():
    script_ = Script(ssd(2, 2, Fallback.DRAFT_MISSING))
    record = record_of(*markov(3), num_prompts=5, length=15, seed=4)
    system = batched(system_of(record, residuals=(0.7, 1.0, 1.3), host_s=0.001), 0.001)
    trace = run(script_, record, system, batch_size=2)
    rounds = [(r.source, r.num_drafted, r.num_accepted) for r in trace.rounds]
    assert [(s.source, s.num_drafted, s.num_accepted) for s in script_.seen] == rounds[: len(script_.seen)]
    assert len(script_.seen) >= len(rounds) - 2, "at most the last round waits for its build"
    for seen, r in zip(script_.seen, trace.rounds, strict=False):
        assert seen.round_s == pytest.approx(r.end_s - r.start_s)
        at = [s for s in trace.spans if (s.sequence, s.round) == _first_row(trace, r) and s.start_s < r.end_s + 1]
        for value, operations in (
            (seen.verify_s, {VERIFY}),
            (seen.draft_s, {STEP}),
            (seen.build_s, {GLUE, TREE}),
        ):
            assert value == pytest.approx(sum(s.duration_s for s in at if s.operation in operations))


def _first_row(trace: Trace, r) -> tuple[int, int]:
    together = [other for other in trace.rounds if other.end_s == r.end_s]
    return together[0].sequence, together[0].index


def test_a_late_build_is_seen_once_it_has_ended_and_an_abandoned_one_without_its_time():
    record = script("AAA" + "r" + "rrrrrrrr")
    system = clockwork(record, verify_s=2.0)
    for rule, builds_s in (("wait", [7.0, 7.0, 7.0]), ("abandon", [7.0, 0.0, 0.0])):
        script_ = Script(ssd(2, 1, on_late_build=LateBuild(rule)))
        run(script_, record, system)
        assert [s.build_s for s in script_.seen][:3] == builds_s, rule


def test_a_controller_starts_afresh_in_every_run_and_for_every_target():
    started = []

    class Counting(Script):
        def start(self) -> Script:
            started.append(Script(*self.policies).start())
            return started[-1]

    record = record_of(*markov(3), num_prompts=4, length=10, seed=4)
    system = replace(system_of(record), placement=Placement(num_targets=2))
    totals(Counting(Speculative(2)), workload_of(record), system, [1, 2])
    assert len(started) == 4 and all(script_.seen for script_ in started)


def test_policies_that_downweight_do_not_change_into_one_another():
    record = record_of(*markov(3), num_prompts=4, length=30, seed=4)
    changes = Script(ssd(2, 3, downweight=0.5), ssd(2, 2), ssd(2, 3, downweight=0.5), ssd(2, 2))
    with pytest.raises(BadInput, match="downweight: must be 1 in policies that follow one another"):
        totals(changes, workload_of(record), system_of(record), range(20))


# ---------------------------------------------------------------------------------------------------------------- laws


def assert_conserved(trace: Trace) -> None:
    """No device does two things at once; rounds fill the decode time of their sequence; a round's draft work begins
    when the outcome before it is known; tokens add up."""
    by_device = defaultdict(list)
    for s in trace.spans:
        by_device[s.lane, s.device].append(s)
    for spans in by_device.values():
        spans.sort(key=lambda s: (s.start_s, s.end_s))
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))
    ends = {}
    for sequence in trace.sequences:
        rounds = [r for r in trace.rounds if r.sequence == sequence.index]
        assert [r.index for r in rounds] == list(range(len(rounds)))
        assert len(sequence.tokens) == sum(r.num_emitted for r in rounds) + min(1, len(sequence.tokens))
        assert sequence.arrival_s <= sequence.prefill_start_s <= sequence.decode_start_s
        if rounds:
            assert rounds[0].start_s == sequence.decode_start_s and rounds[-1].end_s == sequence.end_s
            assert all(before.end_s == after.start_s for before, after in pairwise(rounds))
        ends |= {(r.sequence, r.index): (r.start_s, r.end_s) for r in rounds}
    for s in trace.spans:
        start_s, end_s = ends[s.sequence, s.round]
        assert start_s <= s.start_s
        if s.operation in (VERIFY, STEP):
            assert s.end_s <= end_s
        if s.operation is VERIFY:
            assert s.end_s == end_s


def assert_totals_of(trace: Trace, found) -> None:
    """What was counted without recording is what the record holds."""
    for sequence in trace.sequences:
        i, rounds = sequence.index, [r for r in trace.rounds if r.sequence == sequence.index]
        assert found.num_tokens[i] == sum(r.num_emitted for r in rounds)
        assert found.num_rounds[i] == len(rounds)
        assert found.seconds[i] == pytest.approx(sequence.decode_s, rel=1e-9, abs=1e-12)
        assert found.end_s[i] == pytest.approx(sequence.end_s, rel=1e-9)
        lookups = [
            (before.source is not HIT, after.source)
            for before, after in pairwise(rounds)
            if after.source in metrics.LOOKUPS
        ]
        for side in range(2):
            assert found.num_lookups[side, i] == sum(s == side for s, _ in lookups)
            assert found.num_hits[side, i] == sum(s == side for s, source in lookups if source in metrics.HITS)


def alternating(policy: Policy) -> PolicyTable:
    """Another policy from two rows on."""
    fan_out = uniform_fan_out(2, 7)
    return PolicyTable(((1, policy), (2, SpeculativeSpeculative(2, fan_out, fan_out, Fallback.DRAFT_MISSING))))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    policy=policies(),
    system=systems(most_targets=3),
    batch_size=st.integers(1, 3),
    seed=st.integers(0, 1000),
    changes=st.booleans(),
)
def test_conservation_and_recording_changes_nothing(policy, system, batch_size, seed, changes):
    decider = alternating(policy) if changes and getattr(policy, "downweight", 1) == 1 else policy
    workload = replace(workload_of(system.agreement), batch_size=batch_size)
    trace = replicate(decider, workload, system, [seed])[0]
    assert_conserved(trace)
    assert_totals_of(trace, totals(decider, workload, system, [seed])[0])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(spread=0), seed=st.integers(0, 100))
def test_every_cost_passes_in_full(policy, system, seed):
    """Nothing varies: every span lasts exactly the location of its operation, slowed down beside the other lane."""
    trace = replicate(policy, workload_of(system.agreement), system, [seed])[0]
    built = {(s.sequence, s.round) for s in trace.spans if s.operation is GLUE}
    for s in trace.spans:
        beside = s.operation in (GLUE, TREE) or (s.operation is VERIFY and (s.sequence, s.round) in built)
        tokens = s.num_tokens / s.batch_size
        seconds = system.mean_s(s.lane, s.operation, tokens, s.context, beside=beside, batch_size=s.batch_size)
        assert s.duration_s == pytest.approx(float(seconds), rel=1e-9)
        assert s.duration_s > 0


@pytest.mark.parametrize("fallback", [Fallback.DRAFT_MISSING, Fallback.NONE])
def test_rows_of_a_batch_decode_as_they_do_alone(fallback):
    """A row's rounds are decided by its own numbers; only a batch that is drafted anew as a whole changes them."""
    record = record_of(*markov(3), num_prompts=9, length=24, seed=4)
    system = batched(system_of(record), 0.001)

    def accepted(policy, batch_size: int) -> dict[int, list[tuple]]:
        rounds = defaultdict(list)
        for r in run(policy, record, system, batch_size=batch_size, seed=7).rounds:
            rounds[r.sequence].append((r.source, r.num_accepted))
        return rounds

    assert accepted(ssd(3, 2, fallback), 4) == accepted(ssd(3, 2, fallback), 1)
    assert accepted(ssd(3, 2), 4) != accepted(ssd(3, 2), 1), "negative control"


def test_targets_with_a_draft_of_no_cost_do_not_meet():
    record = record_of(*markov(3), num_prompts=6, length=24, seed=4)
    free = system_of(record, draft_step_s=0.0, glue_s=0.0, tree_step_s=0.0, residuals=(1.0,))
    alone = totals_of(ssd(3, 2), record, free)
    shared = totals_of(ssd(3, 2), record, replace(free, placement=Placement(num_targets=3)))
    assert shared.seconds == pytest.approx(alone.seconds)
    busy = system_of(record, residuals=(1.0,))
    queued = totals_of(ssd(3, 2), record, replace(busy, placement=Placement(num_targets=3)))
    assert (queued.seconds >= totals_of(ssd(3, 2), record, busy).seconds - 1e-9).all()
    assert queued.seconds.sum() > totals_of(ssd(3, 2), record, busy).seconds.sum() * 1.01


# --------------------------------------------------------------------------------------------------------- determinism


def test_one_seed_is_one_trace_and_outcomes_do_not_depend_on_latency():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = system_of(record, residuals=(0.7, 1.0, 1.3))
    policy, workload = ssd(3, 2), workload_of(record)
    one, same, other = replicate(policy, workload, system, [1, 1, 2])
    assert one == same and one.digest() != other.digest()
    slower = system_of(record, verify_s=0.5)
    assert one.digest() == replicate(policy, workload, slower, [1])[0].digest()


def test_policies_under_one_seed_meet_the_same_noise():
    """The verifications of SD with and without a slower draft last as long, one by one."""
    record = record_of(*markov(3), num_prompts=3, length=20, seed=4)
    durations = [
        [s.duration_s for s in run(policy, record, system, seed=3).spans if s.operation is VERIFY]
        for policy, system in (
            (Speculative(2), system_of(record, residuals=(0.7, 1.0, 1.3))),
            (Speculative(2), system_of(record, residuals=(0.7, 1.0, 1.3), draft_step_s=0.1)),
        )
    ]
    assert durations[0] == pytest.approx(durations[1])


def test_no_clock_of_the_machine_and_no_global_randomness_leaks_in(monkeypatch):
    record = record_of(*markov(3), num_prompts=3, length=12, seed=4)
    system, workload = system_of(record, residuals=(0.7, 1.0, 1.3)), workload_of(record)
    expected = replicate(ssd(3, 2), workload, system, [1])[0]

    def forbidden(*_):
        raise AssertionError("the machine's clock or global randomness was asked")

    for name in ("time", "time_ns", "monotonic", "perf_counter", "process_time", "sleep"):
        monkeypatch.setattr(time, name, forbidden)
    for name in ("random", "rand", "randint", "uniform", "choice"):
        monkeypatch.setattr(np.random, name, forbidden)
    assert replicate(ssd(3, 2), workload, system, [1])[0] == expected


# --------------------------------------------------------------------------------------------------- long runs, limits


def test_a_million_short_rounds_lose_no_time():
    """A microsecond each; the clock runs on for 100,000 rounds at a time."""
    record = scripted_record(0.0, num_prompts=100, length=1001)
    system = system_of(record, verify_s=1e-6)
    runs = totals(Autoregressive(), workload_of(record), system, range(10))
    assert sum(run.num_rounds.sum() for run in runs) == 1_000_000
    assert mean_of(runs).seconds.sum() == pytest.approx(0.1, rel=1e-10)


def test_times_too_short_for_the_clock_are_not_lost_in_silence():
    record = scripted_record(0.0, num_prompts=2, length=4)
    for record_it in (True, False):
        system = system_of(record, verify_s=1e-20, host_s=1.0)
        with pytest.raises(RunFailed, match="the clock stands still"):
            Timeline(Autoregressive(), workload_of(record), system, 0, record=record_it).run()


def test_memory_does_not_grow_with_the_number_of_runs():
    record = record_of(*markov(3), num_prompts=4, length=20, seed=4)
    system, workload = system_of(record, residuals=(0.7, 1.0, 1.3)), workload_of(record)

    def peak(num: int) -> int:
        tracemalloc.start()
        totals(ssd(3, 2), workload, system, range(num))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(5)
    assert peak(60) < 1.5 * peak(20) + 60 * 3000, "only the totals of a run stay"


def test_tables_of_a_controller_that_tries_ever_new_lists_are_bounded():
    lists = [SpeculativeSpeculative(2, (n % 4, n // 4 % 4, n // 16), (1, 1, 1)) for n in range(64)]
    record = record_of(*markov(3), num_prompts=8, length=40, seed=4)
    timeline = Timeline(Script(*lists), workload_of(record), system_of(record), 0)
    timeline.run()
    assert 1 < len(timeline._tables) <= MAX_TABLES and 1 < len(timeline.stage._laws) <= MAX_TABLES
    durations = Durations(system_of(record))
    durations._builds = dict.fromkeys(((1, n, 0, 0, 0) for n in range(MAX_KEPT)), ())
    durations.builds(1, 1, 1, 5, 1)
    assert len(durations._builds) == 1


@pytest.mark.parametrize("cap", [0, 1])
def test_nothing_to_decode(cap):
    record = record_of(*markov(3), num_prompts=3, length=12, seed=4)
    for policy in (Autoregressive(), ssd(2, 1)):
        trace = run(policy, record, clockwork(record, second_row_s=1), max_new_tokens=cap, batch_size=2)
        assert [len(s.tokens) for s in trace.sequences] == [cap] * 3 and not trace.rounds
        assert totals_of(policy, record, max_new_tokens=cap).seconds.tolist() == [0, 0, 0]


# ----------------------------------------------------------------------------------------------------------- bad input


def test_impossible_placements_are_refused():
    for name in ("num_draft_devices", "num_targets"):
        with pytest.raises(BadInput, match=f"placement.{name}: must be an integer >= 1, got 0"):
            Placement(**{name: 0})
    record = record_of(*markov(3), num_prompts=2, length=8, seed=4)
    system = replace(system_of(record), placement=Placement(num_targets=2), overlaps=False)
    with pytest.raises(BadInput, match=r"placement.num_targets: must be 1 where target and draft do not work"):
        totals_of(ssd(2, 1), record, system)


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_impossible_times_are_refused_at_the_start(value):
    record = record_of(*markov(3), num_prompts=2, length=8, seed=4)
    system = system_of(record)
    dict.__setitem__(system.host_s, next(iter(system.host_s)), value)  # past the system's own check
    with pytest.raises(BadInput, match=r"host_s\.\w+: must be a finite number >= 0"):
        totals_of(ssd(2, 1), record, system)


def test_messages_that_never_arrive_are_refused_at_the_start():
    record = record_of(*markov(3), num_prompts=2, length=8, seed=4)
    system = replace(system_of(record), placement=Placement(transfer_bytes_per_s=1e-320))
    with pytest.raises(BadInput, match="time of a message: must be a finite number >= 0, got inf"):
        totals_of(ssd(2, 1), record, system)


def test_batches_that_were_not_profiled_are_refused():
    record = record_of(*markov(3), num_prompts=4, length=8, seed=4)
    with pytest.raises(BadInput, match=r"number of rows must be in the profiled range 1\.\.1, got 3"):
        totals_of(Speculative(2), record, system_of(record), batch_size=3)


def test_locations_of_batches_are_those_of_the_table():
    """Means of rows lie between what was profiled: rows, tokens and contexts, each linear between the knots."""
    record = scripted_record(0.0, num_prompts=1, length=4)
    system = batched(system_of(record), 0.001)
    tables = dict(system.latency.operations)
    key = (Lane.TARGET, VERIFY)
    rng = np.random.default_rng(3)

    def knots():
        return {width: tuple((at, rng.random()) for at in (0, 9, 17, 4096)) for width in (1, 3, 8)}

    tables[key] = replace(tables[key], knots=knots(), batched={2: knots(), 5: knots()})
    durations = Durations(replace(system, latency=LatencyModel(tables)))
    for _ in range(200):
        rows = int(rng.integers(1, 6))
        tokens, context = int(rng.integers(rows, 8 * rows)), int(rng.integers(0, 30 * rows))
        expected = tables[key].location_s(tokens / rows, context / rows, rows)
        assert durations.verify_s(rows, tokens, context) == pytest.approx(float(expected))
