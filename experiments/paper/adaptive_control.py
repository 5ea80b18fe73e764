"""Adaptive choices of the policy against the best fixed one, where the workload stays as it is and where it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from experiments.adaptive import expected_times
from experiments.paper.agreement_records import read_record
from experiments.paper.constant_times import StepCosts
from experiments.paper.phases import Phases
from experiments.paper.section import Answer, Cell, Section, Table
from experiments.recorded_workload import recorded_workload
from sim.agreement import Agreement, AgreementRecord
from sim.decider import Decider
from sim.hill_climbing import HillClimbing
from sim.metrics import Estimate
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Fallback, Policy
from sim.running_statistics import RunningStatistics
from sim.search_space import SearchSpace, candidates
from sim.simulate import predict_all
from sim.timeline import totals

COSTS = StepCosts(draft_step=0.2, tree_step=0.2, glue=0.2)  # AR wins at an acceptance of .2, SSD at .9
LENGTHS, BUDGETS = (0, 1, 2, 3, 4, 6), (0, 8, 16)
NUM_TEXTS, TEXT_TOKENS = 16, 400
NUM_SEEDS = 4
AFTER_HIT, AFTER_MISS = HitCurve(0.4, 0.5), HitCurve(0.7, 0.5)  # in the middle of the published ones


# ---------------------------------------------------------------------------------------------------------- workloads


def numbers(acceptance: float, num_texts: int = NUM_TEXTS) -> ParametricAgreement:
    """Texts on which every round is like every other."""
    return ParametricAgreement(
        64, TEXT_TOKENS, (acceptance,), (AFTER_HIT,), (AFTER_MISS,), sampling_temperature=1.0, num_texts=num_texts
    )


def _resampled(record: AgreementRecord, seed: int) -> AgreementRecord:
    """As many prompts of a record, drawn anew."""
    return record.select(np.random.default_rng(seed).integers(record.num_prompts, size=record.num_prompts))


World = Callable[[int], Phases]  # by seed

STATIONARY = ("acceptance .8", "stdlib texts")
STEPS = ("acceptance .2, then .9", "smollm2 texts, then stdlib texts")
IN_TURNS = "acceptance .2 and .9 in turns"

WORLDS: Mapping[str, World] = {
    "acceptance .8": lambda seed: Phases((numbers(0.8),)),
    "acceptance .2, then .9": lambda seed: Phases((numbers(0.2, NUM_TEXTS // 2), numbers(0.9, NUM_TEXTS // 2))),
    IN_TURNS: lambda seed: Phases((numbers(0.2, 1), numbers(0.9, 1)) * (NUM_TEXTS // 2)),
    "stdlib texts": lambda seed: Phases((_resampled(read_record("library_t0"), seed),)),
    "smollm2 texts, then stdlib texts": lambda seed: Phases(
        (_resampled(read_record("smollm2_t0"), seed), _resampled(read_record("library_t0"), seed))
    ),
}


# ------------------------------------------------------------------------------------------------------------- regret

_HEAD = (
    *("workload", "controller", "tokens", "regret against the best fixed policy, %", "low", "high"),
    *("against the best of each phase, %", "best fixed policy"),
)


@dataclass(frozen=True)
class Regret:
    """A share of tokens/s lost, in %, over independent runs; below 0 where the controller is faster."""

    workload: str
    controller: str
    num_tokens: float
    against_fixed: Estimate
    against_phases: float
    best_fixed: str

    def row(self) -> tuple[Cell, ...]:
        lost = self.against_fixed
        return (
            *(self.workload, self.controller, self.num_tokens, lost.value, lost.low, lost.high),
            *(self.against_phases, self.best_fixed),
        )


@dataclass(frozen=True)
class Run:
    """Tokens/s of one run: of each controller and of the best fixed policy under the same luck, and what the best of
    each phase has over that policy in expectation."""

    num_tokens: float
    rates: Mapping[str, float]
    fixed_rate: float
    best_fixed: Policy
    phases_over_fixed: float


def section() -> Section:
    """Controllers by workload."""
    regrets = [regret for workload, world in WORLDS.items() for regret in regrets_of(workload, world)]
    return Section(
        "Adaptive control",
        text=(
            f"Both controllers choose K from {', '.join(map(str, LENGTHS))} and a budget of"
            f" {', '.join(map(str, BUDGETS))} branches with the draft as fallback; they start without a past and are"
            " told of the times, not of the texts. A step of the draft takes .2 of a verification. The best fixed"
            " policy is the fastest of the same K and budgets, lists uniform and geometric, for one who knows the whole"
            f" workload; the best of each phase is the same for every part by itself. {NUM_SEEDS} runs with luck of"
            " their own (of recorded texts: prompts drawn anew), controller and fixed policy under the same luck;"
            " intervals are Student's.",
        ),
        tables=(Table("adaptive_control", "Regret of controllers", _HEAD, tuple(entry.row() for entry in regrets)),),
        answers=(_answer(regrets),),
    )


def regrets_of(workload: str, world: World, num_seeds: int = NUM_SEEDS) -> list[Regret]:
    """Of both controllers."""
    runs = [run_of(world(seed), seed) for seed in range(num_seeds)]
    gain = float(np.mean([run.phases_over_fixed for run in runs]))
    regrets = []
    for name in runs[0].rates:
        ratio = _mean_of([run.rates[name] / run.fixed_rate for run in runs])
        lost = Estimate(100 * (1 - ratio.value), 100 * (1 - ratio.high), 100 * (1 - ratio.low), ratio.n)
        tokens, fixed = runs[0].num_tokens, runs[0].best_fixed.name
        regrets.append(Regret(workload, name, tokens, lost, 100 * (1 - ratio.value / gain), fixed))
    return regrets


def run_of(agreement: Phases, seed: int) -> Run:
    """Every decider over the same texts under the same luck."""
    workload, system = recorded_workload(agreement), COSTS.system(agreement)
    best, expected = best_fixed(agreement)
    best_rates = {id(part): best_fixed(part)[1] for part in {id(part): part for part in agreement.parts}.values()}
    tokens = [float(np.maximum(0, part.lengths - 1).sum()) for part in agreement.parts]
    seconds = [n / best_rates[id(part)] for n, part in zip(tokens, agreement.parts, strict=True)]

    def rate(decider: Decider) -> float:
        (run,) = totals(decider, workload, system, [seed])
        return float(run.num_tokens.sum() / run.shared_s.sum())

    found = {name: rate(decider) for name, decider in controllers(agreement).items()}
    return Run(sum(tokens), found, rate(best), best, sum(tokens) / sum(seconds) / expected)


def controllers(agreement: Agreement) -> dict[str, Decider]:
    """By name. They know the times, and nothing of the texts."""
    system = COSTS.system(agreement)
    times = expected_times(system, recorded_workload(agreement), LENGTHS[-1], BUDGETS[-1])
    most = agreement.num_candidates
    return {
        "running statistics": RunningStatistics(LENGTHS, BUDGETS, times, most_candidates=most),
        "hill climbing": HillClimbing(LENGTHS, BUDGETS, most_candidates=most),
    }


def best_fixed(agreement: Agreement) -> tuple[Policy, float]:
    """The fastest policy of the controllers' lengths and budgets, and its expected tokens/s."""
    budgets = tuple(budget for budget in BUDGETS if budget)
    space = SearchSpace(LENGTHS, budgets, ("uniform", "geometric"), (Fallback.DRAFT,))
    found = predict_all(candidates(space, agreement), recorded_workload(agreement), COSTS.system(agreement))
    best = max(found, key=lambda prediction: prediction.tokens_per_s.value)
    return best.policy, best.tokens_per_s.value


