"""Policies: their rules, and the fan-out lists."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.policy import (
    Autoregressive,
    Fallback,
    PolicyTable,
    Speculative,
    SpeculativeSpeculative,
    exact_fan_out,
    geometric_fan_out,
    policy_from_dict,
    uniform_fan_out,
)
from sim.recursion import outcome_hit_mass
from sim.trace import Source
from tests.sim.toy import markov, record_of


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Speculative(-1), "speculation_length: must be an integer >= 0, got -1"),
        (lambda: Speculative(True), "speculation_length: must be an integer"),
        (lambda: SpeculativeSpeculative(0, (1,), (1,)), "speculation_length: must be an integer >= 1"),
        (lambda: SpeculativeSpeculative(2, (1, 1), (1, 1, 1)), "fan_out_after_hit: must have 3 entries"),
        (lambda: SpeculativeSpeculative(2, (1, 1, 1), (1, 1, 1), Fallback.NONE), "fan_out_after_miss: must have 1 ent"),
        (lambda: SpeculativeSpeculative(1, (1, -2), (1, 1)), "fan_out_after_hit: must be an integer >= 0, got -2"),
        (lambda: policy_from_dict({"kind": "sdd"}), "policy.kind: must be one of ar, sd, ssd, got 'sdd'"),
        (lambda: policy_from_dict({"kind": "sd", "k": 3}), "policy of kind sd"),
        (lambda: SpeculativeSpeculative(1, (1, 1), (1, 1), "beam"), "fallback: must be one of draft, draft_missing,"),
    ],
)
def test_a_broken_rule_is_named_with_its_value(build, message):
    with pytest.raises(BadInput, match=message):
        build()


@pytest.mark.parametrize(
    "policy",
    [
        Autoregressive(),
        Speculative(4),
        SpeculativeSpeculative(2, (3, 2, 1), (1, 1, 1)),
        SpeculativeSpeculative(2, (3, 2, 1), (4,), Fallback.NONE),
    ],
)
def test_policies_survive_their_dictionary(policy):
    assert policy_from_dict(policy.to_dict()) == policy


def test_after_a_miss_the_fallback_decides_what_is_verified():
    policy = SpeculativeSpeculative(2, (3, 2, 1), (4,), Fallback.NONE)
    assert [policy.num_drafted(source) for source in (Source.FIRST, Source.HIT, Source.MISS)] == [0, 2, 0]
    assert policy.fan_out(Source.FIRST) == (4,)


def ssd(K: int, fallback: Fallback, downweight: float = 1.0) -> SpeculativeSpeculative:
    entries = 0 if fallback is Fallback.NONE else K
    return SpeculativeSpeculative(K, (2,) * (K + 1), (1,) * (entries + 1), fallback, downweight)


@pytest.mark.parametrize(
    ("policy", "after_hit", "after_miss"),
    [
        (Autoregressive(), False, False),
        (Speculative(0), False, False),
        (Speculative(2), True, True),
        (ssd(2, Fallback.DRAFT), False, True),
        (ssd(2, Fallback.DRAFT_MISSING), False, True),
        (ssd(2, Fallback.NGRAM), False, False),
        (ssd(2, Fallback.NONE), False, False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_for_which_speculations_the_target_waits(policy, after_hit, after_miss):
    assert policy.waits_for_draft(Source.HIT) == after_hit
    for source in (Source.MISS, Source.FIRST, Source.REDRAFTED, Source.SYNCHRONOUS):
        assert policy.waits_for_draft(source) == after_miss


def test_a_drafting_says_what_is_built_and_what_travels():
    drafting = SpeculativeSpeculative(2, (3, 2, 1), (4, 0, 1), Fallback.FILLER).drafting(Source.HIT)
    assert [drafting.num_branches(num_drafted) for num_drafted in range(3)] == [3, 5, 6]
    assert Speculative(2).drafting(Source.SYNCHRONOUS).num_branches(2) == 0
    assert drafting.is_sampled(0.7) and not drafting.is_sampled(0.0)
    for fallback, travels in ((Fallback.DRAFT, True), (Fallback.FILLER, False), (Fallback.NGRAM, False)):
        assert ssd(2, fallback).drafting(Source.MISS).is_sampled(1.0) == travels


def test_a_table_refuses_policies_that_have_no_law_after_one_another():
    """A speculation in hand was drawn with the C of the policy before; AR and SD have none."""
    plain, weighted = ssd(2, Fallback.DRAFT), ssd(2, Fallback.NONE, 0.5)
    with pytest.raises(
        BadInput, match=r"policy table: must have downweight 1 where it has several SSD entries, got \[1\.0, 0\.5"
    ):
        PolicyTable(((1, plain), (4, weighted)))
    for entries in (((1, weighted), (4, Autoregressive())), ((1, Speculative(2)), (3, plain), (4, Autoregressive()))):
        assert PolicyTable(entries).entries == entries


@settings(derandomize=True, deadline=None)
@given(K=st.integers(1, 12), budget=st.integers(0, 200), a=st.floats(0, 1), r=st.floats(0.05, 2))
def test_fan_out_lists_spend_exactly_the_budget(K, budget, a, r):
    for fan_out in (uniform_fan_out(K, budget), geometric_fan_out(K, budget, a, r)):
        assert len(fan_out) == K + 1 and sum(fan_out) == budget and min(fan_out) >= 0


@settings(derandomize=True, deadline=None)
@given(K=st.integers(1, 12), budget=st.integers(1, 200), a=st.floats(0.05, 0.95), r=st.floats(0.05, 2))
def test_geometric_lists_fall_up_to_the_last_rejection(K, budget, a, r):
    fan_out = geometric_fan_out(K, budget, a, r)
    assert all(fan_out[k] >= fan_out[k + 1] for k in range(K - 1))


@pytest.mark.parametrize("concave", [True, False])
def test_exact_fan_out_is_the_best_of_all_lists(concave):
    """Against brute force over every list within the budget; some gains are 0."""
    rng = np.random.default_rng(7)
    for budget in (0, 1, 3, 5) * 5:
        gains = rng.random((3, 6)) * (rng.random((3, 6)) < 0.6)
        gains = np.sort(gains, axis=1)[:, ::-1] if concave else gains
        curves = np.concatenate([np.zeros((3, 1)), gains.cumsum(1)], axis=1)
        totals = {
            fan_out: sum(curves[k][f] for k, f in enumerate(fan_out))
            for fan_out in product(range(budget + 1), repeat=3)
            if sum(fan_out) <= budget
        }
        best = max(totals.values())
        chosen = exact_fan_out(curves.tolist(), budget)
        assert totals[chosen] == pytest.approx(best)
        assert sum(chosen) == min(sum(fan_out) for fan_out, total in totals.items() if total > best - 1e-9)


def test_exact_fan_out_looks_beyond_a_branch_that_gains_nothing():
    """Taken one by one, branches would all go to k = 1."""
    assert exact_fan_out([[0.0, 0.0, 0.9], [0.0, 0.1, 0.2]], 2) == (2, 0)
    assert exact_fan_out([[0.0, 0.3], [0.0, 0.0]], 9) == (1, 0), "what gains nothing is not spent, however much is left"


def test_hit_mass_is_a_law():
    """Non-decreasing in the fan-out, zero without branches, and everything once the whole vocabulary is prepared."""
    record = record_of(*markov(3), num_prompts=50, length=20, seed=1)
    mass = outcome_hit_mass(record, 3, record.num_candidates, Source.HIT)
    assert np.allclose(mass[:, 0], 0)
    assert (np.diff(mass, axis=1) >= -1e-12).all()
    assert mass[:, -1].sum() == pytest.approx(1)
