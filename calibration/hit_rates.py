"""Hit rate by fan-out: what the calibration record says of every fan-out, beside the look-ups of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from calibration.summaries import FAN_OUTS, hit_rates
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.metrics import HITS, LOOKUPS, ratio_of_totals
from sim.policy import Policy, SpeculativeSpeculative
from sim.trace import Round, Source, Trace
from sim.workload import Workload

AFTER = {Source.HIT: "hit", Source.MISS: "miss"}


def hit_curves(record: AgreementRecord, workload: Workload, policy: Policy, traces: Sequence[Trace]) -> dict[str, Any]:
    """JSON-safe. `predicted`: for rounds after a hit and after a miss, the share of look-ups that find their outcome if
    every accept count has the fan-out, on the record's texts. `measured`: the look-ups of `traces` of the policy, by
    the fan-out that the policy gave to the accept count before them, with intervals over sequences."""
    if not isinstance(policy, SpeculativeSpeculative):
        raise BadInput("policy", "must be an SSD policy, which alone looks anything up", policy.name)
    fan_outs = [fan_out for fan_out in FAN_OUTS if fan_out <= record.num_candidates]
    rates = hit_rates(record, workload, policy, fan_outs)
    predicted = [{"source": AFTER[source], "fan_outs": fan_outs, "hit_rates": rate} for source, rate in rates.items()]
    return {"policy": policy.name, "predicted": predicted, "measured": _measured(policy, traces)}


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
