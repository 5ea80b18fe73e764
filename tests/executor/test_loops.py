"""Greedy AR, SD and SSD give one text; rounds, caches and counters are what they claim to be."""

import itertools

import pytest
import torch

from executor.execute import execute
from executor.language_model import LanguageModel
from executor.toy_model import HashModel, serial_runner
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, LateBuild, Speculative, SpeculativeSpeculative
from sim.trace import Lane, Operation, Source
from sim.workload import Workload
from tests.executor.tiny_models import prompts

VOCAB_SIZE = 16
LENGTHS = (1, 2, 4, 8)


def ssd(K: int, fan_out: int = 2, fallback: Fallback = Fallback.DRAFT, after_miss: int | None = None):
    """The same number of branches for every accept count."""
    entries = 1 if fallback is Fallback.NONE else K + 1
    other = fan_out if after_miss is None else after_miss
    return SpeculativeSpeculative(K, (fan_out,) * (K + 1), (other,) * entries, fallback)


def policies(K: int):
    """SD, SSD with either fallback, SSD that never hits, SSD whose hits are never followed by one."""
    return [
        Speculative(K),
        *(ssd(K, fallback=fallback) for fallback in (Fallback.DRAFT, Fallback.NONE)),
        ssd(K, 0),
        ssd(K, 0, after_miss=2),
    ]


def with_any_fallback(K: int):
    """The same, and SSD whose fallback is no model, whose late builds are abandoned."""
    abandoning = SpeculativeSpeculative(K, (2,) * (K + 1), (1,) * (K + 1), on_late_build=LateBuild.ABANDON)
    others = (Fallback.NGRAM, Fallback.FILLER, Fallback.DRAFT_MISSING)
    return [*policies(K), *(ssd(K, fallback=fallback) for fallback in others), abandoning]


def workload(max_new_tokens: int, texts=((1, 2, 3), (4,), (5, 6, 7, 8, 9)), temperature=0.0, stop_ids=()) -> Workload:
    return Workload("test", tuple(texts), max_new_tokens, temperature, tuple(stop_ids))


def hash_runner(agreement: float = 0.7, seed: int = 0):
    """An agreement of .7 accepts about half of the draft tokens."""
    return serial_runner(HashModel(VOCAB_SIZE, seed), HashModel(VOCAB_SIZE, seed, own_seed=1, agreement=agreement))


def texts(trace):
    return [sequence.tokens for sequence in trace.sequences]


def check_counters(trace, rules: Workload) -> None:
    """Rounds add up to the text, follow one another in time, and never propose beyond the cap."""
    for sequence in trace.sequences:
        rounds = [r for r in trace.rounds if r.sequence == sequence.index]
        assert [r.index for r in rounds] == list(range(len(rounds)))
        assert sequence.num_decoded == sum(r.num_emitted for r in rounds)
        emitted = 1
        for r in rounds:
            assert 1 <= r.num_emitted <= r.num_accepted + 1 <= r.num_drafted + 1
            assert r.num_drafted <= rules.max_new_tokens - emitted - 1
            assert r.context == sequence.prompt_length + emitted - 1
            emitted += r.num_emitted
        borders = [sequence.decode_start_s, *(r.end_s for r in rounds)]
        assert [r.start_s for r in rounds] == borders[:-1]
        assert borders[-1] == sequence.end_s
        if rounds:
            assert sum(r.end_s - r.start_s for r in rounds) == pytest.approx(sequence.decode_s)
        assert not set(sequence.tokens[:-1]) & set(rules.stop_ids)
        assert sequence.stopped == (bool(sequence.tokens) and sequence.tokens[-1] in rules.stop_ids)


@pytest.mark.parametrize(("K", "agreement"), [*itertools.product(LENGTHS, (0.0, 0.7)), (8, 1.0), (20, 0.7)])
def test_greedy_text_does_not_depend_on_the_policy(K: int, agreement: float) -> None:
    rules = workload(30, [(1, 2, 3), (4,)])
    runner = hash_runner(agreement)
    expected = execute(Autoregressive(), rules, runner)
    check_counters(expected, rules)
    for policy in with_any_fallback(K):
        trace = execute(policy, rules, runner)
        assert texts(trace) == texts(expected), policy.name
        check_counters(trace, rules)


