"""The draft in a thread: the same texts, laws and rounds as in one thread; its failures are noticed."""

import os
import threading
import time
import warnings

import pytest
import torch

from executor import concurrency
from executor.concurrency import open_runner
from executor.draft_client import DraftFailed
from executor.execute import execute
from executor.profiling import LatencyGrid, measure_latency
from executor.toy_model import FakePair, HashModel, serial_runner
from sim.errors import BadInput
from sim.metrics import overlap
from sim.policy import Autoregressive, Fallback, LateBuild, Speculative, SpeculativeSpeculative
from sim.trace import Lane, Operation
from sim.workload import Workload

SSD = SpeculativeSpeculative(3, (2,) * 4, (2,) * 4)
POLICIES = [
    Autoregressive(),
    Speculative(0),
    Speculative(3),
    SSD,
    SpeculativeSpeculative(3, (2,) * 4, (8,), Fallback.NONE),
    SpeculativeSpeculative(3, (1,) * 4, (1,) * 4, Fallback.DRAFT_MISSING),
    SpeculativeSpeculative(3, (2,) * 4, (1,) * 4, Fallback.NGRAM),
    SpeculativeSpeculative(3, (2,) * 4, (2,) * 4, on_late_build=LateBuild.ABANDON),
]
PROMPTS = ((1, 2, 3, 1, 2), (4, 5), (6, 7, 8))


class SlowModel(HashModel):
    """Its passes take a while, in which other threads may run."""

    pass_s = 0.0

    def feed(self, *args, **kwargs):
        time.sleep(self.pass_s)
        return super().feed(*args, **kwargs)

    def append_branches(self, *args):
        time.sleep(self.pass_s)
        return super().append_branches(*args)


class FailingModel(HashModel):
    """Does something else in its `num`-th pass."""

    def __init__(self, num: int, instead) -> None:
        super().__init__(16, 0, 1, 0.7)
        self._num, self._instead = num, instead

    def feed(self, *args, **kwargs):
        self._num -= 1
        if self._num == 0:
            self._instead()
        return super().feed(*args, **kwargs)


def models(kind=HashModel) -> dict[str, HashModel]:
    return {"target": kind(16, 0), "draft": kind(16, 0, own_seed=1, agreement=0.7)}


def workload(temperature: float = 0.0, batch_size: int = 1) -> Workload:
    return Workload("test", PROMPTS, 16, temperature, stop_ids=(3,), batch_size=batch_size)


def two_threads(own: dict[str, HashModel], answer_timeout_s: float = 60.0):
    return open_runner(FakePair(models=own), "streams", answer_timeout_s=answer_timeout_s)


@pytest.fixture
def threaded():
    before = os.sched_getaffinity(0), torch.get_num_threads(), threading.active_count()
    with two_threads(models()) as runner:
        yield runner
    assert (os.sched_getaffinity(0), torch.get_num_threads(), threading.active_count()) == before


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_two_threads_decode_what_one_decodes(policy, temperature, batch_size, threaded) -> None:
    rules, alone = workload(temperature, batch_size), models()
    expected = execute(policy, rules, serial_runner(alone["target"], alone["draft"]), seed=5)
    assert execute(policy, rules, threaded, seed=5).digest() == expected.digest()


def test_each_role_has_a_core_where_there_are_two(threaded) -> None:
    identity = threaded.identity()
    assert identity["threads"] == {"target": 1, "draft": 1}
    assert (identity["concurrency"], identity["overlap"], identity["device"]) == ("streams", "two threads", "cpu")
    if "pinned_cores" in identity:
        assert identity["pinned_cores"]["target"] != identity["pinned_cores"]["draft"]


def test_the_build_runs_beside_the_verification() -> None:
    own = models(SlowModel)
    with two_threads(own) as runner:
        own["target"].pass_s, own["draft"].pass_s = 0.03, 0.005
        trace = execute(SSD, workload(), runner)
    # A build is five passes, and a verification lasts as long as six; the build beside the last one may be cut off.
    hidden = overlap([trace])
    assert hidden is not None and hidden.value > 0.5


def test_profiling_runs_in_threads_too(threaded) -> None:
    grid = LatencyGrid(max_speculation_length=1, branch_counts=(1,), contexts=(8,))
    profile = measure_latency(threaded, grid, budget_s=0.0, min_blocks=1)
    timed = {(s.lane, s.operation, s.busy) for s in profile.samples}
    assert {(Lane.TARGET, Operation.VERIFY, busy) for busy in (False, True)} <= timed
    assert {(Lane.DRAFT, Operation.TREE_STEP, busy) for busy in (False, True)} <= timed


def explode() -> None:
    raise RuntimeError("the draft model broke")


@pytest.mark.parametrize("num", [1, 3])  # the prefill, a step
def test_an_exception_in_the_thread_ends_the_run_or_makes_it_ar(num: int) -> None:
    rules = workload(batch_size=3)
    expected = [s.tokens for s in execute(Autoregressive(), rules, serial_runner(*models().values())).sequences]
    with two_threads(models() | {"draft": FailingModel(num, explode)}) as runner:
        trace = execute(Speculative(3), rules, runner, on_draft_failure="continue")
        assert [s.tokens for s in trace.sequences] == expected
        assert "the draft model broke" in trace.meta["draft_failure"]["message"]
    with (
        two_threads(models() | {"draft": FailingModel(num, explode)}) as runner,
        pytest.raises(DraftFailed, match=r"(?s)Traceback.*in feed.*the draft model broke"),
    ):
        execute(SSD, rules, runner)


def test_a_thread_that_hangs_is_left_behind_and_says_where() -> None:
    release = threading.Event()
    with two_threads(models() | {"draft": FailingModel(2, release.wait)}, answer_timeout_s=1.0) as runner:
        with pytest.raises(DraftFailed, match=r"(?s)left behind.*test_draft_thread\.py.*in feed"):
            execute(Speculative(3), workload(), runner)
        release.set()


def test_one_core_means_serial_said_aloud() -> None:
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    try:
        with (
            pytest.warns(UserWarning, match="overlap: none"),
            open_runner(FakePair(models=models()), "auto") as runner,
        ):
            assert runner.concurrency == "serial"
        with pytest.raises(BadInput, match="needs two cores"), open_runner(FakePair(models=models()), "processes"):
            pass
    finally:
        os.sched_setaffinity(0, affinity)


def test_more_threads_than_cores_are_said_aloud(monkeypatch) -> None:
    monkeypatch.setattr(concurrency, "num_usable_cores", lambda: 1)
    with (
        pytest.warns(UserWarning, match="have 2 threads, but affinity and control group 1 cores"),
        two_threads(models()),
    ):
        pass
    monkeypatch.setattr(concurrency, "num_usable_cores", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with two_threads(models()):
            pass
