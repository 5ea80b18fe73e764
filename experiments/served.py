"""A load from the command line, and its figures in a table."""

from __future__ import annotations

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


def _quantiles_ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1e3 * spread.p50:.1f} / {1e3 * spread.p99:.1f}"


def _value(estimate: Estimate | None, digits: int = 1, scale: float = 1.0) -> str:
    return "-" if estimate is None else f"{scale * estimate.value:.{digits}f}"
