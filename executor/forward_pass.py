"""How a transformers model is called: by its forward method, or step by step where that is the same and quicker."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from executor.llama_pass import LlamaPass, is_llama, of_wanted


class ForwardPass(Protocol):
    """(rows, n) tokens at (rows, n) positions, a (1 or rows, 1, n, context + n) additive mask -> (rows, n, V) logits.

    The keys and values go where the cache is aimed. `wanted` asks for the logits of the last so many tokens only, or, a
    (rows, m) tensor, for those of the tokens at these places of each row (`llama_pass.of_wanted`).
    """

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, wanted: int | Tensor | None
    ) -> Tensor: ...


def forward_pass(model: PreTrainedModel) -> ForwardPass:
    """The cheapest pass for a model."""
    return LlamaPass(model) if is_llama(model) else GeneralPass(model)


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
        return of_wanted(output.logits, wanted)
