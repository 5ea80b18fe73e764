"""Texts that are decoded again and again: an agreement's tables under a workload's length cap."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.trace import Source
from sim.workload import Workload, sampling_to_dict

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SOURCES = (Source.HIT, Source.MISS)  # sources of SSD rounds that differ; a first round behaves as after a miss


def check_workload(agreement: Agreement, workload: Workload) -> None:
    """Raises `BadInput` unless the agreement speaks about the workload: same sampling settings, same stop tokens and
    strings, and at least as long.

    A record is not carried over to another temperature. Its candidates could be reweighted, but not the tail beyond
    them, of which only the sum is known; and its texts were drawn at its own temperature, so that every position would
    count by a weight that multiplies over the text.
    """
    if workload.temperature != agreement.temperature:
        rule = f"must equal the temperature of the agreement record, {agreement.temperature}"
        raise BadInput("workload.temperature", rule, workload.temperature)
    if workload.laws != (agreement.sampling,):
        rule = f"must be, for all prompts, the settings of the agreement record, {sampling_to_dict(agreement.sampling)}"
        raise BadInput("workload.sampling", rule, [sampling_to_dict(law) for law in workload.laws])
    if workload.max_new_tokens > agreement.max_new_tokens:
        rule = f"must be <= {agreement.max_new_tokens}, the length of the agreement record"
        raise BadInput("workload.max_new_tokens", rule, workload.max_new_tokens)
    recorded = list(agreement.identity["stop_ids"])
    if set(recorded) != set(workload.stop_ids):
        rule = f"must be {recorded}, those that end the texts of the agreement record"
        raise BadInput("workload.stop_ids", rule, list(workload.stop_ids))
    if set(agreement.stop_strings) != set(workload.stop_strings):
        rule = f"must be {list(agreement.stop_strings)}, those that end the texts of the agreement record"
        raise BadInput("workload.stop_strings", rule, list(workload.stop_strings))


class Replay:
    """Tables are (num_prompts, width). `emitted` is the number of tokens before a round, the prefill's included.

    The pending token of a round is number `emitted` - 1: both models hold prompt + `emitted` - 1 KV entries before it.
    Texts end where they were recorded to end, if not at the cap: other ends are refused by `check_workload`.
    """

    def __init__(self, agreement: Agreement, workload: Workload) -> None:
        check_workload(agreement, workload)
        self.agreement = agreement
        self.cap = workload.max_new_tokens
        self.lengths: IntArray = np.minimum(agreement.lengths, self.cap)
        self.prompt_length = agreement.prompt_length

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
