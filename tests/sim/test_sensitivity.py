"""What changes the answer if it is wrong, and the map around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.latency import LatencyModel
from sim.parametric import HitCurve, ParametricAgreement
from sim.scaled import scaled_agreement
from sim.search import search
from sim.search_space import COMPLETE, FIRST_DRAFT, SearchSpace, mean_acceptance
from sim.sensitivity import sensitivity
from sim.simulate import predict
from sim.system import HostTerm
from sim.theory import batched_ssd_speedup, sd_speedup
from sim.trace import Lane, Operation, Source
from sim.win_map import Verdict, hit_curve, win_map
from tests.sim.toy import markov, record_of, scripted_record, system_of, workload_of

SPACE = SearchSpace((1, 2, 3), (4, 8), ("uniform",), ("draft", "none"))


def parametric(acceptance: float = 0.7) -> ParametricAgreement:
    curves = (HitCurve(0.4, 0.5),), (HitCurve(0.7, 0.5),)
    return ParametricAgreement(8, 200, (acceptance,), *curves, num_texts=4)


# ------------------------------------------------------------------------------------------------------------ what if


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_scaled_records_are_scaled_in_the_mean(temperature, factor):
    record = record_of(*markov(3), num_prompts=20, length=20, seed=1, temperature=temperature)
    scaled = scaled_agreement(record, acceptance=factor, hits=factor)
    for table in (
        lambda agreement: agreement.acceptance_table(0, FIRST_DRAFT),
        lambda agreement: agreement.hit_table(1, 0, COMPLETE, rejected=False),
    ):
        assert table(scaled).mean() == pytest.approx(min(1, factor * table(record).mean()))
        assert table(scaled).min() >= 0 and table(scaled).max() <= 1
    numbers = scaled_agreement(parametric(), acceptance=factor, hits=factor)
    assert numbers.acceptance == pytest.approx((0.7 * factor,))
    assert numbers.after_hit[0].hit_rate(4) == pytest.approx(min(1, factor * 0.8))


def test_unchanged_factors_change_nothing():
    record = record_of(*markov(3), num_prompts=5, length=20, seed=1)
    system = system_of(record)
    policy = search(SPACE, workload_of(record), system).recommended.policy
    same = replace(system, agreement=scaled_agreement(record))
    rates = [predict(policy, workload_of(record), s).tokens_per_s.value for s in (system, same)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)


def test_a_close_race_turns_where_the_deciding_time_is_wrong():
    """SSD beats AR by little because a build is nearly as long as the verification: a slower tree step turns it."""
    system = system_of(parametric(0.3), draft_step_s=0.0040, glue_s=0.002, tree_step_s=0.0095, host_s=0.0001)
    workload = workload_of(system.agreement)
    found = search(SPACE, workload, system)
    what_if = sensitivity(found, workload, system)
    rows = {(row.quantity, round(row.factor, 1)): row for row in what_if.rows}
    assert what_if.recommended == found.recommended.policy and what_if.loss_as_measured == 0
    assert {"acceptance", "hit rate", "contention.target", "latency.draft.tree_step", "host_s.hit"} <= {
        row.quantity for row in what_if.rows
    }
    assert all(0 <= row.loss < 1 and (row.loss > 0 or not row.changes) for row in what_if.rows)
    assert [row.loss for row in what_if.rows] == sorted((row.loss for row in what_if.rows), reverse=True)
    turned = next(row for row in what_if.rows if row.changes)
    slow = rows["latency.draft.tree_step", 1.1]
    table = system.latency[Lane.DRAFT, Operation.TREE_STEP]
    knots = {width: tuple((c, 1.1 * s) for c, s in row) for width, row in table.knots.items()}
    tables = {**system.latency.operations, (Lane.DRAFT, Operation.TREE_STEP): replace(table, knots=knots)}
    again = search(SPACE, workload, replace(system, latency=LatencyModel(tables)))
    assert again.fastest.policy == slow.best
    assert slow.best_tokens_per_s == pytest.approx(again.fastest.tokens_per_s.value)
    assert turned.best != found.recommended.policy


def test_quantities_that_a_policy_does_not_touch_change_nothing():
    """AR is recommended where drafting costs too much: its rate depends on the verification and its host time alone."""
    system = system_of(parametric(), draft_step_s=0.05, glue_s=0.05, tree_step_s=0.05, host_s=0.001)
    workload = workload_of(system.agreement)
    what_if = sensitivity(search(SPACE, workload, system), workload, system)
    rate = predict(what_if.recommended, workload, system).tokens_per_s.value
    moved = {row.quantity for row in what_if.rows if row.tokens_per_s != pytest.approx(rate)}
    assert moved == {"latency.target.verify", f"host_s.{HostTerm.AUTOREGRESSIVE}"}
    assert not any(row.changes for row in what_if.rows)


# --------------------------------------------------------------------------------------------------------------- map


def test_one_point_of_the_map_is_corollary_16():
    """One length, one budget, fan-out 2 everywhere, hits alike after both sources; both fallbacks by hand."""
    curve = (HitCurve(0.4, 0.5),)
    agreement = ParametricAgreement(8, 200, (0.7,), curve, curve)
    system = system_of(agreement, draft_step_s=0.002, glue_s=0.002, tree_step_s=0.002)
    space, workload = SearchSpace((2,), (6,)), workload_of(agreement)
    found = win_map(space, workload, system, acceptances=[0.6], ratios=[0.3], batch_sizes=[1])
    hit, tokens = 1 - 0.4 * 2**-0.5, 1 + 0.6 + 0.36
    by_draft = batched_ssd_speedup(1, hit, tokens, tokens, 0.9, 0.6)
    missed = 1 - 0.4 * 6**-0.5
    rate = missed / (1 + missed - hit)
    by_none = batched_ssd_speedup(1, rate, tokens, 1.0, 0.9, 0.0)
    sd = sd_speedup(tokens, 2 * 0.3)
    assert found.sd_over_ar[0, 0, 0] == pytest.approx(sd)
    assert found.gain[0, 0, 0] == pytest.approx(max(by_draft, by_none) / max(1, sd))
    assert found.ratio == pytest.approx(0.2) and found.acceptance == pytest.approx(0.7) and found.batch_size == 1


@pytest.mark.parametrize("draft_step_s", [0.001, 0.004, 0.02])
def test_the_own_point_is_what_the_exact_engine_finds(draft_step_s):
    """To 3 %: the map leaves out the ends of texts."""
    system = system_of(parametric(), draft_step_s=draft_step_s, glue_s=draft_step_s, tree_step_s=draft_step_s)
    workload = workload_of(system.agreement)
    around = win_map(SPACE, workload, system)
    here = win_map(SPACE, workload, system, acceptances=[around.acceptance], ratios=[around.ratio], batch_sizes=[1])
    found = search(SPACE, workload, system)
    rates = {kind: found.best(kind).tokens_per_s.value for kind in ("ar", "sd", "ssd")}
    assert here.gain[0, 0, 0] == pytest.approx(rates["ssd"] / max(rates["ar"], rates["sd"]), rel=0.03)
    assert here.sd_over_ar[0, 0, 0] == pytest.approx(rates["sd"] / rates["ar"], rel=0.03)


def test_the_map_says_where_ssd_wins_and_loses():
    system = system_of(parametric())
    around = win_map(SPACE, workload_of(system.agreement), system, ratios=(0.01, 0.3, 5.0))
    verdicts = around.verdicts()
    assert (verdicts[0, 1] == Verdict.WINS).any() and (verdicts[0, 2] == Verdict.LOSES).all()
    assert np.isfinite(around.gain).all() and around.batch_sizes == (1,)
    told = around.to_dict()
    assert told["own"] == pytest.approx({"acceptance": 0.7, "draft_over_verify": 0.2, "batch_size": 1})
    assert np.shape(told["verdicts"]) == around.gain.shape == (1, 3, len(told["acceptances"]))


def test_curves_of_a_record_are_those_it_missed():
    """Tokens always at rank 2 of 4: missed up to F = 2, never at F = 4, after a full acceptance."""
    record = scripted_record(0.5, num_prompts=3, length=20, rank=2)
    curve = hit_curve(record, Source.HIT, rejected=False)
    assert curve.hit_rate(1) == 0 and mean_acceptance(record) == pytest.approx(0.5)
    fit = hit_curve(record_of(*markov(3), num_prompts=40, length=40, seed=1), Source.HIT, rejected=True)
    assert 0 < fit.prefactor <= 1.5 and fit.exponent > 0
