"""Figures as vector files, readable in grey and without telling colours apart: hatches, markers, names at the lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from sim.trace import Lane, Operation, Round, Source, Span, Trace

FloatArray = NDArray[np.float64]

# Lightness rises from dark to light and every operation has its own hatch.
LOOKS: dict[Operation, tuple[str, str]] = {
    Operation.VERIFY: ("#1f4e79", ""),
    Operation.DRAFT_STEP: ("#d98c00", "///"),
    Operation.GLUE: ("#8fb3d9", "..."),
    Operation.TREE_STEP: ("#dbe8f4", ""),
    Operation.LOOKUP: ("#000000", ""),
}
SOURCE_MARKS = {source: "" if source is Source.SYNCHRONOUS else source.value for source in Source}
# By the source of the round: line, marker, and how far beside its place the marker stands, so that none hides another.
HIT_LOOKS = {"hit": ("-", "o", 0.97), "miss": ("--", "s", 1.03)}
PANELS_IN_A_ROW = 3  # of a map
LANES = (Lane.DRAFT, Lane.TARGET)  # from below


def predicted_against_measured(summary: Mapping[str, Any], path: Path) -> None:
    """Tokens/s of every policy with 95 % intervals, the prediction beside the measurement."""
    rows = summary["policies"]
    figure = Figure(figsize=(1.5 + 2.2 * len(rows), 4.2), layout="constrained")
    axes = figure.subplots()
    for offset, kind, colour, hatch in ((-0.2, "predicted", "#dbe8f4", "///"), (0.2, "measured", "#1f4e79", "")):
        estimates = [row[kind]["tokens_per_s"] for row in rows]
        places = [index + offset for index in range(len(rows))]
        values = [estimate["value"] for estimate in estimates]
        axes.bar(places, values, 0.38, label=kind, color=colour, edgecolor="black", hatch=hatch)
        axes.errorbar(places, values, yerr=_half_widths(estimates), fmt="none", ecolor="black", capsize=4)
    axes.set_xticks(range(len(rows)), [_wrapped(row) for row in rows])
    axes.set_ylabel("tokens/s, decode only")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=0)
    figure.legend(frameon=False, loc="outside upper left", ncols=2)
    _save(figure, path)


def _half_widths(estimates: Sequence[Mapping[str, float | None]]) -> list[list[float]]:
    def width(estimate: Mapping[str, float | None], bound: str) -> float:
        edge, value = estimate[bound], estimate["value"]
        return 0.0 if edge is None or value is None else abs(edge - value)

    return [[width(estimate, bound) for estimate in estimates] for bound in ("low", "high")]


def _wrapped(row: Mapping[str, Any]) -> str:
    return f"{row['name'].replace(' F=', chr(10) + 'F=')}\n{100 * row['error']['tokens_per_s']:+.1f} %"


def hit_rate_by_fan_out(curves: Mapping[str, Any], path: Path) -> None:
    """Hit rates of the calibration record over the fan-out, and measured points; see `calibration.hit_rates`."""
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for curve in curves["predicted"]:
        line, _, _ = HIT_LOOKS[curve["source"]]
        shares = [100 * rate for rate in curve["hit_rates"]]
        label = f"after a {curve['source']}, calibration record"
        axes.plot(curve["fan_outs"], shares, line, color="black", linewidth=1.4, label=label)
    for source, (_, marker, aside) in HIT_LOOKS.items():
        points = [point for point in curves["measured"] if point["source"] == source and point["fan_out"] > 0]
        rates = [point["hit_rate"] for point in points]
        widths = [[100 * width for width in row] for row in _half_widths(rates)]
        places, values = [aside * point["fan_out"] for point in points], [100 * rate["value"] for rate in rates]
        looks: dict[str, Any] = {"color": "#1f4e79", "markerfacecolor": "#dbe8f4", "markersize": 8, "capsize": 3}
        axes.errorbar(places, values, widths, fmt=marker, label=f"after a {source}, measured", **looks)
    fan_outs = sorted({f for curve in curves["predicted"] for f in curve["fan_outs"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(fan_outs, [str(fan_out) for fan_out in fan_outs])
    axes.set_xlabel("fan-out: guesses of the bonus token per accept count")
    axes.set_ylabel("hit rate, %")
    axes.set_ylim(0, 102)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=2)
    _save(figure, path)


def accepted_counts(policies: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Share of rounds by the number of accepted tokens, measured beside simulated, for every policy that drafts;
    `policies` holds figures of merit, as of `calibration.report.report`."""
    drafting = {name: both for name, both in policies.items() if len(both["measured"]["rounds_by_accepted_count"]) > 1}
    figure = Figure(figsize=(1.0 + 4.4 * max(1, len(drafting)), 3.8), layout="constrained")
    row = figure.subplots(1, max(1, len(drafting)), sharey=True, squeeze=False)[0]
    for axes, (name, both) in zip(row, drafting.items(), strict=False):
        for offset, kind, colour, hatch in ((-0.2, "simulated", "#dbe8f4", "///"), (0.2, "measured", "#1f4e79", "")):
            counts = both[kind]["rounds_by_accepted_count"]
            places = [number + offset for number in counts]
            shares = [100 * count / sum(counts.values()) for count in counts.values()]
            axes.bar(places, shares, 0.38, label=kind, color=colour, edgecolor="black", hatch=hatch)
        axes.set_title(name.replace(" F=", "\nF="), fontsize=9, loc="left")
        axes.set_xticks(sorted({number for kind in both.values() for number in kind["rounds_by_accepted_count"]}))
        axes.set_xlabel("accepted tokens of a round")
        axes.spines[["top", "right"]].set_visible(False)
    row[0].set_ylabel("rounds, %")
    if drafting:
        figure.legend(*row[0].get_legend_handles_labels(), frameon=False, loc="outside lower left", ncols=2)
    _save(figure, path)


