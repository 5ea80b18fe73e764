"""How long rounds take: the works of all rows of a batch on a system's devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.latency import latest_of, sum_of_independent
from sim.mean_times import VERIFY, Lateness
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative
from sim.strategies.strategy import DraftWork, RoundWork, Strategy
from sim.system import HostTerm, System
from sim.trace import Lane, Operation

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

NUM_KNOTS = 9  # contexts at which a mean delay is evaluated; it is linear between them
Rows = Sequence[tuple[RoundWork, int]]  # how many rows of a batch have a round of such work


def system_of(strategy: Strategy, system: System) -> System:
    """The system with the residuals of runs of the decoder that is most like the strategy."""
    like: Policy = Autoregressive()
    if strategy.drafts_beside:
        like = SpeculativeSpeculative(1, (1, 1), (1, 1))
    elif strategy.num_drafted:
        like = Speculative(1)
    return system.as_run_by(like)


@dataclass(frozen=True)
class RoundSeconds:
    """(contexts,) `always_s` of every round; `onward_s` is added where the sequence goes on: the message of the
    outcome, and the delay by work that is late."""

    always_s: FloatArray
    onward_s: FloatArray


class RoundClock:
    """Mean times of a strategy's rounds, from the start of its host time to that of the next."""

    def __init__(self, strategy: Strategy, system: System, temperature: float) -> None:
        if system.placement.num_targets > 1:
            rule = "must be 1: strategies are followed on one target"
            raise BadInput("placement.num_targets", rule, system.placement.num_targets)
        self.system = system_of(strategy, system)
        self.has_draft = strategy.num_drafted > 0 or strategy.drafts_beside
        self.sampled = temperature > 0

    def of(self, rows: Rows, contexts: IntArray) -> RoundSeconds:
        """Rounds of a batch whose rows stand at the same context."""
        batch = Batch.of(rows)
        message_s, outcome_s = self.messages_s(batch)
        always_s = self.system.host_s[batch.host] + message_s + self._verify_s(batch, contexts)
        always_s = always_s + self._mean_s(batch.before, contexts, batch.num_before, beside=False)
        if not self.system.overlaps:
            always_s = always_s + self._mean_s(batch.beside, contexts, batch.num_beside, beside=False)
            return RoundSeconds(always_s, np.full(len(contexts), outcome_s))
        return RoundSeconds(always_s, outcome_s + self._late_s(batch, message_s + outcome_s, contexts))

    def messages_s(self, batch: Batch) -> tuple[float, float]:
        """Of the speculation to the target, and of the outcome back."""
        if not self.has_draft:
            return 0.0, 0.0
        placement = self.system.placement
        return placement.speculation_s(batch.num_drafted, sampled=self.sampled), placement.outcome_s(batch.size)

    def _verify_s(self, batch: Batch, contexts: IntArray) -> FloatArray:
        beside = bool(batch.beside)
        return self.system.mean_s(*VERIFY, batch.width, contexts, beside=beside, batch_size=batch.size)

    def _mean_s(self, works: Sequence[DraftWork], contexts: IntArray, rows: int, *, beside: bool) -> FloatArray:
        """(contexts,) of works one after another."""
        if not works:
            return np.zeros(len(contexts))
        shares = self.shares(works, rows, beside=beside)
        if len(shares) > 1:
            knots = _knots(contexts)
            means = [self.samples_s(works, int(at), rows, beside=beside).mean() for at in knots]
            return np.interp(contexts, knots, means)
        return np.sum(
            [
                work.ratio
                * self.system.mean_s(
                    Lane.DRAFT, work.operation, work.num_tokens, contexts + at, beside=beside, batch_size=shares[0][0]
                )
                for work, offsets in placed(works)
                for at in offsets
            ],
            axis=0,
        )

    def _late_s(self, batch: Batch, message_s: float, contexts: IntArray) -> FloatArray:
        """(contexts,) mean delay of the next round by work beside the verification."""
        if not batch.beside:
            return np.zeros(len(contexts))
        if self._is_certain:
            verify_s = self._verify_s(batch, contexts)
            beside_s = self._mean_s(batch.beside, contexts, batch.num_beside, beside=True)
            return np.maximum(0.0, beside_s - verify_s - message_s)
        knots = _knots(contexts)
        return np.interp(contexts, knots, [self._late_at(batch, message_s, int(context)) for context in knots])

    def _late_at(self, batch: Batch, message_s: float, context: int) -> float:
        outcome_s = self.system.samples_s(*VERIFY, batch.width, context, beside=True, batch_size=batch.size)
        done_s = self.samples_s(batch.beside, context, batch.num_beside, beside=True)
        return float(Lateness(message_s + outcome_s, np.zeros(1)).mean_s(done_s))

    @property
    def _is_certain(self) -> bool:
        """Whether nothing varies, so that a mean delay is the delay of the means."""
        tables = self.system.latency.operations.values()
        return self.system.placement.num_draft_devices == 1 and all(len(table.residuals) == 1 for table in tables)

    def shares(self, works: Sequence[DraftWork], rows: int, *, beside: bool) -> list[tuple[int, float]]:
        """(rows, share of the branches of each) of every draft device at work."""
        placement = self.system.placement
        branches = next((work.num_tokens for work in works if work.operation is Operation.TREE_STEP), 0.0)
        if not beside or not branches:
            return [(share, 1.0) for share in placement.shares_of_rows(rows)]
        return [(share, part / branches) for share, part in placement.shares_of_build(branches, rows)]

    def samples_s(self, works: Sequence[DraftWork], context: int, rows: int, *, beside: bool) -> FloatArray:
        """Equally likely durations of works one after another; the slowest device decides."""
        devices = [
            sum_of_independent(self._parts_s(_of_share(works, part), context, share))
            for share, part in self.shares(works, rows, beside=beside)
        ]
        return latest_of(devices) * self.system.slowdown(Lane.DRAFT, beside=beside)

    def _parts_s(self, works: Sequence[DraftWork], context: int, rows: int) -> Iterator[FloatArray]:
        for work, offsets in placed(works):
            table = self.system.latency[Lane.DRAFT, work.operation]
            yield work.ratio * table.sum_samples_s(work.num_tokens, context + np.asarray(offsets), rows)


