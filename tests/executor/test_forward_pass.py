"""The steps of a Llama and its relatives give the numbers of their forward methods."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from executor.forward_pass import GeneralPass, forward_pass
from executor.kv_cache import CausalMasks, SlotCache, branch_mask, causal_mask, ragged_mask
from executor.language_model import LanguageModel
from executor.llama_pass import RELATIVES, LlamaPass
from tests.executor.tiny_models import gpt2, llama

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def relative(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    """A small random model of a type, biases and norms random too."""
    shape = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    if kind == "mistral":
        shape["sliding_window"] = None
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | settings))
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, mean=0.5, std=0.3)
    return model.to(dtype).eval()


@torch.inference_mode()
def all_logits(model: PreTrainedModel, one_pass: Any) -> list[torch.Tensor]:
    """A prompt, a ragged block of both rows, a block of the second alone, a step of three branches of the first."""
    dtype, tokens = model.dtype, torch.arange(40).view(2, 20).mul(7) % 128
    cache = SlotCache(2, capacity=8, num_rows=2)
    cache.aim([0, 1], 6)
    positions = torch.arange(6).expand(2, -1)
    logits = [one_pass(tokens[:, :6], positions, causal_mask(6, 0, dtype), cache, None)]
    cache.advance(0, 6)
    cache.advance(1, 3)
    cache.aim([0, 1], 4)
    positions = torch.tensor([[6], [3]]) + torch.arange(4)
    wanted = torch.tensor([[3, 1], [2, 0]])
    logits.append(one_pass(tokens[:, 6:10], positions, ragged_mask(4, [6, 3], dtype), cache, wanted))
    cache.advance(1, 4)
    cache.aim([1], 2)
    logits.append(one_pass(tokens[1:, 10:12], torch.tensor([[7, 8]]), causal_mask(2, 7, dtype), cache, 1))
    cache.aim([0], 3)
    visible = torch.tensor([[6, 5, 2]])
    logits.append(one_pass(tokens[:1, 12:15], visible, branch_mask(visible, 6, 1, dtype), cache, None))
    return logits


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", RELATIVES)
def test_the_steps_equal_the_forward_method(kind: str, dtype: torch.dtype) -> None:
    settings = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    model = relative(kind, dtype, **settings)
    expected = all_logits(model, GeneralPass(model))
    for got, wanted in zip(all_logits(model, LlamaPass(model)), expected, strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_queries_of_heads_that_share_keys_may_be_queries_of_one_head(kind: str) -> None:
    model = relative(kind)
    expected = all_logits(model, GeneralPass(model))
    for got, wanted in zip(all_logits(model, LlamaPass(model, folds_queries=True)), expected, strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-10)


def test_weights_that_are_too_large_to_be_kept_twice_give_the_same(monkeypatch) -> None:
    monkeypatch.setattr("executor.llama_pass.MOST_COPIED_BYTES", 0)
    model = relative("qwen2")
    before = sum(weight.nbytes for weight in model.parameters())
    expected = all_logits(model, GeneralPass(model))
    for got, wanted in zip(all_logits(model, LlamaPass(model)), expected, strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-10)
    storages = {weight.untyped_storage() for weight in model.parameters()}
    assert sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) == before


def test_packed_weights_give_the_same_for_every_width() -> None:
    """Large enough that every matrix is packed. The widths that a verification may have agree among themselves too."""
    model = relative(
        "llama",
        torch.float32,
        hidden_size=512,
        intermediate_size=600,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=600,
        initializer_range=0.05,
    )
    text = [7, 3, 99, 12, 64, 5, 5, 80, 31, 2, 17, 120]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    stepwise = LanguageModel(model)
    for width in (1, 2, 3, 4, 6, 12):
        logits = torch.cat([stepwise.append(text[start : start + width]) for start in range(0, 12, width)])
        assert torch.allclose(logits, expected, rtol=0, atol=2e-5 * expected.abs().max())
        stepwise.roll_back(0)


class OtherLlama(LlamaForCausalLM):
    """Might do anything."""


class OtherLinear(torch.nn.Linear):
    """Might do anything."""


@pytest.mark.parametrize("kind", RELATIVES)
def test_plain_models_go_step_by_step(kind: str) -> None:
    assert isinstance(forward_pass(relative(kind)), LlamaPass)


def test_what_is_not_known_to_be_plain_takes_its_own_forward_method() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    others = [relative("llama", rope_parameters=dynamic), relative("llama", hidden_act="gelu")]
    others += [relative("llama", attn_implementation="eager"), OtherLlama(llama(1, seed=0).config)]
    others.append(relative("llama"))
    others[-1].model.layers[1].mlp.up_proj = OtherLinear(32, 48, bias=False)
    for model in (*others, gpt2(1, seed=0)):
        assert isinstance(forward_pass(model), GeneralPass)


@pytest.mark.parametrize(("num_tokens", "context"), [(1, 0), (1, 30), (5, 0), (16, 14), (5, 25), (20, 3)])
def test_masks_that_are_cut_out_equal_masks_that_are_made(num_tokens: int, context: int) -> None:
    cut = CausalMasks(30, torch.float64)(num_tokens, context)
    assert torch.equal(cut, causal_mask(num_tokens, context, torch.float64))
