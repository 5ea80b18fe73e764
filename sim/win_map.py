"""Where SSD wins, ties and loses: over acceptance, draft over verify time and batch size, by the parametric model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.mean_times import DRAFT_STEP, GLUE, TREE_STEP, VERIFY
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Drafting, Fallback, Proposer, uniform_fan_out
from sim.search_space import FIRST_DRAFT, WIDEST_FITTED, SearchSpace, mean_acceptance, testable_positions
from sim.system import System
from sim.trace import Lane, Operation, Source
from sim.workload import Workload

FloatArray = NDArray[np.float64]
OperationKey = tuple[Lane, Operation]

TIE = 0.02  # of tokens/s: what differs by less is a tie
ACCEPTANCES = tuple(np.linspace(0.2, 0.98, 27).round(3).tolist())
RATIOS = tuple(np.geomspace(0.01, 1.0, 25).round(4).tolist())
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
FALLBACKS = (Fallback.DRAFT, Fallback.NONE)


class Verdict(StrEnum):
    """SSD against the better of AR and SD, each at its own best setting."""

    WINS = "wins"
    TIES = "ties"
    LOSES = "loses"


@dataclass(frozen=True)
class WinMap:
    """`gain` (batches, ratios, acceptances) is the best SSD over the better of AR and the best SD, in tokens/s,
    `sd_over_ar` of the same shape the best SD over AR. The point (`acceptance`, `ratio`, `batch_size`) is the system's
    own."""

    acceptances: tuple[float, ...]
    ratios: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    gain: FloatArray
    sd_over_ar: FloatArray
    acceptance: float
    ratio: float
    batch_size: int

    def verdicts(self) -> NDArray[np.str_]:
        """(batches, ratios, acceptances) of `Verdict`."""
        loses = np.where(self.gain < 1 - TIE, Verdict.LOSES.value, Verdict.TIES.value)
        return np.where(self.gain > 1 + TIE, Verdict.WINS.value, loses)

    def in_words(self) -> str:
        """Where the system stands, at the next of the map's points."""
        place = f"acceptance {self.acceptance:.2f}, a draft step {self.ratio:.2g} of a verification"
        edges = ((self.acceptances, self.acceptance), (self.ratios, self.ratio))
        if self.batch_size not in self.batch_sizes or any(not min(e) <= own <= max(e) for e, own in edges):
            return f"The system lies outside the map ({place}, batches of {self.batch_size})"
        size = self.batch_sizes.index(self.batch_size)
        column = int(np.argmin(np.abs(np.subtract(self.acceptances, self.acceptance))))
        row = int(np.argmin(np.abs(np.log(np.divide(self.ratios, self.ratio)))))
        verdict, gain = self.verdicts()[size, row, column], self.gain[size, row, column]
        return (
            f"On the map of the idealised model SSD {verdict} at the system's own place ({place}, batches of "
            f"{self.batch_size}): {gain:.2f} times the better of AR and SD"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "acceptances": list(self.acceptances),
            "draft_over_verify": list(self.ratios),
            "batch_sizes": list(self.batch_sizes),
            "gain": self.gain.round(4).tolist(),
            "sd_over_ar": self.sd_over_ar.round(4).tolist(),
            "verdicts": self.verdicts().tolist(),
            "tie": TIE,
            "own": {
                "acceptance": self.acceptance,
                "draft_over_verify": self.ratio,
                "batch_size": self.batch_size,
            },
        }


