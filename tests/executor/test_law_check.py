"""The check of the emitted law tells right from wrong, and states its error rates truly."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from executor.law_check import CASES, CONTROLS, FALSE_ALARM, Case, check_law, decode, law_of, threshold
from sim.policy import Speculative
from sim.trace import Source
from sim.workload import Sampling

NUM_TRIALS = 150  # few: strong faults are caught with these


def verdict_of(case: Case, num_trials: int = NUM_TRIALS):
    (verdict,) = check_law([case], num_trials)
    return verdict


def named(cases, part: str) -> Case:
    return next(case for case in cases if part in case.name)


@pytest.mark.parametrize("part", ["table", "batches of five settings", "batches of two temperatures"])
def test_what_is_lossless_passes(part: str) -> None:
    case = named(CASES, part)
    verdict = verdict_of(case, 75)
    assert verdict.is_right and not case.is_control
    assert [c.setting for c in verdict.comparisons] == list(case.settings)


@pytest.mark.parametrize("part", ["SD: argmax drawn", "every draft token accepted"])
def test_what_is_wrong_is_caught_and_left_as_it_was(part: str) -> None:
    control = named(CONTROLS, part)
    assert verdict_of(control).is_right
    # The same case without its fault is lossless, so the control would not pass for caught.
    assert not verdict_of(replace(control, fault=lambda: nullcontext())).is_right


def test_the_cases_are_what_their_names_say() -> None:
    def sources(part):
        return {r.source for r in decode(named(CASES, part), 40).rounds if r.index > 0}

    assert sources("every look-up hits") == {Source.HIT}
    assert sources("every look-up misses") == {Source.MISS}
    assert sources("SSD, hits and misses, draft") == {Source.HIT, Source.MISS}
    assert sources("SSD, batches of 3, draft") >= {Source.REDRAFTED}
    policies = {r.policy for r in decode(named(CASES, "table"), 40).rounds}
    assert {policy.split()[0] for policy in policies} == {"AR", "SD", "SSD"}
    names = [case.name for case in (*CASES, *CONTROLS)]
    assert len(set(names)) == len(names)


def test_a_law_sums_to_one_and_knows_the_settings() -> None:
    plain, greedy, cut = (law_of(setting) for setting in (Sampling(1.0), Sampling(0.0), Sampling(1.0, top_k=2)))
    for law in (plain, greedy, cut):
        assert law.sum() == pytest.approx(1)
    assert (plain > 0).all() and np.count_nonzero(greedy) == 1 and np.count_nonzero(cut) == 8


def test_the_threshold_is_exceeded_as_rarely_as_it_says() -> None:
    """Fresh draws from the law: of 40,000, 4 are expected above; more than 15 have a probability below 1e-5."""
    setting, num_trials = Sampling(1.0), NUM_TRIALS
    law = law_of(setting)
    drawn = np.random.default_rng(5).multinomial(num_trials, law / law.sum(), size=40_000) / num_trials
    num_above = int((np.abs(drawn - law).sum(1) / 2 > threshold(setting, num_trials)).sum())
    assert pytest.approx(4) == FALSE_ALARM * 40_000
    assert num_above <= 15
    assert threshold(setting, num_trials) < 0.8 * threshold(setting, num_trials // 2)
    assert threshold(Sampling(0.0), num_trials) == pytest.approx(0)


def test_faults_are_put_in_for_one_run_only() -> None:
    before = decode(Case("SD", Speculative(2)), 20).digest()
    verdict_of(named(CONTROLS, "one noise"), 20)
    assert decode(Case("SD", Speculative(2)), 20).digest() == before
