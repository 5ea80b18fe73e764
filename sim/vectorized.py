"""Replications in NumPy: every (replication, prompt) is one entry of a vector, all advance round by round together.

Acceptance and hits are decided by the same random numbers as in `sim.timeline`, so that a seed gives the same rounds in
both engines. Durations are drawn from the same distributions; a build's and a fallback's are the distributions of their
sums, evaluated at `NUM_CONTEXT_KNOTS` contexts and interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sim.latency import NUM_OF_SUM
from sim.policy import Policy, SpeculativeSpeculative
from sim.recursion import NUM_CONTEXT_KNOTS, Expectation
from sim.replay import SOURCES, Replay
from sim.streams import Streams, outcome_uniforms
from sim.system import System, host_term
from sim.trace import Lane, Operation
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
CHUNK = 128  # replications that advance together; bounds memory


def replicate(policy: Policy, workload: Workload, system: System, seeds: Sequence[int]) -> Expectation:
    """Totals of every prompt, averaged over one replication per seed."""
    replay = Replay(system.agreement, workload)
    system = system.as_run_by(policy)
    runs = [
        _Run(policy, replay, system, seeds[start : start + CHUNK]).totals() for start in range(0, len(seeds), CHUNK)
    ]
    rounds, seconds, lookups, hits = (np.sum([run[field] for run in runs], axis=0) / len(seeds) for field in range(4))
    return Expectation(replay.num_tokens(), rounds, seconds, lookups, hits)


class _Run:
    """A chunk of replications of one policy; vectors hold one entry per (replication, prompt) still decoding."""

    def __init__(self, policy: Policy, replay: Replay, system: System, seeds: Sequence[int]) -> None:
        self.policy, self.replay, self.system = policy, replay, system
        self.num_seeds = len(seeds)
        uniforms = np.stack([outcome_uniforms(replay, Streams.of(seed).outcomes) for seed in seeds], axis=1)
        self.accept_uniforms, self.hit_uniforms = uniforms  # (seeds, num_prompts, width)
        if not replay.agreement.depends_on_draft_index:
            self.next_rejection = _next_true(self.accept_uniforms >= replay.acceptance(0))
        self.noise = np.random.default_rng(list(seeds))
        self.times = _Times(policy, replay, system)

    def totals(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Sums over the replications, each (num_prompts,) or (2, num_prompts): rounds, seconds, look-ups, hits."""
        num_prompts, policy = self.replay.num_prompts, self.policy
        run, prompt = np.nonzero(np.broadcast_to(self.replay.lengths > 1, (self.num_seeds, num_prompts)))
        emitted = np.ones(len(prompt), dtype=np.int64)
        side = np.ones(len(prompt), dtype=np.int64)  # index into SOURCES: a first round behaves as after a miss
        is_ssd = isinstance(policy, SpeculativeSpeculative)
        drafts = np.array([policy.num_drafted(source) for source in SOURCES])
        hit_laws = self._hit_laws()
        rounds, seconds = np.zeros((2, num_prompts))
        lookups, hits = np.zeros((2, 2, num_prompts))
        np.add.at(seconds, prompt, self.times.before_verification(self.noise, side, prompt, emitted))
        while len(prompt):
            num_drafted = np.minimum(drafts[side], np.maximum(0, self.replay.cap - emitted - 1))
            left = self.replay.lengths[prompt] - emitted
            k = self._accept_counts(run, prompt, emitted, np.minimum(num_drafted, left))
            goes_on = k + 1 < left
            verify_s, build_s = self.times.round(self.noise, side, num_drafted, prompt, emitted)
            rounds += np.bincount(prompt, minlength=num_prompts)
            if self.system.overlaps:
                took = np.where(goes_on, np.maximum(verify_s, build_s), verify_s)
            else:
                took = verify_s + build_s
            if is_ssd:
                position = np.minimum(emitted + k, self.replay.width - 1)
                law = hit_laws[side, k, (k == num_drafted).astype(int), prompt, position]
                hit = goes_on & (self.hit_uniforms[run, prompt, position] < law)
                for index in range(2):
                    lookups[index] += np.bincount(prompt[goes_on & (side == index)], minlength=num_prompts)
                    hits[index] += np.bincount(prompt[hit & (side == index)], minlength=num_prompts)
            else:
                hit = np.zeros(len(prompt), dtype=bool)
            seconds += np.bincount(prompt, weights=took, minlength=num_prompts)
            two_unfed = (k == num_drafted)[goes_on] & (not is_ssd)
            run, prompt = run[goes_on], prompt[goes_on]
            emitted, side = (emitted + k + 1)[goes_on], np.where(hit, 0, 1)[goes_on]
            waiting = self.times.before_verification(self.noise, side, prompt, emitted, two_unfed)
            seconds += np.bincount(prompt, weights=waiting, minlength=num_prompts)
        return rounds, seconds, lookups, hits

    def _accept_counts(self, run: IntArray, prompt: IntArray, emitted: IntArray, num_tested: IntArray) -> IntArray:
        if not self.replay.agreement.depends_on_draft_index:
            return np.minimum(self.next_rejection[run, prompt, emitted] - emitted, num_tested)
        k = np.zeros(len(run), dtype=np.int64)
        open_ = np.ones(len(run), dtype=bool)
        for index in range(int(num_tested.max(initial=0))):
            position = np.minimum(emitted + index, self.replay.width - 1)
            accepted = self.accept_uniforms[run, prompt, position] < self.replay.acceptance(index)[prompt, position]
            open_ &= accepted & (index < num_tested)
            k += open_
        return k

    def _hit_laws(self) -> FloatArray:
        """(source, accept count, rejected / all accepted, prompt, position) hit probability."""
        policy, replay = self.policy, self.replay
        if not isinstance(policy, SpeculativeSpeculative):
            return np.zeros((2, 1, 2, 0, 0))
        laws = np.zeros((2, policy.speculation_length + 1, 2, replay.num_prompts, replay.width))
        for index, source in enumerate(SOURCES):
            for k, fan_out in enumerate(policy.fan_out(source)):
                for all_accepted, num_drafted in enumerate((k + 1, k)):
                    laws[index, k, all_accepted] = replay.agreement.hit_table(
                        fan_out, k, policy.drafting(source), rejected=k < num_drafted
                    )
        return laws


