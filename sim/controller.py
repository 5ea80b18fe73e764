"""Adaptive controllers: who changes the policy during a run, from what a real engine sees of its rounds.

A configuration (`RunningStatistics`, `HillClimbing`) is a frozen value; `start()` makes a controller without any past,
so that nothing carries over from one run to the next. The engine reads `policy` before each round and calls `observe`
after it, once per row in the order of the rows. Neither sees the agreement record, the text or the system.

Bounds that hold whatever is observed, over n rounds:

- `RunningStatistics` changes its plan at most `switches_at_once` + n / `rounds_per_switch` times (58 times in 10,000
  rounds with the defaults), at most once every `interval` rounds, and never for a predicted gain up to `margin`. Beside
  that it probes other lengths, a round at a time (more where an engine tells of rounds later): at most once every
  `interval` rounds, for a share `exploration` of the time as predicted; under AR that is the time that probes take
  longer than its own rounds.
- `HillClimbing` changes its policy at most once every `interval` rounds.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.parametric import HitCurve
from sim.policy import (
    Autoregressive,
    Fallback,
    LateBuild,
    Policy,
    Proposer,
    Speculative,
    SpeculativeSpeculative,
    geometric_fan_out,
    uniform_fan_out,
)
from sim.system import HostTerm, host_term
from sim.theory import stationary_hit_rate
from sim.trace import Source

FloatArray = NDArray[np.float64]

NEGLIGIBLE = 1e-9  # of a count, a rate, a time in seconds
NEWTON_STEPS = 8  # a step changes c by a factor of at most e: eight reach any miss rate that could matter


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """What an engine sees of one row of one round, in seconds; the times are those of the round, equal for its rows.

    `source` says where the speculation verified came from, and with it whether the look-up before it hit. `round_s` is
    the time between the outcomes of the round before and its own. `draft_s` is drafting that the target waited for, 0
    without it. `build_s` is the build beside this verification, 0 where there was none or it was abandoned; a round is
    told once its build has ended, so that others may have run since. `batch_size` is the number of rows of the round.
    """

    source: Source
    num_drafted: int
    num_accepted: int
    policy: Policy
    round_s: float
    verify_s: float
    draft_s: float
    build_s: float
    batch_size: int


class Controller(Protocol):
    """Fresh for each run: `policy` is that of the next round, `observe` is told of every row of every round."""

    @property
    def policy(self) -> Policy: ...

    def observe(self, seen: RoundSeen) -> None: ...


# -------------------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class AffineTime:
    """Time of one operation over `num_tokens` tokens of all rows together: base_s + per_token_s * num_tokens."""

    base_s: float
    per_token_s: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            _require_number(f"times.{entry.name}", getattr(self, entry.name), 0)

    def at(self, num_tokens: float) -> float:
        return self.base_s + self.per_token_s * num_tokens


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
        _require_number("times.host_s", self.host_s, 0)
        _require_number("times.contention", self.contention, 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExpectedTimes:
        """Inverse of `dataclasses.asdict`."""
        times: dict[str, Any] = {k: AffineTime(**v) if isinstance(v, Mapping) else v for k, v in data.items()}
        return cls(**times)


# ------------------------------------------------------------------------------------------------------ configuration


@dataclass(frozen=True)
class RunningStatistics:
    """Every `interval` rounds the policy of the largest predicted throughput under fading statistics of the run.

    Candidates are all pairs of a speculation length and a budget (the sum of a fan-out list): K = 0 is AR, a budget of
    0 is SD, the others are SSD with Theorem 12's fan-out for the acceptance and the exponents now believed.
    Throughputs are closed forms over the Markov chain of hits and misses of long texts (`Beliefs.pace`). An entry of a
    fan-out list may be as large as the budget: no more than the candidates that an agreement record holds.

    What is given before the first round: `times` (a profile), `acceptance` of a draft token, `fallback_acceptance` of
    one from a fallback that is not the draft model, and the hit curves (the middle of what is read off the paper's
    figures: c .28-.56 after a hit, .5-.85 after a miss, r .4-.56).

    - `memory`: rounds after which an outcome counts e times less. 100 rounds hold about 200 tests, a standard error of
      .03 of the acceptance; after a step 200 rounds leave 14 % of the past.
    - `long_memory`: rounds of the memory for shapes (acceptance by index, times by tokens), which change less than
      levels; and those after which what is neither run nor probed (look-ups) is believed to be as given before the run
      again, and is tried again if it was good then.
    - `shrinkage`: number of tests or misses that a prior counts for. With 20 tests three accepted probes in a
      row lift an acceptance of .2 to .3, which chance does once in 125 probes.
    - `time_shrinkage`: number of operations that the profile counts for. Durations vary less than outcomes, and a
      profile may be wrong by more than they vary.
    - `exponent_spread`: standard deviation of the exponent r around its prior; pairs differ by about as much.
    - `interval`: 20 rounds change an estimate by less than its error; sooner only costs host time.
    - `margin`: gain that a change must promise; it bounds what staying costs, and is what the acceptance's standard
      error moves the ratio of neighbouring lengths by.
    - `switches_at_once`, `rounds_per_switch`: the bound on changes. A step needs a handful of changes at once; more
      than one per 200 rounds in the long run would follow noise.
    - `exploration`: share of the time that probes may cost; 1 % is below what a wrong policy costs.
    """

    speculation_lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    times: ExpectedTimes
    fallback: Fallback = Fallback.DRAFT
    on_late_build: LateBuild = LateBuild.WAIT
    acceptance: float = 0.7
    fallback_acceptance: float = 0.3
    after_hit: HitCurve = field(default_factory=lambda: HitCurve(0.42, 0.48))
    after_miss: HitCurve = field(default_factory=lambda: HitCurve(0.68, 0.48))
    memory: float = 100.0
    long_memory: float = 2000.0
    shrinkage: float = 20.0
    time_shrinkage: float = 1.0
    exponent_spread: float = 0.1
    interval: int = 20
    margin: float = 0.01
    switches_at_once: int = 8
    rounds_per_switch: float = 200.0
    exploration: float = 0.01

    def __post_init__(self) -> None:
        _check_grid(self)
        for name in ("acceptance", "fallback_acceptance"):
            _require_number(name, getattr(self, name), 0, 1)
        for name in ("memory", "long_memory", "rounds_per_switch"):
            _require_number(name, getattr(self, name), 1)
        for name in ("shrinkage", "time_shrinkage", "exponent_spread"):
            _require_number(name, getattr(self, name), 1e-3)
        _require_number("margin", self.margin, 0)
        _require_number("exploration", self.exploration, 0, 1)
        for name in ("interval", "switches_at_once"):
            _require_count(name, getattr(self, name), 1)

    @property
    def name(self) -> str:
        return f"running statistics {_grid_name(self)}"

    def start(self) -> RunningStatisticsController:
        """A controller without any past."""
        return RunningStatisticsController(self)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "running_statistics", **_plain(asdict(self))}


@dataclass(frozen=True)
class HillClimbing:
    """Neighbours on the grid of speculation lengths and budgets are tried in turn and kept if they were faster.

    The baseline without a model. It starts at the smallest K and budget (K = 0 is AR, budget 0 is SD; fan-outs are
    uniform), runs `interval` rounds, then as many with a neighbour, and keeps it if its measured tokens per second are
    better by more than a share `margin`; else it goes back, measures itself anew and tries the next neighbour. If
    none is better it rests for `rest` intervals and tries all of them again.

    - `interval`: accepted counts vary by about 60 % of their mean, so that 200 rounds leave an error of 4 %.
    - `margin`: below the error of the comparison, or nothing would ever pass; above 0, or half of all ties would.
    - `rest`: trying costs up to four neighbours in eight intervals; 16 intervals of rest make that a third of the time.
    """

    speculation_lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    fallback: Fallback = Fallback.DRAFT
    on_late_build: LateBuild = LateBuild.WAIT
    interval: int = 200
    margin: float = 0.03
    rest: int = 16

    def __post_init__(self) -> None:
        _check_grid(self)
        _require_number("margin", self.margin, 0)
        _require_count("interval", self.interval, 1)
        _require_count("rest", self.rest, 1)

    @property
    def name(self) -> str:
        return f"hill climbing {_grid_name(self)}"

    def start(self) -> HillClimbingController:
        """A controller without any past."""
        return HillClimbingController(self)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "hill_climbing", **_plain(asdict(self))}


Adaptive = RunningStatistics | HillClimbing


def adaptive_from_dict(data: Mapping[str, Any]) -> Adaptive:
    """Inverse of `to_dict` of a configuration. Raises `BadInput` on an unknown kind or key."""
    given = dict(data)
    kind = given.pop("kind", None)
    classes: dict[str, type[Adaptive]] = {"running_statistics": RunningStatistics, "hill_climbing": HillClimbing}
    if kind not in classes:
        raise BadInput("adaptive.kind", f"must be one of {', '.join(classes)}", kind)
    nested: dict[str, Any] = {"times": ExpectedTimes.from_dict, "after_hit": _curve, "after_miss": _curve}
    try:
        values: dict[str, Any] = {
            k: nested[k](v) if k in nested and isinstance(v, Mapping) else v for k, v in given.items()
        }
        return classes[kind](**values)
    except TypeError as error:
        raise BadInput(f"adaptive policy of kind {kind}", f"has wrong fields ({error})", sorted(given)) from None


def _curve(data: Mapping[str, Any]) -> HitCurve:
    return HitCurve(**data)


def _plain(value: Any) -> Any:
    """JSON-safe: tuples become lists and the words of an enumeration strings."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, str) else value


