"""What `saguaro fit` shows of a fit and writes beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from calibration.fit_report import FitReport, report_fit
from calibration.profile import Profile
from calibration.summaries import AgreementSummary, parametric, summarize_agreement
from calibration.sweep_cost import SweepCost, sweep_cost
from experiments.config import SearchConfig
from experiments.planning import best_engine
from experiments.recorded_workload import recorded_workload
from experiments.run import search_space
from sim.errors import BadInput
from sim.latency import Beyond
from sim.metrics import Estimate
from sim.policy import Fallback, SpeculativeSpeculative, uniform_fan_out
from sim.search import search
from sim.simulate import Prediction, predict
from sim.system import System
from sim.trace import Lane, Operation
from sim.workload import Workload

SHOWN_LENGTH, SHOWN_BUDGET = 4, 16  # of the policy whose acceptance and hit curves are shown


@dataclass(frozen=True)
class Fitted:
    """A fit's report; the agreement in numbers, and what one policy makes of the record (`replay`) and of these numbers
    alone (`numbers`); what a sweep would have cost, None where the profile does not say what it was for."""

    report: FitReport
    summary: AgreementSummary
    replay: Prediction[SpeculativeSpeculative]
    numbers: Prediction[SpeculativeSpeculative]
    sweep: SweepCost | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            **self.report.to_dict(),
            "agreement": self.summary.to_dict(),
            "replay": self.replay.to_dict(),
            "numbers": self.numbers.to_dict(),
            "sweep": None if self.sweep is None else self.sweep.to_dict(),
        }


def look_at(profile: Profile, system: System) -> Fitted:
    """All that is to be said of `calibration.fit.fit(profile)`."""
    record, workload = profile.agreement, recorded_workload(profile.agreement)
    policy = _shown_policy(system, record.num_candidates)
    # Shares of rounds are asked for, and not times: near the end of a text fewer branches than profiled are enough.
    timed = replace(system, latency=replace(system.latency, beyond=Beyond.EXTRAPOLATE))
    in_numbers = replace(timed, agreement=parametric(record, workload, policy))
    return Fitted(
        report=report_fit(profile, system),
        summary=summarize_agreement(record, workload, policy),
        replay=predict(policy, workload, timed),
        numbers=predict(policy, recorded_workload(in_numbers.agreement), in_numbers),
        sweep=_sweep(profile, workload, system),
    )


def _shown_policy(system: System, num_candidates: int) -> SpeculativeSpeculative:
    """As far as the profile goes."""
    widest, most_branches = (
        max(system.latency[key].knots) for key in ((Lane.TARGET, Operation.VERIFY), (Lane.DRAFT, Operation.TREE_STEP))
    )
    K = max(1, min(SHOWN_LENGTH, widest - 1))
    fan_out = uniform_fan_out(K, min(SHOWN_BUDGET, most_branches, num_candidates))
    return SpeculativeSpeculative(K, fan_out, fan_out, Fallback.DRAFT)


def _sweep(profile: Profile, workload: Workload, system: System) -> SweepCost | None:
    """Of the policies, prompts and repeats that the experiment file of the profile asks for."""
    settings = profile.manifest.get("settings", {})
    if not {"search", "workload", "run"} <= settings.keys():
        return None
    rules = replace(workload, batch_size=profile.manifest["workload"].get("batch_size", 1))
    space = search_space(_search_config(settings["search"]))
    found = search(space, rules, system, engine=best_engine(rules, system))
    return sweep_cost(found, settings["workload"]["test_prompts"], settings["run"]["repeats"])


def _search_config(section: object) -> SearchConfig:
    """Raises `BadInput` on a manifest that was changed by hand."""
    try:
        return SearchConfig.model_validate_json(json.dumps(section))
    except ValidationError as error:
        name = ".".join(map(str, ("settings", "search", *error.errors()[0]["loc"])))
        raise BadInput(f"manifest of the profile: {name}", error.errors()[0]["msg"]) from None


def print_fit(fitted: Fitted, console: Console) -> None:
    """Doubts first, then parameters with their intervals, steps, and the agreement in numbers."""
    for note in fitted.report.notes:
        console.print(f"note: {note}", highlight=False)
    table = Table("parameter", "value", "from")
    for row in rows_of(fitted):
        table.add_row(*row)
    console.print(table)
    for step in fitted.report.steps:
        console.print(f"step: {step.in_words()}", highlight=False)
    console.print(agreement_table(fitted.summary))


def rows_of(fitted: Fitted) -> list[tuple[str, str, str]]:
    """Name, value with interval, what the interval is over."""
    report = fitted.report
    rows = [
        (f"drift of the {lane.value} during the profile, %", _of(e, 100, "+.1f"), f"{e.n} blocks")
        for lane, e in report.drift.items()
    ]
    rows += [
        (f"slow-down of the {lane.value} beside the other role", _of(e, 1, ".3f"), f"{e.n} blocks")
        for lane, e in report.contention.items()
    ]
    rows += [
        (f"{key[1].value} in runs of {kind}, times as long as alone", _of(e, 1, ".3f"), f"{e.n} texts or batches")
        for kind, ratios in report.in_situ.items()
        for key, e in ratios.items()
    ]
    rows += [
        (f"host time of a round ({term.value}), ms", _of(e, 1e3, ".3f"), f"{e.n} texts or batches")
        for term, e in report.host_s.items()
    ]
    rows += [
        ("least certain latency, ± %", f"{100 * report.largest_location_error:.1f}", "blocks of a cell"),
        ("acceptance of a first draft token", _of(report.acceptance, 1, ".3f"), f"{report.acceptance.n} prompts"),
        ("its design effect", f"{report.design_effect:.1f}", "prompts against positions"),
    ]
    return rows + _rows_of_replay(fitted) + _rows_of_cost(fitted)


def _rows_of_replay(fitted: Fitted) -> list[tuple[str, str, str]]:
    name = fitted.summary.policy.name
    return [
        row
        for prediction, basis in ((fitted.replay, "the record"), (fitted.numbers, "its numbers alone"))
        for row in (
            (f"tokens per round of {name}", _or_dash(prediction.mean_acceptance_length), basis),
            (f"hit rate of {name}", _or_dash(prediction.hit_rate), basis),
        )
    ]


def _rows_of_cost(fitted: Fitted) -> list[tuple[str, str, str]]:
    rows = [("time of the profile, s", f"{fitted.report.profile_s:.0f}", "")]
    if fitted.sweep is not None:
        sweep = fitted.sweep
        sizes = f"{sweep.num_policies} policies, {sweep.num_prompts} prompts, {sweep.num_repeats} repeats"
        rows.append(("time of decoding with every policy instead, s", f"{sweep.seconds:.0f}", sizes))
    return rows


def _of(estimate: Estimate, scale: float, spec: str) -> str:
    value, low, high = (scale * x for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:{spec}} [{low:{spec}}, {high:{spec}}]"


def _or_dash(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f}"


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
