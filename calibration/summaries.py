"""An agreement record in a handful of numbers: acceptance by draft position, hit curves c F^-r by accept count and
source, each with its interval; and what is left of a record where every round is like every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.agreement import AgreementRecord
from sim.metrics import Estimate, bootstrap
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Policy, SpeculativeSpeculative
from sim.recursion import round_starts
from sim.replay import SOURCES, Replay
from sim.round_law import RoundLaw
from sim.trace import Source
from sim.workload import Workload

FloatArray = NDArray[np.float64]
FAN_OUTS = (1, 2, 4, 8, 16)  # at which hit curves are fitted, as far as the record has candidates
LARGEST_EXPONENT = 10.0  # one that is larger says only that a second candidate is all that is needed
MOST_NEWTON_STEPS, NEWTON_TOLERANCE = 60, 1e-9
FEWEST_LOOKUPS = 1.0  # expected over all prompts, below which a curve says nothing


@dataclass(frozen=True)
class CurveSummary:
    """Misses of look-ups after `accept_count` acceptances in rounds of a source: miss(F) about prefactor F^-exponent.

    `largest_deviation` is that of the power law from the record at the fitted fan-outs, in points of the hit rate over
    100; `share` the part of the look-ups of this source that come after this accept count.
    """

    source: Source
    accept_count: int
    share: float
    prefactor: Estimate
    exponent: Estimate
    largest_deviation: float

    @property
    def curve(self) -> HitCurve:
        return HitCurve(self.prefactor.value, self.exponent.value)


@dataclass(frozen=True)
class AgreementSummary:
    """`acceptance[j]` is the conditional acceptance of draft token j once it is tested, over the rounds that the policy
    starts. Intervals are 95 % bootstraps over prompts. Of SD and AR there are no curves."""

    policy: Policy
    acceptance: tuple[Estimate, ...]
    curves: tuple[CurveSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "policy": self.policy.name,
            "acceptance": [estimate.to_dict() for estimate in self.acceptance],
            "curves": [
                {
                    "source": curve.source.value,
                    "accept_count": curve.accept_count,
                    "share": curve.share,
                    "prefactor": curve.prefactor.to_dict(),
                    "exponent": curve.exponent.to_dict(),
                    "largest_deviation": curve.largest_deviation,
                }
                for curve in self.curves
            ],
        }


def summarize_agreement(record: AgreementRecord, workload: Workload, policy: Policy) -> AgreementSummary:
    """Acceptance and hit curves of the rounds that a policy starts on the record's texts."""
    visits = _Visits(record, workload, policy)
    curves: tuple[CurveSummary, ...] = ()
    if isinstance(policy, SpeculativeSpeculative):
        curves = tuple(
            summary
            for source, law in visits.laws.items()
            for k in range(law.drafting.num_drafted + 1)
            if (summary := _curve(visits, source, law, k)) is not None
        )
    return AgreementSummary(policy, _acceptance(visits), curves)


def parametric(record: AgreementRecord, workload: Workload, policy: Policy) -> ParametricAgreement:
    """The same numbers as an agreement on which rounds are independent: what easy and hard passages do to rounds that
    follow one another is lost. An accept count without look-ups has the curve of the one before it."""
    summary = summarize_agreement(record, workload, policy)
    by_source = {
        source: tuple(curve.curve for curve in summary.curves if curve.source is source) or (HitCurve(1.0, 0.0),)
        for source in SOURCES
    }
    return ParametricAgreement(
        prompt_tokens=int(record.prompt_length.max()),
        new_tokens=workload.max_new_tokens,
        acceptance=tuple(estimate.value for estimate in summary.acceptance) or (0.0,),
        after_hit=by_source[Source.HIT],
        after_miss=by_source[Source.MISS],
        sampling_temperature=record.temperature,
        num_texts=record.num_prompts,
    )


def hit_rates(
    record: AgreementRecord, workload: Workload, policy: SpeculativeSpeculative, fan_outs: Sequence[int]
) -> dict[Source, list[float]]:
    """For rounds of either source, the share of their look-ups whose outcome is among so many guesses per accept count,
    of the rounds that the policy starts; no entry for a source without look-ups."""
    visits = _Visits(record, workload, policy)
    rates: dict[Source, list[float]] = {}
    for source, law in visits.laws.items():
        arrivals = [visits.starts[source].T * law.ended[k] for k in range(law.drafting.num_drafted + 1)]
        lookups = sum(float((arrive * law.goes_on(k)).sum()) for k, arrive in enumerate(arrivals))
        if lookups >= FEWEST_LOOKUPS:
            rates[source] = [
                sum(float((arrive * law.prepared(k, fan_out)).sum()) for k, arrive in enumerate(arrivals)) / lookups
                for fan_out in fan_outs
            ]
    return rates


class _Visits:
    """Where the rounds of a policy start: `starts[source]` is (width, num_prompts) probabilities."""

    def __init__(self, record: AgreementRecord, workload: Workload, policy: Policy) -> None:
        replay = Replay(record, workload)
        sources = SOURCES if isinstance(policy, SpeculativeSpeculative) else (Source.SYNCHRONOUS,)
        self.most_candidates = record.num_candidates
        self.laws = {source: RoundLaw(replay, policy.drafting(source)) for source in sources}
        self.starts = round_starts(self.laws)


