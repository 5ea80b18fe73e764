"""What `saguaro fit` shows of a fit."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from calibration.fit_report import FitReport
from calibration.profile import Profile
from calibration.summaries import AgreementSummary, summarize_agreement
from experiments.recorded_workload import recorded_workload
from sim.metrics import Estimate
from sim.policy import Fallback, SpeculativeSpeculative, uniform_fan_out
from sim.system import System

SHOWN_LENGTH, SHOWN_BUDGET = 4, 16  # of the policy whose acceptance and hit curves are shown


def print_fit(report: FitReport, profile: Profile, system: System, console: Console) -> None:
    """Doubts first, then parameters with their intervals, steps, and the agreement in numbers."""
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)
    table = Table("parameter", "value", "from")
    for row in rows_of(report):
        table.add_row(*row)
    console.print(table)
    for step in report.steps:
        where = f"{step.lane.value} {step.operation.value}, {step.batch_size} rows"
        console.print(
            f"step: {where}: {step.to_tokens} tokens take {step.ratio:.2f} times as long as {step.from_tokens}",
            highlight=False,
        )
    console.print(agreement_table(_shown_summary(system, profile)))


def rows_of(report: FitReport) -> list[tuple[str, str, str]]:
    """Name, value with interval, what the interval is over."""
    rows = [
        (f"drift of the {lane.value} during the profile, %", _of(e, 100, "+.1f"), f"{e.n} blocks")
        for lane, e in report.drift.items()
    ]
    rows += [
        (f"slow-down of the {lane.value} beside the other role", _of(e, 1, ".3f"), f"{e.n} blocks")
        for lane, e in report.contention.items()
    ]
    rows += [
        (f"host time of a round ({term.value}), ms", _of(e, 1e3, ".3f"), f"{e.n} texts or batches")
        for term, e in report.host_s.items()
    ]
    rows.append(("least certain latency, ± %", f"{100 * report.largest_location_error:.1f}", "samples of a cell"))
    rows.append(
        ("acceptance of a first draft token", _of(report.acceptance, 1, ".3f"), f"{report.acceptance.n} prompts")
    )
    rows.append(("its design effect", f"{report.design_effect:.1f}", "prompts against positions"))
    rows.append(("time of the profile, s", f"{report.profile_s:.0f}", ""))
    return rows


def _of(estimate: Estimate, scale: float, spec: str) -> str:
    value, low, high = (scale * x for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:{spec}} [{low:{spec}}, {high:{spec}}]"


def _shown_summary(system: System, profile: Profile) -> AgreementSummary:
    record = profile.agreement
    fan_out = uniform_fan_out(SHOWN_LENGTH, min(SHOWN_BUDGET, record.num_candidates))
    policy = SpeculativeSpeculative(SHOWN_LENGTH, fan_out, fan_out, Fallback.DRAFT)
    return summarize_agreement(record, recorded_workload(system.agreement), policy)


def agreement_table(summary: AgreementSummary) -> Table:
    """Acceptance by draft position, then misses c F^-r by source and accept count."""
    table = Table("rounds", "accepted", "share", "c", "r", "off by", title=summary.policy.name)
    for index, estimate in enumerate(summary.acceptance):
        table.add_row(f"draft token {index + 1} accepted once tested", "", "", f"{estimate:.3f}", "", "")
    for curve in summary.curves:
        numbers = (
            f"{curve.share:.2f}",
            f"{curve.prefactor:.2f}",
            f"{curve.exponent:.2f}",
            f"{curve.largest_deviation:.2f}",
        )
        table.add_row(f"misses after a {curve.source.value}", str(curve.accept_count), *numbers)
    return table