@pytest.mark.parametrize("cap", range(8))
@pytest.mark.parametrize("K", [1, 4])
def test_the_cap_is_never_overshot(K: int, cap: int) -> None:
    runner = hash_runner()
    full = texts(execute(Autoregressive(), workload(10), runner))
    runner.target.model.num_forwards = 0
    for policy in [Autoregressive(), *with_any_fallback(K)]:
        trace = execute(policy, workload(cap), runner)
        assert texts(trace) == [text[:cap] for text in full]
        check_counters(trace, workload(cap))
        if cap <= 1:
            assert trace.rounds == []
    assert (runner.target.model.num_forwards == 0) == (cap == 0)


@pytest.mark.parametrize("K", [1, 4])
def test_a_stop_token_anywhere_ends_the_sequence_where_ar_ends_it(K: int) -> None:
    runner = hash_runner()
    text = texts(execute(Autoregressive(), workload(32), runner))[0]
    ends_inside_a_block = 0
    for stop in dict.fromkeys(text):
        for stop_ids in ((stop,), (stop, text[20])):
            rules = workload(32, stop_ids=stop_ids)
            expected = execute(Autoregressive(), rules, runner)
            check_counters(expected, rules)
            for policy in with_any_fallback(K):
                trace = execute(policy, rules, runner)
                assert texts(trace) == texts(expected)
                check_counters(trace, rules)
                ends_inside_a_block += sum(r.num_emitted == r.num_accepted for r in trace.rounds)
    assert ends_inside_a_block > 0  # otherwise the case this test is about has not occurred


@pytest.mark.parametrize("K", [1, 2, 3, 5])
def test_a_model_that_drafts_for_itself_is_always_accepted(K: int) -> None:
    runner = hash_runner(agreement=1.0)
    for temperature in (0.0, 1.0):
        rules = workload(64, temperature=temperature)
        for policy in policies(K):
            trace = execute(policy, rules, runner, seed=3)
            assert all(r.num_accepted == r.num_drafted for r in trace.rounds)
    # Greedily everything likely is prepared, so only first rounds need the fallback.
    sources = {r.source for r in execute(ssd(K), workload(64), runner).rounds}
    assert sources == {Source.FIRST, Source.HIT}


@pytest.mark.parametrize("policy", with_any_fallback(3), ids=lambda policy: policy.name)
def test_the_draft_cache_holds_the_committed_text_in_every_round(policy, monkeypatch) -> None:
    """After each commit: a prefix of the text and, where the draft drafted, never more than two tokens behind."""
    from executor.drafting import Drafter

    commit = Drafter.commit
    lags = []

    def audited(drafter, row, tokens):
        commit(drafter, row, tokens)
        assert drafter.model.texts[row] == drafter.committed[row][: drafter.model.length_of(row)]
        lags.append(len(drafter.committed[row]) - drafter.model.length_of(row))

    monkeypatch.setattr(Drafter, "commit", audited)
    trace = execute(policy, workload(40), hash_runner())
    assert len(lags) == len(trace.rounds)
    never_drafts = isinstance(policy, SpeculativeSpeculative) and not policy.waits_for_draft(Source.MISS)
    assert max(lags) <= 2 or never_drafts


def test_a_draft_cache_without_the_last_accepted_token_shows_in_the_acceptance() -> None:
    """Control: the step after full acceptance feeds only the bonus token."""
    runner = hash_runner(agreement=1.0)
    draft = runner.draft._service.model
    honest = draft.append
    draft.append = lambda tokens, num_logits=None: honest(tokens[-1:] if len(tokens) == 2 else tokens, num_logits)
    trace = execute(Speculative(3), workload(64), runner)
    assert any(r.num_accepted < r.num_drafted for r in trace.rounds)


