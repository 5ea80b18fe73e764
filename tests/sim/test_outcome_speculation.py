"""Speculation on the outcome of a slow step: closed form, event simulation and the engines of decoding agree."""

from __future__ import annotations

import contextlib
import io
import runpy
from dataclasses import replace
from itertools import pairwise, permutations
from math import inf, sqrt
from pathlib import Path

import numpy as np
import pytest

from sim.errors import BadInput
from sim.latency import LatencyModel, OperationLatency
from sim.metrics import hit_rate, overlap
from sim.outcome_speculation import (
    PossibleOutcome,
    Preparation,
    SlowStep,
    best_budget,
    by_luck,
    mean_wait_s,
    means,
    play,
)
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import LateBuild, SpeculativeSpeculative, exact_fan_out
from sim.simulate import predict
from sim.system import HostTerm, System
from sim.theory import sd_speedup, ssd_speedup, stationary_hit_rate
from sim.trace import BUILD, Lane, Operation, Source, Trace
from sim.workload import Workload

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "beyond-language-models.md").read_text()
SIX = 6  # standard errors: a false alarm once in 5e8


def alike(num: int, prepare_s: float, on_miss_s: float, rest: float = 0.0) -> tuple[PossibleOutcome, ...]:
    """Outcomes of one probability and cost, and if any is left one that cannot be prepared."""
    unforeseen = (PossibleOutcome(rest, inf, on_miss_s),) if rest else ()
    return (PossibleOutcome((1 - rest) / num, prepare_s, on_miss_s),) * num + unforeseen


def random_step(seed: int, num_workers: int) -> SlowStep:
    rng = np.random.default_rng((20260311, seed))
    outcomes = zip(rng.dirichlet(np.ones(6)), (*rng.uniform(0.1, 1, 5), inf), rng.uniform(0.1, 1, 6), strict=True)
    durations_s = tuple(rng.lognormal(0, 0.6, 9).tolist())
    chosen = tuple(PossibleOutcome(*map(float, values)) for values in outcomes)
    return SlowStep(durations_s, chosen, num_workers, predict_s=rng.uniform(0, 0.2), slowdown=rng.uniform(1, 1.2))


def spans_of(trace: Trace, *operations: Operation) -> list[tuple[float, float]]:
    return [(span.start_s, span.end_s) for span in trace.spans if span.operation in operations]


# --------------------------------------------------------------------------------------------- closed form and events


@pytest.mark.parametrize("on_late", LateBuild)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_every_wait_and_all_work_are_those_of_the_closed_form(num_workers: int, on_late: LateBuild) -> None:
    step = random_step(num_workers, num_workers)
    preparation = Preparation(step.worth_preparing(5), on_late)
    luck, trace = by_luck(step, preparation), play(step, preparation, num_sequences=3, num_rounds=60, seed=1)
    verify = [span for span in trace.spans if span.operation is Operation.VERIFY]
    lasting_s = np.array(step.durations_s) * step.slowdown
    expected_s = 0.0
    for before, after in pairwise(verify):
        if before.sequence == after.sequence:
            outcome = trace.sequences[before.sequence].tokens[1 + before.round]
            which = np.abs(lasting_s - before.duration_s).argmin(), outcome
            assert after.start_s - before.end_s == pytest.approx(luck.wait_s[which], abs=1e-9)
            source = trace.rounds[after.sequence * 60 + after.round].source
            assert source is (Source.HIT if luck.is_hit[which] else Source.MISS)
            expected_s += luck.work_s[which]
    worked_s = sum(end_s - start_s for start_s, end_s in spans_of(trace, *BUILD))
    assert worked_s == pytest.approx(expected_s)


@pytest.mark.parametrize("on_late", LateBuild)
def test_means_of_simulated_rounds_are_those_of_the_closed_form(on_late: LateBuild) -> None:
    step = random_step(9, num_workers=2)
    preparation = Preparation(step.worth_preparing(4), on_late)
    luck, expected = by_luck(step, preparation), means(step, preparation)
    trace = play(step, preparation, num_sequences=20, num_rounds=101, seed=2)
    square = (luck.wait_s**2).mean(0) @ step.probabilities
    error_s = sqrt((square - expected.wait_s**2) / 2000)
    assert mean_wait_s(trace).value == pytest.approx(expected.wait_s, abs=SIX * error_s)
    rate, error = hit_rate([trace]), sqrt(expected.hit_rate * (1 - expected.hit_rate) / 2000)
    assert rate is not None and rate.value == pytest.approx(expected.hit_rate, abs=SIX * error)