def _check_grid(config: Adaptive) -> None:
    """The lists sorted and without repeats; fallback and late build as words of their kinds."""
    for name in ("speculation_lengths", "budgets"):
        values = tuple(getattr(config, name))
        if not values:
            raise BadInput(name, "must have at least one entry")
        for value in values:
            _require_count(name, value, 0)
        object.__setattr__(config, name, tuple(sorted(set(values))))
    for name, kinds in (("fallback", Fallback), ("on_late_build", LateBuild)):
        if getattr(config, name) not in list(kinds):
            raise BadInput(name, f"must be one of {', '.join(kinds)}", getattr(config, name))
        object.__setattr__(config, name, kinds(getattr(config, name)))


def _require_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise BadInput(name, f"must be an integer >= {minimum}", value)


def _require_number(name: str, value: object, minimum: float, maximum: float = math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and minimum <= value <= maximum):  # type: ignore[arg-type, operator]
        rule = f"must be a number >= {minimum:g}" + (f" and <= {maximum:g}" if maximum < math.inf else "")
        raise BadInput(name, rule, value)


def _grid_name(config: Adaptive) -> str:
    lengths = "/".join(map(str, config.speculation_lengths))
    budgets = "/".join(map(str, config.budgets))
    return f"K={lengths} B={budgets} {config.fallback.value}"


