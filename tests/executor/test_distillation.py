"""The script that distils the draft of `smollm2`: what it generates is the target's, what it measures is acceptance."""

import itertools

import pytest
import torch
import yaml
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.scripts import distil_smollm2_draft as script
from experiments.scripts.distil_smollm2_draft import BatchedTarget, Draft, Prompt, Text, batches, generate, losses

VOCAB_SIZE = 64
PROMPTS = [Prompt("text", (5, 6, 7)), Prompt("text", (8, 9, 10, 11, 12, 13)), Prompt("text", (20,))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def texts(folder) -> list[Text]:
    return generate(BatchedTarget(folder, 64), PROMPTS, [0.0, 0.0, 1.0], num_new=24, seed=0)


@torch.inference_mode()
def test_texts_and_states_are_those_of_the_target(target, texts) -> None:
    ended = [script.END in text.tokens[text.num_prompt_tokens :] for text in texts]
    for text, prompt, is_ended in zip(texts, PROMPTS, ended, strict=True):
        assert tuple(text.tokens[: text.num_prompt_tokens].tolist()) == prompt.tokens
        assert len(text.hidden) == len(text.tokens) - 1
        assert is_ended or len(text.tokens) == text.num_prompt_tokens + 24
        states = target.model(text.tokens[None].long()).last_hidden_state[0, :-1]
        assert torch.allclose(text.hidden.float(), states, rtol=2e-3, atol=2e-3)
        if text.temperature == 0:
            greedy = target.lm_head(states).argmax(-1)[text.num_prompt_tokens - 1 :]
            assert torch.equal(greedy, text.tokens[text.num_prompt_tokens :].long())


def test_a_draft_of_all_layers_and_a_full_head_loses_nothing(folder, texts) -> None:
    draft = Draft(folder, torch.arange(VOCAB_SIZE), layers=(0, 1, 2))
    _, distance = losses(draft, texts)
    assert distance < 5e-3
    figures = script.measured(draft, texts)["all"]
    assert figures["acceptance"] > 0.995
    greedy = script.measured(draft, texts[:2])["all"]
    assert greedy["agreement"] == 1
    assert script.measured(Draft(folder, torch.arange(VOCAB_SIZE), layers=(2,)), texts)["all"]["acceptance"] < 0.9


def test_what_the_head_lacks_is_not_accepted(folder, target, texts) -> None:
    kept = torch.arange(0, VOCAB_SIZE, 2)
    draft = Draft(folder, kept, layers=(0, 1, 2))
    acceptance = script.measured(draft, texts)["all"]["acceptance"]
    assert acceptance == pytest.approx(script.head_mass(draft, texts), abs=5e-3)
    states = torch.cat([text.hidden[text.num_prompt_tokens - 1 :] for text in texts]).float()
    probs = functional.linear(states, target.lm_head.weight).softmax(-1)
    assert acceptance == pytest.approx(probs[:, ::2].sum(-1).mean().item(), abs=5e-3)


def test_every_text_comes_once_an_epoch() -> None:
    texts = [Text("text", 1.0, 1, torch.arange(3 + i % 5), torch.zeros(2 + i % 5, 1)) for i in range(22)]
    source = batches(texts, size=4, seed=0)
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < len(texts):
            seen += [id(text) for text in next(source)]
        assert sorted(seen) == sorted(map(id, texts))


def test_evaluation_prompts_are_no_training_prompts() -> None:
    source = yaml.safe_load(script.PROMPT_FILE.read_text())
    training, evaluation = source["training"], source["evaluation"]
    for kind in script.KINDS:
        assert not set(training["templates"][kind]) & set(evaluation["templates"][kind])
    for field, values in evaluation["fields"].items():
        assert not set(values) & set(training["fields"][field]), field


def test_prompts_are_filled_in_and_reproducible() -> None:
    class Letters:
        """Token ids are code points."""

        def encode(self, text: str):
            return type("Encoding", (), {"ids": list(map(ord, text))})

    first, again = (list(itertools.islice(script.prompts("training", 1, Letters()), 300)) for _ in range(2))
    assert first == again and len(set(first)) == 300
    texts = ["".join(map(chr, prompt.tokens)) for prompt in first]
    assert not any("{topic" in text or "{character" in text for text in texts)
    assert {prompt.kind for prompt in first} == set(script.KINDS)
    assert all(
        text.endswith("<|im_start|>assistant\n") == (p.kind != "text") for text, p in zip(texts, first, strict=True)
    )
