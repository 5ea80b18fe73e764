"""How well a fit is known: drift and steps are found where they are, and truths lie inside their intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.fit import fit
from calibration.fit_report import acceptance_of, doubts_about, drift, location_interval, report_fit, slowdown, steps
from sim.latency import LatencySample
from sim.trace import Lane, Operation
from tests.calibration.test_fit import known_system, profile_of, samples_of
from tests.experiments.fake_bench import greedy_record


def test_a_drift_of_the_clock_is_found_and_none_is_invented() -> None:
    """20 blocks of 5 % noise. Of 40 true intervals of 95 % more than 8 miss with probability 1e-4."""
    system = known_system()
    slower = drift(samples_of(system, num_blocks=20, seed=1, drift=0.1))
    for estimate in slower.values():
        assert estimate.low > 0 and estimate.low < 0.1 * 19 / 20 < estimate.high + 0.01
    steady = [e for seed in range(20) for e in drift(samples_of(system, num_blocks=20, seed=seed)).values()]
    assert len(steady) == 40
    assert sum(not e.low <= 0 <= e.high for e in steady) <= 8


def test_few_blocks_tell_no_drift() -> None:
    assert drift(samples_of(known_system(), num_blocks=4, seed=1)) == {}


def verifications(at_width: dict[int, float], noise: float, seed: int = 0) -> list[LatencySample]:
    rng = np.random.default_rng(seed)
    return [
        LatencySample(Lane.TARGET, Operation.VERIFY, width, context, False, block, seconds * rng.lognormal(0, noise))
        for block in range(20)
        for width, seconds in at_width.items()
        for context in (64, 128)
    ]


def test_a_step_is_found_and_a_line_has_none() -> None:
    smooth = {width: 0.010 + 0.0003 * width for width in range(1, 10)}
    assert steps(verifications(smooth, 0.05)) == []
    stepped = {width: seconds * (1.35 if width >= 5 else 1.0) for width, seconds in smooth.items()}
    (found,) = steps(verifications(stepped, 0.05))
    assert (found.lane, found.operation, found.from_tokens, found.to_tokens) == (Lane.TARGET, Operation.VERIFY, 4, 5)
    assert found.ratio == pytest.approx(stepped[5] / stepped[4], rel=0.05)
    assert steps(verifications(stepped, 2.0)) == []  # noise hides it


def test_a_location_lies_inside_its_interval() -> None:
    """Of 400 intervals of at least 95 % fewer than 363 cover with probability 1e-3."""
    rng = np.random.default_rng(7)
    draws = rng.lognormal(0, 0.5, (400, 15))
    intervals = [location_interval(row) for row in draws]
    assert sum(low <= 1.0 <= high for low, high in intervals) >= 363
    assert location_interval([2.0]) == (2.0, 2.0)


def test_the_slowdown_lies_inside_its_interval() -> None:
    """Of 40 intervals of 95 %, here of few blocks and so a little short, at least 30 cover."""
    system = known_system()
    covered = 0
    for seed in range(20):
        samples = samples_of(system, num_blocks=15, seed=seed)
        fitted = fit(profile_of(system, samples))
        estimates = [slowdown(samples, fitted.latency, lane) for lane in Lane]
        covered += sum(e.low <= 1.06 <= e.high for e in estimates)
        assert [e.value for e in estimates] == [fitted.contention[lane] for lane in Lane]
    assert covered >= 30


def test_a_report_holds_what_was_fitted() -> None:
    system = known_system()
    profile = profile_of(system, samples_of(system, num_blocks=10, seed=3))
    fitted = fit(profile)
    report = report_fit(profile, fitted)
    for term, estimate in report.host_s.items():
        assert estimate.value == fitted.host_s[term]
        assert estimate.low - 1e-5 <= 0.0003 <= estimate.high + 1e-5
    assert 0 < report.largest_location_error < 0.2
    assert report.to_dict()["contention"]["target"]["value"] == fitted.contention[Lane.TARGET]


def test_repeating_every_prompt_tells_nothing_new() -> None:
    record = greedy_record(num_prompts=12, length=30, prompt_length=4, seed=1)
    record = replace(record, prompt_tokens=tuple((i, 0, 0, 0) for i in range(12)))
    tenfold = record.select(np.repeat(np.arange(12), 10))
    once, ten_times = acceptance_of(record)[0], acceptance_of(tenfold)[0]
    assert (once.value, once.low, once.high) == pytest.approx((ten_times.value, ten_times.low, ten_times.high))
    assert once.n == ten_times.n == 12


def test_the_design_effect_is_one_of_independent_positions_and_grows_with_what_prompts_share() -> None:
    independent = greedy_record(num_prompts=60, length=40, prompt_length=4, seed=2)
    assert 0.5 < acceptance_of(independent)[1] < 1.7  # 59 degrees of freedom: outside with probability 1e-3
    easy = np.repeat(np.arange(60) % 2 == 0, 40)
    shared = replace(independent, rank=np.where(easy, 0, independent.rank))
    assert acceptance_of(shared)[1] > 2


def test_what_must_be_doubted_is_said() -> None:
    record = greedy_record(num_prompts=5, length=10, prompt_length=4, seed=1)
    with_end = replace(record, identity=record.identity | {"stop_ids": [0]})
    assert doubts_about(with_end) == []
    assert any("past their end" in doubt for doubt in doubts_about(record))
    assert any("4 prompts" in doubt for doubt in doubts_about(with_end.select(np.arange(4))))
    of_random = replace(with_end, identity=with_end.identity | {"dataset": "random-1024"})
    assert any("random" in doubt for doubt in doubts_about(of_random))
