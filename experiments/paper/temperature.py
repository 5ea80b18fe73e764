"""The temperature sweep: tokens/s and hit rate of SSD with a uniform and a geometric fan-out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.paper.drawing import Panel, Series, beside, figure
from experiments.paper.miss_curves import near_curves
from experiments.paper.pair import PairModel, mean_hit_rate, mean_tokens_per_s
from experiments.paper.pair_fit import Study
from experiments.paper.published import NAMES, PAIRS, Published, TemperatureSweep
from experiments.paper.section import Answer, Cell, Figure, Residual, Role, Section, Table
from sim.policy import Fallback, SpeculativeSpeculative, geometric_fan_out

RULES = ("uniform", "geometric")


@dataclass(frozen=True)
class _Point:
    """What a temperature does, by the model that is used and its alternatives.

    `tokens_per_s` and `hit_rate` hold, by the rule of the fan-out, the values of every model, the used one first.
    """

    temperature: float
    model: PairModel
    tokens_per_s: Mapping[str, tuple[float, ...]]
    hit_rate: Mapping[str, tuple[float, ...]]


def section(published: Published, studies: Mapping[str, Study]) -> Section:
    """Figures 4 and 12."""
    points = {pair: _points(published, study) for pair, study in studies.items()}
    return Section(
        title="Temperature (figures 4 and 12)",
        text=(
            "Fitted: at every temperature one shift of all acceptances (on the logit scale), to the tokens/s of SD."
            " Predicted: tokens/s and hit rates of SSD with either fan-out; only the uniform hit rate at temperature"
            " 0 went into the fit of the pair.",
            "Assumed: step times do not depend on the temperature; look-ups miss as in the miss figure at that"
            " temperature; where it has none (0.3; for Qwen 0.7 too), ln c and r are linear in between; the"
            " geometric fan-out is Theorem 12 with the budget of the uniform one, the mean acceptance and the mean"
            " exponent, rounded to integers.",
        ),
        tables=(_table(published, points), _rounds_table(published, points)),
        figures=(_figure(published, points),),
        answers=(_error_answer(published, points), _time_answer(published, points), _rule_answer(published, points)),
        residuals=tuple(r for pair in studies for r in _residuals(published, pair, points[pair])),
    )


def _points(published: Published, study: Study) -> list[_Point]:
    sweep = published.temperatures.pairs[study.pair]
    found = []
    for temperature, sd in zip(published.temperatures.temperatures, sweep.tokens_per_s.sd, strict=True):
        curves = near_curves(published, PAIRS[study.pair], temperature)
        models = [replace(m, curves=curves).matched(sd) for m in (study.model, *study.alternatives)]
        predicted = {rule: [m.predictions(_policy(m, rule)) for m in models] for rule in RULES}
        rates = {rule: tuple(map(mean_tokens_per_s, of_rule)) for rule, of_rule in predicted.items()}
        hits = {rule: tuple(map(mean_hit_rate, of_rule)) for rule, of_rule in predicted.items()}
        found.append(_Point(temperature, models[0], rates, hits))
    return found


def _policy(model: PairModel, rule: str) -> SpeculativeSpeculative:
    settings = model.settings
    if rule == "uniform":
        return settings.ssd(Fallback.DRAFT)
    exponent = float(np.mean([curve.exponent for curve in model.curves]))
    acceptance = float(np.mean(list(model.acceptances.values())))
    fan_out = geometric_fan_out(settings.ssd_length, settings.budget, acceptance, exponent)
    return settings.ssd(Fallback.DRAFT, fan_out)


def _published(sweep: TemperatureSweep, quantity: str, rule: str) -> tuple[float, ...]:
    found: tuple[float, ...] = getattr(getattr(sweep, quantity), rule)
    return found


def _table(published: Published, points: Mapping[str, Sequence[_Point]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, of_pair in points.items():
        sweep = published.temperatures.pairs[pair]
        for index, point in enumerate(of_pair):
            has_curve = published.misses.at(PAIRS[pair], point.temperature) is not None
            for rule in RULES:
                speed, hits = (_published(sweep, name, rule)[index] for name in ("tokens_per_s", "hit_rate"))
                rows.append(
                    (
                        *(NAMES[pair], point.temperature, rule, "published" if has_curve else "in between"),
                        *_beside(speed, point.tokens_per_s[rule], 1),
                        *_beside(hits, point.hit_rate[rule], 3),
                    )
                )
    return Table(
        "temperature",
        "Published and predicted by temperature; *of fits*: the range over the alternative fits of the pair",
        (
            *("pair", "T", "fan-out", "miss curve", "tokens/s", "ours", "off, %", "of fits"),
            *("hit rate", "ours", "off, %", "of fits"),
        ),
        tuple(rows),
    )


def _rounds_table(published: Published, points: Mapping[str, Sequence[_Point]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, of_pair in points.items():
        sweep = published.temperatures.pairs[pair]
        for index, point in enumerate(of_pair):
            for rule in RULES:
                speed, hits = (_published(sweep, name, rule)[index] for name in ("tokens_per_s", "hit_rate"))
                told = _rounds(point.model, hits, speed)
                rows.append((NAMES[pair], point.temperature, rule, *(round(number, 2) for number in told)))
    return Table(
        "temperature_rounds",
        "The mean round of SSD: what the published hit rate and the step times make of it, and what the published"
        " tokens/s say at the tokens per round that SD has; the last column is not explained by hits",
        ("pair", "T", "fan-out", "tokens/round", "round by hit rate, ms", "by tokens/s, ms", "unexplained, ms"),
        tuple(rows),
    )


def _rounds(model: PairModel, hit_rate: float, tokens_per_s: float) -> tuple[float, float, float, float]:
    length, times = model.settings.ssd_length, model.times
    tokens = model.mean_tokens(length)
    by_hits = times.verify_ms + times.late_ms + (1 - hit_rate) * length * times.draft_step_ms
    by_speed = 1e3 * tokens / tokens_per_s
    return tokens, by_hits, by_speed, by_speed - by_hits


def _beside(published: float, ours: Sequence[float], digits: int) -> tuple[Cell, ...]:
    low, high = (round(end, digits) for end in (min(ours), max(ours)))
    return published, round(ours[0], digits), round(100 * (ours[0] / published - 1), 1), f"{low} to {high}"


def _figure(published: Published, points: Mapping[str, Sequence[_Point]]) -> Figure:
    temperatures = published.temperatures.temperatures
    panels = []
    for pair, of_pair in points.items():
        sweep = published.temperatures.pairs[pair]
        for name, label in (("tokens_per_s", "tokens/s"), ("hit_rate", "hit rate")):
            series: list[Series] = []
            for look, rule in enumerate(RULES):
                ours = [getattr(point, name)[rule][0] for point in of_pair]
                series += beside(f"SSD {rule}", temperatures, _published(sweep, name, rule), ours, look)
            panels.append(Panel(NAMES[pair], "temperature", label, tuple(series)))
    return figure("temperature", "Tokens/s and hit rate of SSD by temperature: published points, our lines", panels)


def _differences(published: Published, points: Mapping[str, Sequence[_Point]], name: str) -> list[float]:
    """Ours over published less 1, of every temperature and rule."""
    return [
        getattr(point, name)[rule][0] / _published(published.temperatures.pairs[pair], name, rule)[index] - 1
        for pair, of_pair in points.items()
        for index, point in enumerate(of_pair)
        for rule in RULES
    ]


def _error_answer(published: Published, points: Mapping[str, Sequence[_Point]]) -> Answer:
    told = []
    for name, label in (("tokens_per_s", "tokens/s"), ("hit_rate", "hit rates")):
        off = np.abs(_differences(published, points, name))
        told.append(f"{label} to {100 * off.mean():.1f} % on the mean, {100 * off.max():.1f} % at worst")
    question = "Is the fall of SSD with the temperature predicted from SD and the miss curves?"
    return Answer(question, f"{'; '.join(told)} (two pairs, four temperatures, two fan-outs).", "table temperature")


def _time_answer(published: Published, points: Mapping[str, Sequence[_Point]]) -> Answer:
    told = []
    for pair, of_pair in points.items():
        sweep, missing = published.temperatures.pairs[pair], []
        for index, point in enumerate(of_pair):
            of_rules = [
                [_published(sweep, name, rule)[index] for name in ("hit_rate", "tokens_per_s")] for rule in RULES
            ]
            missing.append(float(np.mean([_rounds(point.model, *of_rule)[-1] for of_rule in of_rules])))
        shown = ", ".join(
            f"{round(ms, 1) + 0.0:.1f} at T={p.temperature:g}" for ms, p in zip(missing, of_pair, strict=True)
        )
        told.append(f"{NAMES[pair]}: {shown}")
    question = "How many milliseconds of a round of SSD are explained neither by hits nor by the steps fitted at T=0?"
    return Answer(question, f"{'; '.join(told)} (published hit rates).", "table temperature_rounds")


def _rule_answer(published: Published, points: Mapping[str, Sequence[_Point]]) -> Answer:
    told = []
    for pair, of_pair in points.items():
        sweep = published.temperatures.pairs[pair].tokens_per_s
        for index in (0, len(of_pair) - 1):
            gain = sweep.geometric[index] / sweep.uniform[index] - 1
            ours = of_pair[index].tokens_per_s["geometric"][0] / of_pair[index].tokens_per_s["uniform"][0] - 1
            told.append(f"{NAMES[pair]} T={of_pair[index].temperature:g} {100 * gain:+.1f} % ({100 * ours:+.1f} %)")
    question = "What does a geometric fan-out gain in tokens/s over a uniform one, published (ours)?"
    return Answer(question, "; ".join(told) + ".", "table temperature")


def _residuals(published: Published, pair: str, points: Sequence[_Point]) -> list[Residual]:
    sweep, errors, found = published.temperatures.pairs[pair], published.errors, []

    def residual(quantity: str, unit: str, value: float, ours: float, error: float, role: Role) -> None:
        found.append(Residual("figures 4, 12", f"{NAMES[pair]} {quantity}", unit, value, ours, error, role))

    for index, point in enumerate(points):
        at = f"T={point.temperature:g}"
        ours = point.model.mean_tokens_per_s(point.model.settings.sd)
        sd, speed_error = sweep.tokens_per_s.sd[index], errors.figure_tokens_per_s
        residual(f"SD {at}", "tokens/s", sd, ours, speed_error, Role.FITTED)
        for rule in RULES:
            speed, hits = (_published(sweep, name, rule)[index] for name in ("tokens_per_s", "hit_rate"))
            mine = point.tokens_per_s[rule][0], point.hit_rate[rule][0]
            was_fitted = rule == "uniform" and math.isclose(point.temperature, 0)
            role = Role.FITTED if was_fitted else Role.PREDICTED
            residual(f"SSD {rule} {at}", "tokens/s", speed, mine[0], speed_error, Role.PREDICTED)
            residual(f"SSD {rule} {at} hit rate", "rate", hits, mine[1], errors.figure_rate, role)
    return found