# ------------------------------------------------------------------------------------------------------------ beliefs


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
        if source is not Source.HIT and policy.drafts_in_the_open:
            seconds += num_drafted * self.times.draft_step.at(rows)
        num_branches = rows * sum(policy.fan_out(source))
        seconds += self._beside(policy, rows * (num_drafted + 1), num_branches, next_hits)
        return Pace(sum(self.survival(policy.proposer(source), num_drafted)), seconds)

    def _pace_of_mixed_rows(self, policy: SpeculativeSpeculative) -> Pace:
        """Rows that hit and rows that missed share a round: every round is taken to have their mean numbers."""
        rows, K, missed = self.num_rows, policy.speculation_length, policy.num_drafted_after_miss
        share = _long_run_share(self.hit_rate(policy, Source.HIT), self.hit_rate(policy, Source.MISS))
        all_hit = share**rows
        seconds = all_hit * self.host_s[HostTerm.HIT] + (1 - all_hit) * self.host_s[HostTerm.MISS]
        if policy.drafts_in_the_open and all_hit < 1:
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


def policy_of(config: Adaptive, speculation_length: int, after_hit: Sequence[int], after_miss: Sequence[int]) -> Policy:
    """AR at K = 0, SD without any branch, else SSD with the configuration's fallback."""
    if speculation_length == 0:
        return Autoregressive()
    if not any(after_hit) and not any(after_miss):
        return Speculative(speculation_length)
    return SpeculativeSpeculative(
        speculation_length, tuple(after_hit), tuple(after_miss), config.fallback, on_late_build=config.on_late_build
    )


