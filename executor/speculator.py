"""The draft's half of a decoder: what it answers to outcomes, and what it goes on to prepare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from executor.drafting import Caches, Drafter
from executor.fallback import fall_back
from executor.recorder import Recorder
from executor.sequence import Question, Verified
from executor.speculation_cache import Speculation, SpeculationCache
from sim.policy import Autoregressive, Fallback, LateBuild, Policy, Proposer, SpeculativeSpeculative
from sim.trace import Operation, Outcome, Source

# The next request: None while there is none. One that is not about a round asks about no row.
Upcoming = Callable[[], Question | None]


class Speculator:
    """SD drafts after the outcomes are known, while the target waits. SSD answers from the speculation cache or the
    fallback, and builds the next cache while the target verifies. Each question says under which policy.

    Where the policy changes from one SSD to another, prepared speculations keep their length, and the fan-out lists
    beside them are the new policy's, cut or padded with zeros to it. Another kind of decoder drops them, and so does a
    round without a speculation.
    """

    def __init__(self, drafter: Drafter, recorder: Recorder, upcoming: Upcoming) -> None:
        self._upcoming = upcoming
        self._drafter = drafter
        self._recorder = recorder
        self._policy: Policy = Autoregressive()
        self._caches: Caches | None = None  # None: nothing was prepared for the round before
        self._speculations: dict[int, Speculation] = {}
        self._remaining: dict[int, int] = {}

    def speculate(self, question: Question) -> dict[int, Speculation]:
        """The next round's speculation of each row that goes on. The prefill's outcomes come first."""
        verified, caches = question.verified, self._caches
        self._policy, self._caches = question.policy, None
        self._recorder.round += 1 + question.num_rounds_without
        self._drafter.keep(list(verified))
        self._remaining = {row: v.remaining for row, v in verified.items()}
        if caches is None or question.num_rounds_without or not isinstance(self._policy, SpeculativeSpeculative):
            found, sources = self._without_cache(verified)
        else:
            found, sources = self._look_up(verified, caches, self._policy)
        found |= self._drafted(sources)
        self._speculations = {row: found[row].first(self._room(row, found[row].proposer)) for row in verified}
        return self._speculations

    def _room(self, row: int, proposer: Proposer) -> int:
        """How many tokens a proposer may propose: the bonus token takes one of those that remain."""
        room = self._remaining[row] - 1
        return min(room, self._drafter.room(row)) if proposer is Proposer.DRAFT_MODEL else room

    def _without_cache(self, verified: Mapping[int, Verified]) -> tuple[dict[int, Speculation], dict[int, Source]]:
        self._commit(verified)
        is_ssd = isinstance(self._policy, SpeculativeSpeculative)
        return {}, dict.fromkeys(verified, Source.FIRST if is_ssd else Source.SYNCHRONOUS)

    def _look_up(
        self, verified: Mapping[int, Verified], caches: Caches, policy: SpeculativeSpeculative
    ) -> tuple[dict[int, Speculation], dict[int, Source]]:
        """The prepared speculations that are used, and why the other rows need the fallback: a row missed, or it is
        drafted anew with a batch in which another did."""
        with self._recorder.span(Operation.LOOKUP, len(verified), self._drafter.contexts(verified)):
            self._commit(verified)
            hits = [row for row, v in verified.items() if v.outcome in caches[row]]
            sources = {row: Source.MISS for row in verified if row not in hits}
            if sources and policy.fallback is Fallback.DRAFT:
                return {}, {row: sources.get(row, Source.REDRAFTED) for row in verified}
            return {row: caches[row].take(verified[row].outcome) for row in hits}, sources

    def _drafted(self, sources: Mapping[int, Source]) -> dict[int, Speculation]:
        """Speculations of the rows that have none in hand, by the reason why."""
        if not sources:
            return {}
        policy, drafting = self._policy, self._policy.drafting(next(iter(sources.values())))
        wanted = {row: min(policy.speculation_length, self._room(row, drafting.proposer)) for row in sources}
        fallback = policy.fallback if isinstance(policy, SpeculativeSpeculative) else Fallback.DRAFT
        supplied = fall_back(fallback, self._drafter, wanted, drafting)
        return {row: replace(supplied[row], source=source) for row, source in sources.items()}

    def _commit(self, verified: Mapping[int, Verified]) -> None:
        for row, v in verified.items():
            self._drafter.commit(row, (*_committed(self._speculations.get(row), v.outcome), *v.since))

    def prepare(self) -> bool:
        """Under SSD build the speculation caches for the verification of the speculations just given; none for a row
        that ends whatever the outcome, or outgrows the draft model. Whether there was anything to build, and it was
        built to its end."""
        policy = self._policy
        if not isinstance(policy, SpeculativeSpeculative):
            return False
        fan_out = {row: self._fan_out(row, policy) for row in self._remaining if self._goes_on(row)}
        # Without branches only a hit leaves draft tokens that the draft model never fed.
        building = [row for row, own in fan_out.items() if sum(own) or self._speculations[row].source is Source.HIT]
        caches: dict[int, SpeculationCache] = {row: SpeculationCache() for row in self._remaining}
        if building:
            drafted = {row: self._speculations[row].tokens for row in building}
            is_needed = self._is_needed if policy.on_late_build is LateBuild.ABANDON else None
            caches |= self._drafter.build(drafted, fan_out, policy.drafting(Source.HIT), is_needed)
        self._caches = caches
        return any(cache.is_built for cache in caches.values())

    def _goes_on(self, row: int) -> bool:
        num_drafted = len(self._speculations[row].tokens)
        return self._remaining[row] > 1 and self._drafter.has_room_to_build(row, num_drafted)

    def _fan_out(self, row: int, policy: SpeculativeSpeculative) -> tuple[int, ...]:
        speculation = self._speculations[row]
        num_counts = len(speculation.tokens) + 1
        return (*policy.fan_out(speculation.source), *(0,) * num_counts)[:num_counts]

    def _is_needed(self, caches: Caches) -> bool:
        """Whether to go on with a build: the outcomes are unknown, or a speculation of it is going to be used."""
        question = self._upcoming()
        if question is None:
            return True
        policy, verified = question.policy, question.verified
        if not isinstance(policy, SpeculativeSpeculative) or question.num_rounds_without or not verified:
            return False
        hits = [row in caches and v.outcome in caches[row] for row, v in verified.items()]
        return all(hits) if policy.fallback is Fallback.DRAFT else any(hits)


def _committed(speculation: Speculation | None, outcome: Outcome) -> tuple[int, ...]:
    """What a verification commits; that of the prefill verifies nothing."""
    drafted = () if speculation is None else speculation.tokens[: outcome.num_accepted]
    return (*drafted, outcome.bonus_token)
