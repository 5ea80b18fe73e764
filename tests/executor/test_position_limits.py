"""A draft with fewer positions than the target: speculation shrinks to nothing, the text stays AR's."""

import pytest

from executor.concurrency import Runner
from executor.execute import execute
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.serial_draft import SerialDraft
from executor.target import Target
from executor.toy_model import FakePair, HashModel, serial_runner
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.trace import Lane
from sim.workload import Workload
from tests.executor.test_loops import check_counters, ssd, texts, with_any_fallback
from tests.executor.tiny_models import llama, prompts

VOCAB_SIZE, DRAFT_LIMIT, TARGET_LIMIT = 16, 24, 48
LONG = tuple(index % VOCAB_SIZE for index in range(30))
PROMPTS = ((1, 2, 3), (4,), LONG[:DRAFT_LIMIT], LONG)
POLICIES = with_any_fallback(5)
WITHOUT_MODEL = (Fallback.NGRAM, Fallback.FILLER)


def short_draft(agreement: float):
    draft = HashModel(VOCAB_SIZE, 0, own_seed=1, agreement=agreement, max_positions=DRAFT_LIMIT)
    return serial_runner(HashModel(VOCAB_SIZE, 0, max_positions=TARGET_LIMIT), draft)


def workload(batch_size: int, temperature: float = 0.0, max_new_tokens: int = TARGET_LIMIT - len(LONG)) -> Workload:
    return Workload("test", PROMPTS, max_new_tokens, temperature, batch_size=batch_size)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}")
def test_texts_that_outgrow_the_draft_are_those_of_ar(policy) -> None:
    """The fake models refuse to be fed beyond their limits. Prompts of a batch meet the limit at different rounds."""
    runner = short_draft(agreement=0.7)
    for asked in (Workload("test", PROMPTS[:2], TARGET_LIMIT - 3), workload(4)):
        expected = texts(execute(Autoregressive(), asked, runner))
        trace = execute(policy, asked, runner)
        assert texts(trace) == expected
        check_counters(trace, asked)
    execute(policy, workload(4, temperature=1.0), runner)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}")
def test_the_draft_model_drafts_as_far_as_it_can(policy) -> None:
    runner = short_draft(agreement=1.0)
    trace = execute(policy, Workload("test", PROMPTS[:2], TARGET_LIMIT - 3), runner)
    if getattr(policy, "fallback", None) in WITHOUT_MODEL:
        assert any(r.context > DRAFT_LIMIT and r.num_drafted for r in trace.rounds)  # they know no limit
        return
    reach = [r.context + r.num_drafted for r in trace.rounds if r.num_drafted]
    assert max(reach, default=0) <= DRAFT_LIMIT
    if getattr(policy, "fallback", Fallback.DRAFT) is not Fallback.NONE:
        assert max(reach) == DRAFT_LIMIT
    assert all(r.num_drafted == 0 for r in trace.rounds if r.context >= DRAFT_LIMIT)


def test_a_prompt_that_fills_the_draft_is_decoded_as_ar_and_counted() -> None:
    runner = short_draft(agreement=1.0)
    trace = execute(Speculative(4), workload(2), runner)
    assert trace.meta["num_without_draft"] == 2
    assert all(r.num_drafted == 0 for r in trace.rounds if r.sequence >= 2)
    assert any(r.num_drafted for r in trace.rounds if r.sequence < 2)
    assert execute(Autoregressive(), workload(2), runner).meta["num_without_draft"] == 0


def test_real_models_of_different_limits() -> None:
    """Draft 64 positions, target 128, text up to the target's last position, K up to 8."""
    target, draft = llama(2, seed=0, max_position_embeddings=128), llama(2, seed=0, max_position_embeddings=64)
    roles = Target(LanguageModel(target), Recorder(Lane.TARGET)), SerialDraft(LanguageModel(draft))
    runner = Runner(FakePair(vocab_size=128, max_positions=64), "serial", *roles, {})
    rules = Workload("test", (prompts(1, 28)[0], prompts(1, 9, seed=1)[0]), 100, batch_size=2)
    expected = texts(execute(Autoregressive(), rules, runner))
    abandoning = SpeculativeSpeculative(8, (2,) * 9, (2,) * 9)
    for policy in (Speculative(8), ssd(3), abandoning):
        trace = execute(policy, rules, runner)
        assert texts(trace) == expected
        before = [r for r in trace.rounds if r.context + r.num_drafted < 64]
        assert before and all(r.num_accepted == r.num_drafted > 0 for r in before if r.num_emitted > 1)
