"""The agreement record: the law of one position against its definition, bounds where candidates lack, storage."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import agreement, theory
from sim.agreement import PLAIN, AgreementRecord
from sim.errors import BadInput
from sim.policy import Drafting, Proposer
from sim.trace import Source
from tests.sim.toy import VOCABULARY, markov, ranks, record_of

FILLER = Drafting(Proposer.FILLER, 2, (1, 1, 1), Source.MISS)
NGRAM = Drafting(Proposer.NGRAM, 2, (1, 1, 1), Source.MISS)


def downweighting(num_tokens: int, downweight: float) -> Drafting:
    """q' has `num_tokens` >= 2 tokens down-weighted, whatever is prepared."""
    return Drafting(Proposer.DRAFT_MODEL, 1, (num_tokens - 1, 0), Source.HIT, downweight)


def at_one_place(p: np.ndarray, q: np.ndarray, num_candidates: int | None = None) -> AgreementRecord:
    """A record whose row x says what follows if token x is committed, p and q being the same everywhere."""
    V = len(p)
    order = np.argsort(-q, kind="stable")[:num_candidates]
    return AgreementRecord(
        identity={"temperature": 1.0, "max_new_tokens": V, "vocab_size": V},
        prompt_length=np.array([1]),
        stopped=np.array([False]),
        prompt=np.zeros(V, dtype=int),
        position=np.arange(V),
        token=np.arange(V),
        log_p=np.log(p),
        log_q=np.log(q),
        rank=ranks(q),
        overlap=np.full(V, np.minimum(p, q).sum()),
        top_token=np.tile(order, (V, 1)),
        top_p=np.tile(p[order], (V, 1)),
        top_q=np.tile(q[order], (V, 1)),
    )


def hit_given_rejection(p, q, sampled, fan_out: int, drafting: Drafting) -> float:
    """By the record's law, over the residual's law of x."""
    low, high = at_one_place(p, q).bounds_after_rejection(fan_out, 0, drafting)
    assert np.array_equal(low, high)
    return float(np.array(theory.residual_of(p, sampled)) @ low)


# -------------------------------------------------------------------------------------------- the law of one position


@pytest.mark.parametrize("downweight", [1.0, 0.5, 0.2, "filler"])
@pytest.mark.parametrize("pair_seed", [1, 5])
def test_hit_after_rejection_by_enumeration(pair_seed, downweight):
    """Against the definition: P(x in the top F of q without y) over the law (r - p)+ of y, for every F and number of
    down-weighted tokens; r = q', or 1/V of a filler."""
    laws, draft_laws = markov(pair_seed)
    for p, q in zip(laws, draft_laws, strict=True):
        record, order = at_one_place(p, q), np.argsort(ranks(q))
        for num in range(2, VOCABULARY + 1):
            sampled = np.full(VOCABULARY, 1 / VOCABULARY)
            if downweight != "filler":
                sampled = np.array(theory.downweighted(q, num, downweight))
            drafting = FILLER if downweight == "filler" else downweighting(num, downweight)
            assert np.allclose(record.acceptance_table(0, drafting)[0], np.minimum(1, sampled / p))
            law = np.maximum(0, sampled - p)
            can_follow_rejection = p > sampled
            for fan_out in range(VOCABULARY):
                inside = [[x in [t for t in order if t != y][:fan_out] for y in order] for x in range(VOCABULARY)]
                expected = np.array(inside) @ law[order] / law.sum()
                hits = record.hit_table(fan_out, 0, drafting, rejected=True)[0]
                assert np.allclose(hits[can_follow_rejection], expected[can_follow_rejection])
                assert not record.doubt_table(fan_out, 0, drafting).any()