def _acceptance(visits: _Visits) -> tuple[Estimate, ...]:
    longest = max(law.drafting.num_drafted for law in visits.laws.values())
    return tuple(_ratio(*_tested_and_accepted(visits, j)) for j in range(longest))


def _tested_and_accepted(visits: _Visits, j: int) -> tuple[FloatArray, FloatArray]:
    """(num_prompts,) expected numbers of tests of draft token j that it passes, and of all its tests."""
    passed, tested = np.zeros((2, next(iter(visits.starts.values())).shape[1]))
    for source, law in visits.laws.items():
        if j >= law.drafting.num_drafted:
            continue
        survived = np.prod(law.accepted[:j], axis=0) if j else np.ones_like(law.accepted[0])
        is_tested = j < np.minimum(law.num_drafted, law.left)
        mass = visits.starts[source].T * survived * is_tested
        tested += mass.sum(1)
        passed += (mass * law.accepted[j]).sum(1)
    return passed, tested


def _ratio(part: FloatArray, whole: FloatArray) -> Estimate:
    def statistic(weights: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore"):
            return (weights @ part) / (weights @ whole)

    low, high = bootstrap(statistic, len(part))
    return Estimate(float(part.sum() / whole.sum()) if whole.sum() else 0.0, low, high, len(part))


def _curve(visits: _Visits, source: Source, law: RoundLaw, k: int) -> CurveSummary | None:
    """The power law that the misses are likeliest under; None where there are no look-ups."""
    fan_outs = np.array([fan_out for fan_out in FAN_OUTS if fan_out <= visits.most_candidates])
    arrive = visits.starts[source].T * law.ended[k]
    lookups = (arrive * law.goes_on(k)).sum(1)
    if lookups.sum() < FEWEST_LOOKUPS or len(fan_outs) < 2:
        return None
    misses = np.stack([lookups - (arrive * law.prepared(k, int(fan_out))).sum(1) for fan_out in fan_outs], axis=1)
    everything = sum(
        (visits.starts[source].T * law.ended[i] * law.goes_on(i)).sum() for i in range(law.drafting.num_drafted + 1)
    )
    log_fan_outs = np.log(fan_outs)

    def fitted(weights: FloatArray) -> FloatArray:
        return power_law(weights @ misses, weights @ lookups, log_fan_outs)

    def estimate(place: int) -> Estimate:
        value = float(fitted(np.ones((1, num)))[place, 0])
        return Estimate(value, *bootstrap(lambda weights: fitted(weights)[place], num), num)

    num = len(lookups)
    prefactor, exponent = estimate(0), estimate(1)
    deviation = np.abs(misses.sum(0) / lookups.sum() - prefactor.value * fan_outs**-exponent.value).max()
    return CurveSummary(source, k, float(lookups.sum() / everything), prefactor, exponent, float(deviation))


def power_law(misses: FloatArray, lookups: FloatArray, log_fan_outs: FloatArray) -> FloatArray:
    """(2, draws): prefactors c <= 1 and exponents r >= 0 that make (draws, fan-outs) `misses` likeliest, if they were
    Poisson counts of mean c F^-r times the (draws,) `lookups`.

    A line through the logarithms would take the few misses at wide fan-outs for as sure as the many at narrow ones.
    """
    log_c, r = np.full(len(lookups), -0.5), np.full(len(lookups), 0.5)
    for _ in range(MOST_NEWTON_STEPS):
        expected = np.maximum(lookups, 1.0)[:, None] * np.exp(log_c[:, None] - r[:, None] * log_fan_outs)
        excess = misses - expected
        slope_c, slope_r = excess.sum(1), -(excess * log_fan_outs).sum(1)
        of_c, both, of_r = (
            (expected * log_fan_outs**power).sum(1) * sign for power, sign in ((0, 1.0), (1, -1.0), (2, 1.0))
        )
        determinant = np.maximum(of_c * of_r - both**2, 1e-12)
        step_c, step_r = (
            (of_r * slope_c - both * slope_r) / determinant,
            (of_c * slope_r - both * slope_c) / determinant,
        )
        # Where one of them comes to its bound, the other is the best with it.
        is_c_bound, is_r_bound = log_c + step_c >= 0, r + step_r <= 0
        step_c = np.clip(np.where(is_r_bound, slope_c / np.maximum(of_c, 1e-12), step_c), -1.0, 1.0)
        step_r = np.clip(np.where(is_c_bound, slope_r / np.maximum(of_r, 1e-12), step_r), -1.0, 1.0)
        new_c, new_r = np.minimum(0.0, log_c + step_c), np.clip(r + step_r, 0.0, LARGEST_EXPONENT)
        moved = max(np.abs(new_c - log_c).max(), np.abs(new_r - r).max())
        log_c, r = new_c, new_r
        if moved < NEWTON_TOLERANCE:
            break
    return np.stack([np.exp(log_c), r])
