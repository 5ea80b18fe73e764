"""How outcomes are best predicted: rules that learn from some prompts, judged by others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from experiments.adaptive import expected_times
from experiments.paper.agreement_records import (
    DATA,
    TEMPERATURES,
    calibration_of,
    held_out_numbers,
    held_out_of,
    read_record,
)
from experiments.paper.constant_times import StepCosts
from experiments.paper.draft_paths import DraftPaths, by_probability, calibrated_exponent
from experiments.paper.hit_rates import outcomes_anywhere
from experiments.paper.section import Answer, Cell, Section, Table
from experiments.recorded_workload import recorded_workload
from sim.agreement import AgreementRecord
from sim.expectation import Expectation
from sim.metrics import Estimate, bootstrap, ratio_of_rates, ratio_of_totals
from sim.policy import SpeculativeSpeculative, exact_fan_out, geometric_fan_out, uniform_fan_out
from sim.recursion import outcome_hit_mass
from sim.running_statistics import RunningStatistics
from sim.search_space import mean_acceptance, miss_exponent
from sim.simulate import predict, predict_all
from sim.trace import Source

FloatArray = NDArray[np.float64]
FanOut = tuple[int, ...]
K = 4
BUDGETS = (6, 12)
MOST_RUNS = 16  # of the event simulation, for the rule that learns as it goes


def section() -> Section:
    """Rules by temperature and budget."""
    judged = [entry for T in TEMPERATURES for budget in BUDGETS for entry in judge(T, budget)]
    return Section(
        "Rules that predict outcomes",
        text=(
            f"K = {K}, the draft as fallback, a draft step of .15 of a verification; a rule spreads the budget over the"
            " accept counts, the same list after hits and misses. Rules learn from 24 prompts (or from other files,"
            " another temperature, another pair) and are judged on 24 other prompts of the same files. Regret is"
            " against the list of that budget that is fastest on the very prompts it is judged on, found by trying all:"
            " a ceiling that no rule can be expected to reach, as it knows those prompts. Intervals are over prompts,"
            " in pairs.",
            "Two rules choose anew in every round (greedy texts only, on the draft model's recorded paths; the executor"
            " has no such policy): the likeliest outcomes for whom a draft token of probability q is right with q, or"
            f" with q^{_calibrated():.2f}, by which the calibration prompts have as many right tokens as they have.",
        ),
        tables=(Table("outcome_rules", "Rules and their regret", _HEAD, tuple(entry.row() for entry in judged)),),
        answers=(_answer(judged),),
    )


# ----------------------------------------------------------------------------------------------------------- the rules


def lists_by_rule(temperature: int, budget: int) -> dict[str, FanOut]:
    """Fan-out lists by rule; that of the last has seen the prompts it is judged by."""
    library = read_record(f"library_t{temperature}")
    known = calibration_of(library)
    other_pair = read_record(f"smollm2_t{temperature}")
    curves = {
        "draft's own probabilities": believed_hit_mass(known),
        "measured curves, same files": measured_hit_mass(known),
        "measured curves, other files": measured_hit_mass(read_record(f"editor_t{temperature}")),
        "measured curves, other temperature": measured_hit_mass(read_record(f"editor_t{1 - temperature}")),
        "measured curves, other pair": measured_hit_mass(other_pair),
        "other pair's hit curves, own accept counts": borrowed_hit_mass(known, other_pair),
        "measured curves, judged prompts": measured_hit_mass(held_out_of(library)),
    }
    lists = {
        "uniform": uniform_fan_out(K, budget),
        "geometric": geometric_fan_out(K, budget, mean_acceptance(known), miss_exponent(known)),
    } | {rule: exact_fan_out(mass.tolist(), budget) for rule, mass in curves.items()}
    return {rule: tuple(min(entry, library.num_candidates) for entry in fan_out) for rule, fan_out in lists.items()}


def measured_hit_mass(record: AgreementRecord) -> FloatArray:
    """(K + 1, candidates + 1) of Theorem 18: P(k accepted and the bonus token among the f prepared)."""
    return outcome_hit_mass(record, K, record.num_candidates, Source.HIT)


def borrowed_hit_mass(own: AgreementRecord, other: AgreementRecord) -> FloatArray:
    """Accept counts of one pair, hit rates given the accept count of another."""
    counts, others = (outcomes_anywhere(record, K, 1)[0].sum(1) for record in (own, other))
    hit_rates = measured_hit_mass(other) / (others / others.sum())[:, None]
    return (counts / counts.sum())[:, None] * hit_rates


def believed_hit_mass(record: AgreementRecord) -> FloatArray:
    """The same as the draft model believes it, for whom a token is right with the probability that it gave it.

    The target has no part in it, but that its text is where the draft model is asked.
    """
    left = record.lengths[record.prompt] - record.position
    starts = np.flatnonzero((record.position > 0) & (left > K + 1))
    is_right, after_rejection, complete = _beliefs(record)
    reached = np.ones(len(starts))
    mass = []
    for k in range(K + 1):
        prepared = complete if k == K else after_rejection
        mass.append((reached[:, None] * prepared[starts + k]).mean(0))
        reached = reached * is_right[starts + k]
    return np.array(mass)


def _beliefs(record: AgreementRecord) -> tuple[FloatArray, FloatArray, FloatArray]:
    """By row: the probability that the draft token is right; (.., candidates + 1) that another token, one of the f
    likeliest but the draft token, is; and that one of the f likeliest is."""
    q = record.top_q
    complete = np.concatenate([np.zeros((len(q), 1)), q.cumsum(1)], 1)
    if record.temperature == 0:  # the draft token is the likeliest
        beyond = np.concatenate([complete[:, 1:], complete[:, -1:]], 1)
        return q[:, 0], beyond - q[:, :1], complete
    # The draft token y is drawn from q. Without it the next candidate moves up where y is among the f likeliest.
    drawn = np.concatenate([np.zeros((len(q), 1)), (q**2).cumsum(1)], 1)
    next_one = np.concatenate([q, np.zeros((len(q), 1))], 1)
    after_rejection = complete * (1 - complete) + complete * (complete + next_one) - drawn
    return (q**2).sum(1), after_rejection, complete


# -------------------------------------------------------------------------------------------------------- the judgement

_HEAD = (
    *("temperature", "budget", "rule", "fan-out", "hit rate", "low", "high", "points of hit rate lost", "low", "high"),
    *("tokens/s over AR", "regret in tokens/s, %", "low", "high"),
)
SAME_PROMPTS = "all lists tried on the judged prompts"
RUNNING = "running statistics of the run itself"
PER_ROUND = "draft's own probabilities, round by round"
CALIBRATED = "draft's probabilities, calibrated, round by round"
SAME_PAIR = (
    *("geometric", RUNNING),
    *(f"measured curves, {learned_from}" for learned_from in ("same files", "other files", "other temperature")),
)
UNIFORM, OTHER_PAIR = ("uniform",), ("measured curves, other pair",)
BORROWED = ("other pair's hit curves, own accept counts",)
RAW = ("draft's own probabilities", PER_ROUND)


@dataclass(frozen=True)
class Judged:
    """A rule on the held-out prompts beside the ceiling. Regrets are above 0 where the rule is worse."""

    temperature: int
    budget: int
    rule: str
    fan_out: FanOut | None  # None: another one from round to round
    hit_rate: Estimate
    points_lost: Estimate
    over_ar: float
    regret: Estimate

    def row(self) -> tuple[Cell, ...]:
        named = "changes" if self.fan_out is None else "/".join(map(str, self.fan_out))
        hits, lost, regret = self.hit_rate, self.points_lost, self.regret
        return (
            *(self.temperature, self.budget, self.rule, named, hits.value, hits.low, hits.high),
            *(lost.value, lost.low, lost.high, self.over_ar, regret.value, regret.low, regret.high),
        )


def judge(temperature: int, budget: int) -> list[Judged]:
    """Every rule, the ceiling first."""
    record, costs = held_out_of(read_record(f"library_t{temperature}")), StepCosts()
    lists = lists_by_rule(temperature, budget)
    tried = list(dict.fromkeys([*lists.values(), *all_lists(budget, record.num_candidates)]))
    found = dict(zip(tried, _totals(record, tried, costs), strict=True))
    best = max(tried, key=lambda fan_out: _rate(found[fan_out]))
    rules: list[tuple[str, FanOut | None, Expectation]] = [(SAME_PROMPTS, best, found[best])]
    rules += [(rule, fan_out, found[fan_out]) for rule, fan_out in lists.items()]
    rules.append((RUNNING, None, learning_as_it_goes(record, budget, costs)))
    if temperature == 0:
        rules += [
            (rule, None, chosen_per_round(budget, e, costs))
            for rule, e in ((PER_ROUND, 1.0), (CALIBRATED, _calibrated()))
        ]
    return [_judged(temperature, budget, rule, fan_out, totals, found[best], costs) for rule, fan_out, totals in rules]


def all_lists(budget: int, most: int) -> Iterator[FanOut]:
    """Every list of K + 1 entries of at most `most` whose sum is the budget."""
    for bars in combinations(range(budget + K), K):
        fan_out = tuple(end - start - 1 for start, end in pairwise((-1, *bars, budget + K)))
        if max(fan_out) <= most:
            yield fan_out


def _totals(record: AgreementRecord, lists: list[FanOut], costs: StepCosts) -> list[Expectation]:
    policies = [SpeculativeSpeculative(K, fan_out, fan_out) for fan_out in lists]
    return [p.expectation for p in predict_all(policies, recorded_workload(record), costs.system(record))]


def learning_as_it_goes(record: AgreementRecord, budget: int, costs: StepCosts) -> Expectation:
    """Theorem 12 for the acceptance and the exponents that the run itself has shown so far."""
    workload, system = recorded_workload(record), costs.system(record)
    times = expected_times(system, workload, K, budget)
    rule = RunningStatistics((K,), (budget,), times, most_candidates=record.num_candidates)
    prediction = predict(rule, workload, system, engine="des", relative_half_width=0.005, ceiling=MOST_RUNS)
    return prediction.expectation


def _calibrated() -> float:
    return calibrated_exponent(calibration_of(read_record("library_t0")))


def chosen_per_round(budget: int, exponent: float, costs: StepCosts) -> Expectation:
    """The likeliest outcomes of every round by the draft model's probabilities along its own path (temperature 0)."""
    record = read_record("library_t0")
    paths = DraftPaths.read(record, DATA / "library_t0.paths.parquet")
    return paths.play(by_probability(budget, exponent), held_out_numbers(record), costs)


