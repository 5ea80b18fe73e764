"""What a controller takes for true about a pair and a machine, and the closed forms of a policy under it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from sim.errors import BadInput, require_mapping, require_number
from sim.parametric import HitCurve
from sim.policy import Fallback, LateBuild, Policy, Proposer, SpeculativeSpeculative
from sim.system import HostTerm, host_term
from sim.theory import stationary_hit_rate
from sim.trace import Source

NEGLIGIBLE = 1e-9  # of a count, a rate, a time in seconds


# -------------------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class AffineTime:
    """Time of one operation over `num_tokens` tokens of all rows together: base_s + per_token_s * num_tokens."""

    base_s: float
    per_token_s: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            seconds = require_number(f"times.{entry.name}", getattr(self, entry.name), 0)
            object.__setattr__(self, entry.name, seconds)

    def at(self, num_tokens: float) -> float:
        return self.base_s + self.per_token_s * num_tokens

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str) -> AffineTime:
        """Inverse of `dataclasses.asdict`. Raises `BadInput` with `name` before the key."""
        return cls(**require_mapping(name, data, ("base_s", "per_token_s"), ("base_s",)))


@dataclass(frozen=True)
class ExpectedTimes:
    """What a profile says before the first round. Tokens are those of all rows: rows * (K + 1) of a verification, rows
    of a draft step, branches of a tree step.

    `contention` is the factor on a verification with a build beside it. It is not learned: while there is always a
    build, slow verifications cannot be told from slowed ones.
    """

    verify: AffineTime
    draft_step: AffineTime
    tree_step: AffineTime
    glue: AffineTime
    host_s: float = 0.0
    contention: float = 1.0

    def __post_init__(self) -> None:
        for name in ("verify", "draft_step", "tree_step", "glue"):
            if not isinstance(getattr(self, name), AffineTime):
                raise BadInput(f"times.{name}", "must be an affine time", getattr(self, name))
        object.__setattr__(self, "host_s", require_number("times.host_s", self.host_s, 0))
        object.__setattr__(self, "contention", require_number("times.contention", self.contention, 1))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExpectedTimes:
        """Inverse of `dataclasses.asdict`. Raises `BadInput` naming the key."""
        required = [entry.name for entry in fields(cls) if entry.default is MISSING]
        given = require_mapping("times", data, [entry.name for entry in fields(cls)], required)
        times = {name: AffineTime.from_dict(given[name], f"times.{name}") for name in required}
        return cls(**{**given, **times})


# ------------------------------------------------------------------------------------------------------------- policies


@dataclass(frozen=True)
class Pace:
    """Means of one row in a long text: tokens per round and seconds per round."""

    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, NEGLIGIBLE)


@dataclass(frozen=True)
class Beliefs:
    """What a controller takes for true now, and the closed forms of a policy under it.

    `acceptance[proposer][j]` is the conditional acceptance of draft token j; the last entry stands for all that follow.
    Rounds are independent given their source, times are means (E[max(verify, build)] of noisy times is larger than what
    is computed here), and the ends of texts are left out. `num_rows` is the mean number of rows.
    """

    acceptance: Mapping[Proposer, tuple[float, ...]]
    after_hit: HitCurve
    after_miss: HitCurve
    times: ExpectedTimes
    host_s: Mapping[HostTerm, float]
    num_rows: float = 1.0

    def survival(self, proposer: Proposer, num_drafted: int) -> list[float]:
        """P(at least k draft tokens are accepted), k = 0..num_drafted."""
        by_index = self.acceptance[proposer]
        survival = [1.0]
        for j in range(num_drafted):
            survival.append(survival[-1] * by_index[min(j, len(by_index) - 1)])
        return survival

    def pace(self, policy: Policy) -> Pace:
        """Tokens and seconds per round of a row, in the long run."""
        if isinstance(policy, SpeculativeSpeculative):
            in_step = self.num_rows <= 1 or policy.fallback is Fallback.DRAFT
            return self._pace_in_step(policy) if in_step else self._pace_of_mixed_rows(policy)
        K = policy.speculation_length
        seconds = self.host_s[host_term(policy, Source.SYNCHRONOUS)] + K * self.times.draft_step.at(self.num_rows)
        tokens = sum(self.survival(Proposer.DRAFT_MODEL, K))
        return Pace(tokens, seconds + self.times.verify.at(self.num_rows * (K + 1)))

    def hit_rate(self, policy: SpeculativeSpeculative, source: Source) -> float:
        """Probability that the outcome of a round of this source is prepared: sum_k P(k) h(F_k) (Theorem 18)."""
        curve = self.after_hit if source is Source.HIT else self.after_miss
        survival = [*self.survival(policy.proposer(source), policy.num_drafted(source)), 0.0]
        return sum(
            (survival[k] - survival[k + 1]) * curve.hit_rate(fan_out)
            for k, fan_out in enumerate(policy.fan_out(source))
        )

    def _pace_in_step(self, policy: SpeculativeSpeculative) -> Pace:
        """One row, or rows that are all drafted anew if any of them misses: Theorem 7, Corollary 16."""
        after_hit, after_miss = (self.hit_rate(policy, source) ** self.num_rows for source in (Source.HIT, Source.MISS))
        share = _long_run_share(after_hit, after_miss)
        hit, miss = self._pace_after(policy, Source.HIT, after_hit), self._pace_after(policy, Source.MISS, after_miss)
        return Pace(share * hit.tokens + (1 - share) * miss.tokens, share * hit.seconds + (1 - share) * miss.seconds)

    def _pace_after(self, policy: SpeculativeSpeculative, source: Source, next_hits: float) -> Pace:
        num_drafted, rows = policy.num_drafted(source), self.num_rows
        seconds = self.host_s[host_term(policy, source)]
        if policy.waits_for_draft(source):
            seconds += num_drafted * self.times.draft_step.at(rows)
        num_branches = rows * sum(policy.fan_out(source))
        seconds += self._beside(policy, rows * (num_drafted + 1), num_branches, next_hits)
        return Pace(sum(self.survival(policy.proposer(source), num_drafted)), seconds)

    def _pace_of_mixed_rows(self, policy: SpeculativeSpeculative) -> Pace:
        """Rows that hit and rows that missed share a round: every round is taken to have their mean numbers."""
        rows, K, missed = self.num_rows, policy.speculation_length, policy.num_drafted_after_miss
        share = _long_run_share(self.hit_rate(policy, Source.HIT), self.hit_rate(policy, Source.MISS))
        all_hit = share**rows
        hit_s, miss_s = (self.host_s[host_term(policy, source)] for source in (Source.HIT, Source.MISS))
        seconds = all_hit * hit_s + (1 - all_hit) * miss_s
        if policy.waits_for_draft(Source.MISS) and all_hit < 1:
            num_missing = rows * (1 - share) / (1 - all_hit)
            seconds += (1 - all_hit) * K * self.times.draft_step.at(num_missing)
        branches = share * sum(policy.fan_out_after_hit) + (1 - share) * sum(policy.fan_out_after_miss)
        num_tokens = rows * (1 + share * K + (1 - share) * missed)
        seconds += self._beside(policy, num_tokens, rows * branches, 1 - (1 - share) ** rows)
        tokens = share * sum(self.survival(Proposer.DRAFT_MODEL, K))
        tokens += (1 - share) * sum(self.survival(policy.proposer(Source.MISS), missed))
        return Pace(tokens, seconds)

    def _beside(
        self, policy: SpeculativeSpeculative, num_tokens: float, num_branches: float, next_needs: float
    ) -> float:
        """Verification, and the rest of the build beside it where it is waited for: always, or only if it is needed."""
        verify_s = self.times.verify.at(num_tokens)
        if not num_branches:
            return verify_s
        verify_s *= self.times.contention
        build_s = self.times.glue.at(num_tokens) + policy.speculation_length * self.times.tree_step.at(num_branches)
        waited_for = 1.0 if policy.on_late_build is LateBuild.WAIT else next_needs
        return verify_s + waited_for * max(0.0, build_s - verify_s)


def _long_run_share(after_hit: float, after_miss: float) -> float:
    """Share of rounds with a hit; texts begin as after a miss, so that hits that follow hits only never begin."""
    return stationary_hit_rate(after_hit, after_miss) if after_miss > 0 else 0.0
