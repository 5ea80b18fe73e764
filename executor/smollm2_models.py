"""The two models of the pair `smollm2`, and how the draft is stored: whole numbers with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

LARGEST = 127
SCALE = ".scale"


def load_target(folder: Path) -> LlamaForCausalLM:
    """The converted target, float32."""
    logging.disable_progress_bar()
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def load_draft(target_folder: Path, folder: Path) -> tuple[LlamaForCausalLM, Tensor]:
    """The draft, float32, and the ids its head's rows stand for.

    Its embedding is the target's; its head consists of the embedding's rows of those ids.
    """
    stored = load_file(folder / "model.safetensors")
    token_ids = stored.pop("token_ids").long()
    with safe_open(target_folder / "model.safetensors", framework="pt") as target:
        embedding = target.get_tensor("model.embed_tokens.weight")
    config = LlamaConfig.from_pretrained(folder)
    return assembled(config, restored(stored), embedding, token_ids), token_ids


def assembled(
    config: LlamaConfig, weights: Mapping[str, Tensor], embedding: Tensor, token_ids: Tensor
) -> LlamaForCausalLM:
    """A Llama of trained `weights` (its layers and final norm) between a wide embedding and a head of fewer rows."""
    model = LlamaForCausalLM(config)
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(embedding))
    own = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding[token_ids]}
    model.load_state_dict({**weights, **own})
    return model


def compressed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """int8 matrices with a float32 scale a row under `<name>.scale`; vectors stay float32."""
    stored: dict[str, Tensor] = {}
    for name, values in weights.items():
        if values.ndim == 1:
            stored[name] = values.float()
            continue
        scale = values.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        stored[name] = (values / scale[:, None]).round().to(torch.int8)
        stored[name + SCALE] = scale.float()
    return stored


def restored(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `compressed` up to half a step of each row's scale."""
    return {
        name: values.float() * stored[name + SCALE][:, None] if name + SCALE in stored else values
        for name, values in stored.items()
        if not name.endswith(SCALE)
    }
