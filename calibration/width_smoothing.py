"""Latencies of neighbouring widths know of each other.

A cell of the latency grid is timed at a few moments, and a slow one among them moves its median by more than two
neighbouring widths differ. So each width is drawn towards what its neighbours say, as far as its own error allows: a
smoothing spline over logarithms, whose roughness is the one under which the medians are most likely (Wahba 1985,
"A comparison of GCV and GML for choosing the smoothing parameter in the generalized spline smoothing problem"). Where
the latencies have steps that stand above the errors, that roughness is large, and nothing is smoothed away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar

from sim.extrapolation import Knots

FloatArray = NDArray[np.float64]
FEWEST_WIDTHS = 4  # for a roughness to be told from errors
LOG_STIFFNESS = (-12.0, 9.0)  # bounds: each width stands for itself; all lie on one power law


def smoothed_knots(knots: Mapping[int, Knots], error: float) -> dict[int, Knots]:
    """By width, locations at contexts; `error` is the relative standard error of a location."""
    widths = sorted(knots)
    if len(widths) < FEWEST_WIDTHS or error <= 0:
        return dict(knots)
    contexts = sorted({context for row in knots.values() for context, _ in row})
    table = np.array([_at(knots[width], contexts) for width in widths])
    smooth = np.stack([smoothed(widths, column, error) for column in table.T], axis=1)
    return {
        width: tuple(zip(contexts, map(float, row), strict=True)) for width, row in zip(widths, smooth, strict=True)
    }


def _at(knots: Knots, contexts: Sequence[int]) -> FloatArray:
    return np.interp(contexts, [context for context, _ in knots], [location_s for _, location_s in knots])


def smoothed(widths: ArrayLike, locations_s: ArrayLike, error: float) -> FloatArray:
    """(widths,) locations, in seconds, of ascending widths with a common relative standard error."""
    y = np.log(np.asarray(locations_s, dtype=float))
    bends = _second_differences(np.log(np.asarray(widths, dtype=float)))
    penalty = np.eye(len(y)) + _likeliest_stiffness(bends, y, error) * bends.T @ bends
    return np.asarray(np.exp(np.linalg.solve(penalty, y)))


def _second_differences(x: FloatArray) -> FloatArray:
    """(n - 2, n): how much a curve bends at each inner point, with variances that do not depend on the distances if it
    is an integrated random walk."""
    rows = np.zeros((len(x) - 2, len(x)))
    for i, (before, after) in enumerate(zip(np.diff(x)[:-1], np.diff(x)[1:], strict=True)):
        rows[i, i : i + 3] = np.array([1 / before, -1 / before - 1 / after, 1 / after]) / np.sqrt((before + after) / 2)
    return rows


def _likeliest_stiffness(bends: FloatArray, y: FloatArray, error: float) -> float:
    """Variance of the errors over that of the bends of the true curve, by maximum likelihood of the bends seen."""
    seen, of_errors = bends @ y / error, bends @ bends.T

    def minus_log_likelihood(log_stiffness: float) -> float:
        covariance = np.exp(-log_stiffness) * np.eye(len(seen)) + of_errors
        return float(np.linalg.slogdet(covariance)[1] + seen @ np.linalg.solve(covariance, seen))

    return float(np.exp(minimize_scalar(minus_log_likelihood, bounds=LOG_STIFFNESS, method="bounded").x))
