"""Which policies are as good as the best: what no data can tell apart, and what they can."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from sim.expectation import Expectation
from sim.metrics import Estimate
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Autoregressive, Fallback, LateBuild, Speculative, SpeculativeSpeculative, uniform_fan_out
from sim.search import search
from sim.search_space import SearchSpace
from sim.simulate import Prediction, predict
from sim.ties import ERROR_RATE, contrasts, simplicity
from tests.sim.toy import markov, record_of, system_of, workload_of


def prediction_of(policy, seconds: np.ndarray, tokens: float = 100.0) -> Prediction:
    """Of prompts of equally many tokens that take so long."""
    num = len(seconds)
    nothing = np.zeros((2, num))
    expectation = Expectation(np.full(num, tokens), np.full(num, 30.0), seconds, nothing, nothing, batch=np.arange(num))
    rate = float(tokens * num / seconds.sum())
    return Prediction(policy, "made up", Estimate(rate, rate, rate, num), None, None, {}, expectation)


def beside_the_first(predictions: list[Prediction]):
    fastest = max(predictions, key=lambda prediction: prediction.tokens_per_s.value)
    weights = [1.0] * (len(predictions) + 1)
    num = len(predictions) - 1
    return contrasts(predictions, fastest, weights, num_comparisons=num, texts_are_alike=False)


def policies(num: int) -> list:
    return [Autoregressive(), *(Speculative(K) for K in range(1, num))]


def test_identical_policies_with_noise_are_ties():
    """20 policies, 40 prompts, noise of each prompt and policy: in at most 5 % of searches is one not a tie. Of 200
    searches more than 20 fail by chance with probability below 1e-3, if the rate is 5 %."""
    rng = np.random.default_rng(1)
    num_wrong = 0
    for _ in range(200):
        texts_s = rng.gamma(9, 0.1, size=40)
        beside = beside_the_first(
            [prediction_of(policy, texts_s * rng.normal(1, 0.05, size=40)) for policy in policies(20)]
        )
        num_wrong += not beside[0].is_tie
    assert num_wrong <= 20


def test_a_search_of_identical_policies_says_so_and_returns_ar(monkeypatch: pytest.MonkeyPatch):
    """Of 60 searches more than 9 return another policy by chance with probability below 1e-3, if the rate is 5 %."""
    record = record_of(*markov(3), num_prompts=40, length=8, seed=1)
    space, num_others = SearchSpace((1, 2, 3, 4), (2, 4, 6, 8), ("uniform",), ("draft",)), 0
    rng = np.random.default_rng(5)
    texts_s = rng.gamma(9, 0.1, size=40)

    def made_up(policies, *_, **options):
        return [prediction_of(policy, texts_s * rng.normal(1, 0.05, size=40)) for policy in policies]

    monkeypatch.setattr(sys.modules[search.__module__], "predict_all", made_up)
    for _ in range(60):
        result = search(space, workload_of(record), system_of(record))
        assert result.num_policies >= 20
        num_others += result.recommended.policy != Autoregressive()
        if result.recommended.policy == Autoregressive() != result.fastest.policy:
            assert (
                "no significant difference between" in result.in_words() and "AR is the simplest" in result.in_words()
            )
    assert num_others <= 9


def test_the_truly_best_is_among_the_ties():
    """One of 20 is better by less than luck gives the others: it is lost in at most 5 % of 200 searches."""
    rng = np.random.default_rng(2)
    num_lost = 0
    for _ in range(200):
        speed = np.ones(20)
        speed[7] = 0.995
        beside = beside_the_first(
            [
                prediction_of(policy, speed[index] * rng.gamma(9, 0.1, 40) * rng.normal(1, 0.02, 40))
                for index, policy in enumerate(policies(20))
            ]
        )
        num_lost += not beside[7].is_tie
    assert num_lost <= 20


def test_pairs_see_what_separate_intervals_hide():
    """Texts that differ by a third hide 3 % from separate intervals, and not from pairs of the same text."""
    rng = np.random.default_rng(3)
    texts_s = rng.gamma(9, 0.1, size=40)
    fast, slow = (prediction_of(p, texts_s * f) for p, f in zip(policies(2), (1.0, 1.03), strict=True))
    contrast = beside_the_first([fast, slow])[1]
    assert contrast.ratio == pytest.approx(1 / 1.03) and not contrast.is_tie
    spread = float(np.std(texts_s) / np.sqrt(40) / texts_s.mean())
    assert spread > 0.03 > 10 * contrast.standard_error


def test_more_comparisons_ask_for_more():
    rng = np.random.default_rng(4)
    texts_s = rng.gamma(9, 0.1, size=30)
    pair = [prediction_of(p, texts_s * rng.normal(f, 0.05, 30)) for p, f in zip(policies(2), (1.0, 1.02), strict=True)]
    margins = [
        contrasts(pair, pair[0], [1, 1, 1], num_comparisons=num, texts_are_alike=False)[1].margin
        for num in (1, 10, 1000)
    ]
    assert margins == sorted(margins) and margins[0] > 0
    assert ERROR_RATE == 0.05


def test_one_prompt_tells_nothing_apart():
    fast, slow = prediction_of(Speculative(4), np.ones(1)), prediction_of(Autoregressive(), 2 * np.ones(1))
    assert all(contrast.is_tie for contrast in beside_the_first([fast, slow]))
    record = record_of(*markov(3), num_prompts=1, length=20, seed=1)
    result = search(SearchSpace((1, 2), (2,)), workload_of(record), system_of(record))
    assert isinstance(result.recommended.policy, Autoregressive) and "one prompt" in result.in_words()


def parametric(num_texts: int) -> ParametricAgreement:
    curves = (HitCurve(0.4, 0.5),), (HitCurve(0.7, 0.5),)
    return ParametricAgreement(8, 24, (0.7,), *curves, num_texts=num_texts)


def test_alike_texts_are_compared_over_replications():
    """Their number says nothing; the same seeds do: the paired error is below that of separate runs."""
    system = system_of(parametric(2))
    workload = workload_of(system.agreement)
    pair = [
        predict(
            SpeculativeSpeculative(3, uniform_fan_out(3, B), uniform_fan_out(3, B)), workload, system,
            engine="vectorized", seed=5,
        )
        for B in (8, 9)
    ]  # fmt: skip
    first = pair[0]
    contrast = contrasts(pair, first, [1, 1, 1], num_comparisons=1, texts_are_alike=True)[1]
    separate = np.hypot(*(p.replications.standard_error / p.tokens_per_s.value for p in pair))
    assert contrast.num_samples == min(p.replications.num_replications for p in pair)
    assert 0 < contrast.standard_error < separate


def test_exact_rates_of_alike_texts_have_no_error():
    system = system_of(parametric(1))
    result = search(SearchSpace((1, 2, 3), (4, 8)), workload_of(system.agreement), system)
    assert result.ties == [result.fastest] and result.recommended is result.fastest
    assert "exact for what was stated" in result.in_words()


def test_simplicity_is_a_total_order_from_ar():
    plain = SpeculativeSpeculative(2, (1, 1, 1), (1, 1, 1))
    ascending = [
        Autoregressive(),
        Speculative(1),
        Speculative(5),
        SpeculativeSpeculative(1, (9, 9), (9, 9)),
        plain,
        replace(plain, on_late_build=LateBuild.ABANDON),
        replace(plain, downweight=0.5),
        replace(plain, fallback=Fallback.NGRAM),
        replace(plain, fan_out_after_hit=(2, 1, 1)),
    ]
    assert sorted(reversed(ascending), key=simplicity) == ascending


def test_a_simpler_policy_without_significant_difference_is_recommended():
    """Few prompts and durations that vary by a half: much is a tie, and what is recommended of it was run again."""
    record = record_of(*markov(3), num_prompts=6, length=16, seed=1)
    system = system_of(record, residuals=(0.5, 1.0, 1.5))
    result = search(SearchSpace((1, 2, 3), (2, 3)), workload_of(record), system, engine="vectorized", seed=2)
    assert result.recommended.policy == min((p.policy for p in result.ties), key=simplicity)
    assert result.recommended.policy in result.confirmed
    assert result.fastest in result.ties
    for prediction in result.ranked:
        contrast = result.contrasts[prediction.policy]
        assert contrast.is_tie == (prediction in result.ties) and contrast.ratio <= 1.05
