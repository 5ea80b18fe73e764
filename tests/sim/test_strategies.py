"""Rival strategies: degenerate cases against the policies that every engine knows, engines against each other."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sim.agreement import AgreementRecord
from sim.batch_chain import steady_state
from sim.errors import BadInput
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.simulate import predict
from sim.strategies.all_accepted import all_accepted_only
from sim.strategies.block_verification import BlockVerification, PreparedBlocks
from sim.strategies.drafter import DRAFT_MODEL, Drafter, feature_drafter, one_pass_drafter
from sim.strategies.long_run import LongRun, long_run
from sim.strategies.pearl import Pearl
from sim.strategies.prepared_tree import PreparedTree, prepared_tree
from sim.strategies.prompt_lookup import PromptLookup
from sim.strategies.rank_law import rank_law
from sim.strategies.replayed import replayed
from sim.strategies.speculative_tree import SpeculativeTree
from sim.strategies.strategy import Strategy
from sim.strategies.timeline import played
from sim.strategies.token_tree import TokenTree
from sim.system import System
from sim.trace import Source
from sim.workload import Workload
from tests.sim.strategies import batched
from tests.sim.toy import cut_at, markov, record_of, system_of, workload_of

CHAIN = TokenTree.chain(4)
TREE = TokenTree(((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)))
LISTS = (2, 1, 0, 1, 3)


def parametric(*, acceptance: float = 0.7, hits_at_one: float = 0.6, num_texts: int = 4) -> ParametricAgreement:
    curves = (HitCurve(1 - hits_at_one, 0.5),)
    return ParametricAgreement(
        16, 96, (acceptance,), curves, (HitCurve(min(1.0, 1.4 - hits_at_one), 0.5),), 0.0, num_texts
    )


def spread_system(agreement, **more) -> System:
    """Operations that vary, grow with their tokens and rows, and slow each other."""
    times = {"verify_per_token_s": 3e-4, "host_s": 5e-4, "residuals": (0.8, 1.0, 1.2), "contention": 1.1} | more
    return batched(system_of(agreement, **times), per_row_s=4e-4)


def workload(agreement: ParametricAgreement, batch_size: int = 1) -> Workload:
    return Workload("parametric", ((0,),), agreement.new_tokens, batch_size=batch_size)


def in_long_run(strategy: Strategy, system: System, batch_size: int = 1) -> LongRun:
    return long_run(strategy, workload(system.agreement, batch_size), system)


def policy_in_long_run(policy, system: System, batch_size: int = 1) -> float:
    found = steady_state(policy, workload(system.agreement, batch_size), system)
    return float(found.num_tokens[0] / found.seconds[0])


def greedy_record(stop: int | None = 3) -> AgreementRecord:
    record = record_of(*markov(3), num_prompts=8, length=40, seed=1, temperature=0.0)
    return record if stop is None else cut_at(record, stop)


def sampled_record() -> AgreementRecord:
    return record_of(*markov(3), num_prompts=8, length=40, seed=1)


# --------------------------------------------------------------------------------- trees and drafters, the known cases


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("K", [0, 1, 4])
def test_a_chain_is_sd_and_an_empty_tree_ar(K: int, batch_size: int) -> None:
    system = spread_system(parametric(num_texts=8))
    found = in_long_run(SpeculativeTree(TokenTree.chain(K)), system, batch_size)
    assert found.tokens_per_s == pytest.approx(policy_in_long_run(Speculative(K), system, batch_size), rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("fallback", [Fallback.DRAFT_MISSING, Fallback.NONE])
def test_prepared_chains_are_ssd(fallback: Fallback, batch_size: int) -> None:
    system = spread_system(parametric(num_texts=8))
    after_miss = (3,) if fallback is Fallback.NONE else (1, 2, 1, 1, 0)
    found = in_long_run(PreparedTree(CHAIN, LISTS, after_miss, fallback), system, batch_size)
    policy = SpeculativeSpeculative(4, LISTS, after_miss, fallback)
    assert found.tokens_per_s == pytest.approx(policy_in_long_run(policy, system, batch_size), rel=2e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_certain_times_give_ssd_to_rounding(batch_size: int) -> None:
    system = spread_system(parametric(), residuals=(1.0,), tree_step_s=0.004)
    found = in_long_run(PreparedTree(CHAIN, LISTS, LISTS), system, batch_size)
    policy = SpeculativeSpeculative(4, LISTS, LISTS, Fallback.DRAFT_MISSING)
    assert found.tokens_per_s == pytest.approx(policy_in_long_run(policy, system, batch_size), rel=1e-12)


@pytest.mark.parametrize("K", [0, 1, 4])
def test_on_a_greedy_record_a_chain_is_sd_place_by_place(K: int) -> None:
    record = greedy_record()
    system, rules = spread_system(record), workload_of(record)
    known = predict(Speculative(K), rules, system).expectation
    found = replayed(SpeculativeTree(TokenTree.chain(K)), rules, system)
    np.testing.assert_allclose(found.num_rounds, known.num_rounds, rtol=1e-12)
    np.testing.assert_allclose(found.seconds, known.seconds, rtol=1e-12)


@pytest.mark.parametrize("fallback", [Fallback.DRAFT_MISSING, Fallback.NONE])
def test_on_a_greedy_record_prepared_chains_are_ssd_place_by_place(fallback: Fallback) -> None:
    record = greedy_record()
    system, rules = spread_system(record), workload_of(record)
    after_miss = (2,) if fallback is Fallback.NONE else LISTS
    known = predict(SpeculativeSpeculative(4, LISTS, after_miss, fallback), rules, system).expectation
    found = replayed(PreparedTree(CHAIN, LISTS, after_miss, fallback), rules, system)
    for name in ("num_rounds", "num_hits", "num_lookups"):
        np.testing.assert_allclose(getattr(found, name), getattr(known, name), atol=1e-9)
    np.testing.assert_allclose(found.seconds, known.seconds, rtol=1e-4)


def test_finite_texts_of_summary_numbers_are_those_of_predict() -> None:
    agreement = parametric(num_texts=1)
    system = spread_system(agreement)
    known = predict(Speculative(4), workload(agreement), system).expectation
    found = replayed(SpeculativeTree(CHAIN), workload(agreement), system)
    assert found.num_rounds == pytest.approx(known.num_rounds)
    assert found.seconds == pytest.approx(known.seconds)


def test_one_pass_that_takes_as_long_as_k_steps_is_sd() -> None:
    system = system_of(parametric())
    slow = one_pass_drafter(1.0, pass_ratio=4)
    assert in_long_run(SpeculativeTree(CHAIN, slow), system).tokens_per_s == pytest.approx(
        in_long_run(SpeculativeTree(CHAIN), system).tokens_per_s
    )
    fast = in_long_run(SpeculativeTree(CHAIN, one_pass_drafter(1.0)), system)
    assert fast.round_s == pytest.approx(0.010 + 0.002)


@pytest.mark.parametrize("strategy", [SpeculativeTree(CHAIN), SpeculativeTree(TREE), PreparedTree(CHAIN, LISTS, LISTS)])
def test_a_feature_drafter_without_decay_is_the_draft_model(strategy) -> None:
    system = spread_system(parametric())
    same = in_long_run(replace(strategy, drafter=feature_drafter(1.0)), system)
    assert same.tokens_per_s == pytest.approx(in_long_run(strategy, system).tokens_per_s, rel=1e-12)


def test_stale_features_cost_ssd_more_than_sd() -> None:
    """Under SSD the head starts k + 1 steps after the last true feature, so that a decay hits it harder."""
    system = spread_system(parametric())
    head = feature_drafter(0.9)
    kept = [
        in_long_run(replace(strategy, drafter=head), system).tokens_per_round
        / in_long_run(strategy, system).tokens_per_round
        for strategy in (SpeculativeTree(CHAIN), PreparedTree(CHAIN, LISTS, LISTS))
    ]
    assert kept[1] < kept[0] < 1


def test_acceptance_under_a_decay_by_hand() -> None:
    """K = 2, a = .7, decay .5: E = 1 + .7 (1 + .35); after a hit that followed one accepted token the first draft token
    stands two steps from true features."""
    agreement = parametric(acceptance=0.7)
    found = in_long_run(SpeculativeTree(TokenTree.chain(2), feature_drafter(0.5)), system_of(agreement))
    assert found.tokens_per_round == pytest.approx(1 + 0.7 * (1 + 0.35))
    states = PreparedTree(TokenTree.chain(2), (1, 1, 1), (1, 1, 1), drafter=feature_drafter(0.5)).states(agreement)
    assert [state.chance_of(1) for state in states] == pytest.approx([0.3, 1 - 0.35, 1 - 0.175, 1 - 0.0875])


# ----------------------------------------------------------------------------------------------------------- trees


def all_trees(num_nodes: int, depth: int) -> set[tuple]:
    """Every tree of so many nodes, grown node by node."""
    trees = {()}
    for _ in range(num_nodes):
        grown = set()
        for paths in trees:
            for parent in ((), *paths):
                width = sum(path[:-1] == parent for path in paths)
                if len(parent) < depth:
                    grown.add(tuple(sorted((*paths, (*parent, width)))))
        trees = grown
    return trees


def accepted_on_average(tree: TokenTree, chance) -> float:
    return sum(np.prod([chance(rank, depth) for depth, rank in enumerate(path)]) for path in tree.paths)


@pytest.mark.parametrize("acceptance", [0.35, 0.8])
def test_the_likeliest_tree_accepts_most_of_all_trees(acceptance: float) -> None:
    law = rank_law(parametric(acceptance=acceptance), Source.SYNCHRONOUS)

    def chance(rank: int, depth: int) -> float:
        return float(law.within(rank, rank + 1, depth))

    best = max(accepted_on_average(TokenTree(paths), chance) for paths in all_trees(5, 3))
    assert accepted_on_average(TokenTree.likeliest(chance, 5, 3), chance) == pytest.approx(best)


def test_tokens_of_a_tree_are_the_probabilities_of_its_paths() -> None:
    agreement = parametric()
    law = rank_law(agreement, Source.SYNCHRONOUS)
    found = in_long_run(SpeculativeTree(TREE), system_of(agreement)).tokens_per_round
    assert found == pytest.approx(1 + accepted_on_average(TREE, lambda rank, depth: law.within(rank, rank + 1, depth)))


@pytest.mark.parametrize("paths", [((1,),), ((0, 0),), ((0,), (0, 1))])
def test_a_tree_with_gaps_is_refused(paths) -> None:
    with pytest.raises(BadInput, match="token tree"):
        TokenTree(paths)


def walked(tree: TokenTree, fan_out: tuple[int, ...], ranks: list[int], start: int) -> tuple[int, bool]:
    """Tokens that a round emits and whether its outcome was prepared, by the ranks of a text."""
    path = ()
    while start + len(path) < len(ranks) and ranks[start + len(path)] < tree.num_children(path):
        path = (*path, ranks[start + len(path)])
    after = start + len(path)
    place = ranks[after] - tree.num_children(path) if after < len(ranks) else np.inf
    return len(path) + 1, place < fan_out[tree.nodes.index(path)]


def test_prepared_trees_on_a_greedy_record_are_those_of_a_walk() -> None:
    record = greedy_record(stop=None)
    fan_out = (1, 2, 0, 1, 3, 1, 2)
    found = replayed(PreparedTree(TREE, fan_out, fan_out), workload_of(record), system_of(record))
    rounds, hits = np.zeros(record.num_prompts), np.zeros(record.num_prompts)
    for prompt in range(record.num_prompts):
        ranks = record.rank[record.prompt == prompt].tolist()
        start, cap = 1, len(ranks)
        while start < cap:
            tree = TREE.cut(cap - start - 1)
            num_tokens, hit = walked(tree, fan_out, ranks, start)
            rounds[prompt] += 1
            start += num_tokens
            hits[prompt] += hit and start < cap
    np.testing.assert_allclose(found.num_rounds, rounds)
    np.testing.assert_allclose(found.num_hits.sum(0), hits)


# ------------------------------------------------------------------------------------------------- PEARL, all accepted


def test_pearl_makes_the_rounds_of_ssd_that_prepares_all_accepted() -> None:
    record = greedy_record()
    policy = SpeculativeSpeculative(4, (0, 0, 0, 0, 1), (1,), Fallback.NONE)
    known = predict(policy, workload_of(record), system_of(record)).expectation
    found = replayed(Pearl(5), workload_of(record), system_of(record))
    for name in ("num_rounds", "num_hits", "num_lookups"):
        np.testing.assert_allclose(getattr(found, name), getattr(known, name), atol=1e-9)


def test_pearl_takes_the_time_of_that_ssd_where_a_glue_pass_is_a_step() -> None:
    """The draft's own first token is the bonus token prepared, so the hit rate of fan-out 1 is the acceptance."""
    curve = (HitCurve(0.3, 0.5),)
    system = system_of(
        ParametricAgreement(16, 96, (0.7,), curve, curve), draft_step_s=0.0025, tree_step_s=0.0025, glue_s=0.0025
    )
    policy = SpeculativeSpeculative(4, (0, 0, 0, 0, 1), (1,), Fallback.NONE)
    assert in_long_run(Pearl(5), system).tokens_per_s == pytest.approx(policy_in_long_run(policy, system))


