"""How long operations take: a table of measured locations with empirical residuals, and the range it covers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.errors import BadInput
from sim.trace import Lane, Operation

FloatArray = NDArray[np.float64]
Knots = tuple[tuple[int, float], ...]  # (context, location_s), contexts ascending

NUM_RESIDUALS = 40  # equally likely ratios that stand for the spread of an operation's durations
NUM_OF_SUM = 160  # equally likely values that stand for the distribution of a sum


@dataclass(frozen=True, slots=True)
class LatencySample:
    """One timed operation of a profiling run.

    `context` is the number of KV entries before it, `busy` whether the other role worked at the same time, `block` the
    interleaved block it belongs to (blocks are in time order: drift shows between them).
    """

    lane: Lane
    operation: Operation
    num_tokens: int
    context: int
    busy: bool
    block: int
    duration_s: float


@dataclass(frozen=True)
class OperationLatency:
    """Latency of one operation: location at knots of (num_tokens, context), and ratios to it that are equally likely.

    `knots[num_tokens]` is a tuple of (context, location_s), contexts ascending, of one row; `batched[b][num_tokens]`
    the same of b >= 2 rows, with the tokens of each row. Between knots the location is linear, over rows too; outside
    them there is no answer.
    """

    operation: Operation
    knots: Mapping[int, Knots]
    residuals: tuple[float, ...]
    batched: Mapping[int, Mapping[int, Knots]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.knots or not self.residuals:
            raise BadInput(f"latency of {self.operation.value}", "must have at least one knot and one residual")
        if any(batch_size < 2 for batch_size in self.batched):
            raise BadInput(f"latency of {self.operation.value}", "batched tables are of two rows or more")
        tables = [self.knots, *self.batched.values()]
        locations = [location for table in tables for knots in table.values() for _, location in knots]
        values = locations + list(self.residuals)
        bad = [value for value in values if not (np.isfinite(value) and value >= 0)]
        if bad:
            raise BadInput(f"latency of {self.operation.value}", "must be finite and >= 0", bad[0])

    @cached_property
    def mean_residual(self) -> float:
        return float(np.mean(self.residuals))

    def location_s(self, num_tokens: float, context: ArrayLike, batch_size: int = 1) -> FloatArray:
        """Location at the contexts given (any shape), in seconds, of `batch_size` rows of `num_tokens` tokens each.

        Where rows differ, `num_tokens` and `context` are their means. Raises `BadInput` outside the covered range.
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
            rule = f"{what} must be in the profiled range {known[0]}..{known[-1]}"
            raise BadInput(f"latency of {self.operation.value}", rule, wanted)
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
            rule = f"context must be in the profiled range {contexts[0]}..{contexts[-1]}"
            raise BadInput(f"latency of {self.operation.value} at {width} tokens", rule, int(outside.flat[0]))
        return np.interp(wanted, contexts, locations)

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


@dataclass(frozen=True)
class LatencyModel:
    """Latency of every operation of either lane, with the other lane idle."""

    operations: Mapping[tuple[Lane, Operation], OperationLatency]

    def __getitem__(self, key: tuple[Lane, Operation]) -> OperationLatency:
        if key not in self.operations:
            known = ", ".join(sorted(f"{lane.value} {operation.value}" for lane, operation in self.operations))
            raise BadInput(f"latency of {key[0].value} {key[1].value}", f"was not profiled; known: {known}")
        return self.operations[key]

    def to_dict(self) -> dict[str, Any]:
        return {
            f"{lane.value}.{operation.value}": {
                "knots_num_tokens_context_s": [
                    [width, context, location]
                    for width, row in sorted(table.knots.items())
                    for context, location in row
                ],
                "batched_knots_rows_num_tokens_context_s": [
                    [batch_size, width, context, location]
                    for batch_size, knots in sorted(table.batched.items())
                    for width, row in sorted(knots.items())
                    for context, location in row
                ],
                "residual_ratios": list(table.residuals),
            }
            for (lane, operation), table in self.operations.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyModel:
        """Inverse of `to_dict`."""
        operations = {}
        for name, entry in data.items():
            lane, operation = name.split(".")
            by_batch: dict[int, list[list[float]]] = {}
            for batch_size, *knot in entry.get("batched_knots_rows_num_tokens_context_s", []):
                by_batch.setdefault(int(batch_size), []).append(knot)
            key = (Lane(lane), Operation(operation))
            operations[key] = OperationLatency(
                key[1],
                _knots(entry["knots_num_tokens_context_s"]),
                tuple(entry["residual_ratios"]),
                {batch_size: _knots(rows) for batch_size, rows in by_batch.items()},
            )
        return cls(operations)


def _knots(rows: Iterable[Sequence[float]]) -> dict[int, Knots]:
    by_width: dict[int, list[tuple[int, float]]] = {}
    for width, context, location in rows:
        by_width.setdefault(int(width), []).append((int(context), float(location)))
    return {width: tuple(sorted(row)) for width, row in by_width.items()}


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


def mean_of_maximum(first: FloatArray, second: FloatArray) -> float:
    """E[max(X, Y)] of independent X and Y given by their equally likely values."""
    return float(np.maximum.outer(first, second).mean())
