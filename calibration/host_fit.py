"""What the short runs of a profile add: how fast operations are between others, and the host's time of a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.breakdown import time_of_rounds
from calibration.latency_fit import IN_SITU, Key, pulled_in
from sim.latency import NUM_RESIDUALS, LatencyModel, equally_likely
from sim.policy import policy_from_dict
from sim.system import HostTerm, InSitu, host_term
from sim.trace import Lane, Operation, Source, Span, Trace

FloatArray = NDArray[np.float64]
FEWEST_IN_SITU = 40  # samples of an operation in the short runs; with fewer the isolated ones are kept
DRAFT_STEP: Key = (Lane.DRAFT, Operation.DRAFT_STEP)
VERIFY: Key = (Lane.TARGET, Operation.VERIFY)


@dataclass(frozen=True)
class SpanRatio:
    """What an operation of a run took, and what the tables say of it; `sequence` is that of its first row."""

    key: Key
    sequence: int
    duration_s: float
    location_s: float

    @property
    def ratio(self) -> float:
        return self.duration_s / self.location_s


@dataclass(frozen=True)
class RoundHost:
    """The host's part of a round, before what the waking up of draft and target is known to cost.

    `rest_s` is neither verification, nor drafting, nor the wait for an unfinished build. `woken` are the operations
    that come after a wait of their lane: the first draft step of a round, of `first_tokens` tokens of each row on the
    mean, and of SSD the verification after it. What they take longer than others of their kind is host time.
    """

    term: HostTerm
    sequence: int
    rest_s: float
    woken: tuple[SpanRatio, ...] = ()
    first_tokens: float = 1.0

    def seconds(self, usual: Mapping[Key, float]) -> float:
        """`usual` are the mean ratios to their tables of operations that follow others."""
        return self.rest_s + sum(s.duration_s - usual[s.key] * s.location_s for s in self.woken)


def ratios_of_spans(trace: Trace, latency: LatencyModel, slowdown: Mapping[Lane, float]) -> Iterator[SpanRatio]:
    """Of every operation that rounds are made of, but those that come after a wait (`RoundHost`)."""
    runs = _Spans(trace, latency, slowdown)
    yield from (runs.ratio(s) for s in trace.spans if s.operation in IN_SITU and not runs.is_woken(s))


def fit_in_situ(traces: Sequence[Trace], latency: LatencyModel, slowdown: Mapping[Lane, float]) -> dict[str, InSitu]:
    """By kind of decoder: ratios of what its operations took in the short runs to what the tables say of them."""
    ratios: dict[str, dict[Key, list[SpanRatio]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for found in ratios_of_spans(trace, latency, slowdown):
            ratios[trace.policy["kind"]][found.key].append(found)
    return {
        kind: {key: _residuals(row) for key, row in rows.items() if len(row) >= FEWEST_IN_SITU}
        for kind, rows in ratios.items()
    }


def _residuals(ratios: Sequence[SpanRatio]) -> tuple[float, ...]:
    """Equally likely ratios under which the same operations take as long in all as they took: those of short
    operations are often larger, and must not count as much as those of long ones."""
    values = pulled_in(r.ratio for r in ratios)
    mean = np.average(values, weights=[r.location_s for r in ratios])
    return tuple((equally_likely(values, NUM_RESIDUALS) * mean / values.mean()).tolist())


def host_of_rounds(trace: Trace, latency: LatencyModel, slowdown: Mapping[Lane, float]) -> Iterator[RoundHost]:
    """In the order of the rounds; those of a batch are one."""
    policy, runs = policy_from_dict(trace.policy), _Spans(trace, latency, slowdown)
    for rows, time in time_of_rounds(trace):
        # A batch in which a row missed is as slow as one in which all did.
        source = next((r.source for r in rows if r.source is not Source.HIT), Source.HIT)
        first, woken = runs.woken(rows[0].sequence, rows[0].index)
        tokens = 1.0 if first is None else first.num_tokens / first.batch_size
        yield RoundHost(host_term(policy, source), rows[0].sequence, time.lookup_s + time.rest_s, woken, tokens)


def fit_host_times(
    traces: Sequence[Trace], latency: LatencyModel, in_situ: Mapping[str, InSitu], slowdown: Mapping[Lane, float]
) -> dict[HostTerm, float]:
    """Mean time of a round that no operation explains, for the kinds of round that occur."""
    found: dict[HostTerm, list[float]] = defaultdict(list)
    for trace in traces:
        usual = usual_ratios(trace.policy["kind"], latency, in_situ)
        for of_round in host_of_rounds(trace, latency, slowdown):
            found[of_round.term].append(of_round.seconds(usual))
    return {term: max(0.0, float(pulled_in(seconds).mean())) for term, seconds in found.items()}


def usual_ratios(kind: str, latency: LatencyModel, in_situ: Mapping[str, InSitu]) -> dict[Key, float]:
    """Mean ratios of the operations that can come after a wait, where they follow others, to their tables in runs of a
    kind of decoder, else of isolated ones; 1 without any."""
    return {key: _usual_ratio(key, latency, in_situ.get(kind, {})) for key in (DRAFT_STEP, VERIFY)}


def _usual_ratio(key: Key, latency: LatencyModel, seen: InSitu) -> float:
    if key in seen:
        return float(np.mean(seen[key]))
    return latency[key].mean_residual if key in latency.operations else 1.0


class _Spans:
    """The operations of a trace beside the tables."""

    def __init__(self, trace: Trace, latency: LatencyModel, slowdown: Mapping[Lane, float]) -> None:
        self._latency, self._slowdown = latency, slowdown
        self._built = {(s.sequence, s.round) for s in trace.spans if s.operation is Operation.GLUE}
        self._first = _first_draft_steps(trace)
        # SD waits before every verification: there is none to compare with, and its ratio is of all.
        waits = self._first if trace.policy["kind"] == "ssd" else {}
        self._late = {
            (s.sequence, s.round): s
            for s in trace.spans
            if s.operation is Operation.VERIFY and (s.sequence, s.round) in waits
        }
        self._woken = {id(s) for s in (*self._first.values(), *self._late.values())}

    def is_woken(self, span: Span) -> bool:
        return id(span) in self._woken

    def woken(self, sequence: int, index: int) -> tuple[Span | None, tuple[SpanRatio, ...]]:
        """The first draft step of a round, and all operations of it that come after a wait."""
        place = (sequence, index)
        spans = [found[place] for found in (self._first, self._late) if place in found]
        return self._first.get(place), tuple(self.ratio(s) for s in spans)

    def ratio(self, span: Span) -> SpanRatio:
        beside = span.operation is not Operation.DRAFT_STEP and (span.sequence, span.round) in self._built
        table = self._latency[span.lane, span.operation]
        location_s = float(table.location_s(span.num_tokens / span.batch_size, span.context, span.batch_size))
        slower = self._slowdown[span.lane] if beside else 1.0
        return SpanRatio((span.lane, span.operation), span.sequence, span.duration_s, location_s * slower)


def _first_draft_steps(trace: Trace) -> dict[tuple[int, int], Span]:
    """Of every round that drafts, by its first row's sequence and its index."""
    first: dict[tuple[int, int], Span] = {}
    for s in trace.spans:
        if s.operation is Operation.DRAFT_STEP:
            first.setdefault((s.sequence, s.round), s)
    return first
