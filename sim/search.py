"""Policy search: candidates of a space from the agreement record, without those that do not fit, ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.policy import (
    Autoregressive,
    Drafting,
    Fallback,
    LateBuild,
    Policy,
    Proposer,
    Speculative,
    SpeculativeSpeculative,
    exact_fan_out,
    geometric_fan_out,
    uniform_fan_out,
)
from sim.recursion import outcome_hit_mass
from sim.replay import SOURCES
from sim.simulate import Prediction, predict, predict_all
from sim.system import System
from sim.trace import Source
from sim.workload import Workload

WIDEST_FITTED = 128  # fan-outs beyond it do not enter the fitted exponent
FAN_OUT_RULES = ("uniform", "geometric", "exact")
FIRST_DRAFT = Drafting(Proposer.DRAFT_MODEL, 1, (), Source.HIT)
COMPLETE = Drafting(Proposer.DRAFT_MODEL, 0, (), Source.HIT)
KINDS: dict[str, type] = {"ar": Autoregressive, "sd": Speculative, "ssd": SpeculativeSpeculative}


@dataclass(frozen=True)
class SearchSpace:
    """Every combination is a candidate; AR, and SD at every K, are added. A budget is the sum of a fan-out list."""

    speculation_lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    fan_out_rules: tuple[str, ...] = FAN_OUT_RULES
    fallbacks: tuple[Fallback, ...] = (Fallback.DRAFT, Fallback.NONE)
    downweights: tuple[float, ...] = (1.0,)
    late_builds: tuple[LateBuild, ...] = (LateBuild.WAIT,)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.fan_out_rules) - set(FAN_OUT_RULES))
        if unknown:
            raise BadInput("fan_out_rules", f"must be among {', '.join(FAN_OUT_RULES)}", unknown[0])


@dataclass(frozen=True)
class SearchResult:
    """All predictions, fastest first; equal ones keep the order AR, SD, SSD by K and budget. `infeasible` are those
    that the devices have no room for, each with its reason."""

    ranked: list[Prediction[Policy]]
    infeasible: list[tuple[Policy, str]] = field(default_factory=list)

    @property
    def num_policies(self) -> int:
        return len(self.ranked) + len(self.infeasible)

    @property
    def recommended(self) -> Prediction[Policy]:
        return self.ranked[0]

    def best_of_each_length(self) -> list[Prediction[Policy]]:
        """The fastest of each kind and speculation length, fastest first."""
        first: dict[tuple[type, int], Prediction[Policy]] = {}
        for prediction in self.ranked:
            first.setdefault((type(prediction.policy), prediction.policy.speculation_length), prediction)
        return list(first.values())

    def best(self, kind: str) -> Prediction[Policy]:
        """Fastest prediction of a kind: `ar`, `sd` or `ssd`."""
        return next(p for p in self.ranked if isinstance(p.policy, KINDS[kind]))


def search(
    space: SearchSpace, workload: Workload, system: System, *, engine: str = "exact", seed: int = 0
) -> SearchResult:
    """Predict every candidate of the space that fits, and rank by tokens/s; by the exact engine unless told otherwise.

    Raises `BadInput` where not even AR fits the devices.
    """
    feasible, infeasible = _by_feasibility(candidates(space, system.agreement), workload, system)
    if not feasible:
        raise BadInput("memory", f"no policy fits; {infeasible[0][0].name}", infeasible[0][1])
    if engine == "exact":
        predictions = predict_all(feasible, workload, system)
    else:
        predictions = [predict(policy, workload, system, engine=engine, seed=seed) for policy in feasible]
    fastest = max(p.tokens_per_s.value for p in predictions)
    # Rates that differ by rounding are equal; the order of the candidates, simplest first, then decides.
    ranked = sorted(predictions, key=lambda p: -round(p.tokens_per_s.value / max(fastest, 1e-300), 9))
    return SearchResult(ranked, infeasible)


def _by_feasibility(
    policies: list[Policy], workload: Workload, system: System
) -> tuple[list[Policy], list[tuple[Policy, str]]]:
    longest = int(system.agreement.prompt_length.max()) + workload.max_new_tokens
    feasible, infeasible = [], []
    for policy in policies:
        reason = system.memory.why_infeasible(
            policy, workload.batch_size, longest, system.placement, sampled=workload.temperature > 0
        )
        if reason is None:
            feasible.append(policy)
        else:
            infeasible.append((policy, reason))
    return feasible, infeasible


def candidates(space: SearchSpace, agreement: Agreement) -> list[Policy]:
    """Distinct policies of the space: AR, SD by K, then SSD by K and budget."""
    policies: list[Policy] = [Autoregressive(), *(Speculative(K) for K in sorted(space.speculation_lengths) if K > 0)]
    acceptance, exponent = mean_acceptance(agreement), miss_exponent(agreement)
    for K in sorted(space.speculation_lengths):
        if K > 0:
            policies.extend(_ssd_candidates(space, agreement, K, acceptance, exponent))
    return list(dict.fromkeys(policies))


def _ssd_candidates(
    space: SearchSpace, agreement: Agreement, K: int, acceptance: float, exponent: float
) -> Iterator[SpeculativeSpeculative]:
    most = agreement.num_candidates
    widest = min(most, max(space.budgets))
    hit_mass = {source: outcome_hit_mass(agreement, K, widest, source).tolist() for source in SOURCES}
    for budget in sorted(space.budgets):
        for rule in space.fan_out_rules:
            if rule == "uniform":
                lists = [uniform_fan_out(K, budget)] * 2
            elif rule == "geometric":
                lists = [geometric_fan_out(K, budget, acceptance, exponent)] * 2
            else:
                lists = [exact_fan_out(hit_mass[source], budget) for source in SOURCES]
            for fallback, downweight, late in product(space.fallbacks, space.downweights, space.late_builds):
                limit = most - (downweight != 1)  # down-weighting looks at one candidate more
                after_hit, after_miss = (tuple(min(entry, limit) for entry in fan_out) for fan_out in lists)
                miss_list = (min(budget, limit),) if fallback is Fallback.NONE else after_miss
                yield SpeculativeSpeculative(K, after_hit, miss_list, fallback, downweight, late)


def mean_acceptance(agreement: Agreement) -> float:
    """Mean acceptance of a first draft token over all positions that rounds can test."""
    return float(agreement.acceptance_table(0, FIRST_DRAFT)[_testable(agreement)].mean())


def miss_exponent(agreement: Agreement) -> float:
    """r of the best line through log miss(F) = log c - r log F over F = 1, 2, 4, ...; the misses are those of a bonus
    token drawn from p after full acceptance. At least .01, so that Theorem 12 keeps its meaning."""
    testable = _testable(agreement)
    fan_outs = 2 ** np.arange(int(np.log2(min(agreement.num_candidates, WIDEST_FITTED))) + 1)
    misses = np.array([1 - agreement.hit_table(int(f), 0, COMPLETE, rejected=False)[testable].mean() for f in fan_outs])
    seen = misses > 1e-12
    if seen.sum() < 2:
        return 1.0
    slope = np.polyfit(np.log(fan_outs[seen]), np.log(misses[seen]), 1)[0]
    return max(0.01, float(-slope))


def _testable(agreement: Agreement) -> NDArray[np.bool_]:
    """(num_prompts, longest) positions inside the texts but the first, which the prefill emits."""
    position = np.arange(int(agreement.lengths.max(initial=0)))
    return (position > 0) & (position < agreement.lengths[:, None])
