"""Keys and values of the rows of a batch, kept in slots that are written in place and forgotten by moving a pointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from executor.device import CPU, put
from sim.errors import RunFailed

MOST_TOKENS_CUT = 16  # wider blocks, prompts for example, are rare


class KvCacheCorrupt(RunFailed):
    """A KV cache does not hold what the text says, see `LanguageModel.audit`."""


class SlotCache(Cache):
    """A transformers cache of `num_layers` layers and `num_rows` rows; of row r the slots [0, lengths[r]) are valid.

    `aim` says to which rows the next forward pass belongs; the pass writes its tokens to the slots after each row's
    length in every layer; `advance` then makes them valid. Rolling back moves a length. Nothing of it copies; growing
    beyond the capacity does, moving a row to another place, and reading rows that are not the first ones. All layers
    must have keys of one shape, and values of one shape.
    """

    def __init__(self, num_layers: int, capacity: int, num_rows: int = 1, device: torch.device = CPU) -> None:
        super().__init__(layers=[])
        self._device = device
        self._keys, self._values = (_Slots(num_layers, num_rows, capacity, device) for _ in range(2))
        self.begin(num_rows)

    def begin(self, num_rows: int) -> None:
        """Forget everything; `num_rows` rows, at most `max_rows`, are empty."""
        self.lengths = [0] * num_rows
        self.aim(range(num_rows), 0)

    @property
    def length(self) -> int:
        """Slots in use of the longest row."""
        return max(self.lengths)

    @property
    def max_rows(self) -> int:
        """Rows that there is room for."""
        return self._keys.num_rows

    def storage(self) -> list[tuple[Tensor, Tensor]]:
        """The (max_rows, heads, slots, head_dim) keys and values of each layer; none before anything was fed."""
        return list(zip(self._keys.layers(), self._values.layers(), strict=True))

    def aim(self, rows: Sequence[int], num_tokens: int) -> None:
        """The next pass feeds `num_tokens` tokens to each of these rows, and sees those only."""
        starts = [self.lengths[row] for row in rows]
        self._aim = _Aim(len(rows), starts[0], max(starts) + num_tokens)
        if len(self.lengths) > 1:
            some = list(rows) != list(range(len(rows)))
            slots = None
            if some or min(starts) != max(starts):
                slots = put([list(range(start, start + num_tokens)) for start in starts], self._device)
            self._aim = self._aim._replace(rows=put(list(rows), self._device) if some else None, slots=slots)
        self._keys.aim(self._aim)
        self._values.aim(self._aim)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, n, head_dim) states; return those rows up to and including the longest one's."""
        return self._keys.write(layer_idx, key_states), self._values.write(layer_idx, value_states)

    def advance(self, row: int, num_tokens: int) -> None:
        self.lengths[row] += num_tokens

    def roll_back(self, length: int, row: int = 0) -> None:
        """Keep the first `length` slots of a row."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot roll back to {length} of {self.lengths[row]} slots")
        self.lengths[row] = length

    @torch.inference_mode()
    def clear(self) -> None:
        """Let nothing remain of what was forgotten: a pass that sees masked slots multiplies what they hold by 0."""
        for keys, values in self.storage():
            keys.zero_()
            values.zero_()

    @torch.inference_mode()
    def move(self, row: int, place: int) -> None:
        """Copy a row to the place of another, which is forgotten."""
        self.lengths[place] = length = self.lengths[row]
        self._keys.move(row, place, length)
        self._values.move(row, place, length)

    def entries(self, row: int) -> tuple[Tensor, Tensor]:
        """(layers, heads, length, head_dim) keys and values of the row's slots in use. Something must be cached."""
        length = self.lengths[row]
        return self._keys.of_row(row, length), self._values.of_row(row, length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._aim.end, 0


class _Aim(NamedTuple):
    """Which rows and slots the next pass concerns."""

    num_rows: int
    start: int  # of the first row
    end: int  # of the longest row
    rows: Tensor | None = None  # None: the first ones
    slots: Tensor | None = None  # (rows, n) where tokens go; None: from `start` on in all rows


class _Slots:
    """The keys, or the values, of all layers in one tensor: its parts that a pass needs are cut out for all at once."""

    def __init__(self, num_layers: int, num_rows: int, capacity: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self._num_layers, self._capacity = num_layers, capacity
        self._every_row = torch.arange(num_rows, device=device)
        self._slots: Tensor | None = None  # (layers, rows, heads, slots, head_dim)

    def layers(self) -> Sequence[Tensor]:
        """(rows, heads, slots, head_dim) of each."""
        return () if self._slots is None else self._slots.unbind()

    def aim(self, aim: _Aim) -> None:
        self._aim = aim
        if self._slots is not None and aim.end <= self._slots.shape[3]:
            self._cut(self._slots)
        else:
            self._visible: Sequence[Tensor] = ()  # there is no room

    def write(self, layer: int, states: Tensor) -> Tensor:
        """(rows, heads, n, head_dim) states to where they are aimed; returns all that the pass may see."""
        if not self._visible:
            self._cut(self._grown(states))
        rows, slots = self._aim.rows, self._aim.slots
        if slots is None:
            self._written[layer].copy_(states)
        else:
            places = self._every_row[: len(slots)] if rows is None else rows
            self._visible[layer][places[:, None], :, slots] = states.transpose(1, 2)
        return self._visible[layer] if rows is None else self._visible[layer][rows]

    def _cut(self, slots: Tensor) -> None:
        aim = self._aim
        is_every_row = aim.rows is not None or aim.num_rows == self.num_rows
        rows = slots if is_every_row else slots.narrow(1, 0, aim.num_rows)
        self._visible = rows.narrow(3, 0, aim.end).unbind()
        if aim.slots is None:
            self._written = rows.narrow(3, aim.start, aim.end - aim.start).unbind()

    def _grown(self, states: Tensor) -> Tensor:
        """Room for the pass, what was there kept."""
        _, heads, _, head_dim = states.shape
        before, end = self._slots, self._aim.end
        num_slots = max(self._capacity, end if before is None else 2 * end)
        self._slots = states.new_zeros(self._num_layers, self.num_rows, heads, num_slots, head_dim)
        if before is not None:
            self._slots[:, :, :, : before.shape[3]] = before
        return self._slots

    def move(self, row: int, place: int, num_slots: int) -> None:
        """Copy the first slots of a row to the place of another."""
        if self._slots is not None:
            self._slots[:, place, :, :num_slots] = self._slots[:, row, :, :num_slots]

    def of_row(self, row: int, num_slots: int) -> Tensor:
        """(layers, heads, num_slots, head_dim)."""
        assert self._slots is not None
        return self._slots[:, row, :, :num_slots]


def causal_mask(num_tokens: int, context: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """(1, 1, n, context + n) additive mask: token i sees the slots before it and itself."""
    mask = torch.full((num_tokens, context + num_tokens), -torch.inf, dtype=dtype, device=device)
    return mask.triu_(context + 1)[None, None]


class CausalMasks:
    """`causal_mask` of a few tokens after any context up to `max_context`, cut out of one mask instead of made."""

    def __init__(self, max_context: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self._max_context, self._dtype, self._device = max_context, dtype, device
        self._widest = causal_mask(MOST_TOKENS_CUT, max_context, dtype, device)

    def __call__(self, num_tokens: int, context: int) -> Tensor:
        if num_tokens > MOST_TOKENS_CUT:
            return causal_mask(num_tokens, context, self._dtype, self._device)
        first = self._max_context - context
        return self._widest[:, :, :num_tokens, first : self._max_context + num_tokens]


def ragged_mask(num_tokens: int, contexts: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """(rows, 1, n, largest context + n) additive mask: the same for rows of different contexts."""
    own_slots = put(contexts, device)[:, None, None] + torch.arange(num_tokens, device=device)[:, None]
    mask = torch.zeros(len(contexts), num_tokens, max(contexts) + num_tokens, dtype=dtype, device=device)
    return mask.masked_fill_(torch.arange(mask.shape[-1], device=device) > own_slots, -torch.inf)[:, None]


def branch_mask(num_visible: Tensor, num_slots: int, num_steps: int, dtype: torch.dtype) -> Tensor:
    """(rows, 1, B, num_slots + num_steps B) additive mask of B branches of each row that start after `num_slots` slots.

    Branch b of row r sees the first `num_visible[r, b]` slots and, of the branch tokens that follow, its own: step s
    holds its B tokens in slots num_slots + s B ... A forward of step s takes the mask up to its own slots.
    """
    num_rows, num_branches = num_visible.shape
    size, device = (num_rows, num_branches, num_slots + num_steps * num_branches), num_visible.device
    mask = torch.full(size, -torch.inf, dtype=dtype, device=device)
    mask[..., :num_slots].masked_fill_(torch.arange(num_slots, device=device) < num_visible[..., None], 0.0)
    own = mask[..., num_slots:].view(num_rows, num_branches, num_steps, num_branches)
    own.diagonal(dim1=1, dim2=3).fill_(0.0)
    return mask[:, None]
