"""Tables by batch size and adaptive choices: the executor changes policy when and as the simulator does."""

import random
from dataclasses import dataclass, replace

import pytest

import executor.execute
from executor.execute import execute
from executor.profiling import measure_agreement
from executor.toy_model import HashModel, serial_runner
from sim.decider import RoundSeen
from sim.errors import BadInput
from sim.hill_climbing import HillClimbing
from sim.policy import Autoregressive, Fallback, Policy, PolicyTable, Speculative, SpeculativeSpeculative
from sim.simulate import simulate
from sim.trace import Operation, Source
from sim.workload import Workload
from tests.executor.test_loops import check_counters, ssd, texts
from tests.executor.test_replay import PROMPTS, VOCAB_SIZE, for_rows, hash_runner, rounds_of
from tests.executor.tiny_models import prompts
from tests.sim.toy import system_of

AR = Autoregressive()
POOL = [
    AR,
    Speculative(0),
    Speculative(1),
    Speculative(4),
    ssd(2, 1),
    SpeculativeSpeculative(3, (1, 1, 1, 2), (2, 1, 0, 3)),
    SpeculativeSpeculative(5, (2, 0, 0, 1, 0, 1), (1, 1, 1, 1, 1, 1), Fallback.DRAFT_MISSING, on_late_build="abandon"),
    SpeculativeSpeculative(4, (2,) * 5, (1,) * 5, Fallback.NGRAM),
    SpeculativeSpeculative(3, (1, 1, 1, 2), (2,), Fallback.NONE),
]


@dataclass(frozen=True)
class Schedule:
    """An adaptive choice that goes through policies, each for `rounds` rows of rounds that it was told of."""

    policies: tuple[Policy, ...]
    rounds: int = 1
    told: list[RoundSeen] | None = None

    name = "schedule"

    def to_dict(self):
        return {"kind": "schedule"}

    def start(self):
        return _Scheduled(self)


