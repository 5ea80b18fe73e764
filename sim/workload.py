"""What is decoded: prompts and the rules that end a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sim.errors import BadInput


@dataclass(frozen=True)
class Workload:
    """Prompts decoded under one set of rules, `batch_size` at a time.

    A batch is the next `batch_size` prompts in order; its rows advance in lockstep, a row that ends leaves, and the
    next batch starts when the last row has ended.

    `prompts` are token ids. A sequence ends at the first token in `stop_ids` (which is kept) or after `max_new_tokens`.
    `temperature` 0 is greedy. `dataset` names where the prompts come from; it is part of a record's identity.
    """

    dataset: str
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    temperature: float = 0.0
    stop_ids: tuple[int, ...] = ()
    batch_size: int = 1

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise BadInput("workload.prompts", "must hold at least one prompt, none of them empty")
        if self.max_new_tokens < 0:
            raise BadInput("workload.max_new_tokens", "must be >= 0", self.max_new_tokens)
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise BadInput("workload.batch_size", "must be an integer >= 1", self.batch_size)
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise BadInput("workload.temperature", "must be a finite number >= 0", self.temperature)

    def identity(self) -> dict[str, Any]:
        """What must agree before a record made on this workload speaks about another."""
        return {
            "dataset": self.dataset,
            "temperature": self.temperature,
            "stop_ids": list(self.stop_ids),
            "max_new_tokens": self.max_new_tokens,
        }
