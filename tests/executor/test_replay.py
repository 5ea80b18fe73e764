"""The executor runs the policies that the simulator plans: at temperature 0 round for round the same."""

from dataclasses import replace

import pytest

from executor.execute import execute
from executor.profiling import measure_agreement
from executor.toy_model import HashModel, serial_runner
from sim.errors import BadInput
from sim.latency import LatencyModel
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.simulate import simulate
from sim.system import System
from sim.trace import Operation, Source
from sim.workload import Workload
from tests.sim.toy import system_of

VOCAB_SIZE = 8
PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 1, 2), (4, 4), (7, 3, 2, 6), (2, 5, 1))
POLICIES = [
    Autoregressive(),
    *(Speculative(K) for K in (0, 1, 4)),
    *(
        SpeculativeSpeculative(K, after_hit, after_miss, fallback)
        for fallback in (Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NGRAM)
        for K, after_hit, after_miss in ((1, (1, 1), (2, 0)), (3, (1, 1, 1, 2), (2, 1, 0, 3)), (5, (0,) * 6, (1,) * 6))
    ),
    SpeculativeSpeculative(3, (1, 1, 1, 2), (2,), Fallback.NONE),
    SpeculativeSpeculative(3, (0, 0, 0, 0), (0,), Fallback.NONE),
    SpeculativeSpeculative(4, (2,) * 5, (1,) * 5, Fallback.NGRAM, on_late_build="abandon"),
]


def hash_runner(agreement: float = 0.7):
    return serial_runner(HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0, own_seed=1, agreement=agreement))


def rounds_of(trace):
    rows = [
        (r.sequence, r.index, r.source, r.num_drafted, r.num_accepted, r.num_emitted, r.context) for r in trace.rounds
    ]
    return sorted(rows)


CASES = {"cap": ((), 1), "stop": ((3,), 1), "batches of 3": ((3,), 3), "batches of 4": ((), 4)}


@pytest.fixture(scope="module", params=CASES)
def decoded(request):
    """A runner, a workload and the system of its agreement record."""
    stop_ids, batch_size = CASES[request.param]
    runner = hash_runner()
    rules = Workload("toy", PROMPTS, 40, stop_ids=stop_ids, batch_size=batch_size)
    record = measure_agreement(runner, rules, num_candidates=VOCAB_SIZE)
    return runner, rules, for_rows(system_of(record), batch_size)


def for_rows(system: System, num_rows: int) -> System:
    """Operations on up to so many rows take as long as on one."""
    tables = {
        key: replace(table, batched={num_rows + 1: table.knots}) for key, table in system.latency.operations.items()
    }
    return replace(system, latency=LatencyModel(tables))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_executed_rounds_are_the_simulated_ones(policy, decoded) -> None:
    runner, rules, system = decoded
    executed = execute(policy, rules, runner)
    assert rounds_of(executed) == rounds_of(simulate(policy, rules, system))
    assert [s.stopped for s in executed.sequences] == system.agreement.stopped.tolist()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_executed_operations_are_the_simulated_ones(policy, decoded) -> None:
    """Where the draft model drafts and builds in every round; elsewhere it is fed more at a time than is simulated."""
    runner, rules, system = decoded
    executed, simulated = execute(policy, rules, runner), simulate(policy, rules, system)
    compared = [Operation.VERIFY, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP]
    if isinstance(policy, SpeculativeSpeculative):
        always_builds = all(policy.fan_out(source)[0] for source in (Source.HIT, Source.MISS))
        if not (always_builds and policy.waits_for_draft(Source.MISS)):
            compared = [Operation.VERIFY]
    for operation in compared:
        assert operations_of(executed, operation) == operations_of(simulated, operation)


def operations_of(trace, operation: Operation):
    spans = [s for s in trace.spans if s.operation is operation]
    return sorted((s.sequence, s.round, s.num_tokens, s.context, s.batch_size) for s in spans)


def test_the_rounds_compared_are_of_every_kind(decoded) -> None:
    runner, rules, _ = decoded
    rounds = [r for policy in POLICIES for r in execute(policy, rules, runner).rounds]
    sources = {r.source for r in rounds}
    assert sources | {Source.REDRAFTED} == set(Source)
    assert (Source.REDRAFTED in sources) or rules.batch_size < 4
    assert {0, 1, 2} <= {r.num_accepted for r in rounds if r.num_drafted == 5}


def test_a_filler_is_accepted_as_often_as_the_law_says() -> None:
    """At temperature 0 a uniform token is the argmax one time in V."""
    policy = SpeculativeSpeculative(1, (0, 0), (0, 0), Fallback.FILLER)
    rules = Workload("toy", PROMPTS, 300)
    rounds = [r for seed in range(2) for r in execute(policy, rules, hash_runner(), seed).rounds if r.num_drafted]
    accepted = sum(r.num_accepted for r in rounds)
    expected, spread = len(rounds) / VOCAB_SIZE, (len(rounds) * 7 / 64) ** 0.5
    assert abs(accepted - expected) < 4 * spread  # fails for one seed in 16,000


def test_down_weighting_means_nothing_without_sampling() -> None:
    policy = SpeculativeSpeculative(1, (1, 1), (1, 1), downweight=0.5)
    with pytest.raises(BadInput, match="downweight: must be 1 at temperature 0"):
        execute(policy, Workload("toy", PROMPTS, 4), hash_runner())