def test_one_round_by_hand() -> None:
    """Two workers predict until 1; outcomes 0 and 1 are prepared until 5, outcome 2 by the first one until 9. The step
    ends at 7, beside the third preparation."""
    step = SlowStep((7.0,), alike(3, prepare_s=4, on_miss_s=3, rest=0.1), num_workers=2, predict_s=1)
    preparation = {rule: Preparation((0, 1, 2), rule) for rule in LateBuild}
    assert by_luck(step, preparation[LateBuild.WAIT]).wait_s.tolist() == [[2, 2, 2, 5]]
    assert by_luck(step, preparation[LateBuild.ABANDON]).wait_s.tolist() == [[0, 0, 2, 3]]
    assert by_luck(step, preparation[LateBuild.ABANDON]).work_s.tolist() == [[12, 12, 14, 12]]
    for rule, ends_s in ((LateBuild.WAIT, {9}), (LateBuild.ABANDON, {7, 9})):
        traces = [play(step, preparation[rule], 1, 2, seed) for seed in range(20)]
        assert {max(end_s for _, end_s in spans_of(trace, *BUILD)) for trace in traces} == ends_s


def test_a_rule_may_be_given_by_its_name() -> None:
    assert Preparation((0,), "wait") == Preparation((0,), LateBuild.WAIT)  # type: ignore[arg-type]


