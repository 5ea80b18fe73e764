"""The draft's half of a decoder: what it answers to an outcome, and what it goes on to prepare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from executor.drafting import Drafter
from executor.fallback import fall_back
from executor.recorder import Recorder
from executor.speculation_cache import Speculation, SpeculationCache
from sim.policy import LateBuild, Speculative, SpeculativeSpeculative
from sim.trace import Operation, Outcome, Source


# What the next request brings: None while there is none, an outcome, or () if the sequence is over.
Upcoming = Callable[[], Sequence[Outcome] | None]


class SynchronousSpeculator:
    """SD: drafts after the outcome is known, while the target waits."""

    def __init__(self, policy: Speculative, drafter: Drafter, recorder: Recorder) -> None:
        self._policy = policy
        self._drafter = drafter
        self._recorder = recorder
        self._drafted: tuple[int, ...] = ()

    def speculate(self, outcome: Outcome, remaining: int) -> Speculation:
        """The next round's speculation; `remaining` tokens may still be emitted. The prefill's outcome comes first."""
        self._recorder.round += 1
        self._drafter.commit((*self._drafted[: outcome.num_accepted], outcome.bonus_token))
        num_tokens = min(self._policy.speculation_length, remaining - 1)
        speculation = self._drafter.draft(num_tokens, self._policy.drafting(Source.SYNCHRONOUS))
        self._drafted = speculation.tokens
        return speculation

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
        self._cache: SpeculationCache | None = None
        self._speculation = Speculation(Source.FIRST)
        self._remaining = 0

    def speculate(self, outcome: Outcome, remaining: int) -> Speculation:
        """The next round's speculation; `remaining` tokens may still be emitted. The prefill's outcome comes first."""
        self._recorder.round += 1
        speculation = self._look_up(outcome)
        if speculation is None:
            source = Source.FIRST if self._cache is None else Source.MISS
            num_tokens = min(self._policy.speculation_length, remaining - 1)
            speculation = fall_back(self._policy.fallback, self._drafter, num_tokens, self._policy.drafting(source))
        self._speculation = speculation.first(remaining - 1)
        self._remaining = remaining
        return self._speculation

    def _look_up(self, outcome: Outcome) -> Speculation | None:
        committed = (*self._speculation.tokens[: outcome.num_accepted], outcome.bonus_token)
        if self._cache is None:
            self._drafter.commit(committed)
            return None
        with self._recorder.span(Operation.LOOKUP, num_tokens=1, context=self._drafter.model.length):
            self._drafter.commit(committed)
            return self._cache.take(outcome)

    def prepare(self) -> None:
        """Build the speculation cache for the verification of the speculation just given."""
        self._cache = SpeculationCache()
        if self._remaining == 1:
            return  # whatever the outcome, it ends the sequence
        drafted, source = self._speculation.tokens, self._speculation.source
        fan_out = self._policy.fan_out(source)[: len(drafted) + 1]
        # Without branches only a hit leaves draft tokens that the draft model never fed.
        if sum(fan_out) > 0 or source is Source.HIT:
            is_needed = self._is_needed if self._policy.on_late_build is LateBuild.ABANDON else None
            self._cache = self._drafter.build(drafted, fan_out, self._policy.drafting(Source.HIT), is_needed)

    def _is_needed(self, cache: SpeculationCache) -> bool:
        """Whether to go on with a build: the outcome is unknown, or prepared."""
        outcomes = self._upcoming()
        return outcomes is None or any(outcome in cache for outcome in outcomes)


Speculator = SynchronousSpeculator | CachingSpeculator