def _entries_after_miss(config: Adaptive, speculation_length: int) -> int:
    """Draft tokens verified after a miss; a fan-out list has one entry more."""
    return 0 if config.fallback is Fallback.NONE else speculation_length


# --------------------------------------------------------------------------------------------------------- statistics


class _AcceptanceSeen:
    """Acceptance by draft index, from tests that fade: its level by the short memory, its shape by the long one.

    What has faded leaves its mean behind: where nothing is tested the first index is believed to be as it was last
    known, with the weight of `shrinkage` tests. Every other index shrinks to the one before it times the long memory's
    ratio of the two, so that one never tried is believed to be like the last one tried.
    """

    def __init__(self, config: RunningStatistics, prior: float, *, returns: bool) -> None:
        """`returns`: what is not tested is slowly believed to be like the prior again."""
        self.prior, self.shrinkage = prior, config.shrinkage
        self._kept, self._pull = math.exp(-1 / config.memory), 1 / config.long_memory if returns else 0.0
        self._fading = np.array([[[self._kept]], [[math.exp(-1 / config.long_memory)]]])
        self._counts = np.zeros((2, max(1, *config.speculation_lengths), 2))  # (memory, index, tests | acceptances)
        self._centre = prior

    def fade(self) -> None:
        """One round later; the mean of the first index stays as it was."""
        first = _shrunk(self._counts[0, 0].tolist(), self._centre, self.shrinkage)
        self._centre += (1 - self._kept) * (first - self._centre) + self._pull * (self.prior - self._centre)
        self._counts *= self._fading

    def see(self, num_drafted: int, num_accepted: int) -> None:
        self._counts[:, : min(num_drafted, num_accepted + 1), 0] += 1
        self._counts[:, :num_accepted, 1] += 1

    def by_index(self) -> tuple[float, ...]:
        """Conditional acceptance of each draft token."""
        recent, long = self._counts.tolist()
        shape = [self._centre]
        for counts in long:
            shape.append(_shrunk(counts, shape[-1], self.shrinkage))
        shape[0] = shape[1]
        believed, conditional = self._centre, []
        for index, counts in enumerate(recent):
            expected = believed * shape[index + 1] / shape[index] if shape[index] > 0 else believed
            believed = _shrunk(counts, min(1.0, expected), self.shrinkage)
            conditional.append(believed)
        return tuple(conditional)


def _shrunk(counts: Sequence[float], prior: float, strength: float) -> float:
    num_tested, num_accepted = counts
    return (strength * prior + num_accepted) / (strength + num_tested)


class _MissesSeen:
    """The curve of the miss rate c F^-r after rounds of one source, from look-ups and misses by fan-out that fade.

    The most likely (log c, r) if misses are Poisson with mean look-ups * c F^-r, around a normal centre that counts for
    `shrinkage` misses and leaves r the standard deviation `exponent_spread`. What has faded stays in the centre, which
    slowly returns to the prior: SSD that was given up for its misses is tried again.
    """

    def __init__(self, config: RunningStatistics, prior: HitCurve) -> None:
        self._kept, self._pull = math.exp(-1 / config.memory), 1 / config.long_memory
        self._counts = np.zeros((max(config.budgets) + 1, 2))
        self._prior = np.array([math.log(max(prior.prefactor, NEGLIGIBLE)), prior.exponent])
        self._centre = self._prior
        self._precision = np.diag([config.shrinkage, config.exponent_spread**-2])

    def fade(self, num_rounds: int) -> None:
        """So many rounds later."""
        kept = self._kept**num_rounds
        drift = (1 - kept) * (self._fitted() - self._centre) + num_rounds * self._pull * (self._prior - self._centre)
        self._centre = self._centre + drift
        self._counts *= kept

    def see(self, fan_out: int, *, missed: bool) -> None:
        if 0 < fan_out < len(self._counts):  # without a branch every look-up misses and says nothing about the curve
            self._counts[fan_out] += (1, missed)

    def curve(self) -> HitCurve:
        log_prefactor, exponent = self._fitted().tolist()
        return HitCurve(math.exp(log_prefactor), exponent)

    def _fitted(self) -> FloatArray:
        fan_outs = np.flatnonzero(self._counts[:, 0] > NEGLIGIBLE)
        if not len(fan_outs):
            return self._centre
        lookups, misses = self._counts[fan_outs].T
        features = np.stack([np.ones(len(fan_outs)), -np.log(fan_outs)])  # log miss rate = (log c, r) . features
        parameters = self._centre
        for _ in range(NEWTON_STEPS):
            expected = lookups * np.exp(parameters @ features)
            gradient = features @ (misses - expected) - self._precision @ (parameters - self._centre)
            curvature = (features * expected) @ features.T + self._precision
            step = np.linalg.solve(curvature, gradient)
            if parameters[1] + step[1] < 0:  # more branches never miss more: the best step to r = 0
                step = np.array([(gradient[0] + curvature[0, 1] * parameters[1]) / curvature[0, 0], -parameters[1]])
            parameters = parameters + step.clip(-1, 1)
        return parameters


