"""Small random transformers models, saved as a pair. Wide initial weights keep greedy text from collapsing."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 128
MAX_POSITIONS = 256


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny(model_type: type, config_type: type, num_layers: int, seed: int, **settings: Any) -> PreTrainedModel:
    """A model of a Llama-like family."""
    torch.manual_seed(seed)
    config = config_type(**{"vocab_size": VOCAB_SIZE, "num_hidden_layers": num_layers} | SHAPE | settings)
    return model_type(config).double().eval()


def llama(num_layers: int, seed: int, **settings: Any) -> PreTrainedModel:
    return tiny(LlamaForCausalLM, LlamaConfig, num_layers, seed, **settings)


def qwen2(num_layers: int, seed: int, **settings: Any) -> PreTrainedModel:
    """Its biases, zero in a new model, are random."""
    model = tiny(Qwen2ForCausalLM, Qwen2Config, num_layers, seed, **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def qwen3(num_layers: int, seed: int, **settings: Any) -> PreTrainedModel:
    return tiny(Qwen3ForCausalLM, Qwen3Config, num_layers, seed, head_dim=8, **settings)


def mistral(num_layers: int, seed: int, **settings: Any) -> PreTrainedModel:
    """Its window is as long as it has positions: full attention in effect."""
    settings = {"sliding_window": MAX_POSITIONS} | settings
    return tiny(MistralForCausalLM, MistralConfig, num_layers, seed, **settings)


def gpt2(num_layers: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=num_layers,
        n_head=4,
        n_positions=MAX_POSITIONS,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).double().eval()


FAMILIES = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2, "qwen3": qwen3, "mistral": mistral}


def save_tokenizer(path: Path, tokens: list[str]) -> None:
    Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])).save(str(path))


def token_names(num: int = VOCAB_SIZE) -> list[str]:
    return [f"t{i}" for i in range(num)]


def save_pair(folder: Path, target: PreTrainedModel, draft: PreTrainedModel, num_tokens: int = VOCAB_SIZE) -> Path:
    """A complete pair folder whose tokenizer knows `num_tokens` ids."""
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    save_tokenizer(folder / "tokenizer.json", token_names(num_tokens))
    rows = [{"text": f"t{i}", "file": "f", "split": s} for i, s in enumerate(["calibration", "test", "test"])]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def prompts(num: int, length: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(tuple(row) for row in torch.randint(VOCAB_SIZE, (num, length), generator=generator).tolist())
