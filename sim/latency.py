"""How long operations take: a table of measured locations with empirical residuals, and the range it covers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.errors import BadInput, require_count, require_entries, require_mapping, require_number
from sim.extrapolation import Knots, extended
from sim.trace import Lane, Operation

FloatArray = NDArray[np.float64]

NUM_RESIDUALS = 40  # equally likely ratios that stand for the spread of an operation's durations
NUM_OF_SUM = 160  # equally likely values that stand for the distribution of a sum

_KNOTS = "knots_num_tokens_context_s"  # keys of a file
_BATCHED_KNOTS = "batched_knots_rows_num_tokens_context_s"
_RESIDUALS = "residual_ratios"
_BEYOND = "beyond"


class Beyond(StrEnum):
    """What a latency model answers outside the profiled range."""

    REFUSE = "refuse"
    EXTRAPOLATE = "extrapolate"  # as `sim.extrapolation` has it; predictions note it


class OutsideProfile(BadInput):
    """A number of rows or tokens, or a context, that was not profiled."""


@dataclass(frozen=True, slots=True)
class LatencySample:
    """One timed operation of a profiling run.

    `num_tokens` are the tokens of each of its `batch_size` rows, `context` the number of KV entries before it, `busy`
    whether the other role worked at the same time, `block` the interleaved block it belongs to (blocks are in time
    order: drift shows between them).
    """

    lane: Lane
    operation: Operation
    num_tokens: int
    context: int
    busy: bool
    block: int
    duration_s: float
    batch_size: int = 1


@dataclass(frozen=True)
class OperationLatency:
    """Latency of one operation: location at knots of (num_tokens, context), and ratios to it that are equally likely.

    `knots[num_tokens]` is a tuple of (context, location_s), contexts ascending, of one row; `batched[b][num_tokens]`
    the same of b >= 2 rows, with the tokens of each row. Between knots the location is linear, over rows too; outside
    them there is no answer, unless the table is `extended`. Raises `BadInput` on a table that is none, and on a
    verification that takes no time.
    """

    operation: Operation
    knots: Mapping[int, Knots]
    residuals: tuple[float, ...]
    batched: Mapping[int, Mapping[int, Knots]] = field(default_factory=dict)
    range_name: str = "profiled range"  # of what it covers, for messages

    def __post_init__(self) -> None:
        if self.operation not in list(Operation):
            raise BadInput("latency: operation", f"must be one of {', '.join(Operation)}", self.operation)
        operation = Operation(self.operation)
        name = f"latency of {operation.value}"
        batched = {
            require_count(f"{name}: rows of a batch", rows, 2): _checked_table(
                f"{name} of {rows} rows", operation, table
            )
            for rows, table in require_mapping(f"{name}: batched", self.batched).items()
        }
        object.__setattr__(self, "operation", operation)
        object.__setattr__(self, "knots", _checked_table(name, operation, self.knots))
        object.__setattr__(self, "residuals", checked_residuals(name, operation, self.residuals))
        object.__setattr__(self, "batched", batched)

    @cached_property
    def mean_residual(self) -> float:
        return float(np.mean(self.residuals))

    def location_s(self, num_tokens: float, context: ArrayLike, batch_size: int = 1) -> FloatArray:
        """Location at the contexts given (any shape), in seconds, of `batch_size` rows of `num_tokens` tokens each.

        Where rows differ, `num_tokens` and `context` are their means. Raises `OutsideProfile` outside the range
        covered.
        """
        below, above = self._around("number of rows", sorted({1, *self.batched}), batch_size)
        low = self._over_tokens(below, num_tokens, context)
        if above == below:
            return low
        share = (batch_size - below) / (above - below)
        return (1 - share) * low + share * self._over_tokens(above, num_tokens, context)

    def _around(self, what: str, known: list[int], wanted: float) -> tuple[int, int]:
        """The profiled values next to the one wanted, equal where it was profiled itself."""
        if not known[0] <= wanted <= known[-1]:
            rule = f"{what} must be in the {self.range_name} {known[0]}..{known[-1]}"
            raise OutsideProfile(f"latency of {self.operation.value}", rule, wanted)
        return known[bisect_right(known, wanted) - 1], known[bisect_left(known, wanted)]

    def _over_tokens(self, batch_size: int, num_tokens: float, context: ArrayLike) -> FloatArray:
        table = self.knots if batch_size == 1 else self.batched[batch_size]
        below, above = self._around("number of tokens", sorted(table), num_tokens)
        low = self._over_context(table[below], below, context)
        if above == below:
            return low
        share = (num_tokens - below) / (above - below)
        return (1 - share) * low + share * self._over_context(table[above], above, context)

    def _over_context(self, knots: Knots, width: int, context: ArrayLike) -> FloatArray:
        wanted = np.asarray(context, dtype=float)
        contexts, locations = zip(*knots, strict=True)
        outside = wanted[(wanted < contexts[0]) | (wanted > contexts[-1])]
        if outside.size:
            rule = f"context must be in the {self.range_name} {contexts[0]}..{contexts[-1]}"
            raise OutsideProfile(f"latency of {self.operation.value} at {width} tokens", rule, int(outside.flat[0]))
        return np.interp(wanted, contexts, locations)

    @cached_property
    def extended(self) -> OperationLatency:
        """The same inside the profiled range, and an answer around it."""
        batched = extended({1: self.knots, **self.batched})
        return replace(self, knots=batched.pop(1), batched=batched, range_name="range that extrapolation reaches")

    def bends(self, num_tokens: float, batch_size: int = 1) -> list[int]:
        """Contexts at which the slope of the location over the context changes, ascending."""
        all_rows = set(self._around("number of rows", sorted({1, *self.batched}), batch_size))
        tables = [self.knots if rows == 1 else self.batched[rows] for rows in all_rows]
        at = [row[n] for row in tables for n in set(self._around("number of tokens", sorted(row), num_tokens))]
        return sorted({context for knots in at for context in _bends(knots)})

    def mean_s(self, num_tokens: float, context: ArrayLike, batch_size: int = 1) -> FloatArray:
        return self.location_s(num_tokens, context, batch_size) * self.mean_residual

    def samples_s(self, num_tokens: float, context: float, batch_size: int = 1) -> FloatArray:
        """(num_residuals,) equally likely durations."""
        return self.location_s(num_tokens, context, batch_size) * np.asarray(self.residuals)

    def sum_samples_s(self, num_tokens: float, contexts: ArrayLike, batch_size: int = 1) -> FloatArray:
        """(<= NUM_OF_SUM,) equally likely durations of one operation at each of the contexts, one after another.

        Their residuals are summed with equal weights: the contexts lie close together, and so do the locations.
        """
        contexts = np.asarray(contexts)
        residuals = self._sums_of_residuals.get(len(contexts))
        if residuals is None:
            residuals = sum_of_independent([np.asarray(self.residuals)] * len(contexts))
            self._sums_of_residuals[len(contexts)] = residuals
        return float(self.location_s(num_tokens, contexts, batch_size).mean()) * residuals

    @cached_property
    def _sums_of_residuals(self) -> dict[int, FloatArray]:
        """By number of operations."""
        return {}


def _bends(knots: Knots) -> list[int]:
    slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(knots)]
    between = zip(knots[1:-1], pairwise(slopes), strict=True)
    return [context for (context, _), pair in between if not math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-15)]


def _checked_table(name: str, operation: Operation, table: object) -> dict[int, Knots]:
    rows = require_mapping(name, table)
    if not rows:
        raise BadInput(name, "must have at least one knot")
    return {
        require_count(f"{name}: number of tokens", width, 1): _checked_knots(
            f"{name} at {width} tokens", operation, row
        )
        for width, row in rows.items()
    }


def _checked_knots(name: str, operation: Operation, row: object) -> Knots:
    """A verification that takes no time would make a round of no time, and of no throughput."""
    knots = []
    for knot in require_entries(name, row):
        if len(require_entries(name, knot)) != 2:
            raise BadInput(name, "must hold pairs of a context and a time", knot)
        context, location = knot
        above = operation is Operation.VERIFY
        location = require_number(f"{name}: time", location, 0, above=above)
        knots.append((require_count(f"{name}: context", context, 0), location))
    if not knots:
        raise BadInput(name, "must have at least one knot")
    descending = [after for (before, _), (after, _) in pairwise(knots) if after <= before]
    if descending:
        raise BadInput(f"{name}: context", "must be above the one before", descending[0])
    return tuple(knots)


def checked_residuals(name: str, operation: Operation, residuals: object) -> tuple[float, ...]:
    """Equally likely ratios to a location. Raises `BadInput` unless they are finite and >= 0, and above 0 on the mean
    for a verification."""
    ratios = tuple(require_number(f"{name}: residuals", ratio, 0) for ratio in require_entries(name, residuals))
    if not ratios:
        raise BadInput(f"{name}: residuals", "must have at least one entry")
    if operation is Operation.VERIFY and not any(ratios):
        raise BadInput(f"{name}: residuals", "must have a mean above 0", list(ratios))
    return ratios


@dataclass(frozen=True)
class LatencyModel:
    """Latency of every operation of either lane, with the other lane idle.

    `operations` holds what was profiled; an item is the table to ask, continued around it if `beyond` says so. Raises
    `BadInput` where it holds none, or one under the name of another.
    """

    operations: Mapping[tuple[Lane, Operation], OperationLatency]
    beyond: Beyond = Beyond.REFUSE

    def __post_init__(self) -> None:
        if self.beyond not in list(Beyond):
            raise BadInput(f"latency: {_BEYOND}", f"must be one of {', '.join(Beyond)}", self.beyond)
        object.__setattr__(self, "beyond", Beyond(self.beyond))
        tables = require_mapping("latency", self.operations)
        if not tables:
            raise BadInput("latency", "must hold at least one operation")
        lanes, kinds = list(Lane), list(Operation)
        for key, table in tables.items():
            is_key = isinstance(key, tuple) and len(key) == 2 and key[0] in lanes and key[1] in kinds
            if not is_key or not isinstance(table, OperationLatency) or table.operation != key[1]:
                raise BadInput("latency", "must map a lane and an operation to the latency of that operation", key)
        in_words = {(Lane(lane), Operation(operation)): table for (lane, operation), table in tables.items()}
        object.__setattr__(self, "operations", in_words)

    def __getitem__(self, key: tuple[Lane, Operation]) -> OperationLatency:
        if key not in self.operations:
            known = ", ".join(sorted(f"{lane.value} {operation.value}" for lane, operation in self.operations))
            raise BadInput(f"latency of {key[0].value} {key[1].value}", f"was not profiled; known: {known}")
        table = self.operations[key]
        return table.extended if self.beyond is Beyond.EXTRAPOLATE else table

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; `beyond` only where it is asked for, so that earlier releases read all other files."""
        asked = {} if self.beyond is Beyond.REFUSE else {_BEYOND: self.beyond.value}
        return asked | {
            f"{lane.value}.{operation.value}": {
                _KNOTS: [
                    [width, context, location]
                    for width, row in sorted(table.knots.items())
                    for context, location in row
                ],
                _BATCHED_KNOTS: [
                    [batch_size, width, context, location]
                    for batch_size, knots in sorted(table.batched.items())
                    for width, row in sorted(knots.items())
                    for context, location in row
                ],
                _RESIDUALS: list(table.residuals),
            }
            for (lane, operation), table in self.operations.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyModel:
        """Inverse of `to_dict`. Raises `BadInput` naming the operation and the key; files of an earlier release have no
        batched knots."""
        operations = {}
        entries = dict(require_mapping("latency", data))
        beyond = entries.pop(_BEYOND, Beyond.REFUSE)
        for name, entry in entries.items():
            key = lane_and_operation("latency", name)
            try:
                operations[key] = _table_from_dict(key[1], entry)
            except BadInput as error:
                raise BadInput(f"latency.{name}", str(error)) from None
        return cls(operations, beyond)


def lane_and_operation(name: str, key: str) -> tuple[Lane, Operation]:
    """What a key `lane.operation` of a file names. Raises `BadInput` with `name` before it."""
    lane, _, operation = key.partition(".")
    if lane not in list(Lane) or operation not in list(Operation):
        lanes, operations = ", ".join(Lane), ", ".join(Operation)
        raise BadInput(f"{name}.{key}", f"must be a lane ({lanes}), a point and an operation ({operations})")
    return Lane(lane), Operation(operation)


def _table_from_dict(operation: Operation, data: object) -> OperationLatency:
    entry = require_mapping(operation.value, data, (_KNOTS, _BATCHED_KNOTS, _RESIDUALS), (_KNOTS, _RESIDUALS))
    by_batch: dict[int, list[tuple[Any, ...]]] = {}
    for batch_size, *knot in _rows(_BATCHED_KNOTS, entry.get(_BATCHED_KNOTS, []), 4):
        by_batch.setdefault(require_count(_BATCHED_KNOTS, batch_size, 2), []).append(tuple(knot))
    return OperationLatency(
        operation,
        _table_of_rows(_KNOTS, operation, _rows(_KNOTS, entry[_KNOTS], 3)),
        checked_residuals(_RESIDUALS, operation, entry[_RESIDUALS]),
        {batch_size: _table_of_rows(_BATCHED_KNOTS, operation, rows) for batch_size, rows in by_batch.items()},
    )


def _rows(name: str, rows: object, length: int) -> list[tuple[Any, ...]]:
    listed = [require_entries(name, row) for row in require_entries(name, rows)]
    wrong = [list(row) for row in listed if len(row) != length]
    if wrong:
        raise BadInput(name, f"must have rows of {length} numbers", wrong[0])
    return listed


def _table_of_rows(name: str, operation: Operation, rows: Iterable[Sequence[Any]]) -> dict[int, Knots]:
    """The rows in any order."""
    by_width: dict[int, list[tuple[int, Any]]] = {}
    for width, context, location in rows:
        knot = (require_count(f"{name}: context", context, 0), location)
        by_width.setdefault(require_count(f"{name}: number of tokens", width, 1), []).append(knot)
    ascending = {width: sorted(row, key=itemgetter(0)) for width, row in by_width.items()}
    return _checked_table(name, operation, ascending)


def equally_likely(values: ArrayLike, num: int) -> FloatArray:
    """(<= num,) equally likely values: the sorted `values` in equal shares, each replaced by its mean."""
    ordered = np.sort(np.asarray(values, dtype=float), axis=None)
    if ordered.size <= num:
        return ordered
    if ordered.size % num == 0:
        return ordered.reshape(num, -1).mean(1)
    cumulative = np.concatenate([[0.0], np.cumsum(ordered)])
    edges = np.linspace(0, ordered.size, num + 1)
    return np.diff(np.interp(edges, np.arange(ordered.size + 1), cumulative)) * num / ordered.size


def sum_of_independent(parts: Iterable[FloatArray]) -> FloatArray:
    """(<= NUM_OF_SUM,) equally likely values of the sum of independent parts, each given by equally likely values."""
    total = np.zeros(1)
    for part in parts:
        total = equally_likely(np.add.outer(total, part), NUM_OF_SUM)
    return total


def latest_of(parts: Sequence[FloatArray]) -> FloatArray:
    """(<= NUM_OF_SUM,) equally likely values of the largest of independent parts, each given by equally likely ones."""
    latest = parts[0]
    for part in parts[1:]:
        latest = equally_likely(np.maximum.outer(latest, part), NUM_OF_SUM)
    return latest
