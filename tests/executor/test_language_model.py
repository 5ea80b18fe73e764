"""The slot cache: blocks equal single tokens, roll-back leaves no trace, branches equal plain continuations."""

import itertools

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from executor.concurrency import Runner
from executor.execute import execute
from executor.kv_cache import SlotCache, branch_mask, causal_mask
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.reference import generate
from executor.serial_draft import SerialDraft
from executor.target import Target
from executor.toy_model import FakePair
from sim.errors import BadInput
from sim.policy import Autoregressive, Speculative, SpeculativeSpeculative
from sim.trace import Lane
from sim.workload import Workload
from tests.executor.tiny_models import FAMILIES, MAX_POSITIONS, llama, mistral, qwen2, tiny

TEXT = [7, 3, 99, 12, 64, 5, 5, 80, 31, 2, 17, 120]
EXACT = {"rtol": 0.0, "atol": 1e-9}


@pytest.fixture(params=["llama", "gpt2"])
def model(request) -> LanguageModel:
    return LanguageModel(FAMILIES[request.param](2, seed=3))


def plain_logits(model: LanguageModel, text: list[int]) -> torch.Tensor:
    """(n, V) from one pass of the transformers model, no cache."""
    with torch.inference_mode():
        return model.model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


@pytest.mark.parametrize("width", [1, 2, 5, 9])
def test_a_block_equals_one_token_at_a_time(model: LanguageModel, width: int) -> None:
    prefix, block = TEXT[:3], TEXT[3 : 3 + width]
    model.append(prefix)
    together = model.append(block)
    model.roll_back(len(prefix))
    one_by_one = torch.cat([model.append([token]) for token in block])
    assert torch.allclose(together, one_by_one, **EXACT)
    assert torch.allclose(together, plain_logits(model, prefix + block)[len(prefix) :], **EXACT)


def test_the_last_draft_token_does_not_reach_earlier_rows(model: LanguageModel) -> None:
    model.append(TEXT[:4])
    first = model.append([*TEXT[4:8], 1])
    model.roll_back(4)
    second = model.append([*TEXT[4:8], 2])
    assert torch.equal(first[:-1], second[:-1])
    assert not torch.allclose(first[-1], second[-1])


@pytest.mark.parametrize("length", [0, 1, len(TEXT) - 1, len(TEXT)])
def test_roll_back_keeps_exactly_what_it_says(model: LanguageModel, length: int) -> None:
    model.append(TEXT)
    model.roll_back(length)
    assert model.length_of(0) == length
    assert model.texts[0] == TEXT[:length]
    continued = model.append([11, 13])
    assert torch.allclose(continued, plain_logits(model, [*TEXT[:length], 11, 13])[length:], **EXACT)


@pytest.mark.parametrize("length", [-1, len(TEXT) + 1])
def test_roll_back_beyond_the_ends_is_refused(model: LanguageModel, length: int) -> None:
    model.append(TEXT)
    with pytest.raises(ValueError, match="roll back"):
        model.roll_back(length)
    assert model.length_of(0) == len(TEXT)


def test_no_position_beyond_the_limit_is_fed(model: LanguageModel) -> None:
    model.append([1] * (MAX_POSITIONS - 1))
    model.append([1])
    with pytest.raises(ValueError, match="beyond"):
        model.append([1])


def test_only_the_rows_asked_for_are_returned(model: LanguageModel) -> None:
    every = model.append(TEXT)
    model.roll_back(0)
    assert torch.allclose(model.append(TEXT, num_logits=2), every[-2:], **EXACT)


def test_rows_equal_solo_runs(model: LanguageModel) -> None:
    texts = torch.tensor([TEXT, TEXT[::-1]])
    rows = model.with_rows(2)
    logits = torch.cat([rows.append_rows(texts[:, :5]), rows.append_rows(texts[:, 5:])], 1)
    for text, got in zip(texts.tolist(), logits, strict=True):
        assert torch.allclose(got, plain_logits(model, text), **EXACT)
    assert model.length_of(0) == 0


def test_rows_of_different_lengths_equal_solo_runs(model: LanguageModel) -> None:
    """Prompts of 3, 7 and 12 tokens, then blocks of different widths; one row rolls back, one leaves, one rests."""
    texts = [[5, 9, 77], TEXT[:7], TEXT[::-1]]
    model.begin(3)

    def feed(rows, blocks, num_logits) -> None:
        logits = model.feed(rows, blocks, num_logits)
        for row, block, num, got in zip(rows, blocks, num_logits, logits, strict=True):
            texts[row] = texts[row][: model.length_of(row) - len(block)] + block
            assert torch.allclose(got, plain_logits(model, texts[row])[-num:], **EXACT)
            assert model.texts[row] == texts[row]

    feed([0, 1, 2], [list(text) for text in texts], [3, 7, 1])
    feed([2, 0, 1], [[1, 2], [3], [4, 5, 6, 7]], [2, 1, 3])
    model.roll_back(8, row=1)
    feed([0, 1], [[8, 9, 10], [11]], [3, 1])
    feed([1, 2], [[12], [13, 14]], [1, 2])
    model.keep([1, 2])
    feed([1, 2], [[15, 16], [17]], [2, 1])
    feed([2], [[18]], [1])
    model.keep([2])
    feed([2], [[19, 20]], [2])


