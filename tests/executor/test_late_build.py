"""A build that is late when the outcome arrives: finished, or abandoned if it prepared something else."""

import pytest

from executor.draft_service import DraftService
from executor.sequence import Request
from sim.policy import Fallback, LateBuild, SpeculativeSpeculative
from sim.trace import Operation, Outcome, Source
from tests.executor.hash_model import HashModel

VOCAB_SIZE, K = 16, 4
PROMPT = (1, 2, 3)


class ScriptedNews:
    """Says nothing the first `silent` times it is asked, then what the next request brings."""

    def __init__(self) -> None:
        self.silent, self.outcomes, self.num_asked = 0, (), 0

    def __call__(self):
        self.num_asked += 1
        return None if self.num_asked <= self.silent else self.outcomes


def build_with(news: ScriptedNews, on_late_build=LateBuild.ABANDON, fallback=Fallback.DRAFT):
    """A draft that has built beside its first round: its service and the operations of that build."""
    policy = SpeculativeSpeculative(K, (2,) * (K + 1), (2,) * (K + 1), fallback, on_late_build=on_late_build)
    service = DraftService(HashModel(VOCAB_SIZE, 0), interrupted=lambda: True, upcoming=news)
    service.begin(policy, Request(0, PROMPT, 30, 0.0, (), seed=0))
    service.speculate(Outcome(0, 5), remaining=29)
    before = len(service.spans())
    service.prepare()
    return service, [span.operation for span in service.spans()[before:]]


def prepared_outcome() -> Outcome:
    service, _ = build_with(ScriptedNews(), LateBuild.WAIT)
    return next(iter(service._speculator._cache._branch))


@pytest.mark.parametrize("silent", range(K + 1))
def test_a_build_for_something_else_ends_with_the_operation_in_progress(silent: int) -> None:
    news = ScriptedNews()
    news.silent, news.outcomes = silent, (Outcome(0, 5),)
    assert Outcome(0, 5) != prepared_outcome()
    service, operations = build_with(news)
    assert operations == [Operation.GLUE] + [Operation.TREE_STEP] * silent
    speculation = service.speculate(Outcome(0, 5), remaining=28)
    assert speculation.source is (Source.MISS)
    assert len(speculation.tokens) == K


@pytest.mark.parametrize("silent", [0, 2])
def test_a_hit_waits_for_its_speculation(silent: int) -> None:
    news, outcome = ScriptedNews(), prepared_outcome()
    news.silent, news.outcomes = silent, (outcome,)
    service, operations = build_with(news)
    assert operations == [Operation.GLUE] + [Operation.TREE_STEP] * K
    assert service.speculate(outcome, remaining=28).source is Source.HIT


def test_a_build_of_a_sequence_that_has_ended_is_abandoned() -> None:
    _, operations = build_with(ScriptedNews())
    assert operations == [Operation.GLUE]


def test_who_waits_does_not_ask() -> None:
    news = ScriptedNews()
    _, operations = build_with(news, LateBuild.WAIT)
    assert operations == [Operation.GLUE] + [Operation.TREE_STEP] * K
    assert news.num_asked == 0


def test_after_an_abandoned_build_the_draft_goes_on_as_if_it_had_finished() -> None:
    speculations = []
    for on_late_build in LateBuild:
        news = ScriptedNews()
        news.outcomes = (Outcome(1, 5),)
        service, _ = build_with(news, on_late_build)
        speculations.append(service.speculate(Outcome(1, 5), remaining=27))
        service.prepare()
        speculations.append(service.speculate(Outcome(0, 7), remaining=25))
    assert speculations[:2] == speculations[2:]
