"""Rounds that happened take what the system that played them says, whatever they did."""

from dataclasses import replace

import numpy as np
import pytest

from calibration.replayed_times import replayed_seconds
from sim.errors import BadInput
from sim.metrics import decoding_s
from sim.policy import Autoregressive, Fallback, LateBuild, Policy, Speculative, SpeculativeSpeculative
from sim.simulate import simulate
from sim.system import System
from sim.trace import Lane, Trace
from tests.experiments.fake_bench import greedy_record
from tests.sim.strategies import batched
from tests.sim.toy import system_of, workload_of

RECORD = greedy_record(num_prompts=12, length=40, prompt_length=16, seed=1)


def ssd(fallback: Fallback, late: LateBuild = LateBuild.WAIT) -> SpeculativeSpeculative:
    after_miss = (2,) if fallback is Fallback.NONE else (2,) * 4
    return SpeculativeSpeculative(3, (2,) * 4, after_miss, fallback, on_late_build=late)


POLICIES = [
    Autoregressive(),
    Speculative(3),
    ssd(Fallback.DRAFT),
    ssd(Fallback.DRAFT_MISSING),
    ssd(Fallback.NONE),
    ssd(Fallback.DRAFT, LateBuild.ABANDON),
]
by_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)


def system(*residuals: float, overlaps: bool = True) -> System:
    times = {"verify_s": 0.009, "draft_step_s": 0.002, "glue_s": 0.002, "tree_step_s": 0.0025, "host_s": 0.0004}
    found = system_of(RECORD, verify_per_token_s=0.0003, contention=1.2, residuals=residuals, **times)
    return replace(batched(found, 0.0005), overlaps=overlaps)


def played(policy: Policy, by: System, *, batch_size: int = 1, seed: int = 0) -> Trace:
    return simulate(policy, replace(workload_of(RECORD), batch_size=batch_size), by, seed)


def replayed_s(trace: Trace, policy: Policy, by: System) -> float:
    return sum(replayed_seconds(trace, policy, by).values())


def measured_s(trace: Trace) -> float:
    return sum(decoding_s(trace).values())


@pytest.mark.parametrize("batch_size", [1, 3])
@by_policy
def test_without_noise_every_batch_is_timed_as_it_was_played(policy: Policy, batch_size: int) -> None:
    trace = played(policy, system(1.0), batch_size=batch_size)
    replayed = replayed_seconds(trace, policy, system(1.0))
    assert list(replayed) == list(range(12 // batch_size))
    assert list(replayed.values()) == pytest.approx(list(decoding_s(trace).values()), rel=1e-6)


@pytest.mark.parametrize("overlaps", [True, False])
@by_policy
def test_with_noise_the_expectation_is_what_runs_take_on_the_mean(policy: Policy, overlaps: bool) -> None:
    """Eight runs of 12 prompts, a thousand rounds or more, know their mean to .4 % or better: three of that are
    allowed."""
    noisy = system(0.7, 1.0, 1.3, overlaps=overlaps)
    traces = [played(policy, noisy, seed=seed) for seed in range(8)]
    ratios = [replayed_s(trace, policy, noisy) / measured_s(trace) for trace in traces]
    assert np.mean(ratios) == pytest.approx(1, abs=0.012)


def test_host_time_is_paid_once_a_round() -> None:
    plain = system(1.0)
    trace = played(Autoregressive(), plain)
    slower = replace(plain, host_s={term: s + 0.001 for term, s in plain.host_s.items()})
    more_s = replayed_s(trace, Autoregressive(), slower) - measured_s(trace)
    assert more_s == pytest.approx(0.001 * len(trace.rounds), rel=1e-6)


@pytest.mark.parametrize("policy", [Speculative(3), ssd(Fallback.DRAFT)], ids=lambda policy: policy.name)
def test_contention_is_paid_beside_a_build_only(policy: Policy) -> None:
    alone = replace(system(1.0), contention={lane: 1.0 for lane in Lane})
    trace = played(policy, system(1.0))
    is_ssd = isinstance(policy, SpeculativeSpeculative)
    assert (replayed_s(trace, policy, alone) < 0.95 * measured_s(trace)) == is_ssd


def test_another_policy_is_refused_and_no_round_takes_no_time() -> None:
    trace = played(Speculative(3), system(1.0))
    with pytest.raises(BadInput, match=r"trace\.policy: must be AR"):
        replayed_seconds(trace, Autoregressive(), system(1.0))
    nothing = Trace(Autoregressive().to_dict(), trace.workload)
    assert replayed_seconds(nothing, Autoregressive(), system(1.0)) == {}
