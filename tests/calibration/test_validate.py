"""Errors have the right sign, regret is what a wrong choice costs, and no text that differs goes uncounted."""

import json
import math
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from calibration.validate import (
    NEAR_TIE_LOGIT_GAP,
    check_losslessness,
    compare,
    estimate_regret,
    first_difference,
    interval,
    summarize,
)
from sim.errors import BadInput
from sim.expectation import Expectation
from sim.metrics import Estimate, speedup
from sim.policy import Autoregressive, Policy, Speculative
from sim.simulate import Prediction
from sim.trace import Round, Sequence, Source, Trace

AR, SD = Autoregressive(), Speculative(4)


def trace_of(seconds: Seq[float], tokens: Seq[int], policy: Policy = AR) -> Trace:
    """One sequence per entry: `tokens` decoded in one round of `seconds`, one after another."""
    trace = Trace(policy=policy.to_dict(), workload={})
    now = 0.0
    for index, (duration, num) in enumerate(zip(seconds, tokens, strict=True)):
        text = tuple(range(num + 1))
        trace.sequences.append(Sequence(index, 4, text, now, now, now + duration, stopped=False))
        trace.rounds.append(Round(index, 0, Source.SYNCHRONOUS, 0, 0, num, 4, now, now + duration))
        now += duration
    return trace


def prediction_of(rate: float, policy: Policy = AR) -> Prediction:
    estimate, nothing = Estimate(rate, rate, rate, 2), np.zeros((2, 2))
    expectation = Expectation(np.full(2, rate), np.full(2, rate), np.ones(2), nothing, nothing)
    return Prediction(policy, "exact", estimate, Estimate(1.0, 1.0, 1.0, 2), None, {}, expectation)


# --------------------------------------------------------------------------------------------------- comparison, regret


def test_error_is_positive_when_the_prediction_was_too_fast() -> None:
    comparison = compare(prediction_of(11.0), prediction_of(11.0), [trace_of([1, 1], [10, 10])])
    assert comparison.error == pytest.approx(0.1)
    assert compare(prediction_of(9.0), prediction_of(9.0), [trace_of([1, 1], [10, 10])]).error == pytest.approx(-0.1)


def test_error_interval_holds_the_spread_of_both_sets_of_prompts():
    """Relative half-widths of .1 and .05 add in quadrature; a single prompt has no interval."""
    rate = Estimate(110.0, 99.0, 121.0, 5)
    measured = Estimate(100.0, 95.0, 105.0, 5)
    prediction = replace(prediction_of(110.0), tokens_per_s=rate)
    comparison = replace(compare(prediction, prediction, [trace_of([1, 1], [10, 10])]), tokens_per_s=measured)
    assert comparison.error_interval() == pytest.approx([0.1 - 1.1 * 0.0125**0.5, 0.1 + 1.1 * 0.0125**0.5])
    single = replace(comparison, tokens_per_s=Estimate(100.0, -math.inf, math.inf, 1))
    assert single.error_interval() is None


def test_spread_is_half_the_range_of_the_repeats_over_their_mean() -> None:
    repeats = [trace_of([1.0], [90]), trace_of([1.0], [110]), trace_of([1.0], [100])]
    comparison = compare(prediction_of(100.0), prediction_of(100.0), repeats)
    assert comparison.repeats == 3
    assert comparison.repeat_spread == pytest.approx(0.1)
    assert compare(prediction_of(100.0), prediction_of(100.0), repeats[:1]).repeat_spread == 0


def test_traces_of_another_policy_or_without_rounds_are_refused() -> None:
    with pytest.raises(BadInput, match=r"trace\.policy: must be SD K=4"):
        compare(prediction_of(1.0, SD), prediction_of(1.0, SD), [trace_of([1.0], [10])])
    with pytest.raises(BadInput, match="must decode more than the first token"):
        compare(prediction_of(1.0), prediction_of(1.0), [Trace(AR.to_dict(), {})])


def test_regret_is_the_share_lost_and_agrees_with_the_speed_up() -> None:
    fast, slow = [trace_of([1, 2], [20, 40])], [trace_of([1, 2], [15, 30])]
    assert estimate_regret([fast, slow], recommended=1).value == pytest.approx(0.25)
    assert estimate_regret([fast, slow], recommended=1).value == pytest.approx(1 - speedup(slow, fast).value)
    best = estimate_regret([fast, slow], recommended=0)
    assert (best.value, best.low, best.high) == (0, 0, 0)


def test_regret_of_a_close_call_includes_the_luck_of_the_choice() -> None:
    # Which of the two is faster depends on the prompts that happen to be drawn.
    first = [trace_of([1, 1, 1, 1], [10, 30, 10, 30])]
    second = [trace_of([1, 1, 1, 1], [30, 10, 30, 10])]
    regret = estimate_regret([first, second], recommended=0)
    assert regret.value == 0 == regret.low
    assert regret.high > 0.1


