"""Both engines: degenerate limits, closed forms, agreement with each other, and a timeline asserted as times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import vectorized
from sim.errors import BadInput
from sim.latency import LatencyModel
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.recursion import expectations
from sim.simulate import cross_check, predict, predicted_speedup, simulate
from sim.theory import expected_tokens_per_round, sd_speedup, ssd_speedup
from sim.trace import Lane, Operation, Source
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


# ---------------------------------------------------------------------------------------------- the two engines agree


@st.composite
def policies(draw):
    K = draw(st.integers(1, 5))
    fallback = draw(st.sampled_from((Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NONE)))
    fan_out = st.integers(0, 4)
    after_hit = tuple(draw(fan_out) for _ in range(K + 1))
    after_miss = tuple(draw(fan_out) for _ in range(K + 1 if fallback is not Fallback.NONE else 1))
    return draw(
        st.sampled_from([Speculative(K), SpeculativeSpeculative(K, after_hit, after_miss, fallback), Autoregressive()])
    )


@st.composite
def systems(draw):
    seed = draw(st.integers(0, 50))
    record = record_of(*markov(seed), num_prompts=12, length=draw(st.integers(2, 20)), seed=seed + 1)
    milliseconds = st.floats(0.1, 20).map(lambda value: value / 1000)
    spread = draw(st.floats(0, 0.5))
    system = system_of(
        record,
        verify_s=draw(milliseconds),
        verify_per_token_s=draw(milliseconds) / 10,
        draft_step_s=draw(milliseconds),
        glue_s=draw(milliseconds),
        tree_step_s=draw(milliseconds),
        host_s=draw(milliseconds) / 10,
        residuals=(1 - spread, 1.0, 1 + spread),
        contention=draw(st.floats(1, 1.5)),
    )
    seen = st.tuples(st.floats(0.5, 2), st.floats(0.5, 2))
    in_situ = {
        kind: {key: draw(seen) for key in system.latency.operations if draw(st.booleans())} for kind in ("ar", "ssd")
    }
    return replace(system, overlaps=draw(st.booleans()), in_situ=in_situ)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(policy=policies(), system=systems())
def test_exact_and_des_agree(policy, system):
    """60 comparisons of a t statistic with 15 degrees of freedom at 6.5: a false alarm has p < 1e-3 over all."""
    check = cross_check(policy, workload_of(system.agreement), system, seed=1, replications=16)
    assert abs(check.z) < 6.5 or abs(check.relative_difference) < 1e-9


@settings(max_examples=40, deadline=None, derandomize=True)
@given(policy=policies(), system=systems(), seed=st.integers(0, 1000))
def test_vectorized_and_des_decode_the_same_rounds(policy, system, seed):
    """Acceptance and hits are decided by the same numbers: rounds, look-ups and hits are equal, not just close."""
    workload = workload_of(system.agreement)
    trace = simulate(policy, workload, system, seed)
    totals = vectorized.replicate(policy, workload, system, [seed])
    rounds = [sum(r.sequence == s.index for r in trace.rounds) for s in trace.sequences]
    assert totals.num_rounds == pytest.approx(rounds)
    hits = sum(r.source is Source.HIT for r in trace.rounds)
    assert totals.num_hits.sum() == hits
    assert totals.num_lookups.sum() == hits + sum(r.source is Source.MISS for r in trace.rounds)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(policy=policies(), system=systems())
def test_exact_and_vectorized_agree(policy, system):
    """Ten batches of 30 replications; 40 comparisons of a t statistic (9 degrees of freedom) at 8: p < 1e-3 in all."""
    workload = workload_of(system.agreement)
    exact = expectations([policy], workload, system)[0].seconds.sum()
    batches = [
        vectorized.replicate(policy, workload, system, range(30 * batch, 30 * batch + 30)).seconds.sum()
        for batch in range(10)
    ]
    error = np.std(batches, ddof=1) / np.sqrt(10)
    assert abs(np.mean(batches) - exact) < max(8 * error, 1e-9 * exact)


def test_a_different_fan_out_is_told_apart():
    """Negative control of the comparison: the other policy's exact value is rejected by the same statistic."""
    record = record_of(*markov(3), num_prompts=12, length=20, seed=4)
    system, workload = system_of(record), workload_of(record)
    check = cross_check(ssd(3, 2), workload, system, seed=1, replications=16)
    other = predict(ssd(3, 1), workload, system).tokens_per_s.value
    assert abs(check.des_tokens_per_s - other) / check.standard_error > 6.5