def test_same_seed_same_luck_whatever_is_prepared() -> None:
    step = random_step(3, num_workers=2)
    texts = [
        [s.tokens for s in play(step, Preparation(step.worth_preparing(b)), 2, 30, 5).sequences] for b in (0, 2, 5)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert play(step, Preparation((0,)), 2, 30, 5) == play(step, Preparation((0,)), 2, 30, 5)
    assert play(step, Preparation((0,)), 2, 30, 5) != play(step, Preparation((0,)), 2, 30, 6)


# -------------------------------------------------------------------------------------------------- degenerate checks


@pytest.mark.parametrize("on_late", LateBuild)
def test_without_preparation_the_work_follows_the_step(on_late: LateBuild) -> None:
    step = random_step(4, num_workers=2)
    on_miss_s = sum(outcome.probability * outcome.on_miss_s for outcome in step.outcomes)
    found = means(step, Preparation((), on_late))
    assert found.round_s == pytest.approx(np.mean(step.durations_s) + on_miss_s)
    assert (found.hit_rate, found.work_s) == (0, 0)
    trace = play(step, Preparation((), on_late), 1, 30)
    assert {r.source for r in trace.rounds} == {Source.SYNCHRONOUS}
    assert spans_of(trace, *BUILD) == [] and hit_rate([trace]) is None


@pytest.mark.parametrize("on_late", LateBuild)
def test_a_certain_outcome_hides_all_work(on_late: LateBuild) -> None:
    step = SlowStep((2.0, 3.0), (PossibleOutcome(1.0, 1.5, 1.5),), predict_s=0.25)
    assert means(step, Preparation((0,), on_late))[:3] == (2.5, 0.0, 1.0)
    trace = play(step, Preparation((0,), on_late), 2, 30)
    hidden, rate = overlap([trace]), hit_rate([trace])
    assert hidden is not None and rate is not None and hidden.value == rate.value == 1
    assert mean_wait_s(trace).value == pytest.approx(0, abs=1e-12)


def test_a_budget_beyond_the_outcomes_changes_nothing() -> None:
    step = random_step(5, num_workers=2)
    assert len(step.worth_preparing(5)) == 5 and step.worth_preparing(50) == step.worth_preparing(5)
    assert SlowStep((1.0,), alike(2, 1, 1, rest=0.5)).worth_preparing(9) == (0, 1)
    assert SlowStep((1.0,), (PossibleOutcome(1, 1, 1), PossibleOutcome(0, 1, 1))).worth_preparing(2) == (0,)
    assert SlowStep((1.0,), alike(2, 1, 0)).worth_preparing(2) == ()


@pytest.mark.parametrize("on_late", LateBuild)
def test_twice_the_times_twice_the_round(on_late: LateBuild) -> None:
    step = random_step(6, num_workers=2)
    doubled = SlowStep(
        tuple(2 * seconds for seconds in step.durations_s),
        tuple(PossibleOutcome(o.probability, 2 * o.prepare_s, 2 * o.on_miss_s) for o in step.outcomes),
        step.num_workers,
        2 * step.predict_s,
        step.slowdown,
    )
    preparation = Preparation(step.worth_preparing(3), on_late)
    once, twice = means(step, preparation), means(doubled, preparation)
    assert twice.round_s == pytest.approx(2 * once.round_s) and twice.hit_rate == pytest.approx(once.hit_rate)


# ------------------------------------------------------------------------------------------------ theory, and decoding


@pytest.mark.parametrize("num_prepared", [0, 1, 3, 5])
def test_rounds_of_one_token_obey_theorem_7(num_prepared: int) -> None:
    """A step of 4 s, five likely outcomes prepared within it, .6 s in the open."""
    step = SlowStep((4.0,), alike(5, prepare_s=0.7, on_miss_s=0.6, rest=0.3), predict_s=0.2)
    p = 0.14 * num_prepared
    found = means(step, Preparation(tuple(range(num_prepared))))
    assert found.hit_rate == pytest.approx(p) == pytest.approx(stationary_hit_rate(p, p))
    assert 4 / found.round_s == pytest.approx(ssd_speedup(p, 1, 1, (0.2 + 0.7 * num_prepared) / 4, 0.6 / 4))
    assert 4 / means(step, Preparation()).round_s == pytest.approx(sd_speedup(1, 0.6 / 4))


def decoding(verify_s: float, glue_s: float, branch_s: float, draft_s: float, curve: HitCurve) -> System:
    """A pair whose one draft token is always rejected: all that a round brings is its bonus token."""

    def table(operation: Operation, of_width: dict[int, float]) -> OperationLatency:
        return OperationLatency(operation, {w: ((0, s), (4096, s)) for w, s in of_width.items()}, (1.0,))

    draft = {Operation.GLUE: {1: glue_s, 64: glue_s}, Operation.DRAFT_STEP: {1: draft_s, 64: draft_s}}
    draft[Operation.TREE_STEP] = {1: branch_s, 64: 64 * branch_s}
    operations = {(Lane.DRAFT, operation): table(operation, of_width) for operation, of_width in draft.items()}
    operations[Lane.TARGET, Operation.VERIFY] = table(Operation.VERIFY, {1: verify_s, 64: verify_s})
    return System(
        latency=LatencyModel(operations),
        contention=dict.fromkeys(Lane, 1.0),
        host_s=dict.fromkeys(HostTerm, 0.0),
        agreement=ParametricAgreement(1, 200, (0.0,), (curve,), (curve,)),
        identity={"pair": "always rejected"},
    )


@pytest.mark.parametrize("fan_out", [0, 1, 3, 8])
def test_decoding_that_gains_only_bonus_tokens_is_a_case_of_it(fan_out: int) -> None:
    """Branches are outcomes, each as likely as the hit curve rises. The build takes 1 + 2 F ms: at 8 it is late."""
    curve, num_rounds = HitCurve(0.6, 0.5), 199
    rates = [curve.hit_rate(f) for f in range(fan_out + 1)]
    branches = tuple(PossibleOutcome(high - low, 0.002, 0.003) for low, high in pairwise(rates))
    step = SlowStep((0.01,), (*branches, PossibleOutcome(1 - rates[-1], inf, 0.003)), predict_s=0.001)
    expected = means(step, Preparation(tuple(range(fan_out)), LateBuild.WAIT))
    policy = SpeculativeSpeculative(1, (fan_out, 0), (fan_out, 0))
    workload = Workload("toy", ((0,),), num_rounds + 1)
    found = predict(policy, workload, decoding(0.01, 0.001, 0.002, 0.003, curve))
    first_s = 0.003 + 0.01  # nothing was prepared, and before the last round nothing needs to be drafted after a miss
    last_s = expected.round_s - (1 - expected.hit_rate) * 0.003
    seconds = first_s + (num_rounds - 2) * expected.round_s + last_s
    assert found.tokens_per_s.value == pytest.approx(num_rounds / seconds, rel=1e-9)


# -------------------------------------------------------------------------------------------------------- best budgets


@pytest.mark.parametrize("on_late", LateBuild)
def test_no_other_preparation_beats_the_best_where_outcomes_cost_the_same(on_late: LateBuild) -> None:
    outcomes = tuple(PossibleOutcome(p, 0.5, 0.7) for p in (0.1, 0.4, 0.2, 0.3))
    step = SlowStep((0.6, 1.4, 1.7), outcomes, predict_s=0.1)
    best = means(step, Preparation(step.worth_preparing(best_budget(step, on_late)), on_late))
    orders = [order for num in range(5) for order in permutations(range(4), num)]
    assert best.round_s == pytest.approx(min(means(step, Preparation(order, on_late)).round_s for order in orders))


def test_outcomes_of_one_cost_are_chosen_as_by_theorem_18() -> None:
    """Each outcome is an accept count with one branch to give."""
    rng = np.random.default_rng(20260311)
    outcomes = tuple(PossibleOutcome(p, 0.5, s) for p, s in zip(rng.dirichlet(np.ones(8)), rng.random(8), strict=True))
    saved_s = [(0.0, outcome.probability * outcome.on_miss_s) for outcome in outcomes]
    for budget in range(9):
        chosen = SlowStep((1.0,), outcomes).worth_preparing(budget)
        assert sorted(chosen) == np.flatnonzero(exact_fan_out(saved_s, budget)).tolist()


@pytest.mark.parametrize("on_late", LateBuild)
def test_the_order_is_close_to_the_best_where_costs_differ(on_late: LateBuild) -> None:
    """Of all orders of five outcomes; the worst of these steps lost 3.2 %, and half of them lost nothing."""
    losses = []
    for seed in range(6):
        step = random_step(seed, num_workers=1 + seed % 2)
        orders = [order for num in range(6) for order in permutations(range(5), num)]
        least_s = min(means(step, Preparation(order, on_late)).round_s for order in orders)
        chosen = step.worth_preparing(best_budget(step, on_late))
        losses.append(means(step, Preparation(chosen, on_late)).round_s / least_s - 1)
    assert max(losses) < 0.05 and min(losses) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("on_late", "price"), [(LateBuild.WAIT, 0.0), (LateBuild.ABANDON, 0.3)], ids=["by waiting", "by price"]
)
def test_the_dearer_a_preparation_the_fewer_are_worth_it(on_late: LateBuild, price: float) -> None:
    chances = [0.3, 0.25, 0.2, 0.15, 0.1]
    best = []
    for prepare_s in (0.05, 0.2, 0.4, 0.8, 1.6, 6.4):
        step = SlowStep((1.0,), tuple(PossibleOutcome(p, prepare_s, 1.0) for p in chances))
        best.append(best_budget(step, on_late, price))
    assert best == sorted(best, reverse=True) and best[0] == 5 and best[-1] == 0 and len(set(best)) > 2


