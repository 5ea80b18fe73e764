"""Whatever ends a run in the middle, the runner decodes the next one as if nothing had happened."""

import os

import pytest

from executor.concurrency import open_runner
from executor.device import num_usable_cores
from executor.execute import execute
from executor.toy_model import FakePair, HashModel, serial_runner
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.workload import Workload

SSD = SpeculativeSpeculative(3, (2,) * 4, (2,) * 4)
POLICIES = [Autoregressive(), Speculative(3), SSD, SpeculativeSpeculative(3, (1,) * 4, (1,) * 4, Fallback.NGRAM)]
RULES = Workload("test", ((1, 2, 3, 1, 2), (4, 5), (6, 7, 8)), 16, 1.0, stop_ids=(3,), batch_size=2)


def models() -> dict[str, HashModel]:
    return {"target": HashModel(16, 0), "draft": HashModel(16, 0, own_seed=1, agreement=0.7)}


@pytest.fixture(scope="module", params=["serial", "streams"])
def runner(request):
    with open_runner(FakePair(models=models()), request.param) as runner:
        yield runner


class Stop(BaseException):
    """Not an error, as a Ctrl-C is none."""


class Nth:
    """Raises when it is called the `num`-th time."""

    def __init__(self, num: int, error: BaseException) -> None:
        self._num, self._error = num, error

    def __call__(self, _given) -> None:
        self._num -= 1
        if self._num == 0:
            raise self._error


@pytest.mark.parametrize("error", [ValueError("from the caller"), Stop()], ids=["error", "interrupt"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("on_draft_failure", ["raise", "continue"])
def test_what_a_callback_raises_ends_the_run_and_nothing_else(on_draft_failure, policy, error, runner) -> None:
    alone = execute(policy, RULES, serial_runner(*models().values()), seed=5).digest()
    for callback, num in (("on_tokens", 1), ("on_tokens", 3), ("on_tokens", 6), ("progress", 1), ("progress", 3)):
        with pytest.raises(type(error)):
            execute(policy, RULES, runner, 9, on_draft_failure=on_draft_failure, **{callback: Nth(num, error)})
        trace = execute(policy, RULES, runner, 5, on_draft_failure=on_draft_failure)
        assert trace.digest() == alone
        assert trace.meta["draft_failure"] is None


def test_two_runners_of_one_process_do_not_disturb_each_other(runner) -> None:
    """The second one has the cores that the first one had, where it would else be told of one core."""
    alone, cores = execute(SSD, RULES, runner, 5).digest(), os.sched_getaffinity(0)
    with open_runner(FakePair(models=models()), "streams") as other:
        assert "pinned_cores" in other.placement or num_usable_cores() < 2
        assert [execute(SSD, RULES, one, 5).digest() for one in (other, runner, other)] == [alone] * 3
    assert os.sched_getaffinity(0) == cores
