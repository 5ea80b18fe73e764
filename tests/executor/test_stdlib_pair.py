"""The packaged `stdlib` pair is what its model card says: safe files, disjoint splits, a better target, agreement."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

PAIR = Path(__file__).parents[2] / "executor" / "packaged_pairs" / "stdlib"
ROLES = ("target", "draft")
PROMPT_TOKENS = 64
NUM_PROMPTS = 32
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PAIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def models() -> dict[str, LlamaForCausalLM]:
    return {role: LlamaForCausalLM.from_pretrained(PAIR / role, dtype=torch.float32).eval() for role in ROLES}


@pytest.fixture(scope="module")
def prompts(rows, tokenizer) -> torch.Tensor:
    """(NUM_PROMPTS, PROMPT_TOKENS) from both splits and many files."""
    picked = rows[:: len(rows) // NUM_PROMPTS][:NUM_PROMPTS]
    return torch.tensor([tokenizer.encode(row["text"]).ids[:PROMPT_TOKENS] for row in picked])


def test_weights_are_small_fp16_safetensors() -> None:
    paths = [PAIR / role / "model.safetensors" for role in ROLES]
    assert sum(path.stat().st_size for path in paths) <= 24_000_000
    for path in paths:
        with safe_open(path, framework="pt") as weights:
            assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float16}  # noqa: SIM118


def test_folder_holds_nothing_that_could_run_code() -> None:
    files = [path for path in PAIR.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".md", ".safetensors"}
    configs = [json.loads((PAIR / role / "config.json").read_text()) for role in ROLES]
    assert not any("auto_map" in config for config in configs)


def test_models_share_the_vocabulary(tokenizer) -> None:
    configs = [json.loads((PAIR / role / "config.json").read_text()) for role in ROLES]
    assert {config["vocab_size"] for config in configs} == {tokenizer.get_vocab_size()}
    assert {config["eos_token_id"] for config in configs} == {tokenizer.token_to_id("<|endoftext|>")}


def test_tokenizer_loses_nothing(rows, tokenizer) -> None:
    for row in rows:
        assert tokenizer.decode(tokenizer.encode(row["text"]).ids) == row["text"]


def test_prompts_are_distinct_and_long_enough(rows, tokenizer) -> None:
    assert len({row["text"] for row in rows}) == len(rows) >= 160
    assert min(len(tokenizer.encode(row["text"]).ids) for row in rows) >= 128


def test_splits_hold_different_excerpts_of_held_out_files(rows) -> None:
    texts = {split: {row["text"] for row in rows if row["split"] == split} for split in ("calibration", "test")}
    assert not texts["calibration"] & texts["test"]
    assert sum(map(len, texts.values())) == len(rows)
    files = {split: {row["file"] for row in rows if row["split"] == split} for split in ("calibration", "test")}
    assert all(len(names) >= 10 for names in files.values())
    for name in files["calibration"] | files["test"]:
        assert int(hashlib.sha256(name.encode()).hexdigest(), 16) % 16 == 0, f"{name} was trained on"


@torch.inference_mode()
def test_target_is_the_better_model(models, rows, tokenizer) -> None:
    # Paired over 40 excerpts of 128 tokens; .05 leaves room for the excerpts, the card's .1 is over all held-out text.
    text = torch.tensor([tokenizer.encode(row["text"]).ids[:128] for row in rows[::4]])
    nats = {
        role: torch.nn.functional.cross_entropy(model(text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())
        for role, model in models.items()
    }
    assert nats["target"] < nats["draft"] - 0.05


@torch.inference_mode()
def test_draft_agrees_with_the_targets_greedy_text(models, prompts) -> None:
    text = models["target"].generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    drafted = models["draft"](text[:, :-1]).logits.argmax(-1)[:, PROMPT_TOKENS - 1 :]
    generated = text[:, PROMPT_TOKENS:]
    assert (drafted == generated).float().mean() >= 0.7
    # The measure can fail: the next position's proposal has nothing to do with this position's token.
    assert (drafted.roll(1, dims=1) == generated).float().mean() < 0.3


def test_model_card_gives_the_figures_of_the_evaluation() -> None:
    card = (PAIR / "README.md").read_text()
    evaluation = json.loads((PAIR / "evaluation.json").read_text())
    for held_out in evaluation["held_out"].values():
        assert f"{held_out['nats_per_token']:.4f}" in card
    draft = evaluation["agreement"]["draft"]
    assert f"{draft['sampled']['acceptance']:.3f}" in card
    assert f"{draft['greedy']['argmax_agreement']:.3f}" in card
    held_out = evaluation["held_out"]
    assert held_out["draft"]["nats_per_token"] - held_out["target"]["nats_per_token"] >= 0.1
    assert draft["sampled"]["acceptance"] >= 0.65
    assert draft["greedy"]["argmax_agreement"] >= 0.7
