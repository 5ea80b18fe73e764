"""Texts that are decoded again and again: an agreement's tables under a workload's length cap."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.policy import Drafting, Proposer
from sim.trace import Source
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SOURCES = (Source.HIT, Source.MISS)  # sources of SSD rounds that differ; a first round behaves as after a miss


def check_workload(agreement: Agreement, workload: Workload) -> None:
    """Raises `BadInput` unless the agreement speaks about the workload: same temperature, and at least as long."""
    if workload.temperature != agreement.temperature:
        rule = f"must equal the temperature of the agreement record, {agreement.temperature}"
        raise BadInput("workload.temperature", rule, workload.temperature)
    if workload.max_new_tokens > agreement.max_new_tokens:
        rule = f"must be <= {agreement.max_new_tokens}, the length of the agreement record"
        raise BadInput("workload.max_new_tokens", rule, workload.max_new_tokens)


class Replay:
    """Tables are (num_prompts, width). `emitted` is the number of tokens before a round, the prefill's included.

    The pending token of a round is number `emitted` - 1: both models hold prompt + `emitted` - 1 KV entries before it.
    """

    def __init__(self, agreement: Agreement, workload: Workload) -> None:
        check_workload(agreement, workload)
        self.agreement = agreement
        self.cap = workload.max_new_tokens
        self.lengths: IntArray = np.minimum(agreement.lengths, self.cap)
        self.prompt_length = agreement.prompt_length
        self._acceptance: dict[int, FloatArray] = {}

    @property
    def num_prompts(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest text under the cap."""
        return int(self.lengths.max(initial=0))

    @property
    def width(self) -> int:
        """Positions of the agreement's tables, those beyond the cap included."""
        return int(self.agreement.lengths.max(initial=0))

    def num_tokens(self) -> FloatArray:
        """(num_prompts,) tokens that rounds emit."""
        return np.maximum(0, self.lengths - 1).astype(float)

    def room_for(self, num_drafted: int, emitted: int) -> int:
        """Draft tokens of a round: one place under the cap is kept for the bonus token."""
        return min(num_drafted, max(0, self.cap - emitted - 1))

    def context(self, emitted: int) -> IntArray:
        """(num_prompts,) KV entries of either model before a round."""
        return self.prompt_length + emitted - 1

    @cached_property
    def first_context(self) -> int:
        """The smallest number of KV entries before a round."""
        return int(self.prompt_length.min())

    @cached_property
    def contexts(self) -> IntArray:
        """Every number of KV entries that may stand before a round."""
        last = int(self.prompt_length.max()) + max(0, self.longest - 2)
        return np.arange(self.first_context, last + 1)

    def contexts_with_room(self, num_drafted: int) -> IntArray:
        """Those of the rounds that the cap does not keep from drafting `num_drafted` tokens."""
        last = int(self.prompt_length.max()) + self.cap - num_drafted - 2
        return self.contexts[self.contexts <= last]

    def acceptance(self, draft_index: int) -> FloatArray:
        """(num_prompts, width) acceptance of a draft token by its place in the speculation."""
        index = draft_index if self.agreement.depends_on_draft_index else 0
        if index not in self._acceptance:
            self._acceptance[index] = self.agreement.acceptance_table(
                index, Drafting(Proposer.DRAFT_MODEL, index + 1, (), Source.SYNCHRONOUS)
            )
        return self._acceptance[index]

    def accept_counts(self, emitted: int, num_drafted: int) -> list[tuple[FloatArray, NDArray[np.bool_]]]:
        """For each k: (num_prompts,) its probability, and whether the sequence goes on after it.

        Beyond the end of a text nothing is rejected: counts that reach it are those that end the sequence.
        """
        counts = []
        survived = np.ones(self.num_prompts)
        for k in range(num_drafted + 1):
            position = emitted + k
            goes_on = position + 1 < self.lengths
            if k == num_drafted or position >= self.longest:
                counts.append((survived, goes_on))
                break
            accepted = np.where(position < self.lengths, self.acceptance(k)[:, position], 1.0)
            counts.append((survived * (1 - accepted), goes_on))
            survived = survived * accepted
        return counts
