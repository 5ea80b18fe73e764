"""The replay law against the real SD/SSD process, token by token, on a Markov pair whose law is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.policy import Fallback, SpeculativeSpeculative
from sim.recursion import expectations
from tests.sim.toy import VOCABULARY, draw, markov, ranks, record_of, system_of, workload_of

LENGTH = 13
NUM_REAL = 2500  # sequences of the real process
NUM_RECORDED = 4000  # sequences of the record


def real_process(p, q, policy: SpeculativeSpeculative, num_sequences: int, seed: int) -> dict[str, np.ndarray]:
    """SSD run for real: drafts are drawn from q, verified against p; hits are looked up in the prepared top lists."""
    rng = np.random.default_rng(seed)
    rank = [ranks(row) for row in q]
    rounds, hits, lookups = np.zeros((3, num_sequences))
    for n in range(num_sequences):
        previous, emitted = draw(rng, p[0]), 1
        is_hit = False
        while emitted < LENGTH:
            fan_out = policy.fan_out_after_hit if is_hit else policy.fan_out_after_miss
            num_drafted = policy.speculation_length if is_hit else policy.num_drafted_after_miss
            num_drafted = min(num_drafted, LENGTH - emitted - 1)
            k, prepared = 0, None
            while True:
                if k == num_drafted:
                    bonus = draw(rng, p[previous])
                    prepared = rank[previous][bonus] < fan_out[k]
                    break
                y = draw(rng, q[previous])
                if rng.random() < p[previous, y] / q[previous, y]:
                    previous, k = y, k + 1
                    continue
                bonus = draw(rng, np.maximum(0, p[previous] - q[previous]))
                others = [x for x in np.argsort(rank[previous]) if x != y]
                prepared = bonus in others[: fan_out[k]]
                break
            previous = bonus
            emitted += k + 1
            rounds[n] += 1
            if emitted < LENGTH:
                lookups[n] += 1
                hits[n] += prepared
                is_hit = prepared
    return {"rounds": rounds, "hits": hits, "lookups": lookups}


def difference_in_errors(real: np.ndarray, predicted: np.ndarray) -> float:
    """|difference of means| over its standard error; both samples are independent sequences."""
    error = np.hypot(real.std() / np.sqrt(len(real)), predicted.std() / np.sqrt(len(predicted)))
    return abs(real.mean() - predicted.mean()) / error


POLICIES = [
    SpeculativeSpeculative(3, (2, 1, 1, 2), (1, 1, 0, 2), Fallback.DRAFT),
    SpeculativeSpeculative(2, (1, 0, 3), (3,), Fallback.NONE),
    SpeculativeSpeculative(4, (3, 2, 2, 1, 1), (2, 2, 2, 2, 2), Fallback.DRAFT),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("pair_seed", [1, 2])
def test_replay_law_is_the_real_process(policy, pair_seed):
    """Rounds, look-ups and hits per sequence. 18 comparisons at 4.5 standard errors: a false alarm has p < 2e-4."""
    p, q = markov(pair_seed)
    real = real_process(p, q, policy, NUM_REAL, seed=10 + pair_seed)
    record = record_of(p, q, num_prompts=NUM_RECORDED, length=LENGTH, seed=20 + pair_seed)
    replay = expectations([policy], workload_of(record), system_of(record))[0]
    assert difference_in_errors(real["rounds"], replay.num_rounds) < 4.5
    assert difference_in_errors(real["lookups"], replay.num_lookups.sum(0)) < 4.5
    assert difference_in_errors(real["hits"], replay.num_hits.sum(0)) < 4.5


def test_a_law_that_forgets_the_rejected_token_is_told_apart():
    """Negative control: without leaving y out of the prepared tokens the hits differ from the real process."""
    p, q = markov(1)
    policy = POLICIES[2]
    real = real_process(p, q, policy, NUM_REAL, seed=11)
    record = record_of(p, q, num_prompts=NUM_RECORDED, length=LENGTH, seed=21)
    forgetful = replace(record, top_p=record.top_q)  # (q - p)+ vanishes: y never stands before x
    replay = expectations([policy], workload_of(record), system_of(forgetful))[0]
    assert difference_in_errors(real["hits"], replay.num_hits.sum(0)) > 10


def test_hit_after_rejection_by_enumeration():
    """Against the definition: P(x in the top F of q without y) over the law (q - p)+ of y, for every F."""
    p, q = markov(5)
    record = record_of(p, q, num_prompts=3, length=8, seed=3)
    previous = np.where(record.position == 0, 0, np.roll(record.token, 1))
    for fan_out in range(VOCABULARY):
        expected = []
        for row, x in zip(previous, record.token, strict=True):
            law = np.maximum(0, q[row] - p[row])
            order = np.argsort(ranks(q[row]))
            inside = [x in [t for t in order if t != y][:fan_out] for y in range(VOCABULARY)]
            can_follow_rejection = p[row, x] > q[row, x]
            expected.append(float(law @ inside / law.sum()) if can_follow_rejection else np.nan)
        known = ~np.isnan(expected)
        assert np.allclose(record.hit_after_rejection(fan_out)[known], np.array(expected)[known])


def test_greedy_acceptance_is_agreement_of_the_argmax():
    record = record_of(*markov(1), num_prompts=2, length=5, seed=1)
    greedy = replace(record, identity={**record.identity, "temperature": 0.0})
    assert np.array_equal(greedy.acceptance, (record.rank == 0).astype(float))
    assert np.array_equal(greedy.hit_after_rejection(2), (record.rank <= 2).astype(float))
    assert not greedy.hit_after_rejection(0).any()


def test_round_trip(tmp_path):
    record = record_of(*markov(2), num_prompts=3, length=5, seed=1)
    record.write(tmp_path / "agreement.parquet")
    read = AgreementRecord.read(tmp_path / "agreement.parquet")
    for name, value in record.__dict__.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, getattr(read, name)), name
    assert read.identity == record.identity


def test_select_repeats_and_reorders_prompts():
    record = record_of(*markov(2), num_prompts=3, length=5, seed=1)
    sample = record.select(np.array([2, 2, 0]))
    assert sample.num_prompts == 3
    assert np.array_equal(sample.token[:5], record.token[10:])
    assert np.array_equal(sample.token[5:10], record.token[10:])
    assert np.array_equal(sample.token[10:], record.token[:5])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("log_q", np.nan, "log_q, row 2: must be finite"),
        ("overlap", np.inf, "overlap"),
        ("overlap", 3.0, "overlap, row 2: must be in 0"),
        ("log_p", 0.5, "log_p, row 2: must be in -inf"),
        ("rank", -1, "rank, row 2: must be in 0"),
        ("prompt", 5, "prompt_length: must have one entry per prompt"),
    ],
)
def test_impossible_values_are_refused(column, value, message):
    record = record_of(*markov(2), num_prompts=1, length=5, seed=1)
    broken = getattr(record, column).copy()
    broken[2] = value
    with pytest.raises(BadInput, match=message):
        replace(record, **{column: broken})


def test_a_fan_out_beyond_the_recorded_candidates_is_refused():
    record = record_of(*markov(2), num_prompts=1, length=5, seed=1)
    with pytest.raises(BadInput, match=f"must be <= {VOCABULARY}"):
        record.hit_after_acceptance(VOCABULARY + 1)
