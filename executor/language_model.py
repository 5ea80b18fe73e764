"""A causal language model behind three verbs: append tokens, append branches, roll back. For one row or a batch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from executor.device import put
from executor.forward_pass import forward_pass
from executor.head import Head
from executor.kv_cache import CausalMasks, KvCacheCorrupt, SlotCache, branch_mask, ragged_mask
from executor.llama_pass import of_wanted
from executor.static_pass import MAX_WIDTH, SPARE_SLOTS, Capture, PassCounts, StaticPasses
from sim.errors import BadInput

UNREAD = -1


class LanguageModel:
    """A transformers causal LM with its KV cache: `num_rows` sequences, numbered from 0, each of its own length.

    `texts[row]` are the ids whose keys and values the cache holds, `UNREAD` where they were fed from the device and it
    was not said which they are.

    Every logit that leaves belongs to one of the `vocab_size` ids 0, 1, 2 ... (those of the model's configuration if
    nothing is said), whatever the width of the model's head: see `Head` for `token_ids`, the id that each of its rows
    stands for, and `unused_ids`. Any of the ids may be fed.

    Raises `BadInput` if the model's attention is not plain causal attention over everything before a token, or if it
    cannot embed some of the ids.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "model",
        num_rows: int = 1,
        *,
        vocab_size: int | None = None,
        token_ids: Sequence[int] | Tensor | None = None,
        unused_ids: Collection[int] = (),
    ) -> None:
        config = model.config.get_text_config()
        self.name = name
        self.max_positions = _max_positions(name, config)
        _require_plain_attention(name, config, self.max_positions)
        self.model = model.eval().requires_grad_(False)
        self._pass = forward_pass(self.model)
        self.vocab_size: int = vocab_size or config.vocab_size
        embedding: Any = model.get_input_embeddings()
        output: Any = model.get_output_embeddings()
        if len(embedding.weight) < self.vocab_size:
            raise BadInput(name, f"must embed all {self.vocab_size} ids, which may be committed", len(embedding.weight))
        self.head = Head(name, len(output.weight), self.vocab_size, token_ids, unused_ids, device=model.device)
        self.dtype = model.dtype
        self.device = model.device
        self.attention: str = config._attn_implementation
        self._causal_mask = CausalMasks(self.max_positions, self.dtype, self.device)
        self._positions = torch.arange(self.max_positions, device=self.device)[None]
        self._static: StaticPasses | None = None
        self._num_layers: int = config.num_hidden_layers
        self._cache = self._new_cache(num_rows)
        self.begin(num_rows)

    def begin(self, num_rows: int) -> None:
        """Forget everything; rows 0 .. `num_rows` - 1 start anew."""
        if num_rows > self._cache.max_rows:
            self._cache = self._new_cache(num_rows)
        self._cache.begin(num_rows)
        if self._static is not None:
            self._cache.clear()
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self._row_at = list(range(num_rows))  # by place in the cache
        self._place = list(range(num_rows))  # by row

    def _new_cache(self, num_rows: int) -> SlotCache:
        return SlotCache(self._num_layers, self.max_positions + SPARE_SLOTS, num_rows, self.device)

    def length_of(self, row: int) -> int:
        """Number of slots in use, the context of the row's next token."""
        return self._cache.lengths[self._place[row]]

    def with_rows(self, num_rows: int) -> LanguageModel:
        """The same weights with an empty cache for `num_rows` sequences, which takes no more room than their texts
        need: many rows of all positions would not fit beside the models."""
        other = copy.copy(self)
        other._static = None  # it knows the other cache
        other._cache = SlotCache(self._num_layers, 0, num_rows, self.device)
        other.begin(num_rows)
        return other

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all other rows. Those that stay move together, so that a pass over all of them reads no copies."""
        if len(rows) == len(self._row_at):
            return
        for row in [row for row in self._row_at if row not in rows]:
            place, last = self._place[row], self._row_at.pop()
            if last != row:
                self._cache.move(self._place[last], place)
                self._row_at[place], self._place[last] = last, place

    def use_static_passes(self, recording: Capture | None) -> None:
        """From now on passes after the prefill have fixed shapes, which `capture` records, if there is a way to."""
        self._static = StaticPasses(self._pass, self.dtype, self.device, recording)

    def capture(self) -> PassCounts:
        """Record the shapes that were met, see `StaticPasses.capture`."""
        return PassCounts() if self._static is None else self._static.capture()

    # ------------------------------------------------------------------------------------------------------- passes

    def append(self, tokens: Sequence[int], num_logits: int | None = None) -> Tensor:
        """Feed n tokens to row 0, alone; return the (n, V) logits after each, or the last `num_logits` rows."""
        logits = self._append(put([tokens], self.device), num_logits)[0]
        self.texts[0].extend(tokens)
        return logits

    def append_rows(self, tokens: Tensor, num_logits: int | None = None) -> Tensor:
        """Feed (num_rows, n) tokens to rows of equal length; return (num_rows, n, V) logits, or the last `num_logits`
        of each row. `texts` is not kept."""
        return self._append(tokens, num_logits)

    def feed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]) -> list[Tensor]:
        """One pass that feeds `tokens[i]` to row `rows[i]`; returns the logits of each row's last `num_logits[i]`.

        Rows of fewer tokens are padded on the right, where no token of theirs sees it; the padding's slots stay
        invalid.
        """
        if len(self.texts) == 1:
            return [self.append(tokens[0], num_logits[0])]
        by_place = sorted(range(len(rows)), key=lambda i: self._place[rows[i]])
        ordered, lengths = [list(tokens[i]) for i in by_place], [len(tokens[i]) for i in by_place]
        places = [self._place[rows[i]] for i in by_place]
        contexts = [self._cache.lengths[place] for place in places]
        width = max(lengths)
        self._require_positions(max(c + n for c, n in zip(contexts, lengths, strict=True)))
        padded = put([row + [0] * (width - len(row)) for row in ordered], self.device)
        last = self.max_positions - 1
        positions = put([[min(c + i, last) for i in range(width)] for c in contexts], self.device)
        most = max(num_logits)
        wanted = put([[max(n + i, 0) for i in range(-most, 0)] for n in lengths], self.device)
        mask = ragged_mask(width, contexts, self.dtype, self.device)
        logits = self._forward(places, padded, positions, mask, wanted)
        found = dict(zip(by_place, logits, strict=True))
        for place, row, num in zip(places, ordered, lengths, strict=True):
            self._cache.advance(place, num)
            self.texts[self._row_at[place]].extend(row)
        return [found[i][most - num :] for i, num in enumerate(num_logits)]

    def append_branches(self, rows: Sequence[int], tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Feed one token to each of B branches of every row: (rows, B) tokens at (rows, B) positions that see what the
        mask lets them.

        `mask` is (rows, 1, B, length + B), see `kv_cache.branch_mask`. Returns (rows, B, V) logits. The rows must be of
        equal length (`level`).
        """
        logits = self._in_order(rows, tokens, positions, mask)
        for row in rows:
            self._cache.advance(self._place[row], tokens.shape[1])
            self.texts[row].extend([UNREAD] * tokens.shape[1])
        return logits

    def feed_drawn(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Feed a (rows,) tensor, one token to each row, without reading it; returns (rows, V) logits. `name_last` is
        told later which tokens they were."""
        if len(self.texts) == 1:
            logits = self._append(tokens[None], 1)[0]
        else:
            positions = put([[self.length_of(row)] for row in rows], self.device)
            self._require_positions(max(map(self.length_of, rows)) + 1)
            mask = ragged_mask(1, [self.length_of(row) for row in rows], self.dtype, self.device)
            logits = self._in_order(rows, tokens[:, None], positions, mask)[:, 0]
            for row in rows:
                self._cache.advance(self._place[row], 1)
        for row in rows:
            self.texts[row].append(UNREAD)
        return logits

    def name_last(self, row: int, tokens: Sequence[int]) -> None:
        """The last tokens that the row was fed were these."""
        if tokens:
            self.texts[row][-len(tokens) :] = tokens

    def level(self, rows: Sequence[int]) -> int:
        """Lengthen rows to that of the longest of them, which is returned. What a row gains holds nothing: a mask must
        hide it, and a roll-back take it away."""
        length = max(self.length_of(row) for row in rows)
        for row in rows:
            num_skipped = length - self.length_of(row)
            self._cache.advance(self._place[row], num_skipped)
            self.texts[row].extend([0] * num_skipped)
        return length

    def roll_back(self, length: int, row: int = 0) -> None:
        """Forget everything after the first `length` slots of a row. Raises ValueError beyond [0, its length]."""
        self._cache.roll_back(length, self._place[row])
        del self.texts[row][length:]

    def _append(self, tokens: Tensor, num_logits: int | None) -> Tensor:
        num_rows, num_tokens = tokens.shape
        length = self._cache.lengths[0]
        self._require_positions(length + num_tokens)
        positions = self._positions[:, length : length + num_tokens].expand(num_rows, -1)
        mask = self._causal_mask(num_tokens, length)
        logits = self._forward(range(num_rows), tokens, positions, mask, num_logits)
        for row in range(num_rows):
            self._cache.advance(row, num_tokens)
        return logits

    def _in_order(self, rows: Sequence[int], tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """`_forward` of rows in the order of their places; the logits are in the order of `rows`."""
        places = [self._place[row] for row in rows]
        by_place = sorted(range(len(rows)), key=places.__getitem__)
        if by_place == list(range(len(rows))):
            return self._forward(places, tokens, positions, mask, None)
        order = put(by_place, self.device)
        logits = self._forward(sorted(places), tokens[order], positions[order], mask[order], None)
        return logits[order.argsort()]

    def _require_positions(self, num_positions: int) -> None:
        if num_positions > self.max_positions:
            raise ValueError(f"{self.name}: position {num_positions} is beyond {self.max_positions}")

    @torch.inference_mode()
    def _forward(
        self, places: Sequence[int], tokens: Tensor, positions: Tensor, mask: Tensor, wanted: int | Tensor | None
    ) -> Tensor:
        if self._static is not None and self._is_static(places, tokens.shape[1]):
            return self.head.logits(of_wanted(self._static(self._cache, places, tokens, positions, mask), wanted))
        self._cache.aim(places, tokens.shape[1])
        return self.head.logits(self._pass(tokens, positions, mask, self._cache, wanted))

    def _is_static(self, places: Sequence[int], num_tokens: int) -> bool:
        """Prefills are not: their shapes do not come again."""
        return num_tokens <= MAX_WIDTH and all(self._cache.lengths[place] for place in places)

    # ------------------------------------------------------------------------------------------------------- checks

    @property
    def _tolerance(self) -> float:
        """Of numbers about 1 that two kinds of pass compute."""
        return max(1e-4, 16 * torch.finfo(self.dtype).eps)

    def audit(self, row: int, text: Sequence[int]) -> None:
        """Raises `KvCacheCorrupt` unless the row's cache holds exactly the ids `text`, as one fresh pass over them
        leaves them: the same keys and values, which depend on everything before them and on their positions."""
        if self.texts[row] != list(text) or self.length_of(row) != len(text):
            found = f"{self.length_of(row)} slots of {self.texts[row]}"
            raise KvCacheCorrupt(f"{self.name}: the KV cache of row {row} holds {found} instead of {list(text)}")
        if not text:
            return
        fresh = self.with_rows(1)
        fresh.append(text, num_logits=1)
        for held, expected in zip(self._cache.entries(self._place[row]), fresh._cache.entries(0), strict=True):
            difference = (held - expected).abs().amax((0, 1, 3))
            if not difference.max() <= self._tolerance * max(1.0, float(expected.abs().max())):
                slot = int(difference.argmax())
                rule = f"slot {slot} differs by {float(difference[slot]):.2g} from a fresh pass"
                raise KvCacheCorrupt(f"{self.name}: the KV cache of row {row} is wrong: {rule}")

    def check(self) -> None:
        """Self-test at load, on two rows of different lengths: every kind of pass gives the logits of plain passes
        without a cache, also after a roll-back. The cache is empty afterwards.

        Raises `BadInput` where it does not: a state that cannot be rolled back, a mask or positions that are ignored.
        """
        text = [(7 * i + 1) % self.vocab_size for i in range(6)]
        try:
            plain = self._plain(text)
            compared = [*self._checked_alone(text, plain), *self._checked_rows(text, plain)]
        except Exception as error:
            raise BadInput(self.name, f"must be a causal LM whose cache can be replaced ({error!r})") from error
        scale = self._tolerance * max(1.0, plain[plain.isfinite()].abs().max().item())
        for logits, expected in compared:
            difference = torch.where(logits == expected, 0.0, logits - expected).abs().max().item()
            if not difference <= scale:
                raise BadInput(self.name, "must give the same logits with a rolled-back KV cache", difference)
        self.begin(len(self.texts))

    @torch.inference_mode()
    def _plain(self, text: list[int]) -> Tensor:
        """(n, V) logits of one pass of the model without a cache."""
        return self.head.logits(self.model(input_ids=put([text], self.device), use_cache=False).logits[0])

    def _checked_alone(self, text: list[int], plain: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of logits to be equal: one row, appended, rolled back, appended again."""
        alone = self.with_rows(1)
        yield alone.append(text[:4]), plain[:4]
        alone.roll_back(1)
        yield alone.append(text[1:]), plain[1:]

    def _checked_rows(self, text: list[int], plain: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of logits to be equal: two rows padded on the right, then two branches of each."""
        both = self.with_rows(2)
        rows = both.feed([0, 1], [text[:5], text[:2]], [5, 2])
        both.roll_back(2, row=0)
        again = both.feed([0, 1], [text[2:3], text[2:5]], [1, 3])
        num_slots = both.level([0, 1])
        starts = put([[3, 2], [5, 3]], self.device)  # how much of the text a branch sees
        tokens = put(text, self.device)[starts]
        branches = both.append_branches([0, 1], tokens, starts, branch_mask(starts, num_slots, 1, self.dtype))
        yield from zip((*rows, *again), (plain[:5], plain[:2], plain[2:3], plain[2:5]), strict=True)
        yield branches, plain[starts]


def _max_positions(name: str, config: PreTrainedConfig) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise BadInput(name, "must state max_position_embeddings: a model of attention over positions", limit)
    return limit


def _require_plain_attention(name: str, config: PreTrainedConfig, max_positions: int) -> None:
    """Raises `BadInput` unless every token attends to all earlier ones, in a way that their number does not change.

    The self-test's texts are too short to tell a window, or rotary frequencies of long texts, from the usual. A window
    that no text outgrows is none.
    """
    if config.is_encoder_decoder:
        raise BadInput(name, "must be a decoder alone, not an encoder and a decoder")
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    strange = sorted(kinds - {"full_attention", "sliding_attention"})
    if strange:
        raise BadInput(name, "every layer must be attention, without a state that cannot be rolled back", strange)
    windows = [getattr(config, "sliding_window", None)] if "sliding_attention" in kinds else []
    for window in [*windows, getattr(config, "window_size", None)]:
        if window is not None and window < max_positions:
            raise BadInput(
                name, f"every layer must attend to all of {max_positions} positions, not to a window", window
            )
    rotary = getattr(config, "rope_parameters", None) or {}
    rope_types = {part.get("rope_type") for part in (rotary, *rotary.values()) if isinstance(part, dict)}
    if "longrope" in rope_types:
        raise BadInput(name, "rotary frequencies must not depend on the length of the text", "longrope")