@pytest.mark.parametrize("on_late", LateBuild)
def test_nothing_is_worth_preparing_where_it_slows_the_step_by_more_than_hits_save(on_late: LateBuild) -> None:
    """Hits save .5 x .4 s of a step of 2 s: worth a slow-down by less than a tenth."""
    step = SlowStep((2.0,), (PossibleOutcome(0.5, 0.4, 0.4), PossibleOutcome(0.5, inf, 0.4)))
    assert best_budget(replace(step, slowdown=1.09), on_late) == 1
    assert best_budget(replace(step, slowdown=1.11), on_late) == 0
    slowed = replace(step, slowdown=1.11)
    assert means(slowed, Preparation((0,), on_late)).round_s > means(slowed, Preparation()).round_s


# -------------------------------------------------------------------------------------------------- records and input


def test_the_trace_is_one_like_any_other(tmp_path: Path) -> None:
    step = random_step(7, num_workers=2)
    trace = play(step, Preparation(step.worth_preparing(3)), 2, 20)
    trace.write(tmp_path)
    assert Trace.read(tmp_path) == trace
    arrows = [event for event in trace.to_perfetto()["traceEvents"] if event.get("cat") == "speculation"]
    assert len(arrows) == 2 * sum(r.source is Source.HIT for r in trace.rounds) > 0


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda: SlowStep((1.0,), (PossibleOutcome(0.9, 1, 1),)), "probabilities"),
        (lambda: SlowStep((), alike(2, 1, 1)), "durations_s"),
        (lambda: SlowStep((0.0,), alike(2, 1, 1)), "durations_s"),
        (lambda: SlowStep((1.0,), alike(2, 1, inf)), r"outcomes\[0\].on_miss_s"),
        (lambda: SlowStep((1.0,), alike(2, -1, 1)), r"outcomes\[0\].prepare_s"),
        (lambda: SlowStep((1.0,), alike(2, 1, 1), num_workers=0), "num_workers"),
        (lambda: SlowStep((1.0,), alike(2, 1, 1), slowdown=0.9), "slowdown"),
        (lambda: means(SlowStep((1.0,), alike(2, 1, 1)), Preparation((0, 0))), "outcomes to prepare"),
        (lambda: means(SlowStep((1.0,), alike(2, 1, 1)), Preparation((2,))), "outcomes to prepare"),
        (lambda: means(SlowStep((1.0,), alike(2, 1, 1, rest=0.1)), Preparation((2,))), "outcomes to prepare"),
        (lambda: Preparation((0,), "never"), "on_late"),
        (lambda: SlowStep((1.0,), alike(2, 1, 1)).worth_preparing(-1), "budget"),
        (lambda: play(SlowStep((1.0,), alike(2, 1, 1)), Preparation(), 1, 1), "num_rounds"),
    ],
)
def test_a_broken_rule_is_named(wrong, name: str) -> None:
    with pytest.raises(BadInput, match=name):
        wrong()


@pytest.mark.parametrize("script", ["join_cardinality", "next_action"])
def test_the_tables_of_the_page_are_what_the_scripts_print(script: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_module(f"experiments.scripts.{script}")
    tables = printed.getvalue().strip().split("\n\n")
    assert len(tables) > 2 and [table for table in tables if table not in PAGE] == []