def test_pearl_that_accepts_everything_verifies_a_window_at_a_time() -> None:
    found = in_long_run(Pearl(4), system_of(parametric(acceptance=1.0)))
    assert found.shares["post-verify"] == pytest.approx(1)
    assert found.tokens_per_s == pytest.approx(4 / 0.010)


def test_all_accepted_only_without_hits_is_sd() -> None:
    """Beside its verification it builds for nothing, which costs nothing where the build ends in time."""
    agreement = replace(parametric(), after_hit=(HitCurve(1.0, 0.0),), after_miss=(HitCurve(1.0, 0.0),))
    system = system_of(agreement, verify_s=0.020)
    assert policy_in_long_run(all_accepted_only(4), system) == pytest.approx(policy_in_long_run(Speculative(4), system))


# ------------------------------------------------------------------------------------- look-up and block verification


def test_lookup_without_matches_is_ar_and_with_sure_ones_sd_that_drafts_for_nothing() -> None:
    system = spread_system(parametric(acceptance=0.6))
    ar = policy_in_long_run(Autoregressive(), system)
    assert in_long_run(PromptLookup(4, match=0.0, acceptance=0.6), system).tokens_per_s == pytest.approx(ar)
    free = in_long_run(SpeculativeTree(CHAIN, Drafter("free", pass_ratio=0.0)), system)
    assert in_long_run(PromptLookup(4, match=1.0, acceptance=0.6), system).tokens_per_s == pytest.approx(
        free.tokens_per_s
    )