def timeline(measured: Trace, simulated: Trace, path: Path, *, num_rounds: int = 8) -> None:
    """The first rounds of one sequence, measured above simulated, on one scale."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, title, trace in (
        (upper, "measured, first rounds of test prompt", measured),
        (lower, "simulated, first rounds of calibration prompt", simulated),
    ):
        _draw_rounds(axes, trace, num_rounds)
        axes.set_title(f"{title} {_longest(trace)}", loc="left", fontsize=10)
    lower.set_xlabel("milliseconds from the start of decoding")
    drawn = [operation for operation in LOOKS if any(s.operation is operation for s in measured.spans)]
    handles = [_box(0, 0, 0, operation) for operation in drawn]
    figure.legend(handles, [operation.value for operation in drawn], loc="outside lower center", ncols=5, frameon=False)
    _save(figure, path)


def _draw_rounds(axes: Axes, trace: Trace, num_rounds: int) -> None:
    index = _longest(trace)
    rounds = [r for r in trace.rounds if r.sequence == index][:num_rounds]
    origin_s, end_s = rounds[0].start_s, rounds[-1].end_s
    for span in _spans_between(trace, index, origin_s, end_s):
        left, width = 1e3 * (span.start_s - origin_s), 1e3 * span.duration_s
        axes.add_patch(_box(left, width, LANES.index(span.lane), span.operation))
    for r in rounds:
        _mark_round(axes, r, origin_s)
    axes.set_yticks(range(len(LANES)), [lane.value for lane in LANES])
    axes.set_ylim(-0.5, len(LANES) + 0.1)
    axes.set_xlim(left=0, right=max(axes.get_xlim()[1], 1e3 * (end_s - origin_s)))
    axes.spines[["top", "right"]].set_visible(False)


def _longest(trace: Trace) -> int:
    return max(trace.sequences, key=lambda s: len(s.tokens)).index


def _spans_between(trace: Trace, sequence: int, start_s: float, end_s: float) -> list[Span]:
    inside = [s for s in trace.spans if s.sequence == sequence and s.start_s < end_s and s.end_s > start_s]
    return [s for s in inside if s.operation in LOOKS]


def _box(left: float, width: float, level: int, operation: Operation) -> Any:
    from matplotlib.patches import Rectangle

    colour, hatch = LOOKS[operation]
    return Rectangle((left, level - 0.35), width, 0.7, facecolor=colour, edgecolor="black", linewidth=0.4, hatch=hatch)


def _mark_round(axes: Axes, r: Round, origin_s: float) -> None:
    end_ms, middle_ms = 1e3 * (r.end_s - origin_s), 1e3 * ((r.start_s + r.end_s) / 2 - origin_s)
    axes.axvline(end_ms, color="black", linewidth=0.6, linestyle=":")
    mark = f"{SOURCE_MARKS[r.source]} {r.num_accepted}/{r.num_drafted}".strip()
    axes.text(middle_ms, len(LANES) - 0.5, mark, ha="center", va="bottom", fontsize=7, clip_on=True)


def win_map(found: Mapping[str, Any], path: Path) -> None:
    """Where SSD wins, ties and loses, a panel for each batch size, from `WinMap.to_dict`; a star is the system's own
    point. Regions have hatches of their own, and lines of equal gain are labelled."""
    sizes = found["batch_sizes"]
    num_columns = min(len(sizes), PANELS_IN_A_ROW)
    num_rows = -(-len(sizes) // num_columns)
    figure = Figure(figsize=(1.0 + 3.0 * num_columns, 0.9 + 3.2 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False).ravel()
    for axes in panels[len(sizes) :]:
        axes.remove()
    for axes, size, gain in zip(panels, sizes, found["gain"], strict=False):
        _draw_regions(axes, found, np.asarray(gain))
        axes.set_title(f"batch {size}", loc="left", fontsize=10)
        axes.set_xlabel("acceptance")
        if size == found["own"]["batch_size"]:
            place = found["own"]["acceptance"], found["own"]["draft_over_verify"]
            axes.plot(*place, clip_on=False, zorder=5, **STAR)
    for axes in panels[::num_columns]:
        axes.set_ylabel("draft step / verification")
    looks = [("SSD wins", "white", "///"), ("tie", "#c8c8c8", ""), ("SSD loses", "#808080", "...")]
    handles = [Patch(facecolor=colour, edgecolor="black", hatch=hatch, label=name) for name, colour, hatch in looks]
    star = Line2D([], [], label="this system", **STAR)
    figure.legend(
        handles=[*handles, star], loc="outside lower center", ncols=2 if num_columns == 1 else 4, frameon=False
    )
    _save(figure, path)


def _draw_regions(axes: Axes, found: Mapping[str, Any], gain: FloatArray) -> None:
    x, y, tie = found["acceptances"], found["draft_over_verify"], found["tie"]
    edges = [0.0, 1 - tie, 1 + tie, np.inf]
    axes.contourf(
        x, y, gain, edges, colors=["#808080", "#c8c8c8", "white"], hatches=["...", "", "///"], extend="neither"
    )
    lines = axes.contour(x, y, gain, [0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0], colors="black", linewidths=0.8)
    for label in axes.clabel(lines, fmt="%gx", fontsize=8):
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(min(x), max(x))
    axes.set_ylim(min(y), max(y))


# --------------------------------------------------------------------------------------------------------- of a search

# By the kind of decoding: line, marker, face of the marker.
KIND_LOOKS = {"ar": (":", "s", "white"), "sd": ("--", "o", "#8fb3d9"), "ssd": ("-", "D", "#1f4e79")}
STAR: dict[str, Any] = {"marker": "*", "markersize": 17, "color": "#ffd24d", "markeredgecolor": "black", "linewidth": 0}


def rates_by_length(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Tokens/s of the best policy of every kind and speculation length. `curves` holds, by kind, entries of `length`,
    `value`, `low` and `high`, the ends of the error bars, and `recommended`."""
    figure = Figure(figsize=(7.4, 4.3), layout="constrained")
    axes = figure.subplots()
    for kind, points in curves.items():
        line, marker, face = KIND_LOOKS[kind]
        places, values = [point["length"] for point in points], [point["value"] for point in points]
        looks: dict[str, Any] = {"fmt": line + marker, "color": "black", "markerfacecolor": face, "markersize": 7}
        axes.errorbar(places, values, _half_widths(points), label=kind.upper(), capsize=3, linewidth=1.2, **looks)
        for point in points:
            if point["recommended"]:
                axes.plot(point["length"], point["value"], label="recommended", zorder=5, **STAR)
    for point in curves.get("ar", ()):
        axes.axhline(point["value"], color="black", linestyle=":", linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("speculation length K")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=4)
    _save(figure, path)


