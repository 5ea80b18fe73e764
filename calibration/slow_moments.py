"""Short runs that met a slow moment of the machine.

Runs that are to say how fast decoding usually is are few and take seconds. Where another process holds a core for one
of those, SD and SSD, whose roles wait for each other, take several times as long; which policy meets such a moment is
chance, and the mean of its few runs would be of that moment. So runs are spread over the time that they speak for,
those that met a slow moment are left out, and what such moments cost is shared by all policies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.trace import Trace

FEWEST_PIECES = 4  # of a policy; with fewer nobody can say which of them was slow
SLOW = 1.5  # times the usual time of a round; texts alone differ by less, in what a miss costs


@dataclass(frozen=True)
class Piece:
    """A batch of prompts under a policy: the numbers of its trace and of its batch there, and how long a round took
    over the median of all pieces of the policy in batches of that size."""

    trace: int
    batch: int
    level: float


def pieces(traces: Sequence[Trace]) -> list[Piece]:
    """Of all traces; of a policy that has too few of them the level is 1."""
    rounds_s: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for number, trace in enumerate(traces):
        policy = f"{trace.policy} in batches of {trace.workload['batch_size']}"
        rounds_s[policy] |= {(number, batch): seconds for batch, seconds in _round_s(trace).items()}
    return [piece for own in rounds_s.values() for piece in _pieces_of(own)]


def _pieces_of(rounds_s: Mapping[tuple[int, int], float]) -> Iterator[Piece]:
    usual_s = float(np.median(list(rounds_s.values())))
    for place, seconds in rounds_s.items():
        yield Piece(*place, seconds / usual_s if len(rounds_s) >= FEWEST_PIECES else 1.0)


def usual_runs(traces: Sequence[Trace]) -> list[Trace]:
    """The traces without the pieces that met a slow moment, and with a clock that runs slower by what these cost all
    policies together."""
    found = pieces(traces)
    slow = [(piece.trace, piece.batch) for piece in found if piece.level > SLOW]
    if not slow:
        return list(traces)
    levels = np.array([piece.level for piece in found])
    factor = float(levels.mean() / levels[levels <= SLOW].mean())
    return [
        _stretched(_without(trace, [batch for of_trace, batch in slow if of_trace == number]), factor)
        for number, trace in enumerate(traces)
    ]


def remarks(traces: Sequence[Trace]) -> list[str]:
    """What a reader must know of the moments; empty of a steady profile."""
    levels = [piece.level for piece in pieces(traces)]
    slow = [level for level in levels if level > SLOW]
    found = []
    if slow:
        found.append(
            f"{len(slow)} of {len(levels)} short runs met a moment in which rounds took {np.median(slow):.1f} times as"
            " long as usual; what that cost is shared by all policies"
        )
    if any(len(_round_s(trace)) < FEWEST_PIECES for trace in traces):
        found.append(f"there are fewer than {FEWEST_PIECES} short runs of a policy: a slow one would not be noticed")
    return found


def _round_s(trace: Trace) -> dict[int, float]:
    """Mean seconds of a round, by batch; those of a batch's rows end together and count once."""
    size = trace.workload["batch_size"]
    ends: dict[int, set[float]] = defaultdict(set)
    for r in trace.rounds:
        ends[r.sequence // size].add(r.end_s)
    first_s: dict[int, float] = {}
    for s in trace.sequences:
        first_s[s.index // size] = min(s.decode_start_s, first_s.get(s.index // size, s.decode_start_s))
    return {batch: (max(own) - first_s[batch]) / len(own) for batch, own in ends.items()}


def _without(trace: Trace, batches: Collection[int]) -> Trace:
    size = trace.workload["batch_size"]

    def is_kept(sequence: int) -> bool:
        return sequence // size not in batches

    return replace(
        trace,
        sequences=[s for s in trace.sequences if is_kept(s.index)],
        rounds=[r for r in trace.rounds if is_kept(r.sequence)],
        spans=[s for s in trace.spans if is_kept(s.sequence)],
    )


def _stretched(trace: Trace, factor: float) -> Trace:
    """The same on a clock on which all takes `factor` times as long."""
    return replace(
        trace,
        rounds=[replace(r, start_s=r.start_s * factor, end_s=r.end_s * factor) for r in trace.rounds],
        spans=[replace(s, start_s=s.start_s * factor, end_s=s.end_s * factor) for s in trace.spans],
        sequences=[
            replace(
                s,
                prefill_start_s=s.prefill_start_s * factor,
                decode_start_s=s.decode_start_s * factor,
                end_s=s.end_s * factor,
            )
            for s in trace.sequences
        ],
    )