def test_block_verification_of_one_token_is_token_verification() -> None:
    record = sampled_record()
    known = predict(Speculative(1), workload_of(record), system_of(record)).expectation
    found = replayed(BlockVerification(1), workload_of(record), system_of(record))
    np.testing.assert_allclose(found.num_rounds, known.num_rounds)
    np.testing.assert_allclose(found.seconds, known.seconds)


def test_block_verification_never_accepts_less_than_token_verification() -> None:
    record = sampled_record()
    survival = BlockVerification(5).survival(record)
    tokenwise = np.ones_like(survival[0])
    padded = np.pad(record.acceptance.reshape(8, 40), ((0, 0), (0, 5)))
    for i in range(1, 6):
        tokenwise = tokenwise * padded[:, i - 1 : i - 1 + 40]
        assert (survival[i] >= tokenwise - 1e-12).all()
    assert survival[5].sum() > 1.02 * tokenwise.sum()


def test_greedy_block_verification_is_sd() -> None:
    record = greedy_record()
    known = predict(Speculative(4), workload_of(record), spread_system(record)).expectation
    found = replayed(BlockVerification(4), workload_of(record), spread_system(record))
    np.testing.assert_allclose(found.seconds, known.seconds, rtol=1e-12)


def test_greedy_prepared_blocks_are_ssd_that_wastes_a_branch_on_the_rejected_token() -> None:
    record = greedy_record()
    system, rules = system_of(record, tree_step_s=0.0005), workload_of(record)
    known = predict(SpeculativeSpeculative(4, LISTS, LISTS), rules, system).expectation
    wasteful = (*(num + 1 for num in LISTS[:-1]), LISTS[-1])
    found = replayed(PreparedBlocks(wasteful), rules, system)
    for name in ("num_rounds", "num_hits", "num_lookups", "seconds"):
        np.testing.assert_allclose(getattr(found, name), getattr(known, name), atol=1e-9)


