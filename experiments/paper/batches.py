"""The batch sweep: SSD with a fast and with the draft backup, where they cross, and throughput per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.paper.drawing import Panel, Series, beside, figure
from experiments.paper.pair import PairModel, mean_hit_rate
from experiments.paper.pair_fit import Study
from experiments.paper.published import NAMES, Devices, Published
from experiments.paper.section import Answer, Cell, Figure, Residual, Role, Section, Table
from sim.policy import Fallback
from sim.theory import critical_batch_size

BACKUPS = ("fast", "draft")
GROWTHS = {"all steps": True, "verification only": False}  # whether draft steps grow with the batch as well
REDRAFTS = {"missing rows": Fallback.DRAFT_MISSING, "whole batch": Fallback.DRAFT}
USED = ("verification only", "whole batch")  # the least misfit; the others stand beside them


@dataclass(frozen=True)
class _Sweep:
    """Tokens/s of each sequence by batch size: published and ours, of the model that is used and under other
    assumptions."""

    pair: str
    batch_sizes: tuple[int, ...]
    published: Mapping[str, tuple[float, ...]]
    models: tuple[PairModel, ...]  # by batch size, under the assumptions that are used
    ours: Mapping[tuple[str, str], Mapping[str, tuple[float, ...]]]  # by assumptions, then by backup

    @property
    def used(self) -> Mapping[str, tuple[float, ...]]:
        return self.ours[USED]

    def crossing(self, fast: Sequence[float], draft: Sequence[float]) -> float | None:
        """The batch size from which the fast backup is ahead, linear in between; None if it is ahead or behind
        everywhere."""
        lead = np.log(np.asarray(fast) / np.asarray(draft))
        for index in np.flatnonzero((lead[:-1] < 0) & (lead[1:] >= 0)):
            low, high = self.batch_sizes[index], self.batch_sizes[index + 1]
            return float(low + (high - low) * -lead[index] / (lead[index + 1] - lead[index]))
        return None


def section(published: Published, studies: Mapping[str, Study]) -> Section:
    """Figures 6 and 13."""
    sweeps = [_sweep(published, study) for study in studies.values()]
    return Section(
        title="Batch size, the two backups, and throughput per device (figures 6 and 13)",
        text=(
            "Fitted: at every batch size one factor on the steps, to the tokens/s of SD, and the autoregressive step"
            " where AR was published. Predicted: SSD with either backup; only the fast backup at batch 1 went into"
            " the fit of the pair.",
            "Assumed: only the verification grows with the batch, and after a miss the draft backup drafts for the"
            " whole batch anew: of the four assumptions in table batch_assumptions the ones with the least misfit,"
            " so the residuals have had that choice. The build stays hidden; the rows of a batch are of one data"
            " set. The fan-out is that of the fit to batch 1, not the F=1 that the figure states: at F=1 the misfit"
            " is beyond all doubt (table settings).",
        ),
        tables=(_table(sweeps), _assumption_table(sweeps), _crossing_table(sweeps), _device_table(published, sweeps)),
        figures=(_figure(sweeps), _device_figure(published, sweeps)),
        answers=(_error_answer(sweeps), _crossing_answer(sweeps), _device_answer(published, sweeps)),
        residuals=tuple(entry for sweep in sweeps for entry in _residuals(published, sweep)),
    )


def grown(
    model: PairModel, sd_tokens_per_s: float, ar_tokens_per_s: float, batch_size: int, *, draft: bool
) -> PairModel:
    """The model at a batch size at which SD has these tokens/s of each sequence: all steps grown by one factor, or the
    verification alone."""
    times = model.times
    ours = model.mean_tokens_per_s(model.settings.sd, batch_size)
    factor = ours / sd_tokens_per_s
    ar_ms = 1e3 / ar_tokens_per_s
    if draft:
        return replace(model, times=times.scaled(ar_ms, factor))
    longer_ms = (factor - 1) * (times.verify_ms + model.settings.sd_length * times.draft_step_ms)
    return replace(model, times=replace(times, ar_ms=ar_ms, verify_ms=times.verify_ms + longer_ms))


def _sweep(published: Published, study: Study) -> _Sweep:
    given, sizes = published.batches.pairs[study.pair], published.batches.batch_sizes
    ar = given.ar or (study.evidence.ar_tokens_per_s,) * len(sizes)
    models = {
        name: tuple(grown(study.model, *of_size, draft=draft) for of_size in zip(given.sd, ar, sizes, strict=True))
        for name, draft in GROWTHS.items()
    }
    ours = {
        (growth, redraft): {
            "fast": _rates(of_growth, sizes, Fallback.NONE),
            "draft": _rates(of_growth, sizes, fallback),
        }
        for growth, of_growth in models.items()
        for redraft, fallback in REDRAFTS.items()
    }
    rows = {name: row for name, row in given.model_dump().items() if row is not None}
    return _Sweep(study.pair, sizes, rows, models[USED[0]], ours)


def _rates(models: Sequence[PairModel], batch_sizes: Sequence[int], fallback: Fallback) -> tuple[float, ...]:
    pairs = zip(models, batch_sizes, strict=True)
    return tuple(model.mean_tokens_per_s(model.settings.ssd(fallback), size) for model, size in pairs)


# ------------------------------------------------------------------------------------------------------------- tables


def _percent(ours: float, published: float) -> float:
    return round(100 * (ours / published - 1), 1)


def _table(sweeps: Sequence[_Sweep]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for sweep in sweeps:
        for index, size in enumerate(sweep.batch_sizes):
            growth = sweep.models[index].times.verify_ms / sweep.models[0].times.verify_ms
            cells: list[Cell] = []
            for backup in BACKUPS:
                value, ours = sweep.published[backup][index], sweep.used[backup][index]
                cells += [value, round(ours, 1), _percent(ours, value)]
            rows.append((NAMES[sweep.pair], size, round(growth, 3), sweep.published["sd"][index], *cells))
    head = ("pair", "batch", "steps over batch 1", "SD (fitted)", "fast", "ours", "off, %", "draft", "ours", "off, %")
    return Table("batches", "Tokens/s of each sequence by batch size and backup", head, tuple(rows))


def _assumption_table(sweeps: Sequence[_Sweep]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for sweep in sweeps:
        for (growth, redraft), ours in sweep.ours.items():
            errors = (round(100 * _rms(ours[backup], sweep.published[backup]), 1) for backup in BACKUPS)
            rows.append((NAMES[sweep.pair], growth, redraft, *errors))
    return Table(
        "batch_assumptions",
        "Root mean square of ours over published less 1, in %, over the batch sizes: what grows with the batch, and for"
        " whom the draft backup drafts after a miss",
        ("pair", "growing", "drafted anew", "fast, %", "draft, %"),
        tuple(rows),
    )


def _rms(ours: Sequence[float], published: Sequence[float]) -> float:
    return float(np.sqrt(np.mean((np.asarray(ours) / np.asarray(published) - 1) ** 2)))


def _crossing_table(sweeps: Sequence[_Sweep]) -> Table:
    rows = []
    for sweep in sweeps:
        published, ours = (sweep.crossing(of["fast"], of["draft"]) for of in (sweep.published, sweep.used))
        rows.append((NAMES[sweep.pair], _rounded(published), _rounded(ours), *_by_theorem(sweep.models[0])))
    return Table(
        "crossing",
        "Batch size from which the fast backup is faster: published and ours (linear between batch sizes), and"
        " Theorem 17 with the hit rate p, tokens per hit E and draft time T_p of the fit; below 1: the fast backup"
        " always",
        ("pair", "published", "ours", "Theorem 17", "p", "E", "T_p"),
        tuple(rows),
    )


def _rounded(value: float | None) -> Cell:
    return None if value is None else round(value, 2)


def _by_theorem(model: PairModel) -> tuple[float, float, float, float]:
    hit_rate = mean_hit_rate(model.predictions(model.settings.ssd(Fallback.DRAFT)))
    tokens = model.mean_tokens(model.settings.ssd_length)
    primary = model.settings.ssd_length * model.times.draft_step_ms / model.times.verify_ms
    critical = critical_batch_size(hit_rate, tokens, 1.0, primary)
    return round(critical, 2), round(hit_rate, 3), round(tokens, 2), round(primary, 3)


# ------------------------------------------------------------------------------------------- throughput per device


@dataclass(frozen=True)
class _Point:
    """A decoder at a batch size: tokens/s of a sequence, and of a device."""

    decoder: str
    batch_size: int
    of_sequence: float
    of_device: float

    def is_dominated_by(self, other: _Point) -> bool:
        mine, others = (self.of_sequence, self.of_device), (other.of_sequence, other.of_device)
        return mine != others and others[0] >= mine[0] and others[1] >= mine[1]


def _points(devices: Devices, sweep: _Sweep, rates: Mapping[str, Sequence[float]]) -> list[_Point]:
    num_devices = {"ar": devices.autoregressive, "sd": devices.speculative}
    return [
        _Point(decoder, size, rate, size * rate / num_devices.get(decoder, devices.speculative_speculative))
        for decoder, of_decoder in rates.items()
        for size, rate in zip(sweep.batch_sizes, of_decoder, strict=True)
    ]


def _fronts(published: Published, sweep: _Sweep) -> tuple[list[_Point], list[_Point]]:
    """Points published and ours; AR and SD are the published ones in both, for they were fitted."""
    ours = {**sweep.published, **sweep.used}
    first, second = (_points(published.devices, sweep, rates) for rates in (sweep.published, ours))
    return first, second


def _on_front(points: Sequence[_Point]) -> list[bool]:
    return [not any(point.is_dominated_by(other) for other in points) for point in points]


def _device_table(published: Published, sweeps: Sequence[_Sweep]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for sweep in sweeps:
        given, ours = _fronts(published, sweep)
        columns = zip(given, ours, _on_front(given), _on_front(ours), strict=True)
        for point, mine, is_given, is_ours in columns:
            speeds = (point.of_sequence, round(point.of_device, 1), round(mine.of_device, 1))
            fronts = ("yes" if is_given else "no", "yes" if is_ours else "no")
            rows.append((NAMES[sweep.pair], _label(point.decoder), point.batch_size, *speeds, *fronts))
    devices = published.devices
    return Table(
        "devices",
        f"Tokens/s of a sequence and of a device ({devices.autoregressive} for AR, {devices.speculative} for SD,"
        f" {devices.speculative_speculative} for SSD), and which points no other beats in both",
        ("pair", "decoder", "batch", "tokens/s of a sequence", "of a device", "ours", "on the front", "ours"),
        tuple(rows),
    )


def _label(decoder: str) -> str:
    return f"SSD {decoder}" if decoder in BACKUPS else decoder.upper()


def _figure(sweeps: Sequence[_Sweep]) -> Figure:
    panels = []
    for sweep in sweeps:
        sd = Series("SD, published", sweep.batch_sizes, sweep.published["sd"], 2, is_line=False)
        series = [sd]
        for look, backup in enumerate(BACKUPS):
            series += beside(f"SSD {backup}", sweep.batch_sizes, sweep.published[backup], sweep.used[backup], look)
        panels.append(Panel(NAMES[sweep.pair], "batch size", "tokens/s of a sequence", tuple(series), log_x=True))
    return figure("batches", "Tokens/s of each sequence by batch size: published points, our lines", panels)


def _device_figure(published: Published, sweeps: Sequence[_Sweep]) -> Figure:
    panels = []
    for sweep in sweeps:
        series: list[Series] = []
        for is_line, points in zip((False, True), _fronts(published, sweep), strict=True):
            for look, decoder in enumerate(sweep.published):
                if is_line and decoder not in BACKUPS:
                    continue
                of_decoder = [point for point in points if point.decoder == decoder]
                x, y = [point.of_sequence for point in of_decoder], [point.of_device for point in of_decoder]
                label = f"{_label(decoder)}, {'ours' if is_line else 'published'}"
                series.append(Series(label, x, y, look, is_line))
        panels.append(Panel(NAMES[sweep.pair], "tokens/s of a sequence", "tokens/s of a device", tuple(series)))
    return figure("devices", "Throughput per device against speed of a sequence, batch 1 to 16", panels)


# ------------------------------------------------------------------------------------------------------------ answers


def _error_answer(sweeps: Sequence[_Sweep]) -> Answer:
    told = []
    for backup in BACKUPS:
        of_pairs = (f"{NAMES[s.pair]} {100 * _rms(s.used[backup], s.published[backup]):.1f} %" for s in sweeps)
        told.append(f"{backup} backup: {', '.join(of_pairs)}")
    question = "How well does a fit at batch 1 predict SSD up to batch 16?"
    return Answer(question, f"Root mean square error, {'; '.join(told)}.", "tables batches, batch_assumptions")


def _crossing_answer(sweeps: Sequence[_Sweep]) -> Answer:
    told = []
    for sweep in sweeps:
        values = [sweep.crossing(of["fast"], of["draft"]) for of in (sweep.published, sweep.used)]
        shown = ["nowhere" if value is None else f"{value:.2f}" for value in values]
        theorem = _by_theorem(sweep.models[0])[0]
        told.append(f"{NAMES[sweep.pair]} published {shown[0]}, ours {shown[1]}, Theorem 17 {theorem:.2f}")
    return Answer("From which batch size is the fast backup faster?", "; ".join(told) + ".", "table crossing")


def _device_answer(published: Published, sweeps: Sequence[_Sweep]) -> Answer:
    told = []
    for sweep in sweeps:
        given, ours = _fronts(published, sweep)
        for name, points in (("published", given), ("ours", ours)):
            front = [point for point, is_on in zip(points, _on_front(points), strict=True) if is_on]
            shown = ", ".join(f"{_label(point.decoder)} {point.batch_size}" for point in front)
            told.append(f"{NAMES[sweep.pair]} {name}: {shown}")
    question = "Per device, who is on the front of speed against throughput (decoder and batch size)?"
    return Answer(question, "; ".join(told) + ".", "table devices")


def _residuals(published: Published, sweep: _Sweep) -> list[Residual]:
    error, found = published.errors.figure_tokens_per_s, []

    def residual(quantity: str, value: float, ours: float, role: Role) -> None:
        found.append(Residual("figures 6, 13", f"{NAMES[sweep.pair]} {quantity}", "tokens/s", value, ours, error, role))

    for index, size in enumerate(sweep.batch_sizes):
        model, at = sweep.models[index], f"batch {size}"
        sd = model.mean_tokens_per_s(model.settings.sd, size)
        residual(f"SD {at}", sweep.published["sd"][index], sd, Role.FITTED)
        if "ar" in sweep.published:
            ar = 1e3 / model.times.ar_ms
            residual(f"AR {at}", sweep.published["ar"][index], ar, Role.FITTED)
        for backup in BACKUPS:
            role = Role.FITTED if backup == "fast" and size == 1 else Role.PREDICTED
            residual(f"SSD {backup} {at}", sweep.published[backup][index], sweep.used[backup][index], role)
    return found
