"""Replications in NumPy: every (seed, batch) is one entry of a vector, all advance round by round together.

Acceptance and hits are decided by the same random numbers as in `sim.timeline`, so that a seed gives the same rounds in
both engines: what a round does wherever it may start is one table per seed, and decoding is a walk through it. Times
are drawn for the rounds visited (`sim.round_times`), with the distributions of `sim.timeline` but other numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.expectation import Expectation
from sim.policy import Autoregressive, Fallback, LateBuild, Policy, Speculative, SpeculativeSpeculative
from sim.replay import Replay
from sim.replications import CEILING, RELATIVE_HALF_WIDTH, Rate, until
from sim.round_law import RoundLaw
from sim.round_times import SIDES, BatchTimes, Noise, Places, SoloTimes, Visited
from sim.streams import Streams, outcome_uniforms
from sim.system import System
from sim.trace import Lane, Source
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

CHUNK_POSITIONS = 1 << 20  # (seed, prompt, token) that a thread holds at a time; bounds memory
GROUP_POSITIONS = 1 << 16  # of them those whose random numbers are held at a time; they fit a core's cache
FEWEST_SEEDS = 32  # worth a thread of their own
BLOCK_ROUNDS = 64  # rounds timed together, at most 255; batches that have ended are left out from block to block

NUM_TOTALS, ROUNDS, SECONDS, LOOKUPS, HITS = 6, 0, 1, slice(2, 4), slice(4, 6)  # where each total of a prompt stands


def replicate(policy: Policy, workload: Workload, system: System, seeds: Sequence[int]) -> Expectation:
    """Totals of every prompt, averaged over one replication per seed.

    The rows of a batch share its time: each of its prompts is given an equal part of the batch's decode time, so that
    tokens over seconds is the throughput of the batches; `num_rounds` counts the rounds of each row. Raises `BadInput`
    for what only the event simulation knows: several targets, policies that change from round to round.
    """
    replications = Replications(policy, workload, system)
    replications.add(seeds)
    return replications.expectation()


def replicate_until(
    policy: Policy,
    workload: Workload,
    system: System,
    *,
    seed: int,
    relative_half_width: float = RELATIVE_HALF_WIDTH,
    ceiling: int = CEILING,
) -> tuple[Expectation, Rate]:
    """Replications with the seeds that belong to `seed` until tokens/s is known to the relative half width asked for,
    or until the ceiling (see `sim.replications.until`)."""
    replications = Replications(policy, workload, system)
    rate = until(replications.add, seed=seed, relative_half_width=relative_half_width, ceiling=ceiling)
    return replications.expectation(), rate


def num_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Replications:
    """Replications of one policy so far: sums over seeds, in the order of the seeds whatever the chunks and threads."""

    def __init__(self, policy: Policy, workload: Workload, system: System) -> None:
        _check(policy, system)
        system = system.as_run_by(policy)
        self.is_ssd = isinstance(policy, SpeculativeSpeculative)
        self.replay = Replay(system.agreement, workload)
        self.rounds = _Rounds(policy, self.replay, workload.batch_size)
        self.doubt = max(law.doubt for law in self.rounds.laws)
        may_abandon = isinstance(policy, SpeculativeSpeculative) and policy.on_late_build is LateBuild.ABANDON
        times = SoloTimes if workload.batch_size == 1 and not may_abandon else BatchTimes
        self.times = times(policy, Places.of_texts(policy, self.rounds.laws), system, workload.temperature)
        self.num_seeds = 0
        self.sums = np.zeros((NUM_TOTALS, self.replay.num_prompts))

    def add(self, seeds: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Tokens and seconds of the replication with each of further seeds."""
        if not len(seeds):
            raise BadInput("seeds", "must hold at least one")
        size = min(self._seeds_at_once(), max(FEWEST_SEEDS, -(-len(seeds) // num_threads())))
        chunks = [seeds[start : start + size] for start in range(0, len(seeds), size)]
        seconds = []
        with ThreadPoolExecutor(num_threads()) as pool:
            for totals in pool.map(self._decode, chunks) if len(chunks) > 1 else map(self._decode, chunks):
                self.sums = np.cumsum(np.concatenate([self.sums[:, None], totals], axis=1), axis=1)[:, -1]
                seconds.append(totals[SECONDS].sum(-1))
        self.num_seeds += len(seeds)
        return np.full(len(seeds), self.replay.num_tokens().sum()), np.concatenate(seconds)

    def expectation(self) -> Expectation:
        means = self.sums / self.num_seeds
        return Expectation(
            num_tokens=self.replay.num_tokens(),
            num_rounds=means[ROUNDS],
            seconds=means[SECONDS],
            num_lookups=means[LOOKUPS],
            num_hits=means[HITS],
            doubt=self.doubt,
        )

    def _seeds_at_once(self) -> int:
        positions = self.replay.num_prompts * max(1, self.replay.width)
        return max(1, CHUNK_POSITIONS // (positions * max(1, self.times.num_draft_draws // 2)))

    def _decode(self, seeds: Sequence[int]) -> FloatArray:
        """(NUM_TOTALS, seeds, num_prompts) totals of the replication with each seed."""
        streams = [Streams.of(seed) for seed in seeds]
        walk = self.rounds.walk([stream.outcomes for stream in streams])
        counts = np.zeros((NUM_TOTALS, *walk.places.shape[1:]))
        for visited, hits in walk.blocks():
            noise = self._noise(visited, streams)
            at_work = slice(visited.num_batches)
            counts[ROUNDS, at_work] += _sum(visited.is_live)
            counts[SECONDS, at_work] += self.times.seconds(visited, noise)[:, None]
            if self.is_ssd:
                was_hit = (visited.places[:-1] & 1).astype(bool)
                for index, of_side in enumerate((was_hit, ~was_hit)):
                    counts[LOOKUPS, at_work][index] += _sum(visited.goes_on & of_side)
                    counts[HITS, at_work][index] += _sum(hits & of_side)
        return self.rounds.by_prompt(counts, len(seeds))

    def _noise(self, visited: Visited, streams: Sequence[Streams]) -> Noise:
        """Every seed's own numbers, those of ended batches too, so that they do not depend on the other seeds."""
        shape = (visited.num_rounds, len(self.rounds.batches))
        target = np.empty((*shape, len(streams)))
        draft = np.empty((self.times.num_draft_draws, *shape, len(streams)))
        for index, stream in enumerate(streams):
            target[..., index] = stream.noise[Lane.TARGET].random(shape)
            if len(draft):
                draft[..., index] = stream.noise[Lane.DRAFT].random((*shape, len(draft))).transpose(2, 0, 1)
        of_batches = (shape[0], shape[1] * len(streams))
        flat = (target.reshape(of_batches), draft.reshape(len(draft), *of_batches))
        return Noise(*(numbers[..., : visited.num_batches] for numbers in flat))


def _sum(flags: BoolArray) -> NDArray[np.uint8]:
    """Over the rounds of a block, which are too few to overflow."""
    return np.add.reduce(flags.view(np.uint8), axis=0, dtype=np.uint8)


def _check(policy: Policy, system: System) -> None:
    if not isinstance(policy, (Autoregressive, Speculative, SpeculativeSpeculative)):
        rule = "must be one fixed policy for engine vectorized; tables and controllers need engine des"
        raise BadInput("policy", rule, getattr(policy, "name", policy))
    if system.placement.num_targets > 1:
        rule = "must be 1 for engine vectorized; several targets need engine des"
        raise BadInput("placement.num_targets", rule, system.placement.num_targets)


# ----------------------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class _Walk:
    """The rounds of every batch: `places` is (rounds + 1, batches, rows), `hits` (rounds, batches, rows) the look-ups
    that succeeded, None where every one of them is a round after a hit. Those that end first stand last."""

    places: IntArray
    offset: IntArray  # (batches, 1) of the seed's places
    hits: BoolArray | None

    @property
    def num_rounds(self) -> int:
        return len(self.places) - 1

    def blocks(self) -> Iterator[tuple[Visited, BoolArray]]:
        """Blocks of rounds of the batches still at work, and the look-ups that succeeded in them."""
        is_live = self.places[0] > self.offset
        for start in range(0, self.num_rounds, BLOCK_ROUNDS):
            block = slice(start, min(start + BLOCK_ROUNDS, self.num_rounds))
            at_work = 1 + int(np.flatnonzero(is_live.any(-1))[-1])
            places = self.places[start : block.stop + 1, :at_work]
            goes_on = places[1:] != places[:-1]
            live = np.concatenate([is_live[None, :at_work], goes_on[:-1]])
            hits = goes_on & (places[1:] & 1).astype(bool) if self.hits is None else self.hits[block, :at_work]
            yield Visited(places - self.offset[:at_work], live, goes_on), hits
            is_live = goes_on[-1]


class _Rounds:
    """Where a policy's rounds start, by walks through the table of what a round does wherever it may start."""

    def __init__(self, policy: Policy, replay: Replay, batch_size: int) -> None:
        is_ssd = isinstance(policy, SpeculativeSpeculative)
        self.replay = replay
        self.drafts_anew = batch_size > 1 and getattr(policy, "fallback", None) is Fallback.DRAFT
        sources = SIDES if is_ssd else (Source.SYNCHRONOUS,) * len(SIDES)
        self.laws = [RoundLaw(replay, policy.drafting(source)) for source in sources]
        self.sides = [_SideSteps(law, side, is_ssd=is_ssd) for side, law in enumerate(self.laws)]
        first, second = (side.sampler.accepted for side in self.sides)
        self.accepts_alike = len(first) == len(second) and all(map(np.array_equal, first, second))
        self.step_type = np.min_scalar_type(2 * policy.speculation_length + 3)
        self.batches = self._batches(batch_size)

    def _batches(self, batch_size: int) -> IntArray:
        """(batches, rows) prompts, those with the longest text first; -1 where the last batch has no row."""
        num = self.replay.num_prompts
        prompts = np.full(-(-num // batch_size) * batch_size, -1)
        prompts[:num] = np.arange(num)
        batches = prompts.reshape(-1, batch_size)
        longest = np.where(batches < 0, 0, self.replay.lengths[batches]).max(1)
        return batches[np.argsort(-longest, kind="stable")]

    def by_prompt(self, counts: FloatArray, num_seeds: int) -> FloatArray:
        """(totals, seeds, num_prompts) of (totals, batches, rows); seconds of a batch in equal parts."""
        is_row = self.batches >= 0
        found = counts.reshape(len(counts), len(self.batches), num_seeds, -1)
        found[SECONDS] /= is_row.sum(1)[:, None, None]
        totals = np.zeros((len(counts), num_seeds, self.replay.num_prompts))
        totals[..., self.batches[is_row]] = np.moveaxis(found, 2, 1)[:, :, is_row]
        return totals

    def walk(self, streams: Sequence[np.random.Generator]) -> _Walk:
        """Decode with the outcomes of every stream."""
        steps = self._steps(streams)
        offset = np.tile(np.arange(len(streams)) * steps[0].size, len(self.batches))[:, None]
        has_rounds = (self.batches >= 0) & (self.replay.lengths[self.batches] > 1)
        first = np.where(has_rounds, (self.batches * self.replay.longest + 1) * len(SIDES), 0)
        places = np.empty((max(1, self.replay.longest), *offset.shape[:1], self.batches.shape[1]), dtype=np.int64)
        places[0] = np.repeat(first, len(streams), axis=0) + offset
        num_rounds, hits = self._advance(places, steps.ravel()) if has_rounds.any() else (0, None)
        return _Walk(places[: num_rounds + 1], offset, hits)

    def _advance(self, places: IntArray, steps: NDArray[np.unsignedinteger]) -> tuple[int, BoolArray | None]:
        """Fill in the places of every round after the first; returns how many rounds there are, and hits as `_Walk`
        has them."""
        step = np.empty(places.shape[1:], dtype=steps.dtype)
        hits = []
        for index in range(len(places) - 1):
            here, after = places[index], places[index + 1]
            np.take(steps, here, out=step, mode="clip")
            np.add(here, step, out=after)
            if self.drafts_anew:
                goes_on = step > 0
                hits.append(goes_on & (after & 1).astype(bool))
                has_missed = (goes_on & ~hits[-1]).any(-1, keepdims=True)
                after -= hits[-1] & has_missed
            if not step.any():
                break
        return index + 1, np.stack(hits) if self.drafts_anew else None

    def _steps(self, streams: Sequence[np.random.Generator]) -> NDArray[np.unsignedinteger]:
        """(seeds, num_prompts, width, sides) how far from each place the place of the next round is, 0 after a last
        round; place number as in `sim.round_times`."""
        replay = self.replay
        steps = np.zeros((len(streams), replay.num_prompts, replay.longest, len(SIDES)), dtype=self.step_type)
        size = max(1, GROUP_POSITIONS // (replay.num_prompts * max(1, replay.width)))
        for start in range(0, len(streams), size):
            group = slice(start, min(start + size, len(streams)))
            uniforms = np.stack([outcome_uniforms(replay, stream) for stream in streams[group]], axis=1)
            for index, side in enumerate(self.sides):
                if index == 0 or not self.accepts_alike:
                    passes = side.sampler.passes(uniforms[0])
                side.fill(steps[group, ..., index], passes, uniforms[1])
        return steps


class _SideSteps:
    """How far the rounds of one side lead, from what a `RoundSampler` says that they do."""

    def __init__(self, law: RoundLaw, side: int, *, is_ssd: bool) -> None:
        self.side, self.is_ssd, self.sampler = side, is_ssd, law.sampler  # made here, once: threads only read it
        self.step_type = np.min_scalar_type(2 * law.drafting.num_drafted + 3)
        most = np.iinfo(self.step_type).max
        self.left = np.minimum(law.left, most).astype(self.step_type)
        self.left[:, :1] = 0  # no round starts before the first token
        self.all_drafted = np.where(law.num_drafted > 0, law.num_drafted, most).astype(self.step_type)

    def fill(self, steps: NDArray[np.unsignedinteger], passes: list[BoolArray], hit_uniforms: FloatArray) -> None:
        """Write the step of every place of this side. Side 1 of the next round is after a hit, or of SD after a full
        acceptance."""
        rounds = self.sampler.rounds(passes, hit_uniforms)
        num_accepted = rounds.num_accepted.astype(self.step_type, copy=False)
        next_side = rounds.is_prepared if self.is_ssd else num_accepted == self.all_drafted
        emitted = num_accepted + self.step_type.type(1)
        goes_on = emitted < self.left
        emitted += emitted
        emitted += next_side
        emitted -= self.step_type.type(self.side)
        np.multiply(emitted, goes_on, out=steps)