def _mean_of(values: list[float]) -> Estimate:
    """With Student's 95 % interval."""
    n = len(values)
    half_width = float(student.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n))
    mean = float(np.mean(values))
    return Estimate(mean, mean - half_width, mean + half_width, n)


def _answer(regrets: list[Regret]) -> Answer:
    lost = {(entry.controller, entry.workload): entry for entry in regrets}

    def told(*workloads: str, sign: int = 1) -> str:
        found = [lost["running statistics", workload].against_fixed for workload in workloads]
        bounds = [sorted((sign * regret.low, sign * regret.high)) for regret in found]
        return " and ".join(
            f"{sign * r.value:.1f} [{low:.1f}, {high:.1f}]" for r, (low, high) in zip(found, bounds, strict=True)
        )

    climbing = [entry.against_fixed.value for entry in regrets if entry.controller == "hill climbing"]
    behind = [lost["running statistics", workload].against_phases for workload in (*STEPS, IN_TURNS)]
    return Answer(
        "How do running statistics and hill climbing compare with the best fixed policy?",
        f"Against the best fixed policy in hindsight running statistics lose {told(*STATIONARY)} % of tokens/s where"
        f" nothing changes ({' and '.join(STATIONARY)}), gain {told(*STEPS, sign=-1)} % where the acceptance steps once"
        f" and lose {told(IN_TURNS)} % where it changes with every text, sooner than they forget ({behind[0]:.1f},"
        f" {behind[1]:.1f} and {behind[2]:.1f} % behind the best of each phase); hill climbing, which starts at AR and"
        f" needs 200 rounds for every comparison, loses {min(climbing):.0f} to {max(climbing):.0f} % over so few"
        " tokens.",
        "table adaptive_control",
    )