class _TimeSeen:
    """An affine time: its shape fitted over the long memory, its level by the short one.

    The fit includes the prior, scaled by the ratio of seen to prior, as `time_shrinkage` operations at either end of
    its range. What is not run keeps the time that it was last known to take until that has faded.
    """

    def __init__(self, config: RunningStatistics, prior: AffineTime, ends: tuple[float, float]) -> None:
        self.prior, self.ends, self.strength = prior, ends, config.time_shrinkage
        self._fading = np.exp(-1 / np.array([[config.memory], [config.long_memory]]))
        self._moments = np.zeros((2, 5))  # (memory, sums of 1, n, n^2, t, n t)

    def fade(self) -> None:
        """One round later, whether the operation was run in it or not."""
        self._moments *= self._fading

    def see(self, num_tokens: float, seconds: float) -> None:
        self._moments += (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)

    def fitted(self) -> AffineTime:
        recent, long = self._moments.tolist()
        scaled = self._levelled(self.prior, long)
        return self._levelled(self._fitted(scaled, long), recent)

    def _levelled(self, shape: AffineTime, moments: Sequence[float]) -> AffineTime:
        """The shape times the ratio of what was seen to it."""
        count, n, _, t, _ = moments
        anchor_s = self.strength * shape.at(sum(self.ends) / 2)
        expected_s = anchor_s + shape.base_s * count + shape.per_token_s * n
        ratio = (anchor_s + t) / expected_s if expected_s > 0 else 1.0
        return AffineTime(shape.base_s * ratio, shape.per_token_s * ratio)

    def _fitted(self, scaled: AffineTime, moments: Sequence[float]) -> AffineTime:
        """Least squares; neither coefficient below 0."""
        count, n, nn, t, nt = moments
        for end in self.ends:
            weight, seconds = self.strength, self.strength * scaled.at(end)
            count, n, nn, t, nt = (
                count + weight,
                n + weight * end,
                nn + weight * end**2,
                t + seconds,
                nt + seconds * end,
            )
        slope = min(max(0.0, (count * nt - n * t) / (count * nn - n * n)), t / n)
        return AffineTime(max(0.0, (t - slope * n) / count), slope)


class _MeanSeen:
    """A fading mean, shrunk to a prior."""

    def __init__(self, config: RunningStatistics, prior: float) -> None:
        self._kept = math.exp(-1 / config.memory)
        self._count, self._total = config.shrinkage, config.shrinkage * prior

    def see(self, value: float) -> None:
        self._count, self._total = self._kept * self._count + 1, self._kept * self._total + value

    @property
    def mean(self) -> float:
        return self._total / self._count


class _Rounds:
    """Puts the rows of a round together."""

    def __init__(self) -> None:
        self._rows: list[RoundSeen] = []

    def add(self, seen: RoundSeen) -> list[RoundSeen]:
        """The rows of the round that this row completes, in order; nothing before."""
        if self._rows and self._rows[0].batch_size != seen.batch_size:
            self._rows = []
        self._rows.append(seen)
        if len(self._rows) < seen.batch_size:
            return []
        rows, self._rows = self._rows, []
        return rows