class _Scheduled:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._num_seen = schedule, 0

    @property
    def policy(self) -> Policy:
        policies = self._schedule.policies
        return policies[self._num_seen // self._schedule.rounds % len(policies)]

    def observe(self, seen: RoundSeen) -> None:
        self._num_seen += 1
        if self._schedule.told is not None:
            self._schedule.told.append(seen)


CASES = {"one": ((), 1), "batches of 3": ((3,), 3), "batches of 4": ((), 4)}


@pytest.fixture(scope="module", params=CASES)
def decoded(request):
    stop_ids, batch_size = CASES[request.param]
    runner = hash_runner()
    rules = Workload("toy", PROMPTS, 40, stop_ids=stop_ids, batch_size=batch_size)
    record = measure_agreement(runner, rules, num_candidates=VOCAB_SIZE)
    return runner, rules, for_rows(system_of(record, verify_s=1.0), batch_size)  # no build is late


def with_policies(trace):
    named = {(r.sequence, r.index): r.policy for r in trace.rounds}
    return [(*row, named[row[:2]]) for row in rounds_of(trace)]


TABLES = [
    PolicyTable(((1, ssd(3, 2)), (3, AR))),
    PolicyTable(((1, AR), (2, Speculative(3)), (4, ssd(2, 1, Fallback.DRAFT_MISSING)))),
    PolicyTable(((1, ssd(4, 1, Fallback.NGRAM)), (2, ssd(2, 2)), (3, ssd(3, 1, Fallback.NONE)))),
    PolicyTable(((1, Speculative(0)), (2, AR))),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_rounds_of_a_table_are_the_simulated_ones(table, decoded) -> None:
    runner, rules, system = decoded
    executed = execute(table, rules, runner)
    assert with_policies(executed) == with_policies(simulate(table, rules, system))
    assert executed.policy == table.to_dict()
    check_counters(executed, rules)


@pytest.mark.parametrize("seed", range(6))
def test_the_rounds_of_any_schedule_are_the_simulated_ones(seed: int, decoded) -> None:
    runner, rules, system = decoded
    chance = random.Random(seed)
    schedule = Schedule(tuple(chance.choices(POOL, k=25)), rounds=chance.choice((1, 2, 3)))
    executed = execute(schedule, rules, runner)
    assert with_policies(executed) == with_policies(simulate(schedule, rules, system))
    assert len({r.policy for r in executed.rounds}) > 1
    assert texts(executed) == texts(execute(AR, replace(rules, batch_size=1), runner))


def test_what_the_draft_missed_while_the_target_went_alone_is_caught_up(self_serial) -> None:
    """A draft that is the target stays right in every round, whatever rounds without it came between."""
    K = Speculative(3)
    schedules = [(K, AR, AR, K), (AR, K, AR), (ssd(3), AR, ssd(3), Speculative(0)), (AR, ssd(2, 1), ssd(4, 2), K, AR)]
    own = serial_runner(HashModel(16, 0), HashModel(16, 0))
    for runner, texts_ in ((own, PROMPTS), (self_serial, prompts(3, 9))):
        for batch_size in (1, 3):
            for schedule in schedules:
                rules = Workload("test", texts_, 40, batch_size=batch_size)
                trace = execute(Schedule(schedule, batch_size), rules, runner)
                assert {r.policy for r in trace.rounds} == {policy.name for policy in schedule}
                assert all(r.num_accepted == r.num_drafted for r in trace.rounds)


def test_rounds_that_draft_nothing_never_hang_and_are_ar() -> None:
    rules = Workload("toy", PROMPTS, 20, batch_size=3)
    expected = execute(AR, rules, hash_runner())
    for decider in (Speculative(0), PolicyTable(((1, AR), (2, Speculative(0)))), Schedule((Speculative(0), AR))):
        trace = execute(decider, rules, hash_runner())
        assert rounds_of(trace) == rounds_of(expected)
        assert {s.operation for s in trace.spans} == {Operation.PREFILL, Operation.VERIFY}


WEIGHTED = SpeculativeSpeculative(3, (4,) * 4, (4,) * 4, downweight=0.5)


@pytest.mark.parametrize("schedule", [(WEIGHTED, ssd(3)), (ssd(3, 6), WEIGHTED)])
def test_a_down_weighted_speculation_in_hand_is_refused_as_in_the_simulator(schedule) -> None:
    rules = Workload("toy", PROMPTS, 40, temperature=1.0)
    runner = hash_runner()
    record = measure_agreement(runner, rules, num_candidates=VOCAB_SIZE)
    rule = "downweight: must be 1 in policies that follow one another"
    with pytest.raises(BadInput, match=rule):
        simulate(Schedule(schedule), rules, system_of(record))
    with pytest.raises(BadInput, match=rule):
        execute(Schedule(schedule), rules, runner)
    for between in (AR, Speculative(2)):  # nothing is in hand
        execute(Schedule((*schedule[:1], between, *schedule[1:], between)), rules, runner)
    with pytest.raises(BadInput, match="downweight: must be 1 at temperature 0"):
        execute(Schedule(schedule), replace(rules, temperature=0.0), runner)


def test_what_is_no_decider_is_refused() -> None:
    for wrong in ("sd", HillClimbing, None):
        with pytest.raises(BadInput, match="policy: must be a policy, a table"):
            execute(wrong, Workload("toy", PROMPTS, 4), hash_runner())


@pytest.mark.parametrize("chosen", ["sd", None, PolicyTable(((1, AR),))])
def test_an_adaptive_choice_of_anything_but_a_policy_is_refused(chosen) -> None:
    with pytest.raises(BadInput, match="policy of an adaptive choice: must be a single policy"):
        execute(Schedule((chosen,)), Workload("toy", PROMPTS, 4), hash_runner())


def test_prompts_are_checked_once_for_an_adaptive_choice(monkeypatch) -> None:
    checked = []
    monkeypatch.setattr(executor.execute, "check_room", lambda *_: checked.append(None))
    execute(Schedule((ssd(3), AR)), Workload("toy", PROMPTS, 20), hash_runner())
    assert len(checked) == 1


def test_a_controller_is_told_what_the_trace_says() -> None:
    told: list[RoundSeen] = []
    rules = Workload("toy", PROMPTS, 30, batch_size=3)
    trace = execute(Schedule((ssd(3, 2), AR, Speculative(2)), 9, told), rules, hash_runner())
    assert len(told) == len(trace.rounds)
    spans = {}
    for s in trace.spans:
        spans.setdefault((s.sequence // 3, s.round, s.operation), []).append(s)
    for seen, r in zip(told, trace.rounds, strict=True):
        assert (seen.source, seen.num_drafted, seen.num_accepted) == (r.source, r.num_drafted, r.num_accepted)
        assert (seen.policy.name, seen.round_s) == (r.policy, r.end_s - r.start_s)

        def of(operation, r=r):
            return spans.get((r.sequence // 3, r.index, operation), [])

        (verify,) = of(Operation.VERIFY)
        assert (seen.verify_s, seen.batch_size) == (verify.duration_s, verify.batch_size)
        steps, glue, tree = of(Operation.DRAFT_STEP), of(Operation.GLUE), of(Operation.TREE_STEP)
        assert seen.draft_s == (steps[-1].end_s - steps[0].start_s if steps else 0.0)
        assert seen.build_s == (tree[-1].end_s - glue[0].start_s if tree else 0.0)
    assert {seen.source for seen in told} >= {Source.FIRST, Source.HIT, Source.SYNCHRONOUS}
    assert any(seen.build_s for seen in told) and any(seen.draft_s for seen in told)


def test_nothing_of_a_controller_carries_over_to_the_next_run() -> None:
    rules = Workload("toy", PROMPTS, 40, batch_size=2, temperature=1.0)
    schedule = Schedule((ssd(3, 2), AR, Speculative(2)), 7)
    runner = hash_runner()
    alone = execute(schedule, rules, runner, seed=3)
    execute(Schedule((Speculative(4), AR)), rules, runner, seed=8)
    again = execute(schedule, rules, runner, seed=3)
    assert with_policies(again) == with_policies(alone)
    assert again.digest() == alone.digest()


def test_a_real_controller_decodes_the_targets_text(tiny_serial) -> None:
    rules = Workload("test", prompts(4, 9), 48, batch_size=2)
    trace = execute(HillClimbing((0, 2, 4), (4, 8), interval=6), rules, tiny_serial)
    assert texts(trace) == texts(execute(AR, replace(rules, batch_size=1), tiny_serial))
    assert len({r.policy for r in trace.rounds}) > 1


def test_a_workload_that_does_not_fit_is_refused_before_an_adaptive_run_begins() -> None:
    target, draft = HashModel(16, 0, max_positions=20), HashModel(16, 0)
    for prompt, rule in (((1,) * 13, "must fit the target's 20 positions"), ((1, 99), "token ids must be below 16")):
        with pytest.raises(BadInput, match=rule):
            execute(Schedule((Speculative(2), AR)), Workload("toy", (prompt,), 8), serial_runner(target, draft))
    assert target.num_forwards == draft.num_forwards == 0
