"""How well a fit is known: drift and steps are found where they are, and truths lie inside their intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.doubts import doubts_about
from calibration.drift import drift
from calibration.fit import fit
from calibration.fit_report import acceptance_of, interval_of_median, report_fit
from calibration.latency_fit import tables
from calibration.latency_steps import Axis, steps
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


def verifications(
    at_width: dict[int, float], noise: float, seed: int = 0, rows: tuple[int, ...] = (1,), per_row: float = 0.0
) -> list[LatencySample]:
    """20 blocks; a row beyond the first takes a share `per_row` more."""
    rng = np.random.default_rng(seed)
    return [
        LatencySample(
            *(Lane.TARGET, Operation.VERIFY, width, context, False, block),
            seconds * (1 + per_row * (number - 1)) * rng.lognormal(0, noise),
            number,
        )
        for block in range(20)
        for number in rows
        for width, seconds in at_width.items()
        for context in (64, 128)
    ]


def test_a_step_is_found_and_a_line_has_none() -> None:
    smooth = {width: 0.010 + 0.0003 * width for width in range(1, 10)}
    assert steps(verifications(smooth, 0.05)) == []
    stepped = {width: seconds * (1.35 if width >= 5 else 1.0) for width, seconds in smooth.items()}
    (found,) = steps(verifications(stepped, 0.05))
    assert (found.lane, found.operation, found.axis) == (Lane.TARGET, Operation.VERIFY, Axis.TOKENS)
    assert (found.before, found.after, found.batch_size, found.is_in_gap) == (4, 5, 1, False)
    assert found.ratio == pytest.approx(stepped[5] / stepped[4], rel=0.05)
    assert found.in_words() == f"target verify: 5 tokens take {found.ratio:.2f} times as long as 4"
    assert steps(verifications(stepped, 2.0)) == []  # noise hides it


def test_a_line_over_numbers_that_lie_apart_has_no_steps() -> None:
    """Twice the width takes twice the time of a pass that is bound by arithmetic: no step, though all ratios are 2."""
    assert steps(verifications({width: 0.001 * width for width in (1, 2, 4, 8, 16)}, 0.03)) == []
    assert steps(verifications({1: 0.01}, 0.03, rows=(1, 2, 4, 8), per_row=1.0)) == []


def test_noise_is_rarely_a_step() -> None:
    """Of 40 profiles without a step, with 8 intervals each, at most 2 show one: what 4 standard errors leave over."""
    smooth = {width: 0.010 + 0.0003 * width for width in range(1, 10)}
    assert sum(bool(steps(verifications(smooth, 0.3, seed))) for seed in range(40)) <= 2


def test_a_step_over_rows_is_found_and_said_to_be_interpolated_over() -> None:
    """Between 2 and 4 rows none was profiled: where it stands nobody knows."""
    smooth = verifications({1: 0.010, 4: 0.012}, 0.03, rows=(1, 2, 4, 8), per_row=0.02)
    stepped = [replace(s, duration_s=s.duration_s * (1.5 if s.batch_size >= 4 else 1.0)) for s in smooth]
    assert steps(smooth) == []
    (found,) = steps(stepped)
    assert (found.axis, found.before, found.after, found.batch_size, found.is_in_gap) == (Axis.ROWS, 2, 4, None, True)
    assert "not profiled and is interpolated over a step" in found.in_words()


def test_a_step_in_a_gap_is_among_the_notes() -> None:
    system = known_system()
    samples = samples_of(system, num_blocks=12, seed=3)
    stepped = [replace(s, duration_s=s.duration_s * (1.5 if s.num_tokens == 8 else 1.0)) for s in samples]
    notes = [report_fit(p, fit(p)).notes for p in (profile_of(system, samples), profile_of(system, stepped))]
    found = [[note for note in own if "interpolated over a step" in note] for own in notes]
    assert found[0] == [] and any("8 tokens take" in note and "as long as 4" in note for note in found[1])


def test_every_profiled_width_and_number_of_rows_is_a_knot_of_its_own() -> None:
    """A step of one width stays where it is, over tokens and over rows, and no neighbour is pulled towards it."""
    at_width = {width: 0.010 * (1.35 if width >= 5 else 1.0) for width in range(1, 9)}
    samples = verifications(at_width, 0.01, rows=(1, 2, 3), per_row=0.1)
    table = tables(samples)[Lane.TARGET, Operation.VERIFY]
    assert list(table.knots) == list(at_width) and list(table.batched) == [2, 3]
    for rows, knots in {1: table.knots, **table.batched}.items():
        for width, seconds in at_width.items():
            assert [context for context, _ in knots[width]] == [64, 128]
            own = table.location_s(width, np.array([64, 128]), rows)
            assert own == pytest.approx(seconds * (1 + 0.1 * (rows - 1)), rel=0.02)


@settings(max_examples=200)
@given(st.dictionaries(st.integers(0, 300), st.floats(1e-5, 1.0), min_size=3, max_size=6), st.floats(0, 0.3))
def test_a_fitted_location_is_positive_and_no_less_than_the_least_median(medians: dict[int, float], spread: float):
    """Whatever the times of the contexts: a line through them falls nowhere, and nowhere below all of them."""
    samples = [
        LatencySample(Lane.DRAFT, Operation.TREE_STEP, 4, context, False, block, seconds * (1 + spread * block))
        for context, seconds in medians.items()
        for block in range(3)
    ]
    knots = tables(samples)[Lane.DRAFT, Operation.TREE_STEP].knots[4]
    locations_s = [location_s for _, location_s in knots]
    assert locations_s == sorted(locations_s)
    assert locations_s[0] >= min(medians.values())


def test_a_median_lies_inside_its_interval() -> None:
    """Of 400 intervals of at least 95 % fewer than 363 cover with probability 1e-3."""
    rng = np.random.default_rng(7)
    draws = rng.lognormal(0, 0.5, (400, 15))
    intervals = [interval_of_median(row) for row in draws]
    assert sum(low <= 1.0 <= high for low, high in intervals) >= 363
    assert interval_of_median([2.0]) == (2.0, 2.0)


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
