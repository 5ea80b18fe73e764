"""Rows of a batch accept different counts and end at different times; each is what it is alone."""

import pytest

import executor.loops
from executor.drafting import Drafter
from executor.execute import execute
from executor.toy_model import HashModel, serial_runner
from sim.metrics import tokens_per_s
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.trace import Operation, Source
from sim.workload import Workload
from tests.executor.test_loops import check_counters, ssd, texts, with_any_fallback
from tests.executor.tiny_models import prompts

VOCAB_SIZE, K = 16, 4
PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9), (4,), (10, 11), (3, 1, 2), (12,))
OF_EVERY_KIND = [Autoregressive(), *with_any_fallback(K)]


def workload(
    batch_size: int, max_new_tokens: int = 30, temperature: float = 0.0, stop_ids=(), texts=PROMPTS
) -> Workload:
    return Workload("test", texts, max_new_tokens, temperature, stop_ids, batch_size)


def hash_runner(agreement: float = 0.7):
    return serial_runner(HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0, own_seed=1, agreement=agreement))


@pytest.fixture
def audited(monkeypatch):
    """After every round the KV caches of all rows are checked; counts the checks."""
    num_checks = {"target": 0, "draft": 0}
    verify, commit = executor.loops._verify, Drafter.commit

    def audited_verify(target, policy, speculations, batch):
        outcomes = verify(target, policy, speculations, batch)
        for row in batch.rows:
            sequence = batch.sequences[row]
            assert target.model.texts[row] == [*sequence.request.prompt, *sequence.tokens[:-1]]
            assert target.pending[row] == sequence.tokens[-1]
            num_checks["target"] += 1
        return outcomes

    def audited_commit(drafter, row, tokens):
        commit(drafter, row, tokens)
        assert drafter.model.texts[row] == drafter.committed[row][: drafter.model.length_of(row)]
        num_checks["draft"] += 1

    monkeypatch.setattr(executor.loops, "_verify", audited_verify)
    monkeypatch.setattr(Drafter, "commit", audited_commit)
    return num_checks


@pytest.mark.parametrize("policy", OF_EVERY_KIND, ids=lambda policy: policy.name)
@pytest.mark.parametrize("batch_size", [3, 20])
def test_greedy_rows_equal_their_solo_runs(batch_size: int, policy, audited) -> None:
    runner = hash_runner()
    for stop_ids in ((), (3,), (3, 8)):
        expected = execute(Autoregressive(), workload(1, stop_ids=stop_ids), runner)
        trace = execute(policy, workload(batch_size, stop_ids=stop_ids), runner)
        assert texts(trace) == texts(expected)
        assert [s.stopped for s in trace.sequences] == [s.stopped for s in expected.sequences]
        check_counters(trace, workload(batch_size, stop_ids=stop_ids))
    assert audited["target"] > 0


@pytest.mark.parametrize("cap", range(K + 3))
def test_the_cap_is_never_overshot(cap: int) -> None:
    runner = hash_runner()
    full = texts(execute(Autoregressive(), workload(1), runner))
    for policy in OF_EVERY_KIND:
        trace = execute(policy, workload(3, cap), runner)
        assert texts(trace) == [text[:cap] for text in full]
        check_counters(trace, workload(3, cap))


@pytest.mark.parametrize("length", [1, 2, 5, 10, 20, 32])
@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_any_speculation_length_and_draft_give_the_text(length: int, agreement: float) -> None:
    runner = hash_runner(agreement)
    few = PROMPTS[:4]
    expected = texts(execute(Autoregressive(), workload(1, 20, texts=few), runner))
    for policy in (Speculative(length), ssd(length), ssd(length, 1, Fallback.DRAFT_MISSING)):
        trace = execute(policy, workload(3, 20, texts=few), runner)
        assert texts(trace) == expected
        if agreement:
            assert all(r.num_accepted == r.num_drafted for r in trace.rounds)


INDEPENDENT = [policy for policy in OF_EVERY_KIND if getattr(policy, "fallback", None) is not Fallback.DRAFT]


@pytest.mark.parametrize("policy", INDEPENDENT, ids=lambda policy: policy.name)
def test_sampled_rows_equal_their_solo_runs(policy) -> None:
    """Each row has random streams of its own. Only a fallback that drafts hits anew makes rows depend on others."""
    runner = hash_runner()
    alone = texts(execute(policy, workload(1, temperature=1.0, stop_ids=(3,)), runner, seed=4))
    assert texts(execute(policy, workload(4, temperature=1.0, stop_ids=(3,)), runner, seed=4)) == alone
    order = (5, 2, 0, 1, 4, 3, 6)  # of equal prompts the first stays the first
    permuted = workload(3, temperature=1.0, stop_ids=(3,), texts=tuple(PROMPTS[i] for i in order))
    assert texts(execute(policy, permuted, runner, seed=4)) == [alone[i] for i in order]
    assert texts(execute(policy, workload(4, temperature=1.0, stop_ids=(3,)), runner, seed=5)) != alone


