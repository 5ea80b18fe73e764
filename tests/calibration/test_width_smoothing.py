"""Smoothing over widths: errors shrink where a curve is smooth, steps stay where they stand above the errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.width_smoothing import smoothed, smoothed_knots

WIDTHS = np.arange(1, 10)
SMOOTH_S = 0.001 + 0.0002 * WIDTHS
TILES_S = np.where(WIDTHS > 4, 0.002, 0.001)  # the edge of a matrix tile


def mean_square(values_s: np.ndarray, truth_s: np.ndarray) -> float:
    return float(np.mean(np.log(values_s / truth_s) ** 2))


def noisy(truth_s: np.ndarray, error: float, num: int, seed: int) -> np.ndarray:
    return truth_s * np.random.default_rng(seed).lognormal(0, error, (num, len(truth_s)))


def test_noise_about_a_smooth_curve_is_reduced() -> None:
    """Over 100 tables with errors of 5 % the mean square error falls below 0.6 of what it was; its standard error over
    them is 0.04 of that."""
    tables = noisy(SMOOTH_S, 0.05, 100, seed=1)
    after = np.mean([mean_square(smoothed(WIDTHS, row, 0.05), SMOOTH_S) for row in tables])
    assert after < 0.6 * np.mean([mean_square(row, SMOOTH_S) for row in tables])


def test_a_step_stays_where_it_stands_above_the_errors() -> None:
    """Twice as long from one width to the next, with errors of 2 %: the step is what it was to 3 %."""
    for row in noisy(TILES_S, 0.02, 20, seed=2):
        found = smoothed(WIDTHS, row, 0.02)
        assert found[4] / found[3] == pytest.approx(row[4] / row[3], rel=0.03)


def test_smoothing_a_step_away_would_be_seen() -> None:
    """Negative control: neighbours' means halve the step."""
    means = np.convolve(np.pad(np.log(TILES_S), 1, mode="edge"), np.ones(3) / 3, mode="valid")
    assert np.exp(means[4] - means[3]) < 1.3


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-6, 1.0), st.floats(-0.5, 1.0), st.floats(1e-4, 0.3))
def test_a_power_law_is_left_alone(first_s: float, exponent: float, error: float) -> None:
    """It does not bend, so that there is nothing to draw together."""
    law = first_s * WIDTHS**exponent
    assert smoothed(WIDTHS, law, error) == pytest.approx(law, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1e-4, 1e-2), min_size=4, max_size=9), st.floats(1e-3, 0.3), st.floats(0.1, 10))
def test_units_do_not_matter(locations_s: list[float], error: float, factor: float) -> None:
    widths, values = np.arange(1, len(locations_s) + 1), np.array(locations_s)
    scaled = smoothed(widths, factor * values, error)
    assert (scaled > 0).all()
    assert scaled == pytest.approx(factor * smoothed(widths, values, error), rel=1e-4)


def test_few_widths_and_exact_ones_stay_as_they_are() -> None:
    few = {1: ((64, 0.001), (128, 0.002)), 2: ((64, 0.004), (128, 0.003))}
    assert smoothed_knots(few, 0.1) == few
    exact = {int(w): ((64, float(s)),) for w, s in zip(WIDTHS, TILES_S, strict=True)}
    assert smoothed_knots(exact, 0.0) == exact


def test_widths_with_different_contexts_share_all_of_them() -> None:
    knots = {w: ((64, 0.001 * w), (128, 0.002 * w)) for w in (1, 2, 4)} | {
        8: ((64, 0.008), (96, 0.012), (128, 0.016)),
    }
    found = smoothed_knots(knots, 0.05)
    assert {tuple(c for c, _ in row) for row in found.values()} == {(64, 96, 128)}
    assert dict(found[4]) == pytest.approx({64: 0.004, 96: 0.006, 128: 0.008}, rel=1e-3)
