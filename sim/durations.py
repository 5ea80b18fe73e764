"""Durations of single operations, as plain numbers: what the event engine draws from.

A duration is a location (by rows, tokens and context; looked up once and kept) times a residual (one of those of the
operation, all equally likely, from a random stream of the device and the operation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from math import floor
from operator import mul
from typing import NamedTuple

import numpy as np

from sim.errors import BadInput
from sim.latency import OperationLatency
from sim.placement import Placement
from sim.system import System
from sim.trace import Lane, Operation

NOISE_BLOCK = 512  # residuals drawn at a time
MAX_KEPT = 50_000  # tasks kept for another time; bounds memory where a controller tries ever new fan-outs
OPERATIONS = list(Operation)

Residuals = Mapping[Operation, Iterator[float]]  # an endless stream of each operation's residuals


class Step(NamedTuple):
    """One operation on one device, for all its rows together; tokens and context are means per row."""

    operation: Operation
    batch_size: int
    num_tokens: float
    context: float
    location_s: float


@dataclass(frozen=True, slots=True)
class Task:
    """Operations of one device, one after another; `locations_s` are theirs, by kind in the order of work."""

    steps: tuple[Step, ...]
    locations_s: tuple[tuple[Operation, tuple[float, ...]], ...]

    @classmethod
    def of(cls, steps: list[Step]) -> Task:
        """`steps` of one kind stand together."""
        kinds = dict.fromkeys(step.operation for step in steps)
        by_kind = ((kind, tuple(s.location_s for s in steps if s.operation is kind)) for kind in kinds)
        return cls(tuple(steps), tuple(by_kind))

    def seconds(self, residuals: Residuals) -> float:
        """Duration of all of it, one residual drawn for each operation in order."""
        total_s = 0.0
        for operation, locations_s in self.locations_s:
            total_s += sum(map(mul, locations_s, islice(residuals[operation], len(locations_s))))
        return total_s


class Drafted(NamedTuple):
    """What one row has drafted in the open."""

    num_drafted: int
    context: int
    unfed: int  # tokens that the first step takes


class Durations:
    """Locations of everything that target and draft devices do under one placement; the slow-down of work beside the
    other lane's is in those of builds, not in those of verifications."""

    def __init__(self, system: System) -> None:
        self.placement: Placement = system.placement
        self._system = system
        self._tables: dict[Operation, _Locations] = {}  # of the draft
        self._verify = _Locations(system.latency[Lane.TARGET, Operation.VERIFY])
        self._prefills: dict[Lane, _Locations] = {}
        self._builds: dict[tuple[int, int, int, int, int], tuple[Task, ...]] = {}
        self._drafts: dict[Drafted, tuple[Task, ...]] = {}
        self._build_slowdown = system.slowdown(Lane.DRAFT, beside=True)

    def verify_s(self, num_rows: int, num_tokens: int, context: int) -> float:
        """Location of one verification of `num_tokens` tokens on `context` KV entries, both of all rows together."""
        return self._verify.at(num_rows, num_tokens / num_rows, context / num_rows)

    def prefill(self, lane: Lane, num_tokens: int) -> Step:
        """One row's pass over its prompt, or over its text so far."""
        if lane not in self._prefills:
            self._prefills[lane] = _Locations(self._system.latency[lane, Operation.PREFILL])
        return Step(Operation.PREFILL, 1, num_tokens, 0, self._prefills[lane].at(1, num_tokens, 0))

    def drafts(self, rows: list[Drafted]) -> tuple[Task, ...]:
        """Draft steps in the open, a task for each device at work; a row takes part until its tokens are drafted."""
        if len(rows) != 1:
            return self._drafts_of(rows)
        known = self._drafts.get(rows[0])
        if known is None:
            _forget_at(self._drafts, MAX_KEPT)
            known = self._drafts[rows[0]] = self._drafts_of(rows)
        return known

    def _drafts_of(self, rows: list[Drafted]) -> tuple[Task, ...]:
        tasks: dict[int, list[Step]] = {}  # by device
        for index in range(max(row.num_drafted for row in rows)):
            at_work = [row for row in rows if row.num_drafted > index]
            unfed = [row.unfed if index == 0 else 1 for row in at_work]
            entries = sum(row.context for row in at_work) + (index + 1) * len(at_work) - sum(unfed)
            means = (sum(unfed) / len(at_work), entries / len(at_work))
            for device, share in enumerate(self.placement.shares_of_rows(len(at_work))):
                tasks.setdefault(device, []).append(self._step(Operation.DRAFT_STEP, share, *means))
        return tuple(Task.of(steps) for steps in tasks.values())

    def builds(
        self, num_rows: int, num_drafted: int, num_branches: int, context: int, num_steps: int
    ) -> tuple[Task, ...]:
        """A build's glue pass and tree steps, a task for each device at work. Draft tokens, branches and `context` are
        those of all `num_rows` rows together."""
        key = (num_rows, num_drafted, num_branches, context, num_steps)
        known = self._builds.get(key)
        if known is None:
            known = self._builds_of(*key)
            if num_rows == 1:
                _forget_at(self._builds, MAX_KEPT)
                self._builds[key] = known
        return known

    def _builds_of(
        self, num_rows: int, num_drafted: int, num_branches: int, context: int, num_steps: int
    ) -> tuple[Task, ...]:
        glued = (num_drafted + num_rows) / num_rows
        tasks = []
        for rows, branches in self.placement.shares_of_build(num_branches / num_rows, num_rows):
            steps = [self._step(Operation.GLUE, rows, glued, context / num_rows)]
            for index in range(num_steps):
                slots = (context + num_drafted + num_rows) / num_rows + index * branches
                steps.append(self._step(Operation.TREE_STEP, rows, branches, slots))
            tasks.append(Task.of([s._replace(location_s=s.location_s * self._build_slowdown) for s in steps]))
        return tuple(tasks)

    def _step(self, operation: Operation, num_rows: int, num_tokens: float, context: float) -> Step:
        if operation not in self._tables:
            self._tables[operation] = _Locations(self._system.latency[Lane.DRAFT, operation])
        location_s = self._tables[operation].at(num_rows, num_tokens, context)
        return Step(operation, num_rows, num_tokens, context, location_s)


