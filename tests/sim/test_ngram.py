"""Prompt look-up against its definition, and the proposals of all rounds of a text at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.ngram import NgramProposals, continuations, ngram_proposal

texts = st.lists(st.integers(0, 3), min_size=1, max_size=24).map(tuple)


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "proposal"),
    [
        ((1, 2, 3, 4, 9, 1, 2, 3), 2, (4, 9)),
        ((1, 2, 3, 4, 9, 1, 2, 3), 9, (4, 9, 1, 2, 3)),  # runs on into the suffix, ends with the last known token
        ((1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3), 1, (7,)),  # three tokens go before a later match of two
        ((2, 3, 8, 2, 3, 9, 1, 2, 3), 1, (9,)),  # the most recent of equal matches
        ((5, 3, 8, 1, 2, 3), 1, (8,)),  # one token
        ((4, 4), 3, (4,)),
        ((4, 4, 4, 4), 3, (4,)),  # an occurrence that shares tokens with the suffix
        ((1, 2, 3), 3, ()),
        ((1,), 3, ()),
        ((), 3, ()),
        ((1, 1), 0, ()),
    ],
)
def test_proposals(tokens, num_tokens, proposal):
    assert ngram_proposal(tokens, num_tokens) == proposal


def test_longest_suffix_is_a_setting():
    tokens = (1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3)
    assert [ngram_proposal(tokens, 1, longest) for longest in (1, 2, 3)] == [(8,), (8,), (7,)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens=texts, longest=st.integers(1, 4))
def test_one_pass_finds_what_every_single_look_up_finds(tokens, longest):
    begins = continuations(tokens, 1, longest)
    assert len(begins) == len(tokens)
    for known, begin in enumerate(begins, start=1):
        assert tokens[begin:known] == ngram_proposal(tokens[:known], len(tokens), longest)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_tables_hold_the_proposal_of_every_start(pairs):
    prompts, generated = zip(*pairs, strict=True)
    proposals = NgramProposals(prompts, generated)
    assert proposals.lengths.shape == (len(pairs), max(map(len, generated)))
    for prompt, (before, text) in enumerate(pairs):
        for start in range(len(text)):
            expected = ngram_proposal((*before, *text[:start]), 50)
            assert proposals.lengths[prompt, start] == len(expected)
            at = np.array([prompt]), np.array([start])
            assert tuple(int(proposals.token(*at, j)[0]) for j in range(len(expected))) == expected