class Statistics:
    """Everything `RunningStatistics` remembers of a run."""

    def __init__(self, config: RunningStatistics) -> None:
        self.config, times = config, config.times
        longest, widest = max(config.speculation_lengths), max(config.budgets)
        fallback = config.fallback_acceptance
        priors = {Proposer.DRAFT_MODEL: config.acceptance, Proposer.NGRAM: fallback, Proposer.FILLER: fallback}
        self.acceptance = {
            proposer: _AcceptanceSeen(config, prior, returns=proposer is not Proposer.DRAFT_MODEL)  # that one is probed
            for proposer, prior in priors.items()
        }
        self.misses = {
            Source.HIT: _MissesSeen(config, config.after_hit),
            Source.MISS: _MissesSeen(config, config.after_miss),
        }
        self.verify = _TimeSeen(config, times.verify, (1, longest + 2))
        self.draft_step = _TimeSeen(config, times.draft_step, (1, 2))
        self.tree_step = _TimeSeen(config, times.tree_step, (1, widest + 2))
        self.host = {term: _MeanSeen(config, times.host_s) for term in HostTerm}
        self.num_rows = _MeanSeen(config, 1.0)
        self._before: list[RoundSeen] = []
        self._num_rounds = 0

    def see(self, rows: list[RoundSeen]) -> None:
        """Take in one round: all its rows, in order."""
        for acceptance in self.acceptance.values():
            acceptance.fade()
        for time in (self.verify, self.draft_step, self.tree_step):
            time.fade()
        for row in rows:
            self._see_acceptance(row)
        followed = self._before if self._follows(rows) else []
        for before, row in zip(followed, rows if followed else [], strict=True):
            self._see_lookup(before, row)
        self._see_times(rows, followed)
        self.num_rows.see(len(rows))
        self._before = rows
        self._num_rounds += 1
        if self._num_rounds % self.config.interval == 0:
            for misses in self.misses.values():
                misses.fade(self.config.interval)

    def _follows(self, rows: list[RoundSeen]) -> bool:
        """Whether these are the rows of the round before, each after a look-up. Where a row has left or joined, nobody
        told which."""
        looked_up = all(row.source not in (Source.SYNCHRONOUS, Source.FIRST) for row in rows)
        prepared = all(isinstance(row.policy, SpeculativeSpeculative) for row in self._before)
        return looked_up and prepared and len(rows) == len(self._before)

    def _see_acceptance(self, row: RoundSeen) -> None:
        drafting = row.policy.drafting(row.source)
        # An n-gram that ends early counts as rejected there: K is what a plan asks of it.
        asked = drafting.num_drafted if drafting.proposer is Proposer.NGRAM else row.num_drafted
        self.acceptance[drafting.proposer].see(asked, row.num_accepted)

    def _see_lookup(self, before: RoundSeen, row: RoundSeen) -> None:
        fan_out = before.policy.fan_out(before.source)
        prepared = fan_out[before.num_accepted] if before.num_accepted < len(fan_out) else 0
        source = Source.HIT if before.source is Source.HIT else Source.MISS
        self.misses[source].see(prepared, missed=row.source is Source.MISS)

    def _see_times(self, rows: list[RoundSeen], before: list[RoundSeen]) -> None:
        first, num_branches = rows[0], sum(_num_branches(row) for row in rows)
        num_tokens = sum(row.num_drafted + 1 for row in rows)
        self.verify.see(num_tokens, first.verify_s / (self.config.times.contention if num_branches else 1.0))
        drafted = [row for row in rows if row.source is not Source.HIT]
        num_steps = max((row.num_drafted for row in drafted), default=0)
        if num_steps and first.draft_s > 0:
            self.draft_step.see(len(drafted), first.draft_s / num_steps)
        if num_branches and first.build_s > 0:
            tree_s = max(0.0, first.build_s - self.config.times.glue.at(num_tokens))
            self.tree_step.see(num_branches, tree_s / max(row.policy.speculation_length for row in rows))
        source = next((row.source for row in rows if row.source is not Source.HIT), Source.HIT)
        explained_s = first.verify_s + first.draft_s + _waited_s(before, source)
        self.host[host_term(first.policy, source)].see(max(0.0, first.round_s - explained_s))

    def beliefs(self) -> Beliefs:
        times = self.config.times
        return Beliefs(
            acceptance={proposer: seen.by_index() for proposer, seen in self.acceptance.items()},
            after_hit=self.misses[Source.HIT].curve(),
            after_miss=self.misses[Source.MISS].curve(),
            times=ExpectedTimes(
                verify=self.verify.fitted(),
                draft_step=self.draft_step.fitted(),
                tree_step=self.tree_step.fitted(),
                glue=times.glue,
                contention=times.contention,
            ),
            host_s={term: seen.mean for term, seen in self.host.items()},
            num_rows=self.num_rows.mean,
        )


