"""A run whose draft fails: it ends, or goes on as AR, and loses no token."""

import pytest

from executor.draft_client import DraftFailed
from executor.execute import execute
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Speculative
from sim.trace import Source
from tests.executor.test_batches import hash_runner, texts, workload
from tests.executor.test_loops import check_counters, ssd

POLICIES = [Speculative(3), ssd(3), ssd(3, 1, Fallback.DRAFT_MISSING), ssd(3, 1, Fallback.NGRAM)]


class FailingDraft:
    """A draft role that fails at its `num`-th call of a method."""

    def __init__(self, draft, method: str, num: int) -> None:
        self._draft, self._method, self._num = draft, method, num

    def __getattr__(self, name):
        if name == self._method:
            self._num -= 1
            if self._num == 0:
                raise DraftFailed("scripted")
        return getattr(self._draft, name)


def failing_runner(method: str, num: int):
    runner = hash_runner()
    object.__setattr__(runner, "draft", FailingDraft(runner.draft, method, num))
    return runner


FAILURES = [("speculate", 1), ("speculate", 5), ("speculate", 9), ("wait", 1), ("wait", 2), ("spans", 1)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_target_goes_on_alone_without_losing_a_token(batch_size: int, temperature: float, policy) -> None:
    rules = workload(batch_size, 24, temperature, stop_ids=(3,))
    healthy = execute(policy, rules, hash_runner(), seed=1)
    assert healthy.meta["draft_failure"] is None
    expected = texts(execute(Autoregressive(), workload(1, 24, stop_ids=(3,)), hash_runner()))
    for method, num in FAILURES:
        trace = execute(policy, rules, failing_runner(method, num), seed=1, on_draft_failure="continue")
        check_counters(trace, rules)
        assert temperature > 0 or texts(trace) == expected
        failure = trace.meta["draft_failure"]
        assert failure["message"] == "scripted"
        batch = failure["sequence"] // batch_size
        # Rounds since then are rounds of AR; what ended before is as if nothing had happened.
        after = [r for r in trace.rounds if r.sequence // batch_size > batch]
        if method == "speculate":
            own = [r for r in trace.rounds if r.sequence // batch_size == batch]
            after += [r for r in own if r.index >= failure["round"]]
        assert after and all(r.num_drafted == 0 and r.source is Source.SYNCHRONOUS for r in after)
        assert texts(trace)[: batch * batch_size] == texts(healthy)[: batch * batch_size]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_unless_told_so_a_run_ends_with_its_draft(policy) -> None:
    for method in ("speculate", "wait", "spans"):
        with pytest.raises(DraftFailed, match="scripted"):
            execute(policy, workload(2), failing_runner(method, 1))


def test_other_answers_to_a_failure_are_unknown() -> None:
    with pytest.raises(BadInput, match="on_draft_failure: must be one of raise, continue"):
        execute(Speculative(2), workload(1), hash_runner(), on_draft_failure="ignore")
