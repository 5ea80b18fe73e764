"""Saguaro sampling: the published trade of acceptance against hits, and a small family of distributions behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares
from scipy.special import softmax
from scipy.stats import norm

from experiments.paper.drawing import Panel, Series, figure
from experiments.paper.published import Published
from experiments.paper.section import Answer, Cell, Figure, Residual, Role, Section, Table
from sim.proposal import downweighted_proposal

FloatArray = NDArray[np.float64]
VOCABULARY, NUM_POSITIONS = 64, 200
SPECULATION_LENGTH = 7
FAN_OUTS = (1, 2, 3, 4, 6, 8)
SMALLEST_C = 1e-6
START = (0.5, 0.5, 0.0)  # sharpness, its spread, noise, all in logarithms


@dataclass(frozen=True)
class Population:
    """Positions of a text: p and q, (positions, vocabulary), the tokens in the order of q.

    The logit of the draft at the token of rank i is -s ln i; ln s is normal over the positions. That of the target is
    the same plus normal noise.
    """

    target_probs: FloatArray
    draft_probs: FloatArray

    @classmethod
    def of(cls, sharpness: float, spread: float, noise: float) -> Population:
        """Median of s, standard deviation of ln s, standard deviation of the noise. The same numbers make the same
        population."""
        levels = sharpness * np.exp(spread * norm.ppf((np.arange(NUM_POSITIONS) + 0.5) / NUM_POSITIONS))
        logits = -levels[:, None] * np.log(np.arange(1, VOCABULARY + 1))
        return cls(softmax(logits + noise * _noise(), axis=1), softmax(logits, axis=1))

    def rates(self, fan_out: int, downweight: float, num_downweighted: int) -> tuple[float, float]:
        """Acceptance rate and hit rate of rounds with `SPECULATION_LENGTH` draft tokens whose positions are drawn from
        this population: the bonus token has the law (p - q')+ after a rejection, and p after none; the rejected token
        is not among the prepared ones."""
        p, q = self.target_probs, self.draft_probs
        overlap = np.minimum(p, q).sum(1)
        proposal = downweighted_proposal(p, q, overlap, num_downweighted, downweight)
        accepted = np.minimum(p, proposal.top).sum(1)
        residual = np.maximum(0.0, p - proposal.top)
        _, moved_up = proposal.rejected_within(fan_out)
        prepared = residual[:, :fan_out].sum(1) + moved_up * residual[:, fan_out]  # of the mass 1 - accepted
        acceptance = float(accepted.mean())
        after_rejection = float(prepared.sum() / (1 - accepted).sum())
        all_accepted = acceptance**SPECULATION_LENGTH
        after_all = float(p[:, :fan_out].sum(1).mean())
        return acceptance, (1 - all_accepted) * after_rejection + all_accepted * after_all


@cache
def _noise() -> FloatArray:
    return np.random.default_rng(0).standard_normal((NUM_POSITIONS, VOCABULARY))


@dataclass(frozen=True)
class SamplingFit:
    """A population and a fan-out, fitted to the two ends of the curve."""

    population: Population
    fan_out: int
    misfit: float  # root mean square of the four numbers fitted, in rates

    def at_acceptance(self, acceptance: float) -> tuple[float, float]:
        """C and the hit rate where the acceptance is as given."""

        def excess(log_c: float) -> float:
            return self.population.rates(self.fan_out, float(np.exp(log_c)), self.fan_out)[0] - acceptance

        low, high = float(np.log(SMALLEST_C)), 0.0
        if excess(high) <= 0 or excess(low) >= 0:  # beyond the ends, by the misfit
            log_c = high if excess(high) <= 0 else low
        else:
            log_c = float(brentq(excess, low, high, xtol=1e-6))
        downweight = float(np.exp(log_c))
        return downweight, self.population.rates(self.fan_out, downweight, self.fan_out)[1]


def fit_sampling(ends: Sequence[tuple[float, float, float]], fan_out: int) -> SamplingFit:
    """Fit a population to (C, acceptance, hit rate) at the two ends."""
    wanted = np.array([[acceptance, hits] for _, acceptance, hits in ends])

    def misfit(x: FloatArray) -> FloatArray:
        population = Population.of(*np.exp(x))
        ours = [population.rates(fan_out, downweight, fan_out) for downweight, _, _ in ends]
        return (np.array(ours) - wanted).ravel()

    found = least_squares(misfit, START, bounds=([-3, -4, -4], [2.5, 1.5, 2.5]), diff_step=1e-4)
    return SamplingFit(Population.of(*np.exp(found.x)), fan_out, float(np.sqrt(np.mean(found.fun**2))))


def section(published: Published) -> Section:
    """Figure 5, left."""
    points = list(
        zip(
            published.sampling.downweights,
            published.sampling.acceptance_rates,
            published.sampling.hit_rates,
            strict=True,
        )
    )
    fits = [fit_sampling([points[0], points[-1]], fan_out) for fan_out in FAN_OUTS]
    best = min(fits, key=lambda fit: fit.misfit)
    return Section(
        title="Saguaro sampling (figure 5, left)",
        text=(
            "Fitted: three numbers of a family of distributions - how sharp the draft's distribution is, how much"
            " that differs between positions, how far the target's logits lie from the draft's - to acceptance and"
            " hit rate at both ends (C = 1 and the smallest C), at each fan-out. Predicted: the hit rate at the"
            " published acceptance of the points in between; there C is ours, for the published one was read off a"
            " colour bar.",
            f"Assumed: {SPECULATION_LENGTH} draft tokens, positions independent of each other, {VOCABULARY} tokens,"
            " the top F down-weighted as in Definition 14 with the rejected token left out of the prepared ones;"
            " temperature and fan-out are not published.",
        ),
        tables=(_table(points, best), _fan_out_table(points, fits)),
        figures=(_figure(points, best),),
        answers=(_answer(points, best), _monotone_answer(published, fits)),
        residuals=tuple(_residuals(published, points, best)),
    )


Point = tuple[float, float, float]  # C, acceptance rate, hit rate


def _table(points: Sequence[Point], best: SamplingFit) -> Table:
    rows = []
    for downweight, acceptance, hits in points:
        our_c, our_hits = best.at_acceptance(acceptance)
        numbers = (acceptance, hits, round(our_hits, 3), round(our_hits - hits, 3))
        rows.append((downweight, float(f"{our_c:.2g}"), *numbers))
    head = ("C as read", "C, ours", "acceptance rate", "hit rate", "ours", "ours - published")
    caption = f"Hit rate at the published acceptance, F={best.fan_out} (the first and the last point were fitted)"
    return Table("sampling", caption, head, tuple(rows))


def _inner_rms(points: Sequence[Point], fit: SamplingFit) -> float:
    off = [fit.at_acceptance(acceptance)[1] - hits for _, acceptance, hits in points[1:-1]]
    return float(np.sqrt(np.mean(np.square(off))))


def _fan_out_table(points: Sequence[Point], fits: Sequence[SamplingFit]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for fit in fits:
        by_c = [fit.population.rates(fit.fan_out, downweight, fit.fan_out) for downweight, _, _ in points]
        off = float(
            np.sqrt(np.mean([(a - acceptance) ** 2 for (a, _), (_, acceptance, _) in zip(by_c, points, strict=True)]))
        )
        rows.append((fit.fan_out, round(fit.misfit, 4), round(_inner_rms(points, fit), 4), round(off, 4)))
    return Table(
        "sampling_fan_outs",
        "Root mean squares by fan-out: of the four fitted numbers, of the hit rates in between at the published"
        " acceptance, and of the acceptance at the C that was read",
        ("F", "fitted", "hit rate in between", "acceptance at C as read"),
        tuple(rows),
    )


def _figure(points: Sequence[Point], best: SamplingFit) -> Figure:
    _, acceptances, hits = zip(*points, strict=True)
    line = np.linspace(min(acceptances), max(acceptances), 40).tolist()
    ours = [best.at_acceptance(acceptance)[1] for acceptance in line]
    series = (
        Series("published", acceptances, hits, 0, is_line=False),
        Series(f"ours, F={best.fan_out}", line, ours, 0, is_line=True),
    )
    caption = "Hit rate against acceptance as C falls from right to left"
    return figure("sampling", caption, [Panel("Saguaro sampling", "acceptance rate", "hit rate", series)])


def _answer(points: Sequence[Point], best: SamplingFit) -> Answer:
    (_, first, low), (_, last, high) = points[0], points[-1]
    answer = (
        f"Published: {high - low:+.3f} hits for {last - first:+.3f} acceptance. From its two ends the points in"
        f" between are predicted to {_inner_rms(points, best):.3f} (root mean square), at F={best.fan_out}, which"
        f" fits the ends best (to {best.misfit:.3f})."
    )
    return Answer("What does Saguaro sampling trade?", answer, "tables sampling, sampling_fan_outs")


def _monotone_answer(published: Published, fits: Sequence[SamplingFit]) -> Answer:
    rising = _rises(published.sampling.hit_rates)
    curves = [
        [fit.population.rates(fit.fan_out, c, fit.fan_out)[1] for c in published.sampling.downweights] for fit in fits
    ]
    num = sum(_rises(curve) for curve in curves)
    answer = (
        f"The published hit rates {'do' if rising else 'do not'}, and so do {num} of {len(fits)} fitted families;"
        " with the rejected token left out a law that lowers them exists (table contradictions), but it is not what"
        " is seen here."
    )
    return Answer("Do hits rise whenever C falls (Theorem 15)?", answer, "table sampling")


def _rises(values: Sequence[float]) -> bool:
    return bool(np.all(np.diff(values) >= 0))


def _residuals(published: Published, points: Sequence[Point], best: SamplingFit) -> list[Residual]:
    ends, error = (0, len(points) - 1), published.errors.figure_rate
    return [
        Residual(
            source="figure 5 left",
            quantity=f"hit rate at acceptance {acceptance:g} (C={downweight:g} as read)",
            unit="rate",
            published=hits,
            ours=best.at_acceptance(acceptance)[1],
            error=error,
            role=Role.FITTED if index in ends else Role.PREDICTED,
        )
        for index, (downweight, acceptance, hits) in enumerate(points)
    ]
