"""Latency tables and the slow-down of busy lanes, from the samples of a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import theilslopes

from calibration.width_smoothing import smoothed_knots
from sim.extrapolation import Knots
from sim.latency import NUM_RESIDUALS, LatencyModel, LatencySample, OperationLatency, equally_likely
from sim.trace import Lane, Operation

FloatArray = NDArray[np.float64]
Key = tuple[Lane, Operation]
Cell = tuple[int, int, int]  # rows, tokens of each, context
SampledCell = tuple[Lane, Operation, int, int, int]  # rows, tokens of each, context
IN_SITU = (Operation.VERIFY, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP)  # what rounds are made of
AT_EVERY_WIDTH = (Operation.VERIFY, Operation.GLUE)  # timed at each width that can occur
STEP_ERRORS = 3.0  # standard errors that a median must leave the line over the contexts by, to be a step


def tables(samples: Sequence[LatencySample]) -> dict[Key, OperationLatency]:
    """Median of the idle samples of each cell, neighbouring widths drawn together as far as their errors allow;
    residuals are the pooled ratios of samples to their cell's location."""
    cells: dict[Key, dict[Cell, list[LatencySample]]] = defaultdict(dict)
    for (lane, operation, *cell), own in idle_cells(samples).items():
        rows, width, context = cell
        cells[lane, operation][rows, width, context] = own
    return {key: _table(key[1], by_cell) for key, by_cell in cells.items()}


def _table(operation: Operation, by_cell: dict[Cell, list[LatencySample]]) -> OperationLatency:
    """Raises `BadInput` if no sample is of one row."""
    cells: dict[int, dict[int, dict[int, list[LatencySample]]]] = defaultdict(lambda: defaultdict(dict))
    for (rows, width, context), own in sorted(by_cell.items()):
        cells[rows][width][context] = own
    knots = {rows: _over_widths(operation, by_width) for rows, by_width in cells.items()}
    table = OperationLatency(operation, knots.pop(1, {}), residuals=(1.0,), batched=knots)
    ratios = [
        s.duration_s / float(table.location_s(width, context, rows))
        for (rows, width, context), own in by_cell.items()
        for s in own
    ]
    return replace(table, residuals=equal_shares(ratios))


def _over_widths(operation: Operation, by_width: dict[int, dict[int, list[LatencySample]]]) -> dict[int, Knots]:
    durations = {width: {c: [s.duration_s for s in own] for c, own in row.items()} for width, row in by_width.items()}
    knots = {width: _over_contexts(operation, row) for width, row in durations.items()}
    if operation not in AT_EVERY_WIDTH:
        return knots
    return smoothed_knots(knots, float(np.median([_error_of_width(row) for row in by_width.values()])))


def _error_of_width(by_context: dict[int, list[LatencySample]]) -> float:
    """Relative standard error of the location of a width. Samples of one block share what the machine does meanwhile,
    so that each block counts once at each context."""
    ratios: list[float] = []
    for own in by_context.values():
        blocks: dict[int, list[float]] = defaultdict(list)
        for s in own:
            blocks[s.block].append(s.duration_s)
        medians = np.array([np.median(durations) for durations in blocks.values()])
        ratios += (medians / np.median(medians)).tolist()
    return error_of_median(ratios)


def _over_contexts(operation: Operation, durations: dict[int, list[float]]) -> Knots:
    """Location by context. Attention reads every entry once, so that it lies on a line, which knows more than each
    context by itself; where the medians leave that line by more than chance allows there are steps, and they stay.
    Tree steps, each context of which has few samples, are always a line."""
    medians = {context: float(np.median(own)) for context, own in durations.items()}
    if len(medians) < 3:
        return tuple(medians.items())
    line = _line(medians)
    (first, first_s), (last, last_s) = line
    on_line = np.interp(list(medians), [first, last], [first_s, last_s])
    errors = np.array([error_of_median(own) for own in durations.values()])
    is_straight = (np.abs(np.array(list(medians.values())) - on_line) <= STEP_ERRORS * errors).all()
    return line if operation is Operation.TREE_STEP or is_straight else tuple(medians.items())


def error_of_median(values: Sequence[float]) -> float:
    """Standard error from the median absolute deviation, as of a normal sample."""
    deviation = float(np.median(np.abs(np.array(values) - np.median(values))))
    return 1.2533 * 1.4826 * deviation / float(np.sqrt(len(values)))


def _line(medians: dict[int, float]) -> Knots:
    """The line through the medians; its slope is not negative, and it goes nowhere below the least of them: where
    medians bend sharply a line would come to negative times."""
    contexts, values = (np.array(row) for row in zip(*medians.items(), strict=True))
    slope = max(0.0, float(theilslopes(values, contexts).slope))
    intercept = float(np.median(values - slope * contexts))
    return tuple((int(c), max(float(values.min()), intercept + slope * int(c))) for c in (contexts[0], contexts[-1]))


def equal_shares(values: Iterable[float]) -> tuple[float, ...]:
    """At most `NUM_RESIDUALS` equally likely values with the mean of all, after the outermost 1 % are pulled in."""
    return tuple(float(value) for value in equally_likely(pulled_in(values), NUM_RESIDUALS))


def pulled_in(values: Iterable[float]) -> FloatArray:
    """The values with those beyond the 1 % and 99 % quantiles set to them: one wild sample moves nothing."""
    sample = np.fromiter(values, dtype=float)
    low, high = np.quantile(sample, 0.01, method="higher"), np.quantile(sample, 0.99, method="lower")
    return np.clip(sample, low, max(low, high))


def idle_cells(samples: Iterable[LatencySample]) -> dict[SampledCell, list[LatencySample]]:
    """The samples of each cell that were taken while the other lane was idle."""
    cells: dict[SampledCell, list[LatencySample]] = defaultdict(list)
    for s in samples:
        if not s.busy:
            cells[cell_of(s)].append(s)
    return cells


def cell_of(s: LatencySample) -> SampledCell:
    return s.lane, s.operation, s.batch_size, s.num_tokens, s.context


def slowdown(samples: Sequence[LatencySample], latency: LatencyModel, lane: Lane) -> float:
    """Median ratio of a lane's busy samples to its idle cells; at least 1, because company does not speed work up."""
    ratios = [
        s.duration_s / float(latency[lane, s.operation].location_s(s.num_tokens, s.context, s.batch_size))
        for s in samples
        if s.lane is lane and s.busy and s.operation in IN_SITU
    ]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0
