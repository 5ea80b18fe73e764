"""Exact steady state of a batch whose rounds are all alike: a Markov chain over how many of its rows hit.

Where every round of a row has one law given its source (`sim.parametric`), rows that wait for each other are followed
by the number of rows, 0 to b, whose speculation came from the speculation cache. The chain is that of long texts: first
rounds, rounds that the length cap shortens, and batches with fewer rows at the ends of texts are left out, so finite
texts are slower. Times are means over all contexts of a text, at each of which they are taken or, to the error that
`sim.mean_times.Refinement` states, interpolated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.expectation import Expectation
from sim.mean_times import DRAFT_STEP, VERIFY, Build, Outcomes, Refinement, build_delays_s, draft_s
from sim.policy import Drafting, Fallback, LateBuild, Policy, SpeculativeSpeculative
from sim.replay import SOURCES, Replay
from sim.system import System, host_term
from sim.trace import Source
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

LEFT_OUT = (
    "steady state of long texts: batches that run half empty at the ends of texts are left out, so finite texts are"
    " slower; engine vectorized says by how much"
)


def steady_state(policy: Policy, workload: Workload, system: System) -> Expectation:
    """Tokens, seconds and hits of one round of one row, in the steady state of long texts; one prompt.

    Tokens over seconds are those of the whole batch: a row has the b-th part of the time of a round. Rows have
    independent outcomes and stand at the same context, over which times are averaged. Raises `BadInput` if the
    agreement does not say how rounds go, or if two whole rounds do not fit under the length cap.
    """
    replay, system = Replay(system.agreement, workload), system.as_run_by(policy)
    K = policy.speculation_length
    contexts = replay.contexts_with_room(K)[K + 1 :]
    if not len(contexts):
        rule = f"must leave room for two rounds of {K} draft tokens"
        raise BadInput("workload.max_new_tokens", rule, workload.max_new_tokens)
    if isinstance(policy, SpeculativeSpeculative):
        return _PreparedRounds(policy, workload, system, contexts).expectation()
    return _EqualRounds(policy, workload, system, contexts).expectation()


@dataclass(frozen=True)
class _RowLaw:
    """A round of one row: its draft tokens and branches, and what it leads to on average."""

    num_drafted: int
    num_branches: int
    tokens: float
    all_accepted: float
    hit_rate: float

    @classmethod
    def of(cls, agreement: Agreement, drafting: Drafting) -> _RowLaw:
        agreement.check(drafting)
        K = drafting.num_drafted
        accepted = [float(agreement.acceptance_table(j, drafting)[0, 0]) for j in range(K)]
        survival = np.cumprod([1.0, *accepted])
        ended = survival * (1 - np.array([*accepted, 0.0]))
        hits = [
            float(agreement.hit_table(fan_out, k, drafting, rejected=k < K)[0, 0])
            for k, fan_out in enumerate(drafting.fan_out)
        ]
        hit_rate = float(ended @ hits) if hits else 0.0
        return cls(K, drafting.num_branches(K), float(survival.sum()), float(survival[-1]), hit_rate)


class _Batch:
    """Rows of one policy at work together; times are means over the contexts, which count alike."""

    policy: Policy

    def __init__(self, policy: Policy, workload: Workload, system: System, contexts: IntArray) -> None:
        self.policy, self.system, self.size = policy, system, workload.batch_size
        self.sampled = policy.drafting(Source.HIT).is_sampled(workload.temperature)
        self.contexts = contexts

    def draft_s(self, rows: int) -> float:
        """Mean time of K draft steps of so many rows."""
        K, shares = self.policy.speculation_length, self.system.placement.shares_of_rows(rows)
        if len(shares) == 1:
            return float(draft_s(self.system, K, self.contexts, rows).mean())

        def at(_row: IntArray, places: IntArray) -> FloatArray:
            contexts = self.contexts[places].tolist()
            return np.array([[self.system.draft_samples_s(K, context, rows).mean() for context in contexts]])

        table = self.system.latency[DRAFT_STEP]
        corners = [bend - step for share in set(shares) for bend in table.bends(1, share) for step in range(K)]
        scale = 1 / self.verify_s(K * self.size, beside=False)
        return float(Refinement(self.contexts, [corners], scale[None, None], at).everywhere().mean())

    def verify_s(self, num_drafted: int, *, beside: bool) -> FloatArray:
        """(contexts,) mean time of a verification of so many draft tokens of all rows."""
        width = num_drafted / self.size + 1
        return self.system.mean_s(*VERIFY, width, self.contexts, beside=beside, batch_size=self.size)

    def message_s(self, num_drafted: int) -> float:
        """Time of the messages of a round: the speculations of all rows to the target, their outcomes back."""
        placement = self.system.placement
        return placement.speculation_s(num_drafted, sampled=self.sampled) + placement.outcome_s(self.size)

    def in_steady_state(self, tokens: float, seconds: float, lookups: FloatArray, hits: FloatArray) -> Expectation:
        """A round of one row, by what a round of the batch takes; look-ups and hits by source."""
        return Expectation(
            num_tokens=np.array([tokens]),
            num_rounds=np.ones(1),
            seconds=np.array([seconds / self.size]),
            num_lookups=lookups[:, None],
            num_hits=hits[:, None],
            notes=(LEFT_OUT,),
        )


class _EqualRounds(_Batch):
    """AR and SD: every round is like every other."""

    def expectation(self) -> Expectation:
        row = _RowLaw.of(self.system.agreement, self.policy.drafting(Source.SYNCHRONOUS))
        num_drafted = row.num_drafted * self.size
        seconds = self.system.host_s[host_term(self.policy, Source.SYNCHRONOUS)]
        seconds += float(self.verify_s(num_drafted, beside=False).mean())
        if num_drafted:
            seconds += self.message_s(num_drafted) + self.draft_s(self.size) + self._unfed_s(row.all_accepted)
        return self.in_steady_state(row.tokens, seconds, np.zeros(2), np.zeros(2))

    def _unfed_s(self, all_accepted: float) -> float:
        """What first draft steps take longer by the rows that accepted everything and still have a token to feed."""
        if len(self.system.placement.shares_of_rows(self.size)) > 1:
            rule = "SD in a batch whose rows are split over draft devices is outside the exact engine; use engine"
            raise BadInput("placement.split", f"{rule} vectorized or des", self.system.placement.split.value)
        chances = binomial(self.size, all_accepted)
        return sum(chance * self._first_step_s(rows / self.size) for rows, chance in enumerate(chances) if chance > 0)

    def _first_step_s(self, share: float) -> float:
        """Of how much longer than one token of each row takes the share of rows that feed two, in seconds."""
        two_s, one_s = (
            self.system.mean_s(*DRAFT_STEP, 1 + more, self.contexts - more, beside=False, batch_size=self.size)
            for more in (share, 0.0)
        )
        return float((two_s - one_s).mean())


class _PreparedRounds(_Batch):
    """SSD: rounds by how many rows verify a prepared speculation."""

    policy: SpeculativeSpeculative

    def expectation(self) -> Expectation:
        num_hits = np.arange(self.size + 1)
        looked_up = np.stack([self._looked_up(hits) for hits in num_hits.tolist()])
        share = stationary(self._next_round(looked_up))
        seconds = sum(share[hits] * self._round_s(hits, looked_up[hits]) for hits in num_hits.tolist() if share[hits])
        after_hit = float(share @ num_hits) / self.size
        lookups = np.array([after_hit, 1 - after_hit])
        tokens, hits = (lookups * [getattr(row, name) for row in self.rows] for name in ("tokens", "hit_rate"))
        return self.in_steady_state(tokens.sum(), float(seconds), lookups, hits)

    @cached_property
    def rows(self) -> tuple[_RowLaw, _RowLaw]:
        """Laws after a hit and after a miss."""
        hit, miss = (_RowLaw.of(self.system.agreement, self.policy.drafting(source)) for source in SOURCES)
        return hit, miss

    def _looked_up(self, hits: int) -> FloatArray:
        """(b + 1,) law of how many look-ups hit after a round in which `hits` rows had a prepared speculation."""
        hit, miss = self.rows
        return np.convolve(binomial(hits, hit.hit_rate), binomial(self.size - hits, miss.hit_rate))

    def _next_round(self, looked_up: FloatArray) -> FloatArray:
        """Transitions: where the whole batch is drafted anew, prepared speculations count only if all rows hit."""
        if self.policy.fallback is not Fallback.DRAFT:
            return looked_up
        moves = np.zeros_like(looked_up)
        moves[:, 0], moves[:, -1] = looked_up[:, :-1].sum(1), looked_up[:, -1]
        return moves

    def _round_s(self, hits: int, looked_up: FloatArray) -> float:
        """Mean time from the start of a verification to that of the next."""
        num_drafted = sum(row.num_drafted * num for row, num in zip(self.rows, (hits, self.size - hits), strict=True))
        build, message_s = self._build(hits), self.message_s(num_drafted)
        needed_s, unneeded_s = self._delays_s(build, num_drafted / self.size + 1, message_s)
        seconds = float(self.verify_s(num_drafted, beside=build is not None).mean()) + message_s
        for found, chance in enumerate(looked_up):
            if chance > 0:
                seconds += chance * (needed_s if self._is_needed(found) else unneeded_s)
                seconds += chance * self._waiting_s(found)
        return seconds

    def _is_needed(self, found: int) -> bool:
        """Whether a row needs the build after a round of which `found` look-ups hit."""
        return found == self.size if self.policy.fallback is Fallback.DRAFT else found > 0

    def _build(self, hits: int) -> tuple[Build, float] | None:
        """The build beside a round and the branches of each row, means over the rows that build."""
        numbers = zip(self.rows, (hits, self.size - hits), strict=True)
        building = [(row, num) for row, num in numbers if row.num_branches and num]
        total = sum(num for _, num in building)
        if not total:
            return None
        num_drafted = sum(row.num_drafted * num for row, num in building) / total
        num_branches = sum(row.num_branches * num for row, num in building) / total
        return Build(num_drafted, self.policy.speculation_length, total), num_branches

    def _delays_s(self, build: tuple[Build, float] | None, width: float, message_s: float) -> tuple[float, float]:
        """Mean delay by a build that a row needs, and by one that no row needs, beside a verification of that width."""
        if build is None:
            return 0.0, 0.0
        outcomes = Outcomes.of_verification(self.system, width, self.contexts, message_s, self.size)
        abandons = self.policy.on_late_build is LateBuild.ABANDON
        found = build_delays_s(self.system, build[0], [build[1]], self.contexts, outcomes, abandons=abandons)
        needed_s, unneeded_s = found[:, 0].mean(1)
        return float(needed_s), float(unneeded_s)

    def _waiting_s(self, found: int) -> float:
        """Host time and draft steps between the outcomes and the next verification, if `found` look-ups hit."""
        host_s = self.system.host_s[host_term(self.policy, Source.HIT if found == self.size else Source.MISS)]
        if found == self.size or not self.policy.waits_for_draft(Source.MISS):
            return host_s
        return host_s + self._drafting_s[self.size if self.policy.fallback is Fallback.DRAFT else self.size - found]

    @cached_property
    def _drafting_s(self) -> dict[int, float]:
        """By number of rows drafted anew."""
        anew = [self.size] if self.policy.fallback is Fallback.DRAFT else range(1, self.size + 1)
        return {rows: self.draft_s(rows) for rows in anew}


def stationary(moves: FloatArray) -> FloatArray:
    """(n,) share of rounds that a chain with transitions `moves` (n, n) from state 0 spends in each state in the long
    run. Only one set of states that is never left may be reached.
    """
    n = len(moves)
    reached = np.linalg.matrix_power(np.eye(n) + (moves > 0), n)[0] > 0
    among = moves[np.ix_(reached, reached)]
    balance = np.vstack([among.T - np.eye(len(among)), np.ones(len(among))])
    share = np.zeros(n)
    share[reached] = np.linalg.lstsq(balance, np.array([0.0] * len(among) + [1.0]), rcond=None)[0]
    return np.maximum(0.0, share)


def binomial(num: int, chance: float) -> FloatArray:
    """(num + 1,) law of the number of successes."""
    return np.array([math.comb(num, k) * chance**k * (1 - chance) ** (num - k) for k in range(num + 1)])
