"""What hit rates depend on, and what a higher one is worth in tokens/s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from experiments.paper.agreement_records import TEMPERATURES, read_record
from experiments.paper.constant_times import StepCosts
from experiments.paper.section import Answer, Cell, Section, Table
from experiments.recorded_workload import recorded_workload
from sim.agreement import Agreement, AgreementRecord
from sim.metrics import Estimate, ratio_of_totals
from sim.policy import Drafting, Fallback, Policy, Proposer, Speculative, SpeculativeSpeculative
from sim.replay import Replay
from sim.round_law import RoundLaw
from sim.simulate import Prediction, predict_all, simulate
from sim.theory import ssd_speedup
from sim.trace import Source

FloatArray = NDArray[np.float64]
LENGTHS, FAN_OUTS = (1, 2, 4, 6), (1, 2, 4, 8, 14)
K = 4  # where one length stands for all
NUM_RUNS = 2  # of the event simulation, for tokens per round by source
DRAFT, NONE = Fallback.DRAFT, Fallback.NONE


def section() -> Section:
    """Hit rates by what they depend on, then their worth."""
    records = {T: read_record(f"library_t{T}") for T in TEMPERATURES}
    rates = [row for T, record in records.items() for row in _rates(T, record)]
    fallbacks = [row for T, record in records.items() for row in _by_fallback(T, record)]
    outcomes = [row for T, record in records.items() for row in _by_accept_count(T, record)]
    worth = [entry for T in TEMPERATURES for fallback in (DRAFT, NONE) for entry in worth_of_hits(records[T], fallback)]
    return Section(
        "Hit rates, and what they are worth",
        text=(
            "The packaged pair on 48 prompts of held-out files, 64 tokens each; every text is replayed exactly, and"
            f" intervals are over prompts. Fan-outs are uniform; where no K is given it is {K}, where no fallback is it"
            " is the draft. By accept count, rounds start anywhere in the texts. For what hits are worth, a step of the"
            " draft takes .15 of a verification; the theorem is given the hit rate of each fan-out, and tokens per"
            " round by source as they are at a fan-out of 1.",
        ),
        tables=(
            Table("hit_rates", "Hit rate by what it depends on", _RATE_HEAD, tuple(rates)),
            Table("hit_rates_by_fallback", "Hit rate by fallback", _FALLBACK_HEAD, tuple(fallbacks)),
            Table("hit_rates_by_accept_count", "Hit rate by accept count k of K", _OUTCOME_HEAD, tuple(outcomes)),
            Table("worth_of_hits", "What hits are worth", _WORTH_HEAD, tuple(entry.row() for entry in worth)),
        ),
        answers=(_on_what_they_depend(rates, outcomes), _what_they_are_worth(worth)),
    )


# -------------------------------------------------------------------------------------------------------------- rates

_RATE_HEAD = ("temperature", "K", "fan-out", "hit rate", "low", "high", "after a hit", "after a miss")
_FALLBACK_HEAD = ("temperature", "fallback", *_RATE_HEAD[2:])
_OUTCOME_HEAD = ("temperature", "k", "share of rounds", "fan-out", "hit rate", "low", "high")


def uniform_policy(K: int, fan_out: int, fallback: Fallback) -> SpeculativeSpeculative:
    """`fan_out` branches for every accept count that can be."""
    after_miss = (fan_out,) * (1 if fallback is Fallback.NONE else K + 1)
    return SpeculativeSpeculative(K, (fan_out,) * (K + 1), after_miss, fallback)


def _predicted(record: AgreementRecord, policies: list[Policy]) -> list[Prediction[Policy]]:
    return predict_all(policies, recorded_workload(record), StepCosts().system(record))


def _rates(temperature: int, record: AgreementRecord) -> Iterator[tuple[Cell, ...]]:
    settings = [(K, fan_out) for K in LENGTHS for fan_out in FAN_OUTS]
    predictions = _predicted(record, [uniform_policy(K, fan_out, DRAFT) for K, fan_out in settings])
    for (length, fan_out), found in zip(settings, predictions, strict=True):
        yield temperature, length, fan_out, *_hit_rates(found)


def _by_fallback(temperature: int, record: AgreementRecord) -> Iterator[tuple[Cell, ...]]:
    for fallback in (DRAFT, Fallback.NGRAM, NONE):
        policies: list[Policy] = [uniform_policy(K, fan_out, fallback) for fan_out in FAN_OUTS]
        for fan_out, found in zip(FAN_OUTS, _predicted(record, policies), strict=True):
            yield temperature, fallback.value, fan_out, *_hit_rates(found)


def _hit_rates(found: Prediction[Policy]) -> tuple[Cell, ...]:
    """The rate with its interval, then by source."""
    rate, by_source = found.hit_rate, found.hit_rate_by_source.values()
    assert rate is not None
    return rate.value, rate.low, rate.high, *(None if of is None else of.value for of in by_source)


def outcomes_anywhere(agreement: Agreement, K: int, fan_out: int) -> tuple[FloatArray, FloatArray]:
    """(K + 1, num_prompts) rounds that accept exactly k, and those of them whose look-up hits, over rounds that start
    at every place that leaves room for a whole one."""
    replay = Replay(agreement, recorded_workload(agreement))
    law = RoundLaw(replay, Drafting(Proposer.DRAFT_MODEL, K, (fan_out,) * (K + 1), Source.HIT))
    counted = (law.starts > 0) & law.goes_on(K)
    ended, hits = law.ended * counted, law.ended * law.hits * counted
    return ended.sum(2), hits.sum(2)


def _by_accept_count(temperature: int, record: AgreementRecord) -> Iterator[tuple[Cell, ...]]:
    for fan_out in FAN_OUTS:
        ended, hits = outcomes_anywhere(record, K, fan_out)
        for k in range(K + 1):
            rate = ratio_of_totals(hits[k], ended[k])
            assert rate is not None
            share = float(ended[k].sum() / ended.sum())
            yield (temperature, k, share, fan_out, rate.value, rate.low, rate.high)


# -------------------------------------------------------------------------------------------------------------- worth

_WORTH_HEAD = (
    *("temperature", "fallback", "fan-out", "hit rate", "tokens per round after a hit", "after a miss"),
    *("speed-up over AR", "low", "high", "by Theorem 7", "by Theorem 7 without sources"),
)


@dataclass(frozen=True)
class Worth:
    """Speed-ups over AR of one fan-out: as it is, as Theorem 7 has it with the tokens per round after hits and misses
    of the smallest fan-out, and as it has it with the tokens per round of SD whatever the source."""

    temperature: float
    fallback: Fallback
    fan_out: int
    hit_rate: float  # of all rounds, first ones included
    tokens_on_hit: float
    tokens_on_miss: float
    speedup: Estimate
    theorem: float
    theorem_without_sources: float

    def row(self) -> tuple[Cell, ...]:
        speedup = self.speedup
        return (
            *(self.temperature, self.fallback.value, self.fan_out, self.hit_rate),
            *(self.tokens_on_hit, self.tokens_on_miss, speedup.value, speedup.low, speedup.high),
            *(self.theorem, self.theorem_without_sources),
        )


def worth_of_hits(record: AgreementRecord, fallback: Fallback, costs: StepCosts | None = None) -> list[Worth]:
    """By fan-out."""
    costs = costs or StepCosts()
    policies = [uniform_policy(K, fan_out, fallback) for fan_out in FAN_OUTS]
    synchronous, *found = _predicted(record, [Speculative(K), *policies])
    assert synchronous.mean_acceptance_length is not None
    length = synchronous.mean_acceptance_length.value
    tokens = [tokens_by_source(record, policy, costs) for policy in policies]
    backup = K * costs.draft_step if fallback is DRAFT else 0.0
    without = (length, length if fallback is DRAFT else 1.0)
    entries = []
    for policy, prediction, (on_hit, on_miss) in zip(policies, found, tokens, strict=True):
        totals = prediction.expectation
        rate = float(totals.num_hits.sum() / totals.num_rounds.sum())
        by_theorem = [ssd_speedup(rate, *pair, costs.build(K), backup) for pair in (tokens[0], without)]
        fan_out = policy.fan_out_after_hit[0]
        speedup = _scaled(prediction.tokens_per_s, costs.verify_s)
        entries.append(Worth(record.temperature, fallback, fan_out, rate, on_hit, on_miss, speedup, *by_theorem))
    return entries


def tokens_by_source(record: AgreementRecord, policy: Policy, costs: StepCosts) -> tuple[float, float]:
    """Tokens per round after a hit and after a miss, first rounds among the latter, over all tokens of the texts."""
    emitted, rounds = np.zeros(2), np.zeros(2)
    for seed in range(NUM_RUNS if record.temperature else 1):
        trace = simulate(policy, recorded_workload(record), costs.system(record), seed)
        for entry in trace.rounds:
            side = int(entry.source is not Source.HIT)
            emitted[side] += entry.num_emitted
            rounds[side] += 1
    on_hit, on_miss = emitted / np.maximum(rounds, 1)
    return float(on_hit), float(on_miss)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor, estimate.n)


# ------------------------------------------------------------------------------------------------------------ answers


def _on_what_they_depend(rates: list[tuple[Cell, ...]], outcomes: list[tuple[Cell, ...]]) -> Answer:
    found = {row[:3]: row[3:] for row in rates}
    shares = {(row[0], row[1], row[3]): row[4] for row in outcomes}

    def of(*setting: int) -> str:
        rate, low, high = found[setting][:3]
        return f"{rate:.2f} [{low:.2f}, {high:.2f}]"

    rejected = [float(shares[0, k, 2]) for k in range(K)]  # type: ignore[arg-type]
    _, _, _, after_hit, after_miss = found[0, K, 2]
    return Answer(
        "On what do hit rates depend: K, fan-out, temperature, source of the round, accept count?",
        f"Most on the fan-out (K = {K}, T = 0: {of(0, K, 1)} at F = 1, {of(0, K, 8)} at 8) and the temperature"
        f" ({of(0, K, 2)} at T = 0, {of(1, K, 2)} at 1, F = 2); less on K ({of(0, 1, 2)} at 1, {of(0, 6, 2)} at 6);"
        f" on the accept count only by whether something was rejected ({min(rejected):.2f} to {max(rejected):.2f} for"
        f" every k < K, {shares[0, K, 2]:.2f} for k = K); and on the source ({after_hit:.2f} after a hit,"
        f" {after_miss:.2f} after a miss) although the same draft serves both, because misses lead into hard passages.",
        "tables hit_rates and hit_rates_by_accept_count",
    )


def _what_they_are_worth(worth: list[Worth]) -> Answer:
    by = {(entry.temperature, entry.fallback, entry.fan_out): entry for entry in worth}
    widest, narrowest = FAN_OUTS[-1], FAN_OUTS[0]

    def share(temperature: int, fallback: Fallback) -> float:
        """Of the gain that the theorem expects of the widest fan-out over the narrowest."""
        first, last = by[temperature, fallback, narrowest], by[temperature, fallback, widest]
        return (last.speedup.value - first.speedup.value) / (last.theorem - first.theorem)

    off = max(abs(e.theorem_without_sources / e.speedup.value - 1) for e in worth if e.fallback is DRAFT)
    steps = [per_point(*pair) for pair in pairwise(by[0, DRAFT, fan_out] for fan_out in FAN_OUTS)]
    first = by[0, DRAFT, narrowest]
    return Answer(
        "How much of a higher hit rate turns into tokens/s?",
        f"With the draft as fallback a hit saves the time of drafting wherever it falls, and rounds accept what they"
        f" accept: Theorem 7 with one number of tokens per round is right to {100 * off:.1f} % and a point of hit rate"
        f" is worth {min(steps):.4f} to {max(steps):.4f} AR speeds at T = 0; but who fixes the"
        f" {first.tokens_on_hit:.2f} and {first.tokens_on_miss:.2f} tokens that rounds have after hits and misses at"
        f" F = 1 expects too much of wider fan-outs, whose hits are at harder places: {100 * share(0, DRAFT):.0f} %"
        f" of it come true at T = 0 and {100 * share(1, DRAFT):.0f} % at T = 1 ({100 * share(0, NONE):.0f} and"
        f" {100 * share(1, NONE):.0f} % with fallback none, where a hit also brings the tokens).",
        "table worth_of_hits",
    )


def per_point(narrow: Worth, wide: Worth) -> float:
    """Speed-up over AR by a point (.01) of hit rate between two fan-outs."""
    return (wide.speedup.value - narrow.speedup.value) / (100 * (wide.hit_rate - narrow.hit_rate))
