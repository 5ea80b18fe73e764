"""The finalists of a search under a load: who serves most requests as promised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from sim.errors import BadInput
from sim.load import Load
from sim.policy import Policy
from sim.replications import CEILING, student_quantile
from sim.search import SearchResult
from sim.serving import ServingReport, Slo, serve
from sim.streams import replication_seeds
from sim.system import System
from sim.ties import Contrast, simplicity
from sim.workers import HERE, Workers
from sim.workload import Workload

NUM_SERVED = 6  # of a search: the first of them, beside the best of every kind and the recommended one


@dataclass(frozen=True)
class GoodputResult:
    """Reports of the finalists under one load, most requests served as promised first; a saturated one serves none.

    `contrasts` set every report beside the first, by batch means that are taken to be independent: requests, prompts
    and luck are common, so that the true errors are smaller. `recommended` is the simplest of those without significant
    difference.
    """

    ranked: tuple[ServingReport, ...]
    contrasts: dict[str, Contrast]
    recommended: Policy

    @property
    def ties(self) -> list[ServingReport]:
        return [report for report in self.ranked if self.contrasts[report.name].is_tie]

    def to_dict(self) -> dict[str, Any]:
        return {
            "recommended": self.recommended.name,
            "ties": [report.name for report in self.ties],
            "reports": [r.to_dict() | {"beside_first": self.contrasts[r.name].to_dict()} for r in self.ranked],
        }


def goodput_of_finalists(
    found: SearchResult,
    load: Load,
    slo: Slo,
    workload: Workload,
    system: System,
    *,
    seed: int = 0,
    workers: Workers = HERE,
) -> GoodputResult:
    """Serve the load with the best of a search, all under one seed that chose none of them. Raises `BadInput` where no
    finalist keeps up with the load or serves a single request as promised."""
    kinds = {type(prediction.policy): prediction.policy for prediction in reversed(found.ranked)}
    first = [prediction.policy for prediction in found.ranked[:NUM_SERVED]]
    policies = list(dict.fromkeys([*first, *kinds.values(), found.recommended.policy]))
    (fresh,) = replication_seeds(seed, 1, first=CEILING)
    reports = workers.map(partial(_served, load, slo, workload, system, fresh), policies)
    by_name = {policy.name: policy for policy in policies}
    ranked = sorted(reports, key=lambda report: (-_goodput(report), simplicity(by_name[report.name])))
    if not _goodput(ranked[0]):
        raise BadInput(
            "load", "is served as promised by no finalist: a lower rate, a longer promise, or larger batches"
        )
    beside = {report.name: _contrast(report, ranked[0], len(ranked) - 1) for report in ranked}
    tied = [by_name[name] for name, contrast in beside.items() if contrast.is_tie]
    return GoodputResult(tuple(ranked), beside, min(tied, key=simplicity))


def _served(load: Load, slo: Slo, workload: Workload, system: System, seed: int, policy: Policy) -> ServingReport:
    return serve(policy, load, workload, system, seed, slo=slo)


def _goodput(report: ServingReport) -> float:
    return report.goodput_per_s.value if report.goodput_per_s else 0.0


def _contrast(report: ServingReport, first: ServingReport, num_comparisons: int) -> Contrast:
    ratio = _goodput(report) / _goodput(first)
    if report is first or ratio == 0:
        return Contrast(ratio, 0.0, 0, num_comparisons)
    errors, num = [], []
    for goodput in (report.goodput_per_s, first.goodput_per_s):
        assert goodput is not None
        num.append(goodput.n)
        half_width = goodput.high - goodput.value
        quantile = student_quantile(goodput.n - 1) if goodput.n > 1 else 1.0
        errors.append(half_width / quantile / goodput.value)
    return Contrast(ratio, ratio * math.hypot(*errors), min(num), num_comparisons)
