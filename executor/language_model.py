"""A causal language model behind three verbs: append tokens, append branches, roll back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from executor.forward_pass import forward_pass
from executor.kv_cache import SlotCache, causal_mask
from sim.errors import BadInput


class LanguageModel:
    """A transformers causal LM with its KV cache. `tokens` are the ids whose keys and values the cache holds.

    `num_rows` > 1 decodes that many sequences of equal length at once; `tokens` is then kept for none of them.
    Raises `BadInput` if the model's attention is not plain causal attention over everything before a token.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model", num_rows: int = 1) -> None:
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if getattr(config, "sliding_window", None) is not None or kinds != {"full_attention"}:
            raise BadInput(name, "every layer must attend to all earlier tokens, not to a window", sorted(kinds))
        self.model = model.eval().requires_grad_(False)
        self._pass = forward_pass(self.model)
        self.name = name
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.dtype = model.dtype
        self.attention: str = config._attn_implementation
        self._positions = torch.arange(self.max_positions).expand(num_rows, -1)
        self._cache = SlotCache(config.num_hidden_layers, capacity=self.max_positions)
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        """Number of slots in use, the context of the next token."""
        return self._cache.length

    def with_rows(self, num_rows: int) -> LanguageModel:
        """The same weights with an empty cache for `num_rows` sequences."""
        return LanguageModel(self.model, self.name, num_rows)

    def append(self, tokens: Sequence[int], num_logits: int | None = None) -> Tensor:
        """Feed n tokens; return the (n, V) logits after each, or the last `num_logits` rows."""
        logits = self._append(torch.tensor([tokens]), num_logits)[0]
        self.tokens.extend(tokens)
        return logits

    def append_rows(self, tokens: Tensor, num_logits: int | None = None) -> Tensor:
        """Feed (num_rows, n) tokens; return (num_rows, n, V) logits, or the last `num_logits` of each row."""
        return self._append(tokens, num_logits)

    def append_branches(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Feed one token to each of B branches: (B,) tokens at (B,) positions that see what the mask lets them.

        `mask` is (1, 1, B, length + B), see `kv_cache.branch_mask`. Returns (B, V) logits.
        """
        logits = self._forward(tokens[None], positions[None], mask, num_logits=None)[0]
        self.tokens.extend(tokens.tolist())
        return logits

    def roll_back(self, length: int) -> None:
        """Forget everything after the first `length` slots. Raises ValueError beyond [0, length]."""
        self._cache.roll_back(length)
        del self.tokens[length:]

    def _append(self, tokens: Tensor, num_logits: int | None) -> Tensor:
        num_tokens = tokens.shape[1]
        positions = self._positions[:, self.length : self.length + num_tokens]
        if positions.shape[1] < num_tokens:
            raise ValueError(f"{self.name}: position {self.length + num_tokens} is beyond {self.max_positions}")
        mask = causal_mask(num_tokens, self.length, self.dtype)
        return self._forward(tokens, positions, mask, num_logits)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, num_logits: int | None) -> Tensor:
        logits = self._pass(tokens, positions, mask, self._cache, num_logits)
        self._cache.advance(tokens.shape[1])
        return logits

    def check(self) -> None:
        """Self-test at load: cached logits equal an uncached pass, and rolling back leaves no trace."""
        tokens = [1 % self.vocab_size, 2 % self.vocab_size, 3 % self.vocab_size, 5 % self.vocab_size]
        with torch.inference_mode():
            plain = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        try:
            first = self.append(tokens)
            self.roll_back(1)
            again = self.append(tokens[1:])
        except Exception as error:
            raise BadInput(self.name, f"must be a causal LM whose cache can be replaced ({error!r})") from error
        scale = 1e-4 * max(1.0, plain.abs().max().item())
        for logits, expected in ((first, plain), (again, plain[1:])):
            difference = (logits - expected).abs().max().item()
            if not difference <= scale:
                raise BadInput(self.name, "must give the same logits with a rolled-back KV cache", difference)
        self.roll_back(0)