# --------------------------------------------------------------------------------------------------------- losslessness


def texts(*tokens: tuple[int, ...]) -> Trace:
    sequences = [Sequence(i, 4, text, 0.0, 0.0, 1.0, stopped=False) for i, text in enumerate(tokens)]
    return Trace(AR.to_dict(), {}, sequences)


def test_equal_texts_need_no_teacher_forcing() -> None:
    def unasked(prompt: int, tokens: tuple[int, ...]) -> float:
        raise AssertionError

    same = texts((1, 2), (3, 4))
    result = check_losslessness(same, {"SD": [same, same]}, unasked)
    assert result.to_dict() == {"prompts": 2, "identical": 2, "near_tie_flips": 0}


@pytest.mark.parametrize(
    ("gap", "flips", "violations"), [(NEAR_TIE_LOGIT_GAP / 2, 1, 0), (NEAR_TIE_LOGIT_GAP * 2, 0, 1)]
)
def test_first_difference_decides_by_the_gap_there(gap: float, flips: int, violations: int) -> None:
    asked = []

    def top2_gap(prompt: int, tokens: tuple[int, ...]) -> float:
        asked.append((prompt, tokens))
        return gap

    result = check_losslessness(texts((1, 2), (3, 4, 5)), {"SD": [texts((1, 2), (3, 9, 9))]}, top2_gap)
    assert asked == [(1, (3,))]
    assert result.to_dict() == {"prompts": 2, "identical": 1, "near_tie_flips": flips}
    assert len(result.violations) == violations


def test_text_that_merely_ends_early_is_never_a_tie() -> None:
    result = check_losslessness(texts((1, 2, 3)), {"SD": [texts((1, 2))]}, lambda prompt, tokens: 0.0)
    assert result.to_dict() == {"prompts": 1, "identical": 0, "near_tie_flips": 0}
    assert result.violations[0].gap == math.inf
    assert json.dumps(result.violations[0].to_dict(), allow_nan=False)


def test_one_violation_among_repeats_makes_the_prompt_a_violation() -> None:
    gaps = iter([1e-6, 1.0])
    ar = texts((1, 2, 3))
    result = check_losslessness(ar, {"SD": [texts((1, 2, 9)), texts((1, 9, 3))]}, lambda *_: next(gaps))
    assert result.to_dict() == {"prompts": 1, "identical": 0, "near_tie_flips": 0}
    assert len(result.differences) == 2 and len(result.violations) == 1


def test_runs_over_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError):
        check_losslessness(texts((1,), (2,)), {"SD": [texts((1,))]}, lambda *_: 0.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "position"), [((1, 2), (1, 3), 1), ((1,), (2,), 0), ((1, 2), (1,), 1), ((1, 2), (1, 2), 2)]
)
def test_first_difference(ours: tuple[int, ...], theirs: tuple[int, ...], position: int) -> None:
    assert first_difference(ours, theirs) == position


# -------------------------------------------------------------------------------------------------------------- summary


def test_summary_names_the_fastest_measured_policy() -> None:
    comparisons = [
        compare(prediction_of(50.0), prediction_of(50.0), [trace_of([1.0, 1.0], [10, 10])]),
        compare(prediction_of(40.0, SD), prediction_of(40.0, SD), [trace_of([1.0, 1.0], [20, 20], SD)]),
    ]
    nothing = Estimate(0.5, 0.4, 0.6, 2)
    summary = summarize(comparisons, recommended="AR", regret=nothing, lossless=None, speedups={"sd_over_ar": nothing})
    assert (summary["recommended"], summary["best_measured"]) == ("AR", "SD K=4")
    assert summary["lossless"] is None
    assert summary["regret"] == {"value": 0.5, "low": 0.4, "high": 0.6}


def test_interval_of_one_prompt_is_null_in_json() -> None:
    assert interval(Estimate(2.0, -math.inf, math.inf, 1)) == {"value": 2.0, "low": None, "high": None}
    assert interval(None) is None


def test_duplicated_prompt_leaves_the_interval_of_one_prompt() -> None:
    # Repeats of the same prompts add no prompt: the interval stays where it was.
    once = compare(prediction_of(1.0), prediction_of(1.0), [trace_of([1, 2, 3], [10, 10, 10])])
    thrice = compare(prediction_of(1.0), prediction_of(1.0), [trace_of([1, 2, 3], [10, 10, 10])] * 3)
    assert once.tokens_per_s == replace(thrice, repeats=1).tokens_per_s
