"""Fit a system to a profile: latency tables, contention and host times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import theilslopes

from calibration.breakdown import time_of_rounds
from calibration.profile import Profile
from sim.errors import BadInput
from sim.latency import NUM_RESIDUALS, Knots, LatencyModel, LatencySample, OperationLatency, equally_likely
from sim.policy import policy_from_dict
from sim.system import HostTerm, InSitu, System, host_term
from sim.trace import Lane, Operation, Source, Span, Trace

FloatArray = NDArray[np.float64]
Key = tuple[Lane, Operation]
Cell = tuple[int, int, int]  # rows, tokens of each, context
IN_SITU = (Operation.VERIFY, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP)
STEP_ERRORS = 3.0  # standard errors that a median must leave the line over the contexts by, to be a step
FEWEST_IN_SITU = 40  # samples of an operation in the short runs; with fewer the isolated ones are kept


def fit(profile: Profile) -> System:
    """The system that the profile's samples, short runs and agreement record speak of.

    Raises `BadInput` if the short runs lack a kind of round.
    """
    latency = LatencyModel(_tables(profile.latency))
    overlaps = profile.identity["concurrency"] != "serial"
    contention = {lane: _slowdown(profile.latency, latency, lane) for lane in Lane}
    in_situ = _in_situ(profile.traces, latency, contention if overlaps else dict.fromkeys(Lane, 1.0))
    host_s = _host_times(profile.traces, latency, in_situ)
    missing = [term.value for term in HostTerm if term not in host_s]
    if missing:
        raise BadInput("profile", f"its short runs must hold rounds of every kind; none of: {', '.join(missing)}")
    return System(latency, contention, host_s, profile.agreement, profile.identity, overlaps, in_situ)


def at_speed_of(system: System, traces: Sequence[Trace]) -> System:
    """The system as fast as the machine was during `traces`: host times and residuals in situ are taken from them.

    What does not occur in them stays as it was.
    """
    slowdown = {lane: system.slowdown(lane, beside=True) for lane in Lane}
    seen = _in_situ(traces, system.latency, slowdown)
    kinds = system.in_situ.keys() | seen.keys()
    in_situ = {kind: {**system.in_situ.get(kind, {}), **seen.get(kind, {})} for kind in kinds}
    host_s = {**system.host_s, **_host_times(traces, system.latency, in_situ)}
    return replace(system, host_s=host_s, in_situ=in_situ)


def _tables(samples: Sequence[LatencySample]) -> dict[Key, OperationLatency]:
    """Median of the idle samples of each cell; residuals are the pooled ratios of samples to their cell's median."""
    cells: dict[Key, dict[Cell, list[float]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        if not s.busy:
            cells[s.lane, s.operation][s.batch_size, s.num_tokens, s.context].append(s.duration_s)
    return {key: _table(key[1], by_cell) for key, by_cell in cells.items()}


def _table(operation: Operation, by_cell: dict[Cell, list[float]]) -> OperationLatency:
    """Raises `BadInput` if no sample is of one row."""
    cells: dict[int, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for (rows, width, context), durations in sorted(by_cell.items()):
        cells[rows][width][context] = durations
    knots = {
        rows: {width: _over_contexts(operation, row) for width, row in by_width.items()}
        for rows, by_width in cells.items()
    }
    table = OperationLatency(operation, knots.pop(1, {}), residuals=(1.0,), batched=knots)
    ratios = [
        duration / float(table.location_s(width, context, rows))
        for (rows, width, context), durations in by_cell.items()
        for duration in durations
    ]
    return replace(table, residuals=equal_shares(ratios))


def _over_contexts(operation: Operation, durations: dict[int, list[float]]) -> Knots:
    """Location by context. Attention reads every entry once, so that it lies on a line, which knows more than each
    context by itself; where the medians leave that line by more than chance allows there are steps, and they stay.
    Tree steps, each context of which has few samples, are always a line."""
    medians = {context: float(np.median(own)) for context, own in durations.items()}
    if len(medians) < 3:
        return tuple(medians.items())
    line = _line(medians)
    (first, first_s), (last, last_s) = line
    on_line = np.interp(list(medians), [first, last], [first_s, last_s])
    errors = np.array([error_of_median(own) for own in durations.values()])
    is_straight = (np.abs(np.array(list(medians.values())) - on_line) <= STEP_ERRORS * errors).all()
    return line if operation is Operation.TREE_STEP or is_straight else tuple(medians.items())


def error_of_median(values: ArrayLike) -> float:
    """Standard error from the median absolute deviation, as of a normal sample."""
    sample = np.asarray(values)
    deviation = float(np.median(np.abs(sample - np.median(sample))))
    return 1.2533 * 1.4826 * deviation / float(np.sqrt(len(sample)))


def _line(medians: dict[int, float]) -> Knots:
    """The line through the medians; its slope is not negative."""
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
    ratios = [ratio for _, ratio in busy_ratios(samples, latency, lane)]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def busy_ratios(samples: Iterable[LatencySample], latency: LatencyModel, lane: Lane) -> Iterable[tuple[int, float]]:
    """Block and ratio to its idle cell of every sample of a lane that was taken beside the other at work."""
    for s in samples:
        if s.lane is lane and s.busy and s.operation in IN_SITU:
            table = latency[lane, s.operation]
            yield s.block, s.duration_s / float(table.location_s(s.num_tokens, s.context, s.batch_size))


def _in_situ(
    traces: Sequence[Trace], latency: LatencyModel, slowdown: Mapping[Lane, float]
) -> dict[str, dict[Key, tuple[float, ...]]]:
    """By kind of decoder: ratios of what its operations took in the short runs to what the tables say of them.

    The first draft step of a round is left out: it comes after a wait, and what that costs is host time
    (`unexplained`).
    """
    ratios: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        built = {(s.sequence, s.round) for s in trace.spans if s.operation is Operation.GLUE}
        first = {id(s) for s in _first_draft_steps(trace).values()}
        for s in trace.spans:
            if s.operation in IN_SITU and id(s) not in first:
                beside = s.operation is not Operation.DRAFT_STEP and (s.sequence, s.round) in built
                location_s = _location_s(s, latency) * (slowdown[s.lane] if beside else 1.0)
                ratios[trace.policy["kind"]][s.lane, s.operation].append(s.duration_s / location_s)
    return {
        kind: {key: equal_shares(row) for key, row in rows.items() if len(row) >= FEWEST_IN_SITU}
        for kind, rows in ratios.items()
    }


def _first_draft_steps(trace: Trace) -> dict[tuple[int, int], Span]:
    """Of every round that drafts, by its first row's sequence and its index."""
    first: dict[tuple[int, int], Span] = {}
    for s in trace.spans:
        if s.operation is Operation.DRAFT_STEP:
            first.setdefault((s.sequence, s.round), s)
    return first


def _location_s(span: Span, latency: LatencyModel) -> float:
    table = latency[span.lane, span.operation]
    return float(table.location_s(span.num_tokens / span.batch_size, span.context, span.batch_size))


def _host_times(traces: Sequence[Trace], latency: LatencyModel, in_situ: Mapping[str, InSitu]) -> dict[HostTerm, float]:
    """Mean time of a round that no operation explains, for the kinds of round that occur."""
    found: dict[HostTerm, list[float]] = defaultdict(list)
    for trace in traces:
        for term, _, seconds in unexplained(trace, latency, in_situ):
            found[term].append(seconds)
    return {term: max(0.0, float(_pulled_in(seconds).mean())) for term, seconds in found.items()}


def unexplained(
    trace: Trace, latency: LatencyModel, in_situ: Mapping[str, InSitu]
) -> Iterable[tuple[HostTerm, int, float]]:
    """Per round its kind, the sequence of its first row, and seconds: what is neither verification, nor drafting, nor
    the wait for an unfinished build; with what the first draft step took longer than those after it do."""
    policy = policy_from_dict(trace.policy)
    key = (Lane.DRAFT, Operation.DRAFT_STEP)
    first = _first_draft_steps(trace)
    seen = in_situ.get(trace.policy["kind"], {}).get(key)
    ratio = float(np.mean(seen)) if seen else latency[key].mean_residual if first else 1.0
    for rows, time in time_of_rounds(trace):
        # A batch in which a row missed is as slow as one in which all did.
        source = next((r.source for r in rows if r.source is not Source.HIT), Source.HIT)
        step = first.get((rows[0].sequence, rows[0].index))
        waking_s = 0.0 if step is None else step.duration_s - ratio * _location_s(step, latency)
        yield host_term(policy, source), rows[0].sequence, time.lookup_s + time.rest_s + waking_s