def test_prepared_blocks_make_the_rounds_of_blocks_and_hit_more_with_more_branches() -> None:
    record = sampled_record()
    system, rules = system_of(record), workload_of(record)
    rounds = replayed(BlockVerification(4), rules, system).num_rounds
    found = [replayed(PreparedBlocks((num,) * 5), rules, system) for num in (0, 1, 3, 6)]
    for each in found:
        np.testing.assert_allclose(each.num_rounds, rounds)
    hits = [each.num_hits.sum() / each.num_lookups.sum() for each in found]
    assert hits[0] == 0 and hits[-1] == pytest.approx(1)
    assert all(more > fewer for fewer, more in pairwise(hits))


# ------------------------------------------------------------------------------------------------ engines, refusals


@pytest.mark.parametrize(
    ("strategy", "batch_size"),
    [
        (SpeculativeTree(TREE), 1),
        (SpeculativeTree(CHAIN, one_pass_drafter(0.85)), 3),
        (PreparedTree(TREE, (2, 1, 0, 0, 1, 0, 1), (3,), Fallback.NONE), 1),
        (PreparedTree(CHAIN, LISTS, LISTS, drafter=feature_drafter(0.9)), 3),
        (Pearl(5), 2),
        (PromptLookup(4, match=0.4, acceptance=0.6), 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_long_run_is_that_of_simulated_clocks(strategy: Strategy, batch_size: int) -> None:
    """Within four standard errors and 2e-4 for first rounds: a false alarm in 16 runs of 1000 tests at t = 4."""
    system = spread_system(parametric(), tree_step_s=0.003)
    rate = played(strategy, workload(system.agreement, batch_size), system, seed=7, num_rounds=120)
    known = in_long_run(strategy, system, batch_size).tokens_per_s
    assert abs(rate.tokens_per_s - known) < 4 * rate.standard_error + 2e-4 * known


def test_without_overlap_a_build_stands_before_the_verification() -> None:
    agreement = parametric()
    apart = system_of(agreement, verify_s=0.020)
    together = replace(apart, overlaps=False)
    strategy = PreparedTree(CHAIN, LISTS, LISTS)
    built = in_long_run(strategy, together).round_s - in_long_run(strategy, apart).round_s
    assert built == pytest.approx(0.002 + 4 * 0.002)


def test_more_draft_devices_share_the_branches() -> None:
    agreement = parametric()
    one = system_of(agreement, tree_step_s=0.004)
    tables = dict(one.latency.operations)
    for key, table in tables.items():
        if key[1].value == "tree_step":
            knots = {width: ((0, 0.001 * width), (4096, 0.001 * width)) for width in (1, 64)}
            tables[key] = replace(table, knots=knots)
    one = replace(one, latency=replace(one.latency, operations=tables))
    strategy = PreparedTree(CHAIN, LISTS, LISTS)
    rates = [
        in_long_run(strategy, replace(one, placement=replace(one.placement, num_draft_devices=n))).tokens_per_s
        for n in (1, 2, 4)
    ]
    assert all(more > fewer for fewer, more in pairwise(rates))


def test_twice_the_time_is_half_the_rate() -> None:
    agreement = parametric()
    slow = system_of(agreement, verify_s=0.020, draft_step_s=0.004, glue_s=0.004, tree_step_s=0.004)
    for strategy in (SpeculativeTree(TREE), PreparedTree(CHAIN, LISTS, LISTS), Pearl(4)):
        twice = in_long_run(strategy, slow).tokens_per_s
        assert in_long_run(strategy, system_of(agreement)).tokens_per_s == pytest.approx(2 * twice)


def test_the_fan_out_within_a_budget_is_the_best_one() -> None:
    agreement = parametric()
    best = prepared_tree(TREE, 6, agreement)
    system = system_of(agreement, verify_s=0.050)
    rate = in_long_run(best, system).tokens_per_s
    for other in ((6, 0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1, 0), (0, 0, 0, 0, 0, 0, 6)):
        assert in_long_run(PreparedTree(TREE, other, other), system).tokens_per_s <= rate + 1e-9
    assert sum(best.fan_out_after_hit) <= 6


def test_what_an_agreement_does_not_tell_is_refused() -> None:
    record, numbers = greedy_record(), parametric()
    with pytest.raises(BadInput, match="block verification"):
        in_long_run(BlockVerification(2), system_of(numbers))
    with pytest.raises(BadInput, match="drafter"):
        replayed(SpeculativeTree(CHAIN, one_pass_drafter(0.9)), workload_of(record), system_of(record))
    with pytest.raises(BadInput, match="agreement"):
        long_run(SpeculativeTree(CHAIN), workload_of(record), system_of(record))
    with pytest.raises(BadInput, match="batch_size"):
        replayed(Pearl(3), workload(numbers, 2), system_of(numbers))
    with pytest.raises(BadInput, match="fan-out"):
        PreparedTree(TREE, LISTS, LISTS)
    with pytest.raises(BadInput, match="fallback"):
        PreparedTree(CHAIN, LISTS, LISTS, Fallback.NGRAM)
    with pytest.raises(BadInput, match="fan-out"):
        PreparedBlocks((1,))
    with pytest.raises(BadInput, match="one pass"):
        Drafter("both", one_pass=True, needs_features=True)
    assert DRAFT_MODEL.acceptance(0.7, 5, stale=9) == 0.7
