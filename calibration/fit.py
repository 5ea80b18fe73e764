"""Fit a system to a profile: latency tables, contention and host times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import theilslopes

from calibration.breakdown import time_of_rounds
from calibration.profile import Profile
from sim.errors import BadInput
from sim.latency import NUM_RESIDUALS, LatencyModel, LatencySample, OperationLatency
from sim.policy import policy_from_dict
from sim.system import HostTerm, System, host_term
from sim.trace import Lane, Operation, Trace

FloatArray = NDArray[np.float64]
Key = tuple[Lane, Operation]
MOST_KNOTS = 6
IN_SITU = (Operation.VERIFY, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP)
FEWEST_IN_SITU = 40  # samples of an operation in the short runs; with fewer the isolated ones are kept


def fit(profile: Profile) -> System:
    """The system that the profile's samples, short runs and agreement record speak of."""
    latency = LatencyModel(_tables(profile.latency))
    isolated = System(
        latency=latency,
        contention={lane: _slowdown(profile.latency, latency, lane) for lane in Lane},
        host_s=_host_times(profile.traces),
        agreement=profile.agreement,
        identity=profile.identity,
        overlaps=profile.identity["concurrency"] != "serial",
    )
    return replace(isolated, in_situ=_in_situ(profile.traces, isolated))


def _tables(samples: Sequence[LatencySample]) -> dict[Key, OperationLatency]:
    """Median of the idle samples of each cell; residuals are the pooled ratios of samples to their cell's median."""
    cells: dict[Key, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        if not s.busy:
            cells[s.lane, s.operation][s.num_tokens, s.context].append(s.duration_s)
    return {key: _table(key[1], by_cell) for key, by_cell in cells.items()}


def _table(operation: Operation, by_cell: dict[tuple[int, int], list[float]]) -> OperationLatency:
    medians: dict[int, dict[int, float]] = defaultdict(dict)
    for (width, context), durations in sorted(by_cell.items()):
        medians[width][context] = float(np.median(durations))
    knots = {width: _knots(row) for width, row in medians.items()}
    table = OperationLatency(operation, knots, residuals=(1.0,))
    ratios = [
        duration / float(table.location_s(width, context))
        for (width, context), durations in by_cell.items()
        for duration in durations
    ]
    return replace(table, residuals=mid_quantiles(ratios))


def _knots(medians: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Location over the context. Few contexts are joined as they are; many, which tree steps meet, are each known from
    few samples and lie on a line, for attention reads every entry once. Its slope is not negative."""
    if len(medians) <= MOST_KNOTS:
        return tuple(medians.items())
    contexts, values = (np.array(row) for row in zip(*medians.items(), strict=True))
    slope = max(0.0, float(theilslopes(values, contexts).slope))
    intercept = float(np.median(values - slope * contexts))
    return tuple((int(c), intercept + slope * int(c)) for c in (contexts[0], contexts[-1]))


def mid_quantiles(values: Iterable[float]) -> tuple[float, ...]:
    """`NUM_RESIDUALS` equally likely values: the quantiles in the middle of equal shares, which cuts both tails."""
    levels = (np.arange(NUM_RESIDUALS) + 0.5) / NUM_RESIDUALS
    return tuple(float(value) for value in np.quantile(np.fromiter(values, dtype=float), levels))


def _slowdown(samples: Sequence[LatencySample], latency: LatencyModel, lane: Lane) -> float:
    """Median ratio of a lane's busy samples to its idle cells; at least 1, because company does not speed work up."""
    ratios = [
        s.duration_s / float(latency[lane, s.operation].location_s(s.num_tokens, s.context))
        for s in samples
        if s.lane is lane and s.busy
    ]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def _in_situ(traces: Sequence[Trace], isolated: System) -> dict[str, dict[Key, tuple[float, ...]]]:
    """By kind of decoder: ratios of what its operations took in the short runs to what the tables say of them."""
    ratios: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        built = {(s.sequence, s.round) for s in trace.spans if s.operation is Operation.GLUE}
        for s in trace.spans:
            if s.operation in IN_SITU:
                beside = s.operation is not Operation.DRAFT_STEP and (s.sequence, s.round) in built
                slowdown = isolated.contention[s.lane] if beside and isolated.overlaps else 1.0
                table = isolated.latency[s.lane, s.operation]
                ratio = s.duration_s / float(table.location_s(s.num_tokens, s.context) * slowdown)
                ratios[trace.policy["kind"]][s.lane, s.operation].append(ratio)
    return {
        kind: {key: mid_quantiles(row) for key, row in rows.items() if len(row) >= FEWEST_IN_SITU}
        for kind, rows in ratios.items()
    }


def _host_times(traces: Sequence[Trace]) -> dict[HostTerm, float]:
    """Mean time of a round that no operation explains, by kind of round; the largest and smallest 5 % are left out."""
    unexplained: dict[HostTerm, list[float]] = defaultdict(list)
    for trace in traces:
        for term, seconds in _unexplained(trace):
            unexplained[term].append(seconds)
    missing = [term.value for term in HostTerm if not unexplained[term]]
    if missing:
        raise BadInput("profile", f"its short runs must hold rounds of every kind; none of: {', '.join(missing)}")
    return {term: max(0.0, _trimmed_mean(unexplained[term])) for term in HostTerm}


def _trimmed_mean(values: Sequence[float]) -> float:
    ordered = np.sort(np.asarray(values))
    cut = int(0.05 * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def _unexplained(trace: Trace) -> Iterable[tuple[HostTerm, float]]:
    """Per round: what is neither verification, nor drafting, nor the wait for an unfinished build."""
    policy = policy_from_dict(trace.policy)
    for r, time in time_of_rounds(trace):
        yield host_term(policy, r.source), time.lookup_s + time.rest_s
