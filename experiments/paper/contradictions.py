"""Where published numbers contradict each other or the theory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from experiments.paper.miss_curves import hit_rate_of_all, published_curves
from experiments.paper.pair_fit import NOT_WORSE, Study, same_settings
from experiments.paper.published import NAMES, PAIRS, Published
from experiments.paper.section import Answer, Cell, Section, Table
from sim.theory import downweighted, hit_given_rejection, miss_rate

# Four tokens: the draft's weights, the target's probabilities, the fan-out and the C of a law on which hits fall.
WEIGHTS, TARGET, FAN_OUT = (10.0, 1.0, 0.999, 0.01), (0.70, 0.10, 0.15, 0.05), 2
DOWNWEIGHTS = (1.0, 0.6, 0.5, 0.3, 0.1)
WIDEST = 128.0


@dataclass(frozen=True)
class Contradiction:
    """Two things said of one quantity, and what follows for the report."""

    what: str
    one: str
    other: str
    consequence: str


def contradictions(published: Published, studies: Mapping[str, Study]) -> list[Contradiction]:
    """All that were found, with the figures that show them."""
    return [
        *_literal_miss_rate(published),
        *_same_settings_differ(published),
        *_stated_fan_out(studies),
        *_flat_misses(published),
        _rejected_left_out(),
    ]


def _literal_miss_rate(published: Published) -> list[Contradiction]:
    """Definition 11 without a prefactor."""
    small = [float(rates.of("primary")[0]) for of_draft in published.misses.drafts.values() for rates in of_draft]
    fan_out = published.misses.fan_outs[0]
    prefactors = [m * fan_out**0.5 for m in small]
    return [
        Contradiction(
            what="miss rate, Definition 11 and figures 3, 10",
            one=f"F^-r: {miss_rate(1, 0.5):g} at F=1 for every r, no hit at all",
            other=f"measured at F={fan_out}: {min(small):g} to {max(small):g} after a hit, which at r=0.5 needs a"
            f" prefactor of {min(prefactors):.2f} to {max(prefactors):.2f}",
            consequence="a prefactor c is fitted: c F^-r",
        )
    ]


def _same_settings_differ(published: Published) -> list[Contradiction]:
    found = []
    for name, values in same_settings(published).items():
        pair, decoder = name.split()
        spread = max(values) / min(values) - 1
        rounding = 2 * published.errors.table_tokens_per_s / min(values)
        if spread > 2 * rounding:
            shown = ", ".join(f"{value:g}" for value in values[1:])
            found.append(
                Contradiction(
                    what=f"{NAMES[pair]} {decoder.upper()}, greedy, batch 1, tokens/s",
                    one=f"Table B.3: {values[0]:g}",
                    other=f"batch and temperature figures: {shown}",
                    consequence=f"{100 * spread:.1f} % apart, beyond rounding ({100 * rounding:.1f} %): no fit of all"
                    " can be closer",
                )
            )
    return found


def _stated_fan_out(studies: Mapping[str, Study]) -> list[Contradiction]:
    """F=1 in the batch figure, whose batch 1 is Table B.3's setting."""
    found = []
    for study in studies.values():
        profile, best = study.search.profile("fan_out"), study.search.best
        if 1 in profile and profile[1] - best.chi2 > NOT_WORSE:
            found.append(
                Contradiction(
                    what=f"{NAMES[study.pair]} fan-out of the batch figure",
                    one="stated: F=1",
                    other=f"its batch 1, Table B.3 and the hit rate agree on F={best.settings.fan_out}; F=1 misfits by"
                    f" {profile[1] - best.chi2:.0f} more (significant: {NOT_WORSE:.1f})",
                    consequence="the fan-out of the fit is used",
                )
            )
    return found


def _flat_misses(published: Published) -> list[Contradiction]:
    """Hit rates of the temperature figure against those of the miss figure by equation (1)."""
    found = []
    for pair, draft in PAIRS.items():
        fan_outs = implied_fan_outs(published, pair, exchanged=False)
        known = {t: f for t, f in fan_outs.items() if f is not None}
        if len(known) > 1 and max(known.values()) > 1.5 * min(known.values()):
            rates = published.temperatures.pairs[pair].hit_rate.uniform
            shown = ", ".join(f"F={fan_out:.1f} at T={t:g}" for t, fan_out in known.items())
            found.append(
                Contradiction(
                    what=f"{NAMES[pair]} uniform hit rate by temperature",
                    one=f"temperature figure: {rates[0]:g} at T=0, {rates[-1]:g} at T=1",
                    other=f"miss figure ({draft}) and equation (1) give them at {shown}",
                    consequence="no one fan-out explains both; hit rates at high temperatures come out too high",
                )
            )
    return found