def test_spans_are_the_operations_of_the_policy() -> None:
    K, rules = 3, workload(30)
    runner = hash_runner()
    counts = {}
    for policy in [Autoregressive(), *with_any_fallback(K)]:
        trace = execute(policy, rules, runner)
        spans = {operation: [s for s in trace.spans if s.operation is operation] for operation in Operation}
        counts[policy.name] = {operation: len(found) for operation, found in spans.items()}
        assert [(s.sequence, s.round, s.num_tokens, s.context) for s in spans[Operation.VERIFY]] == [
            (r.sequence, r.index, r.num_drafted + 1, r.context) for r in trace.rounds
        ]
        assert {s.lane for s in spans[Operation.VERIFY]} == {Lane.TARGET}
        if isinstance(policy, SpeculativeSpeculative) and not policy.waits_for_draft(Source.MISS):
            assert spans[Operation.DRAFT_STEP] == []
        assert all(s.num_tokens in (1, 2) for s in spans[Operation.DRAFT_STEP])
        for lane in Lane:
            own = [s for s in trace.spans if s.lane is lane]
            assert all(first.end_s <= second.start_s for first, second in itertools.pairwise(own))
        if isinstance(policy, SpeculativeSpeculative):
            looked_up = [r for r in trace.rounds if r.source is not Source.FIRST]
            assert len(spans[Operation.LOOKUP]) == len(looked_up)
            glued = {(s.sequence, s.round): s.num_tokens for s in spans[Operation.GLUE]}
            drafted = {(r.sequence, r.index): r.num_drafted + 1 for r in trace.rounds}
            assert glued.items() <= drafted.items()
            branches = {(r.sequence, r.index): sum(policy.fan_out(r.source)[: r.num_drafted + 1]) for r in trace.rounds}
            for s in spans[Operation.TREE_STEP]:
                assert s.num_tokens == branches[s.sequence, s.round]
    assert counts["AR"] == {o: 0 for o in Operation} | {
        Operation.PREFILL: len(rules.prompts),
        Operation.VERIFY: 29 * len(rules.prompts),
    }
    no_branches = counts[ssd(K, fan_out=0).name]
    assert no_branches[Operation.GLUE] == no_branches[Operation.TREE_STEP] == 0
    assert no_branches[Operation.DRAFT_STEP] == counts[Speculative(K).name][Operation.DRAFT_STEP]


def test_without_branches_ssd_is_sd() -> None:
    rounds = [
        [(r.num_drafted, r.num_accepted, r.num_emitted) for r in execute(policy, workload(40), hash_runner()).rounds]
        for policy in (Speculative(4), ssd(4, fan_out=0))
    ]
    assert rounds[0] == rounds[1]


def test_zero_draft_tokens_is_ar() -> None:
    runner = hash_runner()
    sd, ar = (execute(policy, workload(12), runner) for policy in (Speculative(0), Autoregressive()))
    assert texts(sd) == texts(ar)
    assert len(sd.rounds) == len(ar.rounds)


def test_a_run_does_not_depend_on_earlier_runs() -> None:
    runner, rules = hash_runner(), workload(30, temperature=1.0)
    alone = execute(ssd(3), rules, hash_runner()).digest()
    execute(Speculative(5), rules, runner)
    assert execute(ssd(3), rules, runner).digest() == alone


def test_tokens_follow_the_seed_and_the_prompt_not_the_order() -> None:
    prompts_ = ((1, 2, 3), (4,), (5, 6), (4,))
    runner = hash_runner()
    for policy in (Autoregressive(), Speculative(3), ssd(3)):
        run = texts(execute(policy, workload(20, prompts_, 1.0), runner, seed=1))
        permuted = texts(execute(policy, workload(20, [prompts_[i] for i in (2, 1, 0, 3)], 1.0), runner, seed=1))
        assert [permuted[i] for i in (2, 1, 0, 3)] == run
        assert run[1] != run[3]  # the second occurrence of a prompt is another draw
        assert texts(execute(policy, workload(20, prompts_, 1.0), runner, seed=2)) != run


