"""At which rank of the drafter's list the target's token stands: all that decides how far a tree of tokens goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement, AgreementRecord
from sim.errors import BadInput
from sim.parametric import ParametricAgreement
from sim.policy import Drafting, Proposer
from sim.strategies.drafter import DRAFT_MODEL, Drafter
from sim.strategies.places import read_after
from sim.theory import stationary_hit_rate
from sim.trace import Source

FloatArray = NDArray[np.float64]
NOWHERE = np.iinfo(np.int64).max  # rank of a token beyond the end of a text


class RankLaw(Protocol):
    """Probabilities at the token `depth` places after the start of a round, given that the round gets there."""

    def within(self, low: int, high: int, depth: int) -> FloatArray:
        """That the target's token has a rank in low..high - 1 of the list that tokens are drafted from."""

    def prepared_after_all(self, fan_out: int, depth: int) -> FloatArray:
        """That it is among the `fan_out` likeliest, where no draft token stood at its place."""


def rank_law(agreement: Agreement, source: Source, drafter: Drafter = DRAFT_MODEL, stale: int = 0) -> RankLaw:
    """The law of rounds of one source, `stale` steps after the last true features.

    A record says the rank of every token. With summary numbers the first rank has the acceptance of the drafter, and
    the next F of them the hit rate of fan-out F after a rejection: at temperature 0 that is what both numbers mean.
    Raises `BadInput` for a drafter other than the recorded one, and for an agreement that is neither.
    """
    if isinstance(agreement, ParametricAgreement):
        return ParametricRanks(agreement, source, drafter, stale)
    if not isinstance(agreement, AgreementRecord):
        raise BadInput("agreement", "must be a record or summary numbers", type(agreement).__name__)
    if drafter != DRAFT_MODEL:
        rule = "must be the draft model on an agreement record, which holds no tokens of another one"
        raise BadInput("drafter", rule, drafter.name)
    return RecordedRanks(agreement)


@dataclass(frozen=True)
class ParametricRanks:
    """Scalars. The hit curve of synchronous rounds is that of all rounds of either source in the long run (eq. 1)."""

    agreement: ParametricAgreement
    source: Source
    drafter: Drafter = DRAFT_MODEL
    stale: int = 0

    def within(self, low: int, high: int, depth: int) -> FloatArray:
        return np.asarray(self._within(high, depth) - self._within(low, depth))

    def prepared_after_all(self, fan_out: int, depth: int) -> FloatArray:
        return np.asarray(self._hit_rate(fan_out, depth, rejected=False))

    def _within(self, width: int, depth: int) -> float:
        """That the rank is below a width."""
        if width == 0:
            return 0.0
        if (width, depth) not in self._known:
            first = self._acceptance(depth)
            self._known[width, depth] = first + (1 - first) * self._hit_rate(width - 1, depth, rejected=True)
        return self._known[width, depth]

    @cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        return {}

    def _acceptance(self, depth: int) -> float:
        recorded = self.agreement.acceptance_table(depth, self._drafting(self.source))[0, 0]
        return self.drafter.acceptance(float(recorded), depth, self.stale)

    def _hit_rate(self, fan_out: int, depth: int, *, rejected: bool) -> float:
        if self.source is not Source.SYNCHRONOUS:
            return self._hit_rate_after(self.source, fan_out, depth, rejected=rejected)
        hit, miss = (self._hit_rate_after(s, fan_out, depth, rejected=rejected) for s in (Source.HIT, Source.MISS))
        return stationary_hit_rate(hit, miss) if hit < 1 else hit

    def _hit_rate_after(self, source: Source, fan_out: int, depth: int, *, rejected: bool) -> float:
        return float(self.agreement.hit_table(fan_out, depth, self._drafting(source), rejected=rejected)[0, 0])

    def _drafting(self, source: Source) -> Drafting:
        return Drafting(Proposer.DRAFT_MODEL, 1, (), source)


@dataclass(frozen=True)
class RecordedRanks:
    """(num_prompts, width) indicators by the tokens emitted before a round; false beyond the end of a text."""

    record: AgreementRecord

    def within(self, low: int, high: int, depth: int) -> FloatArray:
        ranks = self._at(depth)
        return ((ranks >= low) & (ranks < high)).astype(float)

    def prepared_after_all(self, fan_out: int, depth: int) -> FloatArray:
        return self.within(0, fan_out, depth)

    def _at(self, depth: int) -> NDArray[np.int64]:
        return read_after(self._ranks, depth, NOWHERE)

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        table = np.full((self.record.num_prompts, int(self.record.lengths.max(initial=0))), NOWHERE)
        table[self.record.prompt, self.record.position] = self.record.rank
        return table
