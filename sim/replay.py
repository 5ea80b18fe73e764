"""The replay law of an agreement record under a workload's length cap, as tables over (prompt, position)."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def check_workload(record: AgreementRecord, workload: Workload) -> None:
    """Raises `BadInput` unless the record speaks about the workload: same temperature, and at least as long."""
    if workload.temperature != record.temperature:
        rule = f"must equal the temperature of the agreement record, {record.temperature}"
        raise BadInput("workload.temperature", rule, workload.temperature)
    if workload.max_new_tokens > record.max_new_tokens:
        rule = f"must be <= {record.max_new_tokens}, the length of the agreement record"
        raise BadInput("workload.max_new_tokens", rule, workload.max_new_tokens)


class Replay:
    """Tables are (num_prompts, longest). `emitted` is the number of tokens before a round, the prefill's included.

    The pending token of a round is number `emitted` - 1: both models hold prompt + `emitted` - 1 KV entries before it.
    """

    def __init__(self, record: AgreementRecord, workload: Workload) -> None:
        check_workload(record, workload)
        self.record = record
        self.cap = workload.max_new_tokens
        self.lengths: IntArray = np.minimum(record.lengths, self.cap)
        self.prompt_length = record.prompt_length
        self.acceptance = record.padded(record.acceptance, fill=1.0)
        self.hit_after_rejection = cache(lambda fan_out: record.padded(record.hit_after_rejection(fan_out)))
        self.hit_after_acceptance = cache(lambda fan_out: record.padded(record.hit_after_acceptance(fan_out)))

    @property
    def num_prompts(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def num_tokens(self) -> FloatArray:
        """(num_prompts,) tokens that rounds emit."""
        return np.maximum(0, self.lengths - 1).astype(float)

    def room_for(self, num_drafted: int, emitted: int) -> int:
        """Draft tokens of a round: one place under the cap is kept for the bonus token."""
        return min(num_drafted, max(0, self.cap - emitted - 1))

    def context(self, emitted: int) -> IntArray:
        """(num_prompts,) KV entries of either model before a round."""
        return self.prompt_length + emitted - 1

    def accept_counts(self, emitted: int, num_drafted: int) -> list[tuple[FloatArray, NDArray[np.bool_]]]:
        """For each k: (num_prompts,) its probability, and whether the sequence goes on after it."""
        counts = []
        survived = np.ones(self.num_prompts)
        for k in range(num_drafted + 1):
            position = emitted + k
            inside = position < self.acceptance.shape[1]
            accepted = self.acceptance[:, position] if inside else np.ones(self.num_prompts)
            counts.append((survived * (1 - accepted) if k < num_drafted else survived, position + 1 < self.lengths))
            survived = survived * accepted
        return counts
