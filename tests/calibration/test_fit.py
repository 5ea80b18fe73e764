"""Recovery: records simulated from a known system give that system back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from calibration.breakdown import round_time
from calibration.fit import fit
from calibration.profile import Profile
from sim.errors import BadInput
from sim.latency import LatencySample
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.simulate import predict, simulate
from sim.system import HostTerm, System
from sim.trace import Lane
from tests.sim.strategies import MOST_ROWS, batched
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


def samples_of(
    system: System, num_blocks: int, seed: int, drift: float = 0.0, batch_sizes: tuple[int, ...] = (1,)
) -> list[LatencySample]:
    rng = np.random.default_rng(seed)
    samples = []
    cells = list(product(batch_sizes, system.latency.operations, (1, 2, 4, 8), CONTEXTS, (False, True)))
    for block in range(num_blocks):
        for rows, (lane, operation), num_tokens, context, busy in cells:
            durations = system.samples_s(lane, operation, num_tokens, context, beside=busy, batch_size=rows)
            duration_s = rng.choice(durations) * (1 + drift * block / num_blocks)
            samples.append(LatencySample(lane, operation, num_tokens, context, busy, block, duration_s, rows))
    return samples


def profile_of(system: System, samples: list[LatencySample], policies=POLICIES, batch_size: int = 1) -> Profile:
    workload = replace(workload_of(system.agreement), batch_size=batch_size)
    traces = [simulate(policy, workload, system, seed) for policy in policies for seed in range(2)]
    return Profile(system.agreement, tuple(samples), tuple(traces), {"identity": system.identity})


def test_a_known_system_is_recovered():
    """60 samples a cell with 5 % noise: locations within 3 %, contention within 2 %, host times within 20 us, and 60 us
    where they hold what verifications of 13 ms after a wait take longer than others."""
    system = known_system()
    fitted = fit(profile_of(system, samples_of(system, num_blocks=60, seed=1)))
    for key, table in system.latency.operations.items():
        for num_tokens in (1, 2, 4, 8):
            true_s = table.mean_s(num_tokens, np.array(CONTEXTS))
            assert fitted.latency[key].mean_s(num_tokens, np.array(CONTEXTS)) == pytest.approx(true_s, rel=0.03), key
    for lane in Lane:
        assert fitted.contention[lane] == pytest.approx(1.06, abs=0.02)
    for term in HostTerm:
        assert fitted.host_s[term] == pytest.approx(0.0003, abs=6e-5 if term is HostTerm.MISS else 2e-5)


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


def test_a_system_known_for_batches_is_recovered_from_runs_of_batches():
    """Rows accept different counts, and the mean of their tokens stands for them; a round is one for all of them."""
    system = batched(known_system(), 0.001)
    rows = (1, 3, MOST_ROWS)
    samples = samples_of(system, num_blocks=40, seed=1, batch_sizes=rows)
    fitted = fit(profile_of(system, samples, batch_size=3))
    for key, table in system.latency.operations.items():
        for num_rows in rows:
            true_s = table.mean_s(4, np.array(CONTEXTS), num_rows)
            assert fitted.latency[key].mean_s(4, np.array(CONTEXTS), num_rows) == pytest.approx(true_s, rel=0.03), key
    for term in HostTerm:
        assert fitted.host_s[term] == pytest.approx(0.0003, abs=1e-4 if term is HostTerm.MISS else 4e-5)
    workload = replace(workload_of(system.agreement), batch_size=3)
    for policy in POLICIES:
        truth, predicted = (predict(policy, workload, s, engine="vectorized").tokens_per_s for s in (system, fitted))
        assert predicted.value == pytest.approx(truth.value, rel=0.03)
        times = round_time([simulate(policy, workload, system)])
        parts = (times.verify_s, times.build_s, times.lookup_s, times.draft_s, times.rest_s)
        assert sum(parts) == pytest.approx(times.round_s) and times.rest_s == pytest.approx(0.0003, abs=1e-5)


def test_runs_of_batches_need_latencies_of_batches():
    system = batched(known_system(), 0.001)
    with pytest.raises(BadInput, match=r"number of rows must be in the profiled range 1\.\.1, got 3"):
        fit(profile_of(system, samples_of(system, num_blocks=3, seed=1), batch_size=3))
    of_batches = samples_of(system, num_blocks=3, seed=1, batch_sizes=(2, 3))
    with pytest.raises(BadInput, match="must have at least one knot"):
        fit(profile_of(system, of_batches))
