"""What preparing for the likely outcomes of a slow step gains, in Markdown: the closed form beside simulated rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sim.metrics import hit_rate
from sim.outcome_speculation import Preparation, SlowStep, best_budget, mean_wait_s, means, play
from sim.policy import LateBuild
from sim.trace import BUILD

NUM_SEQUENCES, NUM_ROUNDS, SEED = 40, 50, 20260311


def by_budget(step: SlowStep, budgets: Iterable[int], on_late: LateBuild) -> Iterator[str]:
    """A line for each number of outcomes prepared: by the closed form, and as simulated with 95 % intervals over
    sequences. Work is that of all workers in a round beside which they prepare."""
    yield f"| prepared, {on_late} | hit rate | simulated | wait (ms) | simulated | work (ms) | simulated | gain |"
    yield "|---" * 8 + "|"
    for budget in budgets:
        yield _line(step, Preparation(step.worth_preparing(budget), on_late))


def _line(step: SlowStep, preparation: Preparation) -> str:
    expected, trace = means(step, preparation), play(step, preparation, NUM_SEQUENCES, NUM_ROUNDS, SEED)
    rate, wait_s = hit_rate([trace]), mean_wait_s(trace)
    work_s = sum(span.duration_s for span in trace.spans if span.operation in BUILD)
    hits = f"{expected.hit_rate:.3f} | " + ("-" if rate is None else f"{rate:.3f}")
    waits = f"{expected.wait_s * 1e3:.0f} | {wait_s.value * 1e3:.0f} [{wait_s.low * 1e3:.0f}, {wait_s.high * 1e3:.0f}]"
    work = f"{expected.work_s * 1e3:.0f} | {work_s * 1e3 / (NUM_SEQUENCES * (NUM_ROUNDS - 1)):.0f}"
    return f"| {len(preparation.order)} | {hits} | {waits} | {work} | {gain(step, preparation):.3f} |"


def gain(step: SlowStep, preparation: Preparation) -> float:
    """Rounds in a second over those without preparation, by the closed form."""
    return means(step, Preparation()).round_s / means(step, preparation).round_s


def best_of(variants: Iterable[tuple[str, SlowStep, float]]) -> Iterator[str]:
    """A line for each name, step and price of work: how many outcomes are best prepared under either rule, and what
    that gains in time."""
    yield "| variant | " + " | ".join(f"best number, {rule} | gain" for rule in LateBuild) + " |"
    yield "|---" * (1 + 2 * len(LateBuild)) + "|"
    for name, step, price in variants:
        best = [Preparation(step.worth_preparing(best_budget(step, rule, price)), rule) for rule in LateBuild]
        yield f"| {name} | " + " | ".join(f"{len(one.order)} | {gain(step, one):.3f}" for one in best) + " |"
