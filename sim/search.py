"""Policy search: build the candidates of a space from the agreement record, screen them all by the exact recursion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.policy import (
    Autoregressive,
    Fallback,
    Policy,
    Speculative,
    SpeculativeSpeculative,
    exact_fan_out,
    geometric_fan_out,
    uniform_fan_out,
)
from sim.recursion import outcome_hit_mass
from sim.simulate import Prediction, predict_all
from sim.system import System
from sim.workload import Workload

FAN_OUT_RULES = ("uniform", "geometric", "exact")
KINDS: dict[str, type] = {"ar": Autoregressive, "sd": Speculative, "ssd": SpeculativeSpeculative}


@dataclass(frozen=True)
class SearchSpace:
    """Every combination is a candidate; AR, and SD at every K, are added. A budget is the sum of a fan-out list."""

    speculation_lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    fan_out_rules: tuple[str, ...] = FAN_OUT_RULES
    fallbacks: tuple[Fallback, ...] = tuple(Fallback)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.fan_out_rules) - set(FAN_OUT_RULES))
        if unknown:
            raise BadInput("fan_out_rules", f"must be among {', '.join(FAN_OUT_RULES)}", unknown[0])


@dataclass(frozen=True)
class SearchResult:
    """All predictions, fastest first; equal ones keep the order AR, SD, SSD by K and budget."""

    ranked: list[Prediction]

    @property
    def num_policies(self) -> int:
        return len(self.ranked)

    @property
    def recommended(self) -> Prediction:
        return self.ranked[0]

    def best(self, kind: str) -> Prediction:
        """Fastest prediction of a kind: `ar`, `sd` or `ssd`."""
        return next(p for p in self.ranked if isinstance(p.policy, KINDS[kind]))


def search(space: SearchSpace, workload: Workload, system: System) -> SearchResult:
    """Predict every candidate of the space exactly and rank by tokens/s."""
    predictions = predict_all(candidates(space, system.agreement), workload, system)
    return SearchResult(sorted(predictions, key=lambda p: -p.tokens_per_s.value))


def candidates(space: SearchSpace, record: AgreementRecord) -> list[Policy]:
    """Distinct policies of the space: AR, SD by K, then SSD by K and budget."""
    policies: list[Policy] = [Autoregressive(), *(Speculative(K) for K in sorted(space.speculation_lengths) if K > 0)]
    for K in sorted(space.speculation_lengths):
        if K > 0:
            policies.extend(_ssd_candidates(space, record, K))
    return list(dict.fromkeys(policies))


def _ssd_candidates(space: SearchSpace, record: AgreementRecord, K: int) -> Iterator[SpeculativeSpeculative]:
    widest = min(record.num_candidates, max(space.budgets))
    hit_mass = outcome_hit_mass(record, K, widest)
    acceptance, exponent = mean_acceptance(record), miss_exponent(record)
    for budget in sorted(space.budgets):
        for rule in space.fan_out_rules:
            if rule == "uniform":
                fan_out = uniform_fan_out(K, budget)
            elif rule == "geometric":
                fan_out = geometric_fan_out(K, budget, acceptance, exponent)
            else:
                fan_out = exact_fan_out(hit_mass.tolist(), budget)
            fan_out = tuple(min(entry, record.num_candidates) for entry in fan_out)
            for fallback in space.fallbacks:
                after_miss = fan_out if fallback is Fallback.DRAFT else (min(budget, record.num_candidates),)
                yield SpeculativeSpeculative(K, fan_out, after_miss, fallback)


def mean_acceptance(record: AgreementRecord) -> float:
    """Mean acceptance over all positions that rounds can test (all but the first of each prompt)."""
    return float(record.acceptance[record.position > 0].mean())


def miss_exponent(record: AgreementRecord) -> float:
    """r of the best line through log miss(F) = log c - r log F over F = 1, 2, 4, ... <= M; the miss rate is that of a
    bonus token drawn from p against the top F of q. At least .01, so that Theorem 12 keeps its meaning."""
    tested = record.position > 0
    fan_outs = 2 ** np.arange(int(np.log2(record.num_candidates)) + 1)
    misses = np.array([(record.rank[tested] >= fan_out).mean() for fan_out in fan_outs])
    seen = misses > 0
    if seen.sum() < 2:
        return 1.0
    slope = np.polyfit(np.log(fan_outs[seen]), np.log(misses[seen]), 1)[0]
    return max(0.01, float(-slope))
