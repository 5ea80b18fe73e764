"""Recovery: a known system is simulated, profiled and fitted many times, and its parameters lie inside their intervals.

Every block of a profile meets a machine of another speed, so that samples of one block are not independent. Of 24
intervals of 95 % fewer than `FEWEST` hold the truth with probability 1e-4, for one of the 16 parameters here with 2e-3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from calibration.fit import fit
from calibration.fit_report import FitReport, acceptance_of, interval_of_median, locations, report_fit
from calibration.host_fit import SpanRatio, ratios_of_spans
from calibration.latency_fit import IN_SITU, Key
from calibration.profile import Profile
from sim.latency import LatencySample
from sim.metrics import Estimate
from sim.simulate import simulate
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from tests.calibration.test_fit import POLICIES, known_system, samples_of
from tests.sim.toy import markov, record_of, workload_of

NUM_PROFILES, FEWEST = 24, 18
NUM_BLOCKS = 12
BLOCK_SPREAD = 0.03  # standard deviation of the logarithm of a block's speed
HOST_S = {
    HostTerm.AUTOREGRESSIVE: 0.0002,
    HostTerm.SPECULATIVE: 0.0003,
    HostTerm.HIT: 0.0005,
    HostTerm.MISS: 0.0004,
    HostTerm.UNDRAFTED_MISS: 0.00035,
}
CONTENTION = {Lane.TARGET: 1.04, Lane.DRAFT: 1.12}


def true_system() -> System:
    return replace(known_system(), host_s=HOST_S, contention=CONTENTION)


def of_unsteady_machine(samples: list[LatencySample], seed: int) -> list[LatencySample]:
    speed = np.random.default_rng((seed, 1)).lognormal(0, BLOCK_SPREAD, NUM_BLOCKS)
    return [replace(s, duration_s=s.duration_s * speed[s.block]) for s in samples]


def profile_of(system: System, seed: int) -> Profile:
    workload = workload_of(system.agreement)
    samples = of_unsteady_machine(samples_of(system, NUM_BLOCKS, seed), seed)
    seeds = range(1000 + 10 * seed, 1000 + 10 * seed + len(POLICIES))  # runs of one seed would share their noise
    traces = [simulate(policy, workload, system, own) for policy, own in zip(POLICIES, seeds, strict=True)]
    return Profile(system.agreement, tuple(samples), tuple(traces), {"identity": system.identity})


@dataclass(frozen=True)
class Recovered:
    profile: Profile
    fitted: System
    report: FitReport


@pytest.fixture(scope="module")
def recovered() -> list[Recovered]:
    found = []
    for seed in range(NUM_PROFILES):
        profile = profile_of(true_system(), seed)
        fitted = fit(profile)
        found.append(Recovered(profile, fitted, report_fit(profile, fitted)))
    return found


def true_ratios(of: Recovered) -> dict[tuple[str, Key], float]:
    """Mean ratios in situ of runs whose operations take their true mean time, to the tables as fitted."""
    truth = true_system()
    ratios: dict[tuple[str, Key], list[SpanRatio]] = defaultdict(list)
    for trace in of.profile.traces:
        built = {(s.sequence, s.round) for s in trace.spans if s.operation is Operation.GLUE}
        spans = []
        for s in trace.spans:
            beside = s.operation is not Operation.DRAFT_STEP and (s.sequence, s.round) in built
            mean_s = 0.0
            if s.operation in IN_SITU:
                mean_s = float(truth.mean_s(s.lane, s.operation, s.num_tokens, s.context, beside=beside))
            spans.append(replace(s, end_s=s.start_s + mean_s))
        for found in ratios_of_spans(replace(trace, spans=spans), of.fitted.latency, of.fitted.contention):
            ratios[trace.policy["kind"], found.key].append(found)
    return {name: sum(r.duration_s for r in own) / sum(r.location_s for r in own) for name, own in ratios.items()}


def holds(estimate: Estimate, truth: float) -> bool:
    """Up to rounding: simulated host times do not vary, and their intervals may have no width."""
    return estimate.low - 1e-12 <= truth <= estimate.high + 1e-12


def test_parameters_lie_inside_their_intervals(recovered) -> None:
    inside: dict[Hashable, int] = defaultdict(int)
    for of in recovered:
        report = of.report
        for lane, estimate in report.contention.items():
            inside["contention", lane] += holds(estimate, CONTENTION[lane])
        for term, estimate in report.host_s.items():
            inside["host", term] += holds(estimate, HOST_S[term])
        for lane, estimate in report.drift.items():
            inside["drift", lane] += holds(estimate, 0.0)
        truths = true_ratios(of)
        for kind, ratios in report.in_situ.items():
            for key, estimate in ratios.items():
                inside["in situ", kind, key] += holds(estimate, truths[kind, key])
    assert len(inside) == 2 + 5 + 2 + 7
    assert {name: number for name, number in inside.items() if number < FEWEST} == {}


def test_locations_lie_inside_their_intervals(recovered) -> None:
    """All cells of a profile share its blocks, so that profiles are counted: 0.95 of the cells on the mean over 24
    profiles, of which a bad one loses most; below 0.85 with probability 1e-3 (standard error 0.03)."""
    shares = []
    for report in (of.report for of in recovered):
        held = [
            holds(estimate, float(np.median(true_system().samples_s(lane, operation, width, context, beside=False))))
            for (lane, operation, _, width, context), estimate in report.locations.items()
        ]
        assert len(held) == 32
        shares.append(np.mean(held))
    assert np.mean(shares) >= 0.85


def test_intervals_are_no_wider_than_they_must_be(recovered) -> None:
    """Otherwise holding the truth says nothing."""
    for report in (of.report for of in recovered):
        assert report.largest_location_error < 0.15
        for lane, estimate in report.contention.items():
            assert estimate.high - estimate.low < 0.1, lane
        for term, estimate in report.host_s.items():
            # After a miss it holds what a verification of 13 ms takes longer after a wait than others.
            assert estimate.high - estimate.low < (6e-4 if term is HostTerm.MISS else 2e-4), term


def test_no_parameter_is_biased(recovered) -> None:
    """The mean over all profiles is within four standard errors of the truth."""
    errors: dict[Hashable, list[float]] = defaultdict(list)
    for fitted in (of.fitted for of in recovered):
        for lane in Lane:
            errors["contention", lane].append(fitted.contention[lane] / CONTENTION[lane] - 1)
        for term in HostTerm:
            errors["host", term].append(fitted.host_s[term] - HOST_S[term])
    for name, own in errors.items():
        assert abs(np.mean(own)) <= 4 * np.std(own, ddof=1) / np.sqrt(len(own)) + 1e-12, name


def test_samples_of_a_block_are_no_independent_ones() -> None:
    """Negative control: an interval of the median that takes every sample for itself is too narrow where one block
    has many of them."""
    rng = np.random.default_rng(5)
    held = {"blocks": 0, "samples": 0}
    for _ in range(200):
        speed = rng.lognormal(0, BLOCK_SPREAD, NUM_BLOCKS)
        samples = [
            LatencySample(Lane.TARGET, Operation.VERIFY, 4, 64, False, block, speed[block] * rng.lognormal(0, 0.005))
            for block in range(NUM_BLOCKS)
            for _ in range(3)
        ]
        (estimate,) = locations(samples).values()
        low, high = interval_of_median([s.duration_s for s in samples])
        held["blocks"] += holds(estimate, 1.0)
        held["samples"] += low <= 1.0 <= high
    assert held["blocks"] >= 180  # fewer with probability 5e-3 at 95 %
    assert held["samples"] < 170


def test_acceptance_lies_inside_its_interval() -> None:
    """Records of 24 texts of one law; its acceptance is known from 4000 of them, to a twentieth of a half width."""
    law = markov(2)
    truth = acceptance_of(record_of(*law, num_prompts=4000, length=24, seed=99))[0].value
    estimates = [
        acceptance_of(record_of(*law, num_prompts=24, length=24, seed=seed))[0] for seed in range(NUM_PROFILES)
    ]
    assert sum(holds(estimate, truth) for estimate in estimates) >= FEWEST
