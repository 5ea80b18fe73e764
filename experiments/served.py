"""A load from the command line, and its figures in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.errors import BadInput
from sim.load import ClosedLoop, Load, OpenLoop, Poisson
from sim.metrics import Estimate
from sim.serving import ServingReport, Spread

SERVED_HEAD = (
    "policy",
    "TTFT p50/p99, ms",
    "per token p50/p99, ms",
    "tokens/s",
    "per device",
    "goodput, 1/s",
    "rows",
    "target busy, %",
)


def load_of(rate_per_s: float | None, concurrency: int | None, max_batch_size: int, num_requests: int) -> Load:
    """Random arrivals or clients, one of the two. Raises `BadInput` if neither or both are given."""
    if (rate_per_s is None) == (concurrency is None):
        raise BadInput("--rate, --concurrency", "must give one of the two", (rate_per_s, concurrency))
    if rate_per_s is not None:
        return OpenLoop(Poisson(rate_per_s), max_batch_size, num_requests)
    assert concurrency is not None
    return ClosedLoop(concurrency, num_requests, max_batch_size)


def served_row(report: ServingReport) -> tuple[str, ...]:
    """Cells under `SERVED_HEAD`; a dash where a load has no steady state, or nothing is to be said."""
    per_device = report.tokens_per_s_per_device
    return (
        report.name,
        _quantiles_ms(report.ttft_s),
        _quantiles_ms(report.tpot_s),
        _value(report.tokens_per_s),
        "-" if per_device is None else f"{per_device:.1f}",
        _value(report.goodput_per_s, 2),
        _value(report.batch_size, 2),
        _value(report.target_utilisation, 1, scale=100),
    )


def served_in_words(reports: Sequence[ServingReport]) -> str:
    """Which policy serves the load best, with its uncertainty: by requests served as promised where anything was
    promised, else by the time per token. Policies whose intervals overlap the best one's are not told apart."""
    steady = [report for report in reports if report.tpot_s is not None and not report.is_saturated]
    if not steady:
        return "No policy keeps up with the load"
    promised = any(report.slo and math.isfinite(min(report.slo.ttft_s, report.slo.tpot_s)) for report in steady)
    merit = _goodput if promised else _speed
    best = max(steady, key=lambda report: merit(report).value)
    alike = [r.name for r in steady if r is not best and merit(r).high >= merit(best).low]
    overloaded = [report.name for report in reports if report not in steady]
    words = f"{best.name} {_in_words(best, promised=promised)}"
    words += f"; not clearly better than {', '.join(alike)}" if alike else ""
    return words + (f"; {', '.join(overloaded)} cannot keep up with the load" if overloaded else "")


def _goodput(report: ServingReport) -> Estimate:
    return report.goodput_per_s or Estimate(0.0, 0.0, 0.0, 1)


def _speed(report: ServingReport) -> Estimate:
    assert report.tpot_s is not None
    mean = report.tpot_s.mean
    return Estimate(1 / mean.value, 1 / mean.high, 1 / max(mean.low, 1e-300), mean.n)


def _in_words(best: ServingReport, *, promised: bool) -> str:
    if promised:
        return f"serves most requests as promised: {_goodput(best):.2f} per second"
    assert best.tpot_s is not None
    mean = best.tpot_s.mean
    interval = f"{1e3 * mean.value:.2f} [{1e3 * mean.low:.2f}, {1e3 * mean.high:.2f}]"
    return f"gives every request its tokens fastest: {interval} ms per token on average"


def _quantiles_ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1e3 * spread.p50:.1f} / {1e3 * spread.p99:.1f}"


def _value(estimate: Estimate | None, digits: int = 1, scale: float = 1.0) -> str:
    return "-" if estimate is None else f"{scale * estimate.value:.{digits}f}"
