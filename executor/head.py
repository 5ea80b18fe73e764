"""What the rows of a model's head stand for: its logits by token id."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from executor.device import CPU
from sim.errors import BadInput


class Head:
    """The ids 0 .. `vocab_size` - 1 of a pair, and which row of a model's head gives the logit of which of them.

    Row r of the `num_rows` stands for id `token_ids[r]`, for id r if nothing is said. Rows of ids that are not the
    pair's (a head padded to a round width) are cut before anything is drawn, so such an id is neither drafted nor
    emitted, and the law is the model's over the pair's ids. Ids without a row (a smaller vocabulary, a reduced head)
    and `unused_ids` (which no string has) get -inf, the probability 0 exactly.

    Raises `BadInput` if the ids do not fit the rows or repeat, or none is left.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        vocab_size: int,
        token_ids: Sequence[int] | Tensor | None = None,
        unused_ids: Collection[int] = (),
        device: torch.device = CPU,
    ) -> None:
        ids = torch.arange(num_rows) if token_ids is None else torch.as_tensor(token_ids, dtype=torch.long)
        if ids.shape != (num_rows,):
            raise BadInput(f"{name}: token_ids", f"must hold one id for each of the head's {num_rows} rows", len(ids))
        if token_ids is not None and (int(ids.min()) < 0 or len(ids.unique()) < num_rows):
            raise BadInput(f"{name}: token_ids", "must be different ids >= 0", "a repeated or negative one")
        self.vocab_size = vocab_size
        is_cut = (ids >= vocab_size) | torch.isin(ids, torch.tensor(list(unused_ids), dtype=torch.long))
        self.cut_rows: list[int] = is_cut.nonzero().flatten().tolist()
        self._ids, self._rows = ids[~is_cut], (~is_cut).nonzero().flatten()
        if not len(self._ids):
            raise BadInput(f"{name}: token_ids", f"must hold an id below the vocabulary size {vocab_size}", "none")
        every_id = torch.arange(vocab_size)
        self._is_prefix = torch.equal(self._ids, every_id) and torch.equal(self._rows, every_id)
        self._ids, self._rows = self._ids.to(device), self._rows.to(device)

    def logits(self, of_rows: Tensor) -> Tensor:
        """(..., num_rows) of the head -> (..., vocab_size) by token id."""
        if self._is_prefix:
            return of_rows[..., : self.vocab_size]
        kept = of_rows if len(self._rows) == of_rows.shape[-1] else of_rows[..., self._rows]
        logits = of_rows.new_full((*of_rows.shape[:-1], self.vocab_size), -torch.inf)
        return logits.index_copy_(-1, self._ids, kept)
