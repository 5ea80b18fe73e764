"""More draft devices: the paper's forecast beside two explanations of it, more branches or a shorter build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from experiments.paper.batches import grown
from experiments.paper.drawing import Panel, Series, figure
from experiments.paper.miss_curves import published_curves
from experiments.paper.pair import PairModel, system_of
from experiments.paper.pair_fit import Study
from experiments.paper.published import NAMES, PAIRS, Published
from experiments.paper.section import Answer, Cell, Figure, Residual, Role, Section, Table
from sim.placement import Placement, Split
from sim.policy import Fallback, SpeculativeSpeculative
from sim.simulate import predict

PAIR = "llama_70b_1b"
FAN_OUTS_OF_ONE = (1, 2, 3, 4, 5, 6)  # branches per accept count that one device prepares
MOST_MS_PER_BRANCH = 1.0


@dataclass(frozen=True)
class _Forecast:
    """Tokens/s of each sequence by number of draft devices, under one explanation, fitted at one device."""

    name: str
    fitted: str  # what was fitted, and to what value
    tokens_per_s: tuple[float, ...]

    def rms(self, published: Sequence[float]) -> float:
        """Of ours over published less 1, where it was not fitted."""
        ratios = np.asarray(self.tokens_per_s[1:]) / np.asarray(published[1:])
        return float(np.sqrt(np.mean((ratios - 1) ** 2)))


def section(published: Published, studies: Mapping[str, Study]) -> Section:
    """Figure 6, right."""
    given, study = published.draft_devices, studies[PAIR]
    flat, steep = (_at_batch(published, study, draft=draft) for draft in (False, True))
    forecasts = [*(_more_branches(published, flat, f) for f in FAN_OUTS_OF_ONE), _shorter_build(published, steep)]
    best = min(forecasts, key=lambda forecast: forecast.rms(given.tokens_per_s))
    return Section(
        title="More draft devices (figure 6, right)",
        text=(
            f"The published numbers are the paper's own forecast for {NAMES[PAIR]}, batch {given.batch_size}, fast"
            " backup. Fitted: one number, to one draft device. Predicted: 2, 4 and 8. Two explanations: each device"
            " prepares as many branches again, so the hit rate rises (fitted: a factor on the verification; misses"
            " straight between the points of the miss figure at temperature 0, continued to F=1); or the devices"
            " divide the branches of every row, so a build that outlasts the verification shortens (fitted: the time"
            " of a branch beyond K + 1 of a row). For the second all steps grow with the batch: if only the"
            " verification does, as the batch figure has it, one device is fast enough and more of them would gain"
            " nothing.",
        ),
        tables=(_table(published, forecasts),),
        figures=(_figure(published, forecasts, best),),
        answers=(_answer(published, forecasts, best),),
        residuals=tuple(_residuals(published, best)),
    )


def _at_batch(published: Published, study: Study, *, draft: bool) -> PairModel:
    """The pair at the batch size of the forecast, all steps grown or the verification alone."""
    given, batch = published.batches.pairs[PAIR], published.draft_devices.batch_size
    index = published.batches.batch_sizes.index(batch)
    ar = given.ar[index] if given.ar else study.evidence.ar_tokens_per_s
    return grown(study.model, given.sd[index], ar, batch, draft=draft)


def _more_branches(published: Published, model: PairModel, fan_out_of_one: int) -> _Forecast:
    given = published.draft_devices

    def rate(factor: float, num_devices: int) -> float:
        fan_out = fan_out_of_one * num_devices
        curves = published_curves(published, PAIRS[PAIR], 0.0, fan_out)
        times = replace(model.times, verify_ms=factor * model.times.verify_ms)
        settings = replace(model.settings, fan_out=fan_out)
        wider = replace(model, curves=curves, times=times, settings=settings)
        return wider.mean_tokens_per_s(settings.ssd(Fallback.NONE), given.batch_size)

    factor = _solved(lambda x: rate(x, given.num_draft_devices[0]) - given.tokens_per_s[0], 0.3, 2.0)
    rates = tuple(rate(factor, num) for num in given.num_draft_devices)
    return _Forecast(f"F = {fan_out_of_one} x devices", f"verification x {factor:.2f}", rates)


def _shorter_build(published: Published, model: PairModel) -> _Forecast:
    given, policy = published.draft_devices, model.settings.ssd(Fallback.NONE)

    def rate(ms_per_branch: float, num_devices: int) -> float:
        return _divided(model, policy, ms_per_branch, num_devices, given.batch_size)

    ms = _solved(lambda x: rate(x, given.num_draft_devices[0]) - given.tokens_per_s[0], 0.0, MOST_MS_PER_BRANCH)
    rates = tuple(rate(ms, num) for num in given.num_draft_devices)
    name = f"branches of F = {model.settings.fan_out} divided"
    return _Forecast(name, f"{1e3 * ms:.1f} us per branch", rates)


def _divided(
    model: PairModel, policy: SpeculativeSpeculative, ms_per_branch: float, num_devices: int, batch_size: int
) -> float:
    """Mean tokens/s of a sequence where devices divide the branches, whose steps take time."""
    rates = []
    for name, acceptance in model.acceptances.items():
        workload, system = system_of(
            model.times,
            acceptance,
            model.curves_of(name),
            policy,
            batch_size,
            tree_step_ms=model.times.draft_step_ms,
            tree_ms_per_branch=ms_per_branch,
            placement=Placement(num_draft_devices=num_devices, split=Split.BRANCHES),
        )
        rates.append(predict(policy, workload, system).tokens_per_s.value / batch_size)
    return float(np.mean(rates))


def _solved(excess: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(excess, low, high, xtol=1e-5))


def _table(published: Published, forecasts: Sequence[_Forecast]) -> Table:
    given = published.draft_devices
    rows: list[tuple[Cell, ...]] = [("published", "", *given.tokens_per_s, None)]
    for forecast in forecasts:
        rates = (round(rate, 1) for rate in forecast.tokens_per_s)
        rows.append((forecast.name, forecast.fitted, *rates, round(100 * forecast.rms(given.tokens_per_s), 1)))
    head = ("explanation", "fitted", *(f"{num} devices" for num in given.num_draft_devices), "rms off, %")
    return Table("draft_devices", "Tokens/s of each sequence by number of draft devices", head, tuple(rows))


def _figure(published: Published, forecasts: Sequence[_Forecast], best: _Forecast) -> Figure:
    given = published.draft_devices
    points = Series("the paper's forecast", given.num_draft_devices, given.tokens_per_s, 0, is_line=False)
    shown = [best, forecasts[-1]] if forecasts[-1] is not best else [best]
    lines = [
        Series(forecast.name, given.num_draft_devices, forecast.tokens_per_s, look, is_line=True)
        for look, forecast in enumerate(shown)
    ]
    panel = Panel(NAMES[PAIR], "draft devices", "tokens/s of a sequence", (points, *lines), log_x=True)
    return figure("draft_devices", "The forecast for more draft devices, and what explains it", [panel])


def _answer(published: Published, forecasts: Sequence[_Forecast], best: _Forecast) -> Answer:
    given, divided = published.draft_devices, forecasts[-1]
    answer = (
        f"More branches: {best.name} comes closest ({100 * best.rms(given.tokens_per_s):.1f} % off); dividing a"
        f" build that is too long is {100 * divided.rms(given.tokens_per_s):.1f} % off and ends at"
        f" {divided.tokens_per_s[-1]:.0f} tokens/s."
    )
    if best is divided:
        answer = f"Dividing a build that is too long comes closest ({100 * best.rms(given.tokens_per_s):.1f} % off)."
    return Answer("What explains the forecast for more draft devices?", answer, "table draft_devices")


def _residuals(published: Published, best: _Forecast) -> list[Residual]:
    given, error = published.draft_devices, published.errors.figure_tokens_per_s
    columns = zip(given.num_draft_devices, given.tokens_per_s, best.tokens_per_s, strict=True)
    return [
        Residual(
            source="figure 6 right",
            quantity=f"{NAMES[PAIR]} SSD fast, {num} draft devices ({best.name})",
            unit="tokens/s",
            published=value,
            ours=ours,
            error=error,
            role=Role.FITTED if index == 0 else Role.PREDICTED,
        )
        for index, (num, value, ours) in enumerate(columns)
    ]
