"""Hit rate by fan-out: what the calibration record says of every fan-out, beside the look-ups of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from calibration.summaries import FAN_OUTS, AgreementSummary
from sim.metrics import HITS, LOOKUPS, ratio_of_totals
from sim.policy import SpeculativeSpeculative
from sim.trace import Round, Source, Trace

AFTER = {Source.HIT: "hit", Source.MISS: "miss"}


def hit_curves(summary: AgreementSummary, policy: SpeculativeSpeculative, traces: Sequence[Trace]) -> dict[str, Any]:
    """JSON-safe. `predicted`: for rounds after a hit and after a miss, the share of look-ups that find their outcome if
    every accept count has the fan-out. `measured`: the look-ups of `traces` of the policy, by the fan-out that the
    policy gave to the accept count before them, with intervals over sequences."""
    return {"policy": policy.name, "predicted": _predicted(summary), "measured": _measured(policy, traces)}


def _predicted(summary: AgreementSummary) -> list[dict[str, Any]]:
    curves = []
    for source, name in AFTER.items():
        of_source = [curve for curve in summary.curves if curve.source is source]
        total = sum(curve.share for curve in of_source)
        rates = [sum(c.share * c.curve.hit_rate(fan_out) for c in of_source) / total for fan_out in FAN_OUTS if total]
        if rates:
            curves.append({"source": name, "fan_outs": list(FAN_OUTS), "hit_rates": rates})
    return curves


def _measured(policy: SpeculativeSpeculative, traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """A sequence's repeats count as one, for they decode the same text."""
    counts: dict[tuple[str, int], dict[int, list[int]]] = {}
    for trace in traces:
        for before, after in _consecutive(trace):
            if after.source in LOOKUPS:
                of_place = counts.setdefault(_place(policy, before), {}).setdefault(after.sequence, [0, 0])
                of_place[0] += after.source in HITS
                of_place[1] += 1
    points = []
    for (source, fan_out), by_sequence in sorted(counts.items()):
        hits, lookups = np.array(list(by_sequence.values()), dtype=float).T
        rate = ratio_of_totals(hits, lookups)
        assert rate is not None  # every place has a look-up
        points.append({"source": source, "fan_out": fan_out, "lookups": int(lookups.sum()), "hit_rate": rate.to_dict()})
    return points


def _consecutive(trace: Trace) -> list[tuple[Round, Round]]:
    """Every round with the next one of its sequence."""
    rounds = sorted(trace.rounds, key=attrgetter("sequence", "index"))
    return [(before, after) for before, after in pairwise(rounds) if before.sequence == after.sequence]


def _place(policy: SpeculativeSpeculative, before: Round) -> tuple[str, int]:
    """Source of the round, and the fan-out of its accept count."""
    return AFTER.get(before.source, AFTER[Source.MISS]), policy.fan_out(before.source)[before.num_accepted]
