"""What a request may ask for: settings of its own, stop strings, its tokens as they come, their log-probabilities."""

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from executor.draft_service import DraftService
from executor.execute import execute, requests
from executor.generated_text import GeneratedText
from executor.pairs import load_pair
from executor.recorder import now_s
from executor.toy_model import HashModel, serial_runner
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.trace import StopReason
from sim.workload import Sampling, Workload
from tests.executor.test_loops import check_counters, ssd, texts
from tests.executor.tiny_models import prompts

# Bytes of "é" and "€" stand alone, as in a byte-level vocabulary; some tokens hold several letters.
TOKENS = ["a", "b", "©", "¬", "Ġa", "c", "ba", "ab", "â", "bc", "Ã", "cc", "Ĥ", "Ġ", "<end>", "Ċ"]
VOCAB_SIZE = len(TOKENS)
PROMPTS = ((1, 2, 3), (4,), (5, 6, 7), (4,), (9, 9))
K = 4
OF_EVERY_KIND = [
    Autoregressive(),
    Speculative(K),
    *(ssd(K, fan_out, fallback) for fan_out, fallback in ((2, Fallback.DRAFT), (1, Fallback.DRAFT_MISSING))),
    *(ssd(K, 2, fallback) for fallback in (Fallback.NONE, Fallback.NGRAM)),
]
MIXED = (
    Sampling(),
    Sampling(1.0, top_k=3),
    Sampling(0.7, top_p=0.8, repetition_penalty=1.3),
    Sampling(0.0, repetition_penalty=1.5),
    Sampling(1.3, min_p=0.1),
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_level_tokenizer()


def hash_runner(agreement: float = 0.7):
    runner = serial_runner(HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0, own_seed=1, agreement=agreement))
    runner.pair.tokenizer = TOKENIZER
    return runner


def workload(num_tokens: int = 24, **rules) -> Workload:
    return Workload("test", PROMPTS, num_tokens, **rules)


def decoded(tokens) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


# ------------------------------------------------------------------------------------------------------ stop strings


def cut(text: tuple[int, ...], stop_strings, stop_ids=()) -> tuple[tuple[int, ...], StopReason]:
    """Where a text ends, each of its beginnings decoded as a whole."""
    for num in range(1, len(text) + 1):
        if text[num - 1] in stop_ids:
            return text[:num], StopReason.STOP_ID
        if any(string in decoded(text[:num]) for string in stop_strings):
            return text[:num], StopReason.STOP_STRING
    return text, StopReason.LENGTH


@pytest.mark.parametrize("policy", OF_EVERY_KIND, ids=lambda policy: policy.name)
def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(policy) -> None:
    """Strings from all over the greedy texts, within a token, over two and more, inside blocks and at their borders."""
    runner = hash_runner()
    full = texts(execute(Autoregressive(), workload(), runner))
    text = decoded(full[0]).replace("\ufffd", "")
    strings = [text[start : start + length] for start in range(0, len(text) - 3, 4) for length in (1, 3)]
    inside_a_block = 0
    for index, string in enumerate(strings):
        rules = workload(
            stop_strings=(string, "no such text"), stop_ids=(5,) * (index % 3 == 0), batch_size=1 + index % 3
        )
        trace = execute(policy, rules, runner, log_probs=True)
        expected = [cut(text, rules.stop_strings, rules.stop_ids) for text in full]
        assert [(s.tokens, s.stop_reason) for s in trace.sequences] == expected
        assert [s.stopped for s in trace.sequences] == [reason != "length" for _, reason in expected]
        assert [len(s.log_probs) for s in trace.sequences] == [len(tokens) for tokens, _ in expected]
        assert [s.num_decoded for s in trace.sequences] == [
            sum(r.num_emitted for r in trace.rounds if r.sequence == s.index) for s in trace.sequences
        ]
        inside_a_block += sum(r.num_emitted == r.num_accepted > 0 for r in trace.rounds)
    assert inside_a_block > 0 or policy == Autoregressive()


def test_stop_strings_need_a_tokenizer_and_characters() -> None:
    runner = hash_runner()
    runner.pair.tokenizer = None
    with pytest.raises(BadInput, match="stop_strings: need a pair with a tokenizer"):
        execute(Autoregressive(), workload(stop_strings=("a",)), runner)
    for strings, message in ((("",), "none of them empty"), ("ab", "tuple"), (("\ufffd",), "U\\+FFFD")):
        with pytest.raises(BadInput, match=message):
            workload(stop_strings=strings)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30), st.text("ab cé€", min_size=1, max_size=4))
