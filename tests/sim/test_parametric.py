"""Agreement from summary numbers: the three engines, closed forms, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import vectorized
from sim.errors import BadInput
from sim.parametric import HitCurve, ParametricAgreement, conditional_from_cumulative
from sim.policy import Fallback, Speculative, SpeculativeSpeculative
from sim.recursion import expectations
from sim.replay import Replay
from sim.round_law import RoundLaw
from sim.search import search
from sim.search_space import SearchSpace
from sim.simulate import cross_check, predict, simulate
from sim.system import System
from sim.theory import expected_tokens_per_round, hit_rate_of_fan_out, stationary_hit_rate
from sim.trace import Source
from tests.sim.toy import system_of, workload_of

probabilities = st.floats(0, 1)
curves = st.builds(HitCurve, prefactor=st.floats(0, 1), exponent=st.floats(0, 2))


@st.composite
def agreements(draw):
    return ParametricAgreement(
        prompt_tokens=4,
        new_tokens=draw(st.integers(2, 60)),
        acceptance=tuple(draw(st.lists(probabilities, min_size=1, max_size=4))),
        after_hit=tuple(draw(st.lists(curves, min_size=1, max_size=3))),
        after_miss=tuple(draw(st.lists(curves, min_size=1, max_size=3))),
    )


@st.composite
def policies(draw):
    K = draw(st.integers(1, 5))
    fallback = draw(st.sampled_from((Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NONE)))
    entries = K + 1 if fallback is not Fallback.NONE else 1
    fan_out = st.integers(0, 10)
    after_hit = tuple(draw(fan_out) for _ in range(K + 1))
    ssd = SpeculativeSpeculative(K, after_hit, tuple(draw(fan_out) for _ in range(entries)), fallback)
    return draw(st.sampled_from([Speculative(K), ssd, ssd]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(agreement=agreements(), policy=policies(), seed=st.integers(0, 100))
def test_vectorized_and_des_decode_the_same_rounds(agreement, policy, seed):
    system, workload = system_of(agreement), workload_of(agreement)
    trace = simulate(policy, workload, system, seed)
    totals = vectorized.replicate(policy, workload, system, [seed])
    assert totals.num_rounds.sum() == len(trace.rounds)
    assert totals.num_hits.sum() == sum(r.source is Source.HIT for r in trace.rounds)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(agreement=agreements(), policy=policies())
def test_exact_and_des_agree(agreement, policy):
    """30 comparisons of a t statistic with 39 degrees of freedom at 5.5: a false alarm has p < 1e-4 over all."""
    system = system_of(agreement, verify_s=0.01, tree_step_s=0.003, host_s=0.0004, residuals=(0.8, 1.0, 1.2))
    check = cross_check(policy, workload_of(agreement), system, seed=2, replications=40)
    assert abs(check.z) < 5.5 or abs(check.relative_difference) < 1e-9


def long_run(acceptance, after_hit, after_miss, **times) -> System:
    return system_of(ParametricAgreement(4, 4000, acceptance, after_hit, after_miss), **times)


def test_stationary_hit_rate_of_two_curves_is_equation_1():
    """Uniform fan-out F and one curve per source: every look-up after a source hits with that curve's rate."""
    system = long_run((0.75,), (HitCurve(0.4, 0.5),), (HitCurve(0.7, 0.5),))
    prediction = predict(SpeculativeSpeculative(3, (4,) * 4, (4,) * 4), workload_of(system.agreement), system)
    after_hit, after_miss = 1 - 0.4 / 2, 1 - 0.7 / 2
    assert prediction.hit_rate_by_source["after_hit"].value == pytest.approx(after_hit)
    assert prediction.hit_rate_by_source["after_miss"].value == pytest.approx(after_miss)
    assert prediction.hit_rate.value == pytest.approx(stationary_hit_rate(after_hit, after_miss), abs=2e-3)


def test_hit_rate_of_a_list_is_theorem_18():
    fan_out = (6, 3, 2, 5)
    curve = (HitCurve(0.4, 0.5),)
    system = long_run((0.7,), curve, curve)
    prediction = predict(SpeculativeSpeculative(3, fan_out, fan_out), workload_of(system.agreement), system)
    assert prediction.hit_rate.value == pytest.approx(hit_rate_of_fan_out(fan_out, 0.7, 0.5, 0.4), abs=1e-3)


