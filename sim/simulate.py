"""One entry to the simulator: predict the figures of a policy, or simulate its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.errors import BadInput
from sim.metrics import (
    Estimate,
    hit_rate,
    hit_rate_by_source,
    mean_acceptance_length,
    ratio_of_rates,
    ratio_of_totals,
    tokens_per_s,
)
from sim.policy import Policy
from sim.recursion import Expectation, expectations
from sim.streams import replication_seeds
from sim.system import System
from sim.trace import Trace
from sim.workload import Workload

ENGINES = ("exact", "vectorized", "des")


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of one policy; intervals are bootstraps over the prompts of the agreement record."""

    policy: Policy
    engine: str
    tokens_per_s: Estimate
    mean_acceptance_length: Estimate | None
    hit_rate: Estimate | None
    hit_rate_by_source: dict[str, Estimate | None]
    expectation: Expectation | None = None

    def to_dict(self) -> dict[str, Any]:
        def plain(estimate: Estimate | None) -> dict[str, Any] | None:
            return None if estimate is None else estimate.to_dict()

        return {
            "name": self.policy.name,
            "policy": self.policy.to_dict(),
            "engine": self.engine,
            "tokens_per_s": plain(self.tokens_per_s),
            "mean_acceptance_length": plain(self.mean_acceptance_length),
            "hit_rate": plain(self.hit_rate),
            "hit_rate_by_source": {source: plain(rate) for source, rate in self.hit_rate_by_source.items()},
        }


def simulate(policy: Policy, workload: Workload, system: System, seed: int = 0) -> Trace:
    """A trace of the policy over the prompts of the system's agreement record (SimPy)."""
    from sim.timeline import replicate

    return replicate(policy, workload, system, [seed])[0]


def predict(
    policy: Policy, workload: Workload, system: System, *, engine: str = "exact", seed: int = 0, replications: int = 8
) -> Prediction:
    """Figures of one policy: `exact` by recursion; the others by `replications` runs over all prompts, `vectorized` in
    NumPy, `des` in SimPy."""
    if engine not in ENGINES:
        raise BadInput("engine", f"must be one of {', '.join(ENGINES)}", engine)
    if engine == "exact":
        return predict_all([policy], workload, system)[0]
    seeds = replication_seeds(seed, replications)
    if engine == "vectorized":
        from sim import vectorized

        return _from_expectation(policy, vectorized.replicate(policy, workload, system, seeds), engine)
    from sim.timeline import replicate

    traces = replicate(policy, workload, system, seeds)
    return Prediction(
        policy,
        engine,
        tokens_per_s(traces),
        mean_acceptance_length(traces),
        hit_rate(traces),
        hit_rate_by_source(traces),
    )


def predict_all(policies: Sequence[Policy], workload: Workload, system: System) -> list[Prediction]:
    """Exact predictions of many policies at once."""
    return [
        _from_expectation(policy, expectation, "exact")
        for policy, expectation in zip(policies, expectations(policies, workload, system), strict=True)
    ]


def predicted_speedup(fast: Prediction, slow: Prediction) -> Estimate:
    """Tokens/s of one exact prediction over that of another, over the same prompts."""
    if fast.expectation is None or slow.expectation is None:
        raise BadInput("predicted_speedup", "needs two predictions of the exact engine", (fast.engine, slow.engine))
    pairs = [(e.num_tokens, e.seconds) for e in (fast.expectation, slow.expectation)]
    return ratio_of_rates(pairs[0], pairs[1])


@dataclass(frozen=True)
class CrossCheck:
    """The two engines on one policy. `z` is their difference in tokens/s over the standard error of the SimPy mean."""

    policy: Policy
    exact_tokens_per_s: float
    des_tokens_per_s: float
    standard_error: float

    @property
    def z(self) -> float:
        return (self.des_tokens_per_s - self.exact_tokens_per_s) / max(self.standard_error, 1e-12)

    @property
    def relative_difference(self) -> float:
        return self.des_tokens_per_s / self.exact_tokens_per_s - 1


def cross_check(
    policy: Policy, workload: Workload, system: System, *, seed: int = 0, replications: int = 8
) -> CrossCheck:
    """Compare the exact expectation with the mean of independent SimPy runs (ratio of totals, delta-method error)."""
    from sim.timeline import replicate

    exact = predict(policy, workload, system).tokens_per_s.value
    traces = replicate(policy, workload, system, replication_seeds(seed, replications))
    seconds = np.array([sum(s.decode_s for s in trace.sequences) for trace in traces])
    tokens = sum(s.num_decoded for s in traces[0].sequences)
    mean_s = seconds.mean()
    error = tokens / mean_s**2 * seconds.std(ddof=1) / np.sqrt(replications)
    return CrossCheck(policy, exact, float(tokens / mean_s), float(error))


def _from_expectation(policy: Policy, e: Expectation, engine: str) -> Prediction:
    rate = ratio_of_totals(e.num_tokens, e.seconds) or Estimate(0.0, 0.0, 0.0, len(e.num_tokens))
    return Prediction(
        policy=policy,
        engine=engine,
        tokens_per_s=rate,
        mean_acceptance_length=ratio_of_totals(e.num_tokens, e.num_rounds),
        hit_rate=ratio_of_totals(e.num_hits.sum(0), e.num_lookups.sum(0)),
        hit_rate_by_source={
            name: ratio_of_totals(e.num_hits[side], e.num_lookups[side])
            for side, name in enumerate(("after_hit", "after_miss"))
        },
        expectation=e,
    )