def test_text_decoded_as_it_comes_is_the_decoded_text(tokens, string) -> None:
    text = GeneratedText(TOKENIZER, (string,))
    pieces = []
    for num, token in enumerate(tokens, start=1):
        pieces.append(text.add(token))
        assert text.holds_stop_string == (string in decoded(tokens[:num]))
        assert "".join(pieces) == decoded(tokens[:num]).rstrip("\ufffd")
    assert "".join(pieces) + text.rest() == decoded(tokens)


def test_text_of_the_packaged_tokenizer_comes_whole() -> None:
    tokenizer = load_pair("stdlib").tokenizer
    for string in ("def f(x):\n    return 'naïve €uro 🚀'\n", "日本語 🇫🇷\t\x00 end"):
        tokens = tokenizer.encode(string, add_special_tokens=False).ids
        text = GeneratedText(tokenizer)
        pieces = [text.add(token) for token in tokens]
        assert len(pieces) < len(string.encode()) + 1 and "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + text.rest() == tokenizer.decode(tokens, skip_special_tokens=False) == string


# --------------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("policy", OF_EVERY_KIND, ids=lambda policy: policy.name)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_streamed_tokens_are_the_sequences(policy, batch_size: int) -> None:
    runner = hash_runner()
    rules = workload(sampling=MIXED, stop_ids=(14,), stop_strings=("ab", "€"), batch_size=batch_size)
    news = []
    trace = execute(policy, rules, runner, seed=3, on_tokens=news.append)
    assert {n.stop_reason for n in news} >= {None, StopReason.STOP_ID, StopReason.STOP_STRING}
    for sequence in trace.sequences:
        own = [n for n in news if n.sequence == sequence.index]
        assert sum((n.tokens for n in own), ()) == sequence.tokens
        assert "".join(n.text for n in own) == decoded(sequence.tokens)
        assert [n.stop_reason for n in own] == [None] * (len(own) - 1) + [sequence.stop_reason]
        rounds = [r.num_emitted for r in trace.rounds if r.sequence == sequence.index]
        assert [len(n.tokens) for n in own] == [1, *rounds]
    assert execute(policy, rules, runner, seed=3).digest() == trace.digest()


def test_without_a_tokenizer_tokens_are_streamed_alone() -> None:
    runner, news = hash_runner(), []
    runner.pair.tokenizer = None
    trace = execute(Speculative(2), workload(1), runner, on_tokens=news.append)
    assert [(n.tokens, n.text) for n in news] == [(s.tokens, None) for s in trace.sequences]
    execute(Speculative(2), workload(0), runner, on_tokens=lambda _: pytest.fail("no token was asked for"))


def test_a_slow_listener_is_in_no_operation() -> None:
    """Tokens are handed on between operations: none is under way while the listener has them."""
    heard_s: list[tuple[float, float]] = []

    def listen(_) -> None:
        start_s = now_s()
        time.sleep(0.001)
        heard_s.append((start_s, now_s()))

    spans = execute(ssd(2), workload(8, batch_size=2), hash_runner(), on_tokens=listen).spans
    assert all(s.end_s <= start_s or end_s <= s.start_s for s in spans for start_s, end_s in heard_s)


# ------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_probabilities_are_those_of_the_raw_logits(batch_size: int) -> None:
    """Whatever the settings; one for each token, the first included."""
    runner = hash_runner()
    target = HashModel(VOCAB_SIZE, 0)
    rules = workload(sampling=MIXED, stop_ids=(5,), batch_size=batch_size)
    for policy in OF_EVERY_KIND:
        trace = execute(policy, rules, runner, seed=1, log_probs=True)
        for sequence, prompt in zip(trace.sequences, PROMPTS, strict=True):
            expected = [
                target.logits_after(prompt + sequence.tokens[:i]).log_softmax(-1)[token].item()
                for i, token in enumerate(sequence.tokens)
            ]
            assert sequence.log_probs == pytest.approx(expected, abs=1e-12)


def test_log_probabilities_of_greedy_decoders_agree(tiny_serial) -> None:
    rules = Workload("test", prompts(3, 9), 24, batch_size=3)
    runs = [execute(p, rules, tiny_serial, log_probs=True) for p in (Autoregressive(), Speculative(3), ssd(3))]
    for sequences in zip(*(run.sequences for run in runs), strict=True):
        assert len(sequences[0].log_probs) == 24
        for other in sequences[1:]:
            assert other.log_probs == pytest.approx(sequences[0].log_probs, abs=1e-9)


def test_no_log_probability_is_computed_unasked(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda *_: pytest.fail("computed"))
    trace = execute(ssd(3), workload(sampling=MIXED), hash_runner())
    assert all(s.log_probs == () for s in trace.sequences)