def test_hits_are_drafted_anew_only_where_the_policy_says_so() -> None:
    for fallback in (Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NGRAM):
        trace = execute(ssd(K, 1, fallback), workload(4, 60), hash_runner())
        by_round = {}
        for r in trace.rounds:
            by_round.setdefault((r.sequence // 4, r.index), set()).add(r.source)
        mixed = [sources for sources in by_round.values() if Source.MISS in sources and len(sources) > 1]
        expected = {Source.MISS, Source.REDRAFTED if fallback is Fallback.DRAFT else Source.HIT}
        assert mixed and all(sources == expected for sources in mixed)
        steps = [s for s in trace.spans if s.operation is Operation.DRAFT_STEP]
        if fallback is Fallback.DRAFT_MISSING:
            missed = {(r.sequence // 4, r.index) for r in trace.rounds if r.source in (Source.MISS, Source.FIRST)}
            assert {(s.sequence // 4, s.round) for s in steps} <= missed
            assert any(s.batch_size < 4 for s in steps)


def test_the_rows_of_a_batch_share_their_operations_and_times() -> None:
    rules = workload(3, 40, stop_ids=(3,))
    trace = execute(Speculative(K), rules, hash_runner())
    assert tokens_per_s([trace]).value > 0
    for spans in ([s for s in trace.spans if s.operation is Operation.VERIFY],):
        for s in spans:
            rows = [r for r in trace.rounds if r.sequence // 3 == s.sequence // 3 and r.index == s.round]
            assert s.sequence == min(r.sequence for r in rows)
            assert s.batch_size == len(rows)
            assert s.num_tokens == sum(r.num_drafted + 1 for r in rows)
            assert s.context == sum(r.context for r in rows) // len(rows)
            assert len({(r.start_s, r.end_s) for r in rows}) == 1
    assert sum(s.batch_size for s in trace.spans if s.operation is Operation.VERIFY) == len(trace.rounds)
    ends = [s.end_s for s in trace.sequences[:3]]
    assert len(set(ends)) > 1 and all(s.decode_start_s >= max(ends) for s in trace.sequences[3:6])


# -------------------------------------------------------------------------------------------------------- scripted


class ScriptedDraft(HashModel):
    """Drafts the target's greedy text, but for the places at which a script wants a rejection."""

    def __init__(self, target: HashModel, wrong: set[tuple[int, ...]]) -> None:
        super().__init__(target.vocab_size, seed=0)
        self._target, self._wrong = target, wrong

    def logits_after(self, text):
        logits = self._target.logits_after(text)
        return -logits if text in self._wrong else logits


def scripted_runner(prompts_, scripts, num_tokens: int):
    """Round i of row r accepts `scripts[r][i % 3]` of K draft tokens."""
    target = HashModel(SCRIPTED_VOCAB, 0)
    runner = serial_runner(target, target)
    wrong = set()
    for prompt, script in zip(prompts_, scripts, strict=True):
        (text,) = texts(execute(Autoregressive(), workload(1, num_tokens, texts=(prompt,)), runner))
        emitted, index = 1, 0
        while emitted < num_tokens:
            num_accepted = script[index % len(script)]
            if num_accepted < K:
                wrong.add(prompt + text[: emitted + num_accepted])
            emitted, index = emitted + num_accepted + 1, index + 1
    return serial_runner(HashModel(SCRIPTED_VOCAB, 0), ScriptedDraft(target, wrong))


SCRIPTED_VOCAB = 256  # so many that rows have tokens of their own
SCRIPTED_PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9))
SCRIPTS = ((0, 2, K), (2, K, 0), (K, 0, 2))
NUM_SCRIPTED = 30


@pytest.mark.parametrize(
    "policy",
    [
        Speculative(K),
        ssd(K, 0),
        ssd(K, 2),
        ssd(K, 1, Fallback.DRAFT_MISSING),
    ],
    ids=lambda policy: policy.name,
)
def test_rows_that_accept_nothing_some_and_all(policy, audited) -> None:
    """Thirty rounds in which one row accepts 0, another 2, another K; nothing drifts."""
    num_tokens = 1 + NUM_SCRIPTED * 3
    runner = scripted_runner(SCRIPTED_PROMPTS, SCRIPTS, num_tokens)
    rules = workload(3, num_tokens, texts=SCRIPTED_PROMPTS)
    trace = execute(policy, rules, runner)
    assert texts(trace) == texts(execute(Autoregressive(), workload(1, num_tokens, texts=SCRIPTED_PROMPTS), runner))
    for row, script in enumerate(SCRIPTS):
        rounds = [r for r in trace.rounds if r.sequence == row]
        whole = [r.num_accepted for r in rounds if r.num_drafted == K]
        assert len(whole) >= NUM_SCRIPTED - 2
        assert whole == [script[i % 3] for i in range(len(whole))]
    assert audited["target"] >= 3 * (NUM_SCRIPTED - 2)
    assert audited["draft"] >= 3 * (NUM_SCRIPTED - 2)


@pytest.mark.parametrize("policy", [Speculative(K), ssd(K, 0), ssd(K, 2)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("place", range(4))
def test_a_row_that_ends_early_changes_nothing_for_the_others(policy, place: int, audited) -> None:
    num_tokens = 61
    early = (13, 14)
    prompts_ = (*SCRIPTED_PROMPTS[:place], early, *SCRIPTED_PROMPTS[place:])
    runner = scripted_runner((*SCRIPTED_PROMPTS, early), (*SCRIPTS, (1,)), num_tokens)
    alone = texts(execute(Autoregressive(), workload(1, num_tokens, texts=prompts_), runner))
    others = {token for index, text in enumerate(alone) if index != place for token in text}
    stop = next(token for token in alone[place][:20] if token not in others)
    runs = [
        execute(policy, workload(len(those), num_tokens, stop_ids=(stop,), texts=those), runner)
        for those in (SCRIPTED_PROMPTS, prompts_)
    ]
    rounds = [
        [(r.index, r.num_drafted, r.num_accepted, r.num_emitted) for r in trace.rounds if r.sequence == index]
        for trace, indices in zip(runs, ((0, 1, 2), [i for i in range(4) if i != place]), strict=True)
        for index in indices
    ]
    assert rounds[:3] == rounds[3:] or policy.name.startswith("SSD")
    assert [s.tokens for i, s in enumerate(runs[1].sequences) if i != place] == texts(runs[0])
    assert runs[1].sequences[place].tokens == alone[place][: alone[place].index(stop) + 1]


def test_a_cache_that_advances_uniformly_fails_the_audit(audited, monkeypatch) -> None:
    """Control: rejected tokens of a row stay as long as another row accepts as many."""
    runner = scripted_runner(SCRIPTED_PROMPTS, SCRIPTS, 31)
    honest = HashModel.roll_back

    def uniform(model, length, row=0):
        honest(model, min(length + row, model.length_of(row)), row)

    monkeypatch.setattr(HashModel, "roll_back", uniform)
    with pytest.raises(AssertionError):
        execute(Speculative(K), workload(3, 31, texts=SCRIPTED_PROMPTS), runner)


# ---------------------------------------------------------------------------------------------- transformers models


@pytest.mark.parametrize("policy", OF_EVERY_KIND, ids=lambda policy: policy.name)
def test_rows_of_a_real_model_equal_their_solo_runs(policy, tiny_serial) -> None:
    texts_ = prompts(2, 12) + prompts(2, 3, seed=1) + prompts(2, 7, seed=2)
    expected = execute(Autoregressive(), Workload("test", texts_, 32, 0.0, (17,)), tiny_serial)
    trace = execute(policy, Workload("test", texts_, 32, 0.0, (17,), batch_size=4), tiny_serial)
    assert texts(trace) == texts(expected)
    if policy in INDEPENDENT:
        sampled = [
            execute(policy, Workload("test", texts_, 32, 1.0, (17,), batch_size=b), tiny_serial, seed=1) for b in (1, 4)
        ]
        assert texts(sampled[0]) == texts(sampled[1])


def test_rows_that_draft_for_themselves_are_always_accepted(self_serial) -> None:
    texts_ = prompts(2, 9) + prompts(1, 4)
    for temperature in (0.0, 1.0):
        for policy in (Speculative(3), ssd(3), ssd(3, fallback=Fallback.DRAFT_MISSING)):
            rules = Workload("test", texts_, 48, temperature, batch_size=3)
            trace = execute(policy, rules, self_serial)
            assert all(r.num_accepted == r.num_drafted for r in trace.rounds)


def test_rows_as_long_as_the_models_allow(self_serial) -> None:
    limit = self_serial.pair.max_positions
    texts_ = (prompts(1, limit - 20)[0], prompts(1, 3)[0], prompts(1, limit - 30)[0])
    expected = texts(execute(Autoregressive(), Workload("test", texts_, 15), self_serial))
    assert texts(execute(ssd(4), Workload("test", texts_, 15, batch_size=3), self_serial)) == expected


def test_a_batch_policy_is_a_policy() -> None:
    """The same runner decodes batches of any size one after another."""
    runner = hash_runner()
    policy = SpeculativeSpeculative(2, (1, 1, 1), (1, 1, 1))
    digests = [execute(policy, workload(b), runner).digest() for b in (1, 5, 2, 1)]
    assert digests[0] == digests[3]
