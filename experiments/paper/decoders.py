"""Table B.3: AR, SD and SSD of two pairs on four data sets, and what K, fan-out and step times explain it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.paper.drawing import Panel, Series, figure
from experiments.paper.pair import PairModel, Settings
from experiments.paper.pair_fit import (
    NOT_WORSE,
    WITHOUT_HIT_RATE,
    Search,
    Study,
    fit_by_simulation,
    same_settings,
    search,
    simulated,
)
from experiments.paper.published import NAMES, Published
from experiments.paper.section import Answer, Cell, Figure, Residual, Role, Section, Table
from sim.policy import Autoregressive

# Without a number K and fan-out are searched for again, among fewer values.
LENGTHS_LEFT_OUT, FAN_OUTS_LEFT_OUT = (5, 6, 7, 8), (3, 4, 5, 6)
SETTINGS = {"sd_length": "K of SD", "ssd_length": "K of SSD", "fan_out": "fan-out F"}


def section(published: Published, studies: Mapping[str, Study]) -> Section:
    """Table B.3."""
    left_out = {pair: _left_out(study) for pair, study in studies.items()}
    error = next(iter(studies.values())).evidence.error
    return Section(
        title="Three decoders (Table B.3), and K and fan-out",
        text=(
            "Fitted by least squares, for each pair: SD and SSD on the four data sets, SSD with the fast backup at"
            " batch 1 (figures 6, 13) and the hit rate at temperature 0 (figures 4, 12). Free: an acceptance for"
            " each data set, the draft step, the time by which a round of SSD exceeds a verification, and K of SD, K"
            " of SSD and the fan-out.",
            "Assumed: verifying K + 1 tokens takes an autoregressive step; acceptance does not depend on the"
            " position or the source of the round; the fan-out is uniform, the same after hits and misses; look-ups"
            " miss as in the miss figure at temperature 0, on an easier data set less often in proportion to its"
            " rejections; the fast backup's tokens are never accepted; the backup of Table B.3 is the draft model.",
            "Errors: the same setting is published with throughputs that differ between table and figures by"
            f" {100 * error:.1f} % (pooled standard deviation, table repeats); every number is given that error, for"
            " the rounding is smaller. *Predicted* residuals are of fits without that number, in which K and fan-out"
            f" are searched again (K {_range(LENGTHS_LEFT_OUT)}, F {_range(FAN_OUTS_LEFT_OUT)}).",
        ),
        tables=(
            _decoder_table(studies, left_out),
            _settings_table(studies),
            _model_table(studies),
            _assumption_table(studies),
            _repeats_table(published),
        ),
        figures=(_figure(studies),),
        answers=(
            _settings_answer(published, studies),
            _prediction_answer(studies, left_out),
            _engines_answer(published),
        ),
        residuals=tuple(
            entry for study in studies.values() for entry in _residuals(published, study, left_out[study.pair])
        ),
    )


def _range(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}"


def _left_out(study: Study) -> dict[str, float]:
    """Each number of Table B.3 by a fit to all others."""
    predicted = {}
    for index, name in enumerate(study.evidence.names):
        if name.startswith(("sd", "ssd")):
            evidence = study.evidence.without(name)
            best = search(evidence, LENGTHS_LEFT_OUT, FAN_OUTS_LEFT_OUT).best
            predicted[name] = float(simulated(evidence, fit_by_simulation(evidence, best.settings))[index])
    return predicted


# ------------------------------------------------------------------------------------------------------------- tables


def _decoder_table(studies: Mapping[str, Study], left_out: Mapping[str, Mapping[str, float]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, study in studies.items():
        fitted = dict(zip(study.evidence.names, simulated(study.evidence, study.model).tolist(), strict=True))
        published = dict(zip(study.evidence.names, study.evidence.values.tolist(), strict=True))
        for name, predicted in left_out[pair].items():
            decoder, data_set = name.split()
            off = (_percent(fitted[name], published[name]), _percent(predicted, published[name]))
            numbers = (published[name], round(fitted[name], 1), off[0], round(predicted, 1), off[1])
            rows.append((NAMES[pair], data_set, decoder.upper(), *numbers))
    head = ("pair", "data set", "decoder", "published", "fitted", "off, %", "predicted without it", "off, %")
    return Table(
        "decoders", "Table B.3, tokens/s: fitted, and predicted by a fit to all other numbers", head, tuple(rows)
    )


def _percent(ours: float, published: float) -> float:
    return round(100 * (ours / published - 1), 1)


def _settings_table(studies: Mapping[str, Study]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, study in studies.items():
        inside = study.search.not_worse
        for name, title in SETTINGS.items():
            for value, chi2 in study.search.profile(name).items():
                here = any(getattr(model.settings, name) == value for model in inside)
                excess = round(chi2 - study.search.best.chi2, 1)
                rows.append((NAMES[pair], title, value, excess, "not worse" if here else "worse"))
    return Table(
        "settings",
        "K and fan-out: least misfit (chi-square) by one of them, the others free, over the best of all; *worse*:"
        " beyond what three free numbers gain by chance (95 %)",
        ("pair", "setting", "value", "misfit over the best", "significantly"),
        tuple(rows),
    )


def _model_table(studies: Mapping[str, Study]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for study in studies.values():
        for index, model in enumerate([study.model, *study.alternatives]):
            rows.append(_model_row(study, model, "used" if index == 0 else "alternative"))
    return Table(
        "pair_models",
        "The fit that is used below, and others that are not significantly worse: the shortest and longest K of SSD,"
        " and each fan-out. Acceptance from the hardest to the easiest data set; tokens per round are means of the"
        " data sets",
        (
            *("pair", "fit", "K SD", "K SSD", "F", "misfit", "AR step, ms", "draft step, ms", "K steps of SSD, ms"),
            *("SSD late by, ms", "acceptance", "tokens/round SD", "SSD"),
        ),
        tuple(rows),
    )


def _model_row(study: Study, model: PairModel, role: str) -> tuple[Cell, ...]:
    settings, times = model.settings, model.times
    lengths = (settings.sd_length, settings.ssd_length, settings.fan_out)
    drafting_ms = settings.ssd_length * times.draft_step_ms
    milliseconds = (times.ar_ms, times.draft_step_ms, drafting_ms, times.late_ms)
    acceptances = sorted(model.acceptances.values())
    tokens = (model.mean_tokens(settings.sd_length), model.mean_tokens(settings.ssd_length))
    return (
        NAMES[study.pair],
        role,
        *lengths,
        round(model.chi2, 1),
        *(round(ms, 2) for ms in milliseconds),
        f"{acceptances[0]:.3f} to {acceptances[-1]:.3f}",
        *(round(number, 2) for number in tokens),
    )


def _assumption_table(studies: Mapping[str, Study]) -> Table:
    def row(study: Study, title: str, found: Search) -> tuple[Cell, ...]:
        settings = [model.settings for model in found.not_worse]
        ranges = [_range([getattr(entry, name) for entry in settings]) for name in SETTINGS]
        return NAMES[study.pair], title, round(found.best.chi2, 1), *ranges

    rows = [
        row(study, title, found)
        for study in studies.values()
        for title, found in {"as described": study.search, **study.otherwise}.items()
    ]
    head = ("pair", "assumed", "misfit of the best", *(f"{title} not worse" for title in SETTINGS.values()))
    return Table("assumptions", "K and fan-out under other assumptions: 10 numbers (9), 6 free", head, tuple(rows))


def _repeats_table(published: Published) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, values in same_settings(published).items():
        pair, decoder = name.split()
        rows.append((NAMES[pair], decoder.upper(), *values, _percent(max(values), min(values))))
    return Table(
        "repeats",
        "The same setting in three places: greedy, batch 1, mean of the data sets, tokens/s. SSD with the draft as"
        " backup; the temperature figure with its geometric fan-out",
        ("pair", "decoder", "Table B.3", "batch figure", "temperature figure", "range, %"),
        tuple(rows),
    )


def _figure(studies: Mapping[str, Study]) -> Figure:
    def panel(study: Study) -> Panel:
        num = len(study.evidence.data_sets)
        ours = simulated(study.evidence, study.model)[: 2 * num]
        published = study.evidence.values[: 2 * num]
        ends = [float(published.min()), float(published.max())]
        points = [
            Series("SD", published[:num].tolist(), ours[:num].tolist(), 0, is_line=False),
            Series("SSD", published[num:].tolist(), ours[num:].tolist(), 1, is_line=False),
            Series("equal", ends, ends, 2, is_line=True),
        ]
        return Panel(NAMES[study.pair], "published, tokens/s", "fitted, tokens/s", tuple(points))

    return figure(
        "decoders", "Table B.3: fitted against published tokens/s", [panel(study) for study in studies.values()]
    )


# ------------------------------------------------------------------------------------------------------------ answers


def _settings_answer(published: Published, studies: Mapping[str, Study]) -> Answer:
    told, engine = [], published.public_engine
    engine_settings = Settings(engine.sd_speculation_length, engine.ssd_speculation_length, engine.fan_out)
    for pair, study in studies.items():
        inside = study.search.not_worse
        ranges = [f"{title} {_range([getattr(m.settings, name) for m in inside])}" for name, title in SETTINGS.items()]
        best = study.search.best.settings
        told.append(
            f"{NAMES[pair]}: {', '.join(ranges)} are not significantly worse than the best"
            f" (K {best.sd_length} and {best.ssd_length}, F={best.fan_out}); the public engine's"
            f" K {engine.sd_speculation_length} and {engine.ssd_speculation_length} with F={engine.fan_out} misfit by"
            f" {study.misfit_of(engine_settings):.1f} more ({NOT_WORSE:.1f} is significant)"
        )
    lengths = {model.settings.ssd_length for study in studies.values() for model in study.search.models}
    note = (
        f"K was searched in {_range(sorted(lengths))} and is hardly told; the fan-out is told by the hit rate, without"
        f" which {_without_hit_rate(studies)} are left"
    )
    evidence = "tables settings, assumptions, pair_models"
    return Answer("Which K and fan-out did the runs have?", f"{'; '.join(told)}. {note}.", evidence)


def _without_hit_rate(studies: Mapping[str, Study]) -> str:
    fan_outs = {
        pair: [model.settings.fan_out for model in study.otherwise[WITHOUT_HIT_RATE].not_worse]
        for pair, study in studies.items()
    }
    return " and ".join(f"F {_range(of_pair)} ({NAMES[pair]})" for pair, of_pair in fan_outs.items())


def _prediction_answer(studies: Mapping[str, Study], left_out: Mapping[str, Mapping[str, float]]) -> Answer:
    told = []
    for decoder in ("sd", "ssd"):
        off = [
            abs(predicted / dict(zip(study.evidence.names, study.evidence.values, strict=True))[name] - 1)
            for pair, study in studies.items()
            for name, predicted in left_out[pair].items()
            if name.split()[0] == decoder
        ]
        told.append(f"{decoder.upper()} to {100 * np.mean(off):.1f} % on the mean and {100 * max(off):.1f} % at worst")
    question = "How well is a number of Table B.3 predicted by the others?"
    return Answer(question, f"{' and '.join(told)} (leaving one out, 8 numbers each).", "table decoders")


def _engines_answer(published: Published) -> Answer:
    told = []
    for pair, average in published.averages.items():
        other = published.other_engines_tokens_per_s[pair].sglang_sd
        told.append(
            f"{NAMES[pair]}: SSD is {average.ssd / average.sd:.2f} times the paper's own SD and"
            f" {average.ssd / other:.2f} times SGLang's SD"
        )
    question = "Against which SD is SSD faster?"
    return Answer(question, "; ".join(told) + " (published numbers, nothing fitted).", "figures 7, 11, Table B.3")


def _residuals(published: Published, study: Study, left_out: Mapping[str, float]) -> list[Residual]:
    error, pair = published.errors.table_tokens_per_s, NAMES[study.pair]

    def residual(source: str, quantity: str, value: float, ours: float, role: Role) -> Residual:
        return Residual(source, f"{pair} {quantity}", "tokens/s", value, ours, error, role)

    found = []
    ar, ours = study.evidence.ar_tokens_per_s, study.model.mean_tokens_per_s(Autoregressive())
    found.append(residual("Table B.3", "AR", ar, ours, Role.FITTED))
    rows = zip(study.evidence.names, study.evidence.values, simulated(study.evidence, study.model), strict=True)
    for name, value, fitted in rows:
        if name in left_out:
            decoder, data_set = name.split()
            quantity = f"{decoder.upper()} {data_set}"
            found.append(residual("Table B.3", quantity, float(value), float(fitted), Role.FITTED))
            found.append(residual("Table B.3", f"{quantity}, left out", float(value), left_out[name], Role.PREDICTED))
    return found
