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
from sim.latency import NUM_RESIDUALS, LatencyModel, LatencySample, OperationLatency, equally_likely
from sim.policy import policy_from_dict
from sim.system import HostTerm, System, host_term
from sim.trace import Lane, Operation, Source, Trace

FloatArray = NDArray[np.float64]
Key = tuple[Lane, Operation]
Cell = tuple[int, int, int]  # rows, tokens of each, context
IN_SITU = (Operation.VERIFY, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP)
FEWEST_IN_SITU = 40  # samples of an operation in the short runs; with fewer the isolated ones are kept


def fit(profile: Profile) -> System:
    """The system that the profile's samples, short runs and agreement record speak of.

    Raises `BadInput` if the short runs lack a kind of round.
    """
    latency = LatencyModel(_tables(profile.latency))
    host_s = _host_times(profile.traces)
    missing = [term.value for term in HostTerm if term not in host_s]
    if missing:
        raise BadInput("profile", f"its short runs must hold rounds of every kind; none of: {', '.join(missing)}")
    isolated = System(
        latency=latency,
        contention={lane: _slowdown(profile.latency, latency, lane) for lane in Lane},
        host_s=host_s,
        agreement=profile.agreement,
        identity=profile.identity,
        overlaps=profile.identity["concurrency"] != "serial",
    )
    return replace(isolated, in_situ=_in_situ(profile.traces, isolated))


def at_speed_of(system: System, traces: Sequence[Trace]) -> System:
    """The system as fast as the machine was during `traces`: host times and residuals in situ are taken from them.

    What does not occur in them stays as it was.
    """
    seen = _in_situ(traces, system)
    kinds = system.in_situ.keys() | seen.keys()
    in_situ = {kind: {**system.in_situ.get(kind, {}), **seen.get(kind, {})} for kind in kinds}
    return replace(system, host_s={**system.host_s, **_host_times(traces)}, in_situ=in_situ)


def _tables(samples: Sequence[LatencySample]) -> dict[Key, OperationLatency]:
    """Median of the idle samples of each cell; residuals are the pooled ratios of samples to their cell's median."""
    cells: dict[Key, dict[Cell, list[float]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        if not s.busy:
            cells[s.lane, s.operation][s.batch_size, s.num_tokens, s.context].append(s.duration_s)
    return {key: _table(key[1], by_cell) for key, by_cell in cells.items()}


def _table(operation: Operation, by_cell: dict[Cell, list[float]]) -> OperationLatency:
    """Raises `BadInput` if no sample is of one row."""
    medians: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for (rows, width, context), durations in sorted(by_cell.items()):
        medians[rows][width][context] = float(np.median(durations))
    knots = {
        rows: {
            width: _line(row) if operation is Operation.TREE_STEP and len(row) > 2 else tuple(row.items())
            for width, row in by_width.items()
        }
        for rows, by_width in medians.items()
    }
    table = OperationLatency(operation, knots.pop(1, {}), residuals=(1.0,), batched=knots)
    ratios = [
        duration / float(table.location_s(width, context, rows))
        for (rows, width, context), durations in by_cell.items()
        for duration in durations
    ]
    return replace(table, residuals=equal_shares(ratios))


def _line(medians: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Location of a tree step over the context. Tree steps meet many contexts, each known from few samples, and lie on
    a line, for attention reads every entry once. Its slope is not negative."""
    contexts, values = (np.array(row) for row in zip(*medians.items(), strict=True))
    slope = max(0.0, float(theilslopes(values, contexts).slope))
    intercept = float(np.median(values - slope * contexts))
    return tuple((int(c), intercept + slope * int(c)) for c in (contexts[0], contexts[-1]))


def equal_shares(values: Iterable[float]) -> tuple[float, ...]:
    """At most `NUM_RESIDUALS` equally likely values with the mean of all, after the outermost 1 % are pulled in."""
    return tuple(float(value) for value in equally_likely(_pulled_in(values), NUM_RESIDUALS))


def _pulled_in(values: Iterable[float]) -> FloatArray:
    """The values with those beyond the 1 % and 99 % quantiles set to them: one wild sample moves nothing."""
    sample = np.fromiter(values, dtype=float)
    low, high = np.quantile(sample, 0.01, method="higher"), np.quantile(sample, 0.99, method="lower")
    return np.clip(sample, low, max(low, high))


def _slowdown(samples: Sequence[LatencySample], latency: LatencyModel, lane: Lane) -> float:
    """Median ratio of a lane's busy samples to its idle cells; at least 1, because company does not speed work up."""
    ratios = [
        s.duration_s / float(latency[lane, s.operation].location_s(s.num_tokens, s.context, s.batch_size))
        for s in samples
        if s.lane is lane and s.busy and s.operation in IN_SITU
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
                location_s = float(table.location_s(s.num_tokens / s.batch_size, s.context, s.batch_size))
                ratio = s.duration_s / (location_s * slowdown)
                ratios[trace.policy["kind"]][s.lane, s.operation].append(ratio)
    return {
        kind: {key: equal_shares(row) for key, row in rows.items() if len(row) >= FEWEST_IN_SITU}
        for kind, rows in ratios.items()
    }


def _host_times(traces: Sequence[Trace]) -> dict[HostTerm, float]:
    """Mean time of a round that no operation explains, for the kinds of round that occur."""
    unexplained: dict[HostTerm, list[float]] = defaultdict(list)
    for trace in traces:
        for term, seconds in unexplained(trace):
            unexplained[term].append(seconds)
    return {term: max(0.0, float(_pulled_in(seconds).mean())) for term, seconds in unexplained.items()}


def unexplained(trace: Trace) -> Iterable[tuple[HostTerm, float]]:
    """Per round: what is neither verification, nor drafting, nor the wait for an unfinished build."""
    policy = policy_from_dict(trace.policy)
    for rows, time in time_of_rounds(trace):
        # A batch in which a row missed is as slow as one in which all did.
        source = next((r.source for r in rows if r.source is not Source.HIT), Source.HIT)
        yield host_term(policy, source), time.lookup_s + time.rest_s
