"""Policy search: what takes part, what a fan-out rule promises, what cannot run, ranks, and luck."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.errors import BadInput
from sim.latency import LatencyModel
from sim.memory import Memory
from sim.placement import Placement
from sim.policy import (
    Autoregressive,
    Fallback,
    LateBuild,
    Proposer,
    Speculative,
    SpeculativeSpeculative,
    exact_fan_out,
    geometric_fan_out,
    uniform_fan_out,
)
from sim.recursion import outcome_hit_mass
from sim.replications import RELATIVE_HALF_WIDTH
from sim.search import NUM_FINALISTS, search
from sim.search_space import SearchSpace, candidates, mean_acceptance, miss_exponent
from sim.simulate import predict, predict_all
from sim.trace import Lane, Operation, Source
from tests.sim.toy import cut_at, markov, record_of, scripted_record, system_of, workload_of


def small_record(seed: int = 1, **options):
    return record_of(*markov(3), num_prompts=20, length=20, seed=seed, **options)


def names_of(predictions) -> list[str]:
    return [prediction.policy.name for prediction in predictions]


# -------------------------------------------------------------------------------------------------------------- spaces


def test_words_and_single_values_become_lists_of_their_kinds():
    space = SearchSpace(3, [6, 6, 2], "exact", ("none", "ngram"), 1, "abandon")
    assert space == SearchSpace((3,), (6, 2), ("exact",), (Fallback.NONE, Fallback.NGRAM), (1,), (LateBuild.ABANDON,))
    assert all(isinstance(fallback, Fallback) for fallback in space.fallbacks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation_lengths": ()}, "speculation_lengths: must have at least one entry"),
        ({"speculation_lengths": (1, True)}, "speculation_lengths: must be an integer >= 0, got True"),
        ({"budgets": (2.5,)}, r"budgets: must be an integer >= 0, got 2\.5"),
        ({"fan_out_rules": ("best",)}, "fan_out_rules: must be among uniform, geometric, exact, got 'best'"),
        ({"fallbacks": ("none", "hope")}, "fallbacks: must be among draft, .*, got 'hope'"),
        ({"downweights": (0.0,)}, "downweights: must be a number > 0 and <= 1"),
        ({"downweights": (float("nan"),)}, "downweights: must be a number"),
        ({"downweights": ("a",)}, "downweights: must be a number"),
        ({"on_late_builds": (None,)}, "on_late_builds: must be among wait, abandon"),
    ],
)
def test_a_broken_space_is_named_with_its_value(change, message):
    with pytest.raises(BadInput, match=message):
        SearchSpace(**({"speculation_lengths": (1,), "budgets": (2,)} | change))


def test_ar_and_every_sd_take_part_and_no_policy_twice():
    space = SearchSpace((0, 3, 1, 2), (2, 6), on_late_builds=("wait", "abandon"), fallbacks=tuple(Fallback))
    policies = candidates(space, small_record())
    assert policies[:4] == [Autoregressive(), Speculative(1), Speculative(2), Speculative(3)]
    assert len(set(policies)) == len(policies)
    assert {(p.fallback, p.on_late_build) for p in policies[4:]} == {(f, late) for f in Fallback for late in LateBuild}


@pytest.mark.parametrize("downweight", [1.0, 0.5])
def test_no_list_asks_for_more_candidates_than_were_recorded(downweight):
    """Down-weighting looks at one more."""
    record = small_record(num_candidates=3)
    space = SearchSpace((2,), (40,), fallbacks=tuple(Fallback), downweights=(downweight,))
    most = 3 if downweight == 1 else 2
    for policy in candidates(space, record)[2:]:
        assert max(policy.fan_out_after_hit + policy.fan_out_after_miss) <= most
        assert max(policy.fan_out_after_hit + policy.fan_out_after_miss) > 0


# ------------------------------------------------------------------------------------------------------- fan-out rules


def exact_of(record, K: int, budget: int, fallback: Fallback, **options) -> list[SpeculativeSpeculative]:
    space = SearchSpace((K,), (budget,), ("exact",), (fallback,), **options)
    return [policy for policy in candidates(space, record) if isinstance(policy, SpeculativeSpeculative)]


@pytest.mark.parametrize("budget", [3, 6])
def test_the_exact_list_after_a_miss_is_that_of_the_fallback(budget):
    """n-gram, 12 pairs: no uniform or geometric list of the same budget is faster; the list made from the draft model's
    curves, which is right after a hit only, loses more than a hundredth in five of them."""
    K, num_lost = 3, 0
    for seed in range(12):
        record = record_of(*markov(seed), num_prompts=40, length=40, seed=seed)
        (exact,) = exact_of(record, K, budget, Fallback.NGRAM)
        others = [
            uniform_fan_out(K, budget),
            geometric_fan_out(K, budget, mean_acceptance(record), miss_exponent(record)),
            exact_fan_out(outcome_hit_mass(record, K, budget, Source.MISS).tolist(), budget),
        ]
        policies = [exact, *(replace(exact, fan_out_after_miss=fan_out) for fan_out in others)]
        rates = [
            prediction.tokens_per_s.value
            for prediction in predict_all(policies, workload_of(record), system_of(record, draft_step_s=0.004))
        ]
        assert rates[0] >= max(rates[1:]) * (1 - 1e-9)
        num_lost += rates[3] < 0.99 * max(rates[1:3])
    assert num_lost >= 5


@pytest.mark.parametrize(("fallback", "proposer"), [(Fallback.FILLER, Proposer.FILLER), ("draft", "draft_model")])
def test_exact_lists_are_the_best_by_their_measured_curves(fallback, proposer):
    record = small_record()
    (policy,) = exact_of(record, 3, 6, Fallback(fallback))
    curves = {
        Source.HIT: outcome_hit_mass(record, 3, 6, Source.HIT).tolist(),
        Source.MISS: outcome_hit_mass(record, 3, 6, Source.MISS, proposer=Proposer(proposer)).tolist(),
    }
    for source, curve in curves.items():
        assert policy.fan_out(source) == exact_fan_out(curve, 6)


def test_without_a_fallback_every_useful_branch_is_for_the_bonus_token():
    """Tokens at rank 2 of a vocabulary of 4: three branches prepare every one, further ones are not spent."""
    (policy,) = exact_of(scripted_record(0.5, num_prompts=2, length=20, rank=2), 2, 4, Fallback.NONE)
    assert policy.fan_out_after_miss == (3,)


def test_down_weighting_has_lists_of_its_own_beside_the_plain_ones():
    """Both are ranked. Over 12 pairs either of the two is the faster one somewhere."""
    wins = {0: 0, 1: 0}
    for seed in range(12):
        record = record_of(*markov(seed), num_prompts=20, length=20, seed=seed)
        policies = exact_of(record, 3, 5, Fallback.DRAFT, downweights=(0.5,))
        (plain,) = exact_of(record, 3, 5, Fallback.DRAFT)
        curves = outcome_hit_mass(record, 3, 5, Source.HIT, downweight=0.5).tolist()
        assert policies[0] == replace(plain, downweight=0.5)
        assert policies[-1].fan_out_after_hit == exact_fan_out(curves, 5)
        if len(policies) == 2:
            rates = [p.tokens_per_s.value for p in predict_all(policies, workload_of(record), system_of(record))]
            wins[int(np.argmax(rates))] += 1
    assert min(wins.values()) > 0


def test_curves_that_the_record_does_not_hold_do_not_stop_the_search():
    """An n-gram needs the prompts: its candidates are refused with that reason, the others are ranked."""
    record = replace(small_record(), prompt_tokens=())
    result = search(SearchSpace((2,), (4,), fallbacks=("draft", "ngram")), workload_of(record), system_of(record))
    assert {policy.fallback for policy, _ in result.infeasible} == {Fallback.NGRAM}
    assert all("prompt_tokens: must be recorded" in reason for _, reason in result.infeasible)
    assert result.best("ssd").policy.fallback is Fallback.DRAFT


# --------------------------------------------------------------------------------------------------------------- ranks


def test_search_ranks_all_candidates_by_throughput():
    record = small_record()
    space = SearchSpace(speculation_lengths=(1, 2, 3), budgets=(2, 6))
    result = search(space, workload_of(record), system_of(record))
    names = names_of(result.ranked)
    assert {"AR", "SD K=1", "SD K=2", "SD K=3"} <= set(names)
    assert len(names) == len(set(names)) == len(candidates(space, record)) == result.num_policies
    rates = [prediction.tokens_per_s.value for prediction in result.ranked]
    assert rates == sorted(rates, reverse=True)
    assert result.fastest is result.ranked[0]
    assert isinstance(result.best("ssd").policy, SpeculativeSpeculative)


def test_search_prefers_ar_when_drafting_costs_too_much():
    record = small_record()
    costly = system_of(record, draft_step_s=0.05, glue_s=0.05, tree_step_s=0.05)
    result = search(SearchSpace((1, 2, 3), (2, 6)), workload_of(record), costly)
    assert isinstance(result.recommended.policy, Autoregressive)


@pytest.mark.parametrize("engine", ["exact", "vectorized"])
def test_equal_rates_go_to_the_simplest_policy(engine):
    """Nothing is ever accepted and drafting costs nothing: every policy is as fast as AR, which is recommended."""
    record = scripted_record(0.0, num_prompts=3, length=20, rank=3)
    free = system_of(record, draft_step_s=0.0, glue_s=0.0, tree_step_s=0.0)
    result = search(SearchSpace((1, 2, 3), (2, 3)), workload_of(record), free, engine=engine)
    assert result.ranked[-1].tokens_per_s.value == pytest.approx(result.ranked[0].tokens_per_s.value)
    assert isinstance(result.recommended.policy, Autoregressive)
    assert result.best("sd").policy == Speculative(1)


# ------------------------------------------------------------------------------------------------------ what cannot run


def test_a_refused_candidate_does_not_stop_the_search():
    """The exact engine does not follow abandoned builds on several draft devices; all others are ranked as without
    them."""
    record = small_record()
    system = replace(system_of(record), placement=Placement(num_draft_devices=2))
    workload, both = workload_of(record), SearchSpace((1, 2), (4,), on_late_builds=("wait", "abandon"))
    result = search(both, workload, system)
    assert {policy.on_late_build for policy, _ in result.infeasible} == {LateBuild.ABANDON}
    assert all("on_late_build: must be wait for the exact engine" in reason for _, reason in result.infeasible)
    assert result.num_policies == len(candidates(both, record))
    alone = search(replace(both, on_late_builds=("wait",)), workload, system)
    assert [p for p in names_of(result.ranked) if "abandon" not in p] == names_of(alone.ranked)


def test_one_refused_of_many_alike_is_the_only_one_left_out():
    """Verifications of four tokens were not profiled: SD and SSD of K = 3 cannot be predicted, all of K < 3 can."""
    record = small_record()
    system = system_of(record)
    key = (Lane.TARGET, Operation.VERIFY)
    verify = system.latency[key]
    narrow = {width: knots for width, knots in {1: verify.knots[1], 3: verify.knots[64]}.items()}
    system = replace(system, latency=LatencyModel({**system.latency.operations, key: replace(verify, knots=narrow)}))
    result = search(SearchSpace((1, 2, 3), (4,)), workload_of(record), system)
    assert {policy.speculation_length for policy, _ in result.infeasible} == {3}
    assert {prediction.policy.speculation_length for prediction in result.ranked} == {0, 1, 2}


@pytest.mark.parametrize("engine", ["exact", "vectorized", "des"])
def test_what_refuses_every_policy_is_raised(engine):
    record = small_record()
    with pytest.raises(BadInput, match=r"workload\.temperature: must equal the temperature of the agreement record"):
        search(SearchSpace((1,), (2,)), replace(workload_of(record), temperature=0.0), system_of(record), engine=engine)


def test_a_kind_of_which_nothing_is_left_says_why():
    record = small_record()
    space = SearchSpace((2,), (4,), on_late_builds=("abandon",))
    system = replace(system_of(record), placement=Placement(num_draft_devices=2))
    result = search(space, workload_of(record), system)
    with pytest.raises(BadInput, match=r"policies of kind ssd: none can be chosen; SSD K=2 .*: on_late_build: must be"):
        result.best("ssd")
    with pytest.raises(BadInput, match="kind: must be one of ar, sd, ssd, got 'eagle'"):
        result.best("eagle")
    only_ar = search(SearchSpace((0,), (4,)), workload_of(record), system)
    with pytest.raises(BadInput, match="policies of kind sd: none can be chosen; the space has none"):
        only_ar.best("sd")


def test_devices_without_room_for_ar_are_bad_input():
    record = small_record()
    system = replace(system_of(record), memory=Memory(target_bytes=1.0, target_kv_bytes_per_token=1.0))
    with pytest.raises(BadInput, match="memory: no policy fits; AR"):
        search(SearchSpace((1,), (2,)), workload_of(record), system)


# ---------------------------------------------------------------------------------------------------------------- luck


@pytest.fixture(scope="module")
def by_samples():
    """A search whose candidates vary much and differ little."""
    record = record_of(*markov(3), num_prompts=3, length=16, seed=1)
    system = system_of(record, residuals=(0.3, 1.0, 1.7))
    space, workload = SearchSpace((1, 2, 3), (2, 3, 4)), workload_of(record)
    result = search(space, workload, system, engine="vectorized", seed=5)
    first = {
        policy: predict(policy, workload, system, engine="vectorized", seed=5)
        for policy in candidates(space, system.agreement)
    }
    return result, first


def test_reported_gains_are_those_of_the_second_run(by_samples):
    """The finalists' figures are others than those that chose them, and twice as sure."""
    result, first = by_samples
    best, ar = result.fastest, result.best("ar")
    for prediction in (best, result.best("sd"), ar):
        before = first[prediction.policy]
        assert prediction.tokens_per_s.value != before.tokens_per_s.value
        assert prediction.replications.relative_half_width <= RELATIVE_HALF_WIDTH / 2
    gain, lucky_gain = (
        fast.tokens_per_s.value / slow.tokens_per_s.value
        for fast, slow in ((best, ar), (first[best.policy], first[ar.policy]))
    )
    assert gain != pytest.approx(lucky_gain, rel=1e-4)
    again = [p for p in result.ranked if p.tokens_per_s.value != first[p.policy].tokens_per_s.value]
    fastest = sorted(first.values(), key=lambda p: -p.tokens_per_s.value)[:NUM_FINALISTS]
    kinds = [result.best(kind).policy for kind in ("ar", "sd", "ssd")]
    assert {p.policy for p in again} == {p.policy for p in fastest} | set(kinds)


def test_nobody_unconfirmed_is_recommended(by_samples):
    result, first = by_samples
    rates = [p.tokens_per_s.value for p in result.ranked]
    assert rates[0] != first[result.ranked[0].policy].tokens_per_s.value
    assert len(result.ranked) == len(first) == len({p.policy for p in result.ranked})
    capped = [min(rate, rates[0]) for rate in rates]
    assert capped == sorted(capped, reverse=True)


def test_a_sampled_search_is_the_same_again():
    record = cut_at(record_of(*markov(3), num_prompts=3, length=8, seed=1), 3)
    system = system_of(record, residuals=(0.9, 1.1))
    runs = [
        search(SearchSpace((1,), (2,)), workload_of(record), system, engine="vectorized", seed=seed)
        for seed in (1, 1, 2)
    ]
    rates = [[p.tokens_per_s.value for p in run.ranked] for run in runs]
    assert rates[0] == rates[1] != rates[2]
