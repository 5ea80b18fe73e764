"""Recovery: records simulated from a known system give that system back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.breakdown import round_time
from calibration.fit import at_speed_of, fit
from calibration.profile import Profile
from sim.errors import BadInput
from sim.latency import LatencySample
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.simulate import predict, simulate
from sim.system import HostTerm, System
from sim.trace import Lane
from tests.sim.strategies import batched
from tests.sim.toy import markov, record_of, system_of, workload_of

POLICIES = [
    Autoregressive(),
    Speculative(3),
    SpeculativeSpeculative(3, (2, 2, 1, 2), (2, 1, 1, 1)),
    SpeculativeSpeculative(3, (2, 2, 1, 2), (3,), Fallback.NONE),
]
CONTEXTS = (0, 64)


def known_system(*, overlaps: bool = True) -> System:
    record = record_of(*markov(2), num_prompts=24, length=24, seed=5)
    system = system_of(
        record,
        verify_s=0.010,
        verify_per_token_s=0.0007,
        draft_step_s=0.0018,
        glue_s=0.0021,
        tree_step_s=0.0024,
        host_s=0.0003,
        residuals=tuple(np.random.default_rng(3).lognormal(0, 0.05, 40)),
        contention=1.06 if overlaps else 1.0,
    )
    concurrency = "processes" if overlaps else "serial"
    return replace(system, identity={"pair": "toy", "concurrency": concurrency}, overlaps=overlaps)


def samples_of(system: System, num_blocks: int, seed: int, drift: float = 0.0) -> list[LatencySample]:
    rng = np.random.default_rng(seed)
    samples = []
    for block in range(num_blocks):
        for lane, operation in system.latency.operations:
            for num_tokens in (1, 2, 4, 8):
                for context in CONTEXTS:
                    for busy in (False, True):
                        durations = system.samples_s(lane, operation, num_tokens, context, beside=busy)
                        duration_s = rng.choice(durations) * (1 + drift * block / num_blocks)
                        samples.append(LatencySample(lane, operation, num_tokens, context, busy, block, duration_s))
    return samples


def profile_of(system: System, samples: list[LatencySample], policies=POLICIES) -> Profile:
    workload = workload_of(system.agreement)
    traces = [simulate(policy, workload, system, seed) for policy in policies for seed in range(2)]
    return Profile(system.agreement, tuple(samples), tuple(traces), {"identity": system.identity})


def test_a_known_system_is_recovered():
    """60 samples a cell with 5 % noise: locations within 3 %, contention within 2 %, host times within 20 us."""
    system = known_system()
    fitted = fit(profile_of(system, samples_of(system, num_blocks=60, seed=1)))
    for key, table in system.latency.operations.items():
        for num_tokens in (1, 2, 4, 8):
            true_s = table.mean_s(num_tokens, np.array(CONTEXTS))
            assert fitted.latency[key].mean_s(num_tokens, np.array(CONTEXTS)) == pytest.approx(true_s, rel=0.03), key
    for lane in Lane:
        assert fitted.contention[lane] == pytest.approx(1.06, abs=0.02)
    for term in HostTerm:
        assert fitted.host_s[term] == pytest.approx(0.0003, abs=2e-5)


@pytest.mark.parametrize("overlaps", [True, False], ids=["processes", "serial"])
def test_the_fitted_system_predicts_what_the_true_one_does(overlaps):
    system = known_system(overlaps=overlaps)
    fitted = fit(profile_of(system, samples_of(system, num_blocks=60, seed=2)))
    workload = workload_of(system.agreement)
    for policy in POLICIES:
        truth = predict(policy, workload, system).tokens_per_s.value
        assert predict(policy, workload, fitted).tokens_per_s.value == pytest.approx(truth, rel=0.02)


def test_without_the_host_times_the_prediction_is_worse():
    """Negative control: the host term is not decoration."""
    system = known_system()
    fitted = fit(profile_of(system, samples_of(system, num_blocks=60, seed=2)))
    hostless = replace(fitted, host_s=dict.fromkeys(HostTerm, 0.0))
    workload = workload_of(system.agreement)
    truth = predict(POLICIES[0], workload, system).tokens_per_s.value
    errors = [abs(predict(POLICIES[0], workload, s).tokens_per_s.value / truth - 1) for s in (fitted, hostless)]
    assert errors[1] > errors[0] + 0.01


def test_one_wild_sample_in_a_hundred_does_not_move_the_fit():
    system = known_system()
    samples = samples_of(system, num_blocks=100, seed=1)
    wild = list(samples)
    first = wild[0]
    wild[0] = replace(first, duration_s=first.duration_s * 50)
    key = (first.lane, first.operation)
    means = [fit(profile_of(system, s)).latency[key].mean_s(first.num_tokens, first.context) for s in (samples, wild)]
    assert means[1] == pytest.approx(means[0], rel=0.01)


def test_a_profile_without_one_kind_of_round_is_refused():
    system = known_system()
    with pytest.raises(BadInput, match="none of: hit, miss"):
        fit(profile_of(system, samples_of(system, num_blocks=3, seed=1), POLICIES[:2]))


def test_runs_of_batches_are_refused():
    """Their spans are those of no single row: times of rows cannot be told from them."""
    system = batched(known_system(), 0.001)
    profile = profile_of(system, samples_of(system, num_blocks=3, seed=1))
    workload = replace(workload_of(system.agreement), batch_size=3)
    batches = tuple(simulate(policy, workload, system) for policy in POLICIES)
    for refused in (
        lambda: fit(replace(profile, traces=batches)),
        lambda: at_speed_of(system, batches),
        lambda: round_time(batches),
    ):
        with pytest.raises(BadInput, match="must be of prompts decoded one at a time, got 'a batch of 3 rows'"):
            refused()
