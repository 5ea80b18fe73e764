"""Figures of merit: pure functions of traces.

Every function takes the traces of the repeats of one policy on the same prompts. Rates are ratios of totals; intervals
are 95 % percentile bootstraps over prompts, because prompts differ far more than rounds of one prompt do. Decode rates
leave the prefill, and the token that it emits, out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from sim.trace import Lane, Operation, Round, Source, Trace

FloatArray = NDArray[np.float64]
NUM_BOOTSTRAP = 2000
BOOTSTRAP_SEED = 20260311
HITS = {Source.HIT, Source.REDRAFTED}  # sources of rounds whose look-up found a speculation, used or not
LOOKUPS = {*HITS, Source.MISS}


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; `n` is the number of prompts behind it. With n = 1 the interval is infinite."""

    value: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON-safe: an infinite bound is None."""
        return {k: (None if isinstance(v, float) and not np.isfinite(v) else v) for k, v in asdict(self).items()}

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(statistic: Callable[[FloatArray], FloatArray], num_prompts: int) -> tuple[float, float]:
    """95 % interval over prompts. `statistic` maps (num_bootstrap, n) weights, how often each prompt was drawn, to
    (num_bootstrap,) values; the total of a figure is weights @ figure."""
    if num_prompts < 2:
        return -np.inf, np.inf
    values = statistic(_weights(num_prompts))
    defined = values[~np.isnan(values)]
    low, high = np.percentile(defined, [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=16)
def _weights(num_prompts: int) -> FloatArray:
    """The same draws for every figure of as many prompts."""
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, num_prompts, size=(NUM_BOOTSTRAP, num_prompts))
    weights = np.zeros((NUM_BOOTSTRAP, num_prompts))
    np.add.at(weights, (np.arange(NUM_BOOTSTRAP)[:, None], picks), 1.0)
    return weights


def ratio_of_totals(numerator: FloatArray, denominator: FloatArray) -> Estimate | None:
    """Sum(numerator) / sum(denominator) over prompts; None if the denominator is zero."""
    if denominator.sum() == 0:
        return None

    def statistic(weights: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return (weights @ numerator) / (weights @ denominator)

    low, high = bootstrap(statistic, len(numerator))
    return Estimate(float(numerator.sum() / denominator.sum()), low, high, len(numerator))


def ratio_of_rates(fast: tuple[FloatArray, FloatArray], slow: tuple[FloatArray, FloatArray]) -> Estimate:
    """Ratio of two rates, each (amount, time) per prompt, with the same prompts drawn for both (paired bootstrap)."""

    def statistic(weights: FloatArray) -> FloatArray:
        rates = [(weights @ amount) / (weights @ time) for amount, time in (fast, slow)]
        return rates[0] / rates[1]

    low, high = bootstrap(statistic, len(fast[0]))
    return Estimate(float(statistic(np.ones(len(fast[0])))), low, high, len(fast[0]))


# ----------------------------------------------------------------------------------------------- figures of the traces


def _per_prompt(traces: Seq[Trace], amounts: Callable[[Trace], Mapping[int, float]]) -> FloatArray:
    """(num_prompts,) totals over the repeats."""
    indices = sorted({s.index for trace in traces for s in trace.sequences})
    place = {index: i for i, index in enumerate(indices)}
    total = np.zeros(len(indices))
    for trace in traces:
        for index, amount in amounts(trace).items():
            total[place[index]] += amount
    return total


def _over_rounds(traces: Seq[Trace], amount: Callable[[Round], float]) -> FloatArray:
    def amounts(trace: Trace) -> dict[int, float]:
        totals: dict[int, float] = {}
        for r in trace.rounds:
            totals[r.sequence] = totals.get(r.sequence, 0.0) + amount(r)
        return totals

    return _per_prompt(traces, amounts)


def decoded_tokens(traces: Seq[Trace]) -> FloatArray:
    """(num_prompts,) tokens that rounds emitted."""
    return _per_prompt(traces, lambda trace: {s.index: s.num_decoded for s in trace.sequences})


def decode_seconds(traces: Seq[Trace]) -> FloatArray:
    """(num_prompts,) time from the end of the prefill to the last token."""
    return _per_prompt(traces, lambda trace: {s.index: s.decode_s for s in trace.sequences})


def tokens_per_s(traces: Seq[Trace]) -> Estimate:
    """Decode throughput of one sequence: tokens that rounds emitted over decode time, totals over totals."""
    estimate = ratio_of_totals(decoded_tokens(traces), decode_seconds(traces))
    return estimate or Estimate(0.0, 0.0, 0.0, len(traces[0].sequences))


def end_to_end_tokens_per_s(traces: Seq[Trace]) -> Estimate:
    """All generated tokens over the time from the start of the prefill to the last token."""
    tokens = _per_prompt(traces, lambda trace: {s.index: len(s.tokens) for s in trace.sequences})
    seconds = _per_prompt(traces, lambda trace: {s.index: s.end_s - s.prefill_start_s for s in trace.sequences})
    return ratio_of_totals(tokens, seconds) or Estimate(0.0, 0.0, 0.0, len(traces[0].sequences))


def speedup(fast: Seq[Trace], slow: Seq[Trace]) -> Estimate:
    """Tokens/s of `fast` over tokens/s of `slow`, which decoded the same prompts."""
    return ratio_of_rates((decoded_tokens(fast), decode_seconds(fast)), (decoded_tokens(slow), decode_seconds(slow)))


def mean_acceptance_length(traces: Seq[Trace]) -> Estimate | None:
    """Tokens emitted per round, the bonus token included."""
    return ratio_of_totals(_over_rounds(traces, lambda r: r.num_emitted), _over_rounds(traces, lambda r: 1))


def accepted_per_round(traces: Seq[Trace]) -> Estimate | None:
    """Draft tokens accepted per round, the bonus token left out."""
    return ratio_of_totals(_over_rounds(traces, lambda r: r.num_accepted), _over_rounds(traces, lambda r: 1))


def accepted_over_drafted(traces: Seq[Trace]) -> Estimate | None:
    """Accepted over drafted tokens. Falls with K even if the draft is as good as before; do not rank K by it."""
    return ratio_of_totals(
        _over_rounds(traces, lambda r: r.num_accepted), _over_rounds(traces, lambda r: r.num_drafted)
    )


def acceptance_rate(traces: Seq[Trace]) -> Estimate | None:
    """Conditional acceptance: accepted over tested tokens (those accepted, and the one rejected)."""
    return ratio_of_totals(
        _over_rounds(traces, lambda r: r.num_accepted), _over_rounds(traces, lambda r: r.num_accepted + r.was_rejected)
    )


def survival_by_position(traces: Seq[Trace]) -> list[float]:
    """Entry j: share of the rounds with more than j drafted tokens in which token j was accepted."""
    rounds = [r for trace in traces for r in trace.rounds]
    longest = max((r.num_drafted for r in rounds), default=0)
    survivors = [[r.num_accepted > j for r in rounds if r.num_drafted > j] for j in range(longest)]
    return [float(np.mean(row)) for row in survivors]


def accept_count_histogram(traces: Seq[Trace]) -> dict[int, int]:
    """Rounds by accepted count."""
    counts = [r.num_accepted for trace in traces for r in trace.rounds]
    return {k: counts.count(k) for k in sorted(set(counts))}


def hit_rate(traces: Seq[Trace]) -> Estimate | None:
    """Hits over look-ups. A round that ends its sequence looks nothing up; the first round is no look-up either.

    A speculation that was found, but drafted anew with the rest of its batch, was a hit.
    """
    return ratio_of_totals(
        _over_rounds(traces, lambda r: r.source in HITS), _over_rounds(traces, lambda r: r.source in LOOKUPS)
    )


def hit_rate_by_source(traces: Seq[Trace]) -> dict[str, Estimate | None]:
    """Hit rate of the look-ups at the end of rounds after a hit, and of those after a miss (first rounds and those
    drafted anew included)."""
    return {
        "after_hit": _hit_rate_after(traces, {Source.HIT}),
        "after_miss": _hit_rate_after(traces, {Source.MISS, Source.FIRST, Source.REDRAFTED}),
    }


def _hit_rate_after(traces: Seq[Trace], sources: set[Source]) -> Estimate | None:
    def lookups(trace: Trace, results: set[Source]) -> dict[int, float]:
        totals: dict[int, float] = {}
        for before, after in pairwise(sorted(trace.rounds, key=attrgetter("sequence", "index"))):
            if before.sequence == after.sequence and before.source in sources and after.source in results:
                totals[after.sequence] = totals.get(after.sequence, 0.0) + 1
        return totals

    return ratio_of_totals(
        _per_prompt(traces, lambda trace: lookups(trace, HITS)),
        _per_prompt(traces, lambda trace: lookups(trace, LOOKUPS)),
    )


def overlap(traces: Seq[Trace]) -> Estimate | None:
    """Fraction of the build time (glue and tree steps) during which the target was verifying."""

    def build_and_hidden(trace: Trace) -> tuple[dict[int, float], dict[int, float]]:
        verify = {(s.sequence, s.round): s for s in trace.spans if s.operation is Operation.VERIFY}
        built: dict[int, float] = {}
        hidden: dict[int, float] = {}
        for s in trace.spans:
            if s.lane is Lane.DRAFT and s.operation in (Operation.GLUE, Operation.TREE_STEP):
                beside = verify.get((s.sequence, s.round))
                shared = 0.0 if beside is None else min(s.end_s, beside.end_s) - max(s.start_s, beside.start_s)
                built[s.sequence] = built.get(s.sequence, 0.0) + s.duration_s
                hidden[s.sequence] = hidden.get(s.sequence, 0.0) + max(0.0, shared)
        return built, hidden

    return ratio_of_totals(
        _per_prompt(traces, lambda trace: build_and_hidden(trace)[1]),
        _per_prompt(traces, lambda trace: build_and_hidden(trace)[0]),
    )
