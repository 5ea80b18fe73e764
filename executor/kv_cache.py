"""Keys and values of the rows of a batch, kept in slots that are written in place and forgotten by moving a pointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """A transformers cache of `num_layers` layers and `num_rows` rows; of row r the slots [0, lengths[r]) are valid.

    `aim` says to which rows the next forward pass belongs; the pass writes its tokens to the slots after each row's
    length in every layer; `advance` then makes them valid. Rolling back moves a length. Nothing of it copies; growing
    beyond the capacity does, moving a row to another place, and reading rows that are not the first ones.
    """

    def __init__(self, num_layers: int, capacity: int, num_rows: int = 1) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * num_rows
        self._capacity = capacity
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._rows: Tensor | None  # None: the first ones
        self._slots: Tensor | None  # (rows, n) where tokens go; None: from `_start` on in all rows
        self.aim(range(num_rows), 0)

    @property
    def length(self) -> int:
        """Slots in use of the longest row."""
        return max(self.lengths)

    @property
    def max_rows(self) -> int:
        """Rows that there is room for."""
        return len(self.lengths)

    @property
    def num_slots(self) -> int:
        """Slots of each row, used or not."""
        return 0 if self._keys[0] is None else self._keys[0].shape[2]

    def storage(self) -> list[tuple[Tensor, Tensor]]:
        """The (rows, heads, slots, head_dim) keys and values of each layer, once something was fed."""
        kept = zip(self._keys, self._values, strict=True)
        return [(keys, values) for keys, values in kept if keys is not None and values is not None]

    def aim(self, rows: Sequence[int], num_tokens: int) -> None:
        """The next pass feeds `num_tokens` tokens to each of these rows, and sees those only."""
        starts = [self.lengths[row] for row in rows]
        self._num_rows, self._start, self._end = len(rows), starts[0], max(starts) + num_tokens
        self._rows = self._slots = None
        if len(self.lengths) == 1:
            return
        if list(rows) != list(range(len(rows))):
            self._rows = torch.tensor(rows)
        if self._rows is not None or min(starts) != max(starts):
            self._slots = torch.tensor(starts)[:, None] + torch.arange(num_tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, n, head_dim) states; return those rows up to and including the longest one's."""
        return self._write(self._keys, layer_idx, key_states), self._write(self._values, layer_idx, value_states)

    def _write(self, layers: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        slots = self._with_room(layers, layer, states)
        if self._rows is None and self._num_rows < len(self.lengths):
            slots = slots[: self._num_rows]
        if self._slots is None:
            slots[:, :, self._start : self._end] = states
        else:
            rows = torch.arange(self._num_rows) if self._rows is None else self._rows
            slots[rows[:, None], :, self._slots] = states.transpose(1, 2)
        visible = slots[:, :, : self._end]
        return visible if self._rows is None else visible[self._rows]

    def _with_room(self, layers: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        slots = layers[layer]
        if slots is None or self._end > slots.shape[2]:
            _, heads, _, head_dim = states.shape
            num_slots = max(self._capacity, 2 * self._end if slots is not None else self._end)
            grown = states.new_zeros(len(self.lengths), heads, num_slots, head_dim)
            if slots is not None:
                grown[:, :, : slots.shape[2]] = slots
            layers[layer] = slots = grown
        return slots

    def advance(self, row: int, num_tokens: int) -> None:
        self.lengths[row] += num_tokens

    def roll_back(self, length: int, row: int = 0) -> None:
        """Keep the first `length` slots of a row."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot roll back to {length} of {self.lengths[row]} slots")
        self.lengths[row] = length

    @torch.inference_mode()
    def move(self, row: int, place: int) -> None:
        """Copy a row to the place of another, which is forgotten."""
        self.lengths[place] = length = self.lengths[row]
        for layers in (self._keys, self._values):
            for slots in layers:
                if slots is not None:
                    slots[place, :, :length] = slots[row, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._end, 0


def causal_mask(num_tokens: int, context: int, dtype: torch.dtype) -> Tensor:
    """(1, 1, n, context + n) additive mask: token i sees the slots before it and itself."""
    mask = torch.full((num_tokens, context + num_tokens), -torch.inf, dtype=dtype)
    return mask.triu_(context + 1)[None, None]


def ragged_mask(num_tokens: int, contexts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """(rows, 1, n, largest context + n) additive mask: the same for rows of different contexts."""
    own_slots = torch.tensor(contexts)[:, None, None] + torch.arange(num_tokens)[:, None]
    mask = torch.zeros(len(contexts), num_tokens, max(contexts) + num_tokens, dtype=dtype)
    return mask.masked_fill_(torch.arange(mask.shape[-1]) > own_slots, -torch.inf)[:, None]


def branch_mask(num_visible: Tensor, num_slots: int, num_steps: int, dtype: torch.dtype) -> Tensor:
    """(rows, 1, B, num_slots + num_steps B) additive mask of B branches of each row that start after `num_slots` slots.

    Branch b of row r sees the first `num_visible[r, b]` slots and, of the branch tokens that follow, its own: step s
    holds its B tokens in slots num_slots + s B ... A forward of step s takes the mask up to its own slots.
    """
    num_rows, num_branches = num_visible.shape
    mask = torch.full((num_rows, num_branches, num_slots + num_steps * num_branches), -torch.inf, dtype=dtype)
    mask[..., :num_slots].masked_fill_(torch.arange(num_slots) < num_visible[..., None], 0.0)
    own = mask[..., num_slots:].view(num_rows, num_branches, num_steps, num_branches)
    own.diagonal(dim1=1, dim2=3).fill_(0.0)
    return mask[:, None]
