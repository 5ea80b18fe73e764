"""The controller that plans by closed forms under fading statistics of its run.

Bounds that hold whatever is observed, over n rounds: it changes its plan at most `switches_at_once` + n /
`rounds_per_switch` times (58 times in 10,000 rounds with the defaults), at most once every `interval` rounds, and never
for a predicted gain up to `margin`. Beside that it probes other lengths, a round at a time (more where an engine tells
of rounds later): at most once every `interval` rounds, for a share `exploration` of the time as predicted; under AR
that is the time that probes take longer than its own rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from sim.beliefs import Beliefs, ExpectedTimes
from sim.decider import RoundSeen, RowsOfRounds
from sim.errors import BadInput, require_count, require_number
from sim.fading import Statistics
from sim.parametric import HitCurve
from sim.policy import Fallback, LateBuild, Policy, Proposer, SpeculativeSpeculative, geometric_fan_out
from sim.policy_grid import check_grid, grid_name, json_safe, num_drafted_after_miss, policy_of
from sim.trace import Source

_LEAST = {
    "margin": 0.0,
    "memory": 1.0,
    "long_memory": 1.0,
    "rounds_per_switch": 1.0,
    "shrinkage": 1e-3,
    "time_shrinkage": 1e-3,
    "exponent_spread": 1e-3,
}


@dataclass(frozen=True)
class RunningStatistics:
    """Every `interval` rounds the policy of the largest predicted throughput under fading statistics of the run.

    Candidates are all pairs of a speculation length and a budget (the sum of a fan-out list): K = 0 is AR, a budget of
    0 is SD, the others are SSD with Theorem 12's fan-out for the acceptance and the exponents now believed.
    Throughputs are closed forms over the Markov chain of hits and misses of long texts (`Beliefs.pace`).

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
    - `most_candidates`: the largest entry of a fan-out list; lists are cut to it. None sets no limit.
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
    most_candidates: int | None = None

    def __post_init__(self) -> None:
        check_grid(self)
        for name, kind in (("times", ExpectedTimes), ("after_hit", HitCurve), ("after_miss", HitCurve)):
            if not isinstance(getattr(self, name), kind):
                raise BadInput(name, f"must be a {kind.__name__}", getattr(self, name))
        for name in ("acceptance", "fallback_acceptance", "exploration"):
            object.__setattr__(self, name, require_number(name, getattr(self, name), 0, 1))
        for name, least in _LEAST.items():
            object.__setattr__(self, name, require_number(name, getattr(self, name), least))
        for name in ("interval", "switches_at_once"):
            object.__setattr__(self, name, require_count(name, getattr(self, name), 1))

    @property
    def name(self) -> str:
        return f"running statistics {grid_name(self)}"

    def start(self) -> RunningStatisticsController:
        """A controller without any past."""
        return RunningStatisticsController(self)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "running_statistics", **json_safe(asdict(self))}


class RunningStatisticsController:
    """One run of `RunningStatistics`. `plan` is what it holds for best, `policy` the plan or a probe of one round."""

    def __init__(self, config: RunningStatistics) -> None:
        self.config = config
        self.statistics = Statistics(config)
        self.num_rounds = self.num_switches = self.num_probes = 0
        self._rounds = RowsOfRounds()
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
        branches = sum(self.plan.fan_out(Source.HIT))  # below its budget where the list was cut
        budget = next(budget for budget in self.config.budgets if budget >= branches) if branches else 0
        probe = self._policy(lengths[self.num_probes % len(lengths)], budget, beliefs)
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
        K, missed = speculation_length, num_drafted_after_miss(self.config, speculation_length)
        if not K or not budget:
            return policy_of(self.config, K, (), ())
        acceptance = beliefs.survival(Proposer.DRAFT_MODEL, K)[K] ** (1 / K)
        after_hit = geometric_fan_out(K, budget, acceptance, beliefs.after_hit.exponent)
        after_miss = geometric_fan_out(missed, budget, acceptance, beliefs.after_miss.exponent)
        return policy_of(self.config, K, after_hit, after_miss)