def test_the_counter_example_to_theorem_15_comes_out_of_the_record():
    """Weights (10, 1, .999, .01), p = (.70, .10, .15, .05), F = 2: not monotone in C if the top 2 are down-weighted,
    monotone with the top 3, which is what a policy does."""
    p, weights = np.array([0.70, 0.10, 0.15, 0.05]), np.array([10, 1, 0.999, 0.01])
    q = weights / weights.sum()

    def hits(num_tokens: int) -> list[float]:
        return [
            hit_given_rejection(p, q, theory.downweighted(q, num_tokens, C), 2, downweighting(num_tokens, C))
            for C in (1.0, 0.6, 0.5, 0.3, 0.1)
        ]

    assert hits(2) == pytest.approx([0.629, 0.450, 0.324, 0.417, 0.860], abs=6e-4)
    assert hits(3) == pytest.approx([0.6295, 0.632, 0.634, 0.640, 0.670], abs=6e-4)
    assert hits(3) == sorted(hits(3))
    assert Drafting(Proposer.DRAFT_MODEL, 1, (2, 2), Source.HIT, 0.5).num_downweighted(0) == 3


def test_the_example_of_theorem_19_comes_out_of_the_record():
    p, q = np.array([0.48, 0.48, 0.02, 0.02]), np.array([0.49, 0.49, 0.01, 0.01])
    for C, hit in ((1.0, 0.5), (47 / 147, 1.0)):
        sampled, drafting = theory.downweighted(q, 2, C), downweighting(2, C)
        assert p @ at_one_place(p, q).acceptance_table(0, drafting)[0] == pytest.approx(0.98)
        assert hit_given_rejection(p, q, sampled, 2, drafting) == pytest.approx(hit)


def test_greedy_acceptance_is_agreement_of_the_argmax():
    record = record_of(*markov(1), num_prompts=2, length=5, seed=1)
    greedy = replace(record, identity={**record.identity, "temperature": 0.0})
    assert np.array_equal(greedy.acceptance, (record.rank == 0).astype(float))
    assert np.array_equal(greedy.hit_after_rejection(2), (record.rank <= 2).astype(float))
    assert not greedy.hit_after_rejection(0).any()


def test_a_greedy_filler_is_right_once_in_the_vocabulary():
    """Accepted with 1/V; a rejected token is any of the other V - 1, F of which stand before x at rank F."""
    greedy = record_of(*markov(1), num_prompts=4, length=9, seed=1, temperature=0.0)
    assert np.allclose(greedy.acceptance_table(0, FILLER), 1 / VOCABULARY)
    rank = greedy.rank.reshape(4, 9)
    for fan_out in range(1, VOCABULARY):
        expected = np.where(rank < fan_out, 1.0, np.where(rank == fan_out, fan_out / (VOCABULARY - 1), 0.0))
        assert np.allclose(greedy.hit_table(fan_out, 0, FILLER, rejected=True), expected)


# ------------------------------------------------------------------------------------------ what candidates leave open

weights = st.lists(st.floats(0.01, 1), min_size=7, max_size=7).map(
    lambda row: np.array(row) ** 3 / sum(w**3 for w in row)
)
proposals = st.builds(downweighting, st.integers(2, 3), st.floats(0.05, 1)) | st.just(FILLER)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(p=weights, q=weights, drafting=proposals, fan_out=st.integers(1, 3))
def test_the_truth_lies_within_the_doubt(p, q, drafting, fan_out):
    """With M < V candidates the law is an interval around the middle that holds the law of M = V, and it shrinks."""
    truth = at_one_place(p, q).hit_table(fan_out, 0, drafting, rejected=True)
    before = np.full(truth.shape, np.inf)
    for num_candidates in range(3, 8):
        record = at_one_place(p, q, num_candidates)
        middle = record.hit_table(fan_out, 0, drafting, rejected=True)
        doubt = record.doubt_table(fan_out, 0, drafting)
        matters = record.acceptance_table(0, drafting) < 1  # elsewhere x never follows a rejection
        assert (abs(truth - middle) <= doubt + 1e-9)[matters].all()
        assert (doubt <= before + 1e-9).all()
        before = doubt
    assert not doubt.any(), "the candidates cover the vocabulary"


def test_few_candidates_leave_something_open_and_plain_sampling_nothing():
    p, q = np.array([0.3, 0.1, 0.2, 0.1, 0.2, 0.1]), np.array([0.3, 0.25, 0.15, 0.12, 0.1, 0.08])
    record = at_one_place(p, q, 3)
    assert record.doubt_table(2, 0, downweighting(3, 0.3)).max() > 0.01
    assert record.doubt_table(2, 0, FILLER).max() > 0.01
    assert not record.doubt_table(2, 0, PLAIN).any()