@dataclass(frozen=True)
class Batch:
    """What the rows of a batch do together: counts are means over the rows that take part."""

    size: int
    num_drafted: int  # of all rows
    host: HostTerm
    before: tuple[DraftWork, ...]
    num_before: int
    beside: tuple[DraftWork, ...]
    num_beside: int

    @classmethod
    def of(cls, rows: Rows) -> Batch:
        rows = [(work, num) for work, num in rows if num]
        befores = [(work.before, num) for work, num in rows if work.before]
        besides = [(work.beside, num) for work, num in rows if work.beside]
        return cls(
            size=sum(num for _, num in rows),
            num_drafted=sum(work.num_drafted * num for work, num in rows),
            host=_host_of({work.host for work, _ in rows}),
            before=_together(befores),
            num_before=sum(num for _, num in befores),
            beside=_together(besides),
            num_beside=sum(num for _, num in besides),
        )

    @property
    def width(self) -> float:
        """Tokens that each row verifies."""
        return self.num_drafted / self.size + 1


def _host_of(terms: set[HostTerm]) -> HostTerm:
    """A row without a prepared speculation makes all of them wait."""
    missed = terms & {HostTerm.MISS, HostTerm.UNDRAFTED_MISS}
    return next(iter(missed or terms))


def _together(works: Sequence[tuple[tuple[DraftWork, ...], int]]) -> tuple[DraftWork, ...]:
    """Works of several rows as one, each operation over the mean of their tokens. Raises `BadInput` if they are not of
    the same operations."""
    if len({tuple(work.kind for work in row) for row, _ in works}) > 1:
        raise BadInput("works", "must be of the same operations for all rows of a batch")
    total = sum(num for _, num in works)
    return tuple(
        replace(
            column[0], num_tokens=sum(w.num_tokens * num for w, (_, num) in zip(column, works, strict=True)) / total
        )
        for column in zip(*(row for row, _ in works), strict=True)
    )


def _of_share(works: Sequence[DraftWork], part: float) -> list[DraftWork]:
    """What one device does of a build: it runs the glue pass, and its part of the branches."""
    return [replace(w, num_tokens=w.num_tokens * part) if w.operation is Operation.TREE_STEP else w for w in works]


def placed(works: Sequence[DraftWork]) -> Iterator[tuple[DraftWork, list[float]]]:
    """Each work and how far behind the round's context its operations stand: each follows the tokens of those before.

    A first draft step ends with the pending token, whatever it has to catch up with.
    """
    at = 1.0 - works[0].num_tokens if works and works[0].operation is Operation.DRAFT_STEP else 0.0
    for work in works:
        yield work, [at + work.num_tokens * step for step in range(work.num_times)]
        at += work.num_tokens * work.num_times


def _knots(contexts: IntArray) -> FloatArray:
    return np.unique(np.linspace(contexts.min(), contexts.max(), NUM_KNOTS).round())