def win_map(
    space: SearchSpace,
    workload: Workload,
    system: System,
    *,
    acceptances: Sequence[float] = ACCEPTANCES,
    ratios: Sequence[float] = RATIOS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> WinMap:
    """The map around a system, of the lengths and budgets of a search space that its latencies cover.

    Acceptance is i.i.d. and every draft operation costs what it costs on the system, times the ratio of a draft step to
    a verification of one token over the system's own; hit curves, the growth of a verification with its tokens and the
    slow-downs are the system's. Fan-outs are uniform, fallbacks `draft` and `none`. SSD is Corollary 16 with a late
    build awaited in every round: a round takes the longer of verification and build, and the fallback's time on top if
    a row of the batch misses. Host time and messages are left out. Raises `BadInput` if no batch size is covered.
    """
    own = _Scale(workload, system)
    sizes = [size for size in sorted({*batch_sizes, workload.batch_size}) if own.covers(size)]
    if not sizes:
        raise BadInput("batch_sizes", "must be in the profiled range", list(batch_sizes))
    grid = _Grid(space, own, np.asarray(acceptances, dtype=float), np.asarray(ratios, dtype=float))
    of_sizes = [grid.speedups(size) for size in sizes]
    sd, ssd = (np.stack([speedups[index] for speedups in of_sizes]) for index in range(2))
    return WinMap(
        acceptances=tuple(map(float, acceptances)),
        ratios=tuple(map(float, ratios)),
        batch_sizes=tuple(sizes),
        gain=ssd / np.maximum(1.0, sd),
        sd_over_ar=sd,
        acceptance=mean_acceptance(system.agreement),
        ratio=own.ratio,
        batch_size=workload.batch_size,
    )


class _Scale:
    """Times of a system in verifications of one token, and in draft steps, at the middle of its texts."""

    def __init__(self, workload: Workload, system: System) -> None:
        self.system = system
        self.context = int(system.agreement.prompt_length.mean()) + workload.max_new_tokens // 2
        self.curves = {
            (source, rejected): hit_curve(system.agreement, source, rejected=rejected)
            for source in (Source.HIT, Source.MISS)
            for rejected in (False, True)
        }
        self.draft_step_s = self._mean_s(DRAFT_STEP, 1, 1)
        self.ratio = self.draft_step_s / self._mean_s(VERIFY, 1, 1)

    def _mean_s(self, key: OperationKey, num_tokens: float, rows: int) -> float:
        lane, operation = key
        seconds = self.system.mean_s(lane, operation, num_tokens, self.context, beside=False, batch_size=rows)
        return float(seconds)

    def covers(self, batch_size: int) -> bool:
        try:
            self._mean_s(VERIFY, 1, batch_size)
            self._mean_s(DRAFT_STEP, 1, batch_size)
        except BadInput:
            return False
        return True

    def verify(self, num_drafted: int, batch_size: int) -> float:
        """Of K + 1 tokens over one, of so many rows. Raises `BadInput` outside the profile."""
        one_s, many_s = (self._mean_s(VERIFY, width, batch_size) for width in (1, num_drafted + 1))
        return many_s / one_s

    def draft_steps(self, key: OperationKey, num_tokens: float, batch_size: int) -> float:
        """An operation of so many rows, in draft steps of one row at the verification's own growth over rows."""
        growth = self._mean_s(VERIFY, 1, batch_size) / self._mean_s(VERIFY, 1, 1)
        return self._mean_s(key, num_tokens, batch_size) / self.draft_step_s / growth


class _Grid:
    """Speed-ups over AR on a grid of ratios (rows) and acceptances (columns)."""

    def __init__(self, space: SearchSpace, own: _Scale, acceptances: FloatArray, ratios: FloatArray) -> None:
        self.space, self.own = space, own
        self.acceptances, self.ratios = acceptances, ratios[:, None]
        self.slowdowns = {lane: own.system.slowdown(lane, beside=True) for lane in Lane}

    def speedups(self, batch_size: int) -> tuple[FloatArray, FloatArray]:
        """(ratios, acceptances) of the best SD and of the best SSD. Settings outside the profile are left out."""
        shape = (len(self.ratios), len(self.acceptances))
        sd, ssd = np.zeros(shape), np.zeros(shape)
        for K in self.space.positive_lengths:
            sd = np.maximum(sd, _or_nothing(partial(self._sd, K, batch_size)))
            for budget, fallback in product(self.space.budgets, FALLBACKS):
                ssd = np.maximum(ssd, _or_nothing(partial(self._ssd, K, budget, fallback, batch_size)))
        return sd, ssd

    def _sd(self, K: int, batch_size: int) -> FloatArray:
        draft = self.ratios * K * self.own.draft_steps(DRAFT_STEP, 1, batch_size)
        return self._emitted(K) / (self.own.verify(K, batch_size) + draft)

    def _ssd(self, K: int, budget: int, fallback: Fallback, batch_size: int) -> FloatArray:
        misses = 0 if fallback is Fallback.NONE else K
        hit = self._hit_rate(K, budget, Source.HIT), self._hit_rate(misses, budget, Source.MISS)
        rate = hit[1] / np.maximum(1 + hit[1] - hit[0], 1e-12)
        steps = self.own.draft_steps
        num_steps = steps(GLUE, K + 1, batch_size) + K * steps(TREE_STEP, budget, batch_size)
        build = self.ratios * num_steps * self.slowdowns[Lane.DRAFT]
        backup = self.ratios * misses * steps(DRAFT_STEP, 1, batch_size)
        round_hit, round_miss = (self._round(length, build, batch_size) for length in (K, misses))
        all_hit = rate**batch_size
        tokens = rate * self._emitted(K) + (1 - rate) * self._emitted(misses)
        return tokens / (all_hit * round_hit + (1 - all_hit) * (np.maximum(round_hit, round_miss) + backup))

    def _round(self, num_drafted: int, build: FloatArray, batch_size: int) -> FloatArray:
        verify = self.own.verify(num_drafted, batch_size) * self.slowdowns[Lane.TARGET]
        return np.maximum(verify, build) if self.own.system.overlaps else verify + build

    def _emitted(self, K: int) -> FloatArray:
        return np.sum([self.acceptances**k for k in range(K + 1)], axis=0)

    def _hit_rate(self, K: int, budget: int, source: Source) -> FloatArray:
        """Theorem 18's objective of a uniform fan-out."""
        a = self.acceptances
        fan_out = uniform_fan_out(K, budget)
        ended = [a**k * (1 - a) for k in range(K)] + [a**K]
        curves = [self.own.curves[source, k < K] for k in range(K + 1)]
        return np.sum([p * c.hit_rate(f) for p, c, f in zip(ended, curves, fan_out, strict=True)], axis=0)


def _or_nothing(speedup: Callable[[], FloatArray]) -> FloatArray:
    try:
        return speedup()
    except BadInput:
        return np.zeros(1)


def hit_curve(agreement: Agreement, source: Source, *, rejected: bool) -> HitCurve:
    """The curve 1 - c F^-r of look-ups after a rejection or after full acceptance: that of the numbers, or the best
    line through the logarithms of what a record missed at F = 1, 2, 4, ..."""
    if isinstance(agreement, ParametricAgreement):
        return (agreement.after_hit if source is Source.HIT else agreement.after_miss)[-1]
    drafting = Drafting(Proposer.DRAFT_MODEL, int(rejected), (), source)
    inside = testable_positions(agreement)
    weights = 1 - agreement.acceptance_table(0, FIRST_DRAFT)[inside] if rejected else np.ones(int(inside.sum()))
    fan_outs = 2 ** np.arange(int(np.log2(min(agreement.num_candidates, WIDEST_FITTED))) + 1)
    hits = [agreement.hit_table(int(f), 0, drafting, rejected=rejected)[inside] for f in fan_outs]
    missed = np.array([float((weights * (1 - hit)).sum()) for hit in hits]) / max(float(weights.sum()), 1e-300)
    seen = missed > 1e-12
    if seen.sum() < 2:
        return HitCurve(float(missed[0]), 1.0)
    slope, intercept = np.polyfit(np.log(fan_outs[seen]), np.log(missed[seen]), 1)
    return HitCurve(float(np.exp(intercept)), max(0.01, float(-slope)))
