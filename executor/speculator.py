"""The draft's half of a decoder: what it answers to outcomes, and what it goes on to prepare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from executor.drafting import Caches, Drafter
from executor.fallback import fall_back
from executor.recorder import Recorder
from executor.sequence import Verified
from executor.speculation_cache import Speculation, SpeculationCache
from sim.policy import Fallback, LateBuild, Proposer, Speculative, SpeculativeSpeculative
from sim.trace import Operation, Outcome, Source

# What the next request brings: None while there is none, or the outcomes of the rows that go on. No row does if it is
# not about the next round.
Upcoming = Callable[[], Mapping[int, Outcome] | None]


class SynchronousSpeculator:
    """SD: drafts after the outcomes are known, while the target waits."""

    def __init__(self, policy: Speculative, drafter: Drafter, recorder: Recorder) -> None:
        self._policy = policy
        self._drafter = drafter
        self._recorder = recorder
        self._drafted: dict[int, Speculation] = {}

    def speculate(self, verified: Mapping[int, Verified]) -> dict[int, Speculation]:
        """The next round's speculation of each row that goes on. The prefill's outcomes come first."""
        self._recorder.round += 1
        self._drafter.keep(list(verified))
        for row, v in verified.items():
            self._drafter.commit(row, _committed(self._drafted.get(row), v.outcome))
        K = self._policy.speculation_length
        num_tokens = {row: min(K, v.remaining - 1, self._drafter.room(row)) for row, v in verified.items()}
        self._drafted = self._drafter.draft(num_tokens, self._policy.drafting(Source.SYNCHRONOUS))
        return self._drafted

    def prepare(self) -> None:
        """SD prepares nothing while the target verifies."""


class CachingSpeculator:
    """SSD: answers from the speculation cache or the fallback; builds the next cache while the target verifies."""

    def __init__(
        self, policy: SpeculativeSpeculative, drafter: Drafter, recorder: Recorder, upcoming: Upcoming
    ) -> None:
        self._upcoming = upcoming
        self._policy = policy
        self._drafter = drafter
        self._recorder = recorder
        self._caches: Caches | None = None
        self._speculations: dict[int, Speculation] = {}
        self._remaining: dict[int, int] = {}

    def speculate(self, verified: Mapping[int, Verified]) -> dict[int, Speculation]:
        """The next round's speculation of each row that goes on. The prefill's outcomes come first."""
        self._recorder.round += 1
        self._drafter.keep(list(verified))
        self._remaining = {row: v.remaining for row, v in verified.items()}
        if self._caches is None:
            self._commit(verified)
            found: dict[int, Speculation] = {}
            sources = dict.fromkeys(verified, Source.FIRST)
        else:
            found, sources = self._look_up(verified, self._caches)
        if sources:
            drafting = self._policy.drafting(next(iter(sources.values())))
            K = self._policy.speculation_length
            wanted = {row: min(K, self._room(row, drafting.proposer)) for row in sources}
            supplied = fall_back(self._policy.fallback, self._drafter, wanted, drafting)
            found |= {row: replace(supplied[row], source=source) for row, source in sources.items()}
        self._speculations = {row: found[row].first(self._room(row, found[row].proposer)) for row in verified}
        return self._speculations

    def _room(self, row: int, proposer: Proposer) -> int:
        """How many tokens a proposer may propose: the bonus token takes one of those that remain."""
        room = self._remaining[row] - 1
        return min(room, self._drafter.room(row)) if proposer is Proposer.DRAFT_MODEL else room

    def _look_up(
        self, verified: Mapping[int, Verified], caches: Caches
    ) -> tuple[dict[int, Speculation], dict[int, Source]]:
        """The prepared speculations that are used, and why the other rows need the fallback: a row missed, or it is
        drafted anew with a batch in which another did."""
        with self._recorder.span(Operation.LOOKUP, len(verified), self._drafter.contexts(verified)):
            self._commit(verified)
            hits = [row for row, v in verified.items() if v.outcome in caches[row]]
            sources = {row: Source.MISS for row in verified if row not in hits}
            if sources and self._policy.fallback is Fallback.DRAFT:
                return {}, {row: sources.get(row, Source.REDRAFTED) for row in verified}
            return {row: caches[row].take(verified[row].outcome) for row in hits}, sources

    def _commit(self, verified: Mapping[int, Verified]) -> None:
        for row, v in verified.items():
            self._drafter.commit(row, _committed(self._speculations.get(row), v.outcome))

    def prepare(self) -> None:
        """Build the speculation caches for the verification of the speculations just given; none for a row that ends
        whatever the outcome, or outgrows the draft model."""
        fan_out = {row: self._fan_out(row) for row in self._remaining if self._goes_on(row)}
        # Without branches only a hit leaves draft tokens that the draft model never fed.
        building = [row for row, own in fan_out.items() if sum(own) or self._speculations[row].source is Source.HIT]
        self._caches = {row: SpeculationCache() for row in self._remaining}
        if building:
            drafted = {row: self._speculations[row].tokens for row in building}
            is_needed = self._is_needed if self._policy.on_late_build is LateBuild.ABANDON else None
            self._caches |= self._drafter.build(drafted, fan_out, self._policy.drafting(Source.HIT), is_needed)

    def _goes_on(self, row: int) -> bool:
        num_drafted = len(self._speculations[row].tokens)
        return self._remaining[row] > 1 and self._drafter.has_room_to_build(row, num_drafted)

    def _fan_out(self, row: int) -> tuple[int, ...]:
        speculation = self._speculations[row]
        return self._policy.fan_out(speculation.source)[: len(speculation.tokens) + 1]

    def _is_needed(self, caches: Caches) -> bool:
        """Whether to go on with a build: the outcomes are unknown, or a speculation of it is going to be used."""
        outcomes = self._upcoming()
        if not outcomes:
            return outcomes is None
        hits = [row in caches and outcome in caches[row] for row, outcome in outcomes.items()]
        return all(hits) if self._policy.fallback is Fallback.DRAFT else any(hits)


def _committed(speculation: Speculation | None, outcome: Outcome) -> tuple[int, ...]:
    """What a verification commits; that of the prefill verifies nothing."""
    drafted = () if speculation is None else speculation.tokens[: outcome.num_accepted]
    return (*drafted, outcome.bonus_token)


Speculator = SynchronousSpeculator | CachingSpeculator
