"""All engines: degenerate limits, closed forms, agreement with each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim import timeline, vectorized
from sim.errors import BadInput
from sim.latency import LatencyModel
from sim.policy import Autoregressive, Fallback, LateBuild, Speculative, SpeculativeSpeculative
from sim.recursion import expectations
from sim.simulate import predict, predicted_speedup, simulate
from sim.theory import expected_tokens_per_round, sd_speedup, ssd_speedup
from sim.trace import Lane, Operation
from tests.sim.strategies import batched, bent, policies, seen_in_runs, systems
from tests.sim.toy import markov, record_of, scripted_record, system_of, workload_of

ENGINES = ["exact", "vectorized", "des"]


def ssd(K: int, F: int, fallback: Fallback = Fallback.DRAFT) -> SpeculativeSpeculative:
    after_miss = (F,) * (K + 1) if fallback is not Fallback.NONE else (F,)
    return SpeculativeSpeculative(K, (F,) * (K + 1), after_miss, fallback)


def rounds_of(policy, record, engine: str, max_new_tokens: int | None = None) -> float:
    workload, system = workload_of(record, max_new_tokens), system_of(record)
    if engine == "exact":
        return float(expectations([policy], workload, system)[0].num_rounds.sum())
    if engine == "vectorized":
        return float(vectorized.replicate(policy, workload, system, [0]).num_rounds.sum())
    return len(simulate(policy, workload, system).rounds)


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("engine", ENGINES)
def test_every_round_emits_at_least_one_token(engine):
    """78 tokens, one of them from the prefill: 77 rounds without acceptance, ceil(77 / 6) with certain acceptance."""
    assert rounds_of(Speculative(5), scripted_record(0.0, num_prompts=1, length=78), engine) == 77
    assert rounds_of(Speculative(5), scripted_record(1.0, num_prompts=1, length=78), engine) == 13
    assert rounds_of(ssd(5, 2), scripted_record(1.0, num_prompts=1, length=78), engine) == 13


def test_rare_acceptance_costs_rounds_not_tokens():
    rounds = rounds_of(Speculative(5), scripted_record(0.01, num_prompts=1, length=78), "exact")
    assert rounds == pytest.approx(77 / expected_tokens_per_round(0.01, 5), rel=0.01)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", [Speculative(0), Autoregressive()], ids=["K=0", "AR"])
def test_k_zero_is_autoregressive(engine, policy):
    """Also where the decoders were seen to run at different speeds: what drafts nothing runs as AR does."""
    record = scripted_record(0.5, num_prompts=2, length=11)
    verify = (Lane.TARGET, Operation.VERIFY)
    system = replace(system_of(record), in_situ={"ar": {verify: (2.0,)}, "sd": {verify: (3.0,)}})
    prediction = predict(policy, workload_of(record), system, engine=engine)
    assert prediction.tokens_per_s.value == pytest.approx(50)
    assert prediction.mean_acceptance_length.value == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_ssd_without_branches_is_sd(engine):
    """Nothing is prepared, every look-up misses and the draft is the fallback.

    A first draft step of two tokens, which SD has after a full acceptance and SSD has not, costs the same here.
    """
    record = record_of(*markov(3), num_prompts=20, length=16, seed=4)
    system = system_of(record, host_s=0.0005)
    sd = predict(Speculative(3), workload_of(record), system, engine=engine)
    empty = predict(ssd(3, 0), workload_of(record), system, engine=engine)
    assert empty.tokens_per_s.value == pytest.approx(sd.tokens_per_s.value)
    assert empty.hit_rate.value == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_certain_hits_cost_one_verification_each(engine):
    """Rank 0 in q and acceptance 1: every look-up hits; only the first speculation is drafted in the open."""
    record = scripted_record(1.0, num_prompts=1, length=1 + 4 * 25)
    system = system_of(record, verify_s=0.010, draft_step_s=0.002, glue_s=0.001, tree_step_s=0.002)
    prediction = predict(ssd(3, 1), workload_of(record), system, engine=engine)
    assert prediction.hit_rate.value == 1
    assert prediction.tokens_per_s.value == pytest.approx(100 / (25 * 0.010 + 3 * 0.002))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_build_longer_than_the_verification_binds_the_round(engine):
    record = scripted_record(1.0, num_prompts=1, length=1 + 4 * 25)
    system = system_of(record, verify_s=0.005, draft_step_s=0.0, glue_s=0.003, tree_step_s=0.004)
    prediction = predict(ssd(3, 1), workload_of(record), system, engine=engine)
    # 24 rounds last as long as the build, the last round only verifies.
    assert prediction.tokens_per_s.value == pytest.approx(100 / (24 * 0.015 + 0.005))


@pytest.mark.parametrize("engine", ENGINES)
def test_without_overlap_every_build_is_paid_in_full(engine):
    """25 rounds of 10 ms, a build of 7 ms before each but one whose end is sure, 6 ms of drafting before the first."""
    record = scripted_record(1.0, num_prompts=1, length=1 + 4 * 24 + 1)
    times = {"verify_s": 0.010, "draft_step_s": 0.002, "glue_s": 0.001, "tree_step_s": 0.002}
    serial = replace(system_of(record, contention=1.5, **times), overlaps=False)
    prediction = predict(ssd(3, 1), workload_of(record), serial, engine=engine)
    assert prediction.tokens_per_s.value == pytest.approx(97 / (25 * 0.010 + 24 * 0.007 + 0.006))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(3), ssd(3, 2), ssd(2, 1, Fallback.NONE)])
def test_doubling_all_times_halves_throughput(engine, policy):
    record = record_of(*markov(3), num_prompts=10, length=16, seed=4)
    times = {"verify_s": 0.01, "draft_step_s": 0.002, "glue_s": 0.003, "tree_step_s": 0.004, "host_s": 0.001}
    once = predict(policy, workload_of(record), system_of(record, **times), engine=engine)
    twice = system_of(record, **{name: 2 * value for name, value in times.items()})
    assert predict(policy, workload_of(record), twice, engine=engine).tokens_per_s.value == pytest.approx(
        once.tokens_per_s.value / 2
    )


def test_throughput_rises_with_fan_out_when_branches_are_free():
    record = record_of(*markov(3), num_prompts=30, length=24, seed=4)
    rates = [predict(ssd(3, F), workload_of(record), system_of(record)).tokens_per_s.value for F in range(6)]
    assert all(low < high for low, high in pairwise(rates))


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 7])
def test_the_cap_is_met_exactly(cap):
    record = record_of(*markov(3), num_prompts=5, length=12, seed=4)
    for policy in (Autoregressive(), Speculative(4), ssd(4, 2), ssd(4, 2, Fallback.NONE)):
        trace = simulate(policy, workload_of(record, cap), system_of(record))
        assert [len(s.tokens) for s in trace.sequences] == [cap] * 5
        assert sum(r.num_emitted for r in trace.rounds) == 5 * max(0, cap - 1)


# ------------------------------------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize(("acceptance", "K"), [(0.8, 4), (0.5, 4), (0.8, 8)])
def test_sd_approaches_its_closed_form(acceptance, K):
    """On a long text of constant acceptance the ends do not matter. Uses SD's closed form with T_SD = K steps."""
    record = scripted_record(acceptance, num_prompts=1, length=4000)
    system = system_of(record, verify_s=0.010, draft_step_s=0.001)
    ar = predict(Autoregressive(), workload_of(record), system)
    sd = predict(Speculative(K), workload_of(record), system)
    tokens = expected_tokens_per_round(acceptance, K)
    assert sd.mean_acceptance_length.value == pytest.approx(tokens, rel=2e-3)
    assert predicted_speedup(sd, ar).value == pytest.approx(sd_speedup(tokens, K * 0.1), rel=2e-3)