def test_greedy_decoding_uses_no_random_numbers(monkeypatch) -> None:
    from executor.draws import Draws

    def refuse(*_args):
        raise AssertionError("drawn")

    monkeypatch.setattr(Draws, "uniforms", refuse)
    state = torch.random.get_rng_state()
    for policy in [Autoregressive(), *policies(3)]:
        execute(policy, workload(12), hash_runner())
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(AssertionError, match="drawn"):
        execute(Speculative(3), workload(12, temperature=1.0), hash_runner())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_target_logits_that_are_not_finite_name_sequence_and_position(bad, temperature, monkeypatch) -> None:
    honest = HashModel.logits_after

    def faulty(model, text):
        logits = honest(model, text)
        return logits.clone().index_fill_(0, torch.tensor([3]), bad) if len(text) == 7 and text[0] == 4 else logits

    for policy in (Autoregressive(), Speculative(3)):
        target, draft = HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0)
        monkeypatch.setattr(target, "logits_after", lambda text, model=target: faulty(model, text))
        with pytest.raises(FloatingPointError, match="sequence 1, position 7:"):
            execute(policy, workload(20, temperature=temperature), serial_runner(target, draft))


def test_draft_logits_that_are_not_finite_are_rejected_and_counted(monkeypatch) -> None:
    target, draft = HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0)
    honest = draft.logits_after
    monkeypatch.setattr(draft, "logits_after", lambda text: honest(text) * (torch.nan if len(text) == 7 else 1.0))
    runner = serial_runner(target, draft)
    for policy in (Speculative(3), ssd(3)):
        trace = execute(policy, workload(20, temperature=1.0), runner)
        assert all(len(text) == 20 and max(text) < VOCAB_SIZE for text in texts(trace))
        assert trace.meta["num_bad_draft_rows"] > 0
        assert any(r.num_accepted < r.num_drafted for r in trace.rounds)


def test_a_workload_that_does_not_fit_is_refused_before_the_first_token() -> None:
    runner = hash_runner()
    runner.target.model.max_positions = 20
    for policy in (Autoregressive(), Speculative(4), ssd(8)):
        assert len(texts(execute(policy, workload(15), runner))[2]) == 15
        with pytest.raises(BadInput, match=r"prompt 2 .* must fit the target's 20 positions, got 21"):
            execute(policy, workload(16), runner)
    with pytest.raises(BadInput, match="prompt 1: token ids"):
        execute(Autoregressive(), workload(4, [(1,), (VOCAB_SIZE,)]), runner)


# ---------------------------------------------------------------------------------------------- transformers models


def generate(model: LanguageModel, prompt, max_new_tokens: int):
    """transformers' own greedy decoding."""
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
    output = model.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), **options)
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("K", [1, 3, 8])
def test_real_models_give_the_text_that_transformers_generates(K: int, tiny_serial) -> None:
    rules = Workload("test", prompts(2, 9), max_new_tokens=28)
    expected = [generate(tiny_serial.target.model, prompt, 28) for prompt in rules.prompts]
    assert len(set(expected[0])) > 8  # the text has not collapsed
    accepted = 0
    for policy in [Autoregressive(), *with_any_fallback(K)]:
        trace = execute(policy, rules, tiny_serial)
        assert texts(trace) == expected, policy.name
        accepted += sum(r.num_accepted for r in trace.rounds)
    assert accepted > 0


def test_a_real_model_that_drafts_for_itself_is_always_accepted(self_serial) -> None:
    rules = Workload("test", prompts(2, 9), max_new_tokens=48)
    for policy in policies(3):
        trace = execute(policy, rules, self_serial)
        assert all(r.num_accepted == r.num_drafted for r in trace.rounds)


def test_prompts_as_long_as_the_models_allow(self_serial) -> None:
    limit = self_serial.pair.max_positions
    rules = Workload("test", (prompts(1, limit - 20)[0],), max_new_tokens=20)
    expected = texts(execute(Autoregressive(), rules, self_serial))
    for policy in (Speculative(8), ssd(4), ssd(8)):
        assert texts(execute(policy, rules, self_serial)) == expected