def test_log_probabilities_and_reasons_are_stored(tmp_path) -> None:
    rules = workload(stop_ids=(5,), stop_strings=("a",))
    trace = execute(Speculative(2), rules, hash_runner(), log_probs=True)
    trace.write(tmp_path)
    assert type(trace).read(tmp_path).sequences == trace.sequences
    assert {s.stop_reason for s in trace.sequences} == {StopReason.STOP_ID, StopReason.STOP_STRING}


# -------------------------------------------------------------------------------------------- settings of each prompt

INDEPENDENT = [policy for policy in OF_EVERY_KIND if getattr(policy, "fallback", None) is not Fallback.DRAFT]


@pytest.mark.parametrize("policy", INDEPENDENT, ids=lambda policy: policy.name)
def test_rows_of_unequal_settings_equal_their_solo_runs(policy) -> None:
    """In any company and order; greedy rows are those of a greedy run."""
    runner = hash_runner()
    rules = workload(sampling=MIXED, stop_ids=(5,))
    alone = execute(policy, rules, runner, seed=4)
    check_counters(alone, rules)
    for order in ((0, 1, 2, 3, 4), (4, 0, 2, 1, 3)):
        chosen = rules.select(order)
        for batch_size in (2, 5):
            together = Workload(**(vars(chosen) | {"batch_size": batch_size}))
            assert texts(execute(policy, together, runner, seed=4)) == [alone.sequences[i].tokens for i in order]
    greedy = execute(Autoregressive(), workload(stop_ids=(5,)), runner)
    assert alone.sequences[0].tokens == greedy.sequences[0].tokens


@pytest.mark.parametrize("policy", OF_EVERY_KIND, ids=lambda policy: policy.name)
def test_greedy_text_under_a_repetition_penalty_does_not_depend_on_the_policy(policy) -> None:
    runner = hash_runner()
    penalties = (1.0, 1.3, 2.0, 0.7, 1.3)
    rules = workload(sampling=tuple(Sampling(repetition_penalty=p) for p in penalties), batch_size=3)
    target, expected = HashModel(VOCAB_SIZE, 0), []
    for prompt, penalty in zip(PROMPTS, penalties, strict=True):
        text = list(prompt)
        for _ in range(rules.max_new_tokens):
            logits = target.logits_after(tuple(text)).clone()
            for token in set(text):
                logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            text.append(int(logits.argmax()))
        expected.append(tuple(text[len(prompt) :]))
    assert texts(execute(policy, rules, runner)) == expected
    assert expected != texts(execute(policy, workload(batch_size=3), runner))


@pytest.mark.parametrize("setting", [Sampling(repetition_penalty=1.4), Sampling(0.8, 3, 0.9, 0.05, 1.4)])
def test_a_model_that_drafts_for_itself_under_any_settings_is_always_accepted(setting) -> None:
    """So draft steps, branches and verification see the same text when they penalise."""
    runner = hash_runner(agreement=1.0)
    rules = workload(40, sampling=(setting,) * len(PROMPTS), batch_size=3)
    for policy in (Speculative(3), ssd(3), ssd(3, 1, Fallback.DRAFT_MISSING)):
        trace = execute(policy, rules, runner, seed=3)
        assert all(r.num_accepted == r.num_drafted for r in trace.rounds)
    sources = [r.source for r in execute(ssd(3), workload(40, sampling=(setting,) * 5), runner).rounds if r.index]
    assert "hit" in sources and (setting.temperature or "miss" not in sources)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-300, 1e-8, 1e-4])