@pytest.mark.parametrize(("rank", "hit_given_rejection"), [(0, 1), (1, 1), (2, 0)])
def test_ssd_approaches_theorem_7(rank, hit_given_rejection):
    """Constant acceptance, every token at one rank, F = 1: a hit after a rejection iff the rank is 0, or 1 with the
    rejected token before it (here always, all the mass of (q - p)+ is on the top token); after K acceptances iff 0."""
    K, acceptance = 3, 0.7
    record = scripted_record(acceptance, num_prompts=1, length=4000, rank=rank)
    record = replace(record, overlap=np.full(4000, 0.6))
    system = system_of(record, verify_s=0.010, draft_step_s=0.002, glue_s=0.001, tree_step_s=0.001)
    workload = workload_of(record)
    all_accepted = acceptance**K
    hit = (1 - all_accepted) * hit_given_rejection + all_accepted * (rank == 0)
    ssd_prediction, ar = predict(ssd(K, 1), workload, system), predict(Autoregressive(), workload, system)
    tokens = expected_tokens_per_round(acceptance, K)
    assert ssd_prediction.hit_rate.value == pytest.approx(hit, abs=1e-3)
    theorem = ssd_speedup(hit, tokens, tokens, primary_time=0.4, backup_time=0.6)
    assert predicted_speedup(ssd_prediction, ar).value == pytest.approx(theorem, rel=2e-3)


