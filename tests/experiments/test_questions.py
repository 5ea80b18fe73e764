"""The laws behind the questions on hit rates, rules, pairs, costs: parities, closed forms, limits."""

from itertools import product
from math import comb, isnan

import numpy as np
import pytest

from experiments.paper import compute_and_memory, hit_rates, long_lived_cache, outcome_rules, pair_diversity
from experiments.paper.agreement_records import calibration_of, held_out_of, read_record
from experiments.paper.compute_and_memory import SHAPES, consumption
from experiments.paper.constant_times import StepCosts
from experiments.paper.hit_rates import outcomes_anywhere, uniform_policy, worth_of_hits
from experiments.paper.outcome_rules import all_lists, borrowed_hit_mass, judge, measured_hit_mass
from experiments.paper.pair_diversity import devices_needed, synthetic_map
from experiments.paper.section import Section
from experiments.recorded_workload import recorded_workload
from sim.metrics import Estimate
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Autoregressive, Fallback, Speculative
from sim.recursion import expectations, outcome_hit_mass
from sim.theory import expected_tokens_per_round
from sim.trace import Source
from tests.sim.toy import markov, record_of

ALIKE = ParametricAgreement(64, 2000, (0.8,), (HitCurve(0.4, 0.5),), (HitCurve(0.7, 0.5),))
TOY = record_of(*markov(3), num_prompts=12, length=40, seed=1)


def test_calibration_and_held_out_prompts_are_different_halves() -> None:
    record = read_record("library_t0")
    halves = [set(half(record).prompt_tokens) for half in (calibration_of, held_out_of)]
    assert not halves[0] & halves[1] and len(halves[0]) == len(halves[1]) == record.num_prompts / 2


# ----------------------------------------------------------------------------------------------------------- hit rates


@pytest.mark.parametrize("fan_out", [0, 1, 3])
def test_outcomes_by_prompt_add_up_to_the_curves_of_the_search(fan_out: int) -> None:
    ended, hits = outcomes_anywhere(TOY, 3, fan_out)
    mass = outcome_hit_mass(TOY, 3, fan_out, Source.HIT)[:, fan_out]
    assert hits.sum(1) / ended.sum() == pytest.approx(mass, abs=1e-12)


def test_where_rounds_are_alike_both_forms_of_the_theorem_hold() -> None:
    """All that is left are the first and the last round of a long text."""
    for fallback, entry in [(f, e) for f in (Fallback.DRAFT, Fallback.NONE) for e in worth_of_hits(ALIKE, f)]:
        assert entry.theorem_without_sources == pytest.approx(entry.speedup.value, rel=0.01), fallback
        assert entry.theorem == pytest.approx(entry.speedup.value, rel=0.04), fallback  # tokens by source are sampled


def test_with_the_draft_as_fallback_hits_are_worth_the_same_wherever_they_fall() -> None:
    found = worth_of_hits(read_record("library_t0"), Fallback.DRAFT)
    assert found[0].tokens_on_hit > found[0].tokens_on_miss + 0.2  # hits do fall at easy places
    for entry in found:
        assert entry.theorem_without_sources == pytest.approx(entry.speedup.value, rel=0.015)


# --------------------------------------------------------------------------------------------------------------- rules


def test_every_list_of_a_budget_is_tried_once() -> None:
    lists = list(all_lists(5, most=14))
    assert len(set(lists)) == len(lists) == comb(5 + outcome_rules.K, outcome_rules.K)
    assert {sum(fan_out) for fan_out in lists} == {5}
    assert max(max(fan_out) for fan_out in all_lists(5, most=3)) == 3


def test_curves_borrowed_from_oneself_are_ones_own() -> None:
    record = read_record("library_t1")
    assert borrowed_hit_mass(record, record) == pytest.approx(measured_hit_mass(record), abs=1e-12)


@pytest.mark.parametrize("temperature", [0, 1])
def test_beliefs_are_those_of_a_target_that_follows_the_draft(temperature: int) -> None:
    """By enumeration: bonus token x and draft token y are independent, x ~ q, and y ~ q or the likeliest."""
    record = record_of(*markov(3), num_prompts=2, length=10, seed=1, temperature=temperature)
    is_right, after_rejection, complete = outcome_rules._beliefs(record)
    for row, q in enumerate(record.top_q):
        drafts = q if temperature else np.eye(len(q))[0]
        assert is_right[row] == pytest.approx((drafts * q).sum())
        for fan_out in range(len(q)):
            prepared = {y: [x for x in range(len(q)) if x != y][:fan_out] for y in range(len(q))}
            hit = sum(drafts[y] * q[x] for y, x in product(range(len(q)), repeat=2) if x in prepared[y])
            assert after_rejection[row, fan_out] == pytest.approx(hit)
            assert complete[row, fan_out] == pytest.approx(q[:fan_out].sum())


