"""A causal language model behind three verbs: append tokens, append branches, roll back. For one row or a batch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from executor.forward_pass import forward_pass
from executor.kv_cache import CausalMasks, SlotCache, ragged_mask
from sim.errors import BadInput


class LanguageModel:
    """A transformers causal LM with its KV cache: `num_rows` sequences, numbered from 0, each of its own length.

    `texts[row]` are the ids whose keys and values the cache holds; `tokens` and `length` are those of row 0.
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
        self._causal_mask = CausalMasks(self.max_positions, self.dtype)
        self._positions = torch.arange(self.max_positions).expand(num_rows, -1)
        self._cache = SlotCache(config.num_hidden_layers, self.max_positions, num_rows)
        self.begin(num_rows)

    def begin(self, num_rows: int) -> None:
        """Forget everything; rows 0 .. `num_rows` - 1 start anew."""
        if num_rows != len(self._cache.lengths):
            self._cache = SlotCache(self.model.config.num_hidden_layers, self.max_positions, num_rows)
        self._cache.lengths = [0] * num_rows
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self._row_at = list(range(num_rows))  # by place in the cache
        self._place = list(range(num_rows))  # by row

    @property
    def tokens(self) -> list[int]:
        return self.texts[0]

    @property
    def length(self) -> int:
        return self.length_of(0)

    def length_of(self, row: int) -> int:
        """Number of slots in use, the context of the row's next token."""
        return self._cache.lengths[self._place[row]]

    def with_rows(self, num_rows: int) -> LanguageModel:
        """The same weights with an empty cache for `num_rows` sequences."""
        other = copy(self)
        other._cache = SlotCache(self.model.config.num_hidden_layers, self.max_positions, num_rows)
        other._positions = self._positions[:1].expand(num_rows, -1)
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

    # ------------------------------------------------------------------------------------------------------- passes

    def append(self, tokens: Sequence[int], num_logits: int | None = None) -> Tensor:
        """Feed n tokens to row 0, alone; return the (n, V) logits after each, or the last `num_logits` rows."""
        logits = self._append(torch.tensor([tokens]), num_logits)[0]
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
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ordered])
        positions = (torch.tensor(contexts)[:, None] + torch.arange(width)).clamp_(max=self.max_positions - 1)
        most = max(num_logits)
        wanted = (torch.tensor(lengths)[:, None] + torch.arange(-most, 0)).clamp_(min=0)
        mask = ragged_mask(width, contexts, self.dtype)
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
        places = [self._place[row] for row in rows]
        by_place = sorted(range(len(rows)), key=places.__getitem__)
        if by_place != list(range(len(rows))):
            order = torch.tensor(by_place)
            logits = self._forward(sorted(places), tokens[order], positions[order], mask[order], None)
            logits = logits[order.argsort()]
        else:
            logits = self._forward(places, tokens, positions, mask, None)
        for row, place, fed in zip(rows, places, tokens.tolist(), strict=True):
            self._cache.advance(place, len(fed))
            self.texts[row].extend(fed)
        return logits

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
        positions = self._positions[:, length : length + num_tokens]
        mask = self._causal_mask(num_tokens, length)
        logits = self._forward(range(num_rows), tokens, positions, mask, num_logits)
        for row in range(num_rows):
            self._cache.advance(row, num_tokens)
        return logits

    def _require_positions(self, num_positions: int) -> None:
        if num_positions > self.max_positions:
            raise ValueError(f"{self.name}: position {num_positions} is beyond {self.max_positions}")

    @torch.inference_mode()
    def _forward(
        self, places: Sequence[int], tokens: Tensor, positions: Tensor, mask: Tensor, wanted: int | Tensor | None
    ) -> Tensor:
        self._cache.aim(places, tokens.shape[1])
        return self._pass(tokens, positions, mask, self._cache, wanted)

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