# -------------------------------------------------------------------------------------------------- the engines agree


def z_of(seconds: np.ndarray, expected: float) -> float:
    """t statistic of the mean; rounding alone is no difference."""
    difference = float(np.mean(seconds)) - expected
    return 0.0 if abs(difference) < 1e-9 * expected else difference / (np.std(seconds, ddof=1) / np.sqrt(len(seconds)))


def des_seconds(policy, workload, system, num: int) -> np.ndarray:
    """Time that the target decodes, of each of `num` runs."""
    return np.array([run.shared_s.sum() for run in timeline.totals(policy, workload, system, range(num))])


def known_to_the_exact_engine(policy, system) -> bool:
    abandons = getattr(policy, "on_late_build", None) is LateBuild.ABANDON
    return system.placement.num_draft_devices == 1 or not abandons


@settings(max_examples=110, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(), data=st.data())
def test_exact_and_des_agree(policy, system, data):
    """110 comparisons of a t statistic with 15 degrees of freedom at 7: a false alarm has p < 1e-3 over all."""
    assume(known_to_the_exact_engine(policy, system))
    system = data.draw(seen_in_runs(system))
    workload = workload_of(system.agreement)
    exact = expectations([policy], workload, system)[0].seconds.sum()
    assert abs(z_of(des_seconds(policy, workload, system, 16), exact)) < 7


@settings(max_examples=100, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(spread=0), batch_size=st.integers(1, 4), seed=st.integers(0, 1000))
def test_vectorized_and_des_decode_the_same_rounds_at_the_same_times(policy, system, batch_size, seed):
    """Acceptance and hits are decided by the same numbers, and no duration varies: all totals are equal, not close."""
    system = bent(system)
    workload = replace(workload_of(system.agreement), batch_size=batch_size)
    totals = timeline.mean_of(timeline.totals(policy, workload, system, [seed]))
    expected = vectorized.replicate(policy, workload, system, [seed])
    for name in ("num_tokens", "num_rounds", "num_lookups", "num_hits", "seconds"):
        assert getattr(totals, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-15), name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(), batch_size=st.integers(1, 4))
def test_mean_times_of_vectorized_and_des_agree(policy, system, batch_size):
    """The same outcomes, other noise: 24 differences, one for each seed; 40 t statistics with 23 degrees of freedom at
    6: a false alarm has p < 1e-3 over all."""
    workload = replace(workload_of(system.agreement), batch_size=batch_size)
    vector = np.array([vectorized.replicate(policy, workload, system, [seed]).seconds.sum() for seed in range(24)])
    difference = des_seconds(policy, workload, system, 24) - vector
    scale = 1 + difference / max(vector.mean(), 1e-300)
    assert abs(z_of(scale, 1.0)) < 6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(policy=policies(), system=systems())
