"""Policies: their rules, and the fan-out lists."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.policy import (
    Autoregressive,
    Fallback,
    Speculative,
    SpeculativeSpeculative,
    exact_fan_out,
    geometric_fan_out,
    policy_from_dict,
    uniform_fan_out,
)
from sim.recursion import outcome_hit_mass
from sim.search import SearchSpace, candidates, search
from sim.trace import Source
from tests.sim.toy import markov, record_of, scripted_record, system_of, workload_of


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


@given(K=st.integers(1, 12), budget=st.integers(0, 200), a=st.floats(0, 1), r=st.floats(0.05, 2))
def test_fan_out_lists_spend_exactly_the_budget(K, budget, a, r):
    for fan_out in (uniform_fan_out(K, budget), geometric_fan_out(K, budget, a, r)):
        assert len(fan_out) == K + 1 and sum(fan_out) == budget and min(fan_out) >= 0


@given(K=st.integers(1, 12), budget=st.integers(1, 200), a=st.floats(0.05, 0.95), r=st.floats(0.05, 2))
def test_geometric_lists_fall_up_to_the_last_rejection(K, budget, a, r):
    fan_out = geometric_fan_out(K, budget, a, r)
    assert all(fan_out[k] >= fan_out[k + 1] for k in range(K - 1))


def test_exact_fan_out_is_the_best_of_all_lists():
    """Against brute force over every list within the budget, on concave curves."""
    rng = np.random.default_rng(7)
    for budget in (1, 3, 5):
        gains = np.sort(rng.random((3, 6)), axis=1)[:, ::-1]
        curves = np.concatenate([np.zeros((3, 1)), gains.cumsum(1)], axis=1)
        best = max(
            sum(curves[k][f] for k, f in enumerate(fan_out))
            for fan_out in product(range(budget + 1), repeat=3)
            if sum(fan_out) <= budget
        )
        chosen = exact_fan_out(curves.tolist(), budget)
        assert sum(chosen) <= budget
        assert sum(curves[k][f] for k, f in enumerate(chosen)) == pytest.approx(best)


def test_hit_mass_is_a_law():
    """Non-decreasing in the fan-out, zero without branches, and everything once the whole vocabulary is prepared."""
    record = record_of(*markov(3), num_prompts=50, length=20, seed=1)
    mass = outcome_hit_mass(record, 3, record.num_candidates, Source.HIT)
    assert np.allclose(mass[:, 0], 0)
    assert (np.diff(mass, axis=1) >= -1e-12).all()
    assert mass[:, -1].sum() == pytest.approx(1)


def test_search_always_holds_ar_and_every_sd_and_ranks_by_throughput():
    record = record_of(*markov(3), num_prompts=20, length=20, seed=1)
    space = SearchSpace(speculation_lengths=(1, 2, 3), budgets=(2, 6))
    result = search(space, workload_of(record), system_of(record))
    names = [prediction.policy.name for prediction in result.ranked]
    assert {"AR", "SD K=1", "SD K=2", "SD K=3"} <= set(names)
    assert len(names) == len(set(names)) == len(candidates(space, record))
    rates = [prediction.tokens_per_s.value for prediction in result.ranked]
    assert rates == sorted(rates, reverse=True)
    assert result.recommended is result.ranked[0]
    assert isinstance(result.best("ssd").policy, SpeculativeSpeculative)


def test_search_prefers_ar_when_drafting_costs_too_much():
    record = record_of(*markov(3), num_prompts=20, length=20, seed=1)
    costly = system_of(record, draft_step_s=0.05, glue_s=0.05, tree_step_s=0.05)
    result = search(SearchSpace((1, 2, 3), (2, 6)), workload_of(record), costly)
    assert isinstance(result.recommended.policy, Autoregressive)


def test_equal_rates_go_to_the_simplest_policy():
    """Nothing is ever accepted and drafting costs nothing: every policy is as fast as AR, which is recommended."""
    record = scripted_record(0.0, num_prompts=3, length=20, rank=3)
    free = system_of(record, draft_step_s=0.0, glue_s=0.0, tree_step_s=0.0)
    result = search(SearchSpace((1, 2, 3), (2, 3)), workload_of(record), free)
    assert result.ranked[-1].tokens_per_s.value == pytest.approx(result.ranked[0].tokens_per_s.value)
    assert isinstance(result.recommended.policy, Autoregressive)
