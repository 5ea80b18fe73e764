"""Small random transformers models, saved as a pair. Wide initial weights keep greedy text from collapsing."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB_SIZE = 128
MAX_POSITIONS = 256


def llama(num_layers: int, seed: int, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


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


def save_tokenizer(path: Path, tokens: list[str]) -> None:
    Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])).save(str(path))


def token_names(num: int = VOCAB_SIZE) -> list[str]:
    return [f"t{i}" for i in range(num)]


def save_pair(folder: Path, target: PreTrainedModel, draft: PreTrainedModel) -> Path:
    """A complete pair folder."""
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    save_tokenizer(folder / "tokenizer.json", token_names())
    rows = [{"text": f"t{i}", "file": "f", "split": s} for i, s in enumerate(["calibration", "test", "test"])]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def prompts(num: int, length: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(tuple(row) for row in torch.randint(VOCAB_SIZE, (num, length), generator=generator).tolist())