def test_exact_and_vectorized_agree(policy, system):
    """Ten batches of 30 replications; 40 comparisons of a t statistic (9 degrees of freedom) at 8: p < 1e-3 in all."""
    assume(known_to_the_exact_engine(policy, system))
    workload = workload_of(system.agreement)
    exact = expectations([policy], workload, system)[0].seconds.sum()
    batches = [
        vectorized.replicate(policy, workload, system, range(30 * batch, 30 * batch + 30)).seconds.sum()
        for batch in range(10)
    ]
    error = np.std(batches, ddof=1) / np.sqrt(10)
    assert abs(np.mean(batches) - exact) < max(8 * error, 1e-9 * exact)


def test_what_differs_is_told_apart():
    """Negative controls of the comparisons: another fan-out, another late-build rule, another fallback in a batch."""
    record = record_of(*markov(3), num_prompts=12, length=20, seed=4)
    late = batched(system_of(record, tree_step_s=0.004, residuals=(0.8, 1.0, 1.2)), 0.001)
    one, pairs = workload_of(record), replace(workload_of(record), batch_size=2)
    for workload, policy, other in (
        (one, ssd(3, 2), ssd(3, 1)),
        (one, ssd(3, 2), replace(ssd(3, 2), on_late_build=LateBuild.ABANDON)),
        (pairs, ssd(3, 2), ssd(3, 2, Fallback.DRAFT_MISSING)),
    ):
        difference = des_seconds(policy, workload, late, 16) / des_seconds(other, workload, late, 16)
        assert abs(z_of(difference, 1.0)) > 7, other.name


def test_intervals_cover_the_truth():
    """The 95 % interval over 24 prompts against the rate over 4000 prompts, 100 times: at least 85 cover it.

    A binomial with p = .95 has 84 or fewer with probability below 2e-4; bootstraps of 24 are slightly narrow.
    """
    p, q = markov(3)
    many = record_of(p, q, num_prompts=4000, length=16, seed=99)
    policy = Speculative(3)
    truth = predict(policy, workload_of(many), system_of(many)).tokens_per_s.value
    covered = 0
    for sample in range(100):
        few = record_of(p, q, num_prompts=24, length=16, seed=sample)
        estimate = predict(policy, workload_of(few), system_of(few)).tokens_per_s
        covered += estimate.low <= truth <= estimate.high
    assert covered >= 85


# ----------------------------------------------------------------------------------------------------------- bad input


def test_a_record_of_another_temperature_or_length_is_refused():
    record = record_of(*markov(3), num_prompts=2, length=8, seed=4)
    workload = workload_of(record)
    with pytest.raises(BadInput, match="temperature"):
        predict(Autoregressive(), replace(workload, temperature=0.0), system_of(record))
    with pytest.raises(BadInput, match="max_new_tokens: must be <= 8"):
        predict(Autoregressive(), replace(workload, max_new_tokens=9), system_of(record))


def test_contexts_outside_the_profile_are_refused():
    record = record_of(*markov(3), num_prompts=2, length=8, seed=4, prompt_length=5000)
    with pytest.raises(BadInput, match=r"context must be in the profiled range 0\.\.4096, got 5000"):
        predict(Autoregressive(), workload_of(record), system_of(record))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(4), ssd(4, 2), ssd(4, 2, Fallback.NONE)])
@pytest.mark.parametrize("cap", [2, 4, 12])
def test_no_context_beyond_the_cap_is_asked_for(engine, policy, cap):
    """Prompts of 4 tokens: no draft step or verification stands on more than 4 + cap - 2 entries.

    Tree steps do, by the slots of the branches.
    """
    record = record_of(*markov(3), num_prompts=3, length=12, seed=4)
    system = system_of(record)
    tables = dict(system.latency.operations)
    for key in ((Lane.TARGET, Operation.VERIFY), (Lane.DRAFT, Operation.DRAFT_STEP), (Lane.DRAFT, Operation.GLUE)):
        contexts = sorted({4, 4 + cap - 2})
        knots = {width: tuple((context, 0.01) for context in contexts) for width in (1, 2, 64)}
        tables[key] = replace(tables[key], knots=knots)
    narrow = replace(system, latency=LatencyModel(tables))
    assert predict(policy, workload_of(record, cap), narrow, engine=engine).tokens_per_s.value > 0