def _num_branches(row: RoundSeen) -> int:
    return sum(row.policy.fan_out(row.source)[: row.num_drafted + 1])


def _waited_s(before: list[RoundSeen], source: Source) -> float:
    """How long this round's beginning waited for the build of the round before."""
    if not before:
        return 0.0
    policy = before[0].policy
    abandons = isinstance(policy, SpeculativeSpeculative) and policy.on_late_build is LateBuild.ABANDON
    is_needed = source is Source.HIT or not abandons
    return max(0.0, before[0].build_s - before[0].verify_s) if is_needed else 0.0


# -------------------------------------------------------------------------------------------------------- controllers


class RunningStatisticsController:
    """One run of `RunningStatistics`. `plan` is what it holds for best, `policy` the plan or a probe of one round."""

    def __init__(self, config: RunningStatistics) -> None:
        self.config = config
        self.statistics = Statistics(config)
        self.num_rounds = self.num_switches = self.num_probes = 0
        self._rounds = _Rounds()
        self._switches_left = float(config.switches_at_once)
        self._probing_left_s = self._probe_cost_s = 0.0
        self._probe: Policy | None = None
        beliefs = self.statistics.beliefs()
        self.plan: Policy = max(self._candidates(beliefs), key=lambda policy: beliefs.pace(policy).tokens_per_s)
        self.policy: Policy = self.plan

    def observe(self, seen: RoundSeen) -> None:
        rows = self._rounds.add(seen)
        if not rows:
            return
        self.statistics.see(rows)
        self.num_rounds += 1
        self._switches_left = min(self.config.switches_at_once, self._switches_left + 1 / self.config.rounds_per_switch)
        self._probing_left_s += self.config.exploration * seen.round_s
        if self._probe is not None and seen.policy == self._probe:
            self._probing_left_s -= self._probe_cost_s
            self.policy = self.plan
        if self.num_rounds % self.config.interval == 0:
            beliefs = self.statistics.beliefs()
            self.policy, self._probe = self.plan, None
            self._plan_anew(beliefs)
            self._probe_perhaps(beliefs)

    def _plan_anew(self, beliefs: Beliefs) -> None:
        """Move to the best candidate, if that is worth it and the bound on changes allows it."""
        if self._switches_left < 1:
            return
        rates = [(policy, beliefs.pace(policy).tokens_per_s) for policy in self._candidates(beliefs)]
        best, rate = max(rates, key=lambda entry: entry[1])
        if rate > (1 + self.config.margin) * beliefs.pace(self.plan).tokens_per_s:
            self.plan = self.policy = best
            self.num_switches += 1
            self._switches_left -= 1

    def _probe_perhaps(self, beliefs: Beliefs) -> None:
        """Another length for one round, once the time for it is saved up: what is never tried is never known.

        AR, which learns nothing by itself, pays the time that the probe takes longer; a plan that drafts, and may only
        be wrong about other lengths, pays the whole round. Not more than two probes are saved up, or a long time
        without any would end in a burst of them.
        """
        lengths = self._lengths_to_probe()
        if not lengths or not self.config.exploration:
            return
        probe = self._policy(lengths[self.num_probes % len(lengths)], sum(self.plan.fan_out(Source.HIT)), beliefs)
        cost_s = beliefs.pace(probe).seconds
        if not self.plan.speculation_length:
            cost_s = max(0.0, cost_s - beliefs.pace(self.plan).seconds)
        self._probing_left_s = min(self._probing_left_s, 2 * cost_s)
        if self._probing_left_s >= cost_s:
            self.policy = self._probe = probe
            self._probe_cost_s = cost_s
            self.num_probes += 1

    def _lengths_to_probe(self) -> list[int]:
        """From AR the shortest speculation, which is cheap; else the longest and the shortest in turn, which tell most
        about times by width. SSD stays SSD: AR between two of its rounds would throw a speculation away."""
        lengths = self.config.speculation_lengths
        current = self.plan.speculation_length
        if not current:
            return [K for K in lengths if K][:1]
        shortest = min(K for K in lengths if K or not self._speculates_ahead)
        return [K for K in (lengths[-1], shortest) if current != K]

    @property
    def _speculates_ahead(self) -> bool:
        return isinstance(self.plan, SpeculativeSpeculative)

    def _candidates(self, beliefs: Beliefs) -> Iterator[Policy]:
        """Simple ones first: the first of equal ones is taken."""
        for budget, K in product(self.config.budgets, self.config.speculation_lengths):
            if K or budget == self.config.budgets[0]:
                yield self._policy(K, budget, beliefs)

    def _policy(self, speculation_length: int, budget: int, beliefs: Beliefs) -> Policy:
        """Fan-outs by Theorem 12, for the acceptance that gives the believed chance of K acceptances."""
        K, entries = speculation_length, _entries_after_miss(self.config, speculation_length)
        if not K or not budget:
            return policy_of(self.config, K, (), ())
        acceptance = beliefs.survival(Proposer.DRAFT_MODEL, K)[K] ** (1 / K)
        after_hit = geometric_fan_out(K, budget, acceptance, beliefs.after_hit.exponent)
        after_miss = geometric_fan_out(entries, budget, acceptance, beliefs.after_miss.exponent)
        return policy_of(self.config, K, after_hit, after_miss)


