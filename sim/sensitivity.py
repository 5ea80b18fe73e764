"""Which measured quantity, if it is wrong, would change what a search recommends, and at what cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sim.latency import Knots, OperationLatency
from sim.policy import Policy
from sim.recursion import expectations
from sim.scaled import scaled_agreement
from sim.search import SearchResult
from sim.simulate import predict
from sim.system import HostTerm, System
from sim.ties import NEGLIGIBLE
from sim.trace import Lane, Operation
from sim.workers import HERE, Workers
from sim.workload import Workload

RELATIVE_ERROR = 0.1
NUM_COMPARED = 100  # first policies of a search, beside the best of each kind and length
NUM_COMPARED_SAMPLED = 8  # of engines that predict policies one by one

Change = Callable[[System, float], System]  # the system with one quantity so many times as large


@dataclass(frozen=True)
class WhatIf:
    """A quantity so many times as large as measured: tokens/s of the policy recommended as measured, and the best."""

    quantity: str
    factor: float
    tokens_per_s: float
    best: Policy
    best_tokens_per_s: float
    loss: float  # share of the objective that the recommended policy then leaves to the best
    changes: bool  # whether another policy is then the best than is as measured

    def to_dict(self) -> dict[str, Any]:
        return {
            "quantity": self.quantity,
            "factor": self.factor,
            "tokens_per_s": self.tokens_per_s,
            "best": self.best.name,
            "best_tokens_per_s": self.best_tokens_per_s,
            "loss": self.loss,
            "changes": self.changes,
        }


@dataclass(frozen=True)
class Sensitivity:
    """What-ifs of every quantity, the costliest first; `tokens_per_s` and `loss_as_measured` are what the recommended
    policy, the simplest of the best, makes as measured, and what it leaves anyway."""

    recommended: Policy
    num_policies: int
    tokens_per_s: float
    loss_as_measured: float
    rows: tuple[WhatIf, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "recommended": self.recommended.name,
            "num_policies": self.num_policies,
            "tokens_per_s": self.tokens_per_s,
            "loss_as_measured": self.loss_as_measured,
            "rows": [row.to_dict() for row in self.rows],
        }


def sensitivity(
    found: SearchResult,
    workload: Workload,
    system: System,
    *,
    engine: str = "exact",
    seed: int = 0,
    relative_error: float = RELATIVE_ERROR,
    workers: Workers = HERE,
) -> Sensitivity:
    """Predict the best policies of a search again with every quantity too large and too small by `relative_error`, one
    at a time: locations of operations, slow-downs beside the other lane (1 at least), host times, acceptance, hit
    rates. Sampled engines run under one seed."""
    policies = _compared(found, NUM_COMPARED if engine == "exact" else NUM_COMPARED_SAMPLED)
    weights = [found.objective.weight(policy, system, workload.batch_size) for policy in policies]
    cases = [("as measured", 1.0)] + [
        (name, factor) for name in quantities(system) for factor in (1 - relative_error, 1 + relative_error)
    ]
    rates = workers.map(partial(_rates, policies, workload, system, engine, seed), cases)
    merits = [[rate * weight for rate, weight in zip(row, weights, strict=True)] for row in rates]
    own = policies.index(found.recommended.policy)
    as_measured = merits[0].index(max(merits[0]))
    rows = []
    for (name, factor), rate, merit in list(zip(cases, rates, merits, strict=True))[1:]:
        best = merit.index(max(merit))
        loss = 1 - merit[own] / merit[best]
        changes = best != as_measured and merit[as_measured] < (1 - NEGLIGIBLE) * merit[best]
        rows.append(WhatIf(name, factor, rate[own], policies[best], rate[best], loss, changes))
    rows.sort(key=lambda row: -row.loss)
    loss = 1 - merits[0][own] / merits[0][as_measured]
    return Sensitivity(policies[own], len(policies), rates[0][own], loss, tuple(rows))


def _compared(found: SearchResult, num_first: int) -> list[Policy]:
    chosen = [*found.best_of_each_length(), *found.ranked[:num_first]]
    return list(dict.fromkeys(prediction.policy for prediction in chosen))


def quantities(system: System) -> dict[str, Change]:
    """Every measured quantity of a system that a decoding rate can depend on, by name."""
    found: dict[str, Change] = {}
    for lane, operation in system.latency.operations:
        if operation is not Operation.PREFILL:
            found[f"latency.{lane}.{operation}"] = partial(_scale_latency, lane, operation)
    if system.overlaps:
        found |= {f"contention.{lane}": partial(_scale_contention, lane) for lane in Lane}
    found |= {f"host_s.{term}": partial(_scale_host, term) for term in HostTerm if system.host_s[term]}
    found["acceptance"] = lambda system, factor: replace(
        system, agreement=scaled_agreement(system.agreement, acceptance=factor)
    )
    found["hit rate"] = lambda system, factor: replace(
        system, agreement=scaled_agreement(system.agreement, hits=factor)
    )
    return found


def _scale_latency(lane: Lane, operation: Operation, system: System, factor: float) -> System:
    table = system.latency.operations[lane, operation]
    batched = {rows: _scaled(of_rows, factor) for rows, of_rows in table.batched.items()}
    scaled: OperationLatency = replace(table, knots=_scaled(table.knots, factor), batched=batched)
    return replace(
        system, latency=replace(system.latency, operations={**system.latency.operations, (lane, operation): scaled})
    )


def _scaled(table: Any, factor: float) -> dict[int, Knots]:
    return {width: tuple((context, factor * s) for context, s in knots) for width, knots in table.items()}


def _scale_contention(lane: Lane, system: System, factor: float) -> System:
    slowdown = max(1.0, factor * system.contention[lane])
    return replace(system, contention={**system.contention, lane: slowdown})


def _scale_host(term: HostTerm, system: System, factor: float) -> System:
    return replace(system, host_s={**system.host_s, term: factor * system.host_s[term]})


def _rates(
    policies: list[Policy], workload: Workload, system: System, engine: str, seed: int, case: tuple[str, float]
) -> list[float]:
    name, factor = case
    changed = quantities(system)[name](system, factor) if factor != 1 else system
    if engine != "exact":
        return [predict(p, workload, changed, engine=engine, seed=seed).tokens_per_s.value for p in policies]
    return [float(e.num_tokens.sum() / e.seconds.sum()) for e in expectations(policies, workload, changed)]
