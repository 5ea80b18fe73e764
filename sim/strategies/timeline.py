"""A strategy on simulated clocks (SimPy): rounds drawn one by one, two devices as processes; a check on `long_run`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import simpy

from sim.errors import BadInput
from sim.parametric import ParametricAgreement
from sim.replay import Replay
from sim.replications import Rate, rate_of
from sim.strategies.clock import Batch, RoundClock, placed
from sim.strategies.long_run import contexts_of
from sim.strategies.strategy import DraftWork, RowState, Strategy
from sim.streams import replication_seeds
from sim.system import System
from sim.trace import Lane, Operation
from sim.workload import Workload

WARM_UP = 32  # rounds before those that count: every run begins in the state of a first round


def played(
    strategy: Strategy,
    workload: Workload,
    system: System,
    *,
    seed: int = 0,
    num_runs: int = 16,
    num_rounds: int = 200,
) -> Rate:
    """Tokens/s of all rows over independent runs: outcomes, every operation's duration and the context of each round
    are drawn. Raises `BadInput` on an agreement record and on several draft devices."""
    if not isinstance(system.agreement, ParametricAgreement):
        raise BadInput("agreement", "must be parametric to be played; a record is replayed place by place")
    if system.placement.num_draft_devices > 1:
        raise BadInput("placement.num_draft_devices", "must be 1 to be played", system.placement.num_draft_devices)
    runs = [_Run(strategy, workload, system, each) for each in replication_seeds(seed, num_runs)]
    totals = [run.totals(num_rounds) for run in runs]
    return rate_of([tokens for tokens, _ in totals], [seconds for _, seconds in totals])


class _Run:
    """The rows of one batch, decoded round by round."""

    def __init__(self, strategy: Strategy, workload: Workload, system: System, seed: int) -> None:
        self.states: Sequence[RowState] = strategy.states(system.agreement)
        self.clock = RoundClock(strategy, system, workload.temperature)
        self.system = self.clock.system
        self.contexts = contexts_of(strategy, Replay(system.agreement, workload))
        self.rng = np.random.default_rng(seed)
        self.env = simpy.Environment()
        self.rows = [0] * workload.batch_size
        self.num_tokens = 0

    def totals(self, num_rounds: int) -> tuple[float, float]:
        """Tokens and seconds of the rounds after the warm-up."""
        before = 0.0
        for num in (WARM_UP, num_rounds):
            self.num_tokens, before = 0, self.env.now
            self.env.run(self.env.process(self._rounds(num)))
        return float(self.num_tokens), self.env.now - before

    def _rounds(self, num_rounds: int) -> Generator[simpy.Event, Any, None]:
        for _ in range(num_rounds):
            batch = Batch.of([(self.states[row].work, 1) for row in self.rows])
            context = int(self.rng.choice(self.contexts))
            yield self.env.timeout(self.system.host_s[batch.host])
            yield self.env.process(self._draft(batch.before, context, batch.num_before, beside=False))
            verifying = self._verify(batch, context)
            building = self._draft(batch.beside, context, batch.num_beside, beside=True)
            if self.system.overlaps:
                yield self.env.process(verifying) & self.env.process(building)
            else:
                yield self.env.process(building)
                yield self.env.process(verifying)
            self.rows = [self._outcome(self.states[row]) for row in self.rows]

    def _verify(self, batch: Batch, context: int) -> Generator[simpy.Event, Any, None]:
        """From the speculation's leaving to the outcome's arrival."""
        speculation_s, outcome_s = self.clock.messages_s(batch)
        yield self.env.timeout(speculation_s)
        yield self._operation(Operation.VERIFY, batch.width, context, batch.size, beside=bool(batch.beside))
        yield self.env.timeout(outcome_s)

    def _draft(
        self, works: Sequence[DraftWork], context: int, rows: int, *, beside: bool
    ) -> Generator[simpy.Event, Any, None]:
        for work, offsets in placed(works):
            for at in offsets:
                yield self._operation(work.operation, work.num_tokens, context + at, rows, work.ratio, beside=beside)

    def _operation(
        self, operation: Operation, num_tokens: float, context: float, rows: int, ratio: float = 1.0, *, beside: bool
    ) -> simpy.Event:
        lane = Lane.TARGET if operation is Operation.VERIFY else Lane.DRAFT
        samples_s = self.system.samples_s(lane, operation, num_tokens, context, beside=beside, batch_size=rows)
        return self.env.timeout(ratio * float(self.rng.choice(samples_s)))

    def _outcome(self, state: RowState) -> int:
        """The next state of a row."""
        num_tokens, after = divmod(int(self.rng.choice(state.moves.size, p=state.moves.ravel())), state.moves.shape[1])
        self.num_tokens += num_tokens
        return after
