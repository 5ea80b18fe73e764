"""The law of a round by the place where it starts: totals, samples, the ends of texts, n-grams, doubt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.ngram import ngram_proposal
from sim.policy import Drafting, Fallback, Proposer, Speculative, SpeculativeSpeculative
from sim.replay import Replay
from sim.round_law import RoundLaw
from sim.trace import Source
from tests.sim.plain_rounds import plain_rounds
from tests.sim.toy import cut_at, markov, record_of, scripted_record, workload_of


def law_of(record, drafting: Drafting, cap: int | None = None) -> RoundLaw:
    return RoundLaw(Replay(record, workload_of(record, cap)), drafting)


def ssd(K: int, F: int, fallback: Fallback = Fallback.DRAFT, downweight: float = 1.0) -> SpeculativeSpeculative:
    after_miss = (F,) * (K + 1) if fallback is not Fallback.NONE else (F,)
    return SpeculativeSpeculative(K, (F,) * (K + 1), after_miss, fallback, downweight)


@st.composite
def draftings(draw):
    proposer = draw(st.sampled_from(list(Proposer)))
    K = draw(st.integers(0, 5))
    fan_out = tuple(draw(st.lists(st.integers(0, 5), min_size=K + 1, max_size=K + 1)))
    downweight = draw(st.sampled_from((1.0, 0.5, 0.2))) if proposer is Proposer.DRAFT_MODEL else 1.0
    return Drafting(proposer, K, draw(st.sampled_from(((), fan_out))), Source.HIT, downweight)


def ragged_record(seed: int, num_prompts: int = 4, length: int = 12):
    """Texts of several lengths: token 3 ends them, but not the first one of each."""
    record = record_of(*markov(seed), num_prompts=num_prompts, length=length, seed=seed + 1)
    return cut_at(record, 3)


# ------------------------------------------------------------------------------------------------------------- totals


@settings(max_examples=80, deadline=None, derandomize=True)
@given(drafting=draftings(), seed=st.integers(0, 30), cap=st.integers(1, 12))
def test_every_round_ends_somehow(drafting, seed, cap):
    record = ragged_record(seed)
    law = law_of(record, drafting, cap)
    K = drafting.num_drafted
    assert law.ended.shape == (K + 1, *law.left.shape)
    assert law.ended.min() >= -1e-12
    assert np.allclose(law.ended.sum(0), 1)
    k = np.arange(K + 1)[:, None, None]
    assert not law.ended[k > np.minimum(law.num_drafted, law.left)].any(), "no more than drafted, or than there are"
    assert (law.num_drafted <= np.maximum(0, cap - law.starts - 1)).all()
    assert ((law.hits >= 0) & (law.hits <= 1)).all()
    going = np.stack([law.goes_on(count) for count in range(K + 1)])
    assert not law.hits[~going].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_follow_the_law(temperature):
    """Frequencies of accept counts and hits over 20,000 pairs of uniform numbers, at every start, in five draftings:
    fewer than 1,000 comparisons at 5 standard errors (and 3 counts, for rare ones): a false alarm has p < 1e-3."""
    num = 20_000
    record = record_of(*markov(3), num_prompts=3, length=8, seed=5, temperature=temperature)
    record = cut_at(record, 3) if temperature else record
    uniforms = np.random.default_rng(0).random((2, num, 3, 8))
    policies = [Speculative(3), ssd(3, 2), *(ssd(2, 1, fallback) for fallback in (Fallback.NGRAM, Fallback.FILLER))]
    policies += [ssd(3, 2, downweight=0.4)] if temperature else []
    for policy in policies:
        law = law_of(record, policy.drafting(Source.MISS))
        rounds = law.sampler.sample(*uniforms)
        probabilities = [*law.ended, (law.ended * law.hits).sum(0)]
        seen = [*((rounds.num_accepted == k) for k in range(len(law.ended))), rounds.is_prepared]
        for probability, events in zip(probabilities, seen, strict=True):
            error = np.sqrt(probability * (1 - probability) / num)
            assert (abs(events.mean(0) - probability) <= 5 * error + 3 / num).all()
        moved = law.ended[0] + 0.05
        assert (abs(seen[0].mean(0) - moved) > 5 * np.sqrt(0.25 / num) + 3 / num).any(), "a law that is off by .05"


@settings(max_examples=120, deadline=None, derandomize=True)
@given(drafting=draftings(), seed=st.integers(0, 30), cap=st.integers(1, 12), variants=st.sampled_from(((), (3,))))
def test_the_sampler_gives_the_rounds_of_the_definition(drafting, seed, cap, variants):
    """Bit for bit, at every place where a round can start, with and without further axes."""
    law = law_of(ragged_record(seed), drafting, cap)
    uniforms = np.random.default_rng(seed).random((2, *variants, 4, 12))
    sampled, plain = law.sampler.sample(*uniforms), plain_rounds(law, *uniforms)
    np.testing.assert_array_equal(sampled.num_accepted, plain.num_accepted)
    np.testing.assert_array_equal(sampled.is_prepared, plain.is_prepared)
    assert sampled.num_accepted.shape == sampled.is_prepared.shape == (*variants, *law.left.shape)


def test_accept_counts_of_long_speculations_fit():
    """K = 300, all accepted."""
    law = law_of(scripted_record(1.0, num_prompts=1, length=400), Speculative(300).drafting(Source.SYNCHRONOUS))
    assert law.sampler.sample(*np.full((2, 1, 400), 0.5)).num_accepted[0, 1] == 300


def test_equal_uniforms_are_equal_luck_under_every_policy():
    """A token is accepted or not by its own number, wherever the round began: the policies differ only in their law."""
    record = scripted_record(0.5, num_prompts=1, length=9)
    uniforms = np.random.default_rng(1).random((2, 1, 9))
    accepted = uniforms[0, 0] < 0.5
    rounds = law_of(record, Speculative(3).drafting(Source.SYNCHRONOUS)).sampler.sample(*uniforms)
    for start in range(1, 9):
        run = next((n for n, yes in enumerate(accepted[start : start + 3]) if not yes), 3)
        assert rounds.num_accepted[0, start] == min(run, 9 - start - 1)


# --------------------------------------------------------------------------------------------------------------- ends


def test_the_cap_keeps_a_place_for_the_bonus_token():
    """Acceptance .5, 6 tokens, K = 3: a round that starts with 4 emitted drafts one token, one with 5 drafts none."""
    law = law_of(scripted_record(0.5, num_prompts=1, length=6), ssd(3, 2).drafting(Source.HIT))
    assert law.num_drafted[0].tolist() == [3, 3, 3, 2, 1, 0]
    assert law.ended[:, 0, 2].tolist() == [0.5, 0.25, 0.125, 0.125]
    assert law.ended[:, 0, 3].tolist() == [0.5, 0.25, 0.25, 0]
    assert law.ended[:, 0, 5].tolist() == [1, 0, 0, 0]
    assert [law.goes_on(k)[0, 3] for k in range(3)] == [True, True, False]
    assert law.hits[2, 0, 3] == 0, "what does not go on is not looked up"


def test_a_stop_token_among_the_drafts_ends_the_sequence():
    """A text of 4 tokens under a cap of 9, K = 3, acceptance .5: from 2 emitted tokens, two accepted ones end it."""
    record = scripted_record(0.5, num_prompts=1, length=4)
    record = replace(record, identity=record.identity | {"max_new_tokens": 9}, stopped=np.array([True]))
    law = law_of(record, ssd(3, 2).drafting(Source.HIT))
    assert law.num_drafted[0].tolist() == [3, 3, 3, 3]
    assert law.ended[:, 0, 2].tolist() == [0.5, 0.25, 0.25, 0]
    assert law.ended[:, 0, 3].tolist() == [0.5, 0.5, 0, 0]
    assert [bool(law.goes_on(k)[0, 2]) for k in range(3)] == [True, False, False]
    certain = law.sampler.sample(np.zeros((2, 1, 4)), np.zeros((2, 1, 4)))
    assert certain.num_accepted[0, 0].tolist() == [3, 3, 2, 1]


def test_the_bonus_token_after_all_drafts_is_not_left_out_of_anything():
    """Rank 2, F = 2, the rejected token always before x: prepared after a rejection, not after a full acceptance."""
    record = scripted_record(0.5, num_prompts=1, length=9, rank=2)
    law = law_of(replace(record, overlap=np.full(9, 0.3)), ssd(2, 2).drafting(Source.HIT))
    assert law.hits[:, 0, 2].tolist() == [1, 1, 0]


# ------------------------------------------------------------------------------------------------------------- n-gram


@pytest.mark.parametrize("cap", [12, 7])
@pytest.mark.parametrize("K", [1, 4])
def test_every_start_has_its_own_proposal(K, cap):
    """Against the definition at every start: length, acceptance of each token, hits at every fan-out."""
    record = ragged_record(2, num_prompts=12)
    rank_of = [{int(t): r for r, t in enumerate(row)} for row in record.top_token]
    rows = {(int(p), int(i)): n for n, (p, i) in enumerate(zip(record.prompt, record.position, strict=True))}
    num_tested = 0
    for F in range(5):
        law = law_of(record, Drafting(Proposer.NGRAM, K, (F,) * (K + 1), Source.MISS), cap)
        for prompt in range(record.num_prompts):
            text = record.text(prompt)[:cap]
            for start in range(1, len(text)):
                known = (*record.prompt_tokens[prompt], *text[:start])
                proposal = ngram_proposal(known, min(K, cap - start - 1))
                assert law.num_drafted[prompt, start] == len(proposal)
                k = next((j for j, y in enumerate(proposal) if text[start + j :][:1] not in ((), (y,))), len(proposal))
                k = min(k, len(text) - start)
                assert law.ended[:, prompt, start].tolist() == [float(count == k) for count in range(K + 1)]
                if start + k + 1 >= len(text):
                    continue
                num_tested += 1
                row = rows[prompt, start + k]
                left_out = proposal[k] if k < len(proposal) else None
                prepared = [t for t in sorted(rank_of[row], key=rank_of[row].get) if t != left_out][:F]
                assert law.hits[k, prompt, start] == (text[start + k] in prepared)
    assert num_tested > 50


def test_a_proposal_is_kept_to_its_end():
    """From one token on, 4 5 9 follows 1 2 3; from two on, 6 follows the more recent 2 3 4: token 5 depends on where
    the round began."""
    text = np.array([3, 4, 5, 7, 8, 8, 8, 8])
    record = replace(
        scripted_record(0.5, num_prompts=1, length=8, prompt_length=12),
        token=text,
        prompt_tokens=((1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2),),
    )
    law = law_of(record, Drafting(Proposer.NGRAM, 3, (1,) * 4, Source.MISS))
    assert law.ended[:, 0, 1].tolist() == [0, 0, 1, 0]
    assert law.ended[:, 0, 2].tolist() == [1, 0, 0, 0]


def test_a_source_without_an_ngram_needs_no_prompts():
    record = replace(record_of(*markov(1), num_prompts=2, length=6, seed=1), prompt_tokens=())
    policy = ssd(2, 1, Fallback.NGRAM)
    law_of(record, policy.drafting(Source.HIT))
    with pytest.raises(BadInput, match="prompt_tokens: must be recorded"):
        law_of(record, policy.drafting(Source.MISS))


# -------------------------------------------------------------------------------------------------------------- doubt


def few_candidates(seed: int, num_candidates: int | None):
    return record_of(*markov(seed), num_prompts=20, length=12, seed=seed, num_candidates=num_candidates)


@pytest.mark.parametrize("policy", [ssd(3, 2, downweight=0.3), ssd(3, 1, downweight=0.8), ssd(2, 2, Fallback.FILLER)])
def test_doubt_bounds_the_error_of_the_mean_hit_rate(policy, monkeypatch):
    """Over the look-ups of rounds from every start, against the record that holds the whole vocabulary."""
    monkeypatch.setattr("sim.round_law.LARGEST_DOUBT", 1.0)
    drafting = policy.drafting(Source.MISS)
    doubts = []
    for seed in range(12):
        whole, partial = (law_of(few_candidates(seed, M), drafting) for M in (None, 3))
        assert whole.doubt == 0
        assert np.allclose(whole.ended, partial.ended, rtol=0, atol=1e-14), "acceptance is known exactly"
        looked_up = np.stack([whole.ended[k] * whole.goes_on(k) for k in range(len(whole.ended))])[:, :, 1:]
        rates = [(looked_up * law.hits[:, :, 1:]).sum() / looked_up.sum() for law in (whole, partial)]
        assert abs(rates[0] - rates[1]) <= partial.doubt + 1e-12
        doubts.append(partial.doubt)
    assert max(doubts) > 0.001


def test_a_law_with_too_much_doubt_is_refused():
    """Pair 5: +-.026 with three candidates."""
    law = law_of(few_candidates(5, 3), ssd(3, 2, downweight=0.3).drafting(Source.HIT))
    for ask in (lambda: law.doubt, lambda: law.hits, lambda: law.sampler):
        with pytest.raises(BadInput, match=r"hit rate at downweight 0\.3: must be known to within 0\.01; 3 candidates"):
            ask()
    with pytest.raises(BadInput, match="hit rate with a filler: must be known"):
        _ = law_of(few_candidates(5, 2), ssd(3, 2, Fallback.FILLER).drafting(Source.MISS)).hits


@pytest.mark.parametrize(
    "drafting",
    [
        Speculative(3).drafting(Source.SYNCHRONOUS),
        ssd(3, 2).drafting(Source.HIT),
        ssd(2, 2, Fallback.NGRAM).drafting(Source.MISS),
    ],
    ids=["sd", "ssd", "ngram"],
)
def test_nothing_is_open_where_tokens_come_from_q_or_a_look_up(drafting):
    assert law_of(few_candidates(4, 3), drafting).doubt == 0


def test_a_full_list_needs_one_more_candidate_when_it_is_down_weighted():
    """The list of the last accept count is not: no token is drawn there."""
    record = few_candidates(4, 4)
    law_of(record, Drafting(Proposer.DRAFT_MODEL, 1, (3, 4), Source.HIT, 0.9)).prepared(1, 4)
    with pytest.raises(BadInput, match="fan-out: must be <= 3"):
        law_of(record, Drafting(Proposer.DRAFT_MODEL, 1, (4, 4), Source.HIT, 0.9))