def test_branches_of_rows_equal_plain_continuations(model: LanguageModel) -> None:
    """Three rows of different lengths, of which the first and the last build two and three branches."""
    model.begin(3)
    prefixes = [TEXT[:4], TEXT[:6], TEXT[:9]]
    model.feed([0, 1, 2], prefixes, [1, 1, 1])
    rows, lengths = [2, 0], [9, 4]
    starts = torch.tensor([[9, 7, 8], [4, 2, 1]])  # the last branch of row 0 stands for nothing
    tokens = torch.tensor([[[21, 3, 9], [22, 4, 9], [23, 5, 8]], [[31, 1, 2], [32, 2, 2], [0, 0, 0]]])
    num_slots = model.level(rows)
    mask = branch_mask(starts, num_slots, 3, model.dtype)
    for step in range(3):
        visible = mask[..., : num_slots + 3 * (step + 1)]
        logits = model.append_branches(rows, tokens[..., step], starts + step, visible)
        for place, branch in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            text = prefixes[rows[place]][: starts[place, branch]] + tokens[place, branch, : step + 1].tolist()
            assert torch.allclose(logits[place, branch], plain_logits(model, text)[-1], **EXACT)
    for row, length in zip(rows, lengths, strict=True):
        model.roll_back(length, row)
        assert model.texts[row] == prefixes[row]
    (again,) = model.feed([0], [[50]], [1])
    assert torch.allclose(again, plain_logits(model, [*prefixes[0], 50])[-1:], **EXACT)


def test_every_branch_equals_a_plain_continuation(model: LanguageModel) -> None:
    """Branches start after 0, 1, 2 of two draft tokens and see neither the rest nor one another."""
    prefix, drafted, num_steps = TEXT[:5], [40, 41], 3
    starts, branch_tokens = [0, 1, 1, 2, 2], torch.tensor([[9, 8, 7], [9, 8, 7], [21, 8, 7], [22, 1, 1], [9, 0, 3]])
    model.append(prefix + drafted)
    positions = torch.tensor([len(prefix) + k for k in starts])
    mask = branch_mask(positions[None], model.length_of(0), num_steps, model.dtype)
    steps = []
    for step in range(num_steps):
        visible = mask[..., : model.length_of(0) + len(starts)]
        steps.append(model.append_branches([0], branch_tokens[None, :, step], positions[None] + step, visible)[0])
    for branch, k in enumerate(starts):
        text = prefix + drafted[:k] + branch_tokens[branch].tolist()
        expected = plain_logits(model, text)[-num_steps:]
        assert torch.allclose(torch.stack([logits[branch] for logits in steps]), expected, **EXACT)


def test_the_cache_grows_beyond_its_capacity() -> None:
    cache = SlotCache(num_layers=1, capacity=2)
    states = torch.randn(1, 2, 7, 4)
    for start, end in itertools.pairwise([0, 1, 3, 7]):
        cache.aim([0], end - start)
        keys, values = cache.update(states[:, :, start:end], -states[:, :, start:end], 0)
        cache.advance(0, end - start)
    assert torch.equal(keys, states) and torch.equal(values, -states)


def test_further_rows_take_room_for_their_texts_only(model: LanguageModel) -> None:
    rows = model.with_rows(2)
    for start in range(0, 6, 2):
        rows.append_rows(torch.tensor([TEXT, TEXT[::-1]])[:, start : start + 2])
    num_slots = {tensor.shape[2] for layer in rows._cache.storage() for tensor in layer}
    assert max(num_slots) <= 12 < MAX_POSITIONS


def test_a_causal_mask_shows_the_context_and_what_came_before() -> None:
    visible = causal_mask(3, 2, torch.float64)[0, 0] == 0
    assert visible.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_accepts_what_can_be_rolled_back(family: str) -> None:
    model = LanguageModel(FAMILIES[family](1, seed=0))
    model.check()
    assert model.length_of(0) == 0


def test_the_self_test_refuses_a_cache_that_does_not_roll_back(monkeypatch) -> None:
    monkeypatch.setattr(SlotCache, "roll_back", lambda cache, length, row: None)
    with pytest.raises(BadInput, match="rolled-back"):
        LanguageModel(llama(1, seed=0), name="broken").check()


