"""Errors of many configurations: signs, intervals that hold the truth at the stated rate, noise, ranks, verdicts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, spearmanr

from calibration.validation import Result, Totals, Validation, measured_totals, missed, predicted_totals
from sim import metrics
from sim.errors import BadInput
from sim.expectation import Expectation
from sim.metrics import Estimate
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative
from sim.simulate import Prediction, simulate
from tests.experiments.fake_bench import greedy_record
from tests.sim.strategies import batched
from tests.sim.toy import system_of, workload_of

SSD = SpeculativeSpeculative(2, (2, 2, 2), (2, 2, 2), Fallback.DRAFT)
NUM_BLOCKS, NUM_GROUPS = 20, 40


def totals(rate: float, hit_rate: float, num: int, rng: np.random.Generator | None = None) -> Totals:
    """Blocks of about 100 tokens in 50 rounds; with a generator they differ as prompts do."""

    def spread(part: float) -> np.ndarray:
        return np.ones(num) if rng is None else rng.lognormal(-(part**2) / 2, part, num)

    tokens = 100 * spread(0.1)
    lookups = np.full((2, num), 20.0)
    hits = np.clip(hit_rate * spread(0.1), 0, 1) * lookups
    return Totals(tokens, tokens / rate * spread(0.15), 50 * spread(0.1), lookups, hits)


def prediction_of(of: Totals, policy: Policy) -> Prediction:
    nothing = Estimate(1.0, 1.0, 1.0, 2)
    expectation = Expectation(of.tokens, of.rounds, of.seconds, of.lookups, of.hits)
    return Prediction(policy, "exact", nothing, nothing, None, {}, expectation)


def result(
    policy: Policy, predicted: Totals, repeats: Sequence[Totals], *, replayed: float = 1.0, batch_size: int = 1
) -> Result:
    """`replayed` is what the system makes of the measured seconds."""
    prediction = prediction_of(predicted, policy)
    replayed_s = replayed * np.sum([repeat.seconds for repeat in repeats], axis=0)
    return Result(batch_size, 1, prediction, prediction, tuple(repeats), replayed_s, replayed_s)


def plain_result(policy: Policy, predicted: float, measured: float, batch_size: int = 1, **hits: float) -> Result:
    own = totals(predicted, hits.get("predicted_hits", 0.5), NUM_GROUPS)
    repeats = [totals(measured, hits.get("measured_hits", 0.5), NUM_BLOCKS)] * 2
    return result(policy, own, repeats, batch_size=batch_size)


# -------------------------------------------------------------------------------------------------------------- totals


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(2), SSD], ids=lambda policy: policy.name)
def test_measured_totals_are_the_metrics_of_the_trace(policy: Policy, batch_size: int) -> None:
    record = greedy_record(num_prompts=16, length=24, prompt_length=8, seed=3)
    workload = replace(workload_of(record), batch_size=batch_size)
    trace = simulate(policy, workload, batched(system_of(record, host_s=0.001), 0.0))
    found, whole = measured_totals(trace, 4), np.ones((1, 4))
    assert found.rate(whole)[0] == pytest.approx(metrics.tokens_per_s([trace]).value)
    length = metrics.mean_acceptance_length([trace])
    assert length is not None and found.tokens_per_round(whole)[0] == pytest.approx(length.value)
    by_source = metrics.hit_rate_by_source([trace])
    for side, expected in (
        (None, metrics.hit_rate([trace])),
        (0, by_source["after_hit"]),
        (1, by_source["after_miss"]),
    ):
        rate = found.hit_rate(whole, side)[0]
        assert np.isnan(rate) if expected is None else rate == pytest.approx(expected.value)


def test_predicted_totals_keep_every_prompt() -> None:
    own = totals(10.0, 0.5, 10, np.random.default_rng(0))
    grouped = predicted_totals(prediction_of(own, SSD), 4)
    assert len(grouped.tokens) == 3  # the last group has two
    for name in ("tokens", "seconds", "rounds", "lookups", "hits"):
        assert getattr(grouped, name).sum() == pytest.approx(getattr(own, name).sum())


# -------------------------------------------------------------------------------------------------------------- errors


def test_each_error_has_its_sign_and_size() -> None:
    """Predicted 10 % too fast and 5 points too many hits; the system calls the measured rounds 4 % too short."""
    own, repeats = totals(110, 0.55, NUM_GROUPS), [totals(100, 0.5, NUM_BLOCKS)] * 2
    both = [result(Autoregressive(), own, repeats), result(SSD, own, repeats, replayed=1 / 1.04)]
    validation = Validation(both)
    error = validation.rows()[1]["error"]
    assert error["tokens_per_s"]["value"] == pytest.approx(0.10)
    assert error["latency_and_overlap"]["value"] == pytest.approx(0.04)
    assert error["tokens_per_round"]["value"] == pytest.approx(0)
    for name in ("hit_rate", "hit_rate_after_hit", "hit_rate_after_miss"):
        assert error[name]["value"] == pytest.approx(0.05)
    causes = validation.causes(validation.errors)
    assert causes["latency_and_overlap"]["mean_absolute"]["value"] == pytest.approx(0.02)  # of one of the two
    assert causes["hits"]["mean_signed"]["value"] == pytest.approx(0.05)


def test_what_looks_nothing_up_has_no_hit_rate_and_is_not_counted_as_right() -> None:
    nothing = np.zeros((2, NUM_BLOCKS))
    silent = replace(totals(100, 0.5, NUM_BLOCKS), lookups=nothing, hits=nothing)
    own = replace(totals(100, 0.5, NUM_GROUPS), lookups=np.zeros((2, NUM_GROUPS)), hits=np.zeros((2, NUM_GROUPS)))
    ar = result(Autoregressive(), own, [silent, silent])
    validation = Validation([ar, plain_result(SSD, 100, 100, predicted_hits=0.6)])
    assert validation.rows()[0]["error"]["hit_rate"] is None
    assert validation.figures([r.predicted for r in validation.results])["hit_rate_mae"]["value"] == pytest.approx(0.1)
    only_ar = Validation([ar, ar])
    assert only_ar.figures([ar.predicted] * 2)["hit_rate_mae"] is None
    assert "hits" not in only_ar.causes(only_ar.errors)


def test_the_error_interval_holds_0_at_its_rate() -> None:
    """Predictions of the law that is measured: a 95 % interval of 20 blocks may miss a little more often than it says
    (percentile bootstrap), not 10 % of the time. The bound has false-alarm probability 1e-4 at 90 %."""
    num_trials, held = 150, 0
    for seed in range(num_trials):
        rng = np.random.default_rng(seed)
        repeats = [totals(100, 0.5, NUM_BLOCKS, rng)] * 2
        both = [result(policy, totals(100, 0.5, NUM_GROUPS, rng), repeats) for policy in (Autoregressive(), SSD)]
        held += Validation(both).rows()[1]["verdict"] == "not distinguishable"
    assert held >= binom.ppf(1e-4, num_trials, 0.9)


@pytest.mark.parametrize(("rate", "verdict"), [(130.0, "predicted too fast"), (70.0, "predicted too slow")])
def test_a_gap_beyond_noise_and_prompts_is_told(rate: float, verdict: str) -> None:
    rng = np.random.default_rng(5)
    repeats = [totals(100, 0.5, NUM_BLOCKS, rng)] * 2
    both = [result(policy, totals(rate, 0.5, NUM_GROUPS, rng), repeats) for policy in (Autoregressive(), SSD)]
    assert [row["verdict"] for row in Validation(both).rows()] == [verdict] * 2


def test_noise_makes_a_gap_indistinguishable_and_drift_does_not() -> None:
    """A 5 % gap in all configurations: told where repeats are alike or all drift alike, not where they differ by
    chance."""

    def verdicts(*repeats: tuple[float, float]) -> list[str]:
        own = totals(105, 0.5, NUM_GROUPS)
        measured = [[totals(rate, 0.5, NUM_BLOCKS) for rate in rates] for rates in repeats]
        policies = (Autoregressive(), Speculative(2), SSD, Speculative(3))
        both = [result(policy, own, of_policy) for policy, of_policy in zip(policies, measured, strict=True)]
        return sorted({row["verdict"] for row in Validation(both).rows()})

    assert verdicts(*[(100, 100)] * 4) == ["predicted too fast"]
    assert verdicts(*[(90, 110)] * 4) == ["predicted too fast"]
    assert verdicts(*[(90, 110), (110, 90)] * 2) == ["not distinguishable"]


def test_drift_is_what_all_configurations_share() -> None:
    repeats = {Autoregressive(): (90, 110), SSD: (180, 220)}
    both = [
        result(policy, totals(100, 0.5, NUM_GROUPS), [totals(rate, 0.5, NUM_BLOCKS) for rate in rates])
        for policy, rates in repeats.items()
    ]
    validation = Validation(both)
    assert validation.noise_without_drift.value == pytest.approx(0)
    assert validation.drift.value == pytest.approx(validation.noise.value) == pytest.approx((20 / 90 + 20 / 110) / 2)
    assert [row["noise"] for row in validation.rows()] == pytest.approx([0.1, 0.1])


def test_noise_is_what_another_real_run_would_be_off() -> None:
    repeats = [totals(rate, 0.5, NUM_BLOCKS) for rate in (100, 104)]
    validation = Validation([result(policy, repeats[0], repeats) for policy in (Autoregressive(), SSD)])
    assert validation.noise.value == pytest.approx((104 / 100 - 1 + 1 - 100 / 104) / 2)


# ---------------------------------------------------------------------------------------------------------- aggregates


def test_aggregates_are_those_of_the_rows() -> None:
    predicted, measured = [100, 150, 190, 160], [100, 140, 200, 170]
    policies = [Autoregressive(), Speculative(2), Speculative(3), SSD]
    validation = Validation(list(map(plain_result, policies, predicted, measured)))
    figures = validation.figures([r.predicted for r in validation.results])
    errors = np.array(predicted) / np.array(measured) - 1
    assert figures["mape_tokens_per_s"]["value"] == pytest.approx(np.abs(errors).mean())
    assert figures["mean_error_tokens_per_s"]["value"] == pytest.approx(errors.mean())
    assert figures["worst_tokens_per_s"]["value"] == pytest.approx(np.abs(errors).max())
    expected = spearmanr(predicted[1:], measured[1:]).statistic
    assert figures["rank_correlation"]["value"] == pytest.approx(expected)
    for figure in figures.values():
        assert figure["low"] <= figure["value"] <= figure["high"]
    assert len(validation.rows()) == 4


def test_larger_batches_do_not_make_a_ranking_right() -> None:
    """Within both batch sizes the order is reversed; that four rows are faster than one does not hide it."""
    rates = {1: [100, 110, 120, 130], 4: [300, 345, 375, 405]}
    policies = [Autoregressive(), Speculative(2), Speculative(3), Speculative(4)]
    results = [
        plain_result(policy, fast, slow, batch_size=size)
        for size, row in rates.items()
        for policy, fast, slow in zip(policies, row, [row[0], *reversed(row[1:])], strict=True)
    ]
    validation = Validation(results)
    predicted = [r.predicted for r in results]
    ranks = [validation.rank_correlation(predicted, size) for size in (None, 1, 4)]
    assert [rank is not None and rank.value < 0 for rank in ranks] == [True] * 3
    assert [rank.value for rank in ranks[1:] if rank] == pytest.approx([-1, -1])


def test_two_policies_have_no_rank_correlation() -> None:
    validation = Validation([plain_result(Autoregressive(), 100, 100), plain_result(SSD, 100, 100)])
    assert validation.rank_correlation([r.predicted for r in validation.results]) is None


def test_one_configuration_or_one_repeat_is_too_few() -> None:
    one = plain_result(SSD, 100, 100)
    with pytest.raises(BadInput, match="at least two configurations"):
        Validation([one])
    single = replace(one, repeats=one.repeats[:1])
    with pytest.raises(BadInput, match="at least 2 to know the noise"):
        _ = Validation([single, single]).noise


def test_traces_of_another_policy_are_refused() -> None:
    record = greedy_record(num_prompts=2, length=8, prompt_length=4, seed=0)
    system = system_of(record)
    trace = simulate(Autoregressive(), workload_of(record), system)
    prediction = prediction_of(totals(1, 0.5, 2), SSD)
    with pytest.raises(BadInput, match=r"trace\.policy: must be SSD"):
        Result.of(1, 1, prediction, prediction, [trace], (system, system))


def test_a_missed_tolerance_says_which_and_by_how_much() -> None:
    figures = {
        "mape_tokens_per_s": {"value": 0.08},
        "rank_correlation": {"value": 0.7},
        "regret": {"value": 0.01},
        "hit_rate_mae": None,
    }
    tolerance = {"mape_tokens_per_s": 0.05, "rank_correlation": 0.9, "regret": 0.05, "hit_rate_mae": 0.03}
    assert missed(figures, tolerance) == [
        "mape_tokens_per_s is 0.080, not at most 0.05",
        "rank_correlation is 0.700, not at least 0.9",
    ]