def test_almost_no_temperature_is_greedy(temperature: float) -> None:
    """Never empty, never undefined; in one batch with a row at temperature 1."""
    cold = Sampling(temperature, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    greedy = Sampling(repetition_penalty=1.2)
    expected = texts(execute(Autoregressive(), workload(sampling=(greedy,) * 5), hash_runner()))
    for policy in (Autoregressive(), Speculative(3), ssd(3, 1, Fallback.DRAFT_MISSING)):
        rules = workload(sampling=(cold, Sampling(1.0), cold, Sampling(1.0), cold), batch_size=5)
        trace = execute(policy, rules, hash_runner())
        assert [s.tokens for s in trace.sequences[::2]] == expected[::2]
        assert trace.meta["num_bad_draft_rows"] == 0


def test_a_seed_of_its_own_makes_a_request_independent_of_all_others() -> None:
    """Of the run's seed, of the order, of requests added; two seeds differ, and the same seed twice is the same."""
    runner = hash_runner()
    plain, own = Sampling(1.0), Sampling(1.0, seed=7)
    for policy in (Autoregressive(), Speculative(3), ssd(3)):

        def run(prompts_, sampling, seed=0, policy=policy):
            return texts(execute(policy, Workload("test", prompts_, 20, sampling=sampling), runner, seed))

        first = run(((4,),), (own,))[0]
        others = run(((1, 2), (4,), (4,), (4,), (4,)), (plain, plain, own, Sampling(1.0, seed=8), own), seed=5)
        assert others[2] == others[4] == first
        assert len({others[1], others[2], others[3]}) == 3
        assert run(((4,), (4,)), (plain, plain))[0] == run(((4,), (4,), (4,)), (own, plain, plain))[1]
    trace = execute(Speculative(3), Workload("test", ((4,), (4,)), 4, sampling=(plain, own)), runner, seed=5)
    assert (trace.meta["seed"], trace.meta["own_seeds"]) == (5, {"1": 7})


def test_prompts_that_repeat_under_other_settings_may_change_places() -> None:
    one, other = Sampling(1.0), Sampling(1.0, top_k=3)
    prompts_, sampling = ((4,), (4,), (4,)), (one, other, one)
    for policy in (Autoregressive(), Speculative(3), ssd(3, 1, Fallback.DRAFT_MISSING)):
        rules = Workload("test", prompts_, 20, sampling=sampling, batch_size=2)
        first = texts(execute(policy, rules, hash_runner(), seed=5))
        assert first[0] != first[2]
        moved = texts(execute(policy, rules.select((1, 0, 2)), hash_runner(), seed=5))
        assert moved == [first[1], first[0], first[2]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": -1}, "seed: must be an integer >= 0, got -1"),
        ({"seed": "7"}, "seed: must be an integer >= 0, got '7'"),
        ({"forced_acceptance": 3}, "forced_acceptance: must be a list, got 3"),
        ({"forced_acceptance": (1.5,)}, "forced_acceptance: must be an integer >= 0, got 1.5"),
        ({"on_draft_failure": "stop"}, "on_draft_failure: must be one of raise, continue, got 'stop'"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(wrong, message: str) -> None:
    with pytest.raises(BadInput) as told:
        execute(Speculative(2), workload(4), hash_runner(), **wrong)
    assert str(told.value) == message


def test_both_roles_are_told_the_same_settings_and_the_trace_shows_them(monkeypatch) -> None:
    told = {"target": [], "draft": []}
    begin = DraftService.begin

    def listen(service, requests_, **options):
        told["draft"].append([r.sampling for r in requests_])
        begin(service, requests_, **options)

    monkeypatch.setattr(DraftService, "begin", listen)
    runner = hash_runner()
    rules = workload(4, sampling=MIXED, batch_size=5)
    identities = []
    for policy in (Autoregressive(), Speculative(2), ssd(2)):
        identities.append(execute(policy, rules, runner).workload)
        told["target"].append([r.sampling for r in runner.target._requests])
    assert told["target"] == [list(MIXED)] * 3 and told["draft"] == [list(MIXED)] * 2
    assert identities == [rules.identity()] * 3
    assert [entry["top_k"] for entry in identities[0]["sampling"]] == [0, 3, 0, 0, 0]
    assert execute(Autoregressive(), workload(4, temperature=0.5), runner).workload["sampling"] == []


def test_down_weighting_needs_one_sampled_row() -> None:
    policy = SpeculativeSpeculative(1, (1, 1), (1, 1), downweight=0.5)
    with pytest.raises(BadInput, match="downweight: must be 1 at temperature 0"):
        execute(policy, workload(4, sampling=(Sampling(top_k=3),) * 5), hash_runner())
    greedy = texts(execute(Autoregressive(), workload(), hash_runner()))
    trace = execute(policy, workload(sampling=(Sampling(), *MIXED[1:]), batch_size=5), hash_runner())
    assert trace.sequences[0].tokens == greedy[0]


def test_every_request_has_its_settings() -> None:
    asked = list(requests(workload(sampling=MIXED, stop_strings=("a",)), seed=2))
    assert [r.sampling for r in asked] == list(MIXED)
    assert [r.seed for r in asked] == [2] * 5 and [r.occurrence for r in asked] == [
        0
    ] * 5  # the same prompt twice, but not the same settings
    assert {r.stop_strings for r in asked} == {("a",)}


def test_all_kinds_of_ends_occur_in_these_tests() -> None:
    """Control of the fixture: characters are split over two and three tokens in the greedy texts, and some are never
    completed."""
    full = texts(execute(Autoregressive(), workload(), hash_runner()))
    text = "".join(map(decoded, full))
    assert {"é", "€", "\ufffd"} <= set(text)
    assert len(set(itertools.chain.from_iterable(full))) > VOCAB_SIZE // 2
