"""What the roles cost each other: steps alone and beside the other role, and what working side by side is worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from sim.latency import LatencySample
from sim.trace import Lane, Operation

STEPS = (
    (Lane.TARGET, Operation.VERIFY),
    (Lane.DRAFT, Operation.GLUE),
    (Lane.DRAFT, Operation.TREE_STEP),
    (Lane.DRAFT, Operation.DRAFT_STEP),
)
LITTLE_HIDDEN, LITTLE_GAINED = 0.1, 1.1  # below either, the roles may as well take turns


@dataclass(frozen=True)
class StepTime:
    """Median times of an operation in its largest cell, alone and beside the other role at work."""

    lane: Lane
    operation: Operation
    batch_size: int
    num_tokens: int  # of each row
    context: int
    alone_s: float
    beside_s: float


@dataclass(frozen=True)
class SideBySide:
    """`gain`: the work that the roles do side by side over what they do in the same time one after the other. 2 where
    neither slows the other, 1 where they take turns."""

    steps: tuple[StepTime, ...]
    gain: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def side_by_side(samples: Sequence[LatencySample]) -> SideBySide | None:
    """From the samples of a profile; None if it has none of a role at work beside the other.

    A role that takes s times as long in company does 1/s of its work, so that the gain is the sum of both 1/s; s is the
    median ratio over all cells of an operation that works beside the other role in every round.
    """
    cells: dict[tuple[Lane, Operation], dict[tuple[int, int, int], dict[bool, list[float]]]] = {}
    for s in samples:
        by_size = cells.setdefault((s.lane, s.operation), defaultdict(lambda: {False: [], True: []}))
        by_size[s.batch_size, s.num_tokens, s.context][s.busy].append(s.duration_s)
    times = {key: both for key in STEPS if key in cells and (both := _in_both_states(cells[key]))}
    ratios = {
        lane: [beside / alone for key, by_size in times.items() if key[0] is lane for alone, beside in by_size.values()]
        for lane in Lane
    }
    if not all(ratios.values()):
        return None
    steps = (StepTime(*key, *(size := max(by_size)), *by_size[size]) for key, by_size in times.items())
    return SideBySide(tuple(steps), sum(1 / median(own) for own in ratios.values()))


def _in_both_states(
    by_size: Mapping[tuple[int, int, int], Mapping[bool, Sequence[float]]],
) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Medians alone and in company, of the sizes that were timed in both."""
    return {size: (median(t[False]), median(t[True])) for size, t in by_size.items() if t[False] and t[True]}


def lack_of_overlap(hidden: float | None, found: SideBySide | None) -> str | None:
    """What to say if the roles, though they run side by side, might as well take turns; `hidden` is the fraction of the
    build's time during which the target verified."""
    if hidden is None:
        return None
    measured = f"{100 * hidden:.0f} % of the build's time lay beside a verification"
    if hidden < LITTLE_HIDDEN:
        return f"no overlap achieved: {measured}."
    if found is not None and found.gain < LITTLE_GAINED:
        slowed = f"but side by side the roles do only {found.gain:.2f} times the work that they do in turns"
        return f"no overlap achieved: {measured}, {slowed}."
    return None
