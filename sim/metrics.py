"""Figures of merit: pure functions of traces.

Every function takes the traces of the repeats of one policy on the same prompts. Rates are ratios of totals; intervals
are 95 % percentile bootstraps over prompts, because prompts differ far more than rounds of one prompt do. Prompts that
were decoded together share their time and their fate: they are one batch, and batches are drawn as a whole. Decode
rates leave the prefill, and the token that it emits, out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.trace import Lane, Operation, Round, Sequence, Source, Span, Trace

FloatArray = NDArray[np.float64]
NUM_BOOTSTRAP = 2000
BOOTSTRAP_SEED = 20260311
HITS = {Source.HIT, Source.REDRAFTED}  # sources of rounds whose look-up found a speculation, used or not
LOOKUPS = {*HITS, Source.MISS}
AFTER_HIT = {Source.HIT}
AFTER_MISS = {Source.MISS, Source.FIRST, Source.REDRAFTED}  # the sources of all other rounds that end with a look-up


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; `n` is the number of prompts, or batches of prompts, behind it. With n = 1 the
    interval is infinite."""

    value: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON-safe: an infinite bound is None."""
        return {k: (None if isinstance(v, float) and not np.isfinite(v) else v) for k, v in asdict(self).items()}

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(statistic: Callable[[FloatArray], FloatArray], n: int) -> tuple[float, float]:
    """95 % interval over n batches (prompts, where each is decoded alone). `statistic` maps (num_bootstrap, n) weights,
    how often each was drawn, to (num_bootstrap,) values; the total of a figure is weights @ figure."""
    if n < 2:
        return -np.inf, np.inf
    values = statistic(bootstrap_weights(n))
    defined = values[~np.isnan(values)]
    low, high = np.percentile(defined, [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=16)
def bootstrap_weights(n: int) -> FloatArray:
    """(num_bootstrap, n) how often each of n batches was drawn: the same draws for every figure of as many batches."""
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, n, size=(NUM_BOOTSTRAP, n))
    weights = np.zeros((NUM_BOOTSTRAP, n))
    np.add.at(weights, (np.arange(NUM_BOOTSTRAP)[:, None], picks), 1.0)
    return weights


def ratio_of_totals(numerator: FloatArray, denominator: FloatArray) -> Estimate | None:
    """Sum(numerator) / sum(denominator) over batches; None if the denominator is zero."""
    if denominator.sum() == 0:
        return None

    def statistic(weights: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return (weights @ numerator) / (weights @ denominator)

    low, high = bootstrap(statistic, len(numerator))
    return Estimate(float(numerator.sum() / denominator.sum()), low, high, len(numerator))


def ratio_of_rates(fast: tuple[FloatArray, FloatArray], slow: tuple[FloatArray, FloatArray]) -> Estimate:
    """Ratio of two rates, each (amount, time) per batch, with the same batches drawn for both (paired bootstrap)."""

    def statistic(weights: FloatArray) -> FloatArray:
        rates = [(weights @ amount) / (weights @ time) for amount, time in (fast, slow)]
        return rates[0] / rates[1]

    low, high = bootstrap(statistic, len(fast[0]))
    return Estimate(float(statistic(np.ones(len(fast[0])))), low, high, len(fast[0]))


# ----------------------------------------------------------------------------------------------- figures of the traces


def joined(indices: Iterable[int], groups: Iterable[Collection[int]]) -> dict[int, int]:
    """Number of the batch of each index: indices that share a group, directly or through others, are in one batch;
    batches are numbered by their smallest index."""
    parent = {index: index for index in indices}

    def smallest(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    for group in groups:
        roots = {smallest(index) for index in group}
        parent.update(dict.fromkeys(roots, min(roots)))
    number = {root: i for i, root in enumerate(sorted(index for index in parent if parent[index] == index))}
    return {index: number[smallest(index)] for index in parent}


def batch_numbers(traces: Iterable[Trace]) -> dict[int, int]:
    """Number of the batch of each sequence: those that were verified together in some trace are in one. A sequence
    without a round is alone."""
    traces = list(traces)
    together = ({r.sequence for r in rounds} for trace in traces for rounds in trace.verified_together())
    return joined((s.index for trace in traces for s in trace.sequences), together)


def _by_batch(
    traces: Seq[Trace], amounts: Callable[[Trace], Mapping[int, float]], batch_of: Mapping[int, int] | None = None
) -> FloatArray:
    """(num_batches,) totals over the repeats of amounts by sequence."""
    batch_of = batch_numbers(traces) if batch_of is None else batch_of
    total = np.zeros(len(set(batch_of.values())))
    for trace in traces:
        for index, amount in amounts(trace).items():
            total[batch_of[index]] += amount
    return total


def _over_rounds(traces: Seq[Trace], amount: Callable[[Round], float]) -> FloatArray:
    def amounts(trace: Trace) -> dict[int, float]:
        totals: dict[int, float] = {}
        for r in trace.rounds:
            totals[r.sequence] = totals.get(r.sequence, 0.0) + amount(r)
        return totals

    return _by_batch(traces, amounts)


def decoded(trace: Trace) -> dict[int, float]:
    """Tokens that rounds emitted, by sequence."""
    return {s.index: s.num_decoded for s in trace.sequences}


def _seconds_of_batches(trace: Trace, start_s: Callable[[Sequence], float]) -> dict[int, float]:
    """From the first start of the rows of a batch to the last end, by one of its sequences: a target decodes at least
    one of them all the while."""
    batch_of = batch_numbers([trace])
    batches: dict[int, list[Sequence]] = {}
    for s in trace.sequences:
        batches.setdefault(batch_of[s.index], []).append(s)
    return {rows[0].index: max(s.end_s for s in rows) - min(map(start_s, rows)) for rows in batches.values()}


def decoding_s(trace: Trace) -> dict[int, float]:
    return _seconds_of_batches(trace, attrgetter("decode_start_s"))


def _rate(tokens: FloatArray, seconds: FloatArray) -> Estimate:
    """0 where nothing took any time."""
    return ratio_of_totals(tokens, seconds) or Estimate(0.0, 0.0, 0.0, len(tokens))


def decode_totals(*policies: Seq[Trace]) -> list[tuple[FloatArray, FloatArray]]:
    """For the repeats of each policy, (num_batches,) tokens that rounds emitted and seconds in which at least one row
    of the batch was decoded.

    The batches are the same for all policies: prompts that one of them decodes together are one. Raises `BadInput` if
    the policies decoded different prompts.
    """
    prompts = [{s.index for trace in traces for s in trace.sequences} for traces in policies]
    if any(indices != prompts[0] for indices in prompts):
        raise BadInput("traces", "must be of the same prompts for every policy", [len(indices) for indices in prompts])
    batch_of = batch_numbers(trace for traces in policies for trace in traces)
    return [(_by_batch(t, decoded, batch_of), _by_batch(t, decoding_s, batch_of)) for t in policies]


def tokens_per_s(traces: Seq[Trace]) -> Estimate:
    """Decode throughput of a target: tokens that rounds emitted over the time in which it decoded at least one row, as
    `sim.simulate.predict` has it.

    Of prompts decoded one at a time it is the rate of a sequence. The times of several targets add up.
    """
    return _rate(*decode_totals(traces)[0])


def tokens_per_s_of_a_sequence(traces: Seq[Trace]) -> Estimate:
    """Decode rate of one sequence, whatever is decoded beside it: tokens that rounds emitted over the time from the end
    of the prefill to the last token, totals over totals."""
    seconds = _by_batch(traces, lambda trace: {s.index: s.decode_s for s in trace.sequences})
    return _rate(_by_batch(traces, decoded), seconds)


def end_to_end_tokens_per_s(traces: Seq[Trace]) -> Estimate:
    """All generated tokens over the time from the start of the prefill to the last token, of a batch from the first
    prefill."""
    tokens = _by_batch(traces, lambda trace: {s.index: len(s.tokens) for s in trace.sequences})
    return _rate(tokens, _by_batch(traces, lambda trace: _seconds_of_batches(trace, attrgetter("prefill_start_s"))))


def speedup(fast: Seq[Trace], slow: Seq[Trace]) -> Estimate:
    """Tokens/s of `fast` over tokens/s of `slow`, which decoded the same prompts."""
    return ratio_of_rates(*decode_totals(fast, slow))


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
        "after_hit": _hit_rate_after(traces, AFTER_HIT),
        "after_miss": _hit_rate_after(traces, AFTER_MISS),
    }


def _hit_rate_after(traces: Seq[Trace], sources: Collection[Source]) -> Estimate | None:
    return ratio_of_totals(
        _by_batch(traces, lambda trace: lookups_after(trace, sources, HITS)),
        _by_batch(traces, lambda trace: lookups_after(trace, sources, LOOKUPS)),
    )


def lookups_after(trace: Trace, sources: Collection[Source], results: Collection[Source]) -> dict[int, float]:
    """Look-ups at the end of rounds of `sources` that the rounds of `results` came from, by sequence."""
    totals: dict[int, float] = {}
    for before, after in pairwise(sorted(trace.rounds, key=attrgetter("sequence", "index"))):
        if before.sequence == after.sequence and before.source in sources and after.source in results:
            totals[after.sequence] = totals.get(after.sequence, 0.0) + 1
    return totals


def overlap(traces: Seq[Trace]) -> Estimate | None:
    """Fraction of the build time (glue and tree steps, of every draft device) during which the target was verifying.

    A build and the verification beside it are one each for all rows of a batch, under the round of its first row.
    """

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
        _by_batch(traces, lambda trace: build_and_hidden(trace)[1]),
        _by_batch(traces, lambda trace: build_and_hidden(trace)[0]),
    )


def round_efficiency(traces: Seq[Trace]) -> Estimate | None:
    """Of the time of rounds in which every row hit, the part that the longer of verification and build accounts for.

    The rest is looking up, answering and waking up. None without such a round.
    """

    def longer_and_whole(trace: Trace) -> tuple[dict[int, float], dict[int, float]]:
        build_s = _build_s(trace)
        place = {(r.sequence, r.index): number for number, r in enumerate(trace.rounds)}
        longer: dict[int, float] = {}
        whole: dict[int, float] = {}
        for s in trace.spans:
            if s.operation is Operation.VERIFY:
                first = place[s.sequence, s.round]
                rounds = trace.rounds[first : first + s.batch_size]
                if all(r.source is Source.HIT for r in rounds):
                    used_s = max(s.duration_s, build_s.get((s.sequence, s.round), 0.0))
                    longer[s.sequence] = longer.get(s.sequence, 0.0) + used_s
                    whole[s.sequence] = whole.get(s.sequence, 0.0) + rounds[0].end_s - rounds[0].start_s
        return longer, whole

    return ratio_of_totals(
        _by_batch(traces, lambda trace: longer_and_whole(trace)[0]),
        _by_batch(traces, lambda trace: longer_and_whole(trace)[1]),
    )


def _build_s(trace: Trace) -> dict[tuple[int, int], float]:
    """From the first operation of each build to the end of its last one, by sequence and round."""
    spans: dict[tuple[int, int], list[Span]] = {}
    for s in trace.spans:
        if s.lane is Lane.DRAFT and s.operation in (Operation.GLUE, Operation.TREE_STEP):
            spans.setdefault((s.sequence, s.round), []).append(s)
    return {key: max(s.end_s for s in build) - min(s.start_s for s in build) for key, build in spans.items()}
