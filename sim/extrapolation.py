"""Tables of latencies continued beyond what was profiled: monotone there, never below the last that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Knots = tuple[tuple[int, float], ...]  # (context, location_s), contexts ascending
Table = Mapping[int, Knots]  # by tokens of each row

REACH = 16  # times the largest profiled number; nothing is said beyond


def extended(tables: Mapping[int, Table]) -> dict[int, dict[int, Knots]]:
    """Tables by number of rows, with knots for less and for up to `REACH` times more context, tokens and rows.

    Beyond the last of at least two profiled numbers the location goes on with the steeper of two slopes, the last one
    and that from the first number to the last, and never falls: a table whose end happens to be flat has steps ahead.
    Below the first profiled number the location is that of the first. What was profiled at a single number, or not at
    the same contexts, stays as it was: it has no slope.
    """
    longer = {rows: {width: _longer(knots) for width, knots in table.items()} for rows, table in tables.items()}
    wider = {rows: _wider(table) for rows, table in longer.items()}
    return _with_more_rows(wider)


def _beyond(numbers: Sequence[int], at: Callable[[int], FloatArray]) -> FloatArray:
    """Location at `REACH` times the last of at least two ascending numbers."""
    first, before, last = numbers[0], numbers[-2], numbers[-1]
    slopes = [(at(last) - at(number)) / (last - number) for number in (before, first)]
    return at(last) + np.maximum(0.0, np.maximum(*slopes)) * (REACH - 1) * last


def _longer(knots: Knots) -> Knots:
    if len(knots) < 2:
        return knots
    location_s = dict(knots)
    far_s = float(_beyond(list(location_s), lambda context: np.array(location_s[context])))
    (first, first_s), (last, _) = knots[0], knots[-1]
    return (*(((0, first_s),) if first else ()), *knots, (REACH * last, far_s))


def _wider(table: Mapping[int, Knots]) -> dict[int, Knots]:
    widths = sorted(table)
    contexts = _shared_contexts([table[width] for width in _deciding(widths)])
    if len(widths) < 2 or not contexts:
        return dict(table)
    found = dict(table)
    if widths[0] > 1:
        found[1] = table[widths[0]]
    far_s = _beyond(widths, lambda width: _at_contexts(table[width], contexts))
    found[REACH * widths[-1]] = _knots(contexts, far_s)
    return found


def _with_more_rows(tables: dict[int, dict[int, Knots]]) -> dict[int, dict[int, Knots]]:
    rows = sorted(tables)
    deciding = [tables[number] for number in _deciding(rows)]
    widths = _within_all([sorted(table) for table in deciding])
    contexts = _shared_contexts([knots for table in deciding for knots in table.values()])
    if len(rows) < 2 or not widths or not contexts:
        return tables

    def far_s(width: int) -> FloatArray:
        return _beyond(rows, lambda number: _at_width(tables[number], width, contexts))

    return tables | {REACH * rows[-1]: {width: _knots(contexts, far_s(width)) for width in widths}}


def _deciding(numbers: Sequence[int]) -> set[int]:
    """Those that the slope beyond the last depends on."""
    return {numbers[0], *numbers[-2:]}


def _shared_contexts(rows: Sequence[Knots]) -> list[int]:
    return _within_all([[context for context, _ in knots] for knots in rows])


def _within_all(axes: Sequence[Sequence[int]]) -> list[int]:
    """Every number of some axis that lies inside all of them; axes ascend."""
    low, high = max(axis[0] for axis in axes), min(axis[-1] for axis in axes)
    return sorted({number for axis in axes for number in axis if low <= number <= high})


def _at_width(table: Table, width: int, contexts: Sequence[int]) -> FloatArray:
    widths = np.array(sorted(table))
    below, above = int(widths[widths <= width].max()), int(widths[widths >= width].min())
    share = (width - below) / max(1, above - below)
    return (1 - share) * _at_contexts(table[below], contexts) + share * _at_contexts(table[above], contexts)


def _at_contexts(knots: Knots, contexts: Sequence[int]) -> FloatArray:
    known, locations_s = zip(*knots, strict=True)
    return np.interp(contexts, known, locations_s)


def _knots(contexts: Sequence[int], locations_s: FloatArray) -> Knots:
    return tuple(zip(contexts, locations_s.tolist(), strict=True))
