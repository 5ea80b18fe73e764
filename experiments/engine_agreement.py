"""Do the three engines agree? One table over every kind of fixed policy: `saguaro bench engines`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.benchmark import benchmark_record, benchmark_system
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.parametric import HitCurve, ParametricAgreement
from sim.placement import Placement
from sim.policy import (
    Autoregressive,
    Fallback,
    LateBuild,
    Policy,
    Speculative,
    SpeculativeSpeculative,
    geometric_fan_out,
    uniform_fan_out,
)
from sim.simulate import Prediction, predict
from sim.system import System
from sim.workload import Workload

NUM_PROMPTS, LENGTH = 8, 96
TREE_STEP_S = 8e-4  # builds end before or after the verification, as chance has it
RELATIVE_HALF_WIDTH = 0.004
CEILING = 1024
ALARM = 6.5  # standard errors of at least 16 runs: p = 1e-5 of Student's t, 1e-3 over a hundred comparisons


@dataclass(frozen=True)
class Case:
    """A policy at a batch size; `exact` is None where the exact engine refuses, `refusal` then says why.

    The other engines give tokens/s and the half width of the 95 % interval of independent runs; `z` is the largest
    difference of two engines over its standard error. `must_refuse` says whether the case is outside the exact engine's
    reach, as it is for a batch over a record.
    """

    policy: str
    batch_size: int
    system: str
    exact: float | None
    refusal: str
    must_refuse: bool
    vectorized: float
    vectorized_half_width: float
    des: float
    des_half_width: float
    z: float

    @property
    def agrees(self) -> bool:
        return abs(self.z) < ALARM and self.must_refuse == (self.exact is None)


def compare_engines(progress: Callable[[str], None], *, relative_half_width: float = RELATIVE_HALF_WIDTH) -> list[Case]:
    """Every kind of policy over a record at batch 1 and 3, over summary numbers, and over devices apart."""
    record = replace(benchmark_system(tree_step_s=TREE_STEP_S), agreement=benchmark_record(NUM_PROMPTS, LENGTH))
    far = Placement(transfer_latency_s=2e-4, transfer_bytes_per_s=1e9, distribution_bytes=256)
    apart, two = (replace(record, placement=placement) for placement in (far, Placement(num_draft_devices=2)))
    numbers = replace(record, agreement=_summary_numbers())
    cases = []
    for name, system, batch_size, policies in (
        ("record", record, 1, _policies()),
        ("record", record, 3, _policies()[::2]),
        ("devices apart", apart, 1, _policies()[1::3]),
        ("two draft devices", two, 1, [p for p in _policies() if _builds_in_full(p)][::2]),
        ("summary numbers", numbers, 1, [p for p in _policies() if _needs_no_texts(p)]),
    ):
        agreement = system.agreement
        prompts = ((0,),) * agreement.num_prompts
        workload = Workload("engines", prompts, LENGTH, agreement.temperature, batch_size=batch_size)
        for policy in policies:
            progress(f"{name}, batch {batch_size}: {policy.name}")
            cases.append(_case(name, policy, workload, system, relative_half_width))
    return cases


def _case(name: str, policy: Policy, workload: Workload, system: System, relative_half_width: float) -> Case:
    exact: Prediction[Policy] | None = None
    refusal = ""
    try:
        exact = predict(policy, workload, system)
    except BadInput as error:
        refusal = str(error)
    vectorized, des = (
        predict(
            policy, workload, system, engine=engine, seed=seed, relative_half_width=relative_half_width, ceiling=CEILING
        )
        for seed, engine in enumerate(("vectorized", "des"), start=1)
    )
    assert vectorized.replications is not None and des.replications is not None
    runs = (vectorized.replications, des.replications)
    known = [(p.tokens_per_s.value, run.standard_error) for p, run in zip((vectorized, des), runs, strict=True)]
    if exact is not None:
        known.append((exact.tokens_per_s.value, 0.0))
    return Case(
        policy=policy.name,
        batch_size=workload.batch_size,
        system=name,
        exact=None if exact is None else exact.tokens_per_s.value,
        refusal=refusal,
        must_refuse=workload.batch_size > 1 and isinstance(system.agreement, AgreementRecord),
        vectorized=known[0][0],
        vectorized_half_width=runs[0].half_width,
        des=known[1][0],
        des_half_width=runs[1].half_width,
        z=max((_z(a, b) for i, a in enumerate(known) for b in known[i + 1 :]), key=abs),
    )


def _z(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Difference over its standard error; rounding is no difference."""
    difference = first[0] - second[0]
    if abs(difference) < 1e-9 * first[0]:
        return 0.0
    error = math.hypot(first[1], second[1])
    return difference / max(error, 1e-12 * first[0])


def _policies() -> list[Policy]:
    uniform, geometric = uniform_fan_out(4, 15), geometric_fan_out(4, 12, 0.7, 0.5)
    policies: list[Policy] = [Autoregressive(), Speculative(2), Speculative(5)]
    for fallback in Fallback:
        after_miss = (6,) if fallback is Fallback.NONE else geometric
        for late in LateBuild:
            policies.append(SpeculativeSpeculative(4, uniform, after_miss, fallback, 1.0, late))
    policies.append(SpeculativeSpeculative(4, uniform, geometric, Fallback.DRAFT, 0.4))
    policies.append(SpeculativeSpeculative(4, uniform, geometric, Fallback.DRAFT_MISSING, 0.4, LateBuild.ABANDON))
    return policies


def _builds_in_full(policy: Policy) -> bool:
    """Abandoning on several devices is outside the exact engine's reach."""
    return isinstance(policy, SpeculativeSpeculative) and policy.on_late_build is LateBuild.WAIT


def _needs_no_texts(policy: Policy) -> bool:
    if not isinstance(policy, SpeculativeSpeculative):
        return True
    return policy.downweight == 1 and policy.fallback not in (Fallback.NGRAM, Fallback.FILLER)


def _summary_numbers() -> ParametricAgreement:
    return ParametricAgreement(
        prompt_tokens=64,
        new_tokens=LENGTH,
        acceptance=(0.8, 0.75, 0.7),
        after_hit=(HitCurve(0.4, 0.5), HitCurve(0.45, 0.5)),
        after_miss=(HitCurve(0.7, 0.5),),
        sampling_temperature=1.0,
        num_texts=NUM_PROMPTS,
    )


def to_json(cases: list[Case]) -> list[dict[str, Any]]:
    """One row per case."""
    return [asdict(case) | {"agrees": case.agrees} for case in cases]
