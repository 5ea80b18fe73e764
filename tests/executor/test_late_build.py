"""A build that is late when the outcome arrives: finished, or abandoned if it prepared something else."""

import pytest

from executor.draft_service import DraftService
from executor.sequence import Question, Request, Verified
from executor.toy_model import HashModel
from sim.policy import Autoregressive, Fallback, LateBuild, SpeculativeSpeculative
from sim.trace import Operation, Outcome, Source
from sim.workload import Sampling

VOCAB_SIZE, K = 16, 4
PROMPT = (1, 2, 3)


class ScriptedNews:
    """Says nothing the first `silent` times it is asked, then what the next request brings."""

    def __init__(self) -> None:
        self.silent, self.outcomes, self.num_asked = 0, {}, 0
        self.policy = Autoregressive()

    def __call__(self):
        self.num_asked += 1
        verified = {row: Verified(outcome, 20) for row, outcome in self.outcomes.items()}
        return None if self.num_asked <= self.silent else Question(self.policy, verified)


def build_with(news: ScriptedNews, on_late_build=LateBuild.ABANDON, fallback=Fallback.DRAFT):
    """A draft that has built beside its first round: its service and the operations of that build."""
    policy = SpeculativeSpeculative(K, (2,) * (K + 1), (2,) * (K + 1), fallback, on_late_build=on_late_build)
    service = DraftService(HashModel(VOCAB_SIZE, 0), interrupted=lambda: True, upcoming=news)
    news.policy = policy
    service.begin([Request(0, PROMPT, 30, Sampling(), (), seed=0)])
    service.speculate(Question(policy, {0: Verified(Outcome(0, 5), 29)}))
    before = len(service.spans())
    service.prepare()
    return service, [span.operation for span in service.spans()[before:]]


def answer(service: DraftService, outcome: Outcome, remaining: int):
    return service.speculate(Question(service._speculator._policy, {0: Verified(outcome, remaining)}))[0]


def prepared_outcome() -> Outcome:
    service, _ = build_with(ScriptedNews(), LateBuild.WAIT)
    return next(iter(service._speculator._caches[0]._branch))


@pytest.mark.parametrize("silent", range(K + 1))
def test_a_build_for_something_else_ends_with_the_operation_in_progress(silent: int) -> None:
    news = ScriptedNews()
    news.silent, news.outcomes = silent, {0: Outcome(0, 5)}
    assert Outcome(0, 5) != prepared_outcome()
    service, operations = build_with(news)
    assert operations == [Operation.GLUE] + [Operation.TREE_STEP] * silent
    speculation = answer(service, Outcome(0, 5), remaining=28)
    assert speculation.source is Source.MISS
    assert len(speculation.tokens) == K


@pytest.mark.parametrize("silent", [0, 2])
def test_a_hit_waits_for_its_speculation(silent: int) -> None:
    news, outcome = ScriptedNews(), prepared_outcome()
    news.silent, news.outcomes = silent, {0: outcome}
    service, operations = build_with(news)
    assert operations == [Operation.GLUE] + [Operation.TREE_STEP] * K
    assert answer(service, outcome, remaining=28).source is Source.HIT


def test_a_build_of_a_sequence_that_has_ended_is_abandoned() -> None:
    _, operations = build_with(ScriptedNews())
    assert operations == [Operation.GLUE]


def test_who_waits_does_not_ask() -> None:
    news = ScriptedNews()
    _, operations = build_with(news, LateBuild.WAIT)
    assert operations == [Operation.GLUE] + [Operation.TREE_STEP] * K
    assert news.num_asked == 0


@pytest.mark.parametrize(
    ("fallback", "hits", "is_abandoned"),
    [
        (Fallback.DRAFT, (True, True), False),
        (Fallback.DRAFT, (True, False), True),  # the whole batch is drafted anew
        (Fallback.DRAFT_MISSING, (True, False), False),
        (Fallback.DRAFT_MISSING, (False, False), True),
        (Fallback.NGRAM, (False, True), False),
    ],
)
def test_the_build_of_a_batch_goes_on_while_a_row_will_use_it(fallback, hits, is_abandoned) -> None:
    news = ScriptedNews()
    policy = SpeculativeSpeculative(K, (2,) * (K + 1), (2,) * (K + 1), fallback, on_late_build=LateBuild.ABANDON)
    service = DraftService(HashModel(VOCAB_SIZE, 0), interrupted=lambda: True, upcoming=news)
    service.begin([Request(row, (*PROMPT, row), 30, Sampling(), (), seed=0) for row in range(2)])
    news.policy = policy
    service.speculate(Question(policy, {row: Verified(Outcome(0, 5), 29) for row in range(2)}))
    news.silent = 10
    service.prepare()
    prepared = [next(iter(cache._branch)) for cache in service._speculator._caches.values()]
    news.num_asked, news.silent = 0, 1
    caches = service._speculator._caches
    others = [next(o for o in map(Outcome, [0] * 9, range(9)) if o not in caches[row]) for row in range(2)]
    news.outcomes = {row: (prepared if is_hit else others)[row] for row, is_hit in enumerate(hits)}
    before = len(service.spans())
    service.prepare()
    steps = [s for s in service.spans()[before:] if s.operation is Operation.TREE_STEP]
    assert len(steps) == (1 if is_abandoned else K)
    verified = {row: Verified(outcome, 24) for row, outcome in news.outcomes.items()}
    speculations = service.speculate(Question(policy, verified))
    redrafted = fallback is Fallback.DRAFT and not all(hits)
    expected = [(Source.REDRAFTED if redrafted else Source.HIT) if is_hit else Source.MISS for is_hit in hits]
    assert [speculations[row].source for row in range(2)] == expected
    assert all(len(s.tokens) == K for s in speculations.values()) or fallback is Fallback.NGRAM


def test_after_an_abandoned_build_the_draft_goes_on_as_if_it_had_finished() -> None:
    speculations = []
    for on_late_build in LateBuild:
        news = ScriptedNews()
        news.outcomes = {0: Outcome(1, 5)}
        service, _ = build_with(news, on_late_build)
        speculations.append(answer(service, Outcome(1, 5), remaining=27))
        service.prepare()
        speculations.append(answer(service, Outcome(0, 7), remaining=25))
    assert speculations[:2] == speculations[2:]
