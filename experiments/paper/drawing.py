"""Published points and our lines as vector files, readable in grey and when colour-blind; the same every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.paper.section import Figure

# Dark to light, each with a marker and a dash pattern of its own.
COLOURS = ("#1f4e79", "#d98c00", "#000000", "#8fb3d9", "#7a7a7a", "#a03a00")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))


@dataclass(frozen=True)
class Series:
    """Points that were published, or a line of ours; both of the same `look` belong together."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    look: int
    is_line: bool


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


def beside(
    label: str, x: Sequence[float], published: Sequence[float], ours: Sequence[float], look: int
) -> list[Series]:
    """Published points and our line at the same places."""
    points = Series(f"{label}, published", x, published, look, is_line=False)
    return [points, Series(f"{label}, ours", x, ours, look, is_line=True)]


def figure(name: str, caption: str, panels: Sequence[Panel]) -> Figure:
    """Panels side by side."""
    return Figure(name, caption, lambda path: _draw(panels, path))


def _draw(panels: Sequence[Panel], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with rc_context({"svg.hashsalt": path.stem}):
        canvas = Canvas(figsize=(0.8 + 4.4 * len(panels), 4.4), layout="constrained")
        for axes, panel in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel)
        FigureCanvasSVG(canvas).print_svg(str(path), metadata={"Date": None})


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    for series in panel.series:
        look = series.look % len(COLOURS)
        style: dict[str, Any] = {"color": COLOURS[look], "label": series.label}
        if series.is_line:
            axes.plot(series.x, series.y, linestyle=DASHES[look], linewidth=1.4, **style)
        else:
            axes.plot(series.x, series.y, MARKERS[look], markersize=6, markerfacecolor="white", **style)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted({x for series in panel.series for x in series.x})))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