def implied_fan_outs(published: Published, pair: str, *, exchanged: bool) -> dict[float, float | None]:
    """The fan-out at which the miss figure gives the uniform hit rate of the temperature figure, by temperature; None
    where no fan-out from 1 to 128 does. By equation (1), or with its rates exchanged."""
    sweep, found = published.temperatures, {}
    for temperature, hits in zip(sweep.temperatures, sweep.pairs[pair].hit_rate.uniform, strict=True):
        if published.misses.at(PAIRS[pair], temperature) is not None:
            found[temperature] = _solved(_excess(published, pair, temperature, hits, exchanged=exchanged))
    return found


def _excess(
    published: Published, pair: str, temperature: float, hits: float, *, exchanged: bool
) -> Callable[[float], float]:
    def excess(fan_out: float) -> float:
        curves = published_curves(published, PAIRS[pair], temperature, fan_out)
        after_hit, after_miss = (curve.hit_rate(1) for curve in curves)  # the curves hold at this fan-out only
        return hit_rate_of_all(after_hit, after_miss, exchanged=exchanged) - hits

    return excess


def _solved(excess: Callable[[float], float]) -> float | None:
    if excess(1.0) > 0 or excess(WIDEST) < 0:
        return None
    return float(brentq(excess, 1.0, WIDEST, xtol=1e-6))


def hits_by_downweight() -> list[tuple[float, float]]:
    """(C, hit rate given a rejection) on the four tokens, the rejected one left out of the prepared ones."""
    total = sum(WEIGHTS)
    draft = [weight / total for weight in WEIGHTS]
    return [
        (c, hit_given_rejection(TARGET, draft, downweighted(draft, FAN_OUT, c), FAN_OUT, leave_out_rejected=True))
        for c in DOWNWEIGHTS
    ]


def _rejected_left_out() -> Contradiction:
    shown = ", ".join(f"{hits:.3f} (C={c:g})" for c, hits in hits_by_downweight())
    return Contradiction(
        what="Theorem 15 and the algorithm",
        one="hits never fall when C falls, if the prepared tokens are the top F",
        other=f"the algorithm leaves the drafted token out; then on four tokens hits are {shown}",
        consequence="the planner down-weights the top F + 1 tokens; the published figure does rise",
    )


# ------------------------------------------------------------------------------------------------------------ section


def section(published: Published, studies: Mapping[str, Study]) -> Section:
    """All contradictions, and equation (1) with its rates exchanged."""
    found = contradictions(published, studies)
    return Section(
        title="Contradictions",
        text=(
            "The combined curve of the miss figure is not among the numbers carried here; when the figure was read"
            " it was noted to equal equation (1) with primary and backup exchanged. Table combined_hit_rates has"
            " both; table implied_fan_outs asks which of the two agrees with the hit rates of the temperature"
            " figure.",
        ),
        tables=(_table(found), _implied_table(published)),
        answers=(_exchanged_answer(published), *_answers(found)),
    )


def _table(found: Sequence[Contradiction]) -> Table:
    rows = tuple((entry.what, entry.one, entry.other, entry.consequence) for entry in found)
    return Table("contradictions", "Published twice, or against the theory", ("of", "one", "other", "here"), rows)


def _implied_table(published: Published) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in PAIRS:
        columns = [implied_fan_outs(published, pair, exchanged=exchanged) for exchanged in (False, True)]
        for temperature in columns[0]:
            implied = (None if f is None else round(f, 2) for f in (column[temperature] for column in columns))
            rows.append((NAMES[pair], temperature, *implied))
    return Table(
        "implied_fan_outs",
        "The uniform fan-out at which the miss figure gives the hit rate of the temperature figure",
        ("pair", "T", "by equation (1)", "exchanged"),
        tuple(rows),
    )


def _spread(fan_outs: Mapping[float, float | None]) -> float:
    """Largest over smallest implied fan-out."""
    known = [fan_out for fan_out in fan_outs.values() if fan_out is not None]
    return max(known) / min(known)


def _exchanged_answer(published: Published) -> Answer:
    spreads = {
        exchanged: [_spread(implied_fan_outs(published, pair, exchanged=exchanged)) for pair in PAIRS]
        for exchanged in (False, True)
    }
    right, wrong = (float(np.exp(np.mean(np.log(spreads[exchanged])))) for exchanged in (False, True))
    answer = (
        "As it stands: the fan-outs that explain the hit rates of the temperature figure differ between temperatures"
        f" by a factor of {right:.2f}, and of {wrong:.2f} with the rates exchanged (geometric mean of the pairs)"
    )
    verdict = "." if right < wrong else "; the temperature figure speaks for the exchange."
    return Answer("Equation (1), or its rates exchanged?", answer + verdict, "table implied_fan_outs")


def _answers(found: Sequence[Contradiction]) -> list[Answer]:
    told = "; ".join(f"{entry.what}" for entry in found)
    return [Answer("What contradicts itself?", f"{len(found)} things: {told}.", "table contradictions")]