def _rate(totals: Expectation) -> float:
    return float(totals.num_tokens.sum() / totals.seconds.sum())


def _judged(
    temperature: int,
    budget: int,
    rule: str,
    fan_out: FanOut | None,
    totals: Expectation,
    best: Expectation,
    costs: StepCosts,
) -> Judged:
    (tokens, seconds), reference = ((of.num_tokens, of.seconds) for of in (totals, best))
    ratio = ratio_of_rates((tokens, seconds), reference)
    return Judged(
        *(temperature, budget, rule, fan_out),
        hit_rate=_hit_rate(totals),
        points_lost=_points_lost(totals, best),
        over_ar=_rate(totals) * costs.verify_s,
        regret=Estimate(100 * (1 - ratio.value), 100 * (1 - ratio.high), 100 * (1 - ratio.low), ratio.n),
    )


def _hit_rate(totals: Expectation) -> Estimate:
    rate = ratio_of_totals(totals.num_hits.sum(0), totals.num_lookups.sum(0))
    assert rate is not None
    return rate


def _points_lost(totals: Expectation, best: Expectation) -> Estimate:
    """Of hit rate, the same prompts drawn for both."""

    def statistic(weights: FloatArray) -> FloatArray:
        rates = [(weights @ of.num_hits.sum(0)) / (weights @ of.num_lookups.sum(0)) for of in (best, totals)]
        return 100 * (rates[0] - rates[1])

    num_prompts = len(totals.num_tokens)
    low, high = bootstrap(statistic, num_prompts)
    return Estimate(float(statistic(np.ones(num_prompts))), low, high, num_prompts)


