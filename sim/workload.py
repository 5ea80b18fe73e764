"""What is decoded: prompts and the rules that end a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from sim.errors import BadInput, require_count, require_number


@dataclass(frozen=True)
class Workload:
    """Prompts decoded under one set of rules, `batch_size` at a time.

    A batch is the next `batch_size` prompts in order; its rows advance in lockstep, a row that ends leaves, and the
    next batch starts when the last row has ended.

    `prompts` are token ids. A sequence ends at the first token in `stop_ids` (which is kept) or after `max_new_tokens`.
    `temperature` 0 is greedy. `dataset` names where the prompts come from; it is part of a record's identity. Raises
    `BadInput` naming the field that is of another type or outside its range.
    """

    dataset: str
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    temperature: float = 0.0
    stop_ids: tuple[int, ...] = ()
    batch_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, str):
            raise BadInput("workload.dataset", "must be a name", self.dataset)
        if not isinstance(self.prompts, tuple) or not self.prompts or () in self.prompts:
            raise BadInput("workload.prompts", "must hold at least one prompt, none of them empty")
        for index, prompt in enumerate(self.prompts):
            _require_tokens(f"workload.prompts[{index}]", prompt)
        _require_tokens("workload.stop_ids", self.stop_ids)
        for name, minimum in (("max_new_tokens", 0), ("batch_size", 1)):
            object.__setattr__(self, name, require_count(f"workload.{name}", getattr(self, name), minimum))
        object.__setattr__(self, "temperature", require_number("workload.temperature", self.temperature, 0))

    def identity(self) -> dict[str, Any]:
        """What must agree before a measurement made on this workload speaks about another; records without a
        `batch_size` are of 1."""
        return {
            "dataset": self.dataset,
            "temperature": self.temperature,
            "stop_ids": [int(token) for token in self.stop_ids],
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
        }


def _require_tokens(name: str, tokens: object) -> None:
    if not isinstance(tokens, tuple):
        raise BadInput(name, "must be a tuple of token ids", tokens)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise BadInput(name, "must hold token ids, integers >= 0", token)
