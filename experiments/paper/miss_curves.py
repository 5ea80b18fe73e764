"""Miss rate against fan-out: c F^-r, where it bends, and what it says of the hit rate of all rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import chi2 as chi2_law

from experiments.paper.drawing import Panel, Series, figure
from experiments.paper.published import Published
from experiments.paper.section import Answer, Cell, Figure, Residual, Role, Section, Table
from sim.errors import BadInput
from sim.parametric import HitCurve
from sim.theory import stationary_hit_rate

FloatArray = NDArray[np.float64]
SOURCES = ("primary", "backup")
FITTED_UP_TO = 16  # fan-out; larger ones are predicted
NEAR = 8  # fan-out up to which the curves that the simulator is given are fitted: decoders have fan-outs like these
SIGNIFICANCE = 0.05


class Form(StrEnum):
    """How the miss rate falls with the fan-out F."""

    POWER = "c F^-r"
    FLOOR = "c F^-r + m"
    BEND = "c F^-(r + s ln F)"


START = {Form.POWER: (-1.0, 0.5), Form.FLOOR: (-1.0, 0.7, 0.01), Form.BEND: (-1.0, 0.5, 0.0)}


@dataclass(frozen=True)
class MissFit:
    """Least squares of one form through miss rates whose errors are normal with a known deviation.

    `values` are c, r and the third number of the form. `half_widths` are of 95 % intervals, widened where the form fits
    worse than the errors allow. `aicc` is Akaike's criterion corrected for few points, in which errors are known.
    """

    form: Form
    values: tuple[float, ...]
    half_widths: tuple[float, ...]
    chi2: float
    num_points: int

    @property
    def p_value(self) -> float:
        """Probability of so large a misfit if the form is right."""
        return float(chi2_law.sf(self.chi2, self.num_points - len(self.values)))

    @property
    def aicc(self) -> float:
        num, points = len(self.values), self.num_points
        return self.chi2 + 2 * num + 2 * num * (num + 1) / (points - num - 1)

    def miss_rate(self, fan_out: Sequence[float] | FloatArray) -> FloatArray:
        """(fan-outs,)"""
        c, *rest = self.values
        return _shape(self.form, (math.log(c), *rest), np.asarray(fan_out, dtype=float))

    def curve(self) -> HitCurve:
        """Of the simulator: the first two numbers."""
        return HitCurve(*self.values[:2])


def _shape(form: Form, x: Sequence[float] | FloatArray, fan_outs: FloatArray) -> FloatArray:
    log_c, r, *third = x
    logs = np.log(fan_outs)
    slope = r + third[0] * logs if form is Form.BEND else r
    return np.exp(log_c - slope * logs) + (third[0] if form is Form.FLOOR else 0.0)


def fit_misses(form: Form, fan_outs: Sequence[float] | FloatArray, misses: FloatArray, error: float) -> MissFit:
    """Fit one form to (fan-outs,) miss rates known to `error`."""
    places = np.asarray(fan_outs, dtype=float)
    found = least_squares(lambda x: (_shape(form, x, places) - misses) / error, START[form], x_scale="jac")
    chi2, freedom = 2 * float(found.cost), len(places) - len(found.x)
    deviations = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac))) * math.sqrt(max(1.0, chi2 / max(1, freedom)))
    c = math.exp(found.x[0])
    widths = 1.96 * deviations * np.array([c, *np.ones(len(found.x) - 1)])
    return MissFit(form, (c, *found.x[1:].tolist()), tuple(widths.tolist()), chi2, len(places))


def holds_up_to(fan_outs: Sequence[int], misses: FloatArray, error: float) -> int | None:
    """The largest fan-out up to which one power law agrees with the miss rates, None if not even the first three do."""
    held = None
    for num in range(3, len(fan_outs) + 1):
        if fit_misses(Form.POWER, fan_outs[:num], misses[:num], error).p_value < SIGNIFICANCE:
            break
        held = fan_outs[num - 1]
    return held


def local_exponents(fan_outs: Sequence[int], misses: FloatArray) -> list[float]:
    """-d ln(miss) / d ln(F) between neighbouring fan-outs."""
    points = list(zip(fan_outs, misses.tolist(), strict=True))
    return [math.log(m / n) / math.log(g / f) for (f, m), (g, n) in pairwise(points)]


# ----------------------------------------------------------------------------------------------- for the simulator


def near_curves(published: Published, draft: str, temperature: float) -> tuple[HitCurve, HitCurve]:
    """Curves after a hit and after a miss, fitted to small fan-outs; between published temperatures ln c and r are
    linear."""
    rates = published.misses.drafts[draft]
    known = [entry.temperature for entry in rates]
    num = sum(fan_out <= NEAR for fan_out in published.misses.fan_outs)

    def curve(source: str) -> HitCurve:
        fits = [
            fit_misses(
                Form.POWER, published.misses.fan_outs[:num], entry.of(source)[:num], published.errors.figure_rate
            )
            for entry in rates
        ]
        log_c, r = (
            float(np.interp(temperature, known, column))
            for column in ([math.log(fit.values[0]) for fit in fits], [fit.values[1] for fit in fits])
        )
        return HitCurve(math.exp(log_c), r)

    return curve("primary"), curve("backup")


def published_curves(published: Published, draft: str, temperature: float, fan_out: float) -> tuple[HitCurve, HitCurve]:
    """Curves after a hit and after a miss that hold at one fan-out only: through the published points, straight in
    logarithms between them, and continued below and above them."""
    rates = published.misses.at(draft, temperature)
    if rates is None:
        raise BadInput("temperature", f"{draft} has no published miss curve there", temperature)
    logs = np.log(published.misses.fan_outs)

    def curve(source: str) -> HitCurve:
        misses = np.log(rates.of(source))
        index = int(np.clip(np.searchsorted(logs, math.log(fan_out)), 1, len(logs) - 1))
        slope = (misses[index] - misses[index - 1]) / (logs[index] - logs[index - 1])
        return HitCurve(min(1.0, math.exp(misses[index] + slope * (math.log(fan_out) - logs[index]))), 0.0)

    return curve("primary"), curve("backup")


def hit_rate_of_all(after_hit: float, after_miss: float, *, exchanged: bool = False) -> float:
    """Equation (1), or with its two rates exchanged, as the combined curve of the figure has it."""
    return stationary_hit_rate(after_miss, after_hit) if exchanged else stationary_hit_rate(after_hit, after_miss)


# ------------------------------------------------------------------------------------------------------------ section


@dataclass(frozen=True)
class _Curve:
    draft: str
    temperature: float
    source: str
    misses: FloatArray

    @property
    def name(self) -> str:
        return f"{self.draft} T={self.temperature:g} after {self.source}"


def _curves(published: Published) -> list[_Curve]:
    return [
        _Curve(draft, rates.temperature, source, rates.of(source))
        for draft, of_draft in published.misses.drafts.items()
        for rates in of_draft
        for source in SOURCES
    ]


def section(published: Published) -> Section:
    """Figures 3 and 10."""
    curves = _curves(published)
    fan_outs, error = published.misses.fan_outs, published.errors.figure_rate
    best = [_best_form(fan_outs, curve.misses, error) for curve in curves]
    return Section(
        title="Miss rate against fan-out (figures 3 and 10)",
        text=(
            f"Assumed: errors of the points are independent and normal with deviation {error:g}, the reading of the"
            f" figure. Residuals are of c F^-r fitted to F <= {FITTED_UP_TO}; larger fan-outs are predicted.",
        ),
        tables=(_fits_table(curves, fan_outs, error), _exponents_table(curves, fan_outs), _combined_table(published)),
        figures=(_figure(curves, fan_outs, error),),
        answers=(_form_answer(curves, best), _bend_answer(curves, fan_outs, error)),
        residuals=tuple(entry for curve in curves for entry in _residuals(curve, fan_outs, error)),
    )


def _best_form(fan_outs: Sequence[int], misses: FloatArray, error: float) -> MissFit:
    return min((fit_misses(form, fan_outs, misses, error) for form in Form), key=lambda fit: fit.aicc)


def _fits_table(curves: Sequence[_Curve], fan_outs: Sequence[int], error: float) -> Table:
    def row(curve: _Curve) -> tuple[Cell, ...]:
        fits = {form: fit_misses(form, fan_outs, curve.misses, error) for form in Form}
        power, lowest = fits[Form.POWER], min(fit.aicc for fit in fits.values())
        numbers = [x for value, width in zip(power.values, power.half_widths, strict=True) for x in (value, width)]
        excess = [round(fits[form].aicc - lowest, 1) for form in Form]
        held = holds_up_to(fan_outs, curve.misses, error)
        floor = fits[Form.FLOOR]
        third = (floor.values[2], floor.half_widths[2])
        return (curve.draft, curve.temperature, curve.source, *numbers, f"{power.p_value:.2g}", held, *excess, *third)

    head = ("draft", "T", "after", "c", "+-", "r", "+-", "p of c F^-r", "holds up to F", *(f"AICc {f}" for f in Form))
    return Table(
        "miss_fits",
        "c F^-r through all fan-outs with 95 % intervals; the fan-out up to which it agrees with the points (p >="
        " 0.05); AICc over that of the best form; the floor m of the second form",
        (*head, "m", "+-"),
        tuple(row(curve) for curve in curves),
    )


def _exponents_table(curves: Sequence[_Curve], fan_outs: Sequence[int]) -> Table:
    head = ("draft", "T", "after", *(f"r {f} to {g}" for f, g in pairwise(fan_outs)))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (curve.draft, curve.temperature, curve.source, *(round(r, 3) for r in local_exponents(fan_outs, curve.misses)))
        for curve in curves
    )
    return Table("miss_local_exponents", "Exponent between neighbouring fan-outs; a power law has one", head, rows)


def _combined_table(published: Published) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for draft, of_draft in published.misses.drafts.items():
        for rates in of_draft:
            hits = [
                (1 - primary, 1 - backup)
                for primary, backup in zip(rates.after_primary, rates.after_backup, strict=True)
            ]
            for exchanged in (False, True):
                name = "exchanged" if exchanged else "equation (1)"
                combined = (round(hit_rate_of_all(*pair, exchanged=exchanged), 3) for pair in hits)
                rows.append((draft, rates.temperature, name, *combined))
    head = ("draft", "T", "by", *(f"F={fan_out}" for fan_out in published.misses.fan_outs))
    caption = "Hit rate of all rounds from the two curves: by equation (1), and with primary and backup exchanged"
    return Table("combined_hit_rates", caption, head, tuple(rows))


def _figure(curves: Sequence[_Curve], fan_outs: Sequence[int], error: float) -> Figure:
    def panel(draft: str) -> Panel:
        series: list[Series] = []
        for look, curve in enumerate(curve for curve in curves if curve.draft == draft):
            fit = _fitted(curve, fan_outs, error)
            label = f"T={curve.temperature:g} after {curve.source}"
            series.append(Series(label, fan_outs, curve.misses.tolist(), look, is_line=False))
            series.append(
                Series(f"r = {fit.values[1]:.2f}", fan_outs, fit.miss_rate(fan_outs).tolist(), look, is_line=True)
            )
        return Panel(draft, "fan-out F", "miss rate", tuple(series), log_x=True, log_y=True)

    caption = f"Miss rate by fan-out: published points, and c F^-r fitted to F <= {FITTED_UP_TO} and continued"
    return figure("miss_rate", caption, [panel(draft) for draft in dict.fromkeys(curve.draft for curve in curves)])


def _fitted(curve: _Curve, fan_outs: Sequence[int], error: float) -> MissFit:
    num = sum(fan_out <= FITTED_UP_TO for fan_out in fan_outs)
    return fit_misses(Form.POWER, fan_outs[:num], curve.misses[:num], error)


def _residuals(curve: _Curve, fan_outs: Sequence[int], error: float) -> list[Residual]:
    ours = _fitted(curve, fan_outs, error).miss_rate(fan_outs)
    return [
        Residual(
            source="figures 3, 10",
            quantity=f"miss rate {curve.name} F={fan_out}",
            unit="rate",
            published=float(published),
            ours=float(mine),
            error=error,
            role=Role.FITTED if fan_out <= FITTED_UP_TO else Role.PREDICTED,
        )
        for fan_out, published, mine in zip(fan_outs, curve.misses, ours, strict=True)
    ]


def _form_answer(curves: Sequence[_Curve], best: Sequence[MissFit]) -> Answer:
    def counted(keep: Callable[[_Curve], bool]) -> str:
        forms = [fit.form for curve, fit in zip(curves, best, strict=True) if keep(curve)]
        return ", ".join(f"{forms.count(form)} {form.value}" for form in Form if form in forms)

    cold, warm = counted(lambda curve: curve.temperature == 0), counted(lambda curve: curve.temperature > 0)
    answer = f"Best by AICc at T=0: {cold}; at T>0: {warm} (number of curves)."
    return Answer("Is the miss rate a power law of the fan-out?", answer, "table miss_fits")


def _bend_answer(curves: Sequence[_Curve], fan_outs: Sequence[int], error: float) -> Answer:
    held = [holds_up_to(fan_outs, curve.misses, error) for curve in curves]
    counts = {f: held.count(f) for f in sorted({f for f in held if f is not None})}
    told = ", ".join(f"{number} up to F={fan_out}" for fan_out, number in counts.items())
    nowhere = held.count(None)
    answer = (
        f"One power law agrees with the points of {told} (curves); {nowhere} of {len(curves)} bend within their first"
        " three points."
    )
    return Answer("Where does the power law bend?", answer, "tables miss_fits, miss_local_exponents")