def test_acceptance_by_position():
    """K = 3 with conditional acceptance .9, .6, .5: 1 + .9 + .54 + .27 tokens a round."""
    system = long_run((0.9, 0.6, 0.5), (HitCurve(0.4, 0.5),), (HitCurve(0.4, 0.5),))
    prediction = predict(Speculative(3), workload_of(system.agreement), system)
    assert prediction.mean_acceptance_length.value == pytest.approx(1 + 0.9 + 0.54 + 0.27, rel=1e-3)
    assert conditional_from_cumulative([0.9, 0.54, 0.27]) == pytest.approx((0.9, 0.6, 0.5))


def test_iid_acceptance_is_its_closed_form():
    system = long_run((0.8,), (HitCurve(0.4, 0.5),), (HitCurve(0.4, 0.5),))
    prediction = predict(Speculative(4), workload_of(system.agreement), system)
    assert prediction.mean_acceptance_length.value == pytest.approx(expected_tokens_per_round(0.8, 4), rel=1e-3)


def test_search_uses_each_source_own_curve_for_exact_lists():
    system = long_run((0.7,), (HitCurve(0.2, 2.0),), (HitCurve(0.8, 0.3),))
    found = search(SearchSpace((3,), (8,), ("exact",)), workload_of(system.agreement), system)
    policy = found.best("ssd").policy
    assert policy.fan_out_after_hit != policy.fan_out_after_miss


def test_several_texts_are_as_many_times_the_first():
    one, three = (ParametricAgreement(4, 30, (0.7,), (HitCurve(0.4, 1),), (HitCurve(0.4, 1),), 0.0, n) for n in (1, 3))
    policy = SpeculativeSpeculative(2, (2, 1, 1), (2, 1, 1))
    single, triple = (expectations([policy], workload_of(a), system_of(a))[0] for a in (one, three))
    for name in ("num_tokens", "num_rounds", "seconds"):
        assert getattr(triple, name) == pytest.approx(np.repeat(getattr(single, name), 3))


def test_round_trip(tmp_path):
    system = long_run((0.9, 0.5), (HitCurve(0.4, 0.5),), (HitCurve(0.7, 0.5), HitCurve(0.6, 0.4)))
    system.write(tmp_path / "system.json")
    read = System.read(tmp_path / "system.json")
    assert read.agreement == system.agreement
    policy = SpeculativeSpeculative(2, (1, 1, 1), (2, 1, 1))
    workload = workload_of(system.agreement)
    assert expectations([policy], workload, read)[0].seconds == expectations([policy], workload, system)[0].seconds


@pytest.mark.parametrize(
    ("fallback", "downweight", "message"),
    [
        (Fallback.DRAFT, 0.5, "downweight below 1: needs a token-level agreement record"),
        (Fallback.FILLER, 1.0, "fallback filler: needs a token-level agreement record"),
        (Fallback.NGRAM, 1.0, "fallback ngram: needs a token-level agreement record"),
    ],
)
def test_what_summary_numbers_do_not_tell_is_refused(fallback, downweight, message):
    agreement = ParametricAgreement(4, 20, (0.7,), (HitCurve(0.4, 1),), (HitCurve(0.4, 1),))
    drafting = SpeculativeSpeculative(2, (1, 1, 1), (1, 1, 1), fallback, downweight).drafting(Source.MISS)
    for ask in (
        lambda: RoundLaw(Replay(agreement, workload_of(agreement)), drafting),
        lambda: agreement.acceptance_table(0, drafting),
        lambda: agreement.hit_table(1, 0, drafting, rejected=True),
    ):
        with pytest.raises(BadInput, match=message):
            ask()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ParametricAgreement(4, 8, (1.2,), (HitCurve(0.4, 1),), (HitCurve(0.4, 1),)), r"acceptance\[0\]"),
        (lambda: ParametricAgreement(4, 8, (), (HitCurve(0.4, 1),), (HitCurve(0.4, 1),)), "acceptance: must have"),
        (lambda: ParametricAgreement(4, 0, (0.5,), (HitCurve(0.4, 1),), (HitCurve(0.4, 1),)), "new_tokens: must be"),
        (lambda: HitCurve(-0.1, 1), "prefactor: must be a finite number >= 0"),
        (lambda: conditional_from_cumulative([0.5, 0.6]), r"cumulative\[1\]: .* must not rise"),
    ],
)
def test_inconsistent_numbers_are_refused(build, message):
    with pytest.raises(BadInput, match=message):
        build()
