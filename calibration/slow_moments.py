"""Short runs that met a slow moment of the machine.

A profile is to say how fast decoding usually is. Its short runs are few and take seconds; where another process holds a
core for one of those, SD and SSD, whose roles wait for each other, take several times as long, and a mean over all runs
would be of that moment. So the prompts are decoded at moments all over the profile, each under every policy, and those
that were slow under most of them are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.trace import Trace

FEWEST_MOMENTS = 4  # with fewer nobody can say which of them was slow
SLOW = 1.5  # times the usual time of a round; texts alone differ by less, in what a miss costs


@dataclass(frozen=True)
class Moment:
    """A batch of prompts that was decoded under every policy at one moment of the profile: the number of the run that
    holds it, its number there, and how long a round took over the usual, in the median of the policies."""

    run: int
    batch: int
    level: float

    @property
    def is_slow(self) -> bool:
        return self.level > SLOW


def moments(traces: Sequence[Trace]) -> list[Moment]:
    """In the order of the profile, which has as many traces of each of its policies."""
    rounds_s: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for trace in traces:
        of_policy = rounds_s[str(trace.policy)]
        run = 1 + max((run for run, _ in of_policy), default=-1)
        of_policy.update({(run, batch): seconds for batch, seconds in _round_s(trace).items()})
    levels: dict[tuple[int, int], list[float]] = defaultdict(list)
    for of_policy in rounds_s.values():
        usual_s = float(np.median(list(of_policy.values())))
        for place, seconds in of_policy.items():
            levels[place].append(seconds / usual_s)
    return [Moment(*place, float(np.median(own))) for place, own in sorted(levels.items())]


def usual_runs(traces: Sequence[Trace]) -> list[Trace]:
    """The traces without slow moments; all of them where moments are too few to tell."""
    found = moments(traces)
    if len(found) < FEWEST_MOMENTS:
        return list(traces)
    slow = {(moment.run, moment.batch) for moment in found if moment.is_slow}
    runs: dict[str, int] = defaultdict(int)
    kept = []
    for trace in traces:
        run = runs[str(trace.policy)]
        runs[str(trace.policy)] += 1
        kept.append(_without(trace, {batch for of_run, batch in slow if of_run == run}) if slow else trace)
    return kept


def remarks(traces: Sequence[Trace]) -> list[str]:
    """What a reader must know of the moments; empty of a steady profile."""
    found = moments(traces)
    slow = [moment.level for moment in found if moment.is_slow]
    if len(found) >= FEWEST_MOMENTS and slow:
        level = float(np.median(slow))
        return [
            f"{len(slow)} of {len(found)} short runs met a moment in which rounds took {level:.1f} times as long as"
            " usual; they are left out of ratios in runs and of host times"
        ]
    fastest, slowest = (of((m.level for m in found), default=1.0) for of in (min, max))
    if len(found) < FEWEST_MOMENTS and slowest > SLOW * fastest:
        return [
            f"rounds of one short run took {slowest / fastest:.1f} times as long as those of another, and"
            f" {len(found)} are too few to tell which is usual: forecasts may be off as much"
        ]
    return []


def _round_s(trace: Trace) -> dict[int, float]:
    """Mean seconds of a round, by batch; those of a batch's rows end together and count once."""
    size = trace.workload["batch_size"]
    ends: dict[int, set[float]] = defaultdict(set)
    for r in trace.rounds:
        ends[r.sequence // size].add(r.end_s)
    first_s: dict[int, float] = {}
    for s in trace.sequences:
        batch = s.index // size
        first_s[batch] = min(s.decode_start_s, first_s.get(batch, s.decode_start_s))
    return {batch: (max(own) - first_s[batch]) / len(own) for batch, own in ends.items()}


def _without(trace: Trace, batches: Iterable[int]) -> Trace:
    size, dropped = trace.workload["batch_size"], set(batches)
    gone = {s.index for s in trace.sequences if s.index // size in dropped}
    return replace(
        trace,
        sequences=[s for s in trace.sequences if s.index not in gone],
        rounds=[r for r in trace.rounds if r.sequence not in gone],
        spans=[s for s in trace.spans if s.sequence not in gone],
    )
