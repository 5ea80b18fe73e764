"""Two processes decode what one decodes, side by side; settings are checked, and the caller is left as it was."""

import itertools
import multiprocessing
import os

import pytest
import torch

from executor.concurrency import open_runner
from executor.draft_failure import OnDraftFailure
from executor.execute import execute
from executor.fault_check import _HARMLESS, NUM_TOKENS
from executor.profiling import LatencyGrid, measure_agreement, measure_latency
from sim.decider import RoundSeen
from sim.errors import BadInput
from sim.metrics import overlap
from sim.policy import Autoregressive, Fallback, LateBuild, PolicyTable, Speculative, SpeculativeSpeculative
from sim.trace import Lane, Operation
from sim.workload import Workload
from tests.executor.test_decider import Schedule
from tests.executor.tiny_models import prompts

SSD = SpeculativeSpeculative(4, (2,) * 5, (3,) * 5)
POLICIES = [
    Autoregressive(),
    *(Speculative(K) for K in (0, 1, 4)),
    SSD,
    SpeculativeSpeculative(4, (2,) * 5, (8,), Fallback.NONE),
    SpeculativeSpeculative(1, (0, 0), (0, 0)),
    *(SpeculativeSpeculative(4, (2,) * 5, (1,) * 5, fallback) for fallback in (Fallback.NGRAM, Fallback.FILLER)),
    PolicyTable(((1, Speculative(2)), (2, SSD), (3, Autoregressive()))),
]
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores in the affinity mask")


@pytest.fixture(scope="module")
def two_processes(tiny_pair):
    before = os.sched_getaffinity(0), torch.get_num_threads()
    with open_runner(tiny_pair, "processes", dtype="float64") as runner:
        child = runner.draft.process
        yield runner
    assert not child.is_alive()
    assert multiprocessing.active_children() == []
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


@needs_two_cores
@pytest.mark.parametrize(("temperature", "batch_size"), [(0.0, 1), (1.0, 3)])  # two threads run all four pairs
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_two_processes_decode_what_one_decodes(policy, temperature, batch_size, two_processes, tiny_serial) -> None:
    texts = prompts(2, 9) + prompts(2, 4)
    rules = Workload("test", texts, 20, temperature, stop_ids=(17,), batch_size=batch_size)
    together, alone = (execute(policy, rules, runner, seed=5) for runner in (two_processes, tiny_serial))
    assert together.digest() == alone.digest()
    operations = [
        sorted((s.sequence, s.round, s.lane, s.operation, s.num_tokens, s.context, s.batch_size) for s in trace.spans)
        for trace in (together, alone)
    ]
    # The build beside the last verification may still run when the sequence is over; it is finished and recorded too.
    assert operations[0] == operations[1]


