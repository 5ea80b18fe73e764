"""What is remembered of a run: counts and times that fade, and the beliefs that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.beliefs import NEGLIGIBLE, AffineTime, Beliefs, ExpectedTimes
from sim.decider import RoundSeen
from sim.parametric import HitCurve
from sim.policy import LateBuild, Proposer, SpeculativeSpeculative
from sim.system import HostTerm, host_term
from sim.trace import Source

if TYPE_CHECKING:
    from sim.running_statistics import RunningStatistics

FloatArray = NDArray[np.float64]

NEWTON_STEPS = 8  # a step changes c by a factor of at most e: eight reach any miss rate that could matter


class _AcceptanceSeen:
    """Acceptance by draft index, from tests that fade: its level by the short memory, its shape by the long one.

    What has faded leaves its mean behind: where nothing is tested the first index is believed to be as it was last
    known, with the weight of `shrinkage` tests. Every other index shrinks to the one before it times the long memory's
    ratio of the two, so that one never tried is believed to be like the last one tried.
    """

    def __init__(self, config: RunningStatistics, prior: float, *, returns: bool) -> None:
        """`returns`: what is not tested is slowly believed to be like the prior again."""
        self.prior, self.shrinkage = prior, config.shrinkage
        self._kept, self._pull = math.exp(-1 / config.memory), 1 / config.long_memory if returns else 0.0
        self._fading = np.array([[[self._kept]], [[math.exp(-1 / config.long_memory)]]])
        self._counts = np.zeros((2, max(1, *config.speculation_lengths), 2))  # (memory, index, tests | acceptances)
        self._centre = prior

    def fade(self) -> None:
        """One round later; the mean of the first index stays as it was."""
        first = _shrunk(self._counts[0, 0].tolist(), self._centre, self.shrinkage)
        self._centre += (1 - self._kept) * (first - self._centre) + self._pull * (self.prior - self._centre)
        self._counts *= self._fading

    def see(self, num_drafted: int, num_accepted: int) -> None:
        self._counts[:, : min(num_drafted, num_accepted + 1), 0] += 1
        self._counts[:, :num_accepted, 1] += 1

    def by_index(self) -> tuple[float, ...]:
        """Conditional acceptance of each draft token."""
        recent, long = self._counts.tolist()
        shape = [self._centre]
        for counts in long:
            shape.append(_shrunk(counts, shape[-1], self.shrinkage))
        shape[0] = shape[1]
        believed, conditional = self._centre, []
        for index, counts in enumerate(recent):
            expected = believed * shape[index + 1] / shape[index] if shape[index] > 0 else believed
            believed = _shrunk(counts, min(1.0, expected), self.shrinkage)
            conditional.append(believed)
        return tuple(conditional)


def _shrunk(counts: Sequence[float], prior: float, strength: float) -> float:
    num_tested, num_accepted = counts
    return (strength * prior + num_accepted) / (strength + num_tested)


class _MissesSeen:
    """The curve of the miss rate c F^-r after rounds of one source, from look-ups and misses by fan-out that fade.

    The most likely (log c, r) if misses are Poisson with mean look-ups * c F^-r, around a normal centre that counts for
    `shrinkage` misses and leaves r the standard deviation `exponent_spread`. What has faded stays in the centre, which
    slowly returns to the prior: SSD that was given up for its misses is tried again.
    """

    def __init__(self, config: RunningStatistics, prior: HitCurve) -> None:
        self._kept, self._pull = math.exp(-1 / config.memory), 1 / config.long_memory
        self._counts = np.zeros((max(config.budgets) + 1, 2))
        self._prior = np.array([math.log(max(prior.prefactor, NEGLIGIBLE)), prior.exponent])
        self._centre = self._prior
        self._precision = np.diag([config.shrinkage, config.exponent_spread**-2])

    def fade(self, num_rounds: int) -> None:
        """So many rounds later."""
        kept = self._kept**num_rounds
        drift = (1 - kept) * (self._fitted() - self._centre) + num_rounds * self._pull * (self._prior - self._centre)
        self._centre = self._centre + drift
        self._counts *= kept

    def see(self, fan_out: int, *, missed: bool) -> None:
        if 0 < fan_out < len(self._counts):  # without a branch every look-up misses and says nothing about the curve
            self._counts[fan_out] += (1, missed)

    def curve(self) -> HitCurve:
        log_prefactor, exponent = self._fitted().tolist()
        return HitCurve(math.exp(log_prefactor), exponent)

    def _fitted(self) -> FloatArray:
        fan_outs = np.flatnonzero(self._counts[:, 0] > NEGLIGIBLE)
        if not len(fan_outs):
            return self._centre
        lookups, misses = self._counts[fan_outs].T
        features = np.stack([np.ones(len(fan_outs)), -np.log(fan_outs)])  # log miss rate = (log c, r) . features
        parameters = self._centre
        for _ in range(NEWTON_STEPS):
            expected = lookups * np.exp(parameters @ features)
            gradient = features @ (misses - expected) - self._precision @ (parameters - self._centre)
            curvature = (features * expected) @ features.T + self._precision
            step = np.linalg.solve(curvature, gradient)
            if parameters[1] + step[1] < 0:  # more branches never miss more: the best step to r = 0
                step = np.array([(gradient[0] + curvature[0, 1] * parameters[1]) / curvature[0, 0], -parameters[1]])
            parameters = parameters + step.clip(-1, 1)
        return parameters


class _TimeSeen:
    """An affine time: its shape fitted over the long memory, its level by the short one.

    The fit includes the prior, scaled by the ratio of seen to prior, as `time_shrinkage` operations at either end of
    its range. What is not run keeps the time that it was last known to take until that has faded.
    """

    def __init__(self, config: RunningStatistics, prior: AffineTime, ends: tuple[float, float]) -> None:
        self.prior, self.ends, self.strength = prior, ends, config.time_shrinkage
        self._fading = np.exp(-1 / np.array([[config.memory], [config.long_memory]]))
        self._moments = np.zeros((2, 5))  # (memory, sums of 1, n, n^2, t, n t)

    def fade(self) -> None:
        """One round later, whether the operation was run in it or not."""
        self._moments *= self._fading

    def see(self, num_tokens: float, seconds: float) -> None:
        self._moments += (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)

    def fitted(self) -> AffineTime:
        recent, long = self._moments.tolist()
        scaled = self._levelled(self.prior, long)
        return self._levelled(self._fitted(scaled, long), recent)

    def _levelled(self, shape: AffineTime, moments: Sequence[float]) -> AffineTime:
        """The shape times the ratio of what was seen to it."""
        count, n, _, t, _ = moments
        anchor_s = self.strength * shape.at(sum(self.ends) / 2)
        expected_s = anchor_s + shape.base_s * count + shape.per_token_s * n
        ratio = (anchor_s + t) / expected_s if expected_s > 0 else 1.0
        return AffineTime(shape.base_s * ratio, shape.per_token_s * ratio)

    def _fitted(self, scaled: AffineTime, moments: Sequence[float]) -> AffineTime:
        """Least squares; neither coefficient below 0."""
        count, n, nn, t, nt = moments
        for end in self.ends:
            weight, seconds = self.strength, self.strength * scaled.at(end)
            count, n, nn, t, nt = (
                count + weight,
                n + weight * end,
                nn + weight * end**2,
                t + seconds,
                nt + seconds * end,
            )
        slope = min(max(0.0, (count * nt - n * t) / (count * nn - n * n)), t / n)
        return AffineTime(max(0.0, (t - slope * n) / count), slope)


class _MeanSeen:
    """A fading mean, shrunk to a prior."""

    def __init__(self, config: RunningStatistics, prior: float) -> None:
        self._kept = math.exp(-1 / config.memory)
        self._count, self._total = config.shrinkage, config.shrinkage * prior

    def see(self, value: float) -> None:
        self._count, self._total = self._kept * self._count + 1, self._kept * self._total + value

    @property
    def mean(self) -> float:
        return self._total / self._count


class Statistics:
    """Everything `RunningStatistics` remembers of a run."""

    def __init__(self, config: RunningStatistics) -> None:
        self.config, times = config, config.times
        longest, widest = max(config.speculation_lengths), max(config.budgets)
        fallback = config.fallback_acceptance
        priors = {Proposer.DRAFT_MODEL: config.acceptance, Proposer.NGRAM: fallback, Proposer.FILLER: fallback}
        self.acceptance = {
            proposer: _AcceptanceSeen(config, prior, returns=proposer is not Proposer.DRAFT_MODEL)  # that one is probed
            for proposer, prior in priors.items()
        }
        self.misses = {
            Source.HIT: _MissesSeen(config, config.after_hit),
            Source.MISS: _MissesSeen(config, config.after_miss),
        }
        self.verify = _TimeSeen(config, times.verify, (1, longest + 2))
        self.draft_step = _TimeSeen(config, times.draft_step, (1, 2))
        self.tree_step = _TimeSeen(config, times.tree_step, (1, widest + 2))
        self.host = {term: _MeanSeen(config, times.host_s) for term in HostTerm}
        self.num_rows = _MeanSeen(config, 1.0)
        self._before: list[RoundSeen] = []
        self._num_rounds = 0

    def see(self, rows: list[RoundSeen]) -> None:
        """Take in one round: all its rows, in order."""
        for acceptance in self.acceptance.values():
            acceptance.fade()
        for time in (self.verify, self.draft_step, self.tree_step):
            time.fade()
        for row in rows:
            self._see_acceptance(row)
        followed = self._before if self._follows(rows) else []
        for before, row in zip(followed, rows if followed else [], strict=True):
            self._see_lookup(before, row)
        self._see_times(rows, followed)
        self.num_rows.see(len(rows))
        self._before = rows
        self._num_rounds += 1
        if self._num_rounds % self.config.interval == 0:
            for misses in self.misses.values():
                misses.fade(self.config.interval)

    def _follows(self, rows: list[RoundSeen]) -> bool:
        """Whether these are the rows of the round before, each after a look-up. Where a row has left or joined, nobody
        told which."""
        looked_up = all(row.source not in (Source.SYNCHRONOUS, Source.FIRST) for row in rows)
        prepared = all(isinstance(row.policy, SpeculativeSpeculative) for row in self._before)
        return looked_up and prepared and len(rows) == len(self._before)

    def _see_acceptance(self, row: RoundSeen) -> None:
        drafting = row.policy.drafting(row.source)
        # An n-gram that ends early counts as rejected there: K is what a plan asks of it.
        asked = drafting.num_drafted if drafting.proposer is Proposer.NGRAM else row.num_drafted
        self.acceptance[drafting.proposer].see(asked, row.num_accepted)

    def _see_lookup(self, before: RoundSeen, row: RoundSeen) -> None:
        fan_out = before.policy.fan_out(before.source)
        prepared = fan_out[before.num_accepted] if before.num_accepted < len(fan_out) else 0
        source = Source.HIT if before.source is Source.HIT else Source.MISS
        self.misses[source].see(prepared, missed=row.source is Source.MISS)

    def _see_times(self, rows: list[RoundSeen], before: list[RoundSeen]) -> None:
        first, num_branches = rows[0], sum(_num_branches(row) for row in rows)
        num_tokens = sum(row.num_drafted + 1 for row in rows)
        self.verify.see(num_tokens, first.verify_s / (self.config.times.contention if num_branches else 1.0))
        drafted = [row for row in rows if row.source is not Source.HIT]
        num_steps = max((row.num_drafted for row in drafted), default=0)
        if num_steps and first.draft_s > 0:
            self.draft_step.see(len(drafted), first.draft_s / num_steps)
        if num_branches and first.build_s > 0:
            tree_s = max(0.0, first.build_s - self.config.times.glue.at(num_tokens))
            self.tree_step.see(num_branches, tree_s / max(row.policy.speculation_length for row in rows))
        source = next((row.source for row in rows if row.source is not Source.HIT), Source.HIT)
        explained_s = first.verify_s + first.draft_s + _waited_s(before, source)
        self.host[host_term(first.policy, source)].see(max(0.0, first.round_s - explained_s))

    def beliefs(self) -> Beliefs:
        times = self.config.times
        return Beliefs(
            acceptance={proposer: seen.by_index() for proposer, seen in self.acceptance.items()},
            after_hit=self.misses[Source.HIT].curve(),
            after_miss=self.misses[Source.MISS].curve(),
            times=ExpectedTimes(
                verify=self.verify.fitted(),
                draft_step=self.draft_step.fitted(),
                tree_step=self.tree_step.fitted(),
                glue=times.glue,
                contention=times.contention,
            ),
            host_s={term: seen.mean for term, seen in self.host.items()},
            num_rows=self.num_rows.mean,
        )


def _num_branches(row: RoundSeen) -> int:
    return row.policy.drafting(row.source).num_branches(row.num_drafted)


def _waited_s(before: list[RoundSeen], source: Source) -> float:
    """How long this round's beginning waited for the build of the round before."""
    if not before:
        return 0.0
    policy = before[0].policy
    abandons = isinstance(policy, SpeculativeSpeculative) and policy.on_late_build is LateBuild.ABANDON
    is_needed = source is Source.HIT or not abandons
    return max(0.0, before[0].build_s - before[0].verify_s) if is_needed else 0.0
