"""Rows of a batch: sequences that are being decoded, and what their rounds do in one seed."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sim.round_law import RoundLaw
from sim.trace import Source

AFTER_HIT, AFTER_MISS = range(2)  # what a round was: by the source of its speculation


class OutcomeTables:
    """Rounds of one drafting in one seed: `table[luck][tokens emitted before the round]`, lists for speed.

    A luck is a prompt under numbers of its own: number v * num_prompts + prompt belongs to variant v of the prompt.
    """

    __slots__ = ("bytes_per_token", "is_prepared", "num_accepted", "num_branches", "num_drafted")

    def __init__(self, law: RoundLaw, uniforms: NDArray[np.float64], bytes_per_token: float) -> None:
        """`uniforms` (2, num_variants, num_prompts, width) decide acceptance and hits; bytes are those of a draft
        token's message."""
        sampled = law.sampler.sample(*uniforms)
        self.num_drafted: list[list[int]] = law.num_drafted.tolist() * uniforms.shape[1]
        self.num_accepted: list[list[int]] = list(chain.from_iterable(sampled.num_accepted.tolist()))
        self.is_prepared: list[list[bool]] = list(chain.from_iterable(sampled.is_prepared.tolist()))
        self.num_branches = [law.drafting.num_branches(n) for n in range(law.drafting.num_drafted + 1)]
        self.bytes_per_token = bytes_per_token


class Row:
    """A sequence that is being decoded: where it stands, and what it has in hand for its next round."""

    __slots__ = (
        "admitted_s",
        "all_accepted",
        "arrival_s",
        "cap",
        "context",
        "emitted",
        "end_s",
        "first_token_s",
        "goes_on",
        "hits",
        "index",
        "length",
        "lookups",
        "luck",
        "most_context",
        "num_drafted",
        "num_rounds",
        "outcomes",
        "shared_s",
        "side",
        "source",
    )

    def __init__(self, index: int, prompt_length: int, length: int, *, cap: int, luck: int) -> None:
        """A text of `length` tokens that is known to end at `cap`; `luck` is its place in the outcome tables."""
        self.index, self.length, self.cap, self.luck = index, length, cap, luck
        self.most_context = prompt_length + cap
        self.emitted = min(1, length)  # the prefill emits the first token
        self.context = prompt_length + self.emitted - 1  # KV entries of either model: all but the pending token
        self.goes_on = self.emitted < length
        self.source = Source.FIRST
        self.outcomes: OutcomeTables
        self.side = AFTER_MISS  # of the last round
        self.all_accepted = False  # SD: the draft model has not been fed the last accepted token
        self.num_drafted = self.num_rounds = 0
        self.lookups, self.hits = [0, 0], [0, 0]  # by `side`
        self.arrival_s = self.admitted_s = self.first_token_s = self.end_s = self.shared_s = 0.0

    def count_lookup(self) -> None:
        """The last round's outcome was looked up, if `source` tells of a result."""
        source = self.source
        if source is Source.HIT or source is Source.REDRAFTED:
            self.lookups[self.side] += 1
            self.hits[self.side] += 1
        elif source is Source.MISS:
            self.lookups[self.side] += 1

    def num_accepted(self) -> int:
        """What its next verification accepts."""
        return min(self.num_drafted, self.outcomes.num_accepted[self.luck][self.emitted])