def _answer(judged: list[Judged]) -> Answer:
    def regrets(rules: tuple[str, ...]) -> list[float]:
        return [entry.regret.value for entry in judged if entry.rule in rules]

    calibrated = [entry.regret for entry in judged if entry.rule == CALIBRATED]
    gains = " and ".join(f"{-r.value:.1f} [{-r.high:.1f}, {-r.low:.1f}]" for r in calibrated)
    return Answer(
        "How should outcomes be predicted without overfitting to one pair?",
        "By the accept counts and hit curves of any other text of the same pair: measured on other prompts, other files"
        f" or at another temperature, put into Theorem 12 or learned during the run, they stay within"
        f" {max(regrets(SAME_PAIR)):.1f} % of the tokens/s of the best list in hindsight (uniform:"
        f" {max(regrets(UNIFORM)):.1f} %), while curves of another pair lose up to {max(regrets(OTHER_PAIR)):.0f} %"
        f" ({max(regrets(BORROWED)):.1f} % with one's own accept counts) and the draft's raw probabilities up to"
        f" {max(regrets(RAW)):.1f} %; calibrated by one exponent on other prompts and asked anew in every round, these"
        f" beat the best list by {gains} % at budgets of {' and '.join(map(str, BUDGETS))} (temperature 0).",
        "table outcome_rules",
    )
