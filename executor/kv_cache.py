"""Keys and values of one sequence, kept in slots that are written in place and forgotten by moving a pointer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """A transformers cache of `num_layers` layers; slots [0, length) are valid.

    A forward pass writes its tokens to the slots after `length` in every layer; `advance` then makes them valid.
    Rolling back moves `length`. Neither copies; only growing beyond the capacity does.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.length = 0
        self._capacity = capacity
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, n, head_dim) states; return views of everything up to and including them."""
        end = self.length + key_states.shape[-2]
        keys = self._slots(self._keys, layer_idx, key_states, end)
        values = self._slots(self._values, layer_idx, value_states, end)
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def _slots(self, layers: list[Tensor | None], layer: int, states: Tensor, end: int) -> Tensor:
        slots = layers[layer]
        if slots is None or end > slots.shape[2]:
            rows, heads, _, head_dim = states.shape
            grown = states.new_zeros(rows, heads, max(self._capacity, 2 * end if slots is not None else end), head_dim)
            if slots is not None:
                grown[:, :, : self.length] = slots[:, :, : self.length]
            layers[layer] = slots = grown
        return slots

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def roll_back(self, length: int) -> None:
        """Keep the first `length` slots."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} slots")
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0


def causal_mask(num_tokens: int, context: int, dtype: torch.dtype) -> Tensor:
    """(1, 1, n, context + n) additive mask: token i sees the slots before it and itself."""
    mask = torch.full((num_tokens, context + num_tokens), -torch.inf, dtype=dtype)
    return mask.triu_(context + 1)[None, None]


def branch_mask(num_visible: Tensor, num_slots: int, num_steps: int, dtype: torch.dtype) -> Tensor:
    """(1, 1, B, num_slots + num_steps B) additive mask of B branches that start after `num_slots` slots.

    Branch b sees the first `num_visible[b]` slots and, of the branch tokens that follow, its own: step s holds its B
    tokens in slots num_slots + s B ... A forward of step s takes the mask up to its own slots.
    """
    num_branches = len(num_visible)
    mask = torch.full((num_branches, num_slots + num_steps * num_branches), -torch.inf, dtype=dtype)
    mask[:, :num_slots].masked_fill_(torch.arange(num_slots) < num_visible[:, None], 0.0)
    mask[:, num_slots:].view(num_branches, num_steps, num_branches).diagonal(dim1=0, dim2=2).fill_(0.0)
    return mask[None, None]