class HillClimbingController:
    """One run of `HillClimbing`."""

    def __init__(self, config: HillClimbing) -> None:
        self.config = config
        self.num_rounds = self.num_switches = 0
        self._rounds = _Rounds()
        self._climb = self._climbing()
        self._place = next(self._climb)
        self._tokens = self._seconds = 0.0

    @property
    def policy(self) -> Policy:
        return self._policies[self._place]

    def observe(self, seen: RoundSeen) -> None:
        rows = self._rounds.add(seen)
        if not rows:
            return
        self._tokens += sum(row.num_accepted + 1 for row in rows)
        self._seconds += seen.round_s
        self.num_rounds += 1
        if self.num_rounds % self.config.interval == 0:
            rate = Pace(self._tokens, self._seconds).tokens_per_s
            self._tokens = self._seconds = 0.0
            before, self._place = self.policy, self._climb.send(rate)
            self.num_switches += before != self.policy

    def _climbing(self) -> Generator[tuple[int, int], float, None]:
        """Yields the place of the next interval on the grid (indices of K and budget), is sent its tokens/s."""
        here = (0, 0)
        while True:
            for place in self._neighbours(here):
                rate_here = yield here
                if (yield place) > (1 + self.config.margin) * rate_here:
                    here = place
                    break
            else:
                for _ in range(self.config.rest):
                    yield here

    def _neighbours(self, here: tuple[int, int]) -> list[tuple[int, int]]:
        """Places next to this one whose policy is another: more first, a longer speculation before a larger budget."""
        K, budget = here
        around = [(K + 1, budget), (K, budget + 1), (K - 1, budget), (K, budget - 1)]
        return [place for place in around if place in self._policies and self._policies[place] != self._policies[here]]

    @cached_property
    def _policies(self) -> dict[tuple[int, int], Policy]:
        config = self.config
        return {
            (i, j): policy_of(
                config, K, uniform_fan_out(K, budget), uniform_fan_out(_entries_after_miss(config, K), budget)
            )
            for (i, K), (j, budget) in product(enumerate(config.speculation_lengths), enumerate(config.budgets))
        }