@needs_two_cores
def test_a_controller_hears_of_builds_when_they_have_ended(two_processes, tiny_serial) -> None:
    """In the order of the rounds, with the time that the draft's own spans say."""
    told: list[RoundSeen] = []
    rules = Workload("test", prompts(4, 9), 48, batch_size=2)
    schedule = Schedule((SSD, Speculative(2), Autoregressive()), 8, told)
    trace = execute(schedule, rules, two_processes)
    texts = [[s.tokens for s in t.sequences] for t in (trace, execute(Autoregressive(), rules, tiny_serial))]
    assert texts[0] == texts[1]
    assert len(trace.rounds) - 4 <= len(told) <= len(trace.rounds)  # the last build may outlive its batch
    build_ends = {(s.sequence // 2, s.round): s.end_s for s in trace.spans if s.operation is Operation.TREE_STEP}
    glue_starts = {(s.sequence // 2, s.round): s.start_s for s in trace.spans if s.operation is Operation.GLUE}
    drafted = {(s.sequence // 2, s.round) for s in trace.spans if s.operation is Operation.DRAFT_STEP}
    for seen, r in zip(told, trace.rounds, strict=False):
        place = (r.sequence // 2, r.index)
        assert (seen.policy.name, seen.round_s) == (r.policy, r.end_s - r.start_s)
        assert seen.build_s == (build_ends[place] - glue_starts[place] if place in build_ends else 0.0)
        assert (seen.draft_s > 0) == (place in drafted)
    assert any(seen.build_s for seen in told)


@needs_two_cores
@pytest.mark.parametrize("on_draft_failure", list(OnDraftFailure))
@pytest.mark.parametrize("name", _HARMLESS)
def test_faults_that_leave_the_draft_alive_lose_nothing(name, on_draft_failure, two_processes) -> None:
    rules = Workload("test", prompts(2, 9), NUM_TOKENS)
    aftermath = _HARMLESS[name](name, on_draft_failure, rules, two_processes)
    assert aftermath.is_right, aftermath
    assert not aftermath.tokens_lost


@needs_two_cores
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_abandoned_builds_and_down_weighting_decode_what_one_process_decodes(
    temperature, two_processes, tiny_serial
) -> None:
    """How much of a build is run is a matter of time; what is decoded is not."""
    downweight = 0.5 if temperature else 1.0
    policy = SpeculativeSpeculative(4, (2,) * 5, (3,) * 5, downweight=downweight, on_late_build=LateBuild.ABANDON)
    rules = Workload("test", prompts(4, 9), 32, temperature, stop_ids=(17,), batch_size=2)
    together, alone = (execute(policy, rules, runner, seed=5) for runner in (two_processes, tiny_serial))
    assert together.digest() == alone.digest()
    steps = [sum(s.operation is Operation.TREE_STEP for s in trace.spans) for trace in (together, alone)]
    assert steps[0] <= steps[1]


@needs_two_cores
def test_the_build_runs_beside_the_verification(two_processes) -> None:
    trace = execute(SSD, Workload("test", prompts(2, 9), 32), two_processes)
    assert overlap([trace]).value > 0


def test_one_process_does_one_thing_at_a_time(tiny_serial) -> None:
    trace = execute(SSD, Workload("test", prompts(2, 9), 32), tiny_serial)
    assert {s.lane for s in trace.spans} == set(Lane)
    assert all(first.end_s <= second.start_s for first, second in itertools.pairwise(trace.spans))
    assert overlap([trace]).value == 0


@needs_two_cores
def test_a_runner_survives_a_failed_sequence(two_processes, tiny_serial, monkeypatch) -> None:
    rules = Workload("test", prompts(1, 9), 12)
    honest = two_processes.target.model.append
    monkeypatch.setattr(
        two_processes.target.model, "append", lambda *args, **kwargs: honest(*args, **kwargs) * torch.nan
    )
    with pytest.raises(FloatingPointError):
        execute(SSD, rules, two_processes)
    monkeypatch.undo()
    again, alone = (execute(SSD, rules, runner) for runner in (two_processes, tiny_serial))
    assert again.digest() == alone.digest()


@needs_two_cores
def test_identity_tells_what_was_read_back(two_processes, tiny_serial, tiny_pair) -> None:
    identity = two_processes.identity()
    assert identity["threads"] == {"target": 1, "draft": 1}
    assert identity["pinned_cores"]["target"] != identity["pinned_cores"]["draft"]
    assert os.sched_getaffinity(two_processes.draft.process.pid) == {identity["pinned_cores"]["draft"]}
    assert identity["sha256"] == tiny_pair.hashes
    assert (identity["dtype"], identity["concurrency"]) == ("float64", "processes")
    assert tiny_serial.identity()["overlap"] == "none"
    told = {"cpu_model", "num_cores", "device", "dtype", "attention", "python", "torch", "transformers", "numpy"}
    assert told <= identity.keys() & tiny_serial.identity().keys()


@needs_two_cores
def test_profiling_times_every_operation_idle_and_busy(two_processes) -> None:
    grid = LatencyGrid(max_speculation_length=2, branch_counts=(1, 4), contexts=(8, 16))
    profile = measure_latency(two_processes, grid, budget_s=0.0, min_blocks=2)
    assert profile.num_blocks == 2
    timed = {(s.lane, s.operation, s.busy) for s in profile.samples}
    draft = (Operation.PREFILL, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP, Operation.LOOKUP)
    operations = {(Lane.TARGET, o) for o in (Operation.PREFILL, Operation.VERIFY)} | {(Lane.DRAFT, o) for o in draft}
    assert timed == {(*operation, busy) for operation in operations for busy in (False, True)}
    rules = Workload("test", prompts(3, 9), 12)
    record = measure_agreement(two_processes, rules)
    assert record.lengths.tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"concurrency": "threads"}, "concurrency: must be one of"),
        ({"dtype": "int8"}, "dtype: must be one of"),
        ({"device": None}, "device: must be cpu, cuda or cuda:i"),
        ({"answer_timeout_s": 0}, "answer_timeout_s: must be a finite number > 0, got 0"),
        ({"answer_timeout_s": "6"}, "answer_timeout_s: must be a finite number > 0, got '6'"),
    ],
)
def test_unknown_settings_are_refused(self_draft_pair, setting, message: str) -> None:
    with pytest.raises(BadInput, match=message), open_runner(self_draft_pair, **setting):
        pass