def latency_throughput(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What a row waits for a token against what all rows get, the number of rows beside each point; the line joins the
    points that no other beats in both. Entries hold `kind`, `batch_size`, `ms_per_token`, `throughput`, `on_front` and
    `recommended`."""
    figure = Figure(figsize=(7.4, 4.6), layout="constrained")
    axes = figure.subplots()
    front = sorted((point["ms_per_token"], point["throughput"]) for point in points if point["on_front"])
    axes.plot(*zip(*front, strict=True), color="black", linewidth=1.6, label="front", zorder=1)
    for kind, (_, marker, face) in KIND_LOOKS.items():
        own = [point for point in points if point["kind"] == kind]
        places = [point["ms_per_token"] for point in own], [point["throughput"] for point in own]
        looks: dict[str, Any] = {"marker": marker, "markerfacecolor": face, "markeredgecolor": "black"}
        axes.plot(*places, linestyle="none", markersize=7, label=f"best {kind.upper()}", **looks)
    for point in points:
        place = point["ms_per_token"], point["throughput"]
        if point["recommended"]:
            axes.plot(*place, label="recommended", zorder=5, **STAR)
        axes.annotate(str(point["batch_size"]), place, (8, -3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("milliseconds per token of a row; the numbers are rows decoded together")
    axes.set_ylabel("tokens/s of all rows")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=5)
    _save(figure, path)


def what_if(found: Mapping[str, Any], path: Path) -> None:
    """Tokens/s of the recommended policy with one quantity too small and too large, as bars from the rate as measured,
    from `Sensitivity.to_dict`; a cross marks where another policy would be chosen."""
    rows, as_measured = found["rows"], found["tokens_per_s"]
    names = list(dict.fromkeys(row["quantity"] for row in rows))
    figure = Figure(figsize=(7.4, 1.6 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        too_large = row["factor"] > 1
        level = len(names) - names.index(row["quantity"]) + (0.2 if too_large else -0.2)
        looks: dict[str, Any] = {"color": "#1f4e79"} if too_large else {"color": "#dbe8f4", "hatch": "///"}
        label = f"{100 * (row['factor'] - 1):+.0f} %"
        axes.barh(level, row["tokens_per_s"] - as_measured, 0.38, as_measured, edgecolor="black", label=label, **looks)
        if row["changes"]:
            axes.plot(row["tokens_per_s"], level, "kx", markersize=8, label="another policy would be chosen")
    axes.axvline(as_measured, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names), 0, -1), names)
    axes.set_xlabel("tokens/s of the recommended policy")
    axes.spines[["top", "right"]].set_visible(False)
    labelled = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(labelled.values(), labelled.keys(), frameon=False, loc="outside upper left", ncols=3)
    _save(figure, path)


# ----------------------------------------------------------------------------------------------------- of a validation


def predicted_measured(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Predicted over measured tokens/s of all configurations, with both intervals; on the line they are equal. `rows`
    are those of validation.json."""
    figure = Figure(figsize=(6.6, 5.6), layout="constrained")
    axes = figure.subplots()
    for kind, (_, marker, face) in KIND_LOOKS.items():
        own = [row for row in rows if row["policy"]["kind"] == kind]
        measured, predicted = ([row[side]["tokens_per_s"] for row in own] for side in ("measured", "predicted"))
        x, y = ([estimate["value"] for estimate in side] for side in (measured, predicted))
        looks: dict[str, Any] = {"fmt": marker, "color": "black", "markerfacecolor": face, "elinewidth": 0.7}
        widths: dict[str, Any] = {"xerr": _half_widths(measured), "yerr": _half_widths(predicted), "capsize": 2}
        axes.errorbar(x, y, label=kind.upper(), markersize=7, **widths, **looks)
    ends = [row[side]["tokens_per_s"]["value"] for row in rows for side in ("measured", "predicted")]
    edges = 0.9 * min(ends), 1.05 * max(ends)
    axes.plot(edges, edges, color="black", linewidth=0.8, linestyle=":", label="equal")
    axes.set_xlabel("measured tokens/s")
    axes.set_ylabel("predicted tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=4)
    _save(figure, path)


# Of the whole error and its parts: marker, face, what it is called.
PART_LOOKS = {
    "tokens_per_s": ("D", "#1f4e79", "all together: tokens/s"),
    "latency_and_overlap": ("o", "#8fb3d9", "latency and overlap"),
    "tokens_per_round": ("s", "white", "tokens per round"),
}


def errors_by_configuration(rows: Sequence[Mapping[str, Any]], noise: float, path: Path) -> None:
    """The error of every configuration with its interval, and its parts; the grey band is what repeats of a real run
    differ by, a share of tokens/s. `rows` are those of validation.json."""
    figure = Figure(figsize=(8.6, 1.6 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-100 * noise, 100 * noise, color="#e2e2e2", zorder=0, label="noise")
    axes.axvline(0, color="black", linewidth=0.8)
    for part, (marker, face, name) in PART_LOOKS.items():
        errors = [row["error"][part] for row in rows]
        values = [100 * error["value"] for error in errors]
        looks: dict[str, Any] = {"color": "black", "markerfacecolor": face, "markersize": 6, "label": name}
        if part == "tokens_per_s":
            widths = [[100 * width for width in side] for side in _half_widths(errors)]
            axes.errorbar(values, range(len(rows)), xerr=widths, fmt=marker, capsize=2, elinewidth=0.7, **looks)
        else:
            axes.plot(values, range(len(rows)), marker, **looks)
    names = [row["name"] if row["batch_size"] == 1 else f"{row['name']}, {row['batch_size']} rows" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("predicted over measured, minus 1, in %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=4)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasSVG(figure).print_svg(str(path))
