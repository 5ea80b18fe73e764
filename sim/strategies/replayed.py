"""A strategy on texts, place by place: expectation of one row over an agreement record, with finite texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.expectation import Expectation
from sim.replay import Replay
from sim.strategies.clock import RoundClock
from sim.strategies.strategy import RoundWork, RowState, Strategy
from sim.system import System
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def replayed(strategy: Strategy, workload: Workload, system: System) -> Expectation:
    """Expected totals of every prompt: a forward recursion over (tokens emitted, state of the row).

    As in `sim.recursion`, rounds near the length cap verify less and the last possible one prepares nothing. Raises
    `BadInput` on batches, whose rows would wait for each other, and where the agreement does not tell the strategy's
    law.
    """
    if workload.batch_size > 1:
        rule = "must be 1 where a strategy is replayed: rows of a batch wait for each other"
        raise BadInput("workload.batch_size", rule, workload.batch_size)
    replay = Replay(system.agreement, workload)
    stretches = _stretches(strategy, replay)
    mass, hits = _masses(stretches, replay)
    clock = RoundClock(strategy, system, workload.temperature)
    seconds = np.zeros(replay.num_prompts)
    for stretch in stretches:
        seconds += _seconds(stretch, mass, replay, clock)
    if not strategy.drafts_beside:
        nothing = np.zeros_like(hits)
        return Expectation(replay.num_tokens(), mass.sum((0, 2)), seconds, nothing, nothing)
    lookups = np.zeros_like(hits)
    for stretch in stretches:
        lookups += _lookups(stretch, mass)
    return Expectation(replay.num_tokens(), mass.sum((0, 2)), seconds, lookups, hits)


@dataclass(frozen=True)
class _Stretch:
    """Places where rounds start that have equally much room below the cap. `moves` is (states, tokens + 1, next states,
    num_prompts, places)."""

    places: slice
    works: tuple[RoundWork, ...]
    moves: FloatArray
    left: IntArray  # (num_prompts, places) tokens that the text has left

    @property
    def onward(self) -> FloatArray:
        """The moves after which the sequence goes on."""
        num_tokens = np.arange(self.moves.shape[1])[:, None, None, None]
        return self.moves * (num_tokens < self.left)

    @property
    def goes_on(self) -> FloatArray:
        """(states, num_prompts, places) probability that it does."""
        return self.onward.sum((1, 2))


def _stretches(strategy: Strategy, replay: Replay) -> list[_Stretch]:
    K = strategy.num_drafted
    full = slice(1, max(1, min(replay.longest, replay.cap - K)))
    short = [slice(start, start + 1) for start in range(full.stop, replay.longest)]
    stretches = [_stretch(strategy, full, replay)] if full.stop > full.start else []
    return stretches + [_stretch(strategy.shortened(replay.cap - places.start - 1), places, replay) for places in short]


def _stretch(strategy: Strategy, places: slice, replay: Replay) -> _Stretch:
    states = strategy.states(replay.agreement)
    num_places = places.stop - places.start
    left = np.maximum(0, replay.lengths[:, None] - np.arange(places.start, places.stop))
    works = tuple(state.work for state in states)
    if places.stop == replay.cap and num_places == 1:
        works = tuple(replace(work, beside=()) for work in works)  # the last round that there can be prepares nothing
    shape = (replay.num_prompts, num_places)
    return _Stretch(places, works, np.stack([_at(state, places, shape) for state in states]), left)


def _at(state: RowState, places: slice, shape: tuple[int, int]) -> FloatArray:
    """The moves of a state at some places, those of summary numbers everywhere alike."""
    moves = state.moves[..., places] if state.moves.ndim > 2 else state.moves[..., None, None]
    return np.broadcast_to(moves, (*state.moves.shape[:2], *shape))


def _masses(stretches: Sequence[_Stretch], replay: Replay) -> tuple[FloatArray, FloatArray]:
    """(states, num_prompts, width) probability that a round starts there in a state, and (2, num_prompts) moves to a
    state other than the first, from another one and from the first."""
    num_states = stretches[0].moves.shape[0] if stretches else 1
    longest = max((stretch.moves.shape[1] for stretch in stretches), default=1)
    mass = np.zeros((num_states, replay.num_prompts, max(2, replay.longest) + longest))
    mass[0, :, 1] = replay.lengths > 1
    hits = np.zeros((2, replay.num_prompts))
    for stretch in stretches:
        onward = stretch.onward
        for index, place in enumerate(range(stretch.places.start, stretch.places.stop)):
            here = mass[:, :, place]
            moved = np.einsum("sp,snqp->nqsp", here, onward[..., index])
            mass[:, :, place : place + len(moved)] += moved.sum(2).transpose(1, 2, 0)
            hits[0] += moved[:, 1:, 1:].sum((0, 1, 2))
            hits[1] += moved[:, 1:, 0].sum((0, 1))
    return mass[:, :, : replay.longest], hits


def _seconds(stretch: _Stretch, mass: FloatArray, replay: Replay, clock: RoundClock) -> FloatArray:
    """(num_prompts,) mean time of the rounds that start in a stretch."""
    starts = np.arange(stretch.places.start, stretch.places.stop)
    context = replay.prompt_length[:, None] + starts - 1
    total = np.zeros(replay.num_prompts)
    for work, here, goes_on in zip(stretch.works, mass[:, :, stretch.places], stretch.goes_on, strict=True):
        inside = (stretch.left > 0) & (here > 0)
        if not inside.any():
            continue
        contexts, where = np.unique(context[inside], return_inverse=True)
        found = clock.of([(work, 1)], contexts)
        round_s = np.zeros(here.shape)
        round_s[inside] = found.always_s[where] + found.onward_s[where] * goes_on[inside]
        total += (here * round_s).sum(1)
    return total


def _lookups(stretch: _Stretch, mass: FloatArray) -> FloatArray:
    """(2, num_prompts) rounds after which the sequence goes on, in a state other than the first and in the first."""
    going_on = (mass[:, :, stretch.places] * stretch.goes_on).sum(2)
    return np.stack([going_on[1:].sum(0), going_on[0]])
