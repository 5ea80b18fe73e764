"""What the short runs of a profile add: how fast operations are between others, and the host's time of a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.breakdown import time_of_rounds
from calibration.latency_fit import IN_SITU, Key, equal_shares, pulled_in
from sim.latency import LatencyModel
from sim.policy import policy_from_dict
from sim.system import HostTerm, InSitu, host_term
from sim.trace import Lane, Operation, Source, Span, Trace

FloatArray = NDArray[np.float64]
FEWEST_IN_SITU = 40  # samples of an operation in the short runs; with fewer the isolated ones are kept
DRAFT_STEP: Key = (Lane.DRAFT, Operation.DRAFT_STEP)


@dataclass(frozen=True)
class SpanRatio:
    """What an operation of a run took, over what the tables say of it; `sequence` is that of its first row."""

    key: Key
    sequence: int
    ratio: float


@dataclass(frozen=True)
class RoundHost:
    """The host's part of a round, before what the draft's waking up is known to cost.

    `rest_s` is neither verification, nor drafting, nor the wait for an unfinished build. Of a round that drafts,
    `first_step_s` is its first draft step, of `first_tokens` tokens of each row on the mean, and `first_location_s`
    what the tables say of it: the step comes after a wait, and what it takes longer than those after it is host time.
    """

    term: HostTerm
    sequence: int
    rest_s: float
    first_step_s: float = 0.0
    first_location_s: float = 0.0
    first_tokens: float = 1.0

    def seconds(self, usual_ratio: float) -> float:
        """`usual_ratio` is the mean ratio of later draft steps to their tables."""
        return self.rest_s + self.first_step_s - usual_ratio * self.first_location_s


def ratios_of_spans(trace: Trace, latency: LatencyModel, slowdown: Mapping[Lane, float]) -> Iterator[SpanRatio]:
    """Of every operation that rounds are made of, but the first draft step of each (`RoundHost`)."""
    built = {(s.sequence, s.round) for s in trace.spans if s.operation is Operation.GLUE}
    first = {id(s) for s in _first_draft_steps(trace).values()}
    for s in trace.spans:
        if s.operation in IN_SITU and id(s) not in first:
            beside = s.operation is not Operation.DRAFT_STEP and (s.sequence, s.round) in built
            location_s = _location_s(s, latency) * (slowdown[s.lane] if beside else 1.0)
            yield SpanRatio((s.lane, s.operation), s.sequence, s.duration_s / location_s)


def fit_in_situ(traces: Sequence[Trace], latency: LatencyModel, slowdown: Mapping[Lane, float]) -> dict[str, InSitu]:
    """By kind of decoder: ratios of what its operations took in the short runs to what the tables say of them."""
    ratios: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for found in ratios_of_spans(trace, latency, slowdown):
            ratios[trace.policy["kind"]][found.key].append(found.ratio)
    return {
        kind: {key: equal_shares(row) for key, row in rows.items() if len(row) >= FEWEST_IN_SITU}
        for kind, rows in ratios.items()
    }


def host_of_rounds(trace: Trace, latency: LatencyModel) -> Iterator[RoundHost]:
    """In the order of the rounds; those of a batch are one."""
    policy, first = policy_from_dict(trace.policy), _first_draft_steps(trace)
    for rows, time in time_of_rounds(trace):
        # A batch in which a row missed is as slow as one in which all did.
        source = next((r.source for r in rows if r.source is not Source.HIT), Source.HIT)
        term, sequence, rest_s = host_term(policy, source), rows[0].sequence, time.lookup_s + time.rest_s
        step = first.get((sequence, rows[0].index))
        if step is None:
            yield RoundHost(term, sequence, rest_s)
        else:
            drafted = step.duration_s, _location_s(step, latency), step.num_tokens / step.batch_size
            yield RoundHost(term, sequence, rest_s, *drafted)


def fit_host_times(
    traces: Sequence[Trace], latency: LatencyModel, in_situ: Mapping[str, InSitu]
) -> dict[HostTerm, float]:
    """Mean time of a round that no operation explains, for the kinds of round that occur."""
    found: dict[HostTerm, list[float]] = defaultdict(list)
    for trace in traces:
        usual = usual_ratio(trace.policy["kind"], latency, in_situ)
        for of_round in host_of_rounds(trace, latency):
            found[of_round.term].append(of_round.seconds(usual))
    return {term: max(0.0, float(pulled_in(seconds).mean())) for term, seconds in found.items()}


def usual_ratio(kind: str, latency: LatencyModel, in_situ: Mapping[str, InSitu]) -> float:
    """Mean ratio of draft steps to their table in runs of a kind of decoder, else of isolated ones; 1 without any."""
    seen = in_situ.get(kind, {}).get(DRAFT_STEP)
    if seen:
        return float(np.mean(seen))
    return latency[DRAFT_STEP].mean_residual if DRAFT_STEP in latency.operations else 1.0


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
