"""An agreement record in numbers: laws that made it are found again, and the numbers add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.summaries import _Visits, parametric, power_law, summarize_agreement
from sim.agreement import AgreementRecord
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.simulate import predict
from sim.trace import Source
from sim.workload import Workload
from tests.experiments.fake_bench import greedy_record
from tests.sim.toy import markov, record_of, system_of, workload_of

ACCEPTANCE, PREFACTOR, EXPONENT = 0.7, 0.6, 0.5
SSD = SpeculativeSpeculative(3, (2, 2, 1, 2), (2, 1, 1, 1))


def power_law_record(num_prompts: int, length: int, seed: int) -> AgreementRecord:
    """Greedy: a draft token is accepted with probability .7; given rejection the committed token stands behind rank F
    with probability .6 F^-.5."""
    record = greedy_record(num_prompts=num_prompts, length=length, prompt_length=4, seed=seed)
    rng = np.random.default_rng(seed)
    n = num_prompts * length
    behind = np.ceil((PREFACTOR / rng.random(n)) ** (1 / EXPONENT)).clip(1, 10**6)
    return replace(record, rank=np.where(rng.random(n) < ACCEPTANCE, 0, behind).astype(np.int64))


def rules(record: AgreementRecord) -> Workload:
    return Workload("fake/prompts.jsonl", ((0,) * 4,) * record.num_prompts, record.max_new_tokens, 0.0)


def test_the_law_that_made_a_record_is_found() -> None:
    """Of 20 records 95 % intervals hold the truth in 15 at least, each; fewer with probability 1e-3."""
    inside = np.zeros(3)
    for seed in range(20):
        record = power_law_record(60, 40, seed)
        summary = summarize_agreement(record, rules(record), SSD)
        curve = next(c for c in summary.curves if c.source is Source.HIT and c.accept_count == 0)
        truths = (ACCEPTANCE, PREFACTOR, EXPONENT)
        found = (summary.acceptance[0], curve.prefactor, curve.exponent)
        inside += [estimate.low <= truth <= estimate.high for truth, estimate in zip(truths, found, strict=True)]
    assert (inside >= 15).all(), inside


@settings(max_examples=60)
@given(
    st.floats(0.05, 1.0),
    st.floats(0.0, 4.0),
    st.lists(st.floats(-0.2, 0.2), min_size=5, max_size=5),
)
def test_the_power_law_is_the_likeliest(prefactor: float, exponent: float, noise: list[float]) -> None:
    """Misses that follow one give it back; of others no neighbour is likelier."""
    log_fan_outs, lookups = np.log([1, 2, 4, 8, 16]), np.array([1000.0])
    exact = lookups[:, None] * prefactor * np.exp(-exponent * log_fan_outs)
    assert power_law(exact, lookups, log_fan_outs)[:, 0] == pytest.approx([prefactor, exponent], abs=1e-5)
    misses = np.minimum(lookups, exact[0] * np.exp(noise))
    best = power_law(misses[None], lookups, log_fan_outs)[:, 0]

    def log_likelihood(c: float, r: float) -> float:
        expected = lookups * c * np.exp(-r * log_fan_outs)
        return float((misses * np.log(expected) - expected).sum())

    for c, r in product((0.99, 1.0, 1.01), (-0.02, 0.0, 0.02)):
        if best[0] * c <= 1 and best[1] + r >= 0:
            assert log_likelihood(best[0] * c, best[1] + r) <= log_likelihood(*best) + 1e-6


def test_without_misses_the_law_has_none() -> None:
    assert power_law(np.zeros((1, 5)), np.array([50.0]), np.log([1, 2, 4, 8, 16]))[0, 0] < 1e-6


@pytest.mark.parametrize(
    "policy", [Autoregressive(), Speculative(3), SSD, replace(SSD, fallback=Fallback.NONE, fan_out_after_miss=(3,))]
)
def test_rounds_are_those_of_the_exact_engine(policy) -> None:
    record = record_of(*markov(3), num_prompts=6, length=14, seed=2)
    workload = workload_of(record)
    expected = predict(policy, workload, system_of(record)).expectation
    visits = _Visits(record, workload, policy)
    assert sum(mass.sum(0) for mass in visits.starts.values()) == pytest.approx(expected.num_rounds)
    if isinstance(policy, SpeculativeSpeculative):
        assert visits.starts[Source.HIT].sum(0) == pytest.approx(expected.num_hits.sum(0))
        shares = {source: 0.0 for source in visits.starts}
        for curve in summarize_agreement(record, workload, policy).curves:
            shares[curve.source] += curve.share
        assert all(share == pytest.approx(1, abs=0.2) for share in shares.values())  # rare accept counts have no curve


def test_where_rounds_are_independent_the_numbers_say_all() -> None:
    """Tokens per round and hit rate of the parametric agreement are those of the replay, up to the curves' fit."""
    record = power_law_record(200, 60, 5)
    workload, system = rules(record), system_of(record)
    replay = predict(SSD, workload, system)
    numbers = predict(
        SSD,
        Workload("parametric", workload.prompts, 60, 0.0),
        replace(system, agreement=parametric(record, workload, SSD)),
    )
    assert numbers.mean_acceptance_length.value == pytest.approx(replay.mean_acceptance_length.value, rel=0.01)
    assert numbers.hit_rate.value == pytest.approx(replay.hit_rate.value, abs=0.03)


def test_where_they_are_not_the_numbers_are_wrong() -> None:
    """Negative control: prompts of which half are always right and half never."""
    record = power_law_record(40, 60, 5)
    never = np.where(np.repeat(np.arange(40) % 2 == 0, 60), 0, 5)
    mixed = replace(record, rank=never)
    workload, system = rules(mixed), system_of(mixed)
    replay = predict(Speculative(6), workload, system).mean_acceptance_length.value
    agreement = replace(parametric(mixed, workload, Speculative(6)), acceptance=(0.5,))
    numbers = predict(
        Speculative(6), Workload("parametric", workload.prompts, 60, 0.0), replace(system, agreement=agreement)
    )
    assert abs(numbers.mean_acceptance_length.value / replay - 1) > 0.05
