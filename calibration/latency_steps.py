"""Steps of the latencies over tokens and rows, and the gaps of the grid that hide where they stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.latency_fit import error_of_median, idle_cells
from sim.latency import LatencySample
from sim.trace import Lane, Operation

FloatArray = NDArray[np.float64]
Located = tuple[float, float]  # median and its standard error, seconds

SMALLEST_STEP = 1.1  # a jump that is not worth a line is smaller
STEP_ERRORS = 4.0  # standard errors that a step must stand above what its neighbours grow by


class Axis(StrEnum):
    TOKENS = "tokens"  # of each row
    ROWS = "rows"


@dataclass(frozen=True)
class Step:
    """An operation takes `ratio` times as long at `after` as at `before`, neighbours among the profiled numbers: far
    more than the slope between other neighbours accounts for, as at an edge of a matrix tile or a kernel.

    `batch_size` are the rows of a step over tokens; one over rows is of all widths together and has none.
    """

    lane: Lane
    operation: Operation
    axis: Axis
    before: int
    after: int
    ratio: float
    batch_size: int | None = None

    @property
    def is_in_gap(self) -> bool:
        """Whether numbers between were not profiled: it is not known where the step stands, and interpolated."""
        return self.after - self.before > 1

    def in_words(self) -> str:
        rows = "" if self.batch_size in (None, 1) else f" of {self.batch_size} rows"
        where = f"{self.lane.value} {self.operation.value}{rows}"
        rises = f"{self.after} {self.axis.value} take {self.ratio:.2f} times as long as {self.before}"
        if not self.is_in_gap:
            return f"{where}: {rises}"
        return f"{where}: {rises}; what lies between was not profiled and is interpolated over a step"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_in_gap": self.is_in_gap}


def steps(samples: Sequence[LatencySample]) -> list[Step]:
    """Where a location stands `SMALLEST_STEP` times, and `STEP_ERRORS` standard errors, above what the median slope of
    the operation's other intervals leads to from the number before. Two intervals at least are needed."""
    over_tokens: dict[tuple[Lane, Operation, int], dict[int, dict[Hashable, Located]]] = {}
    over_rows: dict[tuple[Lane, Operation], dict[int, dict[Hashable, Located]]] = {}
    for (lane, operation, rows, width, context), own in idle_cells(samples).items():
        durations_s = [s.duration_s for s in own]
        located = float(np.median(durations_s)), error_of_median(durations_s)
        over_tokens.setdefault((lane, operation, rows), defaultdict(dict))[width][context] = located
        over_rows.setdefault((lane, operation), defaultdict(dict))[rows][width, context] = located
    found = [
        Step(lane, operation, Axis.TOKENS, before, after, ratio, rows)
        for (lane, operation, rows), table in over_tokens.items()
        for before, after, ratio in _jumps(table)
    ]
    return found + [
        Step(lane, operation, Axis.ROWS, before, after, ratio)
        for (lane, operation), table in over_rows.items()
        for before, after, ratio in _jumps(table)
    ]


def _jumps(table: Mapping[int, Mapping[Hashable, Located]]) -> Iterator[tuple[int, int, float]]:
    """Neighbouring numbers with a step between them, and its ratio; over the cells that all numbers share."""
    numbers = sorted(table)
    shared = [cell for cell in table[numbers[0]] if all(cell in table[number] for number in numbers)]
    if len(numbers) < 3 or not shared:
        return
    located = np.array([[table[number][cell] for cell in shared] for number in numbers])
    location_s, error_s = located[..., 0], located[..., 1]
    gaps = np.diff(numbers)
    slopes = np.diff(location_s, axis=0) / gaps[:, None]
    for index, (before, after) in enumerate(pairwise(numbers)):
        usual = np.median(np.delete(slopes, index, axis=0), axis=0)
        expected_s = location_s[index] + np.maximum(0.0, usual) * gaps[index]
        excess = float(np.log(location_s[index + 1] / expected_s).mean())
        slope_error_s = gaps[index] * _slope_error(np.delete(error_s, index, axis=0), gaps)
        errors = np.sqrt(error_s[index] ** 2 + error_s[index + 1] ** 2 + slope_error_s**2) / expected_s
        error = float(np.sqrt((errors**2).sum()) / len(shared))
        if excess > np.log(SMALLEST_STEP) and excess > STEP_ERRORS * error:
            yield before, after, float(np.exp(np.log(location_s[index + 1] / location_s[index]).mean()))


def _slope_error(error_s: FloatArray, gaps: NDArray[np.int64]) -> FloatArray:
    """(cells,) standard error of a typical slope between neighbours."""
    return np.sqrt(2.0) * np.median(error_s, axis=0) / float(np.median(gaps))
