"""How a transformers model is called: by its forward method, or layer by layer where that is the same and quicker."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

FIXED_ROTARY_TYPES = ("default", "linear", "llama3")  # frequencies that do not depend on the length of the text


class ForwardPass(Protocol):
    """(rows, n) tokens at (rows, n) positions, a (1 or rows, 1, n, context + n) additive mask -> (rows, n, V) logits.

    The keys and values go where the cache is aimed. `wanted` asks for the logits of the last so many tokens only, or, a
    (rows, m) tensor, for those of the tokens at these places of each row.
    """

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, wanted: int | Tensor | None
    ) -> Tensor: ...


def forward_pass(model: PreTrainedModel) -> ForwardPass:
    """The cheapest pass for a model."""
    rotary: Any = getattr(model.config, "rope_parameters", None)
    if type(model) is LlamaForCausalLM and rotary["rope_type"] in FIXED_ROTARY_TYPES:
        return LlamaPass(model)
    return GeneralPass(model)


class GeneralPass:
    """The model's own forward method."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, wanted: int | Tensor | None
    ) -> Tensor:
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            logits_to_keep=wanted if isinstance(wanted, int) else 0,
        )
        return _at(output.logits, wanted) if isinstance(wanted, Tensor) else output.logits


class LlamaPass:
    """A Llama's modules called one after another, with rotary tables made once.

    The general forward call costs .15-.3 ms whatever the model's size (checks, mask and output objects): a third of the
    time of a draft of one layer.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._decoder = model.model
        self._head = model.lm_head
        with torch.inference_mode():
            every_position = torch.arange(model.config.max_position_embeddings)[None]
            cos, sin = self._decoder.rotary_emb(torch.zeros(1, dtype=model.dtype), every_position)
        self._cos, self._sin = cos[0], sin[0]

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, wanted: int | Tensor | None
    ) -> Tensor:
        hidden = self._decoder.embed_tokens(tokens)
        rotary = self._cos[positions], self._sin[positions]
        for layer in self._decoder.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, cache=cache, use_cache=True)
        if isinstance(wanted, int):
            hidden = hidden[:, -wanted:]
        elif wanted is not None:
            hidden = _at(hidden, wanted)
        return self._head(self._decoder.norm(hidden))


def _at(values: Tensor, places: Tensor) -> Tensor:
    """(rows, n, d) values at (rows, m) places of each row."""
    return values[torch.arange(len(values))[:, None], places]