def test_no_list_beats_the_ceiling_on_the_prompts_that_it_was_chosen_on() -> None:
    found = judge(0, 3)
    assert found[0].rule == outcome_rules.SAME_PROMPTS and found[0].regret.value == 0
    assert all(entry.regret.value >= 0 for entry in found if entry.fan_out is not None)
    assert all(sum(entry.fan_out) <= 3 for entry in found if entry.fan_out is not None)
    by_rule = {entry.rule: entry for entry in found}
    assert by_rule[outcome_rules.PER_ROUND].hit_rate.value < by_rule[outcome_rules.CALIBRATED].hit_rate.value


# --------------------------------------------------------------------------------------------------------------- costs


def _consumed(policy, shape=SHAPES[1]):
    (totals,) = expectations([policy], recorded_workload(ALIKE), StepCosts().system(ALIKE))
    return consumption(policy, totals, shape)


def test_autoregressive_decoding_takes_two_operations_per_parameter_and_token() -> None:
    found = _consumed(Autoregressive())
    assert found.operations_per_token == pytest.approx(2 * SHAPES[1].target_parameters)
    assert found.draft_operations == found.bytes_sent == found.stored_bytes == found.kv_bytes == 0
    assert found.bytes_read / found.num_tokens == pytest.approx(2 * SHAPES[1].target_parameters)


def test_operations_and_traffic_have_their_closed_forms() -> None:
    K, F, shape = 4, 2, SHAPES[1]
    found, per_round = _consumed(uniform_policy(K, F, Fallback.DRAFT)), expected_tokens_per_round(0.8, K)
    assert found.target_operations / found.num_tokens == pytest.approx(
        2 * shape.target_parameters * (K + 1) / per_round, rel=0.01
    )
    assert found.bytes_sent / found.num_tokens == pytest.approx((8 + K * (4 + 4 * shape.vocab_size)) / per_round, 0.01)
    assert found.stored_bytes == F * (K + 1) * K * shape.vocab_size * 4
    assert found.kv_bytes == F * (K + 1) * K * shape.draft_kv_bytes
    assert found.used_share == pytest.approx(found.num_hits * per_round / (found.num_tokens * F * (K + 1)), rel=0.01)


def test_without_branches_ssd_takes_what_sd_takes() -> None:
    none, sd = _consumed(uniform_policy(4, 0, Fallback.DRAFT)), _consumed(Speculative(4))
    assert none.draft_operations == pytest.approx(sd.draft_operations)
    assert none.used_share is None and none.draft_operations_per_hit is None


# --------------------------------------------------------------------------------------------------------------- pairs


def test_the_devices_needed_are_those_whose_share_is_below_the_gain() -> None:
    assert [devices_needed(gain) for gain in (0.8, 1.0, 1.2, 1.26, 1.6, 2.1)] == [None, None, 6, 4, 2, 1]


def test_ssd_pays_for_fewer_pairs_the_fewer_devices_the_target_has() -> None:
    rows = list(pair_diversity._by_devices(synthetic_map()))
    for first in range(0, len(rows), 5):
        not_counted, *by_devices = (row[3] for row in rows[first : first + 5])
        assert sorted(by_devices) == by_devices and by_devices[-1] <= not_counted
    assert {row[3] for row in rows if row[1] == 1} == {0.0}  # nothing is twice as fast


def test_a_link_costs_more_the_larger_the_vocabulary_and_the_slower_it_is() -> None:
    record = read_record("library_t1").select(np.arange(6))
    lost = np.array([row[4] for row in pair_diversity._by_vocabulary(record)]).reshape(len(pair_diversity.LINKS), -1)
    assert (np.diff(lost, axis=1) > 0).all() and (np.diff(lost, axis=0) > 0).all()


# ------------------------------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize("module", [hit_rates, long_lived_cache, compute_and_memory])
def test_sections_are_complete(module) -> None:
    _check(module.section())


def _check(section: Section) -> None:
    assert section.answers and all(answer.answer and answer.evidence for answer in section.answers)
    assert not any("nan" in answer.answer or "inf" in answer.answer for answer in section.answers)
    for table in section.tables:
        assert table.rows and {len(row) for row in table.rows} == {len(table.head)}, table.name
        assert not any(isinstance(cell, Estimate | np.generic) for row in table.rows for cell in row), table.name
        assert not any(isinstance(cell, float) and isnan(cell) for row in table.rows for cell in row), table.name