class _Locations:
    """Locations of one operation, kept at whole tokens and contexts and linear between them, as those profiled are."""

    def __init__(self, table: OperationLatency) -> None:
        self._table = table
        self._kept: dict[tuple[int, float, float], float] = {}

    def at(self, num_rows: int, num_tokens: float, context: float) -> float:
        found = self._kept.get((num_rows, num_tokens, context))
        return self._between(num_rows, num_tokens, context) if found is None else found

    def _between(self, num_rows: int, num_tokens: float, context: float) -> float:
        location_s = 0.0
        for tokens, token_share in _whole_around(num_tokens):
            for entries, share in _whole_around(context):
                key = (num_rows, tokens, entries)
                if key not in self._kept:
                    self._kept[key] = _checked(float(self._table.location_s(tokens, entries, num_rows)))
                location_s += token_share * share * self._kept[key]
        return location_s


def _whole_around(value: float) -> list[tuple[int, float]]:
    """The whole numbers next to a value with their shares in it; what rounding left beside one is dropped."""
    below = floor(value + 1e-9)
    share = value - below
    return [(below, 1.0)] if share < 1e-9 else [(below, 1 - share), (below + 1, share)]


def _checked(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise BadInput("duration", "must be finite and >= 0", seconds)
    return seconds


def _forget_at(kept: dict, limit: int) -> None:
    if len(kept) >= limit:
        kept.clear()


class Noise:
    """Residuals of one seed: a stream for every device and operation, spawned from the stream of the lane.

    Decoders that were seen to run at different speeds have residuals of their own, drawn from the same streams.
    """

    def __init__(self, lanes: Mapping[Lane, np.random.Generator]) -> None:
        self._lanes = lanes
        self._generators: dict[tuple[Lane, int, Operation], np.random.Generator] = {}
        self._residuals: dict[tuple[Lane, int, Operation, tuple[float, ...]], Iterator[float]] = {}

    def of(self, system: System, lane: Lane, device: int) -> Residuals:
        """Of one device, for the operations of its lane in `system`."""
        return {
            operation: self._of(lane, device, operation, table.residuals)
            for (of_lane, operation), table in system.latency.operations.items()
            if of_lane is lane
        }

    def _of(self, lane: Lane, device: int, operation: Operation, residuals: tuple[float, ...]) -> Iterator[float]:
        key = (lane, device, operation, residuals)
        if key not in self._residuals:
            blocks = _blocks(self._generator(lane, device, operation), np.array(residuals))
            self._residuals[key] = chain.from_iterable(blocks)
        return self._residuals[key]

    def _generator(self, lane: Lane, device: int, operation: Operation) -> np.random.Generator:
        key = (lane, device, operation)
        if key not in self._generators:
            parent = self._lanes[lane].bit_generator.seed_seq
            assert isinstance(parent, np.random.SeedSequence)
            place = (*parent.spawn_key, device, OPERATIONS.index(operation))
            self._generators[key] = np.random.default_rng(np.random.SeedSequence(parent.entropy, spawn_key=place))
        return self._generators[key]


def _blocks(generator: np.random.Generator, residuals: np.ndarray) -> Iterator[list[float]]:
    while True:
        yield residuals[generator.integers(len(residuals), size=NOISE_BLOCK)].tolist()
