"""Workloads that change: the texts of several agreements, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.policy import Drafting

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Phases(Agreement):
    """Texts of `parts` in their order, each of which ends where it was recorded to end. Raises `BadInput` if they are
    not sampled alike."""

    parts: tuple[Agreement, ...]

    def __post_init__(self) -> None:
        laws = [part.sampling for part in self.parts]
        if not laws or any(law != laws[0] for law in laws):
            raise BadInput("phases", "must be at least one, all sampled alike", laws)

    @property
    def identity(self) -> dict[str, Any]:  # type: ignore[override]
        rules = {
            "dataset": "phases",
            "stop_ids": sorted({stop for part in self.parts for stop in part.identity["stop_ids"]}),
            "max_new_tokens": max(part.max_new_tokens for part in self.parts),
        }
        return self.parts[0].identity | rules

    @cached_property
    def prompt_length(self) -> IntArray:  # type: ignore[override]
        return np.concatenate([part.prompt_length for part in self.parts])

    @cached_property
    def stopped(self) -> NDArray[np.bool_]:  # type: ignore[override]
        return np.concatenate([part.stopped for part in self.parts])

    @cached_property
    def lengths(self) -> IntArray:
        return np.concatenate([part.lengths for part in self.parts])

    @property
    def num_candidates(self) -> int:
        return min(part.num_candidates for part in self.parts)

    def text(self, prompt: int) -> tuple[int, ...]:
        for part in self.parts:
            if prompt < part.num_prompts:
                return part.text(prompt)
            prompt -= part.num_prompts
        raise IndexError(prompt)

    def check(self, drafting: Drafting) -> None:
        for part in self.parts:
            part.check(drafting)

    def num_proposed(self, drafting: Drafting) -> IntArray:
        return self._of_all(lambda part: part.num_proposed(drafting)).astype(np.int64)

    def acceptance_table(self, draft_index: int, drafting: Drafting) -> FloatArray:
        return self._of_all(lambda part: part.acceptance_table(draft_index, drafting))

    def hit_table(self, fan_out: int, accept_count: int, drafting: Drafting, *, rejected: bool) -> FloatArray:
        return self._of_all(lambda part: part.hit_table(fan_out, accept_count, drafting, rejected=rejected))

    def doubt_table(self, fan_out: int, accept_count: int, drafting: Drafting) -> FloatArray:
        return self._of_all(lambda part: part.doubt_table(fan_out, accept_count, drafting))

    def _of_all(self, table: Callable[[Agreement], NDArray[Any]]) -> NDArray[Any]:
        """The tables of all parts; those of a part that returns are made once."""
        tables = {id(part): table(part) for part in self.parts}
        values = np.zeros((self.num_prompts, int(self.lengths.max(initial=0))))
        first = 0
        for part in self.parts:
            of_part = tables[id(part)]
            values[first : first + part.num_prompts, : of_part.shape[1]] = of_part
            first += part.num_prompts
        return values