# ------------------------------------------------------------------------------------------------------------ timeline


def test_timeline_of_three_rounds():
    """K = 2, F = 1, everything accepted and at rank 0; cap 8: the prefill's token, then rounds of 3, 3 and 1."""
    record = scripted_record(1.0, num_prompts=1, length=8)
    system = system_of(record, verify_s=10.0, draft_step_s=2.0, glue_s=1.0, tree_step_s=3.0, host_s=0.5)
    trace = simulate(ssd(2, 1), workload_of(record), system)
    spans = [(s.lane, s.operation, s.num_tokens, round(s.start_s, 9), round(s.end_s, 9)) for s in trace.spans]
    T, D, op = Lane.TARGET, Lane.DRAFT, Operation
    assert sorted(spans, key=lambda s: (s[0], s[3])) == sorted(
        [
            (D, op.DRAFT_STEP, 1, 0.0, 2.0),
            (D, op.DRAFT_STEP, 1, 2.0, 4.0),
            (T, op.VERIFY, 3, 4.5, 14.5),
            (D, op.GLUE, 3, 4.5, 5.5),
            (D, op.TREE_STEP, 3, 5.5, 8.5),
            (D, op.TREE_STEP, 3, 8.5, 11.5),
            (T, op.VERIFY, 3, 15.0, 25.0),
            (D, op.GLUE, 3, 15.0, 16.0),
            (D, op.TREE_STEP, 3, 16.0, 19.0),
            (D, op.TREE_STEP, 3, 19.0, 22.0),
            (T, op.VERIFY, 1, 25.5, 35.5),
        ],
        key=lambda s: (s[0], s[3]),
    )
    assert [(r.source, r.num_drafted, r.num_emitted, round(r.start_s, 9), round(r.end_s, 9)) for r in trace.rounds] == [
        (Source.FIRST, 2, 3, 0.0, 14.5),
        (Source.HIT, 2, 3, 14.5, 25.0),
        (Source.HIT, 0, 1, 25.0, 35.5),
    ]


def test_conservation():
    """No lane does two things at once; the rounds of a sequence fill its decode time without gaps."""
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = system_of(record, residuals=(0.7, 1.0, 1.3), tree_step_s=0.004, host_s=0.0002)
    for policy in (Speculative(3), ssd(3, 2), ssd(3, 2, Fallback.NONE)):
        trace = simulate(policy, workload_of(record), system, seed=5)
        for lane in Lane:
            spans = sorted((s for s in trace.spans if s.lane is lane), key=lambda s: s.start_s)
            assert all(before.end_s <= after.start_s + 1e-12 for before, after in pairwise(spans))
        for s in trace.sequences:
            rounds = [r for r in trace.rounds if r.sequence == s.index]
            assert rounds[0].start_s == s.decode_start_s and rounds[-1].end_s == s.end_s
            assert all(before.end_s == after.start_s for before, after in pairwise(rounds))
            assert len(s.tokens) == 1 + sum(r.num_emitted for r in rounds)


def test_one_seed_is_one_trace_and_outcomes_do_not_depend_on_latency():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system = system_of(record, residuals=(0.7, 1.0, 1.3))
    policy, workload = ssd(3, 2), workload_of(record)
    assert simulate(policy, workload, system, 1) == simulate(policy, workload, system, 1)
    assert simulate(policy, workload, system, 1).digest() != simulate(policy, workload, system, 2).digest()
    slower = system_of(record, verify_s=0.5)
    assert simulate(policy, workload, system, 1).digest() == simulate(policy, workload, slower, 1).digest()


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
        knots = {width: ((4, 0.01), (4 + cap - 2, 0.01)) for width in (1, 2, 64)}
        tables[key] = replace(tables[key], knots=knots)
    narrow = replace(system, latency=LatencyModel(tables))
    assert predict(policy, workload_of(record, cap), narrow, engine=engine).tokens_per_s.value > 0
