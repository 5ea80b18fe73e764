"""The law of a round by the place where it starts: what every engine reads, whoever drafted, whatever was prepared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.policy import Drafting, Proposer
from sim.replay import Replay

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

LARGEST_DOUBT = 0.01  # of a mean hit probability; beyond it a record says too little about a policy


@dataclass(frozen=True)
class SampledRounds:
    """What a round does wherever it may start; arrays are (..., num_prompts, width) over the tokens emitted before it.

    `num_accepted` is at most the tokens that the text has left; where it equals them, a stop token is among the
    accepted ones and the sequence ends there. `is_prepared` is false where the sequence does not go on.
    """

    num_accepted: IntArray
    is_prepared: BoolArray


class RoundLaw:
    """Rounds of one `Drafting` over a replay. Tables are (num_prompts, width), width = the longest text under the cap;
    column i concerns rounds that start with i tokens emitted, the prefill's included. Column 0 concerns no round.

    Raises `BadInput` if the agreement does not say how rounds of this drafting go.
    """

    def __init__(self, replay: Replay, drafting: Drafting) -> None:
        replay.agreement.check(drafting)
        self.replay, self.drafting = replay, drafting
        self.starts: IntArray = np.arange(replay.longest)
        self.left: IntArray = np.maximum(0, replay.lengths[:, None] - self.starts)

    @cached_property
    def num_drafted(self) -> IntArray:
        """(num_prompts, width) draft tokens verified; one place under the cap is kept for the bonus token. An n-gram
        may propose fewer."""
        room = np.maximum(0, self.replay.cap - self.starts - 1)
        return np.minimum(self._at(self.replay.agreement.num_proposed(self.drafting), 0), room)

    @cached_property
    def accepted(self) -> FloatArray:
        """(K, num_prompts, width) probability that draft token j is accepted once it is tested; 1 beyond the text's end
        and where no token j is drafted."""
        table = np.ones((self.drafting.num_drafted, *self.left.shape))
        for j in range(self.drafting.num_drafted):
            by_position = self.replay.agreement.acceptance_table(j, self.drafting)
            inside = j < np.minimum(self.num_drafted, self.left)
            table[j][inside] = self._at(by_position, j)[inside]
        return table

    @cached_property
    def ended(self) -> FloatArray:
        """(K + 1, num_prompts, width) probability that exactly k draft tokens are accepted."""
        survived = np.ones_like(self.left, dtype=float)
        table = np.zeros((self.drafting.num_drafted + 1, *self.left.shape))
        for k in range(self.drafting.num_drafted + 1):
            is_last = k >= np.minimum(self.num_drafted, self.left)
            accepted = np.where(is_last, 0.0, self.accepted[k]) if k < self.drafting.num_drafted else 0.0
            table[k] = np.where(k > np.minimum(self.num_drafted, self.left), 0.0, survived * (1 - accepted))
            survived = survived * accepted
        return table

    def goes_on(self, num_accepted: int) -> BoolArray:
        """(num_prompts, width) whether the sequence goes on after a round that accepted so many."""
        return num_accepted + 1 < self.left

    def prepared(self, num_accepted: int, fan_out: int) -> FloatArray:
        """(num_prompts, width) probability that the bonus token is among the `fan_out` prepared for `num_accepted`; 0
        where the sequence does not go on."""
        table = self.replay.agreement.hit_table
        hit = self._at(table(fan_out, num_accepted, self.drafting, rejected=False), num_accepted)
        if num_accepted < self.drafting.num_drafted:
            rejected = self._at(table(fan_out, num_accepted, self.drafting, rejected=True), num_accepted)
            hit = np.where(num_accepted < self.num_drafted, rejected, hit)
        return hit * self.goes_on(num_accepted)

    @cached_property
    def hits(self) -> FloatArray:
        """(K + 1, num_prompts, width) the same for the drafting's own fan-out list; 0 without one."""
        _ = self.doubt  # refuses what the record leaves open
        fan_out = self.drafting.fan_out or (0,) * (self.drafting.num_drafted + 1)
        return np.stack([self.prepared(k, f) for k, f in enumerate(fan_out)])

    @cached_property
    def doubt(self) -> float:
        """Largest half-width of the mean hit probability that the record leaves open; 0 where the law is exact.

        What a record does not hold is the law of draft tokens beyond its candidates, where they are not drawn from q.
        The mean is over the look-ups of rounds that start anywhere, with the drafting's own fan-out list; the
        half-width counts the errors of all positions as if they had one sign. Raises `BadInput` above `LARGEST_DOUBT`.
        """
        tables = [
            self.replay.agreement.doubt_table(fan_out, k, self.drafting)
            for k, fan_out in enumerate(self.drafting.fan_out[: self.drafting.num_drafted])
        ]
        if not any(table.any() for table in tables):
            return 0.0
        looked_up = [self.ended[k] * self.goes_on(k) for k in range(len(self.ended))]
        open_hits = sum(
            float((looked_up[k] * (k < self.num_drafted) * self._at(table, k))[:, 1:].sum())
            for k, table in enumerate(tables)
        )
        doubt = open_hits / max(sum(float(table[:, 1:].sum()) for table in looked_up), 1e-300)
        if doubt > LARGEST_DOUBT:
            raise self._too_open(doubt)
        return doubt

    def _too_open(self, doubt: float) -> BadInput:
        num, proposer, C = self.replay.agreement.num_candidates, self.drafting.proposer, self.drafting.downweight
        name = "hit rate with a filler" if proposer is Proposer.FILLER else f"hit rate at downweight {C:g}"
        rule = f"must be known to within {LARGEST_DOUBT}; {num} candidates were recorded, which leave +-{doubt:.2g}"
        return BadInput(name, f"{rule}: record more candidates")

    def sample(self, accept_uniforms: FloatArray, hit_uniforms: FloatArray) -> SampledRounds:
        """The rounds that one number per (prompt, position) for acceptance and another for hits decide.

        Both are (..., num_prompts, positions), positions at least the width.
        """
        shape = np.broadcast_shapes(accept_uniforms.shape[:-1] + self.starts.shape, self.left.shape)
        num_tested = np.minimum(self.num_drafted, self.left)
        num_accepted = np.zeros(shape, dtype=np.int64)
        is_open = np.ones(shape, dtype=bool)
        for j in range(self.drafting.num_drafted):
            is_open &= (self._at(accept_uniforms, j) < self.accepted[j]) & (j < num_tested)
            num_accepted += is_open
        position = np.minimum(self.starts + num_accepted, hit_uniforms.shape[-1] - 1)
        drawn = np.take_along_axis(hit_uniforms, position, -1)
        prompt = np.arange(len(self.left))[:, None]
        return SampledRounds(num_accepted, drawn < self.hits[num_accepted, prompt, self.starts])

    def _at(self, by_position: NDArray, offset: int) -> NDArray:
        """A (..., positions) table read `offset` tokens after each start; 0 beyond it."""
        width = len(self.starts)
        read = by_position[..., offset : offset + width]
        missing = width - read.shape[-1]
        return np.pad(read, [(0, 0)] * (read.ndim - 1) + [(0, missing)]) if missing else read
