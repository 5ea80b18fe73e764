"""Where the time of a round goes, and every figure of merit of a policy's traces under its full name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sim import metrics
from sim.trace import BUILD, Lane, Operation, Round, Span, Trace


@dataclass(frozen=True)
class RoundTime:
    """Mean seconds of a round, one for all rows of a batch, by what the target waits for; parts add up to `round_s`.

    `verify_s` is the verification; before it come `build_s` (the rest of a build that the outcome had to await),
    `lookup_s`, `draft_s` (draft steps of SD or of a fallback) and `rest_s` (hand-over and host).
    """

    round_s: float
    verify_s: float
    build_s: float
    lookup_s: float
    draft_s: float
    rest_s: float

    def to_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def round_time(traces: Sequence[Trace]) -> RoundTime | None:
    """Average over all rounds of all traces; None if there is no round."""
    parts = [part for trace in traces for _, part in time_of_rounds(trace)]
    if not parts:
        return None
    return RoundTime(*(sum(getattr(part, field.name) for part in parts) / len(parts) for field in fields(RoundTime)))


def time_of_rounds(trace: Trace) -> Iterable[tuple[list[Round], RoundTime]]:
    """The rows of each round with its time, from the spans that may run during it: its own and those of the round
    before."""
    together = _together(trace)
    batch_of = {r.sequence: rows[0].sequence for rows in together if rows[0].index == 0 for r in rows}
    by_round: dict[tuple[int, int], list[Span]] = {}
    for span in trace.spans:
        if span.sequence in batch_of:
            by_round.setdefault((batch_of[span.sequence], span.round), []).append(span)
    for rows in together:
        batch, index = batch_of[rows[0].sequence], rows[0].index
        yield rows, _parts(rows[0], [span for i in (index - 1, index) for span in by_round.get((batch, i), [])])


def _together(trace: Trace) -> list[list[Round]]:
    """The rounds of every verification. Raises `BadInput` if those of a batch are not all there."""
    shared = {(rows[0].sequence, rows[0].index): rows for rows in trace.verified_together()}
    others = {(r.sequence, r.index) for rows in shared.values() for r in rows[1:]}
    rounds = ((r, (r.sequence, r.index)) for r in trace.rounds)
    return [shared.get(place, [r]) for r, place in rounds if place not in others]


def _parts(r: Round, spans: Sequence[Span]) -> RoundTime:
    verify = [span for span in spans if span.operation is Operation.VERIFY and span.round == r.index]
    verify_start_s = min((span.start_s for span in verify), default=r.end_s)
    verify_s = sum(span.duration_s for span in verify)

    def before_verification(*operations: Operation) -> float:
        # A round's own build counts only where it ran before the verification, not where it runs beside it.
        shared = (
            min(span.end_s, verify_start_s) - max(span.start_s, r.start_s)
            for span in spans
            if span.lane is Lane.DRAFT
            and span.operation in operations
            and (span.round < r.index or span.end_s <= verify_start_s)
        )
        return sum(seconds for seconds in shared if seconds > 0)

    build_s, lookup_s = before_verification(*BUILD), before_verification(Operation.LOOKUP)
    draft_s = before_verification(Operation.DRAFT_STEP)
    round_s = r.end_s - r.start_s
    return RoundTime(round_s, verify_s, build_s, lookup_s, draft_s, round_s - verify_s - build_s - lookup_s - draft_s)


def figures_of_merit(traces: Sequence[Trace]) -> dict[str, Any]:
    """Every metric of one policy's repeats, JSON-safe; a metric that does not apply is None."""
    estimates = {
        "tokens_per_s": metrics.tokens_per_s(traces),
        "end_to_end_tokens_per_s": metrics.end_to_end_tokens_per_s(traces),
        "mean_acceptance_length": metrics.mean_acceptance_length(traces),
        "accepted_per_round": metrics.accepted_per_round(traces),
        "accepted_over_drafted": metrics.accepted_over_drafted(traces),
        "acceptance_rate": metrics.acceptance_rate(traces),
        "hit_rate": metrics.hit_rate(traces),
        **{f"hit_rate_{name}": value for name, value in metrics.hit_rate_by_source(traces).items()},
        "overlap": metrics.overlap(traces),
    }
    times = round_time(traces)
    return {
        **{name: None if estimate is None else estimate.to_dict() for name, estimate in estimates.items()},
        "survival_by_position": metrics.survival_by_position(traces),
        "rounds_by_accepted_count": metrics.accept_count_histogram(traces),
        "round_time": None if times is None else times.to_dict(),
    }
