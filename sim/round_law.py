"""The law of a round by the place where it starts: what every engine reads, whoever drafted, whatever was prepared."""

from __future__ import annotations

from collections.abc import Sequence
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

    @cached_property
    def sampler(self) -> RoundSampler:
        """Raises `BadInput` where the law has too much `doubt`."""
        return RoundSampler(self)

    def _at(self, by_position: NDArray, offset: int) -> NDArray:
        """A (..., positions) table read `offset` tokens after each start; 0 beyond it."""
        width = len(self.starts)
        read = by_position[..., offset : offset + width]
        missing = width - read.shape[-1]
        return np.pad(read, [(0, 0)] * (read.ndim - 1) + [(0, missing)]) if missing else read


@dataclass(frozen=True)
class SampledRounds:
    """What a round does wherever it may start; arrays are (..., num_prompts, width) over the tokens emitted before it.

    `num_accepted` is at most the tokens that the text has left; where it equals them, a stop token is among the
    accepted ones and the sequence ends there. `is_prepared` is false where the sequence does not go on.
    """

    num_accepted: NDArray[np.integer]
    is_prepared: BoolArray


class RoundSampler:
    """Rounds of a law that one number per (prompt, position) for acceptance and another for hits decide.

    Numbers are (..., num_prompts, positions), positions at least the width. That of a token decides its fate wherever
    the round began, so that policies under the same numbers meet the same luck. One number at its place says whether a
    round goes past draft token j: the accepted count and the look-up are found from the last draft token backwards,
    without gathers.
    """

    def __init__(self, law: RoundLaw) -> None:
        self.shape = law.left.shape
        self.count_type = np.min_scalar_type(law.drafting.num_drafted + 1)
        num_tested = np.minimum(law.num_drafted, law.left)
        self.accepted = [np.where(j < num_tested, table, 0.0) for j, table in enumerate(law.accepted)]
        self.hits = law.hits if law.drafting.fan_out else None

    def sample(self, accept_uniforms: FloatArray, hit_uniforms: FloatArray) -> SampledRounds:
        """The rounds that the numbers decide."""
        return self.rounds(self.passes(accept_uniforms), hit_uniforms)

    def passes(self, accept_uniforms: FloatArray) -> list[BoolArray]:
        """For every draft token, (..., num_prompts, width) whether a round that tests it goes past it."""
        return [_below(accept_uniforms, j, accepted) for j, accepted in enumerate(self.accepted)]

    def rounds(self, passes: Sequence[BoolArray], hit_uniforms: FloatArray) -> SampledRounds:
        """The rounds that pass so."""
        num_accepted = np.zeros((*hit_uniforms.shape[:-2], *self.shape), dtype=self.count_type)
        for passed in reversed(passes):
            num_accepted += self.count_type.type(1)
            num_accepted *= passed
        return SampledRounds(num_accepted, self._prepared(passes, hit_uniforms))

    def _prepared(self, passes: Sequence[BoolArray], hit_uniforms: FloatArray) -> BoolArray:
        if self.hits is None:
            return np.broadcast_to(np.False_, (*hit_uniforms.shape[:-2], *self.shape))
        is_prepared = _below(hit_uniforms, len(passes), self.hits[-1])
        for j, passed in reversed(list(enumerate(passes))):
            is_prepared &= passed
            is_prepared |= _below(hit_uniforms, j, self.hits[j]) > passed
        return is_prepared


def _below(uniforms: FloatArray, offset: int, table: FloatArray) -> BoolArray:
    """Whether the number `offset` tokens after each start is below the table's entry of the start."""
    below = np.zeros((*uniforms.shape[:-2], *table.shape), dtype=bool)
    num = max(0, min(table.shape[-1], uniforms.shape[-1] - offset))
    np.less(uniforms[..., offset : offset + num], table[:, :num], out=below[..., :num])
    return below