def _next_true(flags: NDArray[np.bool_]) -> IntArray:
    """Along the last axis: index of the first true flag at or after each place, else the length of the axis."""
    length = flags.shape[-1]
    index = np.where(flags, np.arange(length), length)
    return np.minimum.accumulate(index[..., ::-1], axis=-1)[..., ::-1]


class _Times:
    """Durations by gathers: one table row per (source, number of draft tokens, context) that can occur."""

    def __init__(self, policy: Policy, replay: Replay, system: System) -> None:
        self.policy, self.replay, self.system = policy, replay, system
        self.is_ssd = isinstance(policy, SpeculativeSpeculative)
        self.lowest, self.contexts = replay.first_context, replay.contexts
        K = policy.speculation_length
        full = [policy.num_drafted(source) for source in SOURCES]
        fan_outs = [policy.fan_out(source) for source in SOURCES]
        branches = np.array([[sum(fan_out[: n + 1]) for n in range(K + 1)] for fan_out in fan_outs])
        self.builds = branches > 0
        self.residuals = np.array(system.latency[Lane.TARGET, Operation.VERIFY].residuals)
        shape = (2, K + 1, len(self.contexts))
        self.verify_s = np.full(shape, np.nan)
        self.build_s = np.zeros((*shape, NUM_OF_SUM if branches.any() else 1))
        self.draft_s = np.zeros((*shape, NUM_OF_SUM if K else 1))
        for index, most in enumerate(full):
            for num_drafted in range(most + 1):
                at = self._contexts_of(num_drafted, most)
                place = (index, num_drafted, at - self.lowest)
                table = system.latency[Lane.TARGET, Operation.VERIFY]
                self.verify_s[place] = table.location_s(num_drafted + 1, at)
                if branches[index, num_drafted]:
                    self.build_s[place] = self._over(
                        at, partial(system.build_samples_s, num_drafted, int(branches[index, num_drafted]), K)
                    )
                if num_drafted and (index == 1 or not self.is_ssd):
                    self.draft_s[place] = self._over(at, partial(system.draft_samples_s, num_drafted))
        self.host_s = np.array([system.host_s[host_term(policy, source)] for source in SOURCES])
        self.drafts_after = np.array([0 if self.is_ssd else K, full[1]])

    def _contexts_of(self, num_drafted: int, most: int) -> IntArray:
        """Contexts of the rounds with that many draft tokens; fewer than `most` occur at one distance from the cap."""
        if num_drafted == most:
            return self.replay.contexts_with_room(num_drafted)
        at = np.unique(self.replay.prompt_length + self.replay.cap - num_drafted - 2)
        return at[(at >= self.contexts[0]) & (at <= self.contexts[-1])]

    def _over(self, contexts: IntArray, samples: Callable[[int], FloatArray]) -> FloatArray:
        """(contexts, NUM_OF_SUM) equally likely durations, interpolated between those at a few of the contexts."""
        if not len(contexts):
            return np.zeros((0, NUM_OF_SUM))
        knots = np.unique(np.linspace(contexts[0], contexts[-1], NUM_CONTEXT_KNOTS).astype(int))
        values = np.stack([_quantiles(samples(int(context))) for context in knots])
        if len(knots) == 1:
            return np.repeat(values, len(contexts), axis=0)
        right = np.clip(np.searchsorted(knots, contexts), 1, len(knots) - 1)
        share = ((contexts - knots[right - 1]) / (knots[right] - knots[right - 1]))[:, None]
        return (1 - share) * values[right - 1] + share * values[right]

    def round(
        self, noise: np.random.Generator, side: IntArray, num_drafted: IntArray, prompt: IntArray, emitted: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Durations of the verification and of the build beside it (0 without one, as in a round that must end)."""
        beside = self.builds[side, num_drafted] & (emitted + 1 < self.replay.cap)
        place = (side, num_drafted, self.replay.prompt_length[prompt] + emitted - 1 - self.lowest)
        verify_s = self.verify_s[place] * self.residuals[noise.integers(len(self.residuals), size=len(prompt))]
        if self.build_s.shape[-1] == 1:
            return verify_s, np.zeros(len(prompt))
        if self.system.overlaps:
            verify_s[beside] *= self.system.contention[Lane.TARGET]
        return verify_s, beside * self.build_s[(*place, noise.integers(NUM_OF_SUM, size=len(prompt)))]

    def before_verification(
        self,
        noise: np.random.Generator,
        side: IntArray,
        prompt: IntArray,
        emitted: IntArray,
        two_unfed: NDArray[np.bool_] | None = None,
    ) -> FloatArray:
        """Host time and the draft steps that the target waits for."""
        seconds = self.host_s[side]
        if self.draft_s.shape[-1] == 1:
            return seconds
        num_drafted = np.minimum(self.drafts_after[side], np.maximum(0, self.replay.cap - emitted - 1))
        at = self.replay.prompt_length[prompt] + emitted - 1
        drawn = noise.integers(NUM_OF_SUM, size=len(prompt))
        seconds = seconds + self.draft_s[side, num_drafted, at - self.lowest, drawn]
        if two_unfed is not None and two_unfed.any():
            extra = two_unfed & (num_drafted > 0)
            two = self.system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, 2, at[extra] - 1, beside=False)
            seconds[extra] += two - self.system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, 1, at[extra], beside=False)
        return seconds


def _quantiles(values: FloatArray) -> FloatArray:
    """(NUM_OF_SUM,) equally likely values in place of fewer."""
    levels = (np.arange(NUM_OF_SUM) + 0.5) / NUM_OF_SUM
    return values if len(values) == NUM_OF_SUM else np.quantile(values, levels, method="inverted_cdf")