@pytest.mark.parametrize(
    ("change", "drafting", "message"),
    [
        ({"temperature": 0.0}, downweighting(2, 0.5), "downweight: must be 1 at temperature 0"),
        ({}, downweighting(5, 0.5), "fan-out: must be <= 3 where .* candidates recorded in the record, got 4"),
        ({"vocab_size": None}, FILLER, "identity.vocab_size: must be recorded"),
        ({"vocab_size": 3}, FILLER, "identity.vocab_size: must be recorded, an integer >= 4"),
        ({}, NGRAM, "prompt_tokens: must be recorded for an n-gram proposal"),
    ],
)
def test_what_a_record_does_not_tell_is_refused(change, drafting, message):
    record = record_of(*markov(1), num_prompts=2, length=5, seed=1, num_candidates=4)
    record = replace(record, identity=record.identity | change, prompt_tokens=())
    for ask in (
        lambda: record.check(drafting),
        lambda: record.acceptance_table(0, drafting),
        lambda: record.hit_table(1, 0, drafting, rejected=True),
    ):
        with pytest.raises(BadInput, match=message):
            ask()
    record.check(PLAIN)


def test_any_number_of_weights_takes_bounded_memory(monkeypatch):
    record = record_of(*markov(1), num_prompts=2, length=5, seed=1)
    monkeypatch.setattr(agreement, "TABLE_BYTES", 80 * 70)
    first = record.acceptance_table(0, downweighting(2, 0.01)).copy()
    for C in np.linspace(0.01, 0.9, 500):
        record.acceptance_table(0, downweighting(2, float(C)))
    assert len(record._tables) == 70
    assert np.array_equal(record.acceptance_table(0, downweighting(2, 0.01)), first)


# ------------------------------------------------------------------------------------------------------------ storage


@pytest.mark.parametrize("with_prompts", [True, False])
def test_round_trip(tmp_path, with_prompts):
    record = record_of(*markov(2), num_prompts=3, length=5, seed=1)
    record = record if with_prompts else replace(record, prompt_tokens=())
    record.write(tmp_path / "agreement.parquet")
    read = AgreementRecord.read(tmp_path / "agreement.parquet")
    for name, value in record.__dict__.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, getattr(read, name)), name
    assert read.identity == record.identity
    assert read.prompt_tokens == record.prompt_tokens


def test_a_file_of_an_earlier_release_is_read(tmp_path):
    """It holds neither prompt tokens nor the vocabulary's size: only what needs them is refused."""
    path = tmp_path / "agreement.parquet"
    record = record_of(*markov(2), num_prompts=3, length=5, seed=1)
    record.write(path)
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"agreement"])
    del header["prompt_tokens"], header["identity"]["vocab_size"]
    pq.write_table(table.replace_schema_metadata({"agreement": json.dumps(header)}), path)
    old = AgreementRecord.read(path)
    assert old.prompt_tokens == ()
    drafting = downweighting(2, 0.5)
    assert np.array_equal(old.acceptance_table(0, drafting), record.acceptance_table(0, drafting))
    for drafting in (FILLER, NGRAM):
        with pytest.raises(BadInput, match=str(path)):
            old.check(drafting)


def test_prompts_of_another_length_are_refused():
    record = record_of(*markov(2), num_prompts=2, length=5, seed=1)
    with pytest.raises(BadInput, match="prompt_tokens: must hold as many tokens"):
        replace(record, prompt_tokens=((1, 2), (3,)))
    with pytest.raises(BadInput, match="prompt_tokens: must hold as many tokens"):
        replace(record, prompt_tokens=record.prompt_tokens[:1])


def test_select_repeats_and_reorders_prompts():
    record = record_of(*markov(2), num_prompts=3, length=5, seed=1)
    sample = record.select(np.array([2, 2, 0]))
    assert sample.num_prompts == 3
    assert np.array_equal(sample.token[:5], record.token[10:])
    assert np.array_equal(sample.token[5:10], record.token[10:])
    assert np.array_equal(sample.token[10:], record.token[:5])
    assert sample.prompt_tokens == tuple(record.prompt_tokens[index] for index in (2, 2, 0))
    assert replace(record, prompt_tokens=()).select(np.array([1])).prompt_tokens == ()


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
