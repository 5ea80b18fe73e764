"""A strategy in the long run: a Markov chain over the states of a row, and what rounds emit and take on average."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.batch_chain import stationary
from sim.errors import BadInput
from sim.parametric import ParametricAgreement
from sim.replay import Replay
from sim.strategies.clock import RoundClock
from sim.strategies.strategy import RoundWork, RowState, Strategy
from sim.system import System
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

NEGLIGIBLE = 1e-12  # of a probability: rounds that are as rare take no part in a mean


@dataclass(frozen=True)
class LongRun:
    """`tokens_per_round` are those of a row, `round_s` the mean time of a round of the batch, `shares` how often a row
    is in which state; `tokens_per_s` counts all rows."""

    tokens_per_s: float
    tokens_per_round: float
    round_s: float
    shares: dict[str, float]


def long_run(strategy: Strategy, workload: Workload, system: System) -> LongRun:
    """Tokens over seconds of long texts (renewal reward), averaged over the contexts of the workload's texts.

    Rows have independent states and outcomes; what they wait for together is the time of the batch's round. First
    rounds, and rounds and batches that end early at the end of a text, are left out. Raises `BadInput` on an agreement
    record, which is followed place by place (`sim.strategies.replayed`).
    """
    return SteadyState.of(strategy, system.agreement).timed(workload, system)


@dataclass(frozen=True)
class SteadyState:
    """The states of a row and how often it is in each, whatever time they take."""

    strategy: Strategy
    states: tuple[RowState, ...]
    share: FloatArray

    @classmethod
    def of(cls, strategy: Strategy, agreement: Agreement) -> SteadyState:
        """Raises `BadInput` on an agreement record."""
        if not isinstance(agreement, ParametricAgreement):
            raise BadInput("agreement", "must be parametric in the long run; a record is replayed place by place")
        states = strategy.states(agreement)
        return cls(strategy, states, stationary(np.stack([state.moves.sum(0) for state in states])))

    @property
    def tokens_per_round(self) -> float:
        """Of a row."""
        emitted = [np.arange(len(state.moves)) @ state.moves.sum(1) for state in self.states]
        return float(self.share @ emitted)

    def timed(self, workload: Workload, system: System) -> LongRun:
        """In batches of the workload, on a system of the same agreement."""
        contexts = contexts_of(self.strategy, Replay(system.agreement, workload))
        clock = RoundClock(self.strategy, system, workload.temperature)
        round_s = 0.0
        for rows, chance in _batches(self.states, self.share, workload.batch_size):
            seconds = clock.of(rows, contexts)
            round_s += chance * float((seconds.always_s + seconds.onward_s).mean())
        shares = {state.name: float(s) for state, s in zip(self.states, self.share, strict=True)}
        rate = workload.batch_size * self.tokens_per_round / round_s
        return LongRun(rate, self.tokens_per_round, round_s, shares)


def contexts_of(strategy: Strategy, replay: Replay) -> IntArray:
    """Of rounds that neither the prefill nor the length cap touches."""
    K = strategy.num_drafted
    contexts = replay.contexts_with_room(K)[K + 1 :]
    if not len(contexts):
        rule = f"must leave room for two rounds of {K} draft tokens"
        raise BadInput("workload.max_new_tokens", rule, replay.cap)
    return contexts


def _batches(
    states: Sequence[RowState], share: FloatArray, size: int
) -> Iterator[tuple[list[tuple[RoundWork, int]], float]]:
    """Every way in which rows of a batch can do works, and its probability."""
    chances: dict[RoundWork, float] = {}
    for state, chance in zip(states, share, strict=True):
        chances[state.work] = chances.get(state.work, 0.0) + float(chance)
    works = list(chances)
    for counts in _compositions(size, len(works)):
        chance = _multinomial(counts, list(chances.values()))
        if chance > NEGLIGIBLE:
            yield list(zip(works, counts, strict=True)), chance


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for others in _compositions(total - first, parts - 1):
            yield (first, *others)


def _multinomial(counts: Sequence[int], chances: Sequence[float]) -> float:
    ways = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    return ways * math.prod(chance**num for chance, num in zip(chances, counts, strict=True))
