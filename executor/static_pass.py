"""Forward passes of fixed shapes: always the same tensors, written in place, so that a GPU can replay a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from executor.device import put
from executor.forward_pass import ForwardPass
from executor.kv_cache import SlotCache
from executor.recorder import now_s

SLOTS_AT_A_TIME = 256  # a shape's number of slots is a multiple of this
SPARE_SLOTS = 8  # at the end of a cache, which no text reaches; eight of them, for kernels want multiples of eight
MAX_WIDTH = 128  # wider passes are prefills, each of a shape of its own

Layers = Sequence[tuple[Tensor, Tensor]]  # (rows, heads, slots, head_dim) keys and values of each layer
Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]  # a pass that may run -> its recording, which gives the same tensor


class PassShape(NamedTuple):
    """What must be equal for a recording to serve."""

    num_rows: int
    width: int  # tokens of each row
    num_slots: int  # that the tokens may see


@dataclass(frozen=True)
class PassCounts:
    """How often passes of fixed shapes were recorded, replayed, and run as they are for want of a recording."""

    num_captures: int = 0
    num_replays: int = 0
    num_unrecorded: int = 0
    capture_s: float = 0.0


class StaticPasses:
    """Runs passes in the smallest fixed shape that holds them.

    Rows are rounded up to a power of two, slots to a multiple of `SLOTS_AT_A_TIME`. A shape that is met for the first
    time runs as it is and is noted; `capture` records the noted ones, between runs, so that recording is in no measured
    time. Without a `recording` nothing is ever recorded.
    """

    def __init__(
        self, forward: ForwardPass, dtype: torch.dtype, device: torch.device, recording: Capture | None
    ) -> None:
        self._forward = forward
        self._dtype, self._device = dtype, device
        self._recording = recording
        self._address = 0  # of the cache that the passes write
        self._passes: dict[PassShape, StaticPass] = {}
        self._replays: dict[PassShape, Replay] = {}
        self._num_replays = self._num_unrecorded = 0
        self._capture_s = 0.0
        self._num_captures = 0

    @property
    def counts(self) -> PassCounts:
        return PassCounts(self._num_captures, self._num_replays, self._num_unrecorded, self._capture_s)

    @property
    def shapes(self) -> frozenset[PassShape]:
        """Those met so far."""
        return frozenset(self._passes)

    def __call__(
        self, cache: SlotCache, places: Sequence[int], tokens: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """(rows, n) tokens at these places of the cache -> (rows, n, V) logits, valid until the next pass."""
        layers = cache.storage()
        own = self._pass(layers, _shape(layers, places, tokens.shape[1], mask.shape[-1]))
        own.fill(places, tokens, positions, mask, [cache.lengths[place] for place in places])
        replay = self._replays.get(own.shape)
        if replay is None:
            self._num_unrecorded += 1
            logits = own.run()
        else:
            self._num_replays += 1
            logits = replay()
        return own.of_places(logits, places, tokens.shape[1])

    def capture(self) -> PassCounts:
        """Record the shapes met and not yet recorded; how much was done so far."""
        if self._recording is not None:
            start_s = now_s()
            for shape in self._passes.keys() - self._replays.keys():
                self._passes[shape].aim_at_nothing()
                self._replays[shape] = self._recording(self._passes[shape].run)
                self._num_captures += 1
            self._capture_s += now_s() - start_s
        return self.counts

    def _pass(self, layers: Layers, shape: PassShape) -> StaticPass:
        address = layers[0][0].data_ptr()
        if address != self._address:  # a cache for more rows: what was recorded reads another
            self._passes.clear()
            self._replays.clear()
            self._address = address
        if shape not in self._passes:
            self._passes[shape] = StaticPass(self._forward, shape, layers, self._dtype, self._device)
        return self._passes[shape]


def _shape(layers: Layers, places: Sequence[int], width: int, num_slots: int) -> PassShape:
    all_rows, _, all_slots, _ = layers[0][0].shape
    num_rows = 1 << max(places).bit_length()  # places count from 0
    rounded = -(-num_slots // SLOTS_AT_A_TIME) * SLOTS_AT_A_TIME
    return PassShape(min(num_rows, all_rows), width, min(rounded, all_slots))


class StaticPass:
    """One pass of a fixed shape, with the tensors that it reads.

    Rows and tokens that nothing is asked for are fed to the last slot of the cache, which no text uses.
    """

    def __init__(
        self, forward: ForwardPass, shape: PassShape, layers: Layers, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self._forward = forward
        self._nowhere = layers[0][0].shape[2] - 1
        size = shape.num_rows, shape.width
        self._tokens = torch.zeros(size, dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._slots = torch.full_like(self._tokens, self._nowhere)
        self._mask = torch.zeros(shape.num_rows, 1, shape.width, shape.num_slots, dtype=dtype, device=device)
        self._cache = StaticSlots(layers, self._slots, shape)

    @torch.inference_mode()
    def fill(
        self, places: Sequence[int], tokens: Tensor, positions: Tensor, mask: Tensor, starts: Sequence[int]
    ) -> None:
        """Aim at `starts[i]` slots and after of row `places[i]`."""
        num_tokens, num_slots = tokens.shape[1], mask.shape[-1]
        if len(places) < self.shape.num_rows:
            self.aim_at_nothing()
        slots = [[min(start + i, self._nowhere) for i in range(num_tokens)] for start in starts]
        at = self._at(places)
        self._tokens[at] = tokens
        self._positions[at] = positions
        self._slots[at] = put(slots, self._slots.device)
        self._mask[at, :, :, :num_slots] = mask
        self._mask[at, :, :, num_slots:] = -torch.inf

    @torch.inference_mode()
    def aim_at_nothing(self) -> None:
        """All rows go nowhere; their tokens see the first slot, for what sees nothing has no attention."""
        self._tokens.zero_()
        self._positions.zero_()
        self._slots.fill_(self._nowhere)
        self._mask.fill_(-torch.inf)
        self._mask[..., 0] = 0.0

    @torch.inference_mode()
    def run(self) -> Tensor:
        """(num_rows, width, V) logits."""
        return self._forward(self._tokens, self._positions, self._mask, self._cache, None)

    def of_places(self, logits: Tensor, places: Sequence[int], num_tokens: int) -> Tensor:
        return logits[self._at(places), :num_tokens]

    def _at(self, places: Sequence[int]) -> slice | Tensor:
        """An index of these rows, without a copy where they are the first ones."""
        if list(places) == list(range(len(places))):
            return slice(len(places))
        return put(places, self._tokens.device)


class StaticSlots(Cache):
    """What a pass of a fixed shape sees of a cache: it writes where `slots` says, and reads the first ones."""

    def __init__(self, layers: Layers, slots: Tensor, shape: PassShape) -> None:
        super().__init__(layers=[])
        self.kept = layers
        self._slots = slots[:, None, :, None]
        self._shape = shape

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.kept[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, kept: Tensor, states: Tensor) -> Tensor:
        own = kept[: self._shape.num_rows]
        own.scatter_(2, self._slots.expand(states.shape), states)
        return own[:, :, : self._shape.num_slots]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._shape.num_slots - self._shape.width

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._shape.num_slots, 0