# ------------------------------------------------------------------------------------------------------------ families


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_text_that_transformers_generates(family: str) -> None:
    """A ragged batch of prompts, decoded by AR, SD and SSD; the draft is the first layer of the target."""
    target, draft = FAMILIES[family](2, seed=0), FAMILIES[family](1, seed=1)
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    models = [LanguageModel(model) for model in (target, draft)]
    for model in models:
        model.check()
    roles = Target(models[0], Recorder(Lane.TARGET)), SerialDraft(models[1])
    runner = Runner(FakePair(vocab_size=128, max_positions=MAX_POSITIONS), "serial", *roles, {})
    rules = Workload("test", tuple(tuple(TEXT[:length]) for length in (3, 7, 12)), 20, batch_size=3)
    expected = [sequence.tokens for sequence in generate(runner, rules).sequences]
    assert len({token for text in expected for token in text}) > 8  # the texts have not collapsed
    for policy in (Autoregressive(), Speculative(3), SpeculativeSpeculative(3, (2,) * 4, (2,) * 4)):
        trace = execute(policy, rules, runner)
        assert [sequence.tokens for sequence in trace.sequences] == expected, policy.name
        accepted = sum(r.num_accepted for r in trace.rounds)
        assert accepted > 0 or isinstance(policy, Autoregressive)


def test_a_window_that_no_text_outgrows_is_none() -> None:
    LanguageModel(mistral(1, seed=0, sliding_window=MAX_POSITIONS))
    LanguageModel(qwen2(1, seed=0, sliding_window=16))  # not used unless the configuration says so
    LanguageModel(tiny(Gemma2ForCausalLM, Gemma2Config, 2, seed=0, head_dim=8, sliding_window=MAX_POSITIONS)).check()


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
GPT_NEO = {"attention_types": [[["global", "local"], 1]], "window_size": 16}
BART = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
REFUSED = {
    "mistral with a window": (lambda: mistral(1, seed=0, sliding_window=255), "256 positions, .* window, got 255"),
    "gemma2 with windows": (
        lambda: tiny(Gemma2ForCausalLM, Gemma2Config, 2, seed=0, head_dim=8, sliding_window=16),
        "window, got 16",
    ),
    "gpt-neo with windows": (lambda: tiny(GPTNeoForCausalLM, GPTNeoConfig, 2, seed=0, **GPT_NEO), "window, got 16"),
    "recurrent": (lambda: tiny(MambaForCausalLM, MambaConfig, 1, seed=0), "max_position_embeddings|rolled back"),
    "recurrent, unnamed": (
        lambda: tiny(RwkvForCausalLM, RwkvConfig, 2, seed=0, attention_hidden_size=32),
        "max_position_embeddings|rolled-back",
    ),
    "hybrid": (lambda: llama(2, seed=0, layer_types=["full_attention", "linear_attention"]), "got .'linear_attention'"),
    "half of an encoder-decoder": (lambda: tiny(BartForCausalLM, BartConfig, 1, seed=0, **BART), "rolled-back|decoder"),
    "frequencies that depend on the text": (
        lambda: tiny(Phi3ForCausalLM, Phi3Config, 1, seed=0, pad_token_id=0, rope_parameters=LONG_ROPE),
        "rotary frequencies .* got 'longrope'",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_rolled_back_is_refused_at_load(kind: str) -> None:
    make, complaint = REFUSED[kind]
    with pytest.raises(BadInput, match=complaint):
        LanguageModel(make(), name=kind).check()


@pytest.mark.parametrize("fault", ["mask", "positions", "padding"])
def test_the_self_test_finds_a_pass_that_ignores_what_it_is_told(fault: str, monkeypatch) -> None:
    """Controls: a causal mask over the slots instead of the branches', positions by slot, padding that is seen."""
    model = LanguageModel(llama(2, seed=0), name="faulty")
    honest = model._pass

    def faulty(tokens, positions, mask, cache, wanted):
        num_slots, num_tokens = mask.shape[-1], tokens.shape[1]
        if fault == "mask" and len(mask) == 2 and wanted is None:
            mask = causal_mask(num_tokens, num_slots - num_tokens, mask.dtype)
        if fault == "positions":
            positions = torch.arange(num_slots - num_tokens, num_slots).expand_as(positions)
        if fault == "padding" and len(mask) == 2:
            mask = torch.zeros_like(mask)
        return honest(tokens, positions, mask, cache, wanted)

    monkeypatch.setattr(model, "_pass", faulty)
    with pytest.raises(BadInput, match="rolled-back"):
        model.check()
